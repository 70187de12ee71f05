"""Requests as JSON, in OpenAI's format.

Decoding is greedy, for either author: `seed` and `top_p` change nothing, and a `temperature` above 0 is refused rather
than ignored. Fields that only matter to OpenAI's own service are accepted and ignored. Options that would change the
output and are not supported (n > 1, tools, penalties) are refused. So are unknown fields: a misspelt budget must not
silently become the default one.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
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

from seqdefer.budgets.caps import Cap
from seqdefer.errors import InputError
from seqdefer.interfaces import Codec
from seqdefer.server.http import APIError

SEPARATOR = "@"  # NAME@0.20
BUDGET_PATTERN = r"(0(\.[0-9]{1,17})?|1(\.0{1,17})?)"
MAX_FIELDS = 100
NOT_GIVEN: Any = None  # default of fields that may be left out, and not be null
NO_ROLES_REMARK = "this model does not distinguish roles: the messages are joined, separated by blank lines"


# -- types of fields -----------------------------------------------------------------------------------------------


def _check_unicode(value: Any) -> Any:
    """Check every text inside an input of any type."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is not valid text") from None
    except RecursionError:
        raise ValueError("the lists are nested too deeply; flatten them") from None
    return value


def _as_prompts(value: Any) -> list[Any]:
    """Return texts and lists of token ids. The first item tells which of them a list holds."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("give a text, a list of token ids, or a non-empty list of either")
    return [_as_prompt(one) for one in value]


def _as_prompt(one: Any) -> Any:
    if isinstance(one, str):
        return _check_unicode(one)
    if not isinstance(one, list) or not one or not all(map(_is_id, one)):
        raise ValueError("a prompt must be a text, or a non-empty list of token ids")
    return [int(token) for token in one]


def _is_id(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1


def _as_stops(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def check_greedy(value: float | None) -> float | None:
    if value:
        raise ValueError(f"{value:g} asks for samples; both models write their likeliest token: leave it out or give 0")
    return value


def _as_parts(value: Any) -> Any:
    if value is None:
        raise ValueError("null is not a text; give the content or leave the message out (tools are not supported)")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _only(*allowed: Any, message: str) -> BeforeValidator:
    """Refuse all other values, with a message that says what to do."""

    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(message)
        return value

    return BeforeValidator(check)


UNSET_VALUES: tuple[Any, ...] = (None, False, 0, "", [], {})
GREEDY_SCHEMA = {"enum": [None, 0]}
ECHO_SCHEMA: dict[str, Any] = {
    "anyOf": [{"properties": {"echo": {"enum": [None, False]}}}, {"properties": {"logprobs": {"type": "null"}}}]
}

Text = Annotated[str, AfterValidator(_check_unicode)]
NonEmpty = Annotated[str, Field(min_length=1), AfterValidator(_check_unicode)]
Input = Annotated[Any, AfterValidator(_check_unicode)]
Inputs = Annotated[list[Any], AfterValidator(_check_unicode)]  # all together: one by one takes seconds for many
# Checked by hand: for a union, pydantic's errors would name every branch, and one error for each item of a long list
# would block the server for seconds. The same is FailFast for.
Prompts = Annotated[list[Any], BeforeValidator(_as_prompts), WithJsonSchema({})]  # `openapi` narrows it to the model
Stops = Annotated[
    list[NonEmpty],
    FailFast(),
    Field(max_length=4),
    BeforeValidator(_as_stops, json_schema_input_type=NonEmpty | Annotated[list[NonEmpty], Field(max_length=4)] | None),
]
Greedy = Annotated[
    Annotated[float, Field(ge=0.0, le=2.0)] | None, AfterValidator(check_greedy), WithJsonSchema(GREEDY_SCHEMA)
]
Ignored = Annotated[Any, WithJsonSchema({"description": "accepted and ignored"})]
Unsupported = Annotated[
    Any, _only(*UNSET_VALUES, message="not supported; leave it out"), WithJsonSchema({"enum": list(UNSET_VALUES)})
]
Integer = Annotated[int, BeforeValidator(_as_integer)]  # in JSON, 5.0 is an integer
UpTo5 = Annotated[int, Field(ge=0, le=5), BeforeValidator(_as_integer)]  # bounds come first: else no schema has them
UpTo20 = Annotated[int, Field(ge=0, le=20), BeforeValidator(_as_integer)]
UpToMany = Annotated[int, Field(ge=0, le=2**31), BeforeValidator(_as_integer)]
Single = Annotated[
    Integer | None,
    _only(None, 1, message="decoding is greedy, so there is one output; leave it out or give 1"),
    WithJsonSchema({"enum": [None, 1]}),
]


# -- requests ------------------------------------------------------------------------------------------------------


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _limit_fields(cls, data: Any) -> Any:
        """Limit the number of fields: every unknown one would be reported."""
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"{len(data)} fields are too many; the limit is {MAX_FIELDS}")
        return data


class CapOptions(_Body):
    """A hard cap on the expert; `money` needs a server with prices."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": [name]} for name in ("tokens", "passes", "money")]}
    )
    tokens: UpToMany = Field(NOT_GIVEN, description="that the expert writes, at most")
    passes: UpToMany = Field(NOT_GIVEN, description="how often the expert is asked, at most")
    money: float = Field(
        NOT_GIVEN, ge=0.0, le=1e12, description="for the expert, at most, in the currency of the server"
    )
    per: Literal["sequence", "request"] = "sequence"
    policy: Literal["cut-off", "rising"] = "rising"

    @model_validator(mode="after")
    def _check_limit(self) -> Self:
        if not self.model_fields_set & {"tokens", "passes", "money"}:
            raise ValueError("a cap limits nothing; give tokens, passes or money")
        return self

    def cap(self) -> Cap:
        return Cap(self.tokens, self.passes, self.money, self.per, self.policy)


class DeferralOptions(_Body):
    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "not": {"required": ["budget", "budget_money"]}})
    budget: float = Field(NOT_GIVEN, ge=0.0, le=1.0, description="share of the tokens that the expert may write")
    budget_money: float = Field(
        NOT_GIVEN,
        ge=0.0,
        le=1e12,
        description="money for a sequence, about, instead of a share; needs a server with prices",
    )
    cap: CapOptions | None = None

    @model_validator(mode="after")
    def _check_given(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("it is empty; give budget, budget_money or cap")
        if {"budget", "budget_money"} <= self.model_fields_set:
            raise ValueError("give either budget or budget_money")
        return self


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class ModelRequest(_Body):
    """Base of all requests to a model."""

    model: str
    user: Ignored = None

    @property
    @abstractmethod
    def options(self) -> DeferralOptions:
        """What is asked for outside of the model's name; all None where nothing is."""

    @abstractmethod
    def inputs(self, codec: Codec) -> list[Any]:
        """Return the inputs for the codec."""

    def remarks(self, codec: Codec) -> list[str]:
        """Return remarks on how the inputs are read."""
        return []


class _JSONRequest(ModelRequest):
    deferral: DeferralOptions | None = None

    @property
    def options(self) -> DeferralOptions:
        return self.deferral or DeferralOptions.model_construct()


class _OpenAIRequest(_JSONRequest):
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = None
    stop: Stops = Field([], validate_default=False)
    temperature: Greedy = None
    # The next two make no difference to greedy decoding.
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    seed: Integer | None = None
    n: Single = None
    frequency_penalty: Unsupported = None
    presence_penalty: Unsupported = None
    logit_bias: Unsupported = None
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    reasoning_effort: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None

    @property
    @abstractmethod
    def n_likeliest(self) -> int | None:
        """How many tokens to tell the log-probabilities of, beside the written one; None: none at all."""

    def echoed(self, codec: Codec) -> list[str]:
        """Return the texts that responses begin with; none unless a request asks for them."""
        return []


class CompletionRequest(_OpenAIRequest):
    model_config = ConfigDict(json_schema_extra={"allOf": [ECHO_SCHEMA]})
    prompt: Prompts
    logprobs: UpTo5 | None = None  # 0 asks for those of the written tokens alone
    best_of: Single = None
    echo: bool | None = None
    suffix: Unsupported = None

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise ValueError("log-probabilities of prompts are not supported; give either echo or logprobs")
        return self

    @property
    def n_likeliest(self) -> int | None:
        return self.logprobs

    def inputs(self, codec: Codec) -> list[Any]:
        try:
            return [one if isinstance(one, str) else codec.from_ids(one) for one in self.prompt]
        except InputError as error:
            raise APIError(400, str(error), param="prompt") from error

    def echoed(self, codec: Codec) -> list[str]:
        if not self.echo:
            return []
        self.inputs(codec)  # raises where a prompt has ids that are none
        return [one if isinstance(one, str) else codec.text(one) for one in self.prompt]


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class TextFormat(_Body):
    type: Literal["text"]


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])
    ]
    name: str | None = None
    refusal: Unsupported = None

    @property
    def template_role(self) -> str:
        return "system" if self.role == "developer" else self.role  # OpenAI's new name for the same role

    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatRequest(_OpenAIRequest):
    """The messages are one input: the codec applies the model's chat template, or joins their texts."""

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: UpTo20 | None = None
    tools: Unsupported = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[
        TextFormat | None, _only(None, {"type": "text"}, message="the output is plain text; leave it out")
    ] = None

    @property
    def n_likeliest(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs or self.top_logprobs else None

    def inputs(self, codec: Codec) -> list[Any]:
        return [codec.chat([{"role": one.template_role, "content": one.text()} for one in self.messages])]

    def remarks(self, codec: Codec) -> list[str]:
        has_roles = len(self.messages) > 1 or self.messages[0].template_role == "system"
        return [NO_ROLES_REMARK] if has_roles and not codec.knows_roles else []


class _DeferralRequest(_JSONRequest):
    """Inputs of the model's own type (a text, a list of cities): `input` is one, `inputs` is a list."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["input"]}, {"required": ["inputs"]}]})
    input: Input = None
    several: Inputs = Field([], alias="inputs", min_length=1)

    @model_validator(mode="after")
    def _check_one_given(self) -> Self:
        if ("input" in self.model_fields_set) == ("several" in self.model_fields_set):
            raise ValueError("give either input (one) or inputs (a list)")
        return self

    def inputs(self, codec: Codec) -> list[Any]:
        return self.several or [self.input]


class CompleteRequest(_DeferralRequest):
    """Write for `input` or `inputs` of any type; the response has the author of every token."""

    stream: bool | None = None


class ScoreRequest(_DeferralRequest):
    """Score where the rejector would defer in what the predictor writes, without calling the expert."""


# -- names, budgets, lengths ---------------------------------------------------------------------------------------


def name_pattern(name: str) -> str:
    """Return a regular expression for the names of the model. `re.escape` would escape more than JSON Schema allows."""
    literal = re.sub(r"([\\^$.|?*+()\[\]{}])", r"\\\1", name)
    return f"^{literal}({SEPARATOR}{BUDGET_PATTERN})?$"


def requested_budget(request: ModelRequest, name: str) -> float | None:
    """Return the budget of `deferral` or of NAME@BUDGET, if any. Raises APIError for another model, or two budgets."""
    model, separator, suffix = request.model.rpartition(SEPARATOR) if request.model != name else (name, "", "")
    if not separator:
        model = request.model
    if model != name:
        raise unknown_model(request.model, name)
    in_name = _parse_budget(suffix) if separator else None
    options = request.options
    in_field = options.budget if options.budget_money is None else options.budget_money
    if in_name is not None and in_field is not None:
        message = f"the model's name gives a budget of {in_name:g}, and deferral one of {in_field:g}; give it once"
        raise APIError(400, message, param="deferral")
    return in_name if options.budget is None else options.budget


def _parse_budget(text: str) -> float:
    if re.fullmatch(BUDGET_PATTERN, text) is None:
        message = f"the budget {text!r:.40} in the model's name is not a number from 0 to 1"
        raise APIError(400, message, param="model")
    return float(text)


def unknown_model(model: str, name: str) -> APIError:
    message = f"unknown model {model!r:.100}; available: {name!r}, or with a budget {name + '@0.20'!r}"
    return APIError(404, message, code="model_not_found", param="model")


def max_tokens(request: CompletionRequest | ChatRequest, length: int) -> tuple[int, list[str]]:
    """Return the first limit given, at most the model's length, and a remark if it was lowered."""
    limits = {param: getattr(request, param, None) for param in ("max_completion_tokens", "max_tokens")}
    given = {param: value for param, value in limits.items() if value is not None}
    for param, value in given.items():
        if value < 1:
            raise APIError(400, f"{param} is {value}; give 1 or more, or leave it out", param=param)
    param, value = next(iter(given.items()), ("", length))
    if value <= length:
        return value, []
    return length, [f"{param} is {value}; this model writes at most {length} tokens"]
