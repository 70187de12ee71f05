"""The study of the published TSP recipe: its measures, its choices by validation data, and its page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tsp_as_published_page as page
from torch import nn

from benchmarks.tsp_as_published import (
    CHOICES,
    LENGTH,
    RECIPE,
    ROWS,
    Fitted,
    Row,
    Study,
    explained,
    fit_row,
    fixed_place,
    live_units,
)
from seqdefer.rejectors.draft_training import fit_once
from seqdefer.rejectors.losses import get_psi, hand_off_grid, one_time_surrogate
from seqdefer.types import Draft, Examples, HandOffTable, Sequences

TOTALS = torch.tensor([[0.0, 2.0, 4.0], [3.0, 1.0, 2.0], [5.0, 5.0, 1.0]])


def test_explained_is_zero_at_the_best_constant_and_below_elsewhere() -> None:
    """The closed form must beat what gradient descent finds among constant scores."""
    free = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([free], lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        one_time_surrogate(free.expand(3, 3), TOTALS, get_psi("cross_entropy")).backward()
        optimizer.step()
    assert explained(free.detach().expand(3, 3), TOTALS, "cross_entropy") == pytest.approx(0, abs=1e-3)
    assert explained(torch.tensor([[0.0, 3.0, 0.0]]).expand(3, 3), TOTALS, "cross_entropy") < -1
    assert explained(-TOTALS, TOTALS, "cross_entropy") > 1


def test_live_units_are_those_that_some_row_switches_on() -> None:
    network = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[1.0], [-1.0], [1.0]]))
        network[0].bias.copy_(torch.tensor([0.0, -5.0, 9.0]))
    assert live_units(network, torch.tensor([[-1.0], [2.0]])) == 2


@pytest.mark.parametrize("row", [ROWS[0], next(row for row in ROWS if row.psi != "cross_entropy")])
def test_fit_equals_that_of_the_package(row: Row, tmp_path: Path) -> None:
    """The study standardises all inputs once; its scores must be those of DraftMLP."""
    parts = {
        name: made_up_part(n, seed) for seed, (name, n) in enumerate({"train": 40, "validation": 9, "test": 7}.items())
    }
    row = replace(row, changes={"epochs": 3})
    fitted = fit_row(row, 1, parts, tmp_path)
    rejector, history = fit_once(
        parts["train"][1:], parts["validation"][1:], hand_off_grid(LENGTH, row.hand_offs),
        replace(RECIPE.once, epochs=3), alpha=row.alpha or 0.0, psi=row.psi, fingerprint="", seed=1,
    )  # fmt: skip
    torch.testing.assert_close(fitted.scores, rejector.score(parts["test"][1]))
    assert fitted.numbers["epochs"] == len(history.training)
    torch.testing.assert_close(fit_row(row, 1, parts, tmp_path).scores, fitted.scores)  # found again


def made_up_part(n: int, seed: int) -> tuple[Examples, Draft, HandOffTable]:
    made = torch.Generator().manual_seed(seed)
    tours = torch.rand(n, LENGTH, generator=made).argsort(1)
    drafted = Draft(
        torch.randn(n, 3, generator=made), Sequences(tours, torch.full((n,), LENGTH)),
        torch.randn(n, LENGTH, 4, generator=made), torch.rand(n, LENGTH, generator=made), None,
    )  # fmt: skip
    loss = torch.rand(n, LENGTH + 1, generator=made).cumsum(1)
    table = HandOffTable(loss, (LENGTH - torch.arange(LENGTH + 1)).expand(n, -1))
    return Examples(torch.randn(n, LENGTH, 2, generator=made), tours, torch.arange(n)), drafted, table


def test_one_place_for_all_tours_follows_the_mean_loss() -> None:
    """Loss 0 up to the place and all of it behind: handing off there saves what the expert would write before."""
    loss = torch.zeros(2, LENGTH + 1)
    loss[:, 11:] = 10.0
    table = HandOffTable(loss, (LENGTH - torch.arange(LENGTH + 1)).expand(2, -1))
    tokens = Sequences(torch.arange(LENGTH).expand(2, -1), torch.tensor([LENGTH, LENGTH]))
    drafted = Draft(torch.zeros(2, 1), tokens, torch.zeros(2, LENGTH, 1), torch.ones(2, LENGTH), None)
    part = Examples(torch.zeros(2, LENGTH, 2), tokens.tokens, torch.arange(2)), drafted, table
    everything = torch.arange(2)
    assert fixed_place(part, everything, 0, "random") == pytest.approx(0)
    assert fixed_place(part, everything, 10, "random") == pytest.approx(100 * 10 / LENGTH)  # 40 tokens buy it all


def test_choices_look_at_validation_data_alone(tmp_path: Path) -> None:
    study = Study(tmp_path, {})
    for name, values in {"published": [1.0, 5.0, 2.0, 2.0, 2.0], "thumb": [2.0, 4.0, 3.0, 1.0, 9.0]}.items():
        study.rows[name] = next(row for row in ROWS if row.name == name)
        study.fits[name] = [Fitted(torch.zeros(1), {"validation": value}) for value in values]
    study.choose("either", ("published", "thumb"))
    assert [one.numbers["validation"] for one in study.fits["either"]] == [2.0, 5.0, 3.0, 2.0, 9.0]
    study.choose("best", ("thumb",))
    assert [one.numbers["validation"] for one in study.fits["best"]] == [9.0] * 5


def test_rows_have_names_of_their_own() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert {each for among in CHOICES.values() for each in among} <= set(names)


def test_page_names_what_rows_change() -> None:
    assert page.row_words("thumb, tanh: large") == (
        "alpha_1 by the rule of thumb; tanh for ReLU (24,000 training instances)"
    )
    assert page.row_words("best of five fits: tanh") == "best of five fits: tanh for ReLU"
    changes = {change for row in ROWS for change in row.name.split(", ")}
    assert {change for change in changes if not change.startswith("alpha ")} <= set(page.ROW_WORDS)
