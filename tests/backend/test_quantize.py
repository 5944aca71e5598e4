# SPDX-License-Identifier: Apache-2.0
"""8-bit messages on every device: the codes of a model written number by number, and no bias."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from singa_lite.backend.base import Backend
from singa_lite.backend.cpu import NumpyBackend
from singa_lite.backend.cpu.quantize import philox
from singa_lite.device import Device
from tests.limits import LIMIT_S

NUMPY = NumpyBackend()
# values of a row, rows, and how many of all values there are
SHAPES = [
    (1, 1, 1),
    (255, 1, 255),
    (256, 1, 256),
    (257, 1, 257),
    (700, 1, 700),
    (256, 3, 600),
    (512, 4, 1100),
    (256, 3, 9),
]


@pytest.fixture
def backend(device: Device) -> Backend:
    return device.backend


def message_bytes(row_size: int) -> int:
    return row_size + 4 * -(-row_size // 256)


def run(backend: Backend, kernel: str, given: np.ndarray, out: Any, **attributes: Any) -> Any:
    made = [backend.asarray(array) for array in out]
    backend.run(kernel, backend.asarray(given), out=tuple(made) if len(made) > 1 else made[0], **attributes)
    found = [backend.to_numpy(array) for array in made]
    return found if len(found) > 1 else found[0]


def values(n: int, seed: int = 0) -> np.ndarray:
    """Numbers whose blocks have scales of their own."""
    rng = np.random.default_rng([n, seed])
    return (rng.standard_normal(n) * 10.0 ** (np.arange(n) // 256 - 2)).astype(np.float32)


def philox_number(seed: int, lower: int, upper: int) -> list[int]:
    """Philox 4x32-10 as its paper writes it, for one counter."""
    c = [lower % 2**32, lower >> 32, upper % 2**32, upper >> 32]
    k = [seed % 2**32, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b % 2**32, a >> 32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_philox_gives_the_known_answers_of_its_authors() -> None:
    zeros, ones = (
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    )
    for bits, expected in ((0, zeros), (2**64 - 1, ones)):
        assert philox(bits, np.array([bits], np.uint64), bits)[:, 0].tolist() == expected
        assert philox_number(bits, bits, bits) == expected


def draw(seed: int, counter: int, block: int, i: int) -> np.float32:
    word = philox_number(seed, 32 * block + i % 32, counter)[i // 64]
    half = word >> 16 if i // 32 % 2 else word & 0xFFFF
    return np.float32((2 * half + 1) / 2**17)


def model(x: np.ndarray, row_size: int, rows: int, seed: int | None, counter: int = 0) -> np.ndarray:
    """Messages, block by block and value by value; nearest codes for no seed."""
    out = np.zeros((rows, message_bytes(row_size)), np.uint8)
    blocks = -(-row_size // 256)
    for row in range(rows):
        for block in range(blocks):
            places = range(256 * block, min(row_size, 256 * (block + 1)))
            here = [row * row_size + place for place in places if row * row_size + place < len(x)]
            scale = np.float32(np.abs(x[here]).max(initial=0) / np.float32(127)) if here else np.float32(0)
            out[row, 4 * block : 4 * block + 4] = np.frombuffer(scale.tobytes(), np.uint8)
            for place, at in zip(places, here, strict=False):
                step = x[at] / scale if scale else np.float32(0)
                if seed is None:
                    code = int(np.rint(step))
                else:
                    code = int(np.floor(step + draw(seed, counter, row * blocks + block, place % 256)))
                out[row, 4 * blocks + place] = max(-127, min(127, code)) % 256
    return out


@pytest.mark.parametrize(("row_size", "rows", "n"), SHAPES)
def test_codes_are_those_of_the_model(backend: Backend, row_size: int, rows: int, n: int) -> None:
    x, empty = values(n), np.full((rows, message_bytes(row_size)), 99, np.uint8)
    stream = {"seed": 2**47 + 11, "counter": 2**33 + 5}
    made = run(backend, "quantize_int8", x, [empty], row_size=row_size, **stream)
    np.testing.assert_array_equal(made, model(x, row_size, rows, stream["seed"], stream["counter"]))
    made, rest = run(backend, "quantize_int8_nearest", x, [empty, x], row_size=row_size)
    np.testing.assert_array_equal(made, model(x, row_size, rows, None))
    sent = run(backend, "dequantize_int8", made, [x], row_size=row_size)
    np.testing.assert_array_equal(rest, x - sent)
    limit = np.repeat([np.abs(x[i : i + 256]).max() for i in range(0, n, 256)], 256)[:n] / 254
    assert (np.abs(rest) <= 1.00001 * limit).all()


@pytest.mark.parametrize(("row_size", "rows", "n"), SHAPES)
def test_codes_of_the_numpy_path_are_those_of_the_model(row_size: int, rows: int, n: int) -> None:
    test_codes_are_those_of_the_model(NUMPY, row_size, rows, n)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 256, 1027])
def test_a_mean_is_added_in_the_order_of_rows(backend: Backend, n: int, rows: int) -> None:
    x = np.stack([values(n, seed) for seed in range(rows)])
    messages = np.concatenate([model(row, n, 1, None) for row in x])
    each = [
        run(NUMPY, "dequantize_int8", message[None], [row], row_size=n)
        for message, row in zip(messages, x, strict=True)
    ]
    total = each[0]
    for row in each[1:]:
        total = total + row
    mean = run(backend, "mean_of_int8", messages, [np.full(n, 9, np.float32)])
    np.testing.assert_array_equal(mean, total / np.float32(rows))
    np.testing.assert_allclose(
        mean, np.mean(each, axis=0, dtype=float), rtol=1e-6, atol=1e-6 * np.abs(x).max()
    )


def test_rounding_has_no_bias_and_other_streams_other_draws(backend: Backend) -> None:
    x = np.linspace(-1, 1, 256, dtype=np.float32)
    made = []
    for counter in range(600):
        message = run(
            backend, "quantize_int8", x, [np.zeros((1, 260), np.uint8)], row_size=256, seed=3, counter=counter
        )
        made.append(run(backend, "dequantize_int8", message, [x], row_size=256))
    error = np.mean(made, axis=0, dtype=float) - x
    step = 1 / 127
    assert np.abs(error).max() < 5 * 0.5 * step / np.sqrt(600)
    assert abs(error.mean()) < 5 * 0.5 * step / np.sqrt(600 * 256)
    assert len({row.tobytes() for row in made}) == 600
    others = [
        run(backend, "quantize_int8", x, [np.zeros((1, 260), np.uint8)], row_size=256, seed=seed, counter=0)
        for seed in (3, 4, 2**40 + 3)
    ]
    assert len({row.tobytes() for row in others}) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_makes_its_block_nan_and_leaves_no_rest(
    backend: Backend, bad: float
) -> None:
    x = values(700)
    x[300] = bad
    empty = np.zeros((1, message_bytes(700)), np.uint8)
    nearest, rest = run(backend, "quantize_int8_nearest", x, [empty, x], row_size=700)
    assert not rest[256:512].any() and np.isfinite(rest).all() and rest[:256].any() and rest[512:].any()
    for message in (nearest, run(backend, "quantize_int8", x, [empty], row_size=700, seed=1, counter=1)):
        sent = run(backend, "dequantize_int8", message, [x], row_size=700)
        assert np.isnan(sent[256:512]).all() and np.isfinite(np.delete(sent, np.s_[256:512])).all()
        both = np.concatenate([message, model(values(700), 700, 1, None)])
        mean = run(backend, "mean_of_int8", both, [x])
        assert np.isnan(mean[256:512]).all() and np.isfinite(np.delete(mean, np.s_[256:512])).all()


def test_zeros_and_what_is_too_small_become_zero_and_stay_in_the_rest(backend: Backend) -> None:
    x = np.zeros(600, np.float32)
    x[256:512] = 1e-37
    x[512:] = 1e30
    empty = np.zeros((1, message_bytes(600)), np.uint8)
    message, rest = run(backend, "quantize_int8_nearest", x, [empty, x], row_size=600)
    sent = run(backend, "dequantize_int8", message, [x], row_size=600)
    assert not sent[:512].any() and (rest[:512] == x[:512]).all()
    np.testing.assert_allclose(sent[512:], 1e30, rtol=1e-6)
    again = run(backend, "quantize_int8", x, [empty], row_size=600, seed=1, counter=1)
    assert not run(backend, "dequantize_int8", again, [x], row_size=600)[:512].any()


def test_nothing_makes_empty_messages(backend: Backend) -> None:
    empty = np.zeros((3, 0), np.uint8)
    none = np.zeros(0, np.float32)
    assert run(backend, "quantize_int8", none, [empty], row_size=0, seed=1, counter=1).shape == (3, 0)
    assert run(backend, "dequantize_int8", empty, [none], row_size=0).shape == (0,)
    assert run(backend, "mean_of_int8", empty, [none]).shape == (0,)


def test_the_number_of_threads_changes_no_code() -> None:
    code = (
        "import numpy as np, hashlib\n"
        "from singa_lite.backend.cpu import CpuBackend\n"
        "b = CpuBackend(); x = np.random.default_rng(0).standard_normal(300_001).astype('f4')\n"
        "m = np.empty((1, 300_001 + 4 * 1172), 'u1'); y = np.empty_like(x)\n"
        "b.run('quantize_int8', x, out=m, row_size=x.size, seed=1, counter=2); b.run('mean_of_int8', m, out=y)\n"
        "print(hashlib.sha256(m.tobytes() + y.tobytes()).hexdigest())"
    )

    def of(threads: int) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return done.stdout

    assert len({of(threads) for threads in (1, 2, 5)}) == 1


def test_compiled_code_takes_the_calls() -> None:
    from singa_lite import _native

    kernels, reason = _native.load("_kernels")
    if kernels is None:
        pytest.skip(f"nothing was compiled: {reason}")
    x, message = values(300), np.zeros((1, message_bytes(300)), np.uint8)
    assert kernels.quantize_int8(x, out=message, row_size=300, seed=1, counter=2)
    assert kernels.quantize_int8_nearest(x, out=(message, x.copy()), row_size=300)
    assert kernels.dequantize_int8(message, out=x, row_size=300) and kernels.mean_of_int8(message, out=x)
    for bad in (message[:, 1:], message[:, ::-1], message.view(np.int8)):
        assert not kernels.quantize_int8(x, out=bad, row_size=300, seed=1, counter=2)
        assert not kernels.mean_of_int8(bad, out=x)
    assert not kernels.quantize_int8(x, out=message, row_size=300, seed=2**60, counter=2)
    assert not kernels.dequantize_int8(message, out=np.zeros(301, np.float32), row_size=300)
