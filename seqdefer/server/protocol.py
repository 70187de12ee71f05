"""Requests as JSON, in OpenAI's form: what may be asked.

Decoding is greedy: `temperature`, `top_p` and `seed` are accepted and change nothing. What would change the answer and
is not done here (n > 1, stop words, log-probabilities, tools, penalties) is refused, and so is a field that nobody
knows: a misspelt budget must not become the usual one.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
)

from seqdefer.interfaces import Codec
from seqdefer.server.faults import Fault

SEPARATOR = "@"  # NAME@0.20
BUDGET = r"(0(\.[0-9]{1,17})?|1(\.0{1,17})?)"  # after it
MOST_FIELDS = 100
UNTOLD = "this model knows no roles: what was said is one text, with blank lines between the messages"


# -- requests ------------------------------------------------------------------------------------------------------


def _whole(value: Any) -> Any:
    """Of an input that is more than a text, too."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair is no text") from None
    except RecursionError:
        raise ValueError("lists within lists within lists, too deep to read; give it flatter") from None
    return value


def _listed(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("give a text, or a list of one text or more")
    return value


SHOWN_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
SHOWN_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": SHOWN_PART}]}
SHOWN_FORMAT = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": "text"}},
            "required": ["type"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}


def _parts(value: Any) -> Any:
    if value is None:
        raise ValueError("null is no text: give what was said, or leave the message out; tools are not called here")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_whole)]
Input = Annotated[Any, AfterValidator(_whole)]
Inputs = Annotated[list[Any], AfterValidator(_whole)]  # all at once: one by one takes seconds where they are many
# One text is a list of one: of a union, pydantic would name every branch in its complaints.
SHOWN_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
# Of lists the first that is wrong is named: half a million complaints take ten seconds, in which nobody is answered.
Texts = Annotated[list[Text], FailFast(), BeforeValidator(_listed), WithJsonSchema(SHOWN_TEXTS)]


def _undone(value: Any) -> Any:
    if value not in NOTHING:
        raise ValueError("not done here; leave it out")
    return value


def _unasked(value: Any) -> Any:
    if value is not None:
        raise ValueError("not done here; leave it out")
    return value


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _single(value: int | None) -> int | None:
    if value not in (None, 1):
        raise ValueError("decoding is greedy: there is one answer; leave it out or give 1")
    return value


NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
Undone = Annotated[Any, AfterValidator(_undone), WithJsonSchema({"enum": list(NOTHING)})]
Unasked = Annotated[Any, AfterValidator(_unasked), WithJsonSchema({"type": "null"})]
Integer = Annotated[int, BeforeValidator(_integral)]  # 5.0 is one in JSON
Single = Annotated[Integer | None, AfterValidator(_single), WithJsonSchema({"enum": [None, 1]})]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        """As with lists: each field that nobody knows would be complained of."""
        if isinstance(given, dict) and len(given) > MOST_FIELDS:
            raise ValueError(f"{len(given)} fields are more than the {MOST_FIELDS} that may be given")
        return given


class DeferralOptions(_Body):
    budget: float = Field(ge=0.0, le=1.0, description="share of the tokens that the expert writes")


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Common(_Body):
    model: str
    deferral: DeferralOptions | None = None
    user: str | None = None

    @abstractmethod
    def inputs(self, codec: Codec) -> list[Any]:
        """As the codec reads them."""

    def remarks(self, codec: Codec) -> list[str]:
        """What there is to say of how they were read."""
        return []


class _Writing(_Common):
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = None
    # greedy decoding knows no difference
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    seed: Integer | None = None
    n: Single = None
    stop: Undone = None
    frequency_penalty: Undone = None
    presence_penalty: Undone = None
    logit_bias: Undone = None


class CompletionRequest(_Writing):
    prompt: Texts
    logprobs: Unasked = None  # here 0 asks for them, too: for those of the tokens that are written
    best_of: Single = None
    echo: Undone = None
    suffix: Undone = None

    def inputs(self, codec: Codec) -> list[Any]:
        return self.prompt

    def most_tokens(self) -> dict[str, int | None]:
        return {"max_tokens": self.max_tokens}


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], FailFast(), BeforeValidator(_parts), WithJsonSchema(SHOWN_CONTENT)]
    name: str | None = None
    refusal: Undone = None

    @property
    def speaker(self) -> str:
        return "system" if self.role == "developer" else self.role  # the same under its new name

    def text(self) -> str:
        return "".join(part.text for part in self.content)


def _text_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value not in (None, {"type": "text"}):
        raise ValueError("answers are plain text; leave it out")
    return value


class ChatRequest(_Writing):
    """All that was said is one input: the codec renders it, with the roles where its model knows them."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: Integer | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    logprobs: Undone = None
    top_logprobs: Undone = None
    tools: Undone = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[dict[str, Any] | None, AfterValidator(_text_format), WithJsonSchema(SHOWN_FORMAT)] = None

    def inputs(self, codec: Codec) -> list[Any]:
        return [codec.chat([{"role": message.speaker, "content": message.text()} for message in self.messages])]

    def remarks(self, codec: Codec) -> list[str]:
        has_roles = len(self.messages) > 1 or self.messages[0].speaker == "system"
        return [UNTOLD] if has_roles and not codec.knows_roles else []

    def most_tokens(self) -> dict[str, int | None]:
        return {"max_completion_tokens": self.max_completion_tokens, "max_tokens": self.max_tokens}


class _Deferring(_Common):
    """Inputs as the model's codec reads them (a text, a list of cities): `input` is one of them, `inputs` are
    several."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["input"]}, {"required": ["inputs"]}]})
    input: Input = None
    several: Inputs = Field([], alias="inputs", min_length=1)

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if ("input" in self.model_fields_set) == ("several" in self.model_fields_set):
            raise ValueError("give either input, which is one, or inputs, a list of them")
        return self

    def inputs(self, codec: Codec) -> list[Any]:
        return self.several or [self.input]


class CompleteRequest(_Deferring):
    """`input` or `inputs` of any kind, and in the answer every token with its author."""

    stream: bool | None = None


class ScoreRequest(_Deferring):
    """Where would the rejector defer, were this written? The expert is not asked."""


# -- names and numbers ---------------------------------------------------------------------------------------------


def name_pattern(name: str) -> str:
    """Of all that the model may be called. `re.escape` also escapes what other dialects do not let it."""
    literal = re.sub(r"([\\^$.|?*+()\[\]{}])", r"\\\1", name)
    return f"^{literal}({SEPARATOR}{BUDGET})?$"


def budget_of(request: _Common, name: str, usual: float) -> float:
    """From `deferral`, or NAME@BUDGET; raises where the model is another, or a budget is named twice."""
    asked, separator, suffix = request.model.rpartition(SEPARATOR) if request.model != name else (name, "", "")
    if not separator:
        asked = request.model
    if asked != name:
        raise unknown_model(request.model, name)
    named = _budget(suffix) if separator else None
    given = None if request.deferral is None else request.deferral.budget
    if named is not None and given is not None:
        words = f"the model's name says a budget of {named:g}, deferral says {given:g}; say it once"
        raise Fault(400, words, param="deferral")
    return next(one for one in (given, named, usual) if one is not None)


def _budget(text: str) -> float:
    if re.fullmatch(BUDGET, text) is None:
        raise Fault(400, f"budget {text!r:.40} of the model's name is no number from 0 to 1", param="model")
    return float(text)


def unknown_model(asked: str, name: str) -> Fault:
    words = f"there is no model {asked!r:.100}; there is {name!r}, and with a budget {name + '@0.20'!r}"
    return Fault(404, words, code="model_not_found", param="model")


def tokens_of(named: Mapping[str, int | None], longest: int) -> tuple[int, list[str]]:
    """The first that is given, as far as the model goes; and what there is to say of it."""
    given = {param: value for param, value in named.items() if value is not None}
    for param, value in given.items():
        if value < 1:
            raise Fault(400, f"{param} is {value}; give 1 or more, or leave it out", param=param)
    param, most = next(iter(given.items()), ("", longest))
    if most <= longest:
        return most, []
    return longest, [f"{param} is {most}; this model writes {longest} tokens at most"]
