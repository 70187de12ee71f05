"""Options of tasks: fields of a dataclass that become options of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from seqdefer.errors import OptionError


def option(default: Any, help: str, *, is_path: bool = False) -> Any:
    """A field with the words that `--help` shows. `is_path`: it may name a file or a folder."""
    return field(default=default, metadata={"help": help, "is_path": is_path})


def check_ranges(options: Any, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Refuses numbers below the least or above the most of their field: memory, or an integer of the machine, would end
    the run later and say less."""
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise OptionError(f"--{name.replace('_', '-')} is {value}; it must be {bound}")
