"""`seqdefer new-task`: a folder with a task that works, to be changed part by part."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path
from string import Template

from seqdefer.cli.common import Command, Parser
from seqdefer.errors import OptionError
from seqdefer.storage.files import writable_folder, write_text

# What is written, from which text of the folder `skeleton`.
FILES = {
    "{name}.py": "task.py.txt",
    "test_{name}.py": "test_task.py.txt",
    "README.md": "README.md.txt",
    "pyproject.toml": "pyproject.toml.txt",
}


def new_task(arguments: list[str]) -> int:
    parser = Parser(
        prog="seqdefer new-task",
        description="Write a folder with a small task that works, its test and its pyproject.toml, to start from.",
    )
    parser.add_argument("name", metavar="NAME", help="name of the task: small letters, digits and _")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (a folder with the name of the task)")
    chosen = parser.parse_args(arguments)
    folder = chosen.out or Path(chosen.name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder} is not empty; choose another folder with --out")
    _check_name(chosen.name)
    with writable_folder(folder):
        written = write_skeleton(chosen.name, folder)
    for path in written:
        print(path)
    print(f"\ntest it: cd {folder} && {Path(sys.executable).name} -m pytest (pip install pytest)", file=sys.stderr)
    print(f"run it: seqdefer run {folder / chosen.name}.py", file=sys.stderr)
    return 0


def write_skeleton(name: str, folder: Path) -> list[Path]:
    """Write the files of a new task and return their paths."""
    from importlib.resources import files

    words = {"name": name, "title": "".join(part.capitalize() for part in name.split("_"))}
    texts = files("seqdefer.cli") / "skeleton"
    return [
        write_text(folder / target.format(name=name), Template((texts / source).read_text("utf-8")).substitute(words))
        for target, source in FILES.items()
    ]


def _check_name(name: str) -> None:
    from importlib.util import find_spec

    from seqdefer.registry import find_tasks

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        better = re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_0123456789")[:40] or "task"
        better = f"my_{better}" if keyword.iskeyword(better) or better == "task" else better
        raise OptionError(
            f"{name!r:.80} cannot be the name of a module; use small letters, digits and _, such as {better}"
        )
    if name in find_tasks():
        raise OptionError(f"there is a task {name!r} already; choose another name")
    if find_spec(name) is not None:
        raise OptionError(f"there is a module {name!r} already; choose another name, such as my_{name}")


NEW_TASK = Command("new-task", "write a small task that works, to start your own from", new_task)
