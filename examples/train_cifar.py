# SPDX-License-Identifier: Apache-2.0
"""Train a network on CIFAR-10, on any number of processes, with any dist_option.

    python examples/train_cifar.py --cifar-dir cifar                  one process; the folder has the binary files
    singa-lite run -n 2 examples/train_cifar.py --model resnet18      two; without a folder the data are fetched once
    singa-lite run -n 2 examples/train_cifar.py --synthetic           random images, to try it or to measure time
    mpiexec -n 2 python examples/train_cifar.py --cifar-dir cifar     MPI or, with srun, Slurm

Training images are shifted by up to 4 pixels and mirrored at random, in a thread that prepares the next batches while
one trains. Every sample of an epoch is used exactly once and every test image is counted, whatever the number of
processes. Training loss is the sum over batches and ranks of the batch means.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
from model.cnn import CNN
from model.mlp import MLP
from model.resnet import ResNet18, ResNet20

from singa_lite import checkpoint, data, device, opt, tensor

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of all training pixels / 255, by colour
EVAL_BATCH = 250
# name -> (class, largest learning rate for an effective batch of 128)
MODELS = {"cnn": (CNN, 0.01), "mlp": (MLP, 0.01), "resnet20": (ResNet20, 0.1), "resnet18": (ResNet18, 0.1)}


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a network on CIFAR-10")
    parser.add_argument("--model", choices=MODELS, default="resnet20")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--lr", type=float, help="the largest; default 0.1 for ResNets, else 0.01")
    parser.add_argument(
        "--warmup", type=float, default=0.05, help="share of the steps in which lr grows to it"
    )
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--dist-option", default="fp32", help="such as fp16 or sparseTopK:0.01")
    parser.add_argument("--spars", type=float, help="share (sparseTopK) or magnitude (sparseThreshold)")
    parser.add_argument("--threshold", type=int, default=2097152, help="elements per group")
    parser.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, default=True, help="record the steps"
    )
    parser.add_argument(
        "--precision", choices=("float32", "float16", "bf16"), default="float32",
        help="float16: of parameters and gradients, meant for GPUs and slow elsewhere; bf16: mixed",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cifar-dir", help="folder of the binary files, unpacked or as cifar-10-binary.tar.gz"
    )
    parser.add_argument(
        "--synthetic", type=int, nargs="?", const=5000, metavar="COUNT",
        help="random images instead: COUNT to train on, a fifth of it to test on",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/cifar"), help="folder for plot and checkpoint")
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", default=os.environ.get("SINGA_LITE_CHECKPOINT"),
        help="go on from the newest checkpoint there, and save there; `singa-lite run --checkpoint` names it too",
    )  # fmt: skip
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS", help="and after every epoch")
    arguments = parser.parse_args()
    arguments.dtype = "float16" if arguments.precision == "float16" else "float32"  # of the images
    if min(arguments.epochs, arguments.batch_size, arguments.save_every) < 1:
        parser.error("--epochs, --batch-size and --save-every must be at least 1")
    if not 0 <= arguments.warmup <= 1:
        parser.error("--warmup must be from 0 to 1")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    return arguments


class WarmupCosine(opt.DecayScheduler):
    """Up to ``peak`` in a straight line, then down to 0 along half a cosine; ``ahead`` steps later than it is asked."""

    def __init__(self, peak, warmup_steps, steps, ahead=0):
        super().__init__(peak)
        self.warmup_steps, self.steps, self.ahead = warmup_steps, steps, ahead

    def call(self, step):
        step += self.ahead
        if step < self.warmup_steps:
            return self.init_value * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.init_value * (1 + math.cos(math.pi * min(1.0, done))) / 2


def main():
    arguments = parse_arguments()
    make_model, lr = MODELS[arguments.model]
    lr = lr if arguments.lr is None else arguments.lr
    sgd = opt.SGD(lr=lr, momentum=arguments.momentum, weight_decay=arguments.weight_decay)
    sgd = opt.DistOpt(sgd, threshold=arguments.threshold)
    dev = device.create_device(sgd.local_rank)
    cifar = load_data(arguments)
    sampler = data.ShardedSampler(
        len(cifar.train_labels), arguments.batch_size, sgd.global_rank, sgd.world_size, seed=arguments.seed
    )
    steps = len(sampler) * arguments.epochs  # known only now that the ranks have met
    sgd.opt.lr = WarmupCosine(lr, round(arguments.warmup * steps), steps)

    dev.SetRandSeed(arguments.seed)
    model = make_model()
    model.set_optimizer(sgd)
    inputs = tensor.Tensor((arguments.batch_size, 3, 32, 32), dev, arguments.dtype)
    precision = "bf16" if arguments.precision == "bf16" else "fp32"
    model.compile([inputs], use_graph=arguments.graph, precision=precision)
    is_first = sgd.global_rank == 0
    if is_first:
        print(
            f"world size {sgd.world_size}, transport {sgd.communicator.world.transport}, device {dev}, "
            f"effective batch {arguments.batch_size} x {sgd.world_size} = {arguments.batch_size * sgd.world_size}, "
            f"dist_option {arguments.dist_option}, reduction mean over ranks, seed {arguments.seed}"
        )
        source = "random images, not CIFAR-10" if arguments.synthetic is not None else "CIFAR-10"
        print(f"model {arguments.model}, data {source}{cifar.note and ': ' + cifar.note}", flush=True)

    history = []
    if arguments.checkpoint:
        sgd.stop_on_signals()
        job = checkpoint.load_job(arguments.checkpoint, model, sampler=sampler)
        if job:
            history = job.extra["history"]
            before, ahead = job.extra.get("schedule", (steps, 0))
            if before != steps:  # other ranks, of which an epoch has another number of steps
                ahead = round(share_done(sampler, arguments) * steps) - sgd.step_counter
            sgd.opt.lr.ahead = ahead
            if is_first:
                print(f"Going on from step {job.step}", flush=True)
                if sampler.state_dict()["start"] + sampler.position:
                    print("Figures of this epoch will be those of what is left of it", flush=True)
    for epoch in range(sampler.epoch, arguments.epochs):
        if is_first:
            print(f"Starting Epoch {epoch}:", flush=True)
        start = time.perf_counter()
        loss, correct, trained, sent = train_epoch(model, sgd, dev, cifar, sampler, arguments, history)
        if sampler.epoch == epoch:  # all ranks have left it after the same step
            if is_first:
                print(f"Stopped at step {sgd.step_counter}, as asked", flush=True)
            return
        seconds = time.perf_counter() - start
        sgd.synchronize(model)  # the running statistics of batch norm are each rank's own
        tested = evaluate(model, dev, cifar, sgd, arguments)
        loss, correct, trained, tested = sum_over_ranks([loss, correct, trained, tested], sgd)
        history.append((loss, correct / trained, tested / len(cifar.test_labels)))
        if is_first:
            print(f"Training loss = {loss:.6f}, training accuracy = {history[-1][1]:.6f}")
            print(f"Evaluation accuracy = {history[-1][2]:.6f}")
            print(f"{trained / seconds:.0f} images/s, {sent:.0f} bytes sent per step and rank", flush=True)
        if arguments.checkpoint:
            save(model, sgd, sampler, arguments, history)
            if sgd.should_stop:
                if is_first:
                    print(f"Stopped after epoch {epoch}, as asked", flush=True)
                return

    if is_first:
        path = arguments.out / f"cifar_{arguments.model}.zip"
        model.save_states(path, {"epochs": np.array(arguments.epochs)})
        print(f"checkpoint: {path.resolve()}")
        print(f"plot: {plot(history, arguments)}", flush=True)


def share_done(sampler, arguments):
    """The share of the job's images that were trained on, on however many ranks."""
    state = sampler.state_dict()
    done = state["start"] + state["position"] * state["world_size"] * state["batch_size"]
    return (state["epoch"] + done / state["num_samples"]) / arguments.epochs


def load_data(arguments):
    if arguments.synthetic is not None:
        return data.synthetic_cifar10(arguments.synthetic, max(1, arguments.synthetic // 5), arguments.seed)
    return data.load_cifar10(arguments.cifar_dir)


def make_batches(cifar, sampler, seed):
    """(x, y) of every step of this rank's epoch; a step's random numbers depend on nothing but its number."""
    epoch = sampler.epoch
    for indices in sampler:
        rng = np.random.default_rng([seed, epoch, sampler.position, sampler.rank])
        images = data.pad_crop_flip(cifar.train_images[indices], rng)
        yield data.make_batch(images, cifar.train_labels[indices], slice(None), mean=MEAN, std=STD)


def train_epoch(model, sgd, dev, cifar, sampler, arguments, history):
    """What is left of an epoch, or less if asked to stop; this rank's sum of batch losses, numbers of correct answers
    and of images, and bytes sent per step."""
    model.train()
    loss_sum, correct, trained, sent, step = 0.0, 0, 0, 0, 0
    for step, (x, y) in enumerate(
        data.prefetch(make_batches(cifar, sampler, arguments.seed), sampler=sampler)
    ):
        x, labels = tensor.from_numpy(x.astype(arguments.dtype), dev), tensor.from_numpy(y, dev)
        out, loss = model(x, labels, arguments.dist_option, arguments.spars)
        loss_sum += loss.item()
        correct += np.count_nonzero(tensor.to_numpy(out).argmax(axis=1) == y)
        trained += len(y)
        sent += sgd.bytes_sent
        if sgd.global_rank == 0:
            show_progress(step + 1, len(sampler), loss.item())
        is_last = sampler.state_dict()["position"] == 0  # then main saves, with the epoch's accuracy
        if arguments.checkpoint and not is_last:
            if sgd.should_stop or sgd.step_counter % arguments.save_every == 0:
                save(model, sgd, sampler, arguments, history)
            if sgd.should_stop:
                break
    return loss_sum, correct, trained, sent / (step + 1)


def save(model, sgd, sampler, arguments, history):
    """Save the job; at once if the processes were asked to stop, or else while training goes on."""
    extra = {"history": history, "schedule": [sgd.opt.lr.steps, sgd.opt.lr.ahead]}
    checkpoint.save_job(arguments.checkpoint, model, sampler=sampler, extra=extra, block=sgd.should_stop)


def evaluate(model, dev, cifar, sgd, arguments):
    """The number of this rank's share of the test images that are classified correctly."""
    model.eval()
    share = data.partition(len(cifar.test_labels), sgd.global_rank, sgd.world_size)
    correct = 0
    for start in range(share.start, share.stop, EVAL_BATCH):
        batch = slice(start, min(start + EVAL_BATCH, share.stop))
        x, y = data.make_batch(cifar.test_images, cifar.test_labels, batch, mean=MEAN, std=STD)
        out = model(tensor.from_numpy(x.astype(arguments.dtype), dev))
        correct += np.count_nonzero(tensor.to_numpy(out).argmax(axis=1) == y)
    return correct


def sum_over_ranks(values, sgd):
    total = np.array(values, np.float64)
    sgd.all_reduce(total)
    return total.tolist()


def show_progress(step, steps, loss):
    """A bar of at most 40 updates a pass: one line that overwrites itself, or nothing without a terminal."""
    if step % math.ceil(steps / 40) == 0 or step == steps:
        filled = 30 * step // steps
        end = "\n" if step == steps else ""
        bar = "#" * filled + "." * (30 - filled)
        print(f"\r[{bar}] {step}/{steps} loss {loss:.4f}", end=end, file=sys.stderr, flush=True)


def plot(history, arguments):
    """Draw loss and accuracy by epoch; the picture's path, or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return "none; pip install 'singa-lite[plot]' draws one"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses, train_accuracies, test_accuracies = zip(*history, strict=True)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    left.plot(losses, marker=".")
    left.set(xlabel="epoch", ylabel="training loss (sum of batch means)", yscale="log")
    right.plot(train_accuracies, marker=".", label="training")
    right.plot(test_accuracies, marker=".", label="evaluation")
    right.set(xlabel="epoch", ylabel="accuracy")
    right.legend()
    name = "CIFAR-10" if arguments.synthetic is None else "random images"
    figure.suptitle(f"{name}, {arguments.model}, {arguments.dist_option}")
    figure.tight_layout()
    path = arguments.out / f"cifar_{arguments.model}.png"
    figure.savefig(path, dpi=120)
    return path.resolve()


if __name__ == "__main__":
    main()
