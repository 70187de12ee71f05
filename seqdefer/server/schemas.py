"""The shapes of whole answers: /openapi.json describes them, and tests hold all that is answered against that."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

Author = Literal["predictor", "expert"]
Finish = Literal["stop", "length"]
EXACT = with_config(ConfigDict(extra="forbid"))  # nothing is said that is not described


@EXACT
class ErrorFacts(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@EXACT
class Error(TypedDict):
    error: ErrorFacts


# -- writing -------------------------------------------------------------------------------------------------------


@EXACT
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    predictor_tokens: int
    expert_tokens: int
    switches: int


@EXACT
class Deferral(TypedDict):
    """`degraded`: the expert failed, for this `reason`, and the predictor finished."""

    budget: float
    expected_share: float
    share: float
    degraded: bool
    reason: NotRequired[str]
    remarks: NotRequired[list[str]]


@EXACT
class Choice(TypedDict):
    index: int
    text: str
    logprobs: None
    finish_reason: Finish


@EXACT
class Message(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


@EXACT
class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: None
    finish_reason: Finish


class _Head(TypedDict):
    id: str
    created: int
    model: str


@EXACT
class Completion(_Head):
    object: Literal["text_completion"]
    choices: list[Choice]
    usage: Usage
    deferral: Deferral


@EXACT
class Chat(_Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    deferral: Deferral


# -- deferral ------------------------------------------------------------------------------------------------------


@EXACT
class TokenFacts(TypedDict):
    """`defer`: what the rejector wants, whoever then wrote; `score` is null where it is infinite."""

    position: int
    token: Any
    text: str
    author: Author
    score: float | None
    defer: bool


@EXACT
class Written(TypedDict):
    index: int
    output: Any
    finish_reason: Finish
    facts: dict[str, float]
    tokens: list[TokenFacts]


@EXACT
class DeferralCompletion(_Head):
    object: Literal["deferral.completion"]
    data: list[Written]
    usage: Usage
    deferral: Deferral


@EXACT
class Scored(TypedDict):
    index: int
    text: str
    tokens: list[TokenFacts]


@EXACT
class ScoreDeferral(TypedDict):
    budget: float
    expected_share: float
    remarks: list[str]


@EXACT
class Scores(TypedDict):
    object: Literal["deferral.score"]
    model: str
    data: list[Scored]
    usage: Usage
    deferral: ScoreDeferral


@EXACT
class BudgetSetting(TypedDict):
    budget: float
    share: float
    low: float
    high: float


@EXACT
class CurvePoint(TypedDict):
    share: float
    loss: float


@EXACT
class DeferralCurve(TypedDict):
    unit: str
    inputs: int
    points: list[CurvePoint]


@EXACT
class DeferralModel(TypedDict):
    """What is served: how it defers, what its inputs are, what its budgets spend, and what was gained by them."""

    object: Literal["deferral.model"]
    id: str
    kind: str
    by: Literal["token", "one-time"]
    length: int
    size: int | None
    hint: str
    budget: float
    calibrated_on: int
    settings: list[BudgetSetting]
    curve: DeferralCurve | None


# -- models, health ------------------------------------------------------------------------------------------------


@EXACT
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["seqdefer"]


@EXACT
class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


@EXACT
class Health(TypedDict):
    status: Literal["ok", "stopping"]
