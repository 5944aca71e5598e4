# SPDX-License-Identifier: Apache-2.0
"""A job that goes on from a checkpoint ends with the bits of the one that saved it; a failure is one on all ranks."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import singa_lite.checkpoint.rank_arrays as rank_arrays
import singa_lite.checkpoint.saving as saving
from singa_lite import autograd, checkpoint, config, generation, opt
from singa_lite.checkpoint.job import state_of
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.data import ShardedSampler, prefetch
from singa_lite.errors import CheckpointError, GraphError, OptionError, SingaLiteError
from singa_lite.files import PART_SUFFIX
from singa_lite.tensor import Tensor
from tests.checkpoint.job_net import OPTIONS, Net, batch, bits, compiled, train
from tests.comm.processes import fresh_environment, run_ranks_of, wait_until, write_script
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing, run_ranks
from tests.slow_cases import slow_but_first

BEFORE, AFTER = 5, 8  # steps: localSGD:4 averages before the save and after it


def resumed(communicator: Communicator, folder: str, use_graph: bool, options: list[str]) -> dict[str, str]:
    """What differs in the end between a run that was saved and one that goes on from there, by dist_option."""
    found = {}
    for option in options:
        where, extra = Path(folder) / option, {"rank": communicator.rank, "a": np.arange(3.0)}
        whole = compiled(communicator, option, use_graph)
        train(whole, range(BEFORE))
        saving = checkpoint.save_job(where, whole, extra=extra, block=use_graph)
        train(whole, range(BEFORE, BEFORE + AFTER))
        ended = random.random(), np.random.random()
        saving.wait()
        second = compiled(communicator, option, use_graph)
        job = checkpoint.load_job(where, second)
        assert job is not None
        train(second, range(BEFORE, BEFORE + AFTER))
        after = bits(second)
        differs = [name for name, value in bits(whole).items() if after[name] != value]
        if use_graph and not any(info.num_kernels for info in second.graph_info()):
            differs.append("nothing was recorded")
        if (random.random(), np.random.random()) != ended:
            differs.append("streams")
        if (job.step, job.world_size, job.extra["rank"], job.extra["a"].tolist()) != (
            BEFORE,
            communicator.size,
            communicator.rank,
            [0, 1, 2],
        ):
            differs.append(str(job))
        found[option] = ", ".join(differs)
    return found


@slow_but_first("use_graph", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_a_job_that_goes_on_ends_with_the_same_bits(tmp_path: Path, size: int, use_graph: bool) -> None:
    transport = "local" if size == 1 else "shm"
    found = run_ranks(resumed, size, str(tmp_path), use_graph, OPTIONS, transport=transport)
    assert found == [dict.fromkeys(OPTIONS, "")] * size


@pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi4py is there")
def test_the_same_over_mpi(tmp_path: Path) -> None:
    options = ["fp32", "dgc:0.05"]
    assert (
        run_ranks(resumed, 2, str(tmp_path), True, options, transport="mpi")
        == [dict.fromkeys(options, "")] * 2
    )


def saved(communicator: Communicator, folder: str, steps: int = 3) -> Net:
    net = compiled(communicator, "sparseTopK:0.05", False)
    for step in range(steps):
        net(*batch(step, communicator.rank))
        checkpoint.save_job(folder, net)
    return net


def arrays_of_files(communicator: Communicator, folder: str) -> list[list[str]]:
    saved(communicator, folder, 1)
    [newest], _ = generation.find_generations(folder)
    each = [
        rank_arrays.read_shared(newest),
        rank_arrays.read_rank(newest, 0),
        rank_arrays.read_rank(newest, 1),
    ]
    sizes = [sum(each[0][name].nbytes for name in part) for part in newest.manifest.shared]
    assert min(sizes) > 500
    return [sorted(arrays) for arrays in each]


def test_parameters_are_stored_once_and_what_differs_for_each_rank(tmp_path: Path) -> None:
    shared, first, second = run_ranks(arrays_of_files, 2, str(tmp_path))[0]
    assert {"model/conv.W", "model/linear.b", "optimizer/conv.W:momentum", "optimizer/step_counter"} <= {
        *shared
    }
    assert first == second and {"model/norm.running_mean", "random/devices"} <= {*first}
    assert any(name.startswith("optimizer/sync/sparseTopK/linear.W") for name in first)
    assert not {*shared} & {*first}


def kept(communicator: Communicator, folder: str) -> list[list[str]]:
    net = compiled(communicator, "fp32", False)
    found = []
    for step in range(4):
        net(*batch(step, communicator.rank))
        checkpoint.save_job(folder, net, keep=np.int64(2))
        found.append(sorted(os.listdir(folder)))
    checkpoint.save_job(folder, net, keep=3)  # of the same step again
    checkpoint.load_job(folder, net)
    return [*found, sorted(os.listdir(folder)), [str(net.optimizer.step_counter)]]


def test_the_newest_generations_are_kept(tmp_path: Path) -> None:
    (tmp_path / "step-00000009").mkdir()  # of a job that was killed while it saved
    found = run_ranks(kept, 2, str(tmp_path))[0]
    names = [f"step-0000000{step}" for step in range(1, 5)]
    assert found[:4] == [names[:1], names[:2], names[1:3], names[2:4]]
    assert found[4:] == [[*names[2:4], "step-00000004.1"], ["4"]]


# ---- failures --------------------------------------------------------------------------------------------


def failing_save(communicator: Communicator, folder: str, fault: str) -> tuple[str, list[str], int]:
    """The error of each rank, what is whole afterwards, and the step that can be loaded."""
    net = saved(communicator, folder, 1)
    net(*batch(1, communicator.rank))
    last, error = communicator.rank == communicator.size - 1, "none"
    write = rank_arrays.write_arrays
    if fault == "disk" and last:

        def full(path: Path, arrays: Any) -> Any:
            raise CheckpointError(f"cannot write {path}: No space left on device")

        saving.write_arrays = full
    if fault == "step" and last:
        net.optimizer.opt._step_counter += 1
    extra: Any = {"extra": object()} if fault == "extra" and last else None
    if fault == "file" and communicator.rank == 0:
        shutil.move(folder, folder + ".away")
        Path(folder).write_text("a file")
    try:
        checkpoint.save_job(folder, net, extra=extra, block=False).wait()
    except SingaLiteError as raised:
        error = f"{type(raised).__name__}: {raised}"
    communicator.barrier()
    if fault == "file" and communicator.rank == 0:
        Path(folder).unlink()
        shutil.move(folder + ".away", folder)
    communicator.barrier()
    if fault == "disk" and last:
        saving.write_arrays = write
    other = compiled(communicator, "sparseTopK:0.05", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = checkpoint.load_job(folder, other)
    whole = [each.path.name for each in generation.find_generations(folder)[0]]
    again = "step" if fault == "step" else checkpoint.save_job(folder, other).path.name
    assert again in ("step", "step-00000001.1")
    return error, whole, job.step if job else -1


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("disk", ["rank 2 failed: cannot write", "No space left"]),
        ("step", ["rank 0 has made 2 steps, but rank 2 3"]),
        ("extra", ["extra 'extra' = <object object"]),
        ("file", ["Not a directory"]),
    ],
)
def test_a_save_that_fails_on_one_rank_is_an_error_on_all_and_the_last_one_stays(
    tmp_path: Path, fault: str, texts: list[str]
) -> None:
    for error, whole, step in run_ranks(failing_save, 3, str(tmp_path / "job"), fault):
        assert error.startswith(("CheckpointError: ", "OptionError: "))
        assert all(text.removeprefix("rank 2 failed: ") in error for text in texts)
        assert (whole, step) == (["step-00000001"], 1)


def removed_while_saving(communicator: Communicator, folder: str, what: str) -> str:
    """Rank 0 removes the folder before any rank writes, or a file that rank 1 has written."""
    net = saved(communicator, folder, 1)
    write, saving.SEEN_S = saving.write_arrays, 0.5

    def interrupted(path: Path, arrays: Any) -> Any:
        if what == "folder":
            if communicator.rank == 0:
                shutil.rmtree(folder)
            wait_until(lambda: not Path(folder).exists(), "no folder")
        elif communicator.rank == 0:
            wait_until(path.with_name(generation.rank_file(1)).exists, "a file of rank 1")
            path.with_name(generation.rank_file(1)).unlink()
        return write(path, arrays)

    saving.write_arrays = interrupted
    try:
        checkpoint.save_job(folder, net)
    except CheckpointError as error:
        return str(error)
    finally:
        saving.write_arrays = write
    return "no error"


@pytest.mark.parametrize(("what", "text"), [("folder", "cannot write"), ("file", "lacks")])
def test_what_is_removed_while_it_is_written_is_an_error_on_all(tmp_path: Path, what: str, text: str) -> None:
    for error in run_ranks(removed_while_saving, 3, str(tmp_path / "job"), what):
        assert text in error


def damaged(communicator: Communicator, folder: str, name: str) -> tuple[str, int, list[str]]:
    """The error, the step gone on from and the warnings where a file of the newest generation was changed."""
    saved(communicator, folder, 3)
    if communicator.rank == 0:
        path = Path(folder) / "step-00000003" / name
        if name == "gone":
            (Path(folder) / "step-00000003" / generation.rank_file(1)).unlink()
        elif name.startswith("pipe "):
            path = Path(folder) / "step-00000003" / name.removeprefix("pipe ")
            path.unlink()
            os.mkfifo(path)
        elif name == "all":
            for each in Path(folder).glob("*/rank-00001.safetensors"):
                each.write_bytes(each.read_bytes()[:-1])
        else:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 16
            path.write_bytes(content)
    communicator.barrier()
    net = compiled(communicator, "sparseTopK:0.05", False)
    before = bits(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            job = checkpoint.load_job(folder, net)
        except CheckpointError as error:
            assert bits(net) == before
            return str(error), 0, []
    assert job is not None and net.optimizer.step_counter == job.step
    return "", job.step, [str(each.message) for each in caught]


@pytest.mark.parametrize(
    "name",
    [
        *(generation.rank_file(1), generation.rank_file(2), generation.MANIFEST, "gone", "all"),
        *(f"pipe {name}" for name in (generation.rank_file(1), generation.MANIFEST)),
    ],
)
def test_a_damaged_generation_is_left_out_on_all_ranks(tmp_path: Path, name: str) -> None:
    for error, step, texts in run_ranks(damaged, 3, str(tmp_path), name):
        if name == "all":
            assert "no generation in" in error and "step-00000003" in error and "step-00000002" in error
        else:
            assert (error, step) == ("", 2) and "going on from step-00000002" in texts[0]


def unreadable(
    communicator: Communicator, folder: str, error: Exception, module: str
) -> tuple[str, list[str], int]:
    """The error where rank 1, or rank 0 a manifest, cannot read once; what is there then, and what loads after it."""
    saved(communicator, folder, 2)
    holder = rank_arrays if module == "_part_of" else generation
    net, real, calls = compiled(communicator, "sparseTopK:0.05", False), getattr(holder, module), []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1 and communicator.rank == (1 if module == "_part_of" else 0):
            raise error
        return real(*arguments)

    with mock.patch.object(holder, module, failing):
        try:
            checkpoint.load_job(folder, net)
            text = ""
        except CheckpointError as raised:
            text = str(raised)
        job = checkpoint.load_job(folder, net)
        checkpoint.save_job(folder, net, keep=3)
    assert job is not None
    return text, sorted(os.listdir(folder)), job.step


@pytest.mark.parametrize("module", ["_part_of", "_manifest"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()])
def test_a_generation_that_cannot_be_read_for_once_is_an_error_on_all_ranks_and_is_not_removed(
    tmp_path: Path, error: Exception, module: str
) -> None:
    for text, names, step in run_ranks(unreadable, 2, str(tmp_path), error, module):
        assert "cannot read" in text and type(error).__name__ in text
        assert (names, step) == (["step-00000001", "step-00000002", "step-00000002.1"], 2)


def test_a_manifest_with_another_value_or_without_its_hash_is_damaged(tmp_path: Path) -> None:
    net = compiled(LocalCommunicator(World()), "fp32", False)
    net._prepare()
    path = checkpoint.save_job(tmp_path, net).path / generation.MANIFEST
    whole = json.loads(path.read_bytes())
    for values in (whole | {"step": 7}, whole | {"extras": [{"a": 1}]}, {**whole, "sha256": None}, [whole]):
        path.write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match="it is damaged"):
            checkpoint.load_job(tmp_path, net)
    path.write_text(json.dumps(whole))
    assert checkpoint.load_job(tmp_path, net) is not None


def test_a_sampler_stays_where_the_model_refuses_a_checkpoint(tmp_path: Path) -> None:
    alone = LocalCommunicator(World())
    net, other = compiled(alone, "fp32", False), compiled(alone, "fp32", False)
    other.set_optimizer(opt.DistOpt(opt.Adam(), communicator=alone))
    for each in (net, other):
        each._prepare()
    not_compiled = type(net)()
    not_compiled.set_optimizer(opt.DistOpt(opt.SGD(), communicator=alone))
    sampler = ShardedSampler(40, 4, 0, 1)
    sampler.set_epoch(3)
    checkpoint.save_job(tmp_path, net, sampler=sampler)
    sampler.set_epoch(5)
    before = sampler.state_dict()
    for refuses, error in ((other, CheckpointError), (not_compiled, GraphError)):
        with pytest.raises(error):
            checkpoint.load_job(tmp_path, refuses, sampler=sampler)
        assert sampler.state_dict() == before


def refused(communicator: Communicator, folder: str) -> list[str]:
    """The errors of calls that cannot be right."""
    net, rank = saved(communicator, folder, 1), communicator.rank
    stranger, plain = compiled(communicator, "fp32", False), Net()
    sampler = ShardedSampler(40, 4, rank, communicator.size)
    adam = compiled(communicator, "fp32", False)
    adam.set_optimizer(opt.DistOpt(opt.Adam(), communicator=communicator))
    adam._prepare()
    missing = checkpoint.load_job(folder + "/none", net)
    calls: list[Any] = [
        lambda: checkpoint.save_job(folder, stranger),
        lambda: checkpoint.save_job(folder, net, keep=0),
        lambda: checkpoint.save_job(folder, plain),
        lambda: checkpoint.save_job(folder, "net"),  # type: ignore[arg-type]
        lambda: checkpoint.save_job(folder, net, extra={"a": np.array(["x"])}),
        lambda: checkpoint.save_job(folder, net, extra=[1]),  # type: ignore[arg-type]
        lambda: checkpoint.load_job(folder, adam),
        lambda: checkpoint.load_job(folder, net, sampler=sampler),
        lambda: checkpoint.load_job(folder + "/step-00000001/manifest.json", net),
    ]
    errors = ["None" if missing is None else "loaded"]
    for call in calls:
        try:
            call()
            errors.append("no error")
        except SingaLiteError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


REFUSALS = [
    "None",
    "was saved by another job",
    "keep = 0",
    "no optimizer",
    "expected a Model",
    "dtype <U1",
    "must be values by name",
    "with the optimizer SGD, this one is Adam",
    "was saved without a sampler",
    "cannot read the folder",
]


def test_bad_calls_are_refused_with_typed_errors(tmp_path: Path) -> None:
    for errors in run_ranks(refused, 2, str(tmp_path)):
        for text, error in zip(REFUSALS, errors, strict=True):
            assert text in error, errors


def test_a_plain_optimizer_in_a_job_of_several_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    net.set_optimizer(opt.SGD(lr=0.1))
    net.compile([batch(0, 0)[0]])
    autograd.training = False
    checkpoint.save_job(tmp_path, net)
    job = checkpoint.load_job(tmp_path, net)
    assert job is not None and job.world_size == 1
    for name, value in (("RENDEZVOUS_ID", "job"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(f"SINGA_LITE_{name}", value)
    with pytest.raises(OptionError, match="not a DistOpt"):
        checkpoint.save_job(tmp_path, net)


def loaded_behind_a_save(communicator: Communicator, folder: str) -> list[int]:
    """The steps that load_job finds at once behind saves that do not block."""
    net, found = compiled(communicator, "fp32", False), []
    write = saving.write_arrays

    def slow(path: Path, arrays: Any) -> None:
        time.sleep(0.2)
        write(path, arrays)

    saving.write_arrays = slow
    try:
        for step in range(2):
            net(*batch(step, communicator.rank))
            checkpoint.save_job(folder, net, block=False)
            job = checkpoint.load_job(folder, net)
            found.append(job.step if job else 0)
    finally:
        saving.write_arrays = write
    return found


LAST_SAVE = """
import sys
import numpy as np
import singa_lite.checkpoint.rank_arrays as rank_arrays
import singa_lite.checkpoint.saving as saving
from singa_lite import checkpoint, layer, opt
from singa_lite.comm.rendezvous import process_communicator
from singa_lite.errors import CheckpointError
from tests.checkpoint.job_net import compiled

communicator = process_communicator()
net = compiled(communicator, "fp32", False)
if sys.argv[2] == "full" and communicator.rank == communicator.size - 1:
    def full(path, arrays):
        raise CheckpointError("cannot write: No space left on device")
    saving.write_arrays = full
checkpoint.save_job(sys.argv[1], net, block=False)
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_process_that_ends_with_a_save_that_fails_ends_with_1(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "script.py").write_text(LAST_SAVE)
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "singa_lite", "run", "-n", str(ranks)]
    for kind, code in (("good", 0), ("full", 1)):
        done = subprocess.run(
            [*start, str(tmp_path / "script.py"), str(tmp_path / kind), kind],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=fresh_environment(PYTHONPATH=str(Path(__file__).parents[2])),
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert ("No space left" in done.stderr) == bool(code)
        assert len(generation.find_generations(tmp_path / kind)[0]) == 1 - code


def test_a_last_save_that_fails_ends_its_process_with_1_where_that_cannot_be_printed(tmp_path: Path) -> None:
    script = write_script(tmp_path, LAST_SAVE)
    with open("/dev/full", "w") as errors:
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path / "job"), "full"],
            stderr=errors,
            timeout=LIMIT_S,
            env=fresh_environment(PYTHONPATH=str(Path(__file__).parents[2])),
        )
    assert done.returncode == 1


LAST_SAVE_OF_MULTIPROCESSING = """
import multiprocessing, sys
import singa_lite.checkpoint.rank_arrays as rank_arrays
import singa_lite.checkpoint.saving as saving
from singa_lite import checkpoint
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CheckpointError
from tests.checkpoint.job_net import compiled

def train(folder):
    net = compiled(LocalCommunicator(World()), "fp32", False)
    if folder.endswith("full"):
        def full(path, arrays):
            raise CheckpointError("cannot write: No space left on device")
        saving.write_arrays = full
    checkpoint.save_job(folder, net, block=False)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=train, args=(folder,)) for folder in sys.argv[1:]]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    print([process.exitcode for process in processes])
"""


def test_the_last_save_of_a_forked_process_of_multiprocessing_is_written_and_its_failure_is_one(
    tmp_path: Path,
) -> None:
    script, folders = (
        write_script(tmp_path, LAST_SAVE_OF_MULTIPROCESSING),
        [tmp_path / "good", tmp_path / "full"],
    )
    done = subprocess.run(
        [sys.executable, str(script), *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=fresh_environment(PYTHONPATH=str(Path(__file__).parents[2])),
    )
    assert done.stdout == "[0, 1]\n" and "No space left" in done.stderr, done.stdout + done.stderr
    assert [len(generation.find_generations(folder)[0]) for folder in folders] == [1, 0]


LOSES_A_RANK = """
import atexit, os, signal, sys, time
import singa_lite.checkpoint.rank_arrays as rank_arrays
import singa_lite.checkpoint.saving as saving
from singa_lite import checkpoint
from singa_lite.comm.rendezvous import process_communicator
from singa_lite.errors import CommError
from tests.checkpoint.job_net import compiled

communicator = process_communicator()
net = compiled(communicator, "fp32", False)
if communicator.rank == 2:
    saving.write_arrays = lambda path, arrays: time.sleep(600)
atexit.register(lambda: print("seconds", time.monotonic() - failed_at))  # behind the Saving's own
checkpoint.save_job(sys.argv[1], net, block=False)
if communicator.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    communicator.barrier()
except CommError:
    failed_at = time.monotonic()
    if sys.argv[2] == "raises":
        raise
    sys.exit(5)
"""


@slow_but_first("kind", ["raises", "exits"])
def test_a_process_that_ends_by_a_lost_rank_does_not_wait_for_its_file(tmp_path: Path, kind: str) -> None:
    script = write_script(tmp_path, LOSES_A_RANK)
    done = run_ranks_of(
        script, 3, str(tmp_path / "job"), kind, is_patient=True, PYTHONPATH=str(Path(__file__).parents[2])
    )
    seconds = [float(line.split()[-1]) for line in done.stdout.splitlines() if "seconds" in line]
    assert len(seconds) == 2 and max(seconds) < saving.EXIT_S / 2, done.stderr
    assert "lacks ['rank-00002" in done.stderr
    assert generation.find_generations(tmp_path / "job")[0] == []


def test_loading_waits_for_a_save_that_does_not_block(tmp_path: Path) -> None:
    assert run_ranks(loaded_behind_a_save, 3, str(tmp_path)) == [[1, 2]] * 3


@pytest.mark.parametrize("block", [True, False])
def test_a_save_that_ctrl_c_leaves_is_waited_for_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: bool
) -> None:
    net = compiled(LocalCommunicator(World()), "fp32", False)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted)
        checkpoint.save_job(tmp_path, net, block=block)
    train(net, range(1))
    checkpoint.save_job(tmp_path, net)
    assert [each.manifest.step for each in generation.find_generations(tmp_path)[0]] == [1, 0]


def test_ctrl_c_while_a_save_is_waited_for_leaves_no_thread_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = compiled(LocalCommunicator(World()), "fp32", False)
    write, events = saving.write_manifest, []

    def slow(path: Path, manifest: generation.Manifest) -> None:
        wait_until(state_of(net).saving._is_awaited.is_set, "a save that waits for its thread")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)
        write(path, manifest)
        events.append("written")

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(saving, "write_manifest", slow)
        checkpoint.save_job(tmp_path, net)
    assert events == ["written"]


def test_a_save_that_ctrl_c_leaves_twice_is_waited_for_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = compiled(LocalCommunicator(World()), "fp32", False)
    write, main, events = saving.write_manifest, threading.main_thread().ident or 0, []

    def slow(path: Path, manifest: generation.Manifest) -> None:
        job_saving = state_of(net).saving
        wait_until(job_saving._is_awaited.is_set, "a save that waits for its thread")
        signal.pthread_kill(main, signal.SIGINT)
        wait_until(job_saving._is_given_up.is_set, "a save that Ctrl-C has ended")
        signal.pthread_kill(main, signal.SIGINT)
        wait_until(lambda: events, "the end of the save")
        write(path, manifest)
        events.append("written")

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(saving, "write_manifest", slow)
        checkpoint.save_job(tmp_path, net)
    assert events == []
    events.append("left")
    train(net, range(1))
    checkpoint.save_job(tmp_path, net)
    assert events == ["left", "written"]
    assert [each.manifest.step for each in generation.find_generations(tmp_path)[0]] == [1, 0]


def damaged_and_saved_again(communicator: Communicator, folder: str, name: str) -> list[int]:
    """The steps found after a file of the newest generation was damaged, and after that job has saved again."""
    net, found = saved(communicator, folder, 2), []
    if communicator.rank == 0:
        path = Path(folder) / "step-00000002" / name
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    communicator.barrier()
    net = compiled(communicator, "fp32", False)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job = checkpoint.load_job(folder, net)
        found.append(job.step if job else 0)
        train(net, range(found[-1], 4))
        checkpoint.save_job(folder, net, keep=2)
        found.append(len(list(Path(folder).iterdir())))
    return found


@pytest.mark.parametrize("name", [generation.rank_file(0), generation.MANIFEST])
def test_a_job_that_went_on_behind_a_damaged_generation_saves_again(tmp_path: Path, name: str) -> None:
    # the damaged one is not among the two that are kept
    assert run_ranks(damaged_and_saved_again, 3, str(tmp_path), name) == [[1, 2, 4, 2]] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000004.1"]


def beside_others(communicator: Communicator, folder: str, name: str) -> tuple[str, bool, list[str]]:
    """The error beside a folder never finished that has this file of others, and what is there without that file."""
    net, other = saved(communicator, folder, 1), Path(folder) / "step-00001000"
    if communicator.rank == 0:
        (other / name).parent.mkdir(parents=True)
        for each in (generation.rank_file(1), f".{generation.rank_file(2)}.0a1b{PART_SUFFIX}", name):
            (other / each).write_text("mine")
    communicator.barrier()
    with pytest.raises(CheckpointError) as error:
        checkpoint.save_job(folder, net)
    stays = (other / name).exists()
    communicator.barrier()
    if communicator.rank == 0:
        (other / name).unlink()
        if (other / name).parent != other:
            (other / name).parent.rmdir()
    communicator.barrier()
    checkpoint.save_job(folder, net)
    return str(error.value), stays, sorted(os.listdir(folder))


@pytest.mark.parametrize("name", ["thesis.txt", "rank-00000.safetensors/a"])
def test_a_folder_never_finished_is_removed_unless_it_has_files_of_others(tmp_path: Path, name: str) -> None:
    for error, stays, names in run_ranks(beside_others, 3, str(tmp_path), name):
        assert "step-00001000 has" in error and name.partition("/")[0] in error
        assert stays and names == ["step-00000001", "step-00000001.1"]


def test_a_file_with_the_name_of_a_generation_stays_and_disturbs_no_save(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").write_text("mine")
    net = saved(LocalCommunicator(World()), str(tmp_path), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000001.1"]
    job = checkpoint.load_job(tmp_path, net)
    assert job is not None and job.folder.name == "step-00000001.1"
    assert (tmp_path / "step-00000001").read_text() == "mine"


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def saved_without_a_thread(communicator: Communicator, folder: str) -> tuple[str, list[str]]:
    """The error of a save for which rank 1 gets no thread, and the generations behind the next one."""
    net = saved(communicator, folder, 1)
    train(net, range(1, 2))
    started = no_thread if communicator.rank == 1 else threading.Thread.start
    with mock.patch.object(threading.Thread, "start", started), pytest.raises(CheckpointError) as error:
        checkpoint.save_job(folder, net)
    checkpoint.save_job(folder, net)
    return str(error.value), sorted(os.listdir(folder))


def test_a_save_that_gets_no_thread_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    for error, names in run_ranks(saved_without_a_thread, 3, str(tmp_path)):
        assert "can't start new thread" in error, error
        assert len(names) == 2 and names[0] == "step-00000001"


def test_a_relative_folder_is_an_error_where_the_current_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = compiled(LocalCommunicator(World()), "fp32", False)
    train(net, range(1))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CheckpointError, match="save_job: job is relative, and the current folder is gone"):
        checkpoint.save_job("job", net)
    with pytest.raises(CheckpointError, match="load_job: job is relative, and the current folder is gone"):
        checkpoint.load_job("job", net)


def repaired(communicator: Communicator, folder: str) -> list[str]:
    """The generations behind a save by a job that went on from one that it had found damaged before."""
    saved(communicator, folder, 3)
    path = Path(folder) / "step-00000003" / generation.rank_file(0)
    net = compiled(communicator, "fp32", False)
    for is_damaged in (True, False):
        if communicator.rank == 0:
            content = bytearray(path.read_bytes())
            content[-3] ^= 1
            path.write_bytes(content)
        communicator.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job = checkpoint.load_job(folder, net)
        assert job is not None and job.step == 3 - is_damaged
    train(net, range(3, 4))
    checkpoint.save_job(folder, net, keep=2)
    return sorted(os.listdir(folder))


def test_a_generation_that_was_repaired_is_kept(tmp_path: Path) -> None:
    assert run_ranks(repaired, 3, str(tmp_path)) == [["step-00000003", "step-00000004"]] * 3


def set_on_one_rank(communicator: Communicator, folder: str, option: str, is_frozen: bool) -> str:
    """The error of a save after a rank has changed a parameter by itself, and maybe ended its training."""
    net = compiled(communicator, option, False)
    train(net, range(2))
    checkpoint.save_job(folder, net)
    if communicator.rank == 1:
        changed = next(iter(net.get_params().values()))
        changed.set_value(0.5)
        changed.stores_grad = not is_frozen
    try:
        checkpoint.save_job(folder, net)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_frozen", [False, True])
@slow_but_first("option", ["fp32", "sparseTopK:0.05", "localSGD:8"])
def test_parameters_that_differ_although_the_dist_option_keeps_them_equal_are_not_saved(
    tmp_path: Path, option: str, is_frozen: bool
) -> None:
    errors = run_ranks(set_on_one_rank, 3, str(tmp_path), option, is_frozen)
    if option == "localSGD:8":
        assert errors == [""] * 3
        return
    assert all("is another on rank 1 than on rank 0" in error for error in errors)
    assert os.listdir(tmp_path) == ["step-00000002"]


def other_sampler(communicator: Communicator, folder: str) -> tuple[str, bool]:
    """The error where one rank's sampler is of another data set, and whether nothing has changed."""
    rank, size = communicator.rank, communicator.size
    samplers = [ShardedSampler(24, 2, rank, size), ShardedSampler(24 + 6 * (rank == 1), 2, rank, size)]
    net = compiled(communicator, "fp32", False)
    checkpoint.save_job(folder, net, sampler=samplers[0])
    train(net, range(2))
    next(iter(samplers[1]))
    before = bits(net), samplers[1].state_dict()
    with pytest.raises(CheckpointError) as error:
        checkpoint.load_job(folder, net, sampler=samplers[1])
    return str(error.value), (bits(net), samplers[1].state_dict()) == before


def test_a_sampler_that_does_not_fit_on_one_rank_leaves_all_ranks_as_they_were(tmp_path: Path) -> None:
    for error, is_unchanged in run_ranks(other_sampler, 3, str(tmp_path / "job")):
        assert is_unchanged, error
        assert "num_samples" in error


def inside_a_loop(communicator: Communicator, folder: str) -> str:
    """The error where one rank loads while a thread runs its sampler ahead."""
    sampler = ShardedSampler(24, 2, communicator.rank, communicator.size)
    net = compiled(communicator, "fp32", False)
    checkpoint.save_job(folder, net, sampler=sampler)
    taken = prefetch(sampler, 1)
    try:
        if communicator.rank == 1:
            next(taken)
        checkpoint.load_job(folder, net, sampler=sampler)
    except CheckpointError as error:
        return str(error)
    finally:
        taken.close()
    return ""


def test_a_sampler_whose_state_is_not_known_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    for error in run_ranks(inside_a_loop, 3, str(tmp_path / "job"), communicator_timeout_s=30):
        assert "prefetch" in error


def disagree(communicator: Communicator, folder: str) -> list[str]:
    net, errors = compiled(communicator, "fp32", False), []
    first = communicator.rank == 0
    sampler = ShardedSampler(12, 2, communicator.rank, communicator.size)
    for options in (
        {"keep": 2 + first},
        {"sampler": sampler if first else None},
        {"folder": folder + "x" * first},
    ):
        with pytest.raises(CheckpointError) as error:
            checkpoint.save_job(options.pop("folder", folder), net, **options)  # type: ignore[arg-type]
        errors.append(str(error.value))
    return errors


def with_sampler(
    communicator: Communicator, folder: str, seeds: list[int], batches: list[int], own: bool
) -> str:
    """The error where samplers have these seeds and so many batches of them were taken, which a thread makes ahead."""
    net, rank = compiled(communicator, "fp32", False), communicator.rank
    place = (0, 1) if own else (rank, communicator.size)
    sampler = ShardedSampler(24, 2, *place, seed=seeds[rank])
    taken = prefetch(sampler, rank + 1, sampler=sampler)
    for _ in range(batches[rank]):
        next(taken)
    try:
        checkpoint.save_job(folder, net, sampler=sampler)
    except CheckpointError as error:
        return str(error)
    finally:
        taken.close()
    return ""


@pytest.mark.parametrize(
    ("seeds", "batches", "own", "error"),
    [
        ([1, 1, 1], [2, 2, 2], False, ""),
        ([1, 1, 1], [4, 4, 4], False, ""),
        ([1, 1, 1], [2, 2, 3], False, "position is 2 on rank 0 but 3 on rank 2"),
        ([1, 1, 1], [4, 3, 4], False, "epoch is 1 on rank 0 but 0 on rank 1"),
        ([1, 1, 5], [2, 2, 2], False, "seed is 1 on rank 0 but 5 on rank 2"),
        ([1, 1, 5], [2, 2, 3], True, ""),
    ],
)
def test_samplers_that_differ_in_what_they_share_are_refused_on_all_ranks(
    tmp_path: Path, seeds: list[int], batches: list[int], own: bool, error: str
) -> None:
    for text in run_ranks(with_sampler, 3, str(tmp_path / "job"), seeds, batches, own):
        assert error in text and bool(error) == bool(text)
        assert (tmp_path / "job" / "step-00000000" / generation.MANIFEST).exists() != bool(error)


def test_ranks_that_save_otherwise_are_an_error_that_names_the_values(tmp_path: Path) -> None:
    for keep, sampler, folder in run_ranks(disagree, 3, str(tmp_path / "job")):
        assert "keep is 3 on rank 0 but 2 on rank 1" in keep
        assert "a sampler is True on rank 0 but False on rank 1" in sampler
        assert "jobx' on rank 0 but" in folder


@pytest.mark.parametrize(
    "value",
    [{1: 2}, [{"a": {None: 1}}], np.zeros(2, np.longdouble), np.ma.masked_array([1.0], [True]), {1, 2}],
)
def test_extras_that_would_come_back_otherwise_are_refused(tmp_path: Path, value: Any) -> None:
    net = compiled(LocalCommunicator(World()), "fp32", False)
    with pytest.raises(OptionError, match="extra 'a'"):
        checkpoint.save_job(tmp_path, net, extra={"a": value})


class Rounded(Net):
    buffers = ("half",)

    def __init__(self) -> None:
        super().__init__()
        self.half = Tensor((2,), dtype="bfloat16")


def test_a_bfloat16_buffer_is_refused_by_name(tmp_path: Path) -> None:
    net = Rounded()
    net.set_optimizer(opt.SGD(0.1))
    net.compile([batch(0, 0)[0]])
    with pytest.raises(CheckpointError, match="'model/half' is bfloat16; save it as float32"):
        checkpoint.save_job(tmp_path, net)
    assert not list(tmp_path.glob("step*"))


def saved_and_loaded_with_another_bit_generator(communicator: Communicator, folder: str) -> list[str]:
    """The errors of ``save_job`` and ``load_job`` while numpy's functions of rank 1 draw from PCG64."""
    net = compiled(communicator, "fp32", False)
    checkpoint.save_job(folder, net)
    texts, before = [], np.random.get_bit_generator()
    if communicator.rank == 1:
        np.random.set_bit_generator(np.random.PCG64(3))
    try:
        for call in (checkpoint.save_job, checkpoint.load_job):
            with pytest.raises(CheckpointError) as caught:
                call(folder, net)
            texts.append(str(caught.value))
    finally:
        np.random.set_bit_generator(before)
    return [*texts, *sorted(path.name for path in Path(folder).iterdir())]


def test_another_bit_generator_of_numpy_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for found in run_ranks(saved_and_loaded_with_another_bit_generator, 3, str(tmp_path)):
        assert len(found) == 3 and found[-1] == "step-00000000"
        assert all(
            "of numpy draw from PCG64, whose state a checkpoint does not keep" in text for text in found[:2]
        )


def test_extras_of_the_other_byte_order_come_back(tmp_path: Path) -> None:
    net = compiled(LocalCommunicator(World()), "fp32", False)
    checkpoint.save_job(tmp_path, net, extra={"a": np.arange(3, dtype=">f4"), "b": (1, 2)})
    job = checkpoint.load_job(tmp_path, net)
    assert job is not None and job.extra["a"].tolist() == [0, 1, 2] and job.extra["b"] == [1, 2]


def test_another_dist_option_is_a_warning(tmp_path: Path) -> None:
    checkpoint.save_job(tmp_path, compiled(LocalCommunicator(World()), "dgc:0.05", False))
    with pytest.warns(
        UserWarning, match=r"saved with dist_option 'dgc:0\.05', and goes on with 'fp32'"
    ) as caught:
        checkpoint.load_job(tmp_path, compiled(LocalCommunicator(World()), "fp32", False))
    assert caught[0].filename == __file__


def with_optimizer(optimizer: opt.Optimizer) -> Net:
    net = compiled(LocalCommunicator(World()), "fp32", False)
    net.set_optimizer(optimizer)
    net._prepare()
    return net


def test_another_optimizer_whose_states_have_the_same_names_is_refused(tmp_path: Path) -> None:
    checkpoint.save_job(tmp_path, with_optimizer(opt.Adam()))
    with pytest.raises(CheckpointError, match="with the optimizer Adam, this one is AdamW"):
        checkpoint.load_job(tmp_path, with_optimizer(opt.AdamW()))


def test_other_settings_than_the_learning_rate_are_a_warning(tmp_path: Path) -> None:
    net = with_optimizer(opt.SGD(lr=opt.ExponentialDecay(0.1, 5, 0.8), momentum=0.9))
    net(*batch(0, 0))
    checkpoint.save_job(tmp_path, net)
    with pytest.warns(UserWarning, match="another momentum, nesterov of the optimizer"):
        checkpoint.load_job(tmp_path, with_optimizer(opt.SGD(lr=0.1, momentum=0.8, nesterov=True)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load_job(tmp_path, with_optimizer(opt.SGD(lr=0.2, momentum=0.9)))


def test_a_plain_optimizer_in_a_job_of_mpi_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    net.set_optimizer(opt.SGD(lr=0.1))
    net.compile([batch(0, 0)[0]])
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(OptionError, match="not a DistOpt"):
        checkpoint.save_job(tmp_path, net)


def other_arguments(communicator: Communicator, folder: str) -> list[str]:
    net = saved(communicator, folder, 1)
    before, texts = bits(net), []
    for name, sampler in (("job", None), ("", ShardedSampler(60, 3, communicator.rank, 3))):
        wrong = communicator.rank == 1
        try:
            checkpoint.load_job(
                f"{folder}/{name}" if wrong else folder, net, sampler=sampler if wrong else None
            )
        except CheckpointError as error:
            texts.append(str(error))
        assert bits(net) == before
    return texts


def test_ranks_that_load_another_folder_or_a_sampler_more_are_an_error_on_all(tmp_path: Path) -> None:
    for first, second in run_ranks(other_arguments, 3, str(tmp_path)):
        assert "load_job: folder is" in first and "on rank 1" in first
        assert "load_job: folder is" in second or "a sampler is False on rank 0 but True on rank 1" in second


def alone(folder: Path) -> Net:
    net = compiled(LocalCommunicator(World()), "fp32", False)
    net(*batch(0, 0))
    checkpoint.save_job(folder, net)
    return net


def test_old_generations_with_files_of_others_stay_and_of_a_link_only_the_link_goes(tmp_path: Path) -> None:
    folder, archive = tmp_path / "job", tmp_path / "best"
    net = alone(folder)
    (first,) = folder.iterdir()
    (first / "notes.txt").write_text("mine")
    net(*batch(0, 1))
    second = checkpoint.save_job(folder, net).wait()
    second.rename(archive)
    second.symlink_to(archive)
    files = sorted(path.name for path in archive.iterdir())
    for step in range(2, 5):
        net(*batch(0, step))
        checkpoint.save_job(folder, net, keep=2)
    assert (first / "notes.txt").read_text() == "mine" and (first / "manifest.json").exists()
    assert not second.is_symlink() and sorted(path.name for path in archive.iterdir()) == files
    assert len(list(folder.iterdir())) == 3


def test_a_number_of_more_digits_than_python_writes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="extra 'large' = a value of type int is not a JSON value"):
        checkpoint.save_job(tmp_path, alone(tmp_path), extra={"large": 10**5000})


def test_a_failed_save_raises_at_every_wait(tmp_path: Path) -> None:
    net = alone(tmp_path)
    with mock.patch.object(saving, "write_arrays", side_effect=CheckpointError("no room")):
        failing = checkpoint.save_job(tmp_path, net, block=False)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="no room"):
                failing.wait()
    assert checkpoint.save_job(tmp_path, net).wait().is_dir()


def test_a_forked_child_does_not_wait_for_a_save_of_its_parent(tmp_path: Path) -> None:
    is_over, write = threading.Event(), saving.write_arrays

    def late(*arguments: Any) -> None:
        assert is_over.wait(LIMIT_S)
        write(*arguments)

    net = compiled(LocalCommunicator(World()), "fp32", False)
    with mock.patch.object(saving, "write_arrays", late):
        pending = checkpoint.save_job(tmp_path / "job", net, block=False)
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # in place of waiting for ever
            try:
                saving.write_arrays = write
                assert checkpoint.load_job(tmp_path / "job", net) is None
                assert checkpoint.save_job(tmp_path / "child", net).wait().is_dir()
                with pytest.raises(CheckpointError, match="call wait in the parent"):
                    pending.wait()
            except BaseException:
                os._exit(1)
            os._exit(0)
        ended = os.waitpid(pid, 0)[1]
        is_over.set()
        assert pending.wait().is_dir() and ended == 0


def test_models_that_are_equal_have_checkpoints_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Net, "__eq__", lambda self, other: True)  # as a dataclass has them
    monkeypatch.setattr(Net, "__hash__", None)
    mine, other = (compiled(LocalCommunicator(World()), "fp32", False) for _ in range(2))
    checkpoint.save_job(tmp_path, mine)
    with pytest.raises(CheckpointError, match="was saved by another job"):
        checkpoint.save_job(tmp_path, other)
    known = state_of(mine).known
    del mine
    gc.collect()
    assert known not in [each.known for each in config.state.jobs.values()]


def test_a_folder_that_another_job_has_filled_since_is_refused(tmp_path: Path) -> None:
    mine = alone(tmp_path / "job")
    shutil.rmtree(tmp_path / "job")
    alone(tmp_path / "job")  # with the same steps and numbers
    with pytest.raises(CheckpointError, match="was saved by another job"):
        checkpoint.save_job(tmp_path / "job", mine)


def test_a_job_that_still_writes_when_another_begins_to_save_the_same_step_fails_and_the_other_does_not(
    tmp_path: Path,
) -> None:
    alone(tmp_path)
    slow, other = (compiled(LocalCommunicator(World()), "fp32", False) for _ in range(2))
    for net in (slow, other):
        checkpoint.load_job(tmp_path, net)
        net(*batch(1, 0))
    is_written, is_saved = threading.Event(), threading.Event()
    write = saving.write_manifest

    def late(*arguments: Any) -> None:
        is_written.set()
        assert is_saved.wait(LIMIT_S)
        write(*arguments)

    with mock.patch.object(saving, "write_manifest", late):
        failing = checkpoint.save_job(tmp_path, slow, block=False)
        try:
            assert is_written.wait(LIMIT_S)
            with pytest.raises(CheckpointError, match=r"another model has saved to .* call wait\(\)"):
                checkpoint.save_job(tmp_path, other)
            # as another process does, which does not know of the first
            path = generation.make_folder(tmp_path, 2)
        finally:
            is_saved.set()
        with pytest.raises(CheckpointError, match="cannot write"):
            failing.wait()
    assert path.is_dir() and checkpoint.save_job(tmp_path, other).is_over


def test_a_folder_with_a_manifest_that_cannot_be_read_is_refused_unless_it_was_loaded_from(
    tmp_path: Path,
) -> None:
    net = alone(tmp_path)
    net(*batch(1, 0))
    damaged = checkpoint.save_job(tmp_path, net).path / generation.MANIFEST
    damaged.write_bytes(b"{}")
    other = compiled(LocalCommunicator(World()), "fp32", False)
    other(*batch(0, 0))
    (tmp_path / "step-00000001" / generation.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.save_job(tmp_path, other)
    checkpoint.save_job(tmp_path, net)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("dtype", dtype) for dtype in ("F8_E4M3", "F4", "X", 3, None)),
        *(
            ("data_offsets", offsets)
            for offsets in ([0, 2**70], [2**70, 2**70 + 4], [8, 4], [-4, 0], [0, 1e30])
        ),
    ],
)
def test_a_file_with_a_header_that_cannot_be_right_is_damaged(tmp_path: Path, key: str, value: Any) -> None:
    net = alone(tmp_path)
    path = tmp_path / "step-00000001" / generation.rank_file(0)
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header["model/conv.W"][key] = value
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    with pytest.raises(CheckpointError, match="no generation"):
        checkpoint.load_job(tmp_path, net)


def amid_other_calls(communicator: Communicator, folder: str) -> list[str]:
    """The error of saving where this rank has made another number of calls of the next update, and what is there."""
    net = compiled(communicator, "fp32", False, accumulate=3)
    for step in range(3):
        net(*batch(step, communicator.rank))
    checkpoint.save_job(folder, net, keep=1)
    for step in range(2 - communicator.rank % 2):
        net(*batch(step, communicator.rank))
    with pytest.raises(CheckpointError) as raised:
        checkpoint.save_job(folder, net, keep=1)
    whole, _ = generation.find_generations(folder)
    return [str(raised.value), *(each.path.name for each in whole)]


def test_ranks_at_other_calls_of_an_update_are_an_error_and_the_last_save_stays(tmp_path: Path) -> None:
    for error, *names in run_ranks(amid_other_calls, 2, str(tmp_path)):
        assert "after 1 steps rank 0 has made 2 calls of the next one, but rank 1 1" in error
        assert names == ["step-00000001"]


def test_a_folder_that_is_saved_to_while_it_is_read_has_a_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(number: int) -> None:
        path = generation.make_folder(tmp_path, number)
        values = [number, str(number), number, 1, 0.0, {}, {}, None, [None], [None], [{}], [{}]]
        generation.write_manifest(path, generation.Manifest(generation.FORMAT, *values))
        generation.remove_old(tmp_path, 1, ())

    def check(path: Path, check: Callable[[Path], None] = generation.check_regular) -> None:
        if len(saved) < 4:
            saved.append(0)
            with monkeypatch.context() as patch:
                patch.setattr(generation, "check_regular", check)
                save(1 + len(saved))  # which removes what was listed
        check(path)

    saved: list[int] = []
    save(1)
    monkeypatch.setattr(generation, "check_regular", check)
    [found], problems = generation.find_generations(tmp_path)
    assert found.manifest.step == 5 and not problems


def test_a_model_that_is_not_compiled_cannot_go_on_though_nothing_is_saved_yet(tmp_path: Path) -> None:
    net = Net()
    net.set_optimizer(opt.SGD(0.1))
    with pytest.raises(
        GraphError, match=r"load_job: Net has no parameters yet; call compile\(\[inputs\]\) first"
    ):
        checkpoint.load_job(tmp_path / "new", net)
    assert not (tmp_path / "new").exists()
