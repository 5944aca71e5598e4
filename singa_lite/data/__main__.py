# SPDX-License-Identifier: Apache-2.0
"""``python -m singa_lite.data mnist`` (or ``cifar10``) fetches a data set, so that later runs need no network."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from .. import config
from ..errors import DataError
from .cifar import Cifar, fetch_cifar10, load_cifar10
from .mnist import Mnist, cache_folder, load_mnist


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the data set named on the command line and print its folder; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m singa_lite.data", description="Fetch and check a data set."
    )
    parser.add_argument("dataset", choices=["mnist", "cifar10"])
    dataset = parser.parse_args(arguments).dataset
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a folder that it cannot encode
    images: Cifar | Mnist
    try:
        if dataset == "mnist":
            images, where = load_mnist(), config.env("MNIST_DIR") or cache_folder()
        else:
            images, where = load_cifar10(), fetch_cifar10().parent
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        print(
            f"{dataset}: {len(images.train_images)} training and {len(images.test_images)} test images in {where}",
            flush=True,
        )
    except OSError as error:  # a full disk, or nobody reads
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains at exit
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
