"""A server watches what it serves: alarms in answers, metrics and /v1/deferral, and a log that calibrates again."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import (
    COMPLETE,
    COMPLETIONS,
    LENGTH,
    SCORE,
    NumberCodec,
    inputs_of,
    metric,
    running,
    toy_model,
    until,
    with_parts,
)
from toy_pair import Toy, numbers

from seqdefer.budgets.drift import DELTA
from seqdefer.budgets.promises import budget_rule
from seqdefer.budgets.quality import QualityPromise
from seqdefer.budgets.rules import NEAREST
from seqdefer.budgets.served import ServedInput, served_spending
from seqdefer.budgets.spending import n_set_aside
from seqdefer.errors import DataError, InputError, OptionError
from seqdefer.labels.labelled import input_names
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.folders import LearnedFrom, Pairing
from seqdefer.model.served_log import ServedLog, read_served
from seqdefer.storage.records import to_plain

pytest.importorskip("openai", reason="needs openai: pip install openai")

ALARM = 'seqdefer_drift_alarm{test="%s"}'


def shifted(model: DeferringModel, **reference: Any) -> DeferringModel:
    """The model, as if its calibration had seen other inputs."""
    calibration = model.calibration
    assert calibration is not None
    assert calibration.reference is not None
    other = replace(calibration, reference=replace(calibration.reference, **reference))
    return DeferringModel(model.served, model.rejector, other)


def test_an_alarm_is_in_answers_metrics_and_the_description(caplog: pytest.LogCaptureFixture) -> None:
    with running(shifted(toy_model(), scores=(1e6,) * 100)) as server, caplog.at_level(logging.WARNING):
        first = server.complete("13", 0.3)
        assert "drift" not in first.deferral
        for one in inputs_of(40):
            server.complete(one, 0.3)
        until(lambda: metric(server, ALARM % "scores") == 1)
        assert metric(server, ALARM % "spent") == 0
        answer = server.complete("13", 0.3)
        assert "the rejector's scores are not those of the calibration" in answer.deferral["drift"]
        *_, last = server.complete("13", 0.3, stream=True)
        assert last.deferral["drift"] == answer.deferral["drift"]
        state = server.get("/v1/deferral").json()["drift"]
        assert state["delta"] == DELTA
        assert state["warning"] == answer.deferral["drift"]
        assert state["scores"]["alarm_at"] < 41
        assert state["spent"]["alarm_at"] is None
        assert metric(server, 'seqdefer_drift_evidence{test="scores"}') >= 50
    assert sum("no longer like the calibration" in record.message for record in caplog.records) == 1


def test_spending_above_the_limit_is_an_alarm() -> None:
    with running(shifted(toy_model(), ceilings=(0.05,) * 101)) as server:
        for one in inputs_of(30):
            server.complete(one, 0.5)
        until(lambda: metric(server, ALARM % "spent") == 1)
        assert "more is spent than the calibration allows" in server.complete("13", 0.5).deferral["drift"]


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeModel", "OneTimeCost"])
def test_inputs_like_those_of_the_calibration_are_quiet(method: str) -> None:
    with running(toy_model(method)) as server:
        for place, one in enumerate(inputs_of(60)):
            server.complete(one, (0.1, 0.5, 0.8)[place % 3])
        state = server.get("/v1/deferral").json()
        assert state["drift"]["warning"] is None
        assert state["drift"]["scores"]["inputs"] == 60
        assert 0 < state["drift"]["spent"]["inputs"] <= 60
        assert [one["inputs"] for one in state["served"]] == [20, 20, 20]
        spent = sum(one["inputs"] for one in state["served"] if one["share"] > 0)
        assert spent > 0


def test_limited_requests_count_for_scores_alone() -> None:
    """What was cut off did not spend what the calibration measured. Scores of single requests count nothing."""
    with running(toy_model()) as server:
        for limit in ({"max_tokens": 2}, {"stop": "b"}):
            body = {"model": "toy@0.5", "prompt": "13", **limit}
            assert server.post(COMPLETIONS, body).status_code == 200
        assert server.post(SCORE, {"model": "toy@0.5", "input": "13"}).status_code == 200
        state = server.get("/v1/deferral").json()
        assert state["drift"]["scores"]["inputs"] == 2
        assert state["drift"]["spent"]["inputs"] == 0
        assert state["served"] == []


def test_a_calibration_of_old_has_no_test() -> None:
    model = toy_model()
    assert model.calibration is not None
    old = DeferringModel(model.served, model.rejector, replace(model.calibration, reference=None))
    with running(old) as server:
        server.complete("13", 0.5)
        state = server.get("/v1/deferral").json()
    assert state["drift"] is None
    assert state["settings"][50]["limit"] is None
    assert state["served"][0]["inputs"] == 1


# -- the log -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeModel", "OneTimeCost", "WholeModelScore"])
def test_a_log_calibrates_as_the_inputs_would(method: str, tmp_path: Path) -> None:
    """At the settings that were served exactly; elsewhere about."""
    model, path = toy_model(method), tmp_path / "served.jsonl"
    inputs = inputs_of(60)
    with running(model, served_log=ServedLog(path, 1)) as server:
        for one in inputs:
            server.complete(one, 0.5)
        until(lambda: len(path.read_text().splitlines()) == 60)
    rows, n_skipped = read_served(path, model.rejector.fingerprint, most=1000)
    assert n_skipped == 0
    assert model.calibration is not None
    setting = model.calibration.for_budget(0.5)
    spending = served_spending(rows, LENGTH)
    seen = spending.at_setting(rows[0].threshold)
    written = model.generate(inputs, threshold=setting.threshold)
    assert seen.deferred.sum() == sum(written.expert_tokens)
    assert sorted(seen.written[0]) == sorted(len(row) for row in written.sources)
    again = DeferringModel(model.served, model.rejector).calibrate_from_log(rows)
    assert again.inputs == 60
    assert again.reference is not None
    assert again.reference.scores == pytest.approx(model.calibration.reference.scores, rel=0.01, abs=1e-3)  # type: ignore[union-attr]
    assert again.for_budget(0.0).share == 0
    for budget in (0.2, 0.5, 0.8):
        found = again.for_budget(budget)
        realised = sum(model.generate(inputs, threshold=found.threshold).expert_tokens) / sum(map(len, written.sources))
        assert realised == pytest.approx(found.share, abs=0.15)


def test_texts_are_not_logged(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    with running(toy_model(), served_log=ServedLog(path, 1)) as server:
        answer = server.complete("123456789", 0.5)
        until(lambda: bool(path.read_text()))
    (line,) = path.read_text().splitlines()
    assert answer.choices[0].text not in line
    assert "123456789" not in line
    assert set(json.loads(line)) == {
        "format", "time", "rejector", "budget", "threshold", "written", "deferred", "scores", "draft", "hand_offs",
            "is_learned",
    }  # fmt: skip


def row(place: int, rejector: str = "r") -> ServedInput:
    return ServedInput("2026-01-01T00:00:00Z", rejector, 0.2, 0.5, 5, 1, tuple(0.1 * place for _ in range(5)))


def test_a_log_is_bounded_and_the_newest_lines_are_read(tmp_path: Path) -> None:
    path, log = tmp_path / "served.jsonl", ServedLog(tmp_path / "served.jsonl", 1)
    size = len(json.dumps(to_plain(row(1))))
    n = 3 * 1024**2 // 2 // size
    for place in range(n):
        log.write(row(place))
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["served.jsonl", "served.jsonl.1"]
    assert sum(file.stat().st_size for file in files) <= 1024**2
    rows, _ = read_served(path, "r", most=n)
    assert rows[-1] == row(n - 1)
    assert len(rows) < n
    newest, _ = read_served(path, "r", most=10)
    assert newest == [row(place) for place in range(n - 10, n)]


def test_a_killed_server_leaves_a_log_that_can_be_read(tmp_path: Path) -> None:
    """The line that it was writing is skipped, and the next server begins a new one."""
    path = tmp_path / "served.jsonl"
    log = ServedLog(path, 1)
    for place in range(3):
        log.write(row(place))
    assert len(path.read_text().splitlines()) == 3  # each is there when `write` returns
    log.close()
    path.write_text(path.read_text()[:-40])
    again = ServedLog(path, 1)
    again.write(row(7))
    again.close()
    assert read_served(path, "r", most=9) == ([row(0), row(1), row(7)], 1)


def test_a_process_that_is_killed_while_it_writes_loses_one_line_at_most(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    program = (
        "from pathlib import Path\n"
        "from seqdefer.budgets.served import ServedInput\n"
        "from seqdefer.model.served_log import ServedLog\n"
        f"log = ServedLog(Path({str(path)!r}), 64)\n"
        "for place in range(10**6):\n"
        "    log.write(ServedInput('', 'r', 0.2, 0.5, place, 0, (0.1,) * 200))\n"
    )
    writing = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(lambda: path.exists() and path.stat().st_size > 200_000)
    finally:
        writing.kill()
        writing.wait()
    rows, n_skipped = read_served(path, "r", most=10**6)
    assert [row.written for row in rows] == list(range(len(rows)))
    assert len(rows) > 100
    assert n_skipped <= 1


def test_logs_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    with pytest.raises(InputError, match=r"no log .*--served-log"):
        read_served(path, "r", most=9)
    log = ServedLog(path, 1)
    log.write(row(1))
    log.write(row(2, "other"))
    log.close()
    with pytest.raises(InputError, match="has 1 inputs of this model, and 1 that another rejector decided"):
        read_served(path, "r", most=9)
    path.write_text('{"prompt": "hello"}\n')
    with pytest.raises(DataError, match="line 1 is not of a log of seqdefer serve"):
        read_served(path, "r", most=9)
    with pytest.raises(OptionError, match="--served-log-mib is 0"):
        ServedLog(path, 0)
    with pytest.raises(OptionError, match="choose another file with --served-log"):
        ServedLog(tmp_path / "served.jsonl" / "below", 1)


@pytest.mark.parametrize(
    "change",
    [
        {"written": 0, "deferred": 0, "scores": ()},
        {"deferred": 6},
        {"written": -5},
        {"scores": (0.1,)},
        {"written": 10**90},
        {"scores": (), "draft": 5},
    ],
)
def test_a_forged_log_does_not_calibrate(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"served at '2026.*not one of this model: .*--data FILE"):
        served_spending([row(1), row(2), replace(row(3), **change)], 8)


@pytest.mark.parametrize("change", [{"draft": 0}, {"hand_offs": ((1.0, -5),)}, {"draft": 9}, {"scores": (0.1,) * 4}])
def test_a_forged_log_of_hand_offs_does_not_calibrate(change: dict[str, Any]) -> None:
    good = ServedInput("2026", "r", 0.2, 2.0, 4, 0, draft=4, hand_offs=((1.0, 3), (0.5, 1)))
    with pytest.raises(DataError, match="not one of this model"):
        served_spending([good, good, replace(good, **change)], 8)


def test_lines_that_are_nested_too_deeply_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    lines = [json.dumps(to_plain(row(place))) for place in range(2)]
    path.write_text("\n".join([lines[0], "[" * 100_000, "", lines[1], "5"]) + "\n")
    with pytest.raises(DataError, match=r"served\.jsonl, line 5 is not of a log"):
        read_served(path, "r", most=9)
    path.write_text("\n".join([lines[0], "[" * 100_000, lines[1]]) + "\n")
    assert read_served(path, "r", most=9) == ([row(0), row(1)], 1)


def test_a_full_disk_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    log = ServedLog(Path("/dev/full"), 1)
    log.write(row(1))
    (found,) = caplog.records
    assert found.message == "cannot write the log of what is served to /dev/full: [Errno 28] No space left on device"
    assert found.exc_info is None
    log.close()  # as a server does in the end


def test_a_promise_from_a_log_counts_what_could_have_been_written() -> None:
    """One-time: the hand-off at other settings is known, and what the expert would have written is at most the rest."""
    rows = [ServedInput("", "r", 0.2, 2.0, 4, 0, draft=4, hand_offs=((1.0, 3), (0.5, 1))) for _ in range(40)]
    rows += [ServedInput("", "r", 0.2, 0.7, 6, 3, draft=4, hand_offs=((1.0, 3), (0.5, 1))) for _ in range(40)]
    estimate, bound = served_spending(rows, 8), served_spending(rows, 8, promises=True)
    assert estimate.inputs == 80
    assert bound.inputs == 80 - 16
    assert bound.has_fixed_settings
    for spending, ahead in ((estimate, (1, 3)), (bound, (5, 7))):
        assert set(spending.at_setting(np.inf).deferred[0]) == {0}
        assert set(spending.at_setting(0.7).deferred[0]) == {3, ahead[0]}  # as served, or from the third token on
        assert set(spending.at_setting(-np.inf).deferred[0]) == {ahead[1]}
    with pytest.raises(OptionError, match="a guarantee needs inputs: --data FILE"):
        served_spending([row(1), row(2)], 8, promises=True)
    model = Toy.of(length=8).model("OneTimeModel")
    for rule in (NEAREST, budget_rule("expected")):
        assert model.calibrate_from_log(rows, rule).mean_length == 5  # 4 and 6: as long as they were, not could be


def test_a_promise_from_a_log_does_not_count_inputs_of_the_fit(tmp_path: Path) -> None:
    """They were counted, with a remark that a log cannot tell."""
    model, path = with_parts(toy_model("OneTimeModel")), tmp_path / "served.jsonl"
    inputs = inputs_of(60)
    names = input_names(model.served.codec.encode(inputs[:20]))
    model.learned_from = LearnedFrom(tuple(names), model.rejector.fingerprint)
    with running(model, served_log=ServedLog(path, 1)) as server:
        for first in (0, 10, 20):
            body = {"model": "toy", "inputs": inputs[first : first + 10]}
            assert server.post(COMPLETE, body).status_code == 200
        for one in inputs[30:]:
            server.complete(one, 0.5)
        until(lambda: len(path.read_text().splitlines()) == 60)
    rows, _ = read_served(path, model.rejector.fingerprint, most=1000)
    assert [row.is_learned for row in rows] == [True] * 20 + [False] * 40
    promise = model.calibrate_from_log(rows, budget_rule("expected")).promise
    assert promise is not None
    assert promise.inputs == 40 - n_set_aside(40)
    assert model.calibrate_from_log(rows).inputs == 60  # a measurement refuses nothing
    with pytest.raises(OptionError, match=r"20 of 20 inputs were used to fit this rejector; a guarantee needs"):
        model.calibrate_from_log(rows[:20], budget_rule("expected"))
    model.learned_from, model.pairing = None, Pairing("toy", {}, "", "")
    with pytest.raises(OptionError, match="fitted before the inputs of a fit were recorded"):
        model.calibrate_from_log(rows, budget_rule("expected"))


# -- quality -------------------------------------------------------------------------------------------------------


def test_requests_without_a_budget_get_the_promised_quality() -> None:
    model = Toy.of(length=LENGTH).model("OneTimeModel")
    model.calibrate(numbers(60))
    model = with_parts(model, codec=NumberCodec())
    assert model.calibration is not None
    at = model.calibration.for_budget(0.4)
    quality = QualityPromise(at.threshold, 0.37, 2.0, 1.5, 60, 1.0, 0.9, "loss", model.rejector.fingerprint)
    with running(model, quality=quality) as server:
        answer = server.client.completions.create(model="toy", prompt="13")
        assert answer.deferral["promise"] == quality.in_words()  # type: ignore[attr-defined]
        assert answer.deferral["budget"] == 0.37  # type: ignore[attr-defined]
        (share,) = {row.count("expert") / len(row) for row in model.generate(["13"], threshold=at.threshold).sources}
        assert answer.deferral["share"] == share  # type: ignore[attr-defined]
        assert "promise" not in server.complete("13", 0.1).deferral
        described = server.get("/v1/deferral").json()
        assert described["budget"] == 0.37
        assert described["quality"]["words"] == quality.in_words()
        assert described["drift"]["spent"]["inputs"] <= 1  # the setting is not one of the calibration
    model.quality = quality
    assert model.require_quality(1.5, 0.8) is quality
    for within, confidence in ((0.5, 0.9), (1.0, 0.95)):
        with pytest.raises(OptionError, match="another promise"):
            model.require_quality(within, confidence)
    model.quality = None
    with pytest.raises(OptionError, match="no promise of quality; make one: seqdefer fit TASK --within 1"):
        model.require_quality(1.0, 0.9)
