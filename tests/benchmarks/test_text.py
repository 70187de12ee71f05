"""The benchmarks of text and of the server, with tiny models."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_benchmarks import TEXT_BENCHMARKS, check_spread, run

from seqdefer.budgets.policies import Threshold
from seqdefer.engine.speculative import run_all, speculative_loop
from seqdefer.rejectors.confidence import Confidence
from seqdefer.types import EXPERT, PREDICTOR

pytest.importorskip("transformers", reason="needs the extra 'text'")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of these benchmarks."""
    out = tmp_path_factory.mktemp("bench") / "bench.json"
    assert run(*(word for name in TEXT_BENCHMARKS for word in ("--only", name)), "--out", str(out)) == 0
    written: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return written


def test_each_has_rows(written: dict[str, Any]) -> None:
    assert tuple(dict.fromkeys(row["benchmark"] for row in written["rows"])) == TEXT_BENCHMARKS
    assert written["text"]["pair"] == "made"
    check_spread(written["rows"])


def test_text_compares_both_ends_and_all_hand_offs(written: dict[str, Any]) -> None:
    (row,) = [row for row in written["rows"] if row["benchmark"] == "text"]
    assert row["what"] == "all hand-offs of 3 documents, one run of the expert for each"
    assert re.fullmatch(r"\d+ tokens of all hand-offs equal; 45 tokens of either model alone equal", row["same"])


def test_the_rejector_is_measured_with_two_kinds_of_predictors(written: dict[str, Any]) -> None:
    rows = [row for row in written["rows"] if row["benchmark"] == "rejector"]
    names = ("the predictor", "a decoder-only predictor")
    assert [row["what"] for row in rows] == [f"{name} without it, batches of {n}" for name in names for n in (1, 3)]
    assert [row["same"] for row in rows] == [f"{n} tokens of the predictor equal" for n in (5, 15, 12, 36)]


def test_the_server_is_measured_against_the_engine_and_either_model(written: dict[str, Any]) -> None:
    rows = [row for row in written["rows"] if row["benchmark"] == "server"]
    assert [row["unit"] for row in rows[:4]] == ["ms"] * 2 + ["times its cost"] * 2
    assert rows[0]["same"] == "10 texts equal"  # per round: 4 complete responses and 1 stream, 2 documents each
    assert rows[0]["note"] == "8 requests a round"
    ways, waits = ["times as fast"] * 3, ["ms"] * 4  # per request, and between pieces of a stream
    assert [row["unit"] for row in rows[4:]] == [*ways, *waits] * 2
    assert [row["what"].split(":")[0] for row in rows[4:]] == ["1 client"] * 7 + ["3 clients"] * 7
    compared = [row["same"] for row in rows[4:] if row["unit"] == "times as fast"]
    assert compared == ["2 texts equal"] * 3 + ["3 texts equal"] * 3


def test_text_takes_a_pair_and_documents(tmp_path: Path) -> None:
    from tiny_models import tiny, tokenizer

    for name, n_layers in (("predictor", 1), ("expert", 2)):
        tiny("gpt2", n_layers, seed=n_layers).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    documents = tmp_path / "documents.jsonl"
    texts = ["w5 w6 w7", "w8 w9", "w10 w11 w12 w13"]
    documents.write_text("".join(json.dumps({"document": each, "summary": "w3"}) + "\n" for each in texts))
    pair, out = [str(tmp_path / name) for name in ("predictor", "expert")], tmp_path / "bench.json"
    assert run("--only", "text", "--pair", *pair, "--documents", str(documents), "--out", str(out)) == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["text"]["pair"] == ["predictor", "expert"]
    assert written["text"]["documents"] == "documents.jsonl"
    assert len(written["rows"]) == 1
    assert run("--only", "text", "--pair", *pair, "--dtype", "bfloat16", "--out", str(out)) == 0


def test_different_text_is_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import text

    right = text.generate
    monkeypatch.setattr(text, "generate", lambda *given, **options: right(*given, **options) + 1)
    assert run("--only", "text", "--out", str(tmp_path / "bench.json")) == 1
    assert "benchmarks: tokens of either model alone: " in capsys.readouterr().err


@pytest.mark.parametrize("author", [PREDICTOR, EXPERT])
def test_speculation_may_differ_at_ties_alone(author: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that differs is a tie where both tokens, or the score and the threshold, are equal within rounding."""
    from benchmarks import speculation
    from benchmarks.measure import ResultsDifferError

    some, threshold = speculation.decoder_only(speculation.QUICK, torch.device("cpu"), "float32"), 0.7
    policy = Threshold(Confidence("uncertainty"), threshold)
    loop = speculative_loop(some.pair.predictor, some.pair.expert, policy, some.spec)
    right = run_all(loop, some.examples)
    assert re.fullmatch(r"\d+ tokens equal", speculation._compare(some, threshold, right, is_exact=True))

    row, at = (right.authors == author).nonzero()[-1].tolist()
    tokens, authors = right.sequences.tokens.clone(), right.authors.clone()
    wrong = replace(right, sequences=replace(right.sequences, tokens=tokens))
    tokens[row, at:] = (tokens[row, at:] + 1) % 500  # what follows the first difference does not count
    gaps = [abs(float(right.scores[row, at]) - threshold)]
    writer = (some.pair.predictor, some.pair.expert)[author]
    said = writer.model.network.prefill(some.examples.inputs[row : row + 1], tokens[row : row + 1, :at]).logits[0]
    gaps.append(float((said[right.sequences.tokens[row, at]] - said[tokens[row, at]]).abs()))
    authors[row, at] = 1 - author
    for gap, rollout in zip(gaps, (replace(wrong, authors=authors), wrong), strict=True):
        with pytest.raises(ResultsDifferError, match=f"two choices are {gap:.2g} apart"):
            speculation._compare(some, threshold, rollout, is_exact=True)
        text = f"the rest differ by rounding; ties: 1, at most {gap:.1g} apart"
        assert speculation._compare(some, threshold, rollout, is_exact=False).endswith(text)
        with monkeypatch.context() as patched:
            patched.setattr(speculation, "TIE", gap * 1.001)
            assert speculation._compare(some, threshold, rollout, is_exact=True).endswith(text)


def test_speculation_measures_the_chosen_numbers_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert run("--only", "speculation", "--at-once", "4", "--out", str(out)) == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    assert {row["what"].split(",")[1] for row in written["rows"]} == {" 4 at once"}
    assert run("--only", "speculation", "--at-once", "5", "--out", str(out)) == 2
    assert "--at-once is 5; choose from 1, 4" in capsys.readouterr().err
