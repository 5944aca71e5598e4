# SPDX-License-Identifier: Apache-2.0
"""`singa-lite plan --validate`: predictions by hand, what counts as near enough, and the command on three ranks.

No test asserts on time: what the command measures is compared with nothing.
"""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from singa_lite import cli
from singa_lite.bench import plan_command
from singa_lite.bench.calibration import BucketShapes, Calibration, OptionTimes
from singa_lite.bench.measure import MEASURED
from singa_lite.bench.plan_command import STEPS
from singa_lite.bench.validation import HostCluster, Row, check_trial, compare, is_valid, summary, table
from singa_lite.bench.validation_rank import Found, Trial, period_of
from singa_lite.bench.wire_bytes import Message
from singa_lite.comm.link import parse_link
from singa_lite.errors import OptionError
from tests.limits import LIMIT_S
from tests.slow_cases import slow_but_first

LINK = parse_link("link", "8kbit,1s")  # 1 ms a byte
OPTIONS = ("fp32", "bf16", "localSGD:4")
FOUND = Found(
    Calibration(
        10.0,
        2.0,
        (BucketShapes(9.0, ((3, 100),)),),
        {"fp32": OptionTimes(0.0), "bf16": OptionTimes(0.5), "localSGD:4": OptionTimes(0.0)},
    ),
    {"all_reduce": (0.25, 0.125)},
    call_s=0.0625,
    measured={"fp32": 20.0, "bf16": 15.0, "localSGD:4": 13.0},
    sent={"fp32": 1600.0, "bf16": 800.0, "localSGD:4": 400.0},
    calibrating_s=1.0,
    load=0.5,
)
FAST = replace(FOUND, transport={"all_reduce": (0.25, 0.0)})


def trial(*options):
    return Trial(options, 2, "cnn-mnist", 64)


# ---- predictions -------------------------------------------------------------------------------------


def test_a_step_over_the_emulated_link_by_hand():
    # 3 ranks: 1600 of 1200 bytes take 1.6 s from 9 s on, 4 hops 4 s; the update follows
    fp32, bf16, local = compare(trial(*OPTIONS), FAST, 3, LINK)
    assert fp32 == ("fp32", 3, pytest.approx(9 + 1.6 + 4 + 0.0625 + 2), 20.0, 1600, 1600)
    assert bf16 == ("bf16", 3, pytest.approx(9.5 + 0.8 + 4 + 0.0625 + 2), 15.0, 800, 800)
    assert local == ("localSGD:4", 3, pytest.approx(12 + (1.6 + 4 + 0.0625) / 4), 13.0, 400, 400)


def test_a_host_that_is_slower_than_the_link_decides():
    cluster = HostCluster.of(FOUND, LINK)
    assert cluster.collective(Message("all_reduce", 1200), 3) == (150.0, 0.25)
    assert cluster.collective(Message("all_reduce", 4), 3).total_s == pytest.approx(
        4 + 0.0625 + 16 / 3 / 1000
    )


def test_without_a_link_the_transport_of_the_host_is_predicted():
    without = replace(FOUND, call_s=0.0)
    [fp32] = compare(trial("fp32"), without, 3, None)
    assert fp32.predicted == 9 + 150 + 0.25 + 2


def test_what_was_measured_changes_no_prediction():
    other = replace(FOUND, measured=dict.fromkeys(OPTIONS, 1.0), sent=dict.fromkeys(OPTIONS, 1.0))
    found, others = (compare(trial(*OPTIONS), one, 3, LINK) for one in (FOUND, other))
    assert [(row.predicted, row.predicted_bytes) for row in found] == [
        (row.predicted, row.predicted_bytes) for row in others
    ]
    assert {row.measured for row in others} == {1.0} == {row.sent for row in others}


# ---- near enough ---------------------------------------------------------------------------------------


def rows(*errors):
    return [Row("fp32", 2, 1 + error, 1.0, 8.0, 8.0) for error in errors]


@pytest.mark.parametrize(
    ("errors", "is_enough"),
    [
        ((0.0, 0.125, 0.25), True),
        ((0.0, 0.125, -0.25), True),
        ((0.0, 0.125, 0.3125), False),
        ((0.0, 0.125, -0.3125), False),
        ((0.0, 0.1875, 0.25), False),
        ((0.0, -0.1875, 0.25), False),
    ],
)
def test_errors_may_be_15_percent_in_the_median_and_30_at_worst(errors, is_enough):
    assert is_valid(rows(*errors)) is is_enough
    assert summary(rows(*errors)).endswith("within the limits" if is_enough else "beyond the limits")


def test_bytes_must_be_those_predicted():
    wrong = [*rows(0.0), Row("fp16", 2, 1.0, 1.0, 8.0, 12.0)]
    assert not is_valid(wrong)
    assert "predicted were 8.0 bytes, sent 12.0" in table(wrong, FOUND)


def test_the_table_and_the_summary_by_hand():
    text = table([Row("fp16", 3, 0.25, 0.2, 1200.0, 1200.0)], FOUND)
    assert text.startswith("3 ranks (calibrated in 1 s, load 0.5)\n")
    assert re.search(r"fp16 +1,200 +250.000 +200.000 +\+25.0 %", text)
    assert "median 18.8 % (at most 15 %), worst 25.0 % (at most 30 %): fp32 on 2 ranks" in summary(
        rows(0.125, -0.25, 0.1875)
    )


@pytest.mark.parametrize("option", ["hierarchical:fp32", "dgc:0.001:warmup=8", "localSGD:8:start=4"])
def test_what_cannot_be_validated_is_refused(option):
    with pytest.raises(OptionError, match=f"plan --validate: {option} "):
        check_trial(trial("fp32", option))
    check_trial(trial("dgc:0.001", "localSGD:8"))


def test_local_sgd_repeats_after_its_period():
    assert [period_of(option) for option in ("fp32", "localSGD:8", "localSGD:period=3")] == [1, 8, 3]


# ---- the command ---------------------------------------------------------------------------------------


MODEL = """
from singa_lite import layer
from singa_lite.bench.models import Classifier

def small():
    return Classifier([layer.Flatten(), layer.Linear(10)])

class Failing(Classifier):
    def train_one_batch(self, x, y):
        raise RuntimeError("no step today")

def failing():
    return Failing([layer.Flatten(), layer.Linear(10)])
"""


def validate(folder, function, *words):
    (folder / "models.py").write_text(MODEL)
    command = [
        sys.executable,
        "-m",
        "singa_lite.cli",
        "plan",
        "--validate",
        "--model",
        f"models.py:{function}",
    ]
    command += ["--batch-size", "2", "--steps", "1", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)


@slow_but_first("link", [["--link", "100mbit,1ms"], []])
def test_the_command_predicts_and_measures_three_ranks(link, tmp_path):
    words = ["--ranks", "3", "--options", "sparseTopK:0.01,localSGD:2", *link]
    done = validate(tmp_path, "small", *words)
    assert done.stderr == ""
    # 79 of 7850 elements with 6 low bits: 316 + 4 (15 + 7) bytes to each of 2; half of 4/3 of 31,400
    found = re.findall(r"^  (\S+) +([\d,]+) +([\d.]+) +([\d.]+) +([+-][\d.]+) %$", done.stdout, re.MULTILINE)
    assert [(option, sent) for option, sent, *_ in found] == [
        ("sparseTopK:0.01", "808"),
        ("localSGD:2", "20,934"),
    ]
    for _, _, predicted, measured, error in found:
        assert float(error) == pytest.approx(100 * (float(predicted) / float(measured) - 1), abs=0.5)
    assert done.stdout.startswith("3 ranks (calibrated in ")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("error: median ") and done.returncode == (0 if "within the limits" in last else 1)


@pytest.mark.parametrize(("is_near_enough", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_predictions_are_near_enough(is_near_enough, code, monkeypatch):
    calls = []
    monkeypatch.setattr(plan_command, "validate", lambda *given: calls.append(given) or is_near_enough)
    words = "plan --validate --ranks 2,3 --link 100mbit,1ms --options fp32,sign --steps 5 --batch-size 7"
    assert cli.main(words.split()) == code
    assert calls == [(Trial(("fp32", "sign"), 5, "cnn-mnist", 7), [2, 3], parse_link("", "100mbit,1ms"))]


def test_the_link_of_the_environment_is_predicted_too(monkeypatch):
    calls = []
    monkeypatch.setattr(plan_command, "validate", lambda *given: calls.append(given) or True)
    monkeypatch.setenv("SINGA_LITE_LINK", "1gbit,2ms")
    assert cli.main(["plan", "--validate", "--ranks", "2"]) == 0
    [(trial, _, link)] = calls
    assert link == parse_link("", "1gbit,2ms") and trial == Trial(MEASURED, STEPS, "cnn-mnist", 64)


def test_ranks_that_fail_end_the_command(tmp_path):
    done = validate(tmp_path, "failing", "--ranks", "3", "--options", "fp32", "--link", "1gbit,1us")
    assert done.returncode == 1 and "no step today" in done.stderr + done.stdout
    assert "singa-lite plan: plan --validate: 3 ranks ended with exit code 1" in done.stderr
