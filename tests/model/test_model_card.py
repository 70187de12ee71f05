"""The model card and the demo of a fitted folder."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

from seqdefer.budgets.calibration import BUDGETS, Calibration, LossCurve, LossPoint
from seqdefer.budgets.rules import Setting
from seqdefer.model.folders import Pairing
from seqdefer.model.model_card import DEMO, MADE_BY, card_text, write_demo, write_model_card

OPTIONS = {"predictor": "google/small@c0ffee", "expert": "/home/me/large", "length": 12, "metric": "chrf"}
PAIRING = Pairing("text", OPTIONS, "p1", "e1", "ours", "900 documents of news.jsonl")
CALIBRATION = Calibration(tuple(Setting(budget, -budget, budget, budget, budget) for budget in BUDGETS), 40, "r")
CURVE = LossCurve("100 x (1 - chrf)", 30, "r", (LossPoint(0.0, 80.0), LossPoint(1.0, 50.0)))


def test_a_card_says_what_was_measured() -> None:
    card = card_text(PAIRING, CALIBRATION, CURVE, "TokenwiseModel")
    assert card.startswith("---\nlibrary_name: seqdefer\n")
    assert "base_model:\n- google/small\n---" in card
    assert "| 0.2 | 0.200 | 74.00 |" in card
    assert "900 documents of news.jsonl" in card
    assert "metric: chrf" in card
    assert "At most 12 tokens" in card
    assert "/home/me" not in card  # no paths of this machine
    assert "/home/me" not in card_text(replace(PAIRING, task="/home/me/mine.py"), CALIBRATION, CURVE, "")
    assert "Budgets were not measured" in card_text(PAIRING, None, None, "")


def test_a_card_of_the_users_own_stays(tmp_path: Path) -> None:
    write_model_card(tmp_path, PAIRING, CALIBRATION, CURVE, "TokenwiseModel")
    assert MADE_BY in (tmp_path / "README.md").read_text()
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")
    (tmp_path / "README.md").write_text("mine")
    write_model_card(tmp_path, PAIRING, None, None, "")
    assert (tmp_path / "README.md").read_text() == "mine"
    assert not (tmp_path / "curve.svg").exists()
    write_demo(tmp_path)
    ast.parse((tmp_path / "app.py").read_text())
    assert (tmp_path / "app.py").read_text() == DEMO
