"""The shapes of responses. Tests validate every response against them, so nothing is sent that is not described."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from seqdefer.budgets.calibration import LossPoint
from seqdefer.budgets.caps import Cap
from seqdefer.methods.timing import BudgetTime

Author = Literal["predictor", "expert"]
Finish = Literal["stop", "length"]


@with_config(ConfigDict(extra="forbid"))
class Shape(TypedDict):
    """An object without other fields than those of its shape."""


class ErrorDetails(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape):
    error: ErrorDetails


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    predictor_tokens: int
    expert_tokens: int
    switches: int


class Money(Shape):
    """What was spent by the server's prices, and what the expert alone would cost. `saved` may be negative."""

    currency: str
    predictor: float
    expert: float
    spent: float
    expert_alone: float
    saved: float


class Deferral(Shape):
    """`degraded`: the expert failed, for this `reason`, and the predictor finished. `promise`: what the calibration
    guarantees at this budget, and on what condition; none where a cap, `stop`, a smaller `max_tokens` or a failed
    expert changes what is written. `drift`: a warning that inputs are no longer like those of the calibration.
    `capped`: tokens that a cap kept from the expert, where there is a cap."""

    budget: float
    expected_share: float
    share: float
    degraded: bool
    reason: NotRequired[str]
    remarks: NotRequired[list[str]]
    promise: NotRequired[str]
    drift: NotRequired[str]
    capped: NotRequired[int]
    money: NotRequired[Money]


class CompletionLogProbs(Shape):
    """Lists with an item for each token. Its log-probability and the likeliest others are those of its author."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    authors: list[Author]


class ChatTopLogProb(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogProb(ChatTopLogProb):
    """Log-probabilities under the model that wrote the token, its author."""

    top_logprobs: list[ChatTopLogProb]
    author: Author


class ChatLogProbs(Shape):
    content: list[ChatTokenLogProb]
    refusal: None


class Choice(Shape):
    index: int
    text: str
    logprobs: CompletionLogProbs | None
    finish_reason: Finish


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: int
    message: AssistantMessage
    logprobs: ChatLogProbs | None
    finish_reason: Finish


class _Written(Shape):
    id: str
    created: int
    model: str
    usage: Usage
    deferral: Deferral


class TextCompletion(_Written):
    object: Literal["text_completion"]
    choices: list[Choice]


class ChatCompletion(_Written):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TokenDetails(Shape):
    """`defer`: the rejector's decision, even if the expert failed; `score` is null if it is infinite."""

    position: int
    token: Any
    text: str
    author: Author
    score: float | None
    defer: bool


class DeferralOutput(Shape):
    index: int
    output: Any
    finish_reason: Finish
    facts: dict[str, float]
    tokens: list[TokenDetails]


class DeferralCompletion(_Written):
    object: Literal["deferral.completion"]
    data: list[DeferralOutput]


class ScoredSequence(Shape):
    index: int
    text: str
    tokens: list[TokenDetails]


class ScoreDeferral(Shape):
    budget: float
    expected_share: float
    remarks: list[str]


class Scores(Shape):
    object: Literal["deferral.score"]
    model: str
    data: list[ScoredSequence]
    usage: Usage
    deferral: ScoreDeferral


class BudgetSetting(Shape):
    """`limit`: the most that the expected share of an input is, by the calibration; null if it cannot tell."""

    budget: float
    share: float
    low: float
    high: float
    limit: float | None


class DeferralCurve(Shape):
    unit: str
    inputs: int
    points: list[LossPoint]


class DeferralTiming(Shape):
    """Seconds per sequence, of each model alone and at budgets, where `at_once` sequences were written together."""

    inputs: int
    at_once: int
    predictor: float
    expert: float
    budgets: list[BudgetTime]


class BudgetPromise(Shape):
    """What the budgets guarantee, with `words` for the default budget; `confidence` is null in expectation."""

    guarantee: Literal["expected", "confident"]
    share_of: Literal["tokens", "inputs"]
    confidence: float | None
    inputs: int
    bound: Literal["conformal", "betting", "hoeffding-bentkus"]
    words: str


class QualityDetails(Shape):
    """The promise whose setting requests get that name no budget: an expected loss of at most `within` above that of
    the expert. `share`, `loss` and `expert_loss` were seen on the inputs that were tested."""

    within: float
    unit: str
    confidence: float
    inputs: int
    share: float
    loss: float
    expert_loss: float
    words: str


class DriftTest(Shape):
    """Evidence of 50 or more is an alarm, which stays: `alarm_at` is the number of inputs then."""

    inputs: int
    evidence: float
    alarm_at: int | None


class DriftState(Shape):
    """Tests of what is served against the calibration; `delta` is the probability that any of them ever sounds while
    inputs are like those of the calibration."""

    delta: float
    spent: DriftTest
    scores: DriftTest
    warning: str | None


class ServedBudget(Shape):
    """What was spent at a budget since the server started, on inputs that the calibration has not seen."""

    budget: float
    inputs: int
    share: float


class AudioInputs(Shape):
    max_seconds: float
    language: str | None


class DeferralModel(Shape):
    """The served model: its granularity, its inputs, the share each budget spends, and the loss at each share."""

    object: Literal["deferral.model"]
    id: str
    kind: str
    by: Literal["token", "one-time"]
    length: int
    size: int | None
    hint: str
    about: str
    examples: list[Any]
    audio: AudioInputs | None
    budget: float
    calibrated_on: int
    promise: BudgetPromise | None
    quality: QualityDetails | None
    settings: list[BudgetSetting]
    drift: DriftState | None
    served: list[ServedBudget]
    curve: DeferralCurve | None
    timing: DeferralTiming | None
    currency: str | None
    caps: list[Cap]


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["seqdefer"]


class Models(Shape):
    object: Literal["list"]
    data: list[Model]


class Health(Shape):
    status: Literal["ok", "loading", "stopping"]


class KeyLimits(Shape):
    requests_per_minute: int | None
    expert_tokens_per_day: int | None


class KeyUsage(Shape):
    """What an API key used since midnight (UTC), and what it may use; null means no limit."""

    object: Literal["usage"]
    key: str
    day: str
    requests: int
    refused: int
    predictor_tokens: int
    expert_tokens: int
    expert_tokens_left: int | None
    limits: KeyLimits
