"""/v1/deferral: the served model, and outputs of any codec with the author of every token, whole and streamed."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import PlannedHandOff
from servers import (
    COMPLETE,
    IGNORE_BUDGETS,
    LENGTH,
    N_CITIES,
    SCORE,
    RunningServer,
    check_error,
    events_of,
    inputs_of,
    running,
    toy_model,
)
from tours import is_tour
from toy_pair import METHODS, LetterCodec, Toy

from seqdefer.budgets.calibration import BUDGETS
from seqdefer.budgets.policies import Threshold
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import roll_out
from seqdefer.interfaces import Policy, Served, Task
from seqdefer.methods.plans import scored_hand_offs
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.generation import Generation
from seqdefer.progress import Silent
from seqdefer.rejectors.token import TokenNetwork
from seqdefer.server.responses import token_details
from seqdefer.server.tickets import Token
from seqdefer.tasks.tsp.task import ENTRY
from seqdefer.testing import ToyTask
from seqdefer.types import Examples, Sequences

pytestmark = IGNORE_BUDGETS
each_method = pytest.mark.parametrize("method", METHODS)
each_budget = pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])


def check_data(data: list[dict[str, Any]], written: Generation) -> None:
    assert [row["index"] for row in data] == list(range(len(data)))
    assert [row["output"] for row in data] == written.outputs
    for place, row in enumerate(data):
        n = int(written.sequences.lengths[place])
        assert [token["position"] for token in row["tokens"]] == list(range(n))
        assert [token["token"] for token in row["tokens"]] == written.sequences.tokens[place, :n].tolist()
        assert [token["author"] for token in row["tokens"]] == written.sources[place]
        scores = [token["score"] for token in row["tokens"]]
        torch.testing.assert_close(torch.tensor(scores), written.scores[place, :n], check_dtype=False)
        if isinstance(row["output"], str):
            assert "".join(token["text"] for token in row["tokens"]) == row["output"]


def from_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the `data` of a whole response with the same tokens."""
    rows: dict[int, dict[str, Any]] = {}
    for event in events:
        row = rows.setdefault(event["index"], {"index": event["index"], "tokens": []})
        row["tokens"].append({name: event[name] for name in ("position", "token", "text", "author", "score", "defer")})
        if event["finish_reason"] is not None:
            row |= {name: event[name] for name in ("output", "facts", "finish_reason")}
        else:
            assert not {"output", "facts"} & set(event)
    return [rows[index] for index in sorted(rows)]


def rounded(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Round scores: a batch of another size moves the last digit."""
    return [
        {**row, "tokens": [{**token, "score": round(token["score"], 4)} for token in row["tokens"]]} for row in data
    ]


def check_both_ways(server: RunningServer, inputs: list[Any], budget: float) -> dict[str, Any]:
    """Check that whole and streamed, by name and by field, one and several agree with `generate`."""
    body = {"model": f"toy@{budget}", "inputs": inputs}
    whole = server.post(COMPLETE, body).json()
    assert set(whole) == {"id", "object", "created", "model", "data", "usage", "deferral"}
    assert (whole["object"], whole["model"]) == ("deferral.completion", f"toy@{budget}")
    written = server.model.generate(inputs, budget)
    check_data(whole["data"], written)
    assert whole["usage"]["expert_tokens"] == sum(written.expert_tokens)
    assert whole["deferral"]["share"] == pytest.approx(written.share)
    *events, last = events_of(server.post(COMPLETE, {**body, "stream": True}))
    assert rounded(from_events(events)) == rounded(whole["data"])
    assert set(last) == {"id", "object", "created", "model", "usage", "deferral"}
    assert (last["usage"], last["deferral"]) == (whole["usage"], whole["deferral"])
    assert {event["object"] for event in (*events, last)} == {"deferral.completion.chunk"}
    assert {event["id"] for event in (*events, last)} == {last["id"]}
    single = server.post(COMPLETE, {"model": "toy", "input": inputs[0], "deferral": {"budget": budget}}).json()
    check_data(single["data"], server.model.generate(inputs[:1], budget))
    return dict(whole)


# -- the served model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fixture", "kind"), [("server", "tokens"), ("text_server", "text")])
def test_description(fixture: str, kind: str, request: pytest.FixtureRequest) -> None:
    server: RunningServer = request.getfixturevalue(fixture)
    response, model = server.get("/v1/deferral").json(), server.model
    assert model.calibration is not None
    settings = response.pop("settings")
    assert [one["budget"] for one in settings] == list(BUDGETS)
    for found, setting in zip(settings, model.calibration.settings, strict=True):
        assert found.pop("limit") == model.calibration.limit(setting)
        assert found == {name: getattr(setting, name) for name in ("budget", "share", "low", "high")}
    drift = response.pop("drift")
    assert (drift["warning"], drift["scores"]["inputs"]) == (None, sum(one["inputs"] for one in response.pop("served")))
    assert response == {
        "object": "deferral.model",
        "id": "toy",
        "kind": kind,
        "by": "token",
        "length": LENGTH,
        "size": None,
        "hint": model.served.codec.hint,
        "audio": None,
        "curve": None,
        "timing": None,
        "budget": 0.2,
        "calibrated_on": model.calibration.inputs,
        "promise": None,
        "quality": None,
        "currency": None,
        "caps": [],
        "about": model.served.codec.about,
        "examples": list(model.served.codec.examples),
    }


def test_description_of_tours(tour_server: RunningServer) -> None:
    response = tour_server.get("/v1/deferral").json()
    found = tuple(response[name] for name in ("kind", "by", "length", "size"))
    assert found == ("tour", "one-time", N_CITIES, N_CITIES)
    assert json.loads(response["hint"].replace(", ...", ""))
    assert response["about"] == "reads cities and writes a short tour through all of them"


# -- the deferral curve --------------------------------------------------------------------------------------------


def mean_loss(task: Task, examples: Examples, model: DeferringModel, threshold: float) -> tuple[float, float]:
    """Return the share and the loss of plain rollouts."""
    rejector = model.rejector
    if isinstance(rejector, TokenNetwork):
        policy: Policy[Any] = Threshold(rejector, threshold)
    else:
        drafted = draft(task.predictor, examples, task.spec)
        scored = scored_hand_offs(rejector, drafted, task.spec.length)
        kept, scores = torch.from_numpy(scored.kept(threshold)), torch.from_numpy(scored.by_position()).float()
        policy = PlannedHandOff(kept, scores)
    written = roll_out(task.predictor, task.expert, examples, policy, task.spec)
    return written.share, float(task.sequence_loss(examples, written.sequences).double().mean())


def check_curve(task: Task, examples: Examples, model: DeferringModel) -> None:
    """Check that every point is the loss of plain rollouts at a setting, and the first that of the predictor."""
    assert model.calibration is not None
    assert model.curve is not None
    assert (model.curve.unit, model.curve.inputs) == (task.loss_unit, len(examples))
    points = [(point.share, point.loss) for point in model.curve.points]
    thresholds = dict.fromkeys(one.threshold for one in model.calibration.settings)
    expected = [mean_loss(task, examples, model, threshold) for threshold in thresholds]
    assert points == [(pytest.approx(share), pytest.approx(loss, rel=1e-5)) for share, loss in expected]
    drafted = draft(model.served.predictor, examples, task.spec).sequences
    assert points[0] == (0.0, pytest.approx(float(task.sequence_loss(examples, drafted).double().mean()), rel=1e-5))


def check_last_point_is_the_expert(task: Task, examples: Examples, model: DeferringModel) -> None:
    nothing = Sequences(
        torch.zeros(len(examples), task.spec.length, dtype=torch.long), torch.zeros(len(examples)).long()
    )
    alone = task.expert.complete(examples, nothing, task.spec)
    loss = float(task.sequence_loss(examples, alone).double().mean())
    assert model.curve is not None
    last = model.curve.points[-1]
    assert (last.share, last.loss) == (1.0, pytest.approx(loss, rel=1e-5))


def with_losses(method: str) -> tuple[ToyTask, Examples, DeferringModel]:
    task = ToyTask(n=40, length=6)
    model = Toy(task, Served(task.predictor, task.expert, task.spec, LetterCodec())).model(method)
    model.calibrate_on(task.split("validation"), judge=task)
    return task, task.split("validation"), model


@each_method
def test_curve_equals_plain_rollouts(method: str) -> None:
    task, examples, model = with_losses(method)
    check_curve(task, examples, model)
    if method != "OneTimeModel":  # its best hand-off is seldom the first position
        check_last_point_is_the_expert(task, examples, model)


@each_method
def test_losses_change_no_budget(method: str) -> None:
    _, examples, model = with_losses(method)
    calibration, curve = model.calibration, model.curve
    assert model.calibrate_on(examples) == calibration
    assert model.curve is curve  # no losses this time


def test_fitted_pair_has_a_curve(tour_server: RunningServer, tour_task: tuple[Any, Path], tmp_path: Path) -> None:
    model, task = tour_server.model, ENTRY.prepare(tour_task[0], tmp_path, torch.device("cpu"), Silent())
    check_curve(task, task.split("validation"), model)
    check_last_point_is_the_expert(task, task.split("validation"), model)
    assert model.curve is not None
    response = tour_server.get("/v1/deferral").json()["curve"]
    assert (response["unit"], response["inputs"]) == (task.loss_unit, 12)
    assert response["points"] == [{"share": one.share, "loss": one.loss} for one in model.curve.points]


# -- outputs -------------------------------------------------------------------------------------------------------


@each_method
@each_budget
def test_toy_outputs_equal_generate(method: str, budget: float) -> None:
    with running(toy_model(method)) as server:
        whole = check_both_ways(server, inputs_of(5), budget)
    assert {row["finish_reason"] for row in whole["data"]} <= {"stop", "length"}
    assert [row["facts"] for row in whole["data"]] == [{}] * 5


@each_budget
def test_tour_outputs_equal_generate(tour_server: RunningServer, cities: list[Any], budget: float) -> None:
    whole = check_both_ways(tour_server, cities, budget)
    for row, given in zip(whole["data"], cities, strict=True):
        assert is_tour(torch.tensor([row["output"]])).all()
        ring = [given[place] for place in [*row["output"], row["output"][0]]]
        length = sum(math.dist(one, other) for one, other in pairwise(ring))
        assert row["facts"] == {"length": pytest.approx(length)}  # in the units of the input
        assert row["finish_reason"] == "stop"


def test_tours_by_openai_client(tour_server: RunningServer, cities: list[Any]) -> None:
    given = cities[0]
    response = tour_server.client.completions.create(model="toy@1", prompt=json.dumps(given))
    tour = tour_server.model.generate([given], 1.0).outputs[0]
    assert response.choices[0].text == " ".join(map(str, tour))
    chat = tour_server.client.chat.completions.create(
        model="toy@1", messages=[{"role": "user", "content": json.dumps(given)}]
    )
    assert chat.choices[0].message.content == response.choices[0].text
    as_text = tour_server.post(COMPLETE, {"model": "toy@1", "input": json.dumps(given)}).json()["data"][0]
    assert as_text["output"] == tour
    assert as_text["facts"]["length"] > 0


def test_tours_are_scored(tour_server: RunningServer, cities: list[Any]) -> None:
    given = cities[:3]
    decided = tour_server.model.decide(given, 0.5)
    several = tour_server.post(SCORE, {"model": "toy@0.5", "inputs": given}).json()["data"]
    single = [tour_server.post(SCORE, {"model": "toy@0.5", "input": one}).json()["data"][0] for one in given]
    as_texts = [
        tour_server.post(SCORE, {"model": "toy@0.5", "input": json.dumps(one)}).json()["data"][0] for one in given
    ]
    for rows in (several, single, as_texts):
        for place, row in enumerate(rows):
            assert [token["token"] for token in row["tokens"]] == decided.sequences.tokens[place].tolist()
            assert [token["defer"] for token in row["tokens"]] == decided.defer[place].tolist()


def test_defer_is_the_rejectors_decision(server: RunningServer) -> None:
    data = server.post(COMPLETE, {"model": "toy@0.5", "input": "13"}).json()["data"][0]
    assert [token["defer"] for token in data["tokens"]] == [token["author"] == "expert" for token in data["tokens"]]


def test_infinite_scores_are_null() -> None:
    token = Token(0, 0, 5, "f", "expert", math.inf, True, None, None)
    assert token_details(token)["score"] is None


@pytest.mark.parametrize(
    "given",
    [
        None, 5, "no cities", [], {}, [[0, 0]] * N_CITIES, [[1, 2]] * 3, [["a", "b"]] * N_CITIES,
        [[float("nan"), 0.0]] * N_CITIES, [[10**400, 0]] * N_CITIES, [[[0, 1]]] * N_CITIES, "[" * 5000,
        [*([0.0, place] for place in range(N_CITIES - 1)), [1e308, -1e308]],
    ],
    ids=lambda given: str(given)[:16],
)  # fmt: skip
def test_invalid_tours_are_refused(tour_server: RunningServer, given: Any) -> None:
    check_error(tour_server.post(COMPLETE, json.dumps({"model": "toy", "input": given}).encode()), 400, "input 1")
