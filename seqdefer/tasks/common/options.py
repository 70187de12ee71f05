"""Task options: dataclass fields that become command-line options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from seqdefer.errors import OptionError


def option(default: Any, help: str, *, is_path: bool = False) -> Any:
    """Return a field with its `--help` text. `is_path`: the value may name a file or a folder."""
    return field(default=default, metadata={"help": help, "is_path": is_path})


def check_ranges(options: Any, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Reject numbers out of range, which would end the run later with an obscure error."""
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        if not isinstance(value, int | float):
            raise OptionError(f"--{name.replace('_', '-')} is {value!r:.60}; give a number")
        if not low <= value <= high:
            bound = f"at least {low}" if value < low else f"at most {high}"
            raise OptionError(f"--{name.replace('_', '-')} is {value}; it must be {bound}")
