# SPDX-License-Identifier: Apache-2.0
"""Train a CNN on MNIST, on any number of processes, with any dist_option.

    python examples/train_mnist.py                                   one process
    singa-lite run -n 2 examples/train_mnist.py --epochs 10          two processes of this machine
    singa-lite run -n 4 examples/train_mnist.py --dist-option fp16   four, gradients as half floats
    python examples/train_mnist.py --precision bf16                  products in bfloat16, the rest in float32
    singa-lite run -n 2 examples/train_mnist.py --no-graph           each step runs in Python, eagerly
    mpiexec -n 2 python examples/train_mnist.py                      MPI or, with srun, Slurm

    singa-lite run -n 2 --max-restarts 3 --checkpoint runs/job examples/train_mnist.py
        starts again from the newest checkpoint when a process fails; SIGTERM has it save and end

Every sample of an epoch is used exactly once and every test image is counted, whatever the number of
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

from singa_lite import checkpoint, data, device, opt, tensor

MEAN, STD = 0.1307, 0.3081  # of all training pixels / 255: inputs get mean 0 and variance 1
EVAL_BATCH = 500


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a CNN on MNIST")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-5)
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
    parser.add_argument("--mnist-dir", help="folder of the four IDX files")
    parser.add_argument("--out", type=Path, default=Path("runs/mnist"), help="folder for plot and checkpoint")
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", default=os.environ.get("SINGA_LITE_CHECKPOINT"),
        help="go on from the newest checkpoint there, and save there; `singa-lite run --checkpoint` names it too",
    )  # fmt: skip
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS", help="and after every epoch")
    arguments = parser.parse_args()
    arguments.dtype = "float16" if arguments.precision == "float16" else "float32"  # of the images
    if arguments.epochs < 1 or arguments.batch_size < 1 or arguments.save_every < 1:
        parser.error("--epochs, --batch-size and --save-every must be at least 1")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    return arguments


def main():
    arguments = parse_arguments()
    sgd = opt.SGD(lr=arguments.lr, momentum=arguments.momentum, weight_decay=arguments.weight_decay)
    sgd = opt.DistOpt(sgd, threshold=arguments.threshold)
    dev = device.create_device(sgd.local_rank)
    mnist = data.load_mnist(arguments.mnist_dir)

    dev.SetRandSeed(arguments.seed)
    model = CNN()
    model.set_optimizer(sgd)
    inputs = tensor.Tensor((arguments.batch_size, 1, 28, 28), dev, arguments.dtype)
    precision = "bf16" if arguments.precision == "bf16" else "fp32"
    model.compile([inputs], use_graph=arguments.graph, precision=precision)
    sampler = data.ShardedSampler(
        len(mnist.train_labels), arguments.batch_size, sgd.global_rank, sgd.world_size, seed=arguments.seed
    )
    is_first = sgd.global_rank == 0
    if is_first:
        print(
            f"world size {sgd.world_size}, transport {sgd.communicator.world.transport}, device {dev}, "
            f"effective batch {arguments.batch_size} x {sgd.world_size} = {arguments.batch_size * sgd.world_size}, "
            f"dist_option {arguments.dist_option}, reduction mean over ranks, seed {arguments.seed}",
            flush=True,
        )

    history = []
    if arguments.checkpoint:
        sgd.stop_on_signals()
        job = checkpoint.load_job(arguments.checkpoint, model, sampler=sampler)
        if job:
            history = job.extra["history"]
            if is_first:
                print(f"Going on from step {job.step}", flush=True)
                if sampler.state_dict()["start"] + sampler.position:
                    print("Figures of this epoch will be those of what is left of it", flush=True)
    for epoch in range(sampler.epoch, arguments.epochs):
        if is_first:
            print(f"Starting Epoch {epoch}:", flush=True)
        start = time.perf_counter()
        loss, correct, trained, sent = train_epoch(model, sgd, dev, mnist, sampler, arguments, history)
        if sampler.epoch == epoch:  # all ranks have left it after the same step
            if is_first:
                print(f"Stopped at step {sgd.step_counter}, as asked", flush=True)
            return
        seconds = time.perf_counter() - start
        if not sgd.keeps_equal:
            sgd.synchronize(model)  # between averages a parameter differs from rank to rank
        tested = evaluate(model, dev, mnist, sgd, arguments)
        loss, correct, trained, tested = sum_over_ranks([loss, correct, trained, tested], sgd)
        history.append((loss, correct / trained, tested / len(mnist.test_labels)))
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
        for record in model.graph_info():
            print(
                f"graph of {record.inputs}: {record.num_kernels} kernels, {record.num_collectives} collectives"
                + (f"; runs eagerly: {record.break_reason}" if record.break_reason else "")
            )
        path = arguments.out / "mnist_cnn.zip"
        model.save_states(path, {"epochs": np.array(arguments.epochs)})
        print(f"checkpoint: {path.resolve()}")
        print(f"plot: {plot(history, arguments)}", flush=True)


def train_epoch(model, sgd, dev, mnist, sampler, arguments, history):
    """What is left of an epoch, or less if asked to stop; this rank's sum of batch losses, numbers of correct answers
    and of images, and bytes sent per step."""
    model.train()
    loss_sum, correct, trained, sent, step = 0.0, 0, 0, 0, 0
    for step, indices in enumerate(sampler):
        x, y = data.make_batch(mnist.train_images, mnist.train_labels, indices, mean=MEAN, std=STD)
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
    checkpoint.save_job(
        arguments.checkpoint, model, sampler=sampler, extra={"history": history}, block=sgd.should_stop
    )


def evaluate(model, dev, mnist, sgd, arguments):
    """The number of this rank's share of the test images that are classified correctly."""
    model.eval()
    share = data.partition(len(mnist.test_labels), sgd.global_rank, sgd.world_size)
    correct = 0
    for start in range(share.start, share.stop, EVAL_BATCH):
        batch = slice(start, min(start + EVAL_BATCH, share.stop))
        x, y = data.make_batch(mnist.test_images, mnist.test_labels, batch, mean=MEAN, std=STD)
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
    figure.suptitle(f"MNIST, {arguments.dist_option}")
    figure.tight_layout()
    path = arguments.out / "mnist_cnn.png"
    figure.savefig(path, dpi=120)
    return path.resolve()


if __name__ == "__main__":
    main()
