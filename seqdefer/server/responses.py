"""Responses as JSON, in OpenAI's format or in our own with the author of every token."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast

from seqdefer.budgets.caps import Cap
from seqdefer.budgets.drift import DELTA
from seqdefer.budgets.prices import Prices, total
from seqdefer.budgets.quality import QualityPromise
from seqdefer.interfaces import Codec
from seqdefer.methods.plans import ScoredDraft
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server import shapes
from seqdefer.server.drift import TrafficMonitor
from seqdefer.server.log_probs import TokenLogProb
from seqdefer.server.metrics import Metrics
from seqdefer.server.protocol import SEPARATOR
from seqdefer.server.tickets import Drafted, InputsRead, Token
from seqdefer.types import Examples

LISTED_BUDGETS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)  # /v1/models lists each as a model


@dataclass
class Transcript:
    """What the models have written for a request so far. `model` is the name that the request gave."""

    model: str
    budget: float
    expected_share: float
    remarks: list[str]
    tokens: list[list[Token]]  # of each input
    promise: str | None = None
    drift: str | None = None
    has_cap: bool = False
    prices: Prices | None = None
    by_token: bool = True
    examples: Examples | None = None  # its inputs, once they are read
    input_lengths: list[int] = field(default_factory=list)
    drafts: dict[int, ScoredDraft] = field(default_factory=dict)  # by input; empty at token level
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.texts = [""] * len(self.tokens)

    def add(self, event: InputsRead | Drafted | Token) -> None:
        if isinstance(event, InputsRead):
            self.examples, self.input_lengths = event.examples, event.input_tokens
            self.remarks += event.remarks
        elif isinstance(event, Drafted):
            self.drafts[event.index] = event.draft
        else:
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

    def usage(self) -> shapes.Usage:
        written = sum(map(len, self.tokens))
        return {
            "prompt_tokens": self.input_tokens,
            "completion_tokens": written,
            "total_tokens": self.input_tokens + written,
            "predictor_tokens": self.count_tokens("predictor"),
            "expert_tokens": self.count_tokens("expert"),
            "switches": self.switches,
        }

    def deferral(self, index: int | None = None) -> shapes.Deferral:
        """Summarize the deferral of one text, or of all."""
        rows = self.tokens if index is None else [self.tokens[index]]
        authors = [token.author for row in rows for token in row]
        reasons = [token.degraded for row in rows for token in row if token.degraded is not None]
        summary: shapes.Deferral = {
            "budget": self.budget,
            "expected_share": self.expected_share,
            "share": authors.count("expert") / len(authors) if authors else 0.0,
            "degraded": bool(reasons),
        }
        if reasons:
            summary["reason"] = reasons[-1]
        if self.remarks:
            summary["remarks"] = self.remarks
        if self.promise is not None and not reasons:
            summary["promise"] = self.promise
        if self.drift is not None:
            summary["drift"] = self.drift
        if self.has_cap:
            summary["capped"] = sum(token.capped for row in rows for token in row)
        if self.prices is not None and self.input_lengths:
            summary["money"] = self._money(self.prices, index)
        return summary

    def _money(self, prices: Prices, index: int | None) -> shapes.Money:
        places = range(len(self.tokens)) if index is None else [index]
        authors = {place: [int(token.author == "expert") for token in self.tokens[place]] for place in places}
        bills = [prices.bill(self.input_lengths[place], row, by_token=self.by_token) for place, row in authors.items()]
        return cast(shapes.Money, total(bills).plain())

    def record(self, metrics: Metrics) -> None:
        for author in ("predictor", "expert"):
            metrics.count("seqdefer_tokens_total", {"author": author}, self.count_tokens(author))
        metrics.count("seqdefer_switches_total", by=self.switches)
        if any(self.tokens):
            summary = self.deferral()
            metrics.observe("seqdefer_budget", summary["budget"])
            metrics.observe("seqdefer_share", summary["share"])
            metrics.count("seqdefer_requests_degraded_total", by=summary["degraded"])

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def totals(self) -> dict[str, Any]:
        """What all responses end with."""
        return {"usage": self.usage(), "deferral": self.deferral()}


def token_details(token: Token) -> shapes.TokenDetails:
    return {
        "position": token.position,
        "token": token.token,
        "text": token.text,
        "author": cast(shapes.Author, token.author),
        "score": token.score if math.isfinite(token.score) else None,
        "defer": token.defer,
    }


def pick(shape: Any, record: Any, **others: Any) -> dict[str, Any]:
    """Return a shape whose fields are those of a record, except for `others`."""
    return {name: others[name] if name in others else getattr(record, name) for name in shape.__annotations__}


class ResponseFormat(Protocol):
    """How a transcript becomes a response, whole or in chunks."""

    def whole(self, transcript: Transcript) -> dict[str, Any] | str: ...

    def chunk(self, token: Token, transcript: Transcript) -> dict[str, Any]:
        """Return the chunk of one token, which the transcript already contains."""

    def usage_chunk(self, transcript: Transcript) -> dict[str, Any]:
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

    def whole(self, transcript: Transcript) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._text(self._echo(index) + text),
                "logprobs": self._log_probs(transcript.tokens[index]),
                "finish_reason": transcript.finish_reason(index),
            }
            for index, text in enumerate(transcript.texts)
        ]
        return {**transcript.head(self.prefix, self.object), "choices": choices, **transcript.totals()}

    def chunk(self, token: Token, transcript: Transcript) -> dict[str, Any]:
        """Return the chunk of one token; the last one of a text also summarizes that text."""
        offset = len(transcript.texts[token.index]) - len(token.text)
        log_probs = self._log_probs([token], offset)
        choice = {"index": token.index, **self._delta(token), "logprobs": log_probs, "finish_reason": token.finish}
        details = token_details(token)
        deferral: dict[str, Any] = {name: details[name] for name in ("position", "token", "author", "score")}
        if token.finish is not None:
            deferral |= transcript.deferral(token.index)
        return {**transcript.head(self.prefix, self.chunk_object), "choices": [choice], "deferral": deferral}

    def usage_chunk(self, transcript: Transcript) -> dict[str, Any]:
        return {**transcript.head(self.prefix, self.chunk_object), "choices": [], **transcript.totals()}

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}

    def _delta(self, token: Token) -> dict[str, Any]:
        if not self.is_chat:
            return {"text": (self._echo(token.index) if token.position == 0 else "") + token.text}
        role = {"role": "assistant"} if token.position == 0 else {}
        return {"delta": {**role, "content": token.text}}

    def _echo(self, index: int) -> str:
        return self.echoed[index] if self.echoed else ""

    def _log_probs(self, tokens: Sequence[Token], offset: int = 0) -> dict[str, Any] | None:
        if not tokens or tokens[0].log_prob is None:
            return None
        return _chat_log_probs(tokens) if self.is_chat else _completion_log_probs(tokens, offset)


def _completion_log_probs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    found = [token.log_prob for token in tokens if token.log_prob is not None]
    return {
        "tokens": [one.text for one in found],
        "token_logprobs": [one.log_prob for one in found],
        "top_logprobs": [{other.text: other.log_prob for other in reversed(one.likeliest)} for one in found],
        "text_offset": list(accumulate((len(token.text) for token in tokens[:-1]), initial=offset)),
        "authors": [token.author for token in tokens],
    }


def _chat_log_probs(tokens: Sequence[Token]) -> dict[str, Any]:
    content = [
        {
            **_chat_log_prob(token.log_prob),
            "top_logprobs": [_chat_log_prob(other) for other in token.log_prob.likeliest],
            "author": token.author,
        }
        for token in tokens
        if token.log_prob is not None
    ]
    return {"content": content, "refusal": None}


def _chat_log_prob(one: TokenLogProb) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.log_prob, "bytes": list(one.text.encode())}


COMPLETION = OpenAIFormat("cmpl", "text_completion", "text_completion", is_chat=False)
CHAT = OpenAIFormat("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)


@dataclass(frozen=True)
class DeferralFormat:
    """Every token with its author, and the decoded outputs."""

    codec: Codec
    inputs: Sequence[Any]

    def whole(self, transcript: Transcript) -> dict[str, Any]:
        data = [
            {
                "index": index,
                **self._output(index, transcript),
                "finish_reason": transcript.finish_reason(index),
                "tokens": [token_details(token) for token in tokens],
            }
            for index, tokens in enumerate(transcript.tokens)
        ]
        return {**transcript.head("defer", "deferral.completion"), "data": data, **transcript.totals()}

    def chunk(self, token: Token, transcript: Transcript) -> dict[str, Any]:
        output = {} if token.finish is None else self._output(token.index, transcript)
        written = {"index": token.index, **token_details(token), "finish_reason": token.finish, **output}
        return {**transcript.head("defer", "deferral.completion.chunk"), **written}

    def usage_chunk(self, transcript: Transcript) -> dict[str, Any]:
        return {**transcript.head("defer", "deferral.completion.chunk"), **transcript.totals()}

    def _output(self, index: int, transcript: Transcript) -> dict[str, Any]:
        output = self.codec.decode([token.token for token in transcript.tokens[index]])
        return {"output": output, "facts": self.codec.facts(self.inputs[index], output)}


def scores_response(transcript: Transcript) -> dict[str, Any]:
    rows = enumerate(zip(transcript.texts, transcript.tokens, strict=True))
    return {
        "object": "deferral.score",
        "model": transcript.model,
        "data": [
            {"index": index, "text": text, "tokens": [token_details(token) for token in tokens]}
            for index, (text, tokens) in rows
        ],
        "usage": transcript.usage(),
        "deferral": pick(shapes.ScoreDeferral, transcript),
    }


def model_list(name: str, created: int) -> list[shapes.Model]:
    names = (name, *(f"{name}{SEPARATOR}{budget:.2f}" for budget in LISTED_BUDGETS))
    return [model_response(one, created) for one in names]


def model_response(name: str, created: int) -> shapes.Model:
    return {"id": name, "object": "model", "created": created, "owned_by": "seqdefer"}


def deferral_response(
    model: DeferringModel, monitor: TrafficMonitor, budget: float, quality: QualityPromise | None, caps: Sequence[Cap]
) -> dict[str, Any]:
    """Describe the served model, its budgets, and how they were kept so far; with an id, a `shapes.DeferralModel`."""
    codec, calibration, curve, timing = model.served.codec, model.calibration, model.curve, model.timing
    assert calibration is not None
    promise = None if caps else calibration.promise
    words = promise and promise.in_words(budget)
    tests = {name: pick(shapes.DriftTest, one, evidence=one.value) for name, one in monitor.tests.items()}
    return {
        "object": "deferral.model",
        "kind": codec.kind,
        "by": "token" if model.is_token_level else "one-time",
        "length": model.served.spec.length,
        "size": codec.size,
        "hint": codec.hint,
        "about": codec.about,
        "examples": list(codec.examples),
        "audio": None if codec.max_seconds is None else pick(shapes.AudioInputs, codec),
        "budget": budget if quality is None else quality.share,
        "calibrated_on": calibration.inputs,
        "promise": promise and pick(shapes.BudgetPromise, promise, guarantee=promise.rule, words=words),
        "quality": quality and pick(shapes.QualityDetails, quality, words=quality.in_words()),
        "settings": [pick(shapes.BudgetSetting, one, limit=calibration.limit(one)) for one in calibration.settings],
        "drift": {"delta": DELTA, **tests, "warning": monitor.warning} if tests else None,
        "served": [
            {"budget": budget, "inputs": one.inputs, "share": one.deferred / one.written}
            for budget, one in sorted(monitor.shares.items())
        ],
        "curve": curve and pick(shapes.DeferralCurve, curve, points=[asdict(point) for point in curve.points]),
        "timing": timing and pick(shapes.DeferralTiming, timing, budgets=[asdict(one) for one in timing.budgets]),
        "currency": None if model.prices is None else model.prices.currency,
        "caps": [asdict(cap) for cap in caps],
    }
