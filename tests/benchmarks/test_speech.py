"""The benchmarks of speech on a tiny pair: what they write, and that hidden facts are hidden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'speech'")
pytest.importorskip("soundfile", reason="needs the extra 'speech'")

from tiny_whisper import LENGTH, save_place, write_corpus

from benchmarks import speech_facts, speech_labels, speech_seconds
from benchmarks.speech_facts import CLIP_FACTS, FACTS, UNCERTAINTY, VARIANTS, PartlyShown, Variant

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
SAME = ("--device", "cpu", "--length", str(LENGTH))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_place(tmp_path_factory.mktemp("speech"))
    lines = write_corpus(folder, 18).read_text().splitlines(keepends=True)
    (folder / "fit.jsonl").write_text("".join(lines[6:]))
    (folder / "test.jsonl").write_text("".join(lines[:6]))
    return folder


def test_seconds_of_each_budget(place: Path, tmp_path: Path) -> None:
    out, pair = tmp_path / "seconds.json", (str(place / "predictor"), str(place / "expert"))
    speech_seconds.main([*pair, str(place), *SAME, "--at-once", "1", "2", "--repeats", "2", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["at_once"], row["clips"]) for row in rows[::7]] == [(1, 4), (2, 8)]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
    shares = {row["way"]: row["share"] for row in rows if row["at_once"] == 2}
    assert shares["expert"] is None
    assert shares["budget 0"] == 0
    assert shares["budget 1"] == 1
    assert 0 < shares["budget 0.2"] < 0.5


def test_seconds_of_labels(place: Path, tmp_path: Path) -> None:
    out, pair = tmp_path / "labels.json", (str(place / "predictor"), str(place / "expert"))
    speech_labels.main([*pair, str(place), *SAME, "--n-clips", "5", "--repeats", "2", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["labels"] for row in rows] == ["hand-offs", "decisions"]
    assert all(len(row[way]) == 2 and min(row[way]) > 0 for row in rows for way in ("together", "copies"))


def test_gains_without_single_facts(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("all facts", UNCERTAINTY, "states", "without margin")
    monkeypatch.setattr(speech_facts, "VARIANTS", {name: VARIANTS[name] for name in names})
    pair, data = (
        (str(place / "predictor"), str(place / "expert")),
        (str(place / "fit.jsonl"), str(place / "test.jsonl")),
    )
    sizes = ("--fitted", "8", "4", "--seeds", "2", "--instances", "3", "--folder", str(tmp_path / "run"))
    parts = []
    for part in ("1/2", "2/2"):
        out = tmp_path / "facts.json"
        speech_facts.main([*pair, *data, *SAME, *sizes, "--part", part, "--out", str(out)])
        parts.append(json.loads(out.read_text())["gains"])
    assert [list(gains) for gains in parts] == [list(names)] * 2
    assert all(len(values) == 1 for gains in parts for values in gains.values())
    speech_facts.main([*pair, *data, *SAME, *sizes, "--out", str(out)])
    whole = json.loads(out.read_text())["gains"]
    assert whole == {name: [gains[name][0] for gains in parts] for name in names}


class Trees:
    """Two nodes of three states and all facts, all ones."""

    class nodes:
        features = torch.ones(2, 3 + len(FACTS))

    device, context = torch.device("cpu"), torch.ones(2, 3 + CLIP_FACTS)

    def proposal(self, nodes: torch.Tensor) -> Any:
        from seqdefer.types import Proposal

        return Proposal(nodes, self.nodes.features[nodes], nodes.float())


def test_what_a_variant_does_not_see_is_zero() -> None:
    nodes = torch.arange(2)
    shown = PartlyShown(Trees(), Variant.without("level"))
    row = shown.proposal(nodes).features[0].tolist()
    assert row == [0, 0, 0, *(float(name != "level") for name in FACTS)]
    assert shown.context[0].tolist() == [0] * 3 + [1] * CLIP_FACTS
    states = PartlyShown(Trees(), Variant((), clip=False, states=True))
    assert states.proposal(nodes).features[0].tolist() == [1, 1, 1, *[0] * len(FACTS)]
    assert states.context[0].tolist() == [1] * 3 + [0] * CLIP_FACTS
