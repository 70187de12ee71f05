"""Responses as JSON, in OpenAI's format or in our own with the author of every token."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast

from seqdefer.budgets.calibration import LossCurve
from seqdefer.budgets.caps import Cap
from seqdefer.budgets.drift import DELTA, Evidence
from seqdefer.budgets.prices import Prices, total
from seqdefer.budgets.promises import Promise
from seqdefer.budgets.quality import QualityPromise
from seqdefer.interfaces import Codec, TokenRejector
from seqdefer.methods.plans import ScoredDraft
from seqdefer.methods.timing import Timing
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.batches import Drafted, InputsRead, Token
from seqdefer.server.drift import TrafficMonitor
from seqdefer.server.log_probs import TokenLogProb
from seqdefer.server.metrics import Metrics
from seqdefer.server.openapi import (
    Author,
    BudgetPromise,
    BudgetSeconds,
    BudgetSetting,
    CapDetails,
    ChatLogProbs,
    ChatTokenLogProb,
    ChatTopLogProb,
    CompletionLogProbs,
    CurvePoint,
    Deferral,
    DeferralCurve,
    DeferralModel,
    DeferralTiming,
    DriftState,
    DriftTest,
    Model,
    Money,
    QualityDetails,
    Scores,
    ServedBudget,
    TokenDetails,
    Usage,
)
from seqdefer.server.protocol import SEPARATOR

LISTED_BUDGETS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)  # /v1/models lists each as a model


@dataclass
class Transcript:
    """What the models have written for a request so far."""

    budget: float
    expected_share: float
    remarks: list[str]
    texts: list[str]
    tokens: list[list[Token]]
    input_lengths: list[int] = field(default_factory=list)
    promise: str | None = None
    drift: str | None = None
    drafts: dict[int, ScoredDraft] = field(default_factory=dict)  # by input; empty at token level
    has_cap: bool = False
    prices: Prices | None = None
    by_token: bool = True
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def empty(cls, n: int, budget: float, expected_share: float, remarks: Sequence[str]) -> Transcript:
        return cls(budget, expected_share, list(remarks), [""] * n, [[] for _ in range(n)])

    def add(self, event: InputsRead | Drafted | Token) -> None:
        if isinstance(event, InputsRead):
            self.input_lengths = event.input_tokens
            self.remarks += event.remarks
            return
        if isinstance(event, Drafted):
            self.drafts[event.index] = event.draft
            return
        self.texts[event.index] += event.text
        self.tokens[event.index].append(event)

    @property
    def input_tokens(self) -> int:
        return sum(self.input_lengths)

    def finish_reason(self, index: int) -> str | None:
        return self.tokens[index][-1].finish

    @property
    def switches(self) -> int:
        return sum(one.author != other.author for row in self.tokens for one, other in pairwise(row))

    def count_tokens(self, author: str) -> int:
        return sum(token.author == author for row in self.tokens for token in row)

    def usage(self) -> Usage:
        written = sum(map(len, self.tokens))
        return {
            "prompt_tokens": self.input_tokens,
            "completion_tokens": written,
            "total_tokens": self.input_tokens + written,
            "predictor_tokens": self.count_tokens("predictor"),
            "expert_tokens": self.count_tokens("expert"),
            "switches": self.switches,
        }

    def deferral(self, index: int | None = None) -> Deferral:
        """Summarize the deferral of one text, or of all."""
        rows = self.tokens if index is None else [self.tokens[index]]
        authors = [token.author for row in rows for token in row]
        reasons = [token.degraded for row in rows for token in row if token.degraded is not None]
        summary: Deferral = {
            "budget": self.budget,
            "expected_share": self.expected_share,
            "share": authors.count("expert") / len(authors) if authors else 0.0,
            "degraded": bool(reasons),
        }
        if reasons:
            summary["reason"] = reasons[-1]
        if self.remarks:
            summary["remarks"] = self.remarks
        if self.promise is not None:
            summary["promise"] = self.promise
        if self.drift is not None:
            summary["drift"] = self.drift
        if self.has_cap:
            summary["capped"] = sum(token.capped for row in rows for token in row)
        if self.prices is not None and self.input_lengths:
            summary["money"] = self._money(self.prices, index)
        return summary

    def _money(self, prices: Prices, index: int | None) -> Money:
        places = range(len(self.tokens)) if index is None else [index]
        authors = {place: [int(token.author == "expert") for token in self.tokens[place]] for place in places}
        bills = [prices.bill(self.input_lengths[place], row, by_token=self.by_token) for place, row in authors.items()]
        return cast(Money, total(bills).plain())

    def record(self, metrics: Metrics) -> None:
        for author in ("predictor", "expert"):
            metrics.count("seqdefer_tokens_total", {"author": author}, self.count_tokens(author))
        metrics.count("seqdefer_switches_total", by=self.switches)
        if any(self.tokens):
            summary = self.deferral()
            metrics.observe("seqdefer_budget", summary["budget"])
            metrics.observe("seqdefer_share", summary["share"])
            metrics.count("seqdefer_requests_degraded_total", by=summary["degraded"])

    def head(self, prefix: str, kind: str, model: str) -> dict[str, Any]:
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": model}


def token_details(token: Token) -> TokenDetails:
    return {
        "position": token.position,
        "token": token.token,
        "text": token.text,
        "author": cast(Author, token.author),
        "score": token.score if math.isfinite(token.score) else None,
        "defer": token.defer,
    }


class ResponseFormat(Protocol):
    """How a transcript becomes a response, whole or in chunks."""

    def whole(self, transcript: Transcript, model: str) -> dict[str, Any] | str: ...

    def chunk(self, token: Token, transcript: Transcript, model: str) -> dict[str, Any]:
        """Return the chunk of one token, which the transcript already contains."""

    def usage_chunk(self, transcript: Transcript, model: str) -> dict[str, Any]:
        """Return the last chunk, which has no token but the usage."""


@dataclass(frozen=True)
class OpenAIFormat:
    """OpenAI's format. Completions and chats differ in names, and in where the text is. Completions may begin with
    texts that are echoed, one for each."""

    prefix: str
    object: str
    chunk_object: str
    is_chat: bool
    echoed: tuple[str, ...] = ()

    def whole(self, transcript: Transcript, model: str) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._text(self._echo(index) + text),
                "logprobs": self._log_probs(transcript.tokens[index]),
                "finish_reason": transcript.finish_reason(index),
            }
            for index, text in enumerate(transcript.texts)
        ]
        return self._with_usage(transcript, self.object, model, choices)

    def chunk(self, token: Token, transcript: Transcript, model: str) -> dict[str, Any]:
        """Return the chunk of one token; the last one of a text also summarizes that text."""
        offset = len(transcript.texts[token.index]) - len(token.text)
        log_probs = self._log_probs([token], offset)
        choice = {"index": token.index, **self._delta(token), "logprobs": log_probs, "finish_reason": token.finish}
        details = token_details(token)
        deferral: dict[str, Any] = {name: details[name] for name in ("position", "token", "author", "score")}
        if token.finish is not None:
            deferral |= transcript.deferral(token.index)
        return {**transcript.head(self.prefix, self.chunk_object, model), "choices": [choice], "deferral": deferral}

    def usage_chunk(self, transcript: Transcript, model: str) -> dict[str, Any]:
        return self._with_usage(transcript, self.chunk_object, model, [])

    def _with_usage(self, transcript: Transcript, kind: str, model: str, choices: list[Any]) -> dict[str, Any]:
        head = transcript.head(self.prefix, kind, model)
        return {**head, "choices": choices, "usage": transcript.usage(), "deferral": transcript.deferral()}

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}

    def _delta(self, token: Token) -> dict[str, Any]:
        if not self.is_chat:
            return {"text": (self._echo(token.index) if token.position == 0 else "") + token.text}
        role = {"role": "assistant"} if token.position == 0 else {}
        return {"delta": {**role, "content": token.text}}

    def _echo(self, index: int) -> str:
        return self.echoed[index] if self.echoed else ""

    def _log_probs(self, tokens: Sequence[Token], offset: int = 0) -> CompletionLogProbs | ChatLogProbs | None:
        if not tokens or tokens[0].log_prob is None:
            return None
        return _chat_log_probs(tokens) if self.is_chat else _completion_log_probs(tokens, offset)


def _completion_log_probs(tokens: Sequence[Token], offset: int) -> CompletionLogProbs:
    told = [token.log_prob for token in tokens if token.log_prob is not None]
    starts = accumulate((len(token.text) for token in tokens[:-1]), initial=offset)
    return {
        "tokens": [one.text for one in told],
        "token_logprobs": [one.log_prob for one in told],
        "top_logprobs": [{other.text: other.log_prob for other in reversed(one.likeliest)} for one in told],
        "text_offset": list(starts),
        "authors": [cast(Author, token.author) for token in tokens],
    }


def _chat_log_probs(tokens: Sequence[Token]) -> ChatLogProbs:
    content: list[ChatTokenLogProb] = [
        {
            **_chat_log_prob(token.log_prob),
            "top_logprobs": [_chat_log_prob(other) for other in token.log_prob.likeliest],
            "author": cast(Author, token.author),
        }
        for token in tokens
        if token.log_prob is not None
    ]
    return {"content": content, "refusal": None}


def _chat_log_prob(one: TokenLogProb) -> ChatTopLogProb:
    return {"token": one.text, "logprob": one.log_prob, "bytes": list(one.text.encode())}


COMPLETION = OpenAIFormat("cmpl", "text_completion", "text_completion", is_chat=False)
CHAT = OpenAIFormat("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)


@dataclass(frozen=True)
class DeferralFormat:
    """Every token with its author, and the decoded outputs."""

    codec: Codec
    inputs: Sequence[Any]

    def whole(self, transcript: Transcript, model: str) -> dict[str, Any]:
        data = [
            {
                "index": index,
                **self._output(index, transcript),
                "finish_reason": transcript.finish_reason(index),
                "tokens": [token_details(token) for token in tokens],
            }
            for index, tokens in enumerate(transcript.tokens)
        ]
        head = transcript.head("defer", "deferral.completion", model)
        return {**head, "data": data, "usage": transcript.usage(), "deferral": transcript.deferral()}

    def chunk(self, token: Token, transcript: Transcript, model: str) -> dict[str, Any]:
        output = {} if token.finish is None else self._output(token.index, transcript)
        written = {"index": token.index, **token_details(token), "finish_reason": token.finish, **output}
        return {**self._chunk_head(transcript, model), **written}

    def usage_chunk(self, transcript: Transcript, model: str) -> dict[str, Any]:
        head = self._chunk_head(transcript, model)
        return {**head, "usage": transcript.usage(), "deferral": transcript.deferral()}

    def _output(self, index: int, transcript: Transcript) -> dict[str, Any]:
        output = self.codec.decode([token.token for token in transcript.tokens[index]])
        return {"output": output, "facts": self.codec.facts(self.inputs[index], output)}

    def _chunk_head(self, transcript: Transcript, model: str) -> dict[str, Any]:
        return transcript.head("defer", "deferral.completion.chunk", model)


def scores_response(transcript: Transcript, model: str) -> Scores:
    rows = enumerate(zip(transcript.texts, transcript.tokens, strict=True))
    return {
        "object": "deferral.score",
        "model": model,
        "data": [
            {"index": index, "text": text, "tokens": [token_details(token) for token in tokens]}
            for index, (text, tokens) in rows
        ],
        "usage": transcript.usage(),
        "deferral": {
            "budget": transcript.budget,
            "expected_share": transcript.expected_share,
            "remarks": transcript.remarks,
        },
    }


def model_list(name: str, created: int) -> list[Model]:
    names = (name, *(f"{name}{SEPARATOR}{budget:.2f}" for budget in LISTED_BUDGETS))
    return [model_response(one, created) for one in names]


def model_response(name: str, created: int) -> Model:
    return {"id": name, "object": "model", "created": created, "owned_by": "seqdefer"}


class Described(Protocol):
    """What /v1/deferral tells about."""

    name: str
    default_budget: float
    monitor: TrafficMonitor
    quality: QualityPromise | None
    caps: tuple[Cap, ...]

    @property
    def model(self) -> DeferringModel: ...


def deferral_response(service: Described) -> DeferralModel:
    """Describe the served model, its budgets, and how they were kept so far."""
    model, monitor, quality, budget = service.model, service.monitor, service.quality, service.default_budget
    assert model.calibration is not None
    codec, calibration = model.served.codec, model.calibration
    settings: list[BudgetSetting] = [
        {"budget": one.budget, "share": one.share, "low": one.low, "high": one.high, "limit": calibration.limit(one)}
        for one in calibration.settings
    ]
    served: list[ServedBudget] = [
        {"budget": budget, "inputs": one.inputs, "share": one.deferred / one.written}
        for budget, one in sorted(monitor.shares.items())
    ]
    return {
        "object": "deferral.model",
        "id": service.name,
        "kind": codec.kind,
        "by": "token" if isinstance(model.rejector, TokenRejector) else "one-time",
        "length": model.served.spec.length,
        "size": codec.size,
        "hint": codec.hint,
        "about": codec.about,
        "examples": list(codec.examples),
        "audio": None if codec.max_seconds is None else {"max_seconds": codec.max_seconds, "language": codec.language},
        "budget": budget if quality is None else quality.share,
        "calibrated_on": calibration.inputs,
        "promise": _promise(None if service.caps else calibration.promise, budget),
        "quality": _quality(quality),
        "settings": settings,
        "drift": _drift(monitor),
        "served": served,
        "curve": _curve(model.curve),
        "timing": _timing(model.timing),
        "currency": None if model.prices is None else model.prices.currency,
        "caps": [cast(CapDetails, asdict(cap)) for cap in service.caps],
    }


def _promise(promise: Promise | None, budget: float) -> BudgetPromise | None:
    if promise is None:
        return None
    return {
        "guarantee": promise.rule,
        "share_of": promise.share_of,
        "confidence": promise.confidence,
        "inputs": promise.inputs,
        "bound": promise.bound,
        "words": promise.in_words(budget),
    }


def _quality(promise: QualityPromise | None) -> QualityDetails | None:
    if promise is None:
        return None
    return {
        "within": promise.within,
        "unit": promise.unit,
        "confidence": promise.confidence,
        "inputs": promise.inputs,
        "share": promise.share,
        "loss": promise.loss,
        "expert_loss": promise.expert_loss,
        "words": promise.in_words(),
    }


def _drift(monitor: TrafficMonitor) -> DriftState | None:
    if not monitor.tests:
        return None
    found = {name: _drift_test(evidence) for name, evidence in monitor.tests.items()}
    return {"delta": DELTA, "spent": found["spent"], "scores": found["scores"], "warning": monitor.warning}


def _drift_test(evidence: Evidence) -> DriftTest:
    return {"inputs": evidence.inputs, "evidence": evidence.value, "alarm_at": evidence.alarm_at}


def _curve(curve: LossCurve | None) -> DeferralCurve | None:
    if curve is None:
        return None
    points: list[CurvePoint] = [{"share": point.share, "loss": point.loss} for point in curve.points]
    return {"unit": curve.unit, "inputs": curve.inputs, "points": points}


def _timing(timing: Timing | None) -> DeferralTiming | None:
    if timing is None:
        return None
    budgets: list[BudgetSeconds] = [
        {"budget": one.budget, "share": one.share, "asked": one.asked, "seconds": one.seconds} for one in timing.budgets
    ]
    return {
        "inputs": timing.inputs,
        "at_once": timing.at_once,
        "predictor": timing.predictor,
        "expert": timing.expert,
        "budgets": budgets,
    }
