# SPDX-License-Identifier: Apache-2.0
"""Finding a store by its name, in a process alone and in one of a job; what may not be imported beneath it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import singa_lite
from singa_lite import config, kvstore
from singa_lite.comm import job
from singa_lite.errors import CommError, OptionError
from singa_lite.kvstore.calls import Spec
from singa_lite.kvstore.create import ASYNC_NAMES, SYNC_NAMES, serve
from singa_lite.kvstore.sharding import Sharding
from tests.comm.processes import WORLD

LOCAL = ["local", "device", "nccl", "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device"]
SYNC = ["dist", "dist_sync", "dist_device_sync", "dist_sync_device"]
ASYNC = ["dist_async", "dist_async_device", "dist_device_async"]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No job in the environment, and none joined."""
    for name in list(os.environ):
        if WORLD.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(job, "AT_START", ())
    monkeypatch.setattr(config, "state", config.State(default_device=config.state.default_device))


@pytest.fixture
def of_a_job(monkeypatch):
    """As worker 0 of two, which nobody joins."""
    names = ("SINGA_LITE_RANK", "SINGA_LITE_WORLD_SIZE", "SINGA_LITE_RENDEZVOUS_ID", "SINGA_LITE_NUM_SERVERS")
    for name, value in zip(names, ("0", "2", "abc", "0"), strict=True):
        monkeypatch.setenv(name, value)


def test_the_names_are_mxnets():
    assert set(SYNC_NAMES) == set(SYNC) and set(ASYNC_NAMES) == set(ASYNC)
    assert kvstore.create().type == "local"


@pytest.mark.parametrize("name", SYNC)
def test_one_process_has_one_dist_store(name):
    store = kvstore.create(name)
    assert (store.type, store.num_workers, store.num_servers) == (name, 1, 0)
    assert kvstore.create(name) is store and kvstore.create(name, timeout_s=3) is store
    other = SYNC[(SYNC.index(name) + 1) % 4]
    for make in (lambda: kvstore.create(other), lambda: kvstore.create(name, big_array=7)):
        with pytest.raises(
            OptionError, match=r"this process has a store made with .* it cannot have another"
        ):
            make()
    assert kvstore.create("local") is not kvstore.create("local")


@pytest.mark.parametrize("name", ["dist_", "Dist", "local_sync", "async", "p3", "", None, 3, ["dist"]])
def test_an_unknown_name_lists_those_there_are(name):
    with pytest.raises(OptionError) as error:
        kvstore.create(name)
    assert all(repr(known) in str(error.value) for known in [*LOCAL, *SYNC, *ASYNC])


@pytest.mark.parametrize("name", ASYNC)
def test_async_needs_servers(name):
    with pytest.raises(
        OptionError, match=f"'{name}' needs servers; start the script with `singa-lite run -n 1 -s 1`"
    ):
        kvstore.create(name)


@pytest.mark.parametrize(
    ("name", "options", "piece"),
    [
        ("dist", {"staleness": 0}, "staleness is for dist_async"),
        ("local", {"staleness": 3}, "staleness is for dist_async"),
        ("dist_async", {"staleness": -1}, "staleness = -1 must be an int >= 0"),
        ("dist_async", {"staleness": 1.5}, "staleness = 1.5 must be an int >= 0"),
        ("dist_async", {"staleness": True}, "staleness = True"),
        ("dist", {"big_array": 0}, "big_array = 0 must be an int >= 1"),
        ("dist", {"big_array": "many"}, "big_array = 'many'"),
        ("dist", {"timeout_s": 0}, "timeout_s = 0"),
        ("dist", {"timeout_s": float("nan")}, "timeout_s = nan"),
        ("dist", {"timeout_s": "long"}, "timeout_s = 'long'"),
    ],
)
def test_an_option_out_of_range_is_refused(name, options, piece):
    with pytest.raises(OptionError) as error:
        kvstore.create(name, **options)
    assert piece in str(error.value)
    assert config.state.store is None and config.state.communicator is None


@pytest.mark.parametrize("name", LOCAL)
def test_a_local_store_in_a_job_of_several_workers_is_refused(of_a_job, name):
    with pytest.raises(
        OptionError, match=rf"'{name}' is a store of this process, one of 2 workers, .*alone=True"
    ):
        kvstore.create(name)
    store = kvstore.create(name, alone=True)
    store.init(1, np.ones(2))
    assert store.num_workers == 1


def test_a_process_without_a_job_is_no_server():
    with pytest.raises(CommError, match="has no servers to send to"):
        serve()


def test_a_store_of_the_script_is_found_by_its_names():
    class TestStore(kvstore.KVStoreBase):
        names = ("teststore", "mine")

        def broadcast(self, key, value, out, priority=0):
            out[...] = value

        def pushpull(self, key, value, out=None, priority=0):
            (value if out is None else out)[...] = value

    for name in ("teststore", "mine"):
        store = kvstore.create(name)
        assert isinstance(store, TestStore) and store.type == "teststore"
        assert (store.rank, store.num_workers) == (0, 1)
        assert store.is_capable("optimizer") is False
        with pytest.raises(OptionError, match="capability = 'sparse'"):
            store.is_capable("sparse")


def test_a_text_is_one_name_of_a_store_of_the_script():
    class NamedStore(kvstore.KVStoreBase):
        names = "named"

        def broadcast(self, key, value, out, priority=0):
            out[...] = value

        def pushpull(self, key, value, out=None, priority=0):
            (value if out is None else out)[...] = value

    store = kvstore.create("named")
    assert isinstance(store, NamedStore) and store.type == "named"
    with pytest.raises(OptionError, match="'n' is not known"):
        kvstore.create("n")


def test_a_forked_child_does_not_use_its_parents_store():
    script = """
import os, sys
from singa_lite import kvstore
store = kvstore.create("dist")
child = os.fork()
if child == 0:
    os._exit(0 if kvstore.create("dist") is not store else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=100).returncode == 0


# ---- which server keeps what -------------------------------------------------------------------------

MNIST_CNN = [500, 20, 25_000, 50, 400_000, 500, 5_000, 10]


def loads(sizes, num_servers, big_array=65_536):
    sharding = Sharding(num_servers, big_array)
    for number, size in enumerate(sizes):
        parts = sharding.place(Spec(number, number, (size,), np.dtype(np.float32), size))
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == size
    return sharding.loads


@pytest.mark.parametrize(
    ("sizes", "num_servers", "expected"),
    [
        ([1211 * 1211], 2, [733_260, 733_261]),
        ([1211 * 1211], 3, [488_840, 488_841, 488_840]),
        (MNIST_CNN, 1, [431_080]),
        (MNIST_CNN, 2, [206_060, 225_020]),
        (MNIST_CNN, 3, [138_833, 133_914, 158_333]),
        ([65_536], 2, [32_768, 32_768]),
        ([65_535], 2, [65_535, 0]),
        ([5, 5, 5, 5], 3, [10, 5, 5]),
    ],
)
def test_large_arrays_are_cut_and_others_go_where_least_is(sizes, num_servers, expected):
    assert loads(sizes, num_servers) == expected


@pytest.mark.parametrize(("num_servers", "most"), [(2, 1.05), (3, 1.11)])
def test_no_server_has_much_more_than_its_share(num_servers, most):
    found = loads(MNIST_CNN, num_servers)
    assert max(found) * num_servers / sum(found) <= most


def test_an_array_of_fewer_elements_than_servers_is_not_cut():
    assert loads([2, 0, 1], 3, big_array=1) == [2, 1, 0]
    assert loads([3], 3, big_array=1) == [1, 1, 1]


# ---- no pickle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["comm", "kvstore", "gluon", "opt"])
def test_nothing_here_imports_pickle(folder):
    paths = sorted((Path(singa_lite.__file__).parent / folder).glob("*.py"))
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            forbidden = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
            assert not forbidden & {part for name in names for part in name.split(".")}, path
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, path
