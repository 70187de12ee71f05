"""Load and soak against a real server, for seconds; and clients that notice wrong answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra 'text'")
pytest.importorskip("fastapi", reason="needs the extra 'server'")
pytest.importorskip("httpx", reason="needs the extra 'remote'")

from benchmarks.service import load, soak
from benchmarks.service.clients import Case, Outcome
from benchmarks.service.expert import complete, named_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [(("right", False), 0), (("part", True), 0), (("part", False), 1), (("right", True), 1), (("other", True), 1)],
)
def test_wrong_answers_are_noticed(answer: tuple[str, bool], wrong: int) -> None:
    outcome = Outcome()
    outcome.note(Case("w3", 0.5, "right", ("part", "none")), answer, 0.0, 0.1)
    assert (outcome.wrong, len(outcome.examples), outcome.degraded) == (wrong, wrong, answer[1])


def test_the_expert_names_the_same_tokens_along_a_text_and_after_it() -> None:
    ids = [5, 9, 17, 3]
    answer = complete({"prompt": ids, "max_tokens": 3, "prompt_logprobs": 1})["choices"][0]
    along = [
        int(next(token for token, one in entry.items() if one["rank"] == 1)) for entry in answer["prompt_logprobs"][1:]
    ]
    assert along == named_tokens(ids)[:-1]
    longer = complete({"prompt": [*ids, answer["token_ids"][0]], "max_tokens": 2})["choices"][0]
    assert answer["token_ids"] == [named_tokens(ids)[-1], *longer["token_ids"]]


def run(command: Any, out: Path, *options: str) -> dict[str, Any]:
    assert command.main([*options, "--out", str(out)]) == 0
    written: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return written


@pytest.fixture
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (load, soak):
        monkeypatch.setattr(module, "N_PROMPTS", 4)
        monkeypatch.setattr(module, "WARM_UP_SECONDS", 0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("few_prompts")
def test_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = run(load, tmp_path / "load.json", "--seconds", "0.3", "--clients", "1", "4")
    assert [row["clients"] for row in written["rows"]] == [1, 4]
    for row in written["rows"]:
        assert row["requests"] > 0
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["longest_ms"]
        assert row["figures"]["after"]["descriptors"] == row["figures"]["before"]["descriptors"]
    assert "requests_per_second" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("few_prompts")
def test_soak(tmp_path: Path) -> None:
    """The expert is down for half of the time, so it is while clients ask, however slow the machine."""
    options = ("--seconds", "3", "--quiet-seconds", "0.2", "--every", "2", "--down", "1")
    written = run(soak, tmp_path / "soak.json", *options)
    assert written["deaths"] >= 1
    assert set(written["slower"]) == {"alone", "all at 0", "healthy"}
    dying = [row for row in written["rows"] if row["phase"] == "dying"]
    assert [row["requests"] > 0 for row in dying] == [True, True]
    assert [row["degraded"] > 0 for row in dying] == [False, True]
