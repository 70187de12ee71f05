"""The shape of the package: who imports whom, what is public, what importing costs, and what is forbidden."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

import seqdefer

# A room is a folder of the package; modules at its root are rooms of their own. The order of rooms follows from who
# imports whom: there are no circles, among rooms and within each.
TASKS_IMPORT = {
    "cli.common",  # tools of a task that are commands of their own
    "progress_bars",
    "errors",
    "environment",
    "graphs",
    "hyperparameters",
    "interfaces",
    "progress",
    "recipes",
    "registry",
    "remote",
    "report.markup",
    "rows",
    "storage",
    "tasks",
    "types",
}
LOOK_UP = {"registry"}  # the one module that reads entry points


PACKAGE = Path(seqdefer.__file__).parent
STUB = PACKAGE / "__init__.pyi"
FILES = sorted(PACKAGE.rglob("*.py"))
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_of(path: Path) -> str:
    """seqdefer/tasks/tsp/task.py -> tasks.tsp.task; seqdefer/tasks/__init__.py -> tasks"""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in FILES}


def imported_module(name: str) -> str:
    """seqdefer.tasks.tsp.task.ENTRY -> tasks.tsp.task; seqdefer.Task -> __init__"""
    inner = name.split(".")[1:]
    while inner and ".".join(inner) not in MODULES:
        inner.pop()
    return ".".join(inner) or "__init__"


def room_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


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


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Modules of the package that a file imports, lazy imports and imports for type checkers included."""
    for line, name in imports(path):
        if name.split(".")[0] == "seqdefer" and name != "seqdefer.__version__":
            yield line, imported_module(name)


def find_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the nodes of a circle, or nothing where the graph has an order."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_circles_are_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(find_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_rooms_import_one_way() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        others = {room_of(other) for _, other in own_imports(path)} - {room_of(module)}
        graph.setdefault(room_of(module), set()).update(others)
    assert not find_circle(graph), "two rooms import each other: move what both need into a room above them"


def test_modules_import_one_way() -> None:
    graph = {module: {other for _, other in own_imports(path)} - {module} for module, path in MODULES.items()}
    assert not find_circle(graph)


@each_file
def test_nobody_imports_the_facade(path: Path) -> None:
    wrong = [line for line, other in own_imports(path) if other == "__init__"]
    assert not wrong, f"{path.name}: import from the module that defines the name, lines {wrong}"


@each_file
def test_tasks_and_deferral_are_strangers(path: Path) -> None:
    is_task = room_of(module_of(path)) == "tasks"
    for line, other in own_imports(path):
        if is_task:
            assert {other, room_of(other)} & TASKS_IMPORT, f"{path.name}:{line}: a task imports {other}"
        else:
            assert room_of(other) != "tasks", f"{path.name}:{line} imports {other}: find tasks by their names"


@each_file
def test_plugins_are_looked_up_in_one_place(path: Path) -> None:
    named = {
        value
        for node in ast.walk(parse(path))
        for value in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None))
    }
    assert "entry_points" not in named or module_of(path) in LOOK_UP, f"only {sorted(LOOK_UP)} finds plug-ins"


def test_a_class_name_exists_once() -> None:
    names = [
        node.name
        for path in FILES
        for node in parse(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not sorted(name for name, count in Counter(names).items() if count > 1)


def public_names() -> list[str]:
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    return [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]


def test_public_names_are_those_of_the_stub() -> None:
    assert sorted(seqdefer.__all__) == sorted(["__version__", *public_names()])
    assert set(seqdefer.__all__) <= {*dir(seqdefer), "__version__"}


@pytest.mark.parametrize("name", public_names())
def test_public_name_resolves(name: str) -> None:
    assert getattr(seqdefer, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="attribute Exprt"):
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
    assert not list(forbidden(path)), "files are JSON and safetensors: see seqdefer/storage"


@each_file
def test_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(parse(path)), f"{path.name} does not say what it is"


def test_version_is_the_installed_one() -> None:
    installed = metadata.version("seqdefer")
    assert installed == seqdefer.__version__, "after a change of version: touch pyproject.toml, so that make reinstalls"
