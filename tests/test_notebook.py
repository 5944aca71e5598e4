# SPDX-License-Identifier: Apache-2.0
"""examples/communicator_tutorial.ipynb: what is committed, and what its cells do on two MPI engines."""

from __future__ import annotations

import ast
import json
import re
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.comm.processes import wait_until
from tests.notebooks import ROOT, execute, marked, notebooks_missing
from tests.test_communicators import LOSSES, MEANS, OWN

EXAMPLES = ROOT / "examples"
NOTEBOOK = json.loads((EXAMPLES / "communicator_tutorial.ipynb").read_text())
CELLS: list[dict[str, Any]] = NOTEBOOK["cells"]
PX = "%%px\n"
WHOLE = "%%px --no-stream\n"  # ipyparallel 9.2 streams one engine's text over another's if both came early
Cells = dict[str, dict[str, Any]]

# ---- what is committed ---------------------------------------------------------------------------------


def test_the_notebook_is_committed_without_outputs_and_without_traces_of_a_machine() -> None:
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert NOTEBOOK["metadata"] == {"kernelspec": python, "language_info": {"name": "python"}}
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    for cell in CELLS:
        assert re.fullmatch(r"[a-z-]+", cell["id"]) and cell["metadata"] == {}
        assert (cell.get("outputs", []), cell.get("execution_count")) == ([], None)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    assert CELLS[0]["source"][0] == "<!-- SPDX-License-Identifier: Apache-2.0 -->\n"


def test_the_cells_of_the_engines_are_the_script() -> None:
    sources = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
    first, *cells, last = [source.removeprefix(PX) for source in sources if source.startswith(PX)]
    assert len(sources) == len(cells) + 4  # and the start and stop of the cluster
    script = ast.parse((EXAMPLES / "communicator_tutorial.py").read_text())
    assert ast.get_docstring(script)
    assert ast.dump(ast.parse("\n".join([first, *cells]))) == ast.dump(ast.Module(script.body[1:], []))
    assert last.endswith("process_communicator().close()")


# ---- what its cells do ---------------------------------------------------------------------------------

FAULT = """
if comm.rank == 1:
    raise ValueError("only this engine fails")
comm.all_reduce(np.ones(3, np.float32))
"""


def failing_cell(name: str, source: str) -> dict[str, Any]:
    tags = {"tags": ["raises-exception"]}
    return {
        "id": name, "cell_type": "code", "metadata": tags, "source": source, "outputs": [], "execution_count": None
    }  # fmt: skip


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """The notebook's cells after it has run, and one more before its end, which fails on rank 1."""
    if reason := notebooks_missing():
        pytest.skip(reason)
    notebook = [{**cell, "source": "".join(cell["source"]).replace(PX, WHOLE)} for cell in CELLS]
    end = [cell["id"] for cell in CELLS].index("close")
    cells = [*notebook[:end], failing_cell("fault", PX + FAULT), *notebook[end:]]
    return execute(cells, tmp_path_factory.mktemp("notebook"))


def shown(cell: dict[str, Any]) -> list[str]:
    """What ``%%px`` shows of each engine, without colours."""
    texts = ["".join(out.get("text", out.get("data", {}).get("text/plain", ""))) for out in cell["outputs"]]
    return [re.sub(r"\x1b\[[\d;]*m", "", text) for text in texts]


def printed(cell: dict[str, Any]) -> dict[str, str]:
    """What each engine printed, by its number."""
    _, *parts = re.split(r"^\[stdout:(\d)\] \n", "".join(shown(cell)), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def by_rank(executed: Cells, name: str) -> list[str]:
    """What each rank printed in a cell; the number of an engine need not be its rank."""
    ranks = {
        engine: int(re.findall(r"mpi_rank=(\d)", text)[0])
        for engine, text in printed(executed["communicator"]).items()
    }
    assert sorted(ranks.values()) == [0, 1]
    return [text for engine, text in sorted(printed(executed[name]).items(), key=lambda item: ranks[item[0]])]


def numbers_of(text: str, name: str) -> np.ndarray:
    """The gradient of a parameter as printed, as far as it is."""
    [shown] = re.findall(rf"^{name} (\[.*?\])$(?=\n[a-z]|\n*\Z)", text, re.DOTALL | re.MULTILINE)
    return np.array(re.findall(r"-?\d+\.\d*(?:e-?\d+)?", shown), np.float64)


def assert_gradients(text: str, expected: tuple[Any, ...]) -> None:
    """Compare with a row of tests/test_communicators.py; of affine/W a few numbers are printed."""
    bias, row, magnitudes, affine, _, affine_bias = expected
    conv = numbers_of(text, "conv/W")
    found = [*numbers_of(text, "conv/b"), *conv[:3], np.abs(conv).sum(), numbers_of(text, "affine/W")[0]]
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(found, [bias, *row, magnitudes, affine], **close)
    np.testing.assert_allclose(numbers_of(text, "affine/b"), [affine_bias, -affine_bias], **close)
    assert len(conv) == 9


@pytest.mark.slow
def test_every_cell_of_the_notebook_passes_on_two_engines(executed: Cells) -> None:
    code = [cell["id"] for cell in CELLS if cell["cell_type"] == "code"]
    outputs = {name: [output["output_type"] for output in executed[name]["outputs"]] for name in code}
    assert not [name for name in code if "error" in outputs[name] or not executed[name]["execution_count"]]
    texts = by_rank(executed, "communicator")
    assert all(text.startswith("n_devices=2\n") for text in texts)
    assert "gradients are summed over 2 processes and divided by 2\n" in texts[0]


@pytest.mark.slow
def test_the_notebook_prints_the_gradients_of_nnabla(executed: Cells) -> None:
    for rank, text in enumerate(by_rank(executed, "backward")):
        np.testing.assert_allclose(float(text.split("=", 1)[1].split()[0]), LOSSES[rank], rtol=1e-5)
        assert_gradients(text, OWN[rank])
    for text in by_rank(executed, "all-reduce"):
        assert_gradients(text, MEANS[2])
    updated = [0.19625401, 0.8597575, 0.4120535, 0.17853273]
    for text in by_rank(executed, "update"):
        np.testing.assert_allclose(numbers_of(text, "conv/W after the update:")[:4], updated, rtol=1e-6)
    losses = [float(text.split("=")[1]) for text in by_rank(executed, "callback")]
    np.testing.assert_allclose(losses, [30.5698, 25.8651], rtol=1e-5)


@pytest.mark.slow
def test_after_a_cell_that_fails_on_one_engine_the_other_names_its_rank(executed: Cells) -> None:
    texts = "\n".join(shown(executed["fault"]))
    assert re.search(r"^ValueError: only this engine fails$", texts, re.MULTILINE)
    assert re.search(
        r"^CommError: rank 0: all_reduce #\d+ .*: waited 5 s for rank 1, which", texts, re.MULTILINE
    )


# ---- nothing is left -----------------------------------------------------------------------------------

KILLED = f"""
import subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests import notebooks
with notebooks.guarded() as environment:
    for command in (["sleep", "600"], ["sh", "-c", "sleep 600 & wait"]):
        subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    print(environment[notebooks.MARK], flush=True)
    time.sleep(600)
"""


def test_processes_of_a_notebook_end_also_when_the_tests_are_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        mark = tests.stdout.readline().strip()
        wait_until(lambda: len(marked(mark)) == 3, "the start of all processes")
        tests.send_signal(signal.SIGKILL)
    wait_until(lambda: not marked(mark), "the end of all processes")
