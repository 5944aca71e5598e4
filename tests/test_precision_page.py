# SPDX-License-Identifier: Apache-2.0
"""docs/precision.md has the rule of every operator, and no other: what ``autocast`` does is recorded and compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from singa_lite import autograd
from singa_lite.autograd import ops
from singa_lite.autograd.autocast import PRECISIONS, Autocast
from singa_lite.tensor import Tensor
from tests.autograd.op_samples import SAMPLES, Sample

PAGE = (Path(__file__).parents[1] / "docs" / "precision.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|.*\|$", PAGE.split("## Operators")[1], re.MULTILINE))
RULES = set(re.findall(r"^\| (\w+) \|", PAGE.split("## Rules")[1].split("## ")[0], re.MULTILINE)) - {"rule"}


def test_every_public_operator_has_a_row_and_no_other() -> None:
    assert set(ROWS) == set(ops.__all__)
    assert set(ROWS.values()) == RULES == {"low", "float32", "widest", "keep"}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.op)
def test_a_row_has_the_rule_that_decides(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    rules: set[str] = set()
    cast = Autocast.cast

    def spy(self: Autocast, op: autograd.Operator, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rules.add(str(op.autocast))
        return cast(self, op, inputs)

    monkeypatch.setattr(Autocast, "cast", spy)
    tensors = [
        Tensor(data=array, dtype="float32" if array.dtype.kind == "f" else array.dtype)
        for array in sample.inputs
    ]
    with autograd.autocast():
        sample.call(*tensors)
    if sample.op != "dropout":  # outside of training it is no call
        assert rules == {ROWS[sample.op]}


def test_the_rule_of_dropout_is_that_of_its_row() -> None:
    assert ops.dropout.__globals__["Dropout"].autocast == ROWS["dropout"]


def test_the_page_names_every_precision() -> None:
    for precision in PRECISIONS:
        assert f'"{precision}"' in PAGE
