"""The notebook runs from its first cell to its last without a network, and shows what its text says."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.test_docs import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "first-hour.ipynb"
CELL_SECONDS = 600  # on a busy machine


def test_outputs_are_not_committed() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The code cells, executed."""
    for module in ("transformers", "pandas", "matplotlib", "ipykernel"):
        pytest.importorskip(module)
    nbformat, nbclient = (pytest.importorskip(module) for module in ("nbformat", "nbclient"))
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "IPYTHONDIR": str(folder / "ipython")}
    client = nbclient.NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells: list[Any], kind: str) -> list[str]:
    """Return what cells end with, in one format."""
    outputs = [output for cell in cells for output in cell.outputs if "data" in output]
    return [output.data[kind] for output in outputs if kind in output.data]


@pytest.mark.slow
def test_notebook_shows_models_outputs_and_figures(cells: list[Any]) -> None:
    html = shown(cells, "text/html")
    assert sum("<svg" in one for one in html) == 2  # the fitted model, and the same one loaded again
    (written,) = (one for one in html if "budgets hold on average" in one)
    n_tokens, n_underlined = written.count("score "), written.count("underline")
    assert 0 < n_underlined - 1 < n_tokens / 2  # one is in the legend
    assert len(shown(cells, "image/png")) == 1
    printed = "".join(output.text for cell in cells for output in cell.outputs if output.get("name") == "stdout")
    assert "with confidence 0.9, the expert writes at most 20 % of all tokens" in printed


@pytest.mark.slow
def test_notebook_has_learned(cells: list[Any]) -> None:
    """Margins are wide: another machine or version of PyTorch trains another pair."""
    (table,) = (one for one in shown(cells, "text/plain") if "word error rate" in one)
    rows = [[float(number) for number in line.split()[1:]] for line in table.splitlines()[1:]]
    losses = {budget: loss for budget, _, loss in rows}
    assert losses[0.0] > 10 + losses[1.0]  # or there would be nothing to defer for
    assert losses[0.5] < (losses[0.0] + losses[1.0]) / 2  # what deferring at random would give
