# SPDX-License-Identifier: Apache-2.0
"""`singa-lite plan`: predictions by hand, where options pay, calibrations as files, and the command line."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from singa_lite import cli
from singa_lite.bench.calibration import (
    BucketShapes,
    Calibration,
    OptionTimes,
    read_calibration,
    write_calibration,
)
from singa_lite.bench.cost import Cluster, Network, all_gather, collective, hierarchical_all_reduce
from singa_lite.bench.plan import (
    MOST_HOSTS,
    is_shorter,
    paying_ranges,
    predict,
    report,
    shortest,
)
from singa_lite.bench.wire_bytes import Message, bytes_sent, fp32, messages_of, sparse
from singa_lite.errors import CheckpointError, OptionError
from tests.bench.test_wire_bytes import CNN
from tests.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]

# 1 byte takes 1 s and a hop 100 s
PLAIN = Cluster(Network(0, 0), Network(100.0, 1.0))
TWO = Calibration(
    1000.0,
    7.0,
    (BucketShapes(400.0, ((10, 10),)), BucketShapes(1000.0, ((50, 5), (50,)))),
    {
        "fp32": OptionTimes(0.0),
        "bf16": OptionTimes(40.0),
        "sparseTopK:0.1": OptionTimes(20.0, 3.0),
        "localSGD:4": OptionTimes(0.0),
    },
    "by hand",
)


def flat(n, **options):
    """A calibration of one bucket without computing, so that bytes alone decide."""
    times = {name: OptionTimes(*seconds) for name, seconds in options.items()}
    return Calibration(0.0, 0.0, (BucketShapes(0.0, ((n,),)),), {"fp32": OptionTimes(0.0), **times})


# ---- predictions -------------------------------------------------------------------------------------


def test_fp32_by_hand():
    # 2 ranks: 400 B from 400 to 800; then 1200 B from 1000 to 2200 and 2 hops; update
    assert predict(TWO, PLAIN, "fp32", 2) == ("fp32", 2, 1600, 2200 + 200 + 7)


def test_compressing_is_spread_over_the_buckets_by_their_elements():
    # 10 s for 100 elements, 30 s for 300; 200 B from 410; 600 B from 1040
    assert predict(TWO, PLAIN, "bf16", 2) == ("bf16", 2, 800, 1040 + 600 + 200 + 7)


def test_merging_grows_with_the_ranks():
    # 10 of 100 and 30 of 300 elements are 48 and 144 B; 3 ranks send 2 of them: 96 B from 405, 288 B from 1020, 2 hops,
    # 9 s of merging
    assert predict(TWO, PLAIN, "sparseTopK:0.1", 3) == ("sparseTopK:0.1", 3, 384, 1020 + 288 + 200 + 9 + 7)


def test_local_sgd_averages_now_and_then():
    # both buckets in one all-reduce
    assert predict(TWO, PLAIN, "localSGD:4", 2) == ("localSGD:4", 2, 400, 1000 + 7 + (1600 + 200) / 4)


def test_an_option_may_group_gradients_in_its_own_way():
    own = OptionTimes(20.0, 3.0, (BucketShapes(900.0, ((10, 10), (50, 5), (50,))),))
    found = replace(TWO, options={"fp32": OptionTimes(0.0), "sparseTopK:0.1": own})
    # 40 of 400 elements are 160 + 24 B of indices, after 20 s of compressing, with 2 ranks
    [message] = sparse(400, 0.1)
    assert predict(found, PLAIN, "sparseTopK:0.1", 2) == (
        "sparseTopK:0.1",
        2,
        message.payload,
        max(1020, 920 + message.payload + 100 + 6) + 7,
    )
    assert predict(found, PLAIN, "fp32", 2) == predict(TWO, PLAIN, "fp32", 2)


def test_one_rank_sends_nothing():
    assert predict(TWO, PLAIN, "fp32", 1) == ("fp32", 1, 0, 1007)


def test_a_cluster_of_several_ranks_a_host():
    inner, outer = Network(0.5, 0.25), Network(8.0, 4.0)
    cluster = Cluster(inner, outer, 4)
    reduce, gather, exchange = (Message(kind, 120) for kind in ("all_reduce", "all_gather", "all_to_all"))
    for message in (reduce, gather, exchange):
        assert [cluster.collective(message, size) for size in (3, 4)] == [
            collective(inner, message, size) for size in (3, 4)
        ]
        assert Cluster(inner, outer).collective(message, 3) == collective(outer, message, 3)
    assert cluster.collective(reduce, 12) == hierarchical_all_reduce(inner, outer, 120, 4, 3)
    assert cluster.collective(gather, 12) == all_gather(outer, 120, 12)
    # each of 4 ranks sends 8 of 12 parts to other hosts, over one card
    assert cluster.collective(exchange, 12) == (pytest.approx(4 * 80 * 4.0), 11 * 8.0)
    with pytest.raises(OptionError, match="10 ranks do not fill hosts of 4"):
        cluster.collective(reduce, 10)


# ---- where options pay ---------------------------------------------------------------------------------


BYTES_ONLY = Cluster(Network(0, 0), Network(0.0, 1.0))


def test_the_known_ends():
    n = 1 << 20
    found = flat(n, **{"sign": (0,), "int8": (0,), "randomK:0.1": (0,), "sparseTopK:0.0625": (0,)})
    assert paying_ranges(found, BYTES_ONLY, "sign") == [(2, 64)]
    # 311,296 B beside 8,388,608 / N
    assert paying_ranges(found, BYTES_ONLY, "sparseTopK:0.0625") == [(2, 27)]
    assert paying_ranges(found, BYTES_ONLY, "randomK:0.1") == [(2, None)]
    assert paying_ranges(flat(n, bf16=(1e9,)), BYTES_ONLY, "bf16") == []


def test_an_option_may_pay_only_from_some_ranks_on():
    # halving saves (N-1)/N 4n = 400 (N-1)/N seconds, compressing takes 300
    assert paying_ranges(flat(100, bf16=(300.0,)), BYTES_ONLY, "bf16") == [(5, None)]


def test_an_option_may_stop_paying_and_pay_again():
    # at 1 Gbit/s and 1 ms a sum of few bytes takes log2 N steps, where a ring of more bytes takes 2 (N - 1)
    found = Calibration(
        0.1,
        0.0,
        (BucketShapes(0.1, ((1_000_000,),)),),
        {"fp32": OptionTimes(0.0), "fp16": OptionTimes(0.03)},
    )
    cluster = Cluster(Network(0, 0), Network(1e-3, 8e-9, "smaller"))
    ranges = paying_ranges(found, cluster, "fp16")
    for size in range(2, 257):
        own, plain = (predict(found, cluster, name, size) for name in ("fp16", "fp32"))
        pays = any(first <= size and (end is None or size < end) for first, end in ranges)
        assert is_shorter(own, plain) == pays, size
    assert len(ranges) > 1
    text = report(found, cluster, [2])
    assert text.count("; again from ") == len(ranges) - 1


def test_an_option_that_is_faster_by_rounding_alone_does_not_pay():
    # an all-reduce within hosts and between them costs the same as reduce, all-reduce and broadcast
    names = ("hierarchical:fp32", "fp32", "bf16")
    found = Calibration(
        0.1, 0.3, (BucketShapes(0.1, ((1000,),)),), {name: OptionTimes(0.0) for name in names}
    )
    cluster = Cluster(Network(1e-6, 1e-9), Network(1e-3, 1e-5), 3)
    own, plain, half = (predict(found, cluster, option, 12) for option in found.options)
    assert plain.seconds * (1 - 1e-12) < own.seconds < plain.seconds  # by the order of additions
    assert not is_shorter(own, plain) and is_shorter(half, plain)
    assert shortest([own, plain]) == shortest([plain, own]) == plain
    assert shortest([own, plain, half]) == half
    assert paying_ranges(found, cluster, "hierarchical:fp32") == []
    tied = report(replace(found, options={name: OptionTimes(0.0) for name in names[:2]}), cluster, [12])
    marked = [line.split()[0] for line in tied.splitlines() if line.endswith("<- shortest")]
    assert "  12 ranks: fp32" in tied and marked == ["fp32"]


def test_without_compressible_matrices_power_sgd_has_the_hops_of_fp32():
    found = Calibration(
        1.0,
        0.5,
        (BucketShapes(1.0, ((100,), (3, 2))),),
        {"fp32": OptionTimes(0), "powerSGD:4": OptionTimes(0)},
    )
    assert predict(found, PLAIN, "powerSGD:4", 3)[2:] == predict(found, PLAIN, "fp32", 3)[2:]
    assert paying_ranges(found, PLAIN, "powerSGD:4") == []


def test_the_ranks_fill_whole_hosts():
    wide = Cluster(Network(0.0, 1.0), Network(0.0, 1.0), 8)  # 8 ranks are one host, where sign would pay, too
    [(first, end)] = paying_ranges(flat(1 << 20, sign=(0,)), wide, "sign")
    assert first == 16 and end % 8 == 0 and 16 < end < 8 * MOST_HOSTS


def test_the_report_marks_the_shortest():
    text = report(TWO, PLAIN, [2, 3])
    assert text.startswith("by hand\n\n2 ranks\n")
    marked = [line.split()[0] for line in text.splitlines() if "<- shortest" in line]
    assert marked == ["sparseTopK:0.1", "sparseTopK:0.1"]
    assert "bf16                            800  1847000.000        1.30" in text  # milliseconds
    assert "  3 ranks: sparseTopK:0.1" in text
    # at 33 ranks 9855 s beside 9910, at 34 10150 beside 10113
    assert "sparseTopK:0.1     from 2 ranks until it stops paying at 34" in text


# ---- texts of options --------------------------------------------------------------------------------


def test_what_an_option_sends_is_found_by_its_text():
    assert messages_of("sparseTopK:0.01", CNN, 2) == sparse(431_080, 0.01)
    assert messages_of("sparseTopK:0.01:values=fp16", CNN, 2) == sparse(431_080, 0.01, value_bytes=2)
    assert messages_of("localSGD:8", CNN, 2) == messages_of("plain", CNN, 2) == fp32(431_080)
    assert messages_of("hierarchical:sign", CNN, 2) == messages_of("sign", CNN, 2)
    sent = {
        name: bytes_sent(messages_of(name, CNN, 2), 2)
        for name in ("fp16", "bf16", "int8", "sign", "powerSGD:4")
    }
    assert sent == {"fp16": 862_164, "bf16": 862_160, "int8": 437_816, "sign": 53_917, "powerSGD:4": 40_800}
    assert bytes_sent(messages_of("dgc:0.001", CNN, 2), 2) == 2_376
    assert bytes_sent(messages_of("dgc:0.001:values=fp16", CNN, 2), 2) == 1_512
    assert bytes_sent(messages_of("randomK:0.1", CNN, 2), 2) == 172_432


def test_an_option_without_a_formula_is_refused():
    for text in ("sparseThreshold", "partialUpdate"):
        with pytest.raises(OptionError, match="depends on the gradients"):
            messages_of(text, CNN, 2)
    with pytest.raises(OptionError, match="dist_option"):
        messages_of("fp64", CNN, 2)


def test_hierarchical_by_hand():
    # 2 ranks a host, 3 hosts, 1600 B: half to the leader and half back; the 2 bytes of bf16 twice 2/3 among 3 leaders
    found = Calibration(
        1000.0, 7.0, (BucketShapes(1000.0, ((400,),)),), {"hierarchical:bf16": OptionTimes(9.0, 1.0)}
    )
    cluster = Cluster(Network(1.0, 0.5), Network(100.0, 1.0), 2)
    sent = 1600 + -(-4 * 800 // 3)
    seconds = 1009 + 2 * (800 * 0.5 + 1) + 4 * 800 / 3 + 400 + 3 * 1.0 + 7
    assert predict(found, cluster, "hierarchical:bf16", 6) == (
        "hierarchical:bf16",
        6,
        sent,
        pytest.approx(seconds),
    )
    # int8 is gathered by the leaders of 2 hosts, and sent in two phases by 6 ranks
    found = Calibration(0.0, 0.0, (BucketShapes(0.0, ((400,),)),), {"hierarchical:int8": OptionTimes(0.0)})
    cluster = Cluster(Network(0, 0), Network(0.0, 1.0), 3)
    seconds = predict(found, cluster, "hierarchical:int8", 6).seconds
    assert seconds == 408


# ---- calibrations ------------------------------------------------------------------------------------


def test_a_calibration_is_the_same_after_its_file(tmp_path):
    write_calibration(tmp_path / "file", TWO)
    assert read_calibration(tmp_path / "file") == TWO


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"compute_s": -1}, "compute_s = -1 must be a number"),
        ({"update_s": None}, "update_s = None must be"),
        ({"compute_ms": 1}, "compute_ms is not known"),
        ({"buckets": []}, "at least one bucket"),
        ({"buckets": 3}, "buckets are lists"),
        ({"buckets": [{"ready_s": 1}]}, "bucket 0: shapes is missing"),
        ({"buckets": [{"ready_s": 1, "shapes": [[0]]}]}, "bucket 0: shapes = 0 must be an int"),
        ({"options": {"fp16": {"compress_s": 0}}}, "fp32 among the options"),
        ({"options": {"fp32": {}}}, "options: fp32: compress_s is missing"),
        ({"options": {"fp32": {"compress_s": "1"}}}, "options: fp32: compress_s = '1' must be"),
        ({"options": {"fp23": {"compress_s": 1}}}, "fp23"),
        (
            {"options": {"fp32": {"compress_s": 1, "buckets": [{"ready_s": 1}]}}},
            "fp32: bucket 0: shapes is missing",
        ),
        ({"options": {"fp32": {"compress_s": 1, "buckets": 3}}}, "buckets are lists"),
        ({"options": []}, "options is an object"),
        ({"buckets": [{"ready_s": 1, "shapes": [[2**30, 2**30]]}]}, "bucket 0: a shape has more than"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_field(change, reason, tmp_path):
    path = tmp_path / "cal.json"
    write_calibration(path, TWO)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(OptionError, match=reason):
        read_calibration(path)


def test_a_file_that_is_no_calibration_is_refused(tmp_path):
    (tmp_path / "text").write_text("{")
    (tmp_path / "list").write_text("[]")
    (tmp_path / "deep").write_text("[" * 100000)
    for name in ("none", "text", "list", "deep"):
        with pytest.raises(OptionError, match=f"calibration .*{name}: expected"):
            read_calibration(tmp_path / name)


def test_a_calibration_that_cannot_be_written_is_named_and_the_older_one_stays(tmp_path):
    path = tmp_path / "cal.json"
    write_calibration(path, TWO)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*cal\.json"):
            write_calibration(path, TWO)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


# ---- the command line --------------------------------------------------------------------------------


def test_the_command_prints_and_saves(tmp_path, capsys):
    path = tmp_path / "cal.json"
    write_calibration(path, TWO)
    words = [
        "plan",
        "--ranks",
        "8,64",
        "--gpus-per-node",
        "8",
        "--link",
        "1gbit,10us",
        "--node-link",
        "100gbit,1us",
    ]
    assert cli.main([*words, "--calibration", str(path), "--save", str(tmp_path / "copy")]) == 0
    shown = capsys.readouterr().out
    assert "\n8 ranks\n" in shown and "\n64 ranks\n" in shown and "shorter than fp32" in shown
    assert read_calibration(tmp_path / "copy") == TWO


def test_the_largest_numbers_are_predicted(tmp_path, capsys):
    path = tmp_path / "cal.json"
    write_calibration(path, TWO)
    words = ["--ranks", "008,1000000000", "--link", "1000000gbit,3600s", "--gpus-per-node", "8"]
    assert cli.main(["plan", "--calibration", str(path), *words]) == 0
    assert "\n1000000000 ranks\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["plan", "--ranks", "8", "--link", "1gbit,1us", "--save", ""],
            "--save: the path of a file is empty",
        ),
        (["plan", "--ranks", "8", "--link", "1gbit,1us", "--save", "."], "--save: . is a folder"),
        (["bench", "allreduce", "--json", "."], "--json: . is a folder"),
        (["bench", "sync", "--out", ""], "--out: the path of a folder is empty; write . for the current one"),
    ],
)
def test_paths_that_cannot_be_written_are_refused_before_the_measuring(words, reason, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(words)
    assert error.value.code == 2 and reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_measuring_that_a_signal_ends_leaves_no_process(number, tmp_path):
    command = [sys.executable, "-m", "singa_lite", "plan", "--ranks", "2", "--link", "1gbit,1us"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environ, text=True, cwd=ROOT) as plan:
        children = Path(f"/proc/{plan.pid}/task/{plan.pid}/children")
        deadline = time.monotonic() + LIMIT_S
        while not (found := children.read_text().split()):
            assert time.monotonic() < deadline and plan.poll() is None
            time.sleep(0.01)
        plan.send_signal(number)
        plan.communicate(timeout=LIMIT_S)
        while os.path.exists(f"/proc/{found[0]}/fd/0"):  # not of a zombie
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert plan.returncode == -number


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--ranks", "8,,9", "--link", "1gbit,1us"],
            "--ranks '8,,9': expected whole numbers in 1 .. 1,000,000,000",
        ),
        (["--ranks", "0", "--link", "1gbit,1us"], "--ranks '0': expected"),
        (["--ranks", "8", "--link", "1gb"], "--link: expected RATE,LATENCY"),
        (["--ranks", "8", "--link", "1gbit,1us", "--node-link", "x"], "--node-link: expected RATE,LATENCY"),
        (
            ["--ranks", "8", "--link", "1gbit,1us", "--gpus-per-node", "0"],
            "--gpus-per-node = 0 must be an int >= 1",
        ),
        (["--ranks", "8,1000000001", "--link", "1gbit,1us"], "expected whole numbers in 1 .. 1,000,000,000"),
        (["--ranks", "9" * 400, "--link", "1gbit,1us"], "expected whole numbers in 1 .. 1,000,000,000"),
        (["--ranks", "9" * 5000, "--link", "1gbit,1us"], "expected whole numbers in 1 .. 1,000,000,000"),
        (
            ["--ranks", "8", "--link", "1gbit,1us", "--gpus-per-node", "9" * 400],
            "expected at most 1,000,000,000",
        ),
        (["--ranks", "8", "--link", "1gbit," + "9" * 400 + "s"], "--link: expected RATE,LATENCY"),
        (["--ranks", "8"], "--link is missing"),
        (["--ranks", "8", "--link", "1gbit,1us", "--save", "no/such"], "--save: no/such: there is no folder"),
        (["--ranks", "8", "--link", "1gbit,1us", "--steps", "3"], "--steps is for --validate"),
        (["--ranks", "8", "--link", "1gbit,1us", "--options", "fp33"], "dist_option = 'fp33' is not known"),
        (["--ranks", "8", "--link", "1gbit,1us", "--options", "fp32,fp32"], "has one twice"),
        (["--ranks", "8", "--link", "1gbit,1us", "--options", "fp16"], "--options: --calibration says it"),
        (["--ranks", "8", "--link", "1gbit,1us", "--model", "mlp-mnist"], "--model: --calibration says it"),
        (["--ranks", "2", "--validate"], "--calibration is not for --validate"),
        (["--ranks", "12", "--link", "1gbit,1us", "--gpus-per-node", "8"], "12 ranks do not fill hosts of 8"),
        (
            ["--ranks", "8", "--link", "1gbit,1us", "--calibration", "missing.json"],
            "calibration missing.json",
        ),
    ],
)
def test_wrong_words_are_refused(words, reason, tmp_path, capsys):
    path = tmp_path / "cal.json"
    write_calibration(path, TWO)
    with pytest.raises(SystemExit) as error:
        cli.main(["plan", "--calibration", str(path), *words])
    assert error.value.code == 2 and reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "rnn"], "model = 'rnn' is not known; choose one of cnn-mnist"),
        (["--model", "none.py:make"], "there is no file"),
        (["--model", "{file}:missing"], "has no function 'missing'"),
        (["--model", "{file}:number"], "returned int, expected a singa_lite.model.Model"),
        (["--batch-size", "0"], "--batch-size = 0 must be an int >= 1"),
    ],
)
@pytest.mark.parametrize("validates", [False, True])
def test_a_model_that_cannot_be_trained_is_refused(words, reason, validates, tmp_path, capsys):
    file = tmp_path / "file.py"
    file.write_text("def number():\n    return 1\n")
    given = [word.replace("{file}", str(file)) for word in words]
    with pytest.raises(SystemExit) as error:
        cli.main(["plan", "--ranks", "2", "--link", "1gbit,1us", *given, *["--validate"] * validates])
    assert error.value.code == 2 and reason in " ".join(capsys.readouterr().err.split())
