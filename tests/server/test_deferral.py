"""/v1/deferral: what is served, and outputs of any codec with the author of every token, whole and as a stream."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import PlannedHandOff
from toy_pair import METHODS, LetterCodec, Toy

from seqdefer.budgets.calibration import BUDGETS
from seqdefer.budgets.policies import Threshold, by_position, choose_kept
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import roll_out
from seqdefer.errors import CheckpointError
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.interfaces import Policy, Served, Task
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.fitting import fit_model
from seqdefer.model.generation import Generation
from seqdefer.progress import Silent
from seqdefer.rejectors.token import TokenNetwork
from seqdefer.server.limits import Limits
from seqdefer.tasks.tsp.data import gaussian_instances
from seqdefer.tasks.tsp.pointer import PointerNet, save_pointer
from seqdefer.tasks.tsp.task import ENTRY, TSPOptions
from seqdefer.tasks.tsp.tours import is_tour
from seqdefer.testing import ToyTask
from seqdefer.types import Examples, Sequences

pytest.importorskip("fastapi", reason="needs the extra 'server'")
pytest.importorskip("uvicorn", reason="needs the extra 'server'")
pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
pytest.importorskip("openai", reason="needs the official client: pip install openai")

from tests.server.test_app import LENGTH, Running, inputs_of, running, slow_model, text_model, toy_model
from tests.server.test_faults import check_refused, check_well

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::seqdefer.model.deferring_model.BudgetWarning"),
]
each_method = pytest.mark.parametrize("method", METHODS)
COMPLETE, SCORE = "/v1/deferral/complete", "/v1/deferral/score"
N_CITIES = 7


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(toy_model()) as server:
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task's own pair of tours, fitted in small; its predictor was never trained. Nobody may change it."""
    pytest.importorskip("numba", reason="needs the extra tsp")
    folder = tmp_path_factory.mktemp("tours")
    torch.manual_seed(0)
    save_pointer(PointerNet(6), folder / "pointer", {})
    fit_model(ENTRY, tour_options(folder), experiment_settings(ENTRY, "quick"), folder / "model", device="cpu")
    return folder


def tour_options(home: Path) -> TSPOptions:
    sizes = {"train": 24, "validation": 12, "test": 1}
    return TSPOptions(cities=N_CITIES, expert="search", predictor=str(home / "pointer"), **sizes)


@pytest.fixture(scope="module")
def tours(home: Path) -> Iterator[Running]:
    with running(DeferringModel.from_pretrained(home / "model", device="cpu")) as server:
        yield server


def model_of(server: Running) -> DeferringModel:
    model: DeferringModel = server.scheduler.model
    return model


def cities(n: int) -> list[Any]:
    """In users' own units: far from the origin, and long."""
    found: list[Any] = (1000 + 50 * gaussian_instances(n, N_CITIES, seed=3, stream="test").double()).tolist()
    return found


def events_of(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


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
    """What a whole answer would say of the same tokens."""
    rows: dict[int, dict[str, Any]] = {}
    for event in events:
        row = rows.setdefault(event["index"], {"index": event["index"], "tokens": []})
        row["tokens"].append({name: event[name] for name in ("position", "token", "text", "author", "score", "defer")})
        if event["finish_reason"] is not None:
            row |= {name: event[name] for name in ("output", "facts", "finish_reason")}
        else:
            assert not {"output", "facts"} & set(event)
    return [rows[index] for index in sorted(rows)]


def check_both_ways(server: Running, inputs: list[Any], budget: float) -> dict[str, Any]:
    """Whole and streamed, by name and by field, one and several: all the same, and what the model writes alone."""
    body = {"model": f"toy@{budget}", "inputs": inputs}
    whole = server.post(COMPLETE, body).json()
    assert set(whole) == {"id", "object", "created", "model", "data", "usage", "deferral"}
    assert (whole["object"], whole["model"]) == ("deferral.completion", f"toy@{budget}")
    written = model_of(server).generate(inputs, budget)
    check_data(whole["data"], written)
    assert whole["usage"]["expert_tokens"] == sum(written.expert_tokens)
    assert whole["deferral"]["share"] == pytest.approx(written.share)
    *events, last = events_of(server.post(COMPLETE, {**body, "stream": True}))
    assert from_events(events) == whole["data"]
    assert set(last) == {"id", "object", "created", "model", "usage", "deferral"}
    assert (last["usage"], last["deferral"]) == (whole["usage"], whole["deferral"])
    assert {event["object"] for event in (*events, last)} == {"deferral.completion.chunk"}
    assert {event["id"] for event in (*events, last)} == {last["id"]}
    single = server.post(COMPLETE, {"model": "toy", "input": inputs[0], "deferral": {"budget": budget}}).json()
    check_data(single["data"], model_of(server).generate(inputs[:1], budget))
    found: dict[str, Any] = whole
    return found


# -- what is served ------------------------------------------------------------------------------------------------


def check_description(server: Running, **expected: Any) -> None:
    said, model = server.get("/v1/deferral").json(), model_of(server)
    assert model.calibration is not None
    settings = said.pop("settings")
    assert [one["budget"] for one in settings] == list(BUDGETS)
    for found, setting in zip(settings, model.calibration.settings, strict=True):
        assert found == {name: getattr(setting, name) for name in ("budget", "share", "low", "high")}
    common = {"object": "deferral.model", "id": "toy", "budget": 0.2, "calibrated_on": model.calibration.inputs}
    assert said == {**common, **expected}


def test_a_toy_describes_itself(served: Running) -> None:
    check_description(served, kind="tokens", by="token", length=LENGTH, size=None, hint="", curve=None)


def test_texts_describe_themselves() -> None:
    with running(text_model()) as server:
        check_description(server, kind="text", by="token", length=LENGTH, size=None, hint="A text to read.", curve=None)


def test_tours_describe_themselves(tours: Running) -> None:
    said = tours.get("/v1/deferral").json()
    assert (said["kind"], said["by"], said["length"], said["size"]) == ("tour", "one-time", N_CITIES, N_CITIES)
    assert json.loads(said["hint"].replace(", ...", ""))


# -- what budgets buy ----------------------------------------------------------------------------------------------


def mean_loss(task: Task, examples: Examples, model: DeferringModel, threshold: float) -> tuple[float, float]:
    """Share and loss of plain rollouts."""
    rejector = model.rejector
    if isinstance(rejector, TokenNetwork):
        policy: Policy[Any] = Threshold(rejector, threshold)
    else:
        drafted = draft(task.predictor, examples, task.spec)
        scores = rejector.score(drafted)
        kept = choose_kept(rejector, scores, drafted, threshold)
        policy = PlannedHandOff(kept, by_position(scores, rejector.sizes.hand_offs))
    written = roll_out(task.predictor, task.expert, examples, policy, task.spec)
    return written.share, float(task.sequence_loss(examples, written.sequences).double().mean())


def check_curve(task: Task, examples: Examples, model: DeferringModel) -> None:
    """Every point is what plain rollouts at the settings lose; the first is the predictor alone."""
    assert model.calibration is not None
    assert model.curve is not None
    assert (model.curve.unit, model.curve.inputs) == (task.loss_unit, len(examples))
    points = [(point.share, point.loss) for point in model.curve.points]
    thresholds = dict.fromkeys(one.threshold for one in model.calibration.settings)
    expected = [mean_loss(task, examples, model, threshold) for threshold in thresholds]
    assert points == [(pytest.approx(share), pytest.approx(loss, rel=1e-5)) for share, loss in expected]
    drafted = draft(model.served.predictor, examples, task.spec).sequences
    assert points[0] == (0.0, pytest.approx(float(task.sequence_loss(examples, drafted).double().mean()), rel=1e-5))


def check_last_is_the_expert_alone(task: Task, examples: Examples, model: DeferringModel) -> None:
    nothing = Sequences(
        torch.zeros(len(examples), task.spec.length, dtype=torch.long), torch.zeros(len(examples)).long()
    )
    alone = task.expert.complete(examples, nothing, task.spec)
    loss = float(task.sequence_loss(examples, alone).double().mean())
    assert model.curve is not None
    last = model.curve.points[-1]
    assert (last.share, last.loss) == (1.0, pytest.approx(loss, rel=1e-5))


def judged(method: str) -> tuple[ToyTask, Examples, DeferringModel]:
    task = ToyTask(n=40, length=6)
    model = Toy(task, Served(task.predictor, task.expert, task.spec, LetterCodec())).model(method)
    model.calibrate_on(task.split("validation"), judge=task)
    return task, task.split("validation"), model


@each_method
def test_points_are_losses_of_plain_rollouts(method: str) -> None:
    task, examples, model = judged(method)
    check_curve(task, examples, model)
    if method != "OneTimeModel":  # which hands off at the best place, seldom at the first
        check_last_is_the_expert_alone(task, examples, model)


@each_method
def test_a_judge_changes_no_budget(method: str) -> None:
    _, examples, model = judged(method)
    calibration, curve = model.calibration, model.curve
    assert model.calibrate_on(examples) == calibration
    assert model.curve is curve  # nobody judged this time


def test_a_fitted_pair_knows_its_curve(tours: Running, home: Path, tmp_path: Path) -> None:
    model, task = model_of(tours), ENTRY.prepare(tour_options(home), tmp_path, torch.device("cpu"), Silent())
    check_curve(task, task.split("validation"), model)
    check_last_is_the_expert_alone(task, task.split("validation"), model)
    assert model.curve is not None
    said = tours.get("/v1/deferral").json()["curve"]
    assert (said["unit"], said["inputs"]) == (task.loss_unit, 12)
    assert said["points"] == [{"share": one.share, "loss": one.loss} for one in model.curve.points]


def test_a_curve_is_kept_with_its_rejector(tours: Running, tmp_path: Path) -> None:
    model = model_of(tours)
    folder = model.save_pretrained(tmp_path / "model")
    again = DeferringModel.from_pretrained(folder, device="cpu")
    assert again.curve == model.curve
    again.calibrate(cities(5))  # knows no answers, so it says nothing of them
    again.save_calibration(folder)
    assert DeferringModel.from_pretrained(folder, device="cpu").curve == model.curve
    path = folder / "curve.json"
    kept = json.loads(path.read_text())
    for wrong, words in (({"rejector": "another"}, "belongs to another rejector"), ({"points": 5}, "points")):
        path.write_text(json.dumps({**kept, **wrong}))
        with pytest.raises(CheckpointError, match=words):
            DeferringModel.from_pretrained(folder, device="cpu")
    path.unlink()
    assert DeferringModel.from_pretrained(folder, device="cpu").curve is None


# -- writing -------------------------------------------------------------------------------------------------------


@each_method
@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_tokens_are_what_the_model_writes(method: str, budget: float) -> None:
    with running(toy_model(method)) as server:
        whole = check_both_ways(server, inputs_of(5), budget)
    assert {row["finish_reason"] for row in whole["data"]} <= {"stop", "length"}
    assert [row["facts"] for row in whole["data"]] == [{}] * 5


def test_texts_are_what_the_model_writes() -> None:
    with running(text_model()) as server:
        check_both_ways(server, ["w5 w6 w7", "w9"], 0.5)


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_tours_are_what_the_model_writes(tours: Running, budget: float) -> None:
    inputs = cities(6)
    whole = check_both_ways(tours, inputs, budget)
    for row, given in zip(whole["data"], inputs, strict=True):
        assert is_tour(torch.tensor([row["output"]])).all()
        ring = [given[place] for place in [*row["output"], row["output"][0]]]
        length = sum(math.dist(one, other) for one, other in pairwise(ring))
        assert row["facts"] == {"length": pytest.approx(length)}  # on the coordinates that were given
        assert row["finish_reason"] == "stop"


def test_tours_by_the_official_client(tours: Running) -> None:
    given = cities(1)[0]
    answer = tours.client.completions.create(model="toy@1", prompt=json.dumps(given))
    tour = model_of(tours).generate([given], 1.0).outputs[0]
    assert answer.choices[0].text == " ".join(map(str, tour))
    said = tours.client.chat.completions.create(
        model="toy@1", messages=[{"role": "user", "content": json.dumps(given)}]
    )
    assert said.choices[0].message.content == answer.choices[0].text
    as_text = tours.post(COMPLETE, {"model": "toy@1", "input": json.dumps(given)}).json()["data"][0]
    assert as_text["output"] == tour
    assert as_text["facts"]["length"] > 0


def test_tours_are_scored(tours: Running) -> None:
    given = cities(3)
    decided = model_of(tours).decide(given, 0.5)
    several = tours.post(SCORE, {"model": "toy@0.5", "inputs": given}).json()["data"]
    single = [tours.post(SCORE, {"model": "toy@0.5", "input": one}).json()["data"][0] for one in given]
    as_texts = [tours.post(SCORE, {"model": "toy@0.5", "input": json.dumps(one)}).json()["data"][0] for one in given]
    for rows in (several, single, as_texts):
        for place, row in enumerate(rows):
            assert [token["token"] for token in row["tokens"]] == decided.sequences.tokens[place].tolist()
            assert [token["defer"] for token in row["tokens"]] == decided.defer[place].tolist()


def test_who_would_have_been_asked_is_said(served: Running) -> None:
    """Who defers and who wrote are two things: they differ where the expert is not there."""
    data = served.post(COMPLETE, {"model": "toy@0.5", "input": "13"}).json()["data"][0]
    assert [token["defer"] for token in data["tokens"]] == [token["author"] == "expert" for token in data["tokens"]]


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETE, SCORE])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "give either input"),
        ({"input": ["13", "14"]}, "give a number"),  # one input, and none that this model reads
        ({"input": "13", "inputs": ["13"]}, "give either input"),
        ({"inputs": []}, "inputs: "),
        ({"inputs": "13"}, "inputs: "),
        ({"inputs": ["1"] * 17}, "17 inputs; one request may have 16"),
        ({"input": "\ud800"}, "surrogate"),
        ({"input": {"\ud800": 1}}, "surrogate"),
        ({"input": "x"}, "give a number"),
        ({"input": "13", "stream": 1}, "stream: "),
        ({"input": "13", "prompt": "13"}, "prompt: "),
        ({"input": "13", "deferral": {"budget": 2}}, "deferral.budget: "),
        ({"input": "13", "model": "toy@2"}, "no number from 0 to 1"),
    ],
)
def test_bad_requests_are_refused(served: Running, path: str, changes: dict[str, Any], words: str) -> None:
    body = json.dumps({"model": "toy", **changes}).encode()
    assert check_refused(served.post(path, body), 400, words)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "given",
    [
        None, 5, "no cities", [], {}, [[0, 0]] * N_CITIES, [[1, 2]] * 3, [["a", "b"]] * N_CITIES,
        [[float("nan"), 0.0]] * N_CITIES, [[10**400, 0]] * N_CITIES, [[[0, 1]]] * N_CITIES, "[" * 5000,
        [*([0.0, place] for place in range(N_CITIES - 1)), [1e308, -1e308]],
    ],
    ids=lambda given: str(given)[:16],
)  # fmt: skip
def test_what_is_no_tour_is_refused(tours: Running, given: Any) -> None:
    check_refused(tours.post(COMPLETE, json.dumps({"model": "toy", "input": given}).encode()), 400, "input 1 of 1")


def test_a_model_that_is_not_there(served: Running) -> None:
    check_refused(served.post(COMPLETE, {"model": "other", "input": "13"}), 404, "there is no model")


def test_an_error_in_the_middle_of_a_stream() -> None:
    model, _ = slow_model(0.2)
    with running(model, limits=Limits(request_seconds=0.7, grace_seconds=0.5)) as server:
        *tokens, last = events_of(server.post(COMPLETE, {"model": "toy@0", "input": "13", "stream": True}))
        assert tokens
        assert last["error"]["code"] == "timeout"
        server.wait_until_idle()


def test_bad_inputs_harm_nobody(served: Running) -> None:
    check_refused(served.post(COMPLETE, {"model": "toy", "inputs": ["13", "x"], "stream": True}), 400)
    check_well(served)


def test_a_key_is_asked_for_but_not_for_the_page() -> None:
    with running(toy_model(), api_key="secret") as server:
        assert check_refused(server.get("/v1/deferral"), 401)["code"] == "invalid_api_key"
        check_refused(server.post(COMPLETE, {"model": "toy", "input": "13"}), 401)
        assert server.get("/v1/deferral", headers={"authorization": "Bearer secret"}).status_code == 200
        page = server.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        check_refused(server.get("/page/nothing"), 404)  # no key, no 401
