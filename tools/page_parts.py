"""What the generated pages share: Markdown tables, and the files of results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells may hold vertical bars."""
    heading = "".join(f"| {cell} " if cell else "| " for cell in head) + "|"
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return "\n".join([heading, "|---" * len(head) + "|", *lines, ""])


def read_results(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def machine_of(written: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in written["machine"].items())
