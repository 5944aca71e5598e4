# SPDX-License-Identifier: Apache-2.0
"""``python -m singa_lite.data mnist`` fetches a data set, so that later runs need no network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import config
from ..errors import DataError
from .mnist import cache_folder, load_mnist


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the data set named on the command line and say where it lies; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m singa_lite.data", description="Fetch and check a data set."
    )
    parser.add_argument("dataset", choices=["mnist"])
    parser.parse_args(arguments)
    try:
        digits = load_mnist()
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    where = config.env("MNIST_DIR") or cache_folder()
    print(f"mnist: {len(digits.train_images)} training and {len(digits.test_images)} test images in {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
