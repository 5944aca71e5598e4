# SPDX-License-Identifier: Apache-2.0
"""What a syntax tree shows of the rules: which file imports which, where state lives, what every file carries."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "singa_lite"
FACE = "__init__"

# Level -> its modules: files and folders right under singa_lite/. A file imports only from lower levels and from
# its own module. docs/architecture.md has the same table.
LEVELS = {
    14: {FACE, "__main__"},
    13: {"cli"},
    12: {"bench", "info_command"},
    11: {"checkpoint", "communicators", "data", "gluon", "singa_wrap"},
    10: {"model"},
    9: {"kvstore", "record"},
    8: {"layer", "opt"},
    7: {"autograd", "sync", "initializer"},
    6: {"tensor"},
    5: {"device", "launch"},
    4: {"backend", "comm"},
    3: {"_native", "generation", "graph", "model_file", "profile"},
    2: {"files"},
    1: {"config", "dtypes", "error_stream", "path_arguments", "plugins", "users_line"},
    0: {"errors"},
}
LEVEL_OF = {module: level for level, modules in LEVELS.items() for module in modules}

# The compute column never sees the exchange column: DistOpt's files alone import both, and kvstore/, which is above.
EXCHANGE = {"comm", "sync"}
COMPUTE = {"backend", "device", "tensor", "autograd", "initializer", "layer", "opt", "model", "gluon"}
IMPORTS_BOTH = {"opt.dist", "opt.step_options", "opt.consistency"}
SYNC_SEES_OF_COMM = ("comm.base", "comm.work")  # the contract, no transport
# imported inside a function: cupy when a CUDA device is made, what other commands than `run` need, numpy where `run`
# needs none, and zipfile when states are saved
LATE = {
    "device": {"backend.cuda"},
    "cli": {
        "bench.sync",
        "bench.compare",
        "bench.allreduce",
        "bench.plan_command",
        "comm.trace_file",
        "info_command",
    },
    "comm": {"comm.base", "comm.p2p"},
    "launch.command": {"comm.trace_file"},
    "model": {"model_file"},
}
DATA_SEES = {"errors", "config", "users_line"}

OPTIONAL = {
    "cupy",
    "mpi4py",
    "matplotlib",
    "safetensors",
    "threadpoolctl",
    "tqdm",
    "xxhash",
}  # may be imported where they are used
SLOW = {
    "concurrent",
    "fractions",
    "hashlib",
    "http",
    "multiprocessing",
    "subprocess",
    "tarfile",
    "urllib",
    "zipfile",
}  # likewise, see Note [imports]
IMPORTS_BY_NAME = {
    "_native",
    "plugins",
    "__init__",
}  # compiled modules; transports and schemes; data, at its first use
HOLDS_STATE = "config"
CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
CONTAINER_CALLS = {
    "dict",
    "list",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "OrderedDict",
    "Counter",
    "count",
}
CHANGES = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "remove",
    "discard",
    "clear",
}
SPDX = "SPDX-License-Identifier: Apache-2.0"


class Import(NamedTuple):
    """One imported name."""

    target: str  # dotted; without the leading package when it is ours
    is_ours: bool
    is_inside: bool  # inside a function


class File:
    """A parsed module of the package; ``name`` is dotted, without the leading package."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.lines = path.read_text().splitlines()
        self.tree = ast.parse("\n".join(self.lines))
        self.parents = path.relative_to(folder).parent.parts
        self.name = ".".join([*self.parents, path.stem]).removesuffix(f".{FACE}")
        self.module = self.name.split(".")[0]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node."""
        return list(ast.walk(self.tree))

    @cached_property
    def in_functions(self) -> list[ast.AST]:
        """Every node inside a function."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        functions = [node for node in self.nodes if isinstance(node, kinds)]
        return list({id(node): node for function in functions for node in ast.walk(function)}.values())

    @cached_property
    def targets(self) -> list[tuple[str, bool]]:
        """All that is imported, and whether inside a function."""
        inside = {id(node) for node in self.in_functions}
        nodes = [node for node in self.nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        return [(dotted, id(node) in inside) for node in nodes for dotted in self._targets(node)]

    def imports(self, modules: set[str]) -> Iterator[Import]:
        """All imports; names of ours are cut down to the module that holds them, FACE for the package."""
        for dotted, is_inside in self.targets:
            is_ours = dotted.split(".")[0] == PACKAGE
            yield Import(_holder(dotted, modules) if is_ours else dotted, is_ours, is_inside)

    def _targets(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        above = [PACKAGE, *self.parents][: len(self.parents) + 2 - node.level] if node.level else []
        base = [*above, *(node.module or "").split(".")] if node.module else above
        return [".".join([*base, alias.name]) for alias in node.names]


def _holder(dotted: str, modules: set[str]) -> str:
    parts = dotted.split(".")[1:]
    while parts and ".".join(parts) not in modules:
        parts.pop()
    return ".".join(parts) or FACE


def read(folder: Path) -> list[File]:
    """Every module under ``folder``, the package."""
    return [File(folder, path) for path in sorted(folder.rglob("*.py"))]


def inner_imports(files: list[File]) -> Iterator[tuple[File, str, str]]:
    """(file, what it imports, the module of that in LEVELS) for all imports of the package's own modules."""
    modules = {file.name for file in files}
    for file in files:
        for found in file.imports(modules):
            if found.is_ours:
                yield file, found.target, found.target.split(".")[0]


# ---- rules: each yields its complaints -----------------------------------------------------------------


def unknown_modules(files: list[File]) -> Iterator[str]:
    yield from (f"{file.module} has no level" for file in files if file.module not in LEVEL_OF)


def upward_imports(files: list[File]) -> Iterator[str]:
    for file, target, module in inner_imports(files):
        is_lower = LEVEL_OF.get(module, 99) < LEVEL_OF.get(file.module, 0)
        is_own_folder = module == file.module and bool(file.parents)
        if not is_lower and not is_own_folder:
            yield f"{file.name} imports {target}"


def column_crossings(files: list[File]) -> Iterator[str]:
    """Imports between columns that the levels alone would allow."""
    for file, target, module in inner_imports(files):
        crosses = file.module in COMPUTE and module in EXCHANGE and file.name not in IMPORTS_BOTH
        sees_transport = file.module == "sync" and module == "comm" and target not in SYNC_SEES_OF_COMM
        sees_model = file.module == "data" and module not in DATA_SEES | {"data"}
        if crosses or sees_transport or sees_model:
            yield f"{file.name} imports {target}"


def hidden_imports(files: list[File]) -> Iterator[str]:
    """Imports inside functions, and by name, that would dodge a circle."""
    modules = {file.name for file in files}
    for file in files:
        for found in file.imports(modules):
            if found.is_inside and found.target in LATE.get(file.name, set()):
                continue
            if found.is_inside and (found.is_ours or found.target.split(".")[0] not in OPTIONAL | SLOW):
                yield f"{file.name} imports {found.target} inside a function"
        for node in file.nodes:
            name = getattr(node, "attr", getattr(node, "id", ""))
            if name in ("import_module", "__import__") and file.module not in IMPORTS_BY_NAME:
                yield f"{file.name} uses {name}"


def import_cycles(files: list[File]) -> Iterator[str]:
    edges: dict[str, set[str]] = {file.name: set() for file in files}
    for file, target, _ in inner_imports(files):
        edges[file.name] |= {target} - {file.name}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[str]:
        if name in path:
            yield " -> ".join([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(edges.get(name, ())):
                yield from visit(target, [*path, name])
            done.add(name)

    for name in edges:
        yield from visit(name, [])


def module_state(files: list[File]) -> Iterator[str]:
    """Mutable things at module level that are no constant, `global`, and constants that change."""
    for file in files:
        if file.name == HOLDS_STATE:
            continue
        for node in _module_level(file.tree):
            yield from (f"{file.name} keeps state in {name}" for name in _mutable_names(node))
        for node in file.in_functions:
            if isinstance(node, ast.Global):
                yield f"{file.name} says global {', '.join(node.names)}"
            if name := _changed_constant(node):
                yield f"{file.name} changes {name}"


def _module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements run at import, those under if/try/with/for included."""
    todo: list[ast.stmt] = list(tree.body)
    for node in todo:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
            todo += [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]


def _mutable_names(node: ast.stmt) -> Iterator[str]:
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return
    call = node.value.func if isinstance(node.value, ast.Call) else None
    makes = getattr(call, "attr", getattr(call, "id", ""))
    if isinstance(node.value, CONTAINERS) or makes in CONTAINER_CALLS:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [getattr(target, "id", getattr(target, "attr", "?")) for target in targets]
        yield from (name for name in names if not name.isupper() and name != "__all__")


def _changed_constant(node: ast.AST) -> str:
    """The UPPER_CASE name whose contents this node changes, else ''."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        held: ast.AST = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        held = node.func.value
    else:
        return ""
    name = getattr(held, "attr", getattr(held, "id", ""))
    return name if name.isupper() else ""


def warnings_without_a_line(files: list[File]) -> Iterator[str]:
    """Files that warn by themselves: users_line.py finds the line of the user's program that a warning names."""
    for file in files:
        for node in file.nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if "warnings" in names and file.name != "users_line":
                yield f"{file.name} imports warnings"


def missing_docstrings(files: list[File]) -> Iterator[str]:
    yield from (
        f"{file.name} has no docstring"
        for file in files
        if file.tree.body and not ast.get_docstring(file.tree)
    )


def missing_licence(files: list[File]) -> Iterator[str]:
    yield from (
        f"{file.name} has no SPDX line" for file in files if not file.lines or SPDX not in file.lines[0]
    )


RULES = [
    unknown_modules,
    upward_imports,
    column_crossings,
    hidden_imports,
    import_cycles,
    module_state,
    warnings_without_a_line,
    missing_docstrings,
    missing_licence,
]


@pytest.fixture(scope="module")
def package():
    return read(ROOT / PACKAGE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule, package):
    complaints = sorted(set(rule(package)))
    assert not complaints, "\n".join(complaints)


def test_every_source_file_opens_with_its_licence():
    folders = ["singa_lite", "native", "tests", "tools", "examples", "benchmarks"]
    suffixes = {".py", ".cc", ".h", ".cu"}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    files += [ROOT / name for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "Makefile")]
    bare = [str(path.relative_to(ROOT)) for path in files if SPDX not in path.read_text().split("\n", 1)[0]]
    assert len(files) > 20
    assert not bare


def test_a_module_of_the_tests_is_imported_by_its_full_name():
    """By two names it would be two modules: two helpers for ranks, two classes of one exception."""
    folder = ROOT / "tests"
    files = [path for path in folder.rglob("*.py") if folder / "standin" / "cupy" not in path.parents]
    short = {path.stem for path in files} | {"standin"}
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found += [f"{path.name}: {name}" for name in names if name.split(".")[0] in short]
    assert not found


def test_the_architecture_document_shows_the_same_levels():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", text, re.MULTILINE)
    shown = {int(level): set(re.findall(r"`(\w+)/?`", modules)) for level, modules in rows}
    assert {level: shown.get(level) for level in range(1, 13)} == {
        level: LEVELS[level] for level in range(1, 13)
    }


# ---- the rules themselves: a tree that breaks one is caught, by that rule -----------------------------------

VIOLATIONS = {
    "a module without a level": (unknown_modules, {"helpers.py": ""}, "helpers has no level"),
    "an import from above": (
        upward_imports,
        {"tensor.py": "from .autograd import add"},
        "tensor imports autograd",
    ),
    "a neighbour": (
        upward_imports,
        {"layer/linear.py": "from ..opt.sgd import SGD"},
        "layer.linear imports opt.sgd",
    ),
    "a neighbour column": (
        upward_imports,
        {"sync/fp32.py": "from .. import autograd"},
        "sync.fp32 imports autograd",
    ),
    "the face, by name": (upward_imports, {"model.py": "import singa_lite"}, "model imports __init__"),
    "the face, relative": (
        upward_imports,
        {"layer/linear.py": "from .. import SGD"},
        "layer.linear imports __init__",
    ),
    "an absolute import": (
        upward_imports,
        {"errors.py": "import singa_lite.tensor as t"},
        "errors imports tensor",
    ),
    "under TYPE_CHECKING": (
        upward_imports,
        {
            "comm/base.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..tensor import Tensor"
        },
        "comm.base imports tensor",
    ),
    "autograd sees comm": (
        column_crossings,
        {"autograd/engine.py": "from ..comm import base"},
        "autograd.engine imports comm.base",
    ),
    "opt beside dist sees sync": (
        column_crossings,
        {"opt/sgd.py": "from ..sync.fp32 import X"},
        "opt.sgd imports sync.fp32",
    ),
    "sync sees a transport": (
        column_crossings,
        {"sync/fp32.py": "from ..comm.shm import X"},
        "sync.fp32 imports comm.shm",
    ),
    "data sees tensors": (
        column_crossings,
        {"data/loader.py": "from ..tensor import Tensor"},
        "data.loader imports tensor",
    ),
    "a dodge": (
        hidden_imports,
        {"tensor.py": "def f():\n    from . import device"},
        "tensor imports device inside a function",
    ),
    "a late import": (
        hidden_imports,
        {"tensor.py": "def f():\n    import json"},
        "tensor imports json inside a function",
    ),
    "a dodge by name": (
        hidden_imports,
        {"tensor.py": "import importlib\nm = importlib.import_module('x')"},
        "tensor uses import_module",
    ),
    "a circle": (
        import_cycles,
        {"opt/sgd.py": "from .adam import Adam", "opt/adam.py": "from . import sgd"},
        "opt.sgd -> opt.adam -> opt.sgd",
    ),
    "a module list": (module_state, {"tensor.py": "cache = []"}, "tensor keeps state in cache"),
    "a typed dict under if": (
        module_state,
        {"tensor.py": "if True:\n    seen: dict = dict()"},
        "tensor keeps state in seen",
    ),
    "a global": (
        module_state,
        {"tensor.py": "n = 0\ndef f():\n    global n\n    n += 1"},
        "tensor says global n",
    ),
    "a constant that grows": (
        module_state,
        {"tensor.py": "SEEN = {}\ndef f(x):\n    SEEN[x] = 1"},
        "tensor changes SEEN",
    ),
    "another's constant that grows": (
        module_state,
        {"layer/linear.py": "from .. import tensor\ndef f(x):\n    tensor.SEEN.append(x)"},
        "layer.linear changes SEEN",
    ),
    "a warning": (
        warnings_without_a_line,
        {"tensor.py": "def f():\n    import warnings"},
        "tensor imports warnings",
    ),
    "no docstring": (missing_docstrings, {"tensor.py": "x = 1"}, "tensor has no docstring"),
    "no licence": (missing_licence, {"tensor.py": ""}, "tensor has no SPDX line"),
}

SOUND = {
    "__init__.py": "from .opt import DistOpt",
    "errors.py": "",
    "users_line.py": "import warnings",
    "config.py": "state = {}\ndef f():\n    global state",
    "device.py": "",
    "tensor.py": "from . import config\nTABLE = {}\nTABLE['add'] = 1",
    "autograd/__init__.py": "from .engine import backward",
    "autograd/engine.py": "from ..tensor import Tensor\ndef f():\n    import cupy",
    "comm/__init__.py": "",
    "comm/base.py": "from ..errors import CommError",
    "comm/shm.py": "from .base import Communicator",
    "sync/__init__.py": "",
    "sync/fp32.py": "from ..comm.base import Work",
    "opt/__init__.py": "from .dist import DistOpt",
    "opt/adam.py": "",
    "opt/sgd.py": "",
    "opt/dist.py": "from .. import sync\nfrom ..comm import shm\nfrom ..sync.fp32 import X",
    "layer/linear.py": "from ..autograd import engine",
    "model.py": "from .opt.sgd import SGD",
    "data/loader.py": "from ..errors import DataError",
}


def build(folder: Path, sources: dict[str, str], header: str) -> list[File]:
    for name, source in sources.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(header + source)
    return read(folder)


HEADER = f'# {SPDX}\n"""A file."""\n'


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_sound_tree_has_no_complaint(rule, tmp_path):
    assert list(rule(build(tmp_path, SOUND, HEADER))) == []


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_tree_that_breaks_a_rule_is_caught(name, tmp_path):
    rule, sources, complaint = VIOLATIONS[name]
    build(tmp_path, SOUND, HEADER)
    header = {missing_docstrings: f"# {SPDX}\n", missing_licence: '"""A file."""\n'}.get(rule, HEADER)
    assert list(rule(build(tmp_path, sources, header))) == [complaint]
