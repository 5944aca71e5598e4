# SPDX-License-Identifier: Apache-2.0
"""The checkpoint file: what damaged and hostile ones do, how files are written, and files of earlier versions."""

import errno
import fcntl
import io
import json
import os
import signal
import struct
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest

from singa_lite import layer, model, opt
from singa_lite.device import get_default_device
from singa_lite.errors import CheckpointError
from singa_lite.files import atomic_file
from singa_lite.model_file import ATTRIBUTES_FILE, OPTIMIZER_FILE, STATES_FILE
from singa_lite.tensor import Tensor, to_numpy

MUTATIONS = 400
AUX = {"epoch": np.array(3), "mean": np.arange(4, dtype=np.float32)}


class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.out = layer.Linear(6), layer.BatchNorm2d(), layer.Linear(3)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.out(layer.Flatten()(self.norm(x)))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss


def batch(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4, 2, 3, 3)).astype(np.float32)
    return Tensor(data=x), Tensor(data=rng.integers(0, 3, 4))


def compiled(seed=1, steps=2, optimizer=None):
    get_default_device().SetRandSeed(seed)
    net = Net()
    net.set_optimizer(optimizer or opt.SGD(lr=0.1, momentum=0.9))
    net.compile([batch(0)[0]])
    for step in range(steps):
        net(*batch(step))
    net.eval()
    return net


def test_a_snapshot_with_an_optimizer_s_states_needs_one():
    net, snapshot = compiled(), compiled().snapshot()
    net.optimizer = None
    with pytest.raises(CheckpointError, match="call set_optimizer"):
        net.restore(snapshot)


def test_states_for_an_optimizer_without_parameters_say_how_it_gets_them():
    states = compiled().optimizer.get_states()
    with pytest.raises(CheckpointError, match=r"SGD: it has no parameters .* call set_parameters"):
        opt.SGD(lr=0.1, momentum=0.9).set_states(states)


def everything(net):
    """All that load_states may change, as bytes."""
    states = {name: to_numpy(value).tobytes() for name, value in net.get_states().items()}
    slots = {name: value.tobytes() for name, value in net.optimizer.get_states().items()}
    return states, slots, get_default_device().get_random_state()


def test_a_list_that_is_no_array_is_a_checkpoint_error(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(CheckpointError, match="expected arrays in aux_states"):
        compiled().save_states(str(path), {"a": [[1], [2, 3]]})
    assert not path.exists()


def test_an_array_with_masked_values_is_a_checkpoint_error(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(CheckpointError, match="a has masked values"):
        compiled().save_states(path, {"a": np.ma.array([1.0, 2.0], mask=[False, True])})
    assert not path.exists()


@pytest.mark.parametrize("value", [{"a": np.zeros(2)}, 0.5, [1, 2], "text", Tensor((2,)), None], ids=repr)
def test_a_state_of_an_optimizer_that_is_no_array_is_a_checkpoint_error(value, tmp_path):
    class Own(opt.SGD):
        def get_states(self):
            return None if value is None else {**super().get_states(), "mine": value}

    net, path = compiled(optimizer=Own(0.1)), tmp_path / "file"
    what = "states by name, got NoneType" if value is None else f"'mine' .* not {type(value).__name__}"
    with pytest.raises(CheckpointError, match=f"^save_states: get_states of Own: .*{what}$"):
        net.save_states(path)
    assert not path.exists()


@pytest.mark.parametrize("name", ["\udc80", "a" * 70_000])
def test_a_name_that_no_archive_can_have_is_a_checkpoint_error(name, tmp_path):
    path = tmp_path / "file"
    with pytest.raises(CheckpointError, match="plain name"):
        compiled().save_states(str(path), {name: np.zeros(2)})
    assert not path.exists()


def test_a_state_with_the_name_of_the_random_state_is_refused(tmp_path):
    class Named(model.Model):
        def __init__(self):
            super().__init__()
            self.random_state = Tensor(data=np.ones(2, np.float32), stores_grad=True)

        def forward(self, x):
            return x * self.random_state

    net = Named()
    net.compile([Tensor((3, 2))])
    with pytest.raises(CheckpointError, match=r"'random_state'.*rename it"):
        net.save_states(tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("loads", [False, True])
def test_saving_and_loading_forget_the_records_of_models_within(loads, tmp_path):
    class Outer(model.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = Net(), []

        def forward(self, x):
            return self.inner(x)

        def train_one_batch(self, x, y):
            return self.inner(x, y)

    outer = Outer()
    inner = outer.inner
    for net in (outer, inner):
        net.set_optimizer(opt.SGD(lr=0.1))
        net.compile([batch(0)[0]], use_graph=net is inner)
    for step in range(3):
        outer(*batch(step))
    assert [record.num_left > 0 for record in records_of(inner)] == [True]
    outer.save_states(str(tmp_path / "file"))
    assert [record.num_left for record in records_of(inner)] == [0]
    if loads:
        outer.load_states(str(tmp_path / "file"))
        assert not records_of(inner)
    outer.eval()


def records_of(net):
    return [record for kind in net._records._kinds.values() for record in kind.records]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of a checkpoint file and what it holds."""
    path = tmp_path_factory.mktemp("saved") / "net.zip"
    net = compiled()
    net.save_states(path, AUX)
    return path.read_bytes(), everything(net)


def members(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(files, method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files if isinstance(files, list) else files.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return buffer.getvalue()


def arrays_of(npz):
    with np.load(io.BytesIO(npz)) as arrays:
        return dict(arrays)


def npz(arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def npy(shape, descr="<f4", data=b"", order=False, version=1):
    """A file of numpy's format with the header given."""
    header = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack("<H" if version == 1 else "<I", len(header))
        + header
        + data
    )


# ---- files that were crafted: each is a function of the members of a sound file ---------------------------------


def with_attributes(change):
    def craft(files):
        attributes = json.loads(files[ATTRIBUTES_FILE])
        changed = change(attributes)
        return zipped({**files, ATTRIBUTES_FILE: json.dumps(attributes if changed is None else changed)})

    return craft


def with_random_state(value):
    return with_attributes(lambda attributes: attributes.update(random_state=value))


def with_state(name, content, part=STATES_FILE):
    """One array of a part given as the bytes of an npy file."""
    return lambda files: zipped({**files, part: zipped({**members(files[part]), name + ".npy": content})})


def with_optimizer(change):
    def craft(files):
        states = arrays_of(files[OPTIMIZER_FILE])
        change(states)
        return zipped({**files, OPTIMIZER_FILE: npz(states)})

    return craft


def directory_without(name):
    """A sound file whose directory leaves one member out."""

    def craft(files):
        content, entries = zipped(files), b""
        end = content.rindex(b"PK\5\6")
        start = struct.unpack("<I", content[end + 16 : end + 20])[0]
        for entry in content[start:end].split(b"PK\1\2")[1:]:
            if name.encode() not in entry:
                entries += b"PK\1\2" + entry
        tail = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, len(entries), start, 0)
        return content[:start] + entries + tail

    return craft


def flagged(offset_in_entry, value):
    """A sound file with two bytes of each directory entry and local header changed."""

    def craft(files):
        content = bytearray(zipped(files))
        for signature, offset in ((b"PK\1\2", offset_in_entry), (b"PK\3\4", offset_in_entry - 2)):
            start = -1
            while (start := content.find(signature, start + 1)) >= 0:
                content[start + offset : start + offset + 2] = struct.pack("<H", value)
        return bytes(content)

    return craft


LINEAR = "out.W"
OBJECT = npy((54,), "|O", b"\x80\x04N.")
CRAFTED = {
    "a random state that is a word": with_random_state("x"),
    "a random state of one number": with_random_state([[1]]),
    "a random state of words": with_random_state([["a", "b"]]),
    "a random state that is too large": with_random_state([[1, 2**64]]),
    "a negative random state": with_random_state([[-1, 0]]),
    "a random state of fractions": with_random_state([[1.5, 0]]),
    "a random state that is no list": with_random_state({"a": 1}),
    "attributes that are a list": with_attributes(lambda attributes: [1, 2]),
    "attributes of pairs": with_attributes(lambda attributes: [["a", 1]]),
    "attributes that are a number": with_attributes(lambda attributes: 3),
    "attributes nested deeply": lambda files: zipped({**files, ATTRIBUTES_FILE: b"[" * 100_000}),
    "attributes in no encoding": lambda files: zipped({**files, ATTRIBUTES_FILE: b"\xff\xfe\xfa"}),
    "attributes of another shape": with_attributes(lambda attributes: attributes[LINEAR].update(shape=[1])),
    "attributes that leave an array out": with_attributes(lambda attributes: attributes.pop(LINEAR) and None),
    "no attributes": lambda files: zipped({STATES_FILE: files[STATES_FILE]}),
    "an unknown member": lambda files: zipped({**files, "more.bin": b"x"}),
    "a path out of the folder": lambda files: zipped({**files, "../../evil": b"x"}),
    "a folder": lambda files: zipped({**files, "folder/": b""}),
    "a member twice": lambda files: zipped([*files.items(), ("states_attr.jsox", b"{}")]).replace(
        b"jsox", b"json"
    ),
    "a directory without the optimizer": directory_without(OPTIMIZER_FILE),
    "bytes before the file": lambda files: b"#!/bin/sh\n" + zipped(files),
    "an encrypted member": flagged(8, 1),
    "an unknown way of compressing": flagged(10, 99),
    "bzip2": lambda files: zipped(files, zipfile.ZIP_BZIP2),
    "lzma": lambda files: zipped(files, zipfile.ZIP_LZMA),
    "an empty file": lambda files: b"",
    "an empty zip": lambda files: zipped({}),
    "no zip": lambda files: b"some text" * 99,
    "states that are no zip": lambda files: zipped({**files, STATES_FILE: b"x"}),
    "states that are empty": lambda files: zipped({**files, STATES_FILE: b""}),
    "an optimizer that is no zip": lambda files: zipped({**files, OPTIMIZER_FILE: b"x"}),
    "a state of another shape": with_state(LINEAR, npy((3, 18), data=bytes(216))),
    "a state of another dtype": with_state(LINEAR, npy((18, 3), "<f8", bytes(432))),
    "a state in another byte order": with_state(LINEAR, npy((18, 3), ">f4", bytes(216))),
    "a state with too few bytes": with_state(LINEAR, npy((18, 3), data=bytes(100))),
    "a state with too many bytes": with_state(LINEAR, npy((18, 3), data=bytes(300))),
    "a state with no bytes": with_state(LINEAR, b""),
    "a state with a negative shape": with_state("aux.x", npy((-18, -3), data=bytes(216))),
    "a state of a huge shape": with_state("aux.x", npy((2**62, 2**62), data=b"")),
    "a state of objects": with_state(LINEAR, OBJECT),
    "an auxiliary state of objects": with_state("aux.x", OBJECT),
    "a shape that is no tuple": with_state(LINEAR, npy("'a'", data=bytes(216))),
    "a shape that calls": with_state(LINEAR, npy("__import__('os').getpid()", data=bytes(216))),
    "a version to come": with_state(LINEAR, npy((18, 3), data=bytes(216), version=9)),
    "a second set of states": with_state("unknown.W", npy((1,), data=bytes(4))),
    "an optimizer's state of objects": with_state("step_counter", OBJECT, OPTIMIZER_FILE),
    "an optimizer's state too many": with_optimizer(lambda states: states.update(other=np.zeros(3))),
    "an optimizer's state too few": with_optimizer(lambda states: states.pop("step_counter") and None),
    "an optimizer's state of another shape": with_optimizer(
        lambda states: states.update(step_counter=np.zeros(2))
    ),
    "a negative number of steps": with_optimizer(lambda states: states.update(step_counter=np.array(-1))),
    "too many steps": with_optimizer(lambda states: states.update(step_counter=np.array(2**53 + 1))),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_is_a_checkpoint_error_and_changes_nothing(name, saved, tmp_path):
    (tmp_path / "net.zip").write_bytes(CRAFTED[name](members(saved[0])))
    net = compiled(seed=2, steps=3)
    before = everything(net)
    with pytest.raises(CheckpointError, match=r"net\.zip|SGD"):
        net.load_states(tmp_path / "net.zip")
    assert everything(net) == before


@pytest.mark.parametrize(
    "states", [{"sync/fp32": 1}, {"sync/none/x": 1}, {"sync/partialUpdate/turn of 1": [1, 2]}]
)
def test_wrong_states_of_a_scheme_are_a_checkpoint_error_and_change_nothing(states, tmp_path):
    net = compiled(optimizer=opt.DistOpt(opt.SGD(momentum=0.9)))
    net.save_states(tmp_path / "net.zip")
    files = members((tmp_path / "net.zip").read_bytes())
    content = with_optimizer(lambda known: known.update({k: np.array(v) for k, v in states.items()}))(files)
    (tmp_path / "net.zip").write_bytes(content)
    net.train()
    net(*batch(7))
    before = everything(net)
    with pytest.raises(CheckpointError):
        net.load_states(tmp_path / "net.zip")
    assert everything(net) == before


def mutated(content, rng):
    """``content`` with one of the kinds of damage that disks, networks and editors do; half of it among headers."""
    content = bytearray(content)
    headers = [m for mark in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"\x93NUMPY") for m in _offsets(content, mark)]
    offset = (
        int(rng.choice(headers)) + int(rng.integers(46))
        if rng.random() < 0.6
        else int(rng.integers(len(content)))
    )
    offset = min(offset, len(content) - 1)
    kind = rng.integers(6)
    if kind == 0:
        content[offset] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        content[offset] = int(rng.integers(256))
    elif kind == 2:
        del content[offset:]
    elif kind == 3:
        del content[offset : offset + int(rng.integers(1, 40))]
    elif kind == 4:
        content[offset:offset] = rng.bytes(int(rng.integers(1, 40)))
    else:
        content[offset : offset + 4] = rng.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\1\0\0\0"])
    return bytes(content)


def _offsets(content, mark):
    start = -1
    while (start := content.find(mark, start + 1)) >= 0:
        yield start


def test_a_damaged_file_is_refused_or_gives_all_that_was_saved(saved, tmp_path):
    content, held = saved
    net = compiled(seed=2, steps=3)
    start = everything(net)
    compiled(seed=2, steps=3).save_states(tmp_path / "start.zip")
    path, loaded = tmp_path / "net.zip", 0
    for seed in range(MUTATIONS):
        path.write_bytes(mutated(content, np.random.default_rng(seed)))
        try:
            aux = net.load_states(path)
        except CheckpointError:
            assert everything(net) == start, seed
            continue
        loaded += 1
        assert everything(net) == held, seed
        assert {name: value.tobytes() for name, value in aux.items()} == {
            name: value.tobytes() for name, value in AUX.items()
        }, seed
        net.load_states(tmp_path / "start.zip")
    assert 0 < loaded < MUTATIONS / 4  # time stamps and the like are of no account


@pytest.mark.parametrize("part", ["an auxiliary array", "an optimizer's state", "a member never asked for"])
def test_no_more_is_unpacked_than_the_model_expects(part, saved, tmp_path):
    files, zeros = members(saved[0]), np.zeros(1 << 25, np.uint8)
    if part == "an auxiliary array":
        content = with_state("aux.x", npy(zeros.shape, "|u1", zeros.tobytes()))(files)
    elif part == "an optimizer's state":
        content = with_state("x", npy(zeros.shape, "|u1", zeros.tobytes()), OPTIMIZER_FILE)(files)
    else:
        content = zipped({**files, "more.bin": zeros.tobytes()})
    (tmp_path / "net.zip").write_bytes(zipped(members(content), zipfile.ZIP_DEFLATED))
    assert (tmp_path / "net.zip").stat().st_size < 100_000
    net = compiled(seed=2)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            net.load_states(tmp_path / "net.zip")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_member_that_unpacks_to_more_than_it_says_takes_no_more_memory(saved, tmp_path):
    content = bytearray(zipped({**members(saved[0]), ATTRIBUTES_FILE: bytes(1 << 25)}, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        start = archive.getinfo(ATTRIBUTES_FILE).header_offset
    # in its header and the directory
    for at in (
        start + 22,
        content.rindex(ATTRIBUTES_FILE.encode()) - 46 + 24,
    ):
        assert int.from_bytes(content[at : at + 4], "little") == 1 << 25
        content[at : at + 4] = (10).to_bytes(4, "little")
    (tmp_path / "net.zip").write_bytes(content)
    net = compiled(seed=2)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            net.load_states(tmp_path / "net.zip")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_what_a_compressing_tool_packed_again_is_read(saved, tmp_path):
    (tmp_path / "net.zip").write_bytes(zipped(members(saved[0]), zipfile.ZIP_DEFLATED))
    net = compiled(seed=2)
    net.load_states(tmp_path / "net.zip")
    assert everything(net) == saved[1]


# ---- versions ---------------------------------------------------------------------------------------------------


def test_a_file_as_earlier_versions_wrote_it_is_read(saved, tmp_path):
    """They wrote it with numpy.savez and the time of writing."""
    files = members(saved[0])
    rewritten = {name: npz(arrays_of(files[name])) for name in (STATES_FILE, OPTIMIZER_FILE)}
    with zipfile.ZipFile(tmp_path / "net.zip", "w") as archive:
        archive.writestr(STATES_FILE, rewritten[STATES_FILE])
        archive.writestr(ATTRIBUTES_FILE, files[ATTRIBUTES_FILE])
        archive.writestr(OPTIMIZER_FILE, rewritten[OPTIMIZER_FILE])
    net = compiled(seed=2)
    aux = net.load_states(tmp_path / "net.zip")
    assert everything(net) == saved[1] and set(aux) == set(AUX)


def test_a_file_is_a_zip_of_numpy_s_and_json_s_files(saved):
    files = members(saved[0])
    assert list(files) == [STATES_FILE, ATTRIBUTES_FILE, OPTIMIZER_FILE]
    states, attributes = arrays_of(files[STATES_FILE]), json.loads(files[ATTRIBUTES_FILE])
    assert {name: value.tobytes() for name, value in states.items() if not name.startswith("aux.")} == saved[
        1
    ][0]
    assert attributes["out.W"] == {"state_type": 0, "shape": [18, 3], "dtype": "float32"}
    assert attributes["aux.epoch"] == {"state_type": 1, "shape": [], "dtype": "int64"}
    assert {name: value.tobytes() for name, value in arrays_of(files[OPTIMIZER_FILE]).items()} == saved[1][1]


class WithAux(model.Model):
    """A model with states whose names begin as those of auxiliary arrays do, and one called ``file``."""

    def __init__(self):
        super().__init__()
        self.aux, self.file = layer.Linear(2), Tensor((2,), stores_grad=True)

    def forward(self, x):
        return self.aux(x)


def test_states_may_have_the_names_that_the_format_uses(tmp_path):
    net = WithAux()
    net.compile([Tensor((1, 3))])
    net.save_states(tmp_path / "net.zip", {"V": np.arange(3)})
    net.file.set_value(5.0)
    net.aux.W.set_value(5.0)
    aux = net.load_states(tmp_path / "net.zip")
    assert list(aux) == ["V"] and to_numpy(net.file).max() == 0 and to_numpy(net.aux.W).max() < 5
    with pytest.raises(CheckpointError, match=r"aux\.W.*rename"):
        net.save_states(tmp_path / "net.zip", {"W": np.arange(3)})


@pytest.mark.parametrize(
    "value", [np.array([{}]), np.zeros(2, [("a", int)]), "named\0"], ids=["object", "fields", "nul"]
)
def test_an_auxiliary_state_that_cannot_be_kept_is_an_error_before_anything_is_written(value, tmp_path):
    aux = {value: np.zeros(2)} if isinstance(value, str) else {"a": value}
    with pytest.raises(CheckpointError, match="not an array of numbers"):
        compiled().save_states(tmp_path / "net.zip", aux)
    assert list(tmp_path.iterdir()) == []


# ---- how files are written --------------------------------------------------------------------------------------


def test_a_symlink_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "real.zip").write_bytes(b"old")
    (tmp_path / "link.zip").symlink_to("data/real.zip")
    (tmp_path / "dangling.zip").symlink_to("data/new.zip")
    net = compiled()
    for name, target in (("link.zip", "real.zip"), ("dangling.zip", "new.zip")):
        net.save_states(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        net.load_states(tmp_path / "data" / target)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"real.zip", "new.zip"}


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "loop", "missing folder", "zero byte"])
def test_a_path_that_is_no_plain_file_is_refused_and_left_alone(kind, tmp_path):
    path = tmp_path / "net.zip"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "missing folder":
        path = tmp_path / "none" / "net.zip"
    else:
        path = f"{path}\0"
    net = compiled()
    before = sorted(tmp_path.rglob("*"))
    for call in (net.save_states, net.load_states):
        with pytest.raises(CheckpointError, match=r"net\.zip"):
            call(path)
    assert sorted(tmp_path.rglob("*")) == before and os.path.exists("/dev/null")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder in which not even root may write")
def test_a_system_that_cannot_write_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="cannot write"):
        compiled().save_states("/proc/self/net.zip")


def test_the_permissions_of_an_existing_file_are_kept(tmp_path):
    net = compiled()
    path = tmp_path / "net.zip"
    path.write_bytes(b"old")
    path.chmod(0o640)
    net.save_states(path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for error in (OSError("disk full"), KeyboardInterrupt(), ZeroDivisionError()):
        expected = CheckpointError if isinstance(error, OSError) else type(error)
        with pytest.raises(expected), atomic_file(path) as file:
            file.write(b"new")
            raise error
        assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_file_and_folder_reach_the_disk_before_the_call_ends(tmp_path, monkeypatch):
    events = []
    replace, fsync = os.replace, os.fsync

    def noted_fsync(handle):
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def noted_replace(*paths):
        events.append("replace")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    compiled().save_states(tmp_path / "net.zip")
    written, renamed, folder = events
    assert written.startswith(f"{tmp_path}/.net.zip.") and renamed == "replace" and folder == str(tmp_path)


KILLED = """
import os, sys
from singa_lite.files import atomic_file
with atomic_file(sys.argv[1]) as file:
    file.write(b"half of it")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_writer_left_is_removed_by_the_next_one_and_a_living_writer_s_is_not(tmp_path):
    path = tmp_path / "net.zip"
    net = compiled()
    net.save_states(path)
    whole = path.read_bytes()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout.readline() == "writing\n"
        writers[0].send_signal(signal.SIGKILL)
        writers[0].wait(60)
        assert path.read_bytes() == whole and len(list(tmp_path.iterdir())) == 3
        net.save_states(path)
        assert len(list(tmp_path.iterdir())) == 2  # the checkpoint, and what the living one writes
        writers[1].communicate("go on", timeout=60)
        assert writers[1].returncode == 0
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert path.read_bytes() == b"half of it"
    assert {entry.name for entry in tmp_path.iterdir()} == {"net.zip"}


def test_writers_of_other_files_remove_nothing_even_where_locks_of_another_host_are_not_known(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(fcntl, "flock", lambda handle, how: None)
    with atomic_file(tmp_path / "a.zip") as file:
        file.write(b"a")
        for name in ("b.zip", "a", "a.zip.b"):
            with atomic_file(tmp_path / name) as other:
                other.write(name.encode())
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {
        "a.zip": b"a",
        **{name: name.encode() for name in ("b.zip", "a", "a.zip.b")},
    }


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_written_and_no_other_writer_is_disturbed(
    tmp_path, monkeypatch, number
):
    def flock(handle, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "net.zip"
    with atomic_file(path) as first:
        with atomic_file(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b"first")
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_a_writer_whose_files_are_always_taken_gives_up_and_leaves_none(tmp_path, monkeypatch):
    def flock(handle, how):
        raise BlockingIOError(errno.EWOULDBLOCK, "taken")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CheckpointError, match="cannot write"), atomic_file(tmp_path / "net.zip"):
        pass
    assert list(tmp_path.iterdir()) == []
