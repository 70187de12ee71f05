"""Answers as JSON: what a request has got, said in OpenAI's form or, token by token, in our own."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, cast

from seqdefer.budgets.calibration import LossCurve
from seqdefer.interfaces import Codec, TokenRejector
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.cohorts import Read, Token
from seqdefer.server.metrics import Metrics
from seqdefer.server.protocol import SEPARATOR
from seqdefer.server.schemas import (
    Author,
    BudgetSetting,
    CurvePoint,
    Deferral,
    DeferralCurve,
    DeferralModel,
    Model,
    Scores,
    TokenFacts,
    Usage,
)

LISTED = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)  # budgets that /v1/models shows as models of their own


@dataclass
class Tally:
    """What a request has got so far."""

    budget: float
    expected_share: float
    remarks: list[str]
    texts: list[str]
    tokens: list[list[Token]]
    input_tokens: int = 0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, n: int, budget: float, expected_share: float, remarks: Sequence[str]) -> Tally:
        return cls(budget, expected_share, list(remarks), [""] * n, [[] for _ in range(n)])

    def add(self, event: Read | Token) -> None:
        if isinstance(event, Read):
            self.input_tokens = sum(event.input_tokens)
            self.remarks += event.remarks
            return
        self.texts[event.index] += event.text
        self.tokens[event.index].append(event)

    def finish(self, index: int) -> str | None:
        return self.tokens[index][-1].finish

    @property
    def switches(self) -> int:
        return sum(one.author != other.author for row in self.tokens for one, other in pairwise(row))

    def by(self, author: str) -> int:
        return sum(token.author == author for row in self.tokens for token in row)

    def usage(self) -> Usage:
        written = sum(map(len, self.tokens))
        return {
            "prompt_tokens": self.input_tokens,
            "completion_tokens": written,
            "total_tokens": self.input_tokens + written,
            "predictor_tokens": self.by("predictor"),
            "expert_tokens": self.by("expert"),
            "switches": self.switches,
        }

    def deferral(self, index: int | None = None) -> Deferral:
        """Of one text, or of all."""
        rows = self.tokens if index is None else [self.tokens[index]]
        authors = [token.author for row in rows for token in row]
        reasons = [token.degraded for row in rows for token in row if token.degraded is not None]
        said: Deferral = {
            "budget": self.budget,
            "expected_share": self.expected_share,
            "share": authors.count("expert") / len(authors) if authors else 0.0,
            "degraded": bool(reasons),
        }
        if reasons:
            said["reason"] = reasons[-1]
        if self.remarks:
            said["remarks"] = self.remarks
        return said

    def count(self, metrics: Metrics) -> None:
        for author in ("predictor", "expert"):
            metrics.count("seqdefer_tokens_total", {"author": author}, self.by(author))
        metrics.count("seqdefer_switches_total", by=self.switches)

    def head(self, prefix: str, kind: str, model: str) -> dict[str, Any]:
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": model}


def token_facts(token: Token) -> TokenFacts:
    return {
        "position": token.position,
        "token": token.token,
        "text": token.text,
        "author": cast(Author, token.author),
        "score": token.score if math.isfinite(token.score) else None,
        "defer": token.defer,
    }


class Form(Protocol):
    """How an answer is said."""

    def whole(self, tally: Tally, model: str) -> dict[str, Any]: ...

    def part(self, token: Token, tally: Tally, model: str) -> dict[str, Any]:
        """An event of one token, which the tally has already."""

    def closing(self, tally: Tally, model: str) -> dict[str, Any]:
        """An event without a token: what it took."""


@dataclass(frozen=True)
class OpenAIForm:
    """How completions and chats differ: in names, and in where the text stands."""

    prefix: str
    answer: str
    chunk: str
    is_chat: bool

    def whole(self, tally: Tally, model: str) -> dict[str, Any]:
        choices = [
            {"index": index, **self._text(text), "logprobs": None, "finish_reason": tally.finish(index)}
            for index, text in enumerate(tally.texts)
        ]
        return {
            **tally.head(self.prefix, self.answer, model),
            "choices": choices,
            "usage": tally.usage(),
            "deferral": tally.deferral(),
        }

    def part(self, token: Token, tally: Tally, model: str) -> dict[str, Any]:
        """The last of a text says how that one went."""
        choice = {"index": token.index, **self._piece(token), "logprobs": None, "finish_reason": token.finish}
        facts: dict[str, Any] = {name: token_facts(token)[name] for name in ("position", "token", "author", "score")}
        if token.finish is not None:
            facts |= tally.deferral(token.index)
        return {**tally.head(self.prefix, self.chunk, model), "choices": [choice], "deferral": facts}

    def closing(self, tally: Tally, model: str) -> dict[str, Any]:
        return {
            **tally.head(self.prefix, self.chunk, model),
            "choices": [],
            "usage": tally.usage(),
            "deferral": tally.deferral(),
        }

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}

    def _piece(self, token: Token) -> dict[str, Any]:
        if not self.is_chat:
            return {"text": token.text}
        role = {"role": "assistant"} if token.position == 0 else {}
        return {"delta": {**role, "content": token.text}}


COMPLETION = OpenAIForm("cmpl", "text_completion", "text_completion", is_chat=False)
CHAT = OpenAIForm("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)


@dataclass(frozen=True)
class DeferralForm:
    """Every token with its author, and what the sequences stand for."""

    codec: Codec
    inputs: Sequence[Any]

    def whole(self, tally: Tally, model: str) -> dict[str, Any]:
        data = [
            {
                "index": index,
                **self._output(index, tally),
                "finish_reason": tally.finish(index),
                "tokens": [token_facts(token) for token in tokens],
            }
            for index, tokens in enumerate(tally.tokens)
        ]
        head = tally.head("defer", "deferral.completion", model)
        return {**head, "data": data, "usage": tally.usage(), "deferral": tally.deferral()}

    def part(self, token: Token, tally: Tally, model: str) -> dict[str, Any]:
        output = {} if token.finish is None else self._output(token.index, tally)
        written = {"index": token.index, **token_facts(token), "finish_reason": token.finish, **output}
        return {**self._chunk(tally, model), **written}

    def closing(self, tally: Tally, model: str) -> dict[str, Any]:
        return {**self._chunk(tally, model), "usage": tally.usage(), "deferral": tally.deferral()}

    def _output(self, index: int, tally: Tally) -> dict[str, Any]:
        output = self.codec.decode([token.token for token in tally.tokens[index]])
        return {"output": output, "facts": self.codec.facts(self.inputs[index], output)}

    def _chunk(self, tally: Tally, model: str) -> dict[str, Any]:
        return tally.head("defer", "deferral.completion.chunk", model)


def scores_answer(tally: Tally, model: str) -> Scores:
    rows = enumerate(zip(tally.texts, tally.tokens, strict=True))
    return {
        "object": "deferral.score",
        "model": model,
        "data": [
            {"index": index, "text": text, "tokens": [token_facts(token) for token in tokens]}
            for index, (text, tokens) in rows
        ],
        "usage": tally.usage(),
        "deferral": {"budget": tally.budget, "expected_share": tally.expected_share, "remarks": tally.remarks},
    }


def models_answer(name: str, created: int) -> list[Model]:
    return [model_answer(one, created) for one in (name, *(f"{name}{SEPARATOR}{budget:.2f}" for budget in LISTED))]


def model_answer(name: str, created: int) -> Model:
    return {"id": name, "object": "model", "created": created, "owned_by": "seqdefer"}


def deferral_answer(model: DeferringModel, name: str, usual_budget: float) -> DeferralModel:
    assert model.calibration is not None
    codec, calibration = model.served.codec, model.calibration
    settings: list[BudgetSetting] = [
        {"budget": one.budget, "share": one.share, "low": one.low, "high": one.high} for one in calibration.settings
    ]
    return {
        "object": "deferral.model",
        "id": name,
        "kind": codec.kind,
        "by": "token" if isinstance(model.rejector, TokenRejector) else "one-time",
        "length": model.served.spec.length,
        "size": codec.size,
        "hint": codec.hint,
        "budget": usual_budget,
        "calibrated_on": calibration.inputs,
        "settings": settings,
        "curve": _curve(model.curve),
    }


def _curve(curve: LossCurve | None) -> DeferralCurve | None:
    if curve is None:
        return None
    points: list[CurvePoint] = [{"share": point.share, "loss": point.loss} for point in curve.points]
    return {"unit": curve.unit, "inputs": curve.inputs, "points": points}
