"""The fidelity page: its references lead somewhere, and its figures are those of the code and of the paper."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import fidelity_page as page
import pytest

from seqdefer.registry import load_task


def test_every_reference_leads_somewhere() -> None:
    assert list(page.find_problems(page.read_sections())) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"code": ("seqdefer.rejectors.losses.token_surrogat",)}, "no code seqdefer.rejectors.losses.token_surrogat"),
        ({"code": ("seqdefer.rejectors.loss.token_surrogate",)}, "no code seqdefer.rejectors.loss.token_surrogate"),
        ({"code": ("seqdefer.hyperparameters.Settings.learning",)}, "no code"),
        ({"tests": ("rejectors/test_losses.py::test_nothing",)}, "no test rejectors/test_losses.py::test_nothing"),
        ({"tests": ("rejectors/test_loss.py::test_phi_is_convex",)}, "no test rejectors/test_loss.py"),
        ({"tests": ("rejectors/test_losses.py",)}, "no test rejectors/test_losses.py"),
        ({"note": "{tsp:presets.paper.trains}"}, "no figure tsp:presets.paper.trains"),
        ({"note": "{code:seqdefer.methods.chow.QUANTILE}"}, "no figure code:seqdefer.methods.chow.QUANTILE"),
        ({"note": "{default:seqdefer.rejectors.token_training.teacher_probability.up}"}, "no figure default:"),
        ({"verdict": "perfect"}, "no verdict perfect"),
        ({"verdict": "deviates"}, "a deviation without a reason"),
        ({"verdict": "published"}, "the default recipe's difference is missing"),
        ({"tests": ()}, "neither a test nor a reason"),
    ],
)
def test_a_broken_row_is_a_problem(change: dict[str, Any], problem: str) -> None:
    sound = page.Row(
        item="Token surrogate",
        paper="equation 4",
        code=("seqdefer.rejectors.losses.token_surrogate",),
        tests=("rejectors/test_losses.py::test_phi_is_convex",),
        verdict="faithful",
    )
    assert not list(page.find_problems([page.Section("sound", (sound,))]))
    problems = list(page.find_problems([page.Section("broken", (replace(sound, **change),))]))
    assert len(problems) == 1
    assert problem in problems[0]


def test_a_misspelt_key_is_refused() -> None:
    with pytest.raises(TypeError, match="verdikt"):
        page.read_sections('[[section]]\ntitle = "x"\n[[section.row]]\nitem = "x"\nverdikt = "faithful"\n')


def test_hyperparameters_are_compared_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [5e-4, 1e-3, 5e-4, 5e-4, 5e-4]
    row = page.hyperparameter_row("Learning rate", "learning_rate", rates)
    ours = load_task("xsum").recipes["ours"].token.learning_rate
    assert row.verdict == "published"
    assert f"XSUM-Tokenlevel {ours:g}" in row.ours
    assert page.hyperparameter_row("Delta", "delta", [1e-4] * 5).verdict == "faithful"
    other = page.hyperparameter_row("Learning rate", "learning_rate", [5e-4, 1e-3, 5e-4, 5e-4, 1e-3])
    assert other.verdict == "deviates"
    assert "the published recipe has 0.0005, 0.001, 0.0005, 0.0005, 0.0005" in other.note


def test_figures_are_those_of_the_code() -> None:
    assert page.fill("{weather:presets.paper-size.train_windows} windows") == "70,080 windows"
    assert page.fill("{default:seqdefer.rejectors.token_training.teacher_probability.decay}") == "0.95"
    assert page.fill("{code:seqdefer.methods.chow.QUANTILES}") == "0, 0.4, 0.8, 1"
    assert page.fill("{tsp:published.hand_offs} of {tsp:ours.strategy}") == "45 of explore"


def test_the_papers_table_of_hyperparameters_is_complete(shared_dir: Path) -> None:
    """Every line of the table is a row, with the figures that the paper prints."""
    source = shared_dir / "paper" / "learning-to-partially-defer.tex"
    if not source.is_file():
        pytest.skip("the paper is not on this machine")
    text = source.read_text(encoding="utf-8")
    table = text[text.index("Task/Hyperparameters") : text.index("label{tab:hpsettings}")]
    printed = {
        name.strip(): [cell.strip() for cell in cells.split("&")]
        for name, cells in re.findall(r"^ *([A-Z][\w ,()]+?) *& *(.+?) *\\\\ *$", table, re.MULTILINE)
        if "OneTime" not in cells
    }
    rows = dict(re.split(r" \(`\w+`\): ", row.item) for row in _hyperparameters())
    patience, delta = zip(*(cell.split(", ") for cell in printed.pop("Early Stopping (patience, delta)")), strict=True)
    printed |= {"Early stopping: patience": list(patience), "Early stopping: delta": list(delta)}
    kinds = {"MLP": "draft_mlp", "LSTM": "lstm"}
    expected = {
        name.capitalize(): [kinds[cell] if cell in kinds else float(cell) for cell in cells]
        for name, cells in printed.items()
    }
    ours = {name: [_value(cell) for cell in figures.split(", ")] for name, figures in rows.items()}
    assert ours == expected
    assert {row.verdict for row in _hyperparameters()} == {"faithful", "published"}


def _hyperparameters() -> list[Any]:
    return [row for section in page.read_sections() for row in section.rows if row.paper.startswith("D, table 2, ")]


def _value(cell: str) -> float | str:
    return cell if cell.isidentifier() else float(cell.replace(",", ""))
