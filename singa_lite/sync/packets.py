# SPDX-License-Identifier: Apache-2.0
"""Messages of bytes, for schemes whose messages hold several types: what is in them, and gathering them."""

from __future__ import annotations

import numpy as np

from ..backend.base import Backend
from ..comm.base import Communicator, Work
from .base import Array

WORD = np.dtype("int32")  # collectives move these, and no bytes


def new_packet(backend: Backend, num_bytes: int, alignment: int) -> Array:
    """Return uint8 memory of at least ``num_bytes``, a multiple of ``alignment``, itself one of 4 bytes."""
    return backend.empty((-(-num_bytes // alignment) * alignment,), "uint8")


def gather_packets(communicator: Communicator, packet: Array, name: str) -> Work:
    """Start to gather all ranks' packets, which have one size; ``packets_in`` reads the result."""
    return communicator.all_gather(packet.view(WORD), name=name)


def packets_in(gathered: Array) -> Array:
    """Return all ranks' packets, uint8 (ranks, bytes), of what ``gather_packets`` gave."""
    return gathered.view(np.uint8)
