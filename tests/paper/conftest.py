"""Fixtures for the tests of the reproduction."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import FITS
from toy_studies import DRAWN, TINY, Finished, Spy, install

from seqdefer.evaluation import experiment, splits
from seqdefer.labels import jobs
from seqdefer.paper.reproduce import reproduce


@pytest.fixture(scope="package")
def installed() -> Iterator[None]:
    """Replace all tasks by toys."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


@pytest.fixture(scope="package")
def finished(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """All studies, made in one go. Read only."""
    folder = tmp_path_factory.mktemp("finished") / "reproduced"
    return Finished(folder, reproduce("all", folder, replace(TINY, figures=bool(DRAWN)), command="seqdefer ..."))


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the finished folder."""
    return Path(shutil.copytree(finished.folder, tmp_path / "copy"))


@pytest.fixture
def work(spy: Spy) -> dict[str, list[tuple[Any, ...]]]:
    """The calls of every function that fits, labels or loads a rejector."""
    labels = {"draft": jobs, "hand_off_table": jobs, "enumerate_trees": splits}
    return {
        name: spy(owner, name, named=True) for name, owner in {**FITS, "load_rejector": experiment, **labels}.items()
    }
