"""What tests measure, for the documentation: `SEQDEFER_TEST_OUT=docs/results` names the folder that they write to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUT = "SEQDEFER_TEST_OUT"


def record_result(name: str, found: Mapping[str, Any]) -> None:
    """Write a result as JSON, if a folder is named."""
    if OUT in os.environ:
        text = json.dumps(found, indent=1, sort_keys=True) + "\n"
        (Path(os.environ[OUT]) / f"{name}.json").write_text(text, encoding="utf-8")
