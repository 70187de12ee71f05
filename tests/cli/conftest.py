"""Fixtures of command-line tests."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from command_line import SMALL, run


@pytest.fixture(scope="package")
def done(record: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A finished run: its folder, stdout and stderr. Tests must not change it."""
    folder, out, err = tmp_path_factory.mktemp("done") / "run", StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert run("run", "weather", "--data", record, "--out", folder, *SMALL, "--json") == 0
    return folder, out.getvalue(), err.getvalue()
