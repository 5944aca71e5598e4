# SPDX-License-Identifier: Apache-2.0
"""Blocks of 8-bit codes: 256 values share a float32 scale.

Note [8-bit messages]: a message of ``row_size`` values is the scales of its blocks, float32 in the host's byte order,
then a code of each value, int8, all as uint8: 4 * ceil(row_size / 256) + row_size bytes. Row r of ``messages`` has
the values from r * row_size on; those beyond the last count as 0. A block's scale a is its largest |value| / 127, in
float32; a code is value / a, rounded, within +-127, and stands for a * code. A block with a value that is not finite
has the scale NaN and so becomes NaN; one whose scale would be below 2**-126 has the scale 0 and becomes 0.

Note [8-bit draws]: q = floor(value / a + u), u in (0, 1), has the mean value / a. The u of value number i of block b
of all rows is (2 h + 1) / 2**17, h 16 bits of Philox 4x32-10 with the key ``seed`` and the counter (32 b + i % 32,
``counter``): of its word i // 64 the lower half if i // 32 is even, else the upper. So whole numbers stay as they
are, and every device makes the same codes.
Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import numpy as np

from ..base import Array

BLOCK = 256  # values with one scale
LARGEST = 127  # code
# scale that is not 0: below, float32 loses precision and CUDA takes numbers for 0
SMALLEST = np.float32(2.0**-126)
LANES = 32  # Philox counters of a block; each gives 8 draws


class QuantizeKernels:
    """8-bit messages, see the notes above. They are made and read in float32, whatever the dtype of the values."""

    def quantize_int8(self, x: Array, *, out: Array, row_size: int, seed: int, counter: int) -> None:
        blocks = _blocks_of(x, len(out), row_size)
        draws = uniform_16_bits(seed, counter, blocks.shape[0] * blocks.shape[1]).reshape(blocks.shape)
        scales = _scales_of(blocks)
        _write(scales, np.floor(_steps(blocks, scales) + draws), out, row_size)

    def quantize_int8_nearest(self, x: Array, *, out: tuple[Array, Array], row_size: int) -> None:
        messages, rest = out
        blocks = _blocks_of(x, len(messages), row_size)
        scales = _scales_of(blocks)
        _write(scales, np.rint(_steps(blocks, scales)), messages, row_size)
        sent = np.empty(rest.size, np.float32)
        self.dequantize_int8(messages, out=sent, row_size=row_size)
        left = x.astype(np.float32) - sent
        rest[...] = np.where(np.isfinite(left), left, np.float32(0))

    def dequantize_int8(self, messages: Array, *, out: Array, row_size: int) -> None:
        out[...] = _values_of(messages, row_size).reshape(-1)[: out.size]

    def mean_of_int8(self, messages: Array, *, out: Array) -> None:
        rows = _values_of(messages, out.size)
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        out[...] = total / np.float32(len(rows))


def _blocks_of(x: Array, num_rows: int, row_size: int) -> Array:
    """Return ``x`` as float32 blocks (rows, blocks of a row, BLOCK), with zeros where there is no value."""
    flat = np.zeros(num_rows * row_size, np.float32)
    flat[: x.size] = x
    padded = np.zeros((num_rows, -(-row_size // BLOCK) * BLOCK), np.float32)
    padded[:, :row_size] = flat.reshape(num_rows, row_size)
    return padded.reshape(num_rows, -1, BLOCK)


def _scales_of(blocks: Array) -> Array:
    """Return the scale of each block."""
    largest = np.abs(blocks).max(axis=-1, initial=0)  # NaN wins
    scales = largest / np.float32(LARGEST)
    scales[scales < SMALLEST] = 0
    scales[~np.isfinite(largest)] = np.nan
    return scales


def _steps(blocks: Array, scales: Array) -> Array:
    """Return values / scales; 0 in blocks whose scale is 0 or NaN."""
    is_used = (scales > 0)[..., None]
    return np.where(is_used, blocks, 0) / np.where(is_used, scales[..., None], np.float32(1))


def _write(scales: Array, rounded: Array, out: Array, row_size: int) -> None:
    """Write messages."""
    codes = np.clip(rounded, -LARGEST, LARGEST).astype(np.int8).reshape(len(out), scales.shape[1] * BLOCK)
    start = 4 * scales.shape[1]
    out[:, :start] = scales.view(np.uint8).reshape(len(out), start)
    out[:, start:] = codes[:, :row_size].view(np.uint8)


def _values_of(messages: Array, row_size: int) -> Array:
    """Return what messages stand for: (rows, row_size), float32."""
    num_blocks = -(-row_size // BLOCK)
    scales = np.ascontiguousarray(messages[:, : 4 * num_blocks]).view(np.float32)
    codes = messages[:, 4 * num_blocks :].view(np.int8).astype(np.float32)
    values: Array = codes * np.repeat(scales, BLOCK, axis=1)[:, :row_size]
    return values


def uniform_16_bits(seed: int, counter: int, num_blocks: int) -> Array:
    """Return the draws of Note [8-bit draws]: (num_blocks, BLOCK), float32."""
    words = philox(seed, np.arange(num_blocks * LANES, dtype=np.uint64), counter).reshape(
        4, num_blocks, LANES
    )
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=1)  # (4, 2, blocks, LANES)
    numbers = halves.transpose(2, 0, 1, 3).reshape(num_blocks, BLOCK)
    draws: Array = (2 * numbers.astype(np.float32) + 1) * np.float32(2.0**-17)
    return draws


def philox(seed: int, lower: Array, upper: int) -> Array:
    """Return the four words of Philox 4x32-10 at each 128-bit counter (upper, lower): (4, n), 32 bits in uint64."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    high = np.full(lower.shape, upper % 2**64, np.uint64)
    words = [lower & mask, lower >> half, high & mask, high >> half]
    key = [seed % 2**32, seed % 2**64 >> 32]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * words[0], np.uint64(0xCD9E8D57) * words[2]
        words = [
            second >> half ^ words[1] ^ np.uint64(key[0]),
            second & mask,
            first >> half ^ words[3] ^ np.uint64(key[1]),
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return np.stack(words)
