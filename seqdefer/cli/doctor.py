"""`seqdefer doctor`: what is installed, what is missing and how to get it. It uses no network."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from pathlib import Path

from seqdefer.cli.common import Command, Parser
from seqdefer.environment import cache_directory, n_cores
from seqdefer.errors import SeqdeferError, install_command

PURPOSES = {
    "tsp": "exact solvers of the tsp task",
    "text": "Hugging Face models: the tasks text and xsum",
    "speech": "the speech task",
    "metrics": "the metrics rouge2, rougeL, bleu and chrf",
    "figures": "figures as PDF and PNG",
    "frame": "results as a pandas table",
    "ray": "labelling on a cluster",
    "remote": "experts behind an endpoint",
    "server": "seqdefer serve",
    "tracing": "traces of the server",
}
FOR_DEVELOPERS = ("dev", "docs")
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+).*extra == ['\"]([a-z]+)['\"]")


def doctor(arguments: list[str]) -> int:
    parser = Parser(
        prog="seqdefer doctor",
        description="Say what is installed, which extras are missing, what this machine has, and where caches are.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(arguments)
    found = {
        "versions": _versions(), "machine": _machine(), "extras": _extras(), "caches": _caches(), "tasks": _tasks()
    }  # fmt: skip
    if chosen.json:
        print(json.dumps(found))
    else:
        for title, rows in found.items():
            width = max(map(len, rows), default=0)
            print(f"{title}:\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items()) + "\n")
    return 0


def _versions() -> dict[str, str]:
    packages = ("seqdefer", "torch", "numpy", "transformers")
    return {"python": f"{platform.python_version()} ({sys.executable})", **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    from importlib import metadata  # takes as long as half of `seqdefer --help`

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> dict[str, str]:
    import torch

    n_gpus = torch.cuda.device_count()
    gpus = ", ".join(torch.cuda.get_device_name(index) for index in range(n_gpus))
    build = f"PyTorch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "PyTorch is built for CPUs"
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": f"{n_cores()}, PyTorch uses {torch.get_num_threads()} threads (OMP_NUM_THREADS sets it)",
        "gpu": gpus or f"none found; {build}",
    }


def _extras() -> dict[str, str]:
    """Return for each extra what it is for, and what of it is missing."""
    from importlib.metadata import requires

    wanted: dict[str, list[str]] = {}
    for line in requires("seqdefer") or ():
        if (match := REQUIREMENT.match(line)) and match[2] not in FOR_DEVELOPERS:
            wanted.setdefault(match[2], []).append(match[1])
    return {name: _state(name, packages) for name, packages in wanted.items()}


def _state(extra: str, packages: list[str]) -> str:
    missing = [package for package in packages if _version(package) == "not installed"]
    state = f"{PURPOSES.get(extra, extra)}: "
    return state + (f"missing {', '.join(missing)}; {install_command(extra)}" if missing else "installed")


def _caches() -> dict[str, str]:
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    folders = {
        "data of tasks": (cache_directory(), "SEQDEFER_CACHE"),
        "models of the Hugging Face Hub": (Path(hub).expanduser(), "HF_HOME"),
    }
    return {what: f"{folder}, {_size(folder)} ({variable} moves it)" for what, (folder, variable) in folders.items()}


def _size(folder: Path) -> str:
    """Return the size of the files in a folder; the Hub's snapshots are links, which count nothing."""
    if not folder.is_dir():
        return "empty"
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return f"{n_bytes / 1e6:.0f} MB"


def _tasks() -> dict[str, str]:
    """Return the package of each installed task, or why it cannot be loaded."""
    from seqdefer.registry import find_tasks, package_of

    return {name: f"{package_of(point)}{_fault(name)}" for name, point in sorted(find_tasks().items())}


def _fault(name: str) -> str:
    from seqdefer.registry import load_task

    try:
        load_task(name)
    except SeqdeferError as error:
        return f"; cannot be loaded: {error}"
    except Exception as error:  # whatever the other package raises
        return f"; cannot be loaded: {error!r}"
    return ""


DOCTOR = Command("doctor", "say what is installed, what is missing and how to get it", doctor)
