"""The shape of the package: who imports whom, what is public, what importing costs, and what is forbidden."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

import seqdefer

# Imports go one way: a module imports only from modules before it in this list, lazy imports and imports for type
# checkers included. A folder (tasks) is one entry. `__init__` is the facade: it comes last, so nobody imports from it.
ORDER = [
    "errors",
    "cores",
    "patience",
    "roofline",
    "scaling",
    "remote",
    "store",
    "shards",
    "types",
    "interfaces",
    "environment",
    "engine",
    "branches",
    "labels",
    "trees",
    "exploration",
    "labelling",
    "splits",
    "losses",
    "theory",
    "rejectors",
    "training",
    "hulls",
    "policies",
    "oracle",
    "baselines",
    "curves",
    "results",
    "paper",
    "markup",
    "plots",
    "sections",
    "report",
    "calibration",
    "tables",
    "settings",
    "showing",
    "experiment",
    "deferring",
    "fitting",
    "server",
    "reproduction",
    "tasks",
    "testing",
    "cli",
    "__main__",
    "__init__",
]
# Tasks and deferral are strangers: tasks see only these, nobody imports tasks, and only these two look them up.
TASKS_IMPORT = {"cores", "errors", "remote", "store", "types", "interfaces", "markup", "tasks"}
FIND_TASKS = {"experiment", "cli"}

PUBLIC = [
    "Calls",
    "CheckpointError",
    "ChowMean",
    "ChowQuantile",
    "ChowSum",
    "Confidence",
    "ContractError",
    "Curve",
    "DataError",
    "DecisionTrees",
    "DeferringModel",
    "Draft",
    "DraftMLP",
    "DraftRejector",
    "Examples",
    "Experiment",
    "ExperimentSettings",
    "Expert",
    "HandOff",
    "HandOffTable",
    "InputError",
    "LSTMRejector",
    "MLPRejector",
    "MissingExtraError",
    "NextTokenExpert",
    "OptionError",
    "Policy",
    "Predictor",
    "Proposal",
    "Results",
    "Rollout",
    "SeqdeferError",
    "SequenceSpec",
    "Sequences",
    "Settings",
    "Step",
    "Task",
    "TaskEntry",
    "Threshold",
    "TokenRejector",
    "__version__",
    "curve_of",
    "draft",
    "enumerate_trees",
    "fit_once",
    "fit_token",
    "fit_whole",
    "get_phi",
    "get_psi",
    "hand_off_table",
    "improvement",
    "interleave",
    "load_rejector",
    "load_results",
    "load_task",
    "once_threshold_for",
    "one_time_surrogate",
    "paired_bootstrap",
    "roll_out",
    "run_task",
    "sweep_thresholds",
    "threshold_for",
    "token_surrogate",
    "whole_threshold_for",
    "write_report",
]

PACKAGE = Path(seqdefer.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path) -> str:
    """The entry of ORDER a file belongs to: its folder within the package, or its own name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def place_of_name(name: str) -> str:
    """seqdefer.tasks.weather -> tasks; seqdefer.Task -> __init__"""
    first = name.split(".")[1] if "." in name else "__init__"
    exists = (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file()
    return first if exists or first in ORDER else "__init__"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file as (line, dotted name), with import_module("...") and relative imports spelt out."""
    here = ["seqdefer", *path.relative_to(PACKAGE).with_suffix("").parts]
    for node in ast.walk(parse(path)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = ".".join([*(here[:-level] if level else []), *([module] if module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def test_every_module_has_its_place() -> None:
    homeless = sorted({place(path) for path in FILES} - set(ORDER))
    assert not homeless, f"add {homeless} to ORDER in {__file__}, after everything they import"


@each_file
def test_imports_go_one_way(path: Path) -> None:
    own = place(path)
    if own not in ORDER:
        pytest.skip("has no place yet: see test_every_module_has_its_place")
    allowed = TASKS_IMPORT if own == "tasks" else {*ORDER[: ORDER.index(own)], own} - {"tasks"}
    wrong = [
        f"{path.name}:{line} imports {name}"
        for line, name in imports(path)
        if name.split(".")[0] == "seqdefer" and name != "seqdefer.__version__" and place_of_name(name) not in allowed
    ]
    assert not wrong, f"{own} may import only {sorted(allowed - {own})} of seqdefer"


@each_file
def test_tasks_are_looked_up_in_one_place(path: Path) -> None:
    named = {
        value
        for node in ast.walk(parse(path))
        for value in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None))
    }
    assert "entry_points" not in named or place(path) in FIND_TASKS, f"only {sorted(FIND_TASKS)} find tasks"


def test_public_names() -> None:
    assert sorted(seqdefer.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(seqdefer))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves(name: str) -> None:
    assert getattr(seqdefer, name) is not None


def test_type_checkers_see_the_public_names() -> None:
    """The imports under TYPE_CHECKING are the table of lazy names, written once more."""
    lazy = {f"seqdefer.{module}.{name}" for name, module in seqdefer._MODULE_OF.items()}
    assert {name for _, name in imports(PACKAGE / "__init__.py") if name.startswith("seqdefer.")} == lazy


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Exprt'"):
        seqdefer.Exprt  # noqa: B018


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    report = "import sys; print('\\n' + ' '.join({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


def test_import_is_light() -> None:
    loaded = loaded_after("import seqdefer")
    assert "seqdefer" in loaded
    assert not loaded & {"torch", "numpy", "rich", "safetensors"}


@pytest.mark.skipif(not (PACKAGE / "cli").exists(), reason="there is no seqdefer/cli yet")
def test_help_does_not_load_torch() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['seqdefer', '--help']\n"
        "try:\n"
        "    runpy.run_module('seqdefer', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
    )
    loaded = loaded_after(code)
    assert "seqdefer" in loaded
    assert "torch" not in loaded


def forbidden(path: Path) -> Iterator[str]:
    """Whatever runs code hidden in data: pickle and its kin, torch.load and torch.save, eval and exec."""
    torch_names = {"torch"}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            torch_names |= {alias.asname for alias in node.names if alias.name == "torch" and alias.asname}
    for line, name in imports(path):
        if name.split(".")[0] in UNPICKLERS or name in {"torch.load", "torch.save"}:
            yield f"{path.name}:{line} imports {name}"
    for node in ast.walk(parse(path)):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr="load" | "save") if name in torch_names:
                yield f"{path.name}:{node.lineno} uses torch.{node.attr}"
            case ast.Call(func=ast.Name(id="eval" | "exec")):
                yield f"{path.name}:{node.lineno} calls {node.func.id}"
            case ast.keyword(arg="allow_pickle", value=value) if not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                yield f"{path.name}:{node.lineno} allows pickle"


@each_file
def test_no_pickle(path: Path) -> None:
    assert not list(forbidden(path)), "files are JSON and safetensors: see seqdefer/store.py"


@each_file
def test_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(parse(path)), f"{path.name} does not say what it is"


def test_version_is_the_installed_one() -> None:
    installed = metadata.version("seqdefer")
    assert installed == seqdefer.__version__, "after a change of version: touch pyproject.toml, so that make reinstalls"
