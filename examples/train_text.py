# SPDX-License-Identifier: Apache-2.0
"""Train a small causal transformer to write like a text, character by character, on any number of processes.

    python examples/train_text.py                                  one process, the texts of this project's docs
    python examples/train_text.py book.txt other.txt               other texts, one after the other
    singa-lite run -n 2 examples/train_text.py --steps 1000        two processes of this machine
    singa-lite run -n 4 examples/train_text.py --dist-option bf16  four, gradients as bfloat16
    python examples/train_text.py --precision bf16                 products and attention in bfloat16
    mpiexec -n 2 python examples/train_text.py                     MPI or, with srun, Slurm

Every process draws its own pieces of the first nine tenths of the text. Losses are in nats a character: to know
nothing of n different characters costs ln n. In the end the first process writes some text of its own.
"""

import argparse
import os
import time
import zlib
from pathlib import Path

import numpy as np
from model.transformer import Transformer

from singa_lite import checkpoint, device, opt, tensor

DOCS = sorted((Path(__file__).resolve().parent.parent / "docs").glob("*.md"))
LAST_STEPS = 20  # whose losses are averaged in the end
EVAL_BATCHES = 8


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a transformer over the characters of a text")
    parser.add_argument("files", nargs="*", type=Path, default=DOCS, help="texts in UTF-8")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="pieces of text per process")
    parser.add_argument("--length", type=int, default=128, help="characters of a piece")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dist-option", default="fp32", help="such as fp16 or sparseTopK:0.01")
    parser.add_argument("--spars", type=float, help="share (sparseTopK) or magnitude (sparseThreshold)")
    parser.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, default=True, help="record the steps"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: of products and attention"
    )
    parser.add_argument(
        "--write", type=int, default=200, metavar="COUNT", help="characters to write in the end"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", default=os.environ.get("SINGA_LITE_CHECKPOINT"),
        help="go on from the newest checkpoint there, and save there; `singa-lite run --checkpoint` names it too",
    )  # fmt: skip
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="with --checkpoint")
    arguments = parser.parse_args()
    if (
        min(arguments.steps, arguments.batch_size, arguments.length, arguments.layers, arguments.save_every)
        < 1
    ):
        parser.error("--steps, --batch-size, --length, --layers and --save-every must be at least 1")
    if arguments.write < 0:
        parser.error("--write must be at least 0")
    return arguments


def pieces(rng, ids, count, length):
    """Return (count, length) ids at random places, and the id after each of them."""
    starts = rng.integers(0, len(ids) - length, count)
    rows = ids[starts[:, None] + np.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def main():
    arguments = parse_arguments()
    try:
        text = "\n".join(path.read_text(encoding="utf-8") for path in arguments.files)
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"a text cannot be read: {error}") from None
    characters = sorted(set(text))
    number_of = {character: number for number, character in enumerate(characters)}
    ids = np.array([number_of[character] for character in text], np.int32)
    train_ids, test_ids = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
    if len(test_ids) <= arguments.length:
        raise SystemExit(
            f"{len(ids)} characters are too few for pieces of {arguments.length}; shorten --length"
        )

    adam = opt.DistOpt(opt.Adam(lr=arguments.lr))
    dev = device.create_device(adam.local_rank)
    dev.SetRandSeed(arguments.seed)
    shape = (arguments.batch_size, arguments.length)
    network = Transformer(
        len(characters), arguments.length, arguments.layers, arguments.width, arguments.heads
    )
    network.set_optimizer(adam)
    ids_like = tensor.zeros(shape, dev).as_type(tensor.int32)
    network.compile([ids_like], use_graph=arguments.graph, precision=arguments.precision)
    is_first = adam.global_rank == 0
    if is_first:
        count = sum(value.size() for value in network.get_params().values())
        print(f"world size {adam.world_size}, device {dev}, dist_option {arguments.dist_option}")
        print(f"{len(text)} characters, {len(characters)} different, {count} parameters", flush=True)

    rng = np.random.default_rng([arguments.seed, 1 + adam.global_rank])
    done = 0
    if arguments.checkpoint:
        adam.stop_on_signals()
        job = checkpoint.load_job(arguments.checkpoint, network)
        done = job.step if job else 0
        for _ in range(done):
            pieces(rng, train_ids, *shape)  # drawn before
        if is_first and done:
            print(f"Going on from step {done}", flush=True)
        if done >= arguments.steps:
            if is_first:
                print(f"All {arguments.steps} steps were made before", flush=True)
            return
    losses = []
    start = time.perf_counter()
    for step in range(done + 1, arguments.steps + 1):
        x, y = (tensor.from_numpy(array, dev) for array in pieces(rng, train_ids, *shape))
        _, loss = network(x, y, arguments.dist_option, arguments.spars)
        losses = [*losses[1 - LAST_STEPS :], loss]
        if is_first and (step == 1 or step % 50 == 0):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if arguments.checkpoint and (adam.should_stop or step % arguments.save_every == 0):
            checkpoint.save_job(arguments.checkpoint, network, block=adam.should_stop)
            if adam.should_stop:  # all ranks, after the same step
                if is_first:
                    print(f"Stopped at step {step}, as asked", flush=True)
                return
    dev.Sync()
    seconds = time.perf_counter() - start

    if not adam.keeps_equal:
        adam.synchronize(network)  # between its turns a parameter differs from rank to rank
    totals = np.array(
        [
            np.mean([loss.item() for loss in losses]),
            evaluate(network, test_ids, arguments, adam, dev),
        ]
    )
    adam.all_reduce(totals)
    bits = b"".join(tensor.to_numpy(value).tobytes() for value in network.get_params().values())
    print(f"rank {adam.global_rank}: parameters have the checksum {zlib.crc32(bits):08x}", flush=True)
    if is_first:
        speed = (arguments.steps - done) * arguments.batch_size * arguments.length * adam.world_size / seconds
        train_loss, test_loss = totals / adam.world_size
        print(f"{speed:.0f} characters/s, {adam.bytes_sent} bytes sent per step and rank")
        print(f"Training loss = {train_loss:.4f}, of text not trained on = {test_loss:.4f}", flush=True)
        print(write(network, number_of, characters, arguments, dev), flush=True)


def evaluate(network, ids, arguments, adam, dev):
    """Return the mean loss of pieces that this process draws."""
    network.eval()
    rng = np.random.default_rng([arguments.seed, 0, adam.global_rank])
    losses = []
    for _ in range(EVAL_BATCHES):
        x, y = pieces(rng, ids, arguments.batch_size, arguments.length)
        logits = tensor.to_numpy(network(tensor.from_numpy(x, dev))).astype(np.float64)
        logits -= logits.max(axis=2, keepdims=True)
        chosen = np.take_along_axis(logits, y[..., None], axis=2)[..., 0]
        losses.append(np.mean(np.log(np.exp(logits).sum(axis=2)) - chosen))
    return np.mean(losses)


def write(network, number_of, characters, arguments, dev):
    """Return text that begins with a new line and goes on with characters drawn as the network finds them likely."""
    rng = np.random.default_rng(arguments.seed)
    ids = [number_of["\n"]] if "\n" in number_of else [0]
    for _ in range(arguments.write):
        seen = ids[-arguments.length :]
        # what follows the text does not count: attention is causal
        x = np.zeros((1, arguments.length), np.int32)
        x[0, : len(seen)] = seen
        logits = tensor.to_numpy(network(tensor.from_numpy(x, dev)))[0, len(seen) - 1].astype(np.float64)
        powers = np.exp(logits - logits.max())
        ids.append(int(rng.choice(len(characters), p=powers / powers.sum())))
    return "".join(characters[number] for number in ids)


if __name__ == "__main__":
    main()
