"""A run that the tests of experiments and of resuming share."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import run_weather


@pytest.fixture(scope="package")
def finished(record: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run from end to end. Tests must not change it."""
    folder = tmp_path_factory.mktemp("finished")
    run_weather(record, folder)
    return folder
