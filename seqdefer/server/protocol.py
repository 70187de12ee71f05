"""Requests and answers as JSON, in OpenAI's form: what may be asked, and how the answer is said.

Decoding is greedy: `temperature`, `top_p` and `seed` are accepted and change nothing. What would change the answer and
is not done here (n > 1, stop words, log-probabilities, tools, penalties) is refused, and so is a field that nobody
knows: a misspelt budget must not become the usual one.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from seqdefer.server.cohorts import Read, Token
from seqdefer.server.faults import Fault
from seqdefer.server.metrics import Metrics

SEPARATOR = "@"  # NAME@0.20
LISTED = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)  # budgets that /v1/models shows as models of their own
JOINED = "\n\n"


# -- requests ------------------------------------------------------------------------------------------------------


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair is no text") from None
    return text


def _listed(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("give a text, or a list of one text or more")
    return value


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_whole)]
# One text is a list of one: of a union, pydantic would name every branch in its complaints.
SHOWN_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
Texts = Annotated[list[Text], BeforeValidator(_listed), WithJsonSchema(SHOWN_TEXTS)]


def _undone(value: Any) -> Any:
    if value not in (None, False, 0, "", [], {}):
        raise ValueError("not done here; leave it out")
    return value


def _single(value: int | None) -> int | None:
    if value not in (None, 1):
        raise ValueError("decoding is greedy: there is one answer; leave it out or give 1")
    return value


Undone = Annotated[Any, AfterValidator(_undone)]
Single = Annotated[int | None, AfterValidator(_single)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class DeferralOptions(_Body):
    budget: float = Field(ge=0.0, le=1.0, description="share of the tokens that the expert writes")


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Common(_Body):
    model: str
    deferral: DeferralOptions | None = None
    user: str | None = None


class _Writing(_Common):
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    # greedy decoding knows no difference
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    seed: int | None = None
    n: Single = None
    stop: Undone = None
    frequency_penalty: Undone = None
    presence_penalty: Undone = None
    logit_bias: Undone = None
    logprobs: Undone = None


class CompletionRequest(_Writing):
    prompt: Texts
    best_of: Single = None
    echo: Undone = None
    suffix: Undone = None

    def inputs(self) -> list[str]:
        return self.prompt

    def most_tokens(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_parts)]
    name: str | None = None
    refusal: Undone = None

    def text(self) -> str:
        return "".join(part.text for part in self.content)


def _text_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value not in (None, {"type": "text"}):
        raise ValueError("answers are plain text; leave it out")
    return value


class ChatRequest(_Writing):
    """The models know no roles: all that was said, in order, with blank lines between, is one input."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    top_logprobs: Undone = None
    tools: Undone = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[dict[str, Any] | None, AfterValidator(_text_format)] = None

    def inputs(self) -> list[str]:
        return [JOINED.join(message.text() for message in self.messages)]

    def most_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class ScoreRequest(_Common):
    """Where would the rejector defer, were this written? The expert is not asked."""

    input: Texts

    def inputs(self) -> list[str]:
        return self.input


def budget_of(request: _Common, name: str, usual: float) -> float:
    """From `deferral`, or NAME@BUDGET; raises where the model is another, or the two differ."""
    asked, separator, suffix = request.model.rpartition(SEPARATOR) if request.model != name else (name, "", "")
    if not separator:
        asked = request.model
    if asked != name:
        raise unknown_model(request.model, name)
    named = _budget(suffix) if separator else None
    given = None if request.deferral is None else request.deferral.budget
    if named is not None and given is not None and named != given:
        raise Fault(400, f"the model's name says a budget of {named:g}, deferral says {given:g}", param="deferral")
    return next(one for one in (given, named, usual) if one is not None)


def _budget(text: str) -> float:
    try:
        budget = float(text)
    except ValueError:
        budget = math.nan
    if not 0.0 <= budget <= 1.0:
        raise Fault(400, f"budget {text!r:.40} of the model's name is no number from 0 to 1", param="model")
    return budget


def unknown_model(asked: str, name: str) -> Fault:
    words = f"there is no model {asked!r:.100}; there is {name!r}, and with a budget {name + '@0.20'!r}"
    return Fault(404, words, code="model_not_found", param="model")


def tokens_of(named: tuple[str, int | None], longest: int) -> int:
    param, value = named
    if value is None:
        return longest
    if not 1 <= value <= longest:
        raise Fault(400, f"{param} is {value}; this model writes 1 to {longest} tokens", param=param)
    return value


# -- answers -------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What a request has got so far."""

    budget: float
    expected_share: float
    remarks: list[str]
    texts: list[str]
    sources: list[list[str]]
    finish: list[str | None]
    tokens: list[list[Token]]
    input_tokens: int = 0
    degraded: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, n: int, budget: float, expected_share: float, remarks: Sequence[str]) -> Tally:
        return cls(
            budget, expected_share, list(remarks), [""] * n, [[] for _ in range(n)], [None] * n, [[] for _ in range(n)]
        )

    def add(self, event: Read | Token) -> None:
        if isinstance(event, Read):
            self.input_tokens = sum(event.input_tokens)
            self.remarks += event.remarks
            return
        self.texts[event.index] += event.text
        self.sources[event.index].append(event.author)
        self.tokens[event.index].append(event)
        self.finish[event.index] = event.finish
        self.degraded = event.degraded or self.degraded

    @property
    def switches(self) -> int:
        return sum(one != other for row in self.sources for one, other in pairwise(row))

    def by(self, author: str) -> int:
        return sum(row.count(author) for row in self.sources)

    def usage(self) -> dict[str, int]:
        written = sum(map(len, self.sources))
        return {
            "prompt_tokens": self.input_tokens,
            "completion_tokens": written,
            "total_tokens": self.input_tokens + written,
            "predictor_tokens": self.by("predictor"),
            "expert_tokens": self.by("expert"),
            "switches": self.switches,
        }

    def deferral(self) -> dict[str, Any]:
        said: dict[str, Any] = {"budget": self.budget, "expected_share": self.expected_share}
        written = sum(map(len, self.sources))
        said["share"] = self.by("expert") / written if written else 0.0
        said["degraded"] = self.degraded is not None
        if self.degraded is not None:
            said["reason"] = self.degraded
        if self.remarks:
            said["remarks"] = self.remarks
        return said

    def count(self, metrics: Metrics) -> None:
        for author in ("predictor", "expert"):
            metrics.count("seqdefer_tokens_total", {"author": author}, self.by(author))
        metrics.count("seqdefer_switches_total", by=self.switches)


def token_facts(token: Token) -> dict[str, Any]:
    score = token.score if math.isfinite(token.score) else None
    return {"position": token.position, "token": token.token, "author": token.author, "score": score}


@dataclass(frozen=True)
class Form:
    """How completions and chats differ: in names, and in where the text stands."""

    prefix: str
    answer: str
    chunk: str
    is_chat: bool

    def whole(self, tally: Tally, model: str) -> dict[str, Any]:
        choices = [
            {"index": index, **self._text(text), "logprobs": None, "finish_reason": finish}
            for index, (text, finish) in enumerate(zip(tally.texts, tally.finish, strict=True))
        ]
        return {
            **self._head(tally, model, self.answer),
            "choices": choices,
            "usage": tally.usage(),
            "deferral": tally.deferral(),
        }

    def part(self, token: Token, tally: Tally, model: str) -> dict[str, Any]:
        """A chunk of one token; the last of a sequence says how it went."""
        text = self._piece(token)
        choice = {"index": token.index, **text, "logprobs": None, "finish_reason": token.finish}
        chunk = {**self._head(tally, model, self.chunk), "choices": [choice], "deferral": token_facts(token)}
        if token.finish is not None:
            chunk["deferral"] |= tally.deferral()
        return chunk

    def closing(self, tally: Tally, model: str) -> dict[str, Any]:
        """What clients get who ask for usage: a chunk without a choice."""
        return {
            **self._head(tally, model, self.chunk),
            "choices": [],
            "usage": tally.usage(),
            "deferral": tally.deferral(),
        }

    def _head(self, tally: Tally, model: str, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{tally.id}", "object": kind, "created": tally.created, "model": model}

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}

    def _piece(self, token: Token) -> dict[str, Any]:
        if not self.is_chat:
            return {"text": token.text}
        role = {"role": "assistant"} if token.position == 0 else {}
        return {"delta": {**role, "content": token.text}}


COMPLETION = Form("cmpl", "text_completion", "text_completion", is_chat=False)
CHAT = Form("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)


def scores_answer(tally: Tally, model: str) -> dict[str, Any]:
    data = [
        {
            "index": index,
            "text": text,
            "tokens": [
                {**token_facts(token), "text": token.text, "defer": token.defer} for token in tally.tokens[index]
            ],
        }
        for index, text in enumerate(tally.texts)
    ]
    return {
        "object": "deferral.score",
        "model": model,
        "data": data,
        "usage": tally.usage(),
        "deferral": {"budget": tally.budget, "expected_share": tally.expected_share, "remarks": tally.remarks},
    }


def models_answer(name: str, created: int) -> list[dict[str, Any]]:
    names = [name, *(f"{name}{SEPARATOR}{budget:.2f}" for budget in LISTED)]
    return [{"id": one, "object": "model", "created": created, "owned_by": "seqdefer"} for one in names]
