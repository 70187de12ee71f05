"""OpenAI's transcriptions: the form of an upload, and the responses, whole or streamed.

Fields of OpenAI's API that would change the output and are not supported (a prompt, timestamps, log-probabilities,
another temperature than 0) are refused, and so are unknown ones. Who wrote which token is in `deferral`: in every event
of a stream, and with response_format=verbose_json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Self

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from seqdefer.interfaces import Codec
from seqdefer.server import protocol
from seqdefer.server.http import APIError
from seqdefer.server.openapi import RouteResponses, Schema, stream_responses
from seqdefer.server.responses import Transcript, token_details
from seqdefer.server.shapes import Deferral, Shape, TokenDetails
from seqdefer.server.tickets import Token

FORM = "multipart/form-data"
FORM_HINT = f"send {FORM} with the fields file and model"


# -- requests ------------------------------------------------------------------------------------------------------


class TranscriptionRequest(protocol.ModelRequest):
    """The fields of a form."""

    model_config = ConfigDict(strict=False, populate_by_name=False)  # a form has only texts and files
    file: Annotated[bytes, WithJsonSchema({"type": "string", "format": "binary", "description": "a WAV or FLAC file"})]
    # OpenAI's client writes extra_body={"deferral": {"budget": 0.2}} so into a form.
    budget: float | None = Field(None, ge=0.0, le=1.0, alias="deferral[budget]")
    budget_money: float | None = Field(None, ge=0.0, le=1e12, alias="deferral[budget_money]")
    cap_tokens: int | None = Field(None, ge=0, le=2**31, alias="deferral[cap][tokens]")
    cap_passes: int | None = Field(None, ge=0, le=2**31, alias="deferral[cap][passes]")
    cap_money: float | None = Field(None, ge=0.0, le=1e12, alias="deferral[cap][money]")
    cap_per: Literal["sequence", "request"] = Field("sequence", alias="deferral[cap][per]")
    cap_policy: Literal["cut-off", "rising"] = Field("rising", alias="deferral[cap][policy]")
    language: str | None = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Annotated[float, AfterValidator(protocol.check_greedy), WithJsonSchema({"const": 0})] = 0.0
    stream: bool = False
    prompt: protocol.Unsupported = None
    chunking_strategy: Literal["auto"] | None = None  # a clip is one chunk
    include: protocol.Unsupported = Field(None, alias="include[]")
    timestamps: protocol.Unsupported = Field(None, alias="timestamp_granularities[]")

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.stream and self.response_format == "verbose_json":
            raise ValueError("a stream has events of its own; leave out response_format or stream")
        if self.budget is not None and self.budget_money is not None:
            raise ValueError("give either deferral[budget] or deferral[budget_money]")
        if self.options.cap is None and self.model_fields_set & {"cap_per", "cap_policy"}:
            raise ValueError("a cap limits nothing; give deferral[cap][tokens], [passes] or [money]")
        return self

    @property
    def options(self) -> protocol.DeferralOptions:
        given = protocol.DeferralOptions.model_construct(budget=self.budget, budget_money=self.budget_money)
        limits: dict[str, Any] = {"tokens": self.cap_tokens, "passes": self.cap_passes, "money": self.cap_money}
        if any(limit is not None for limit in limits.values()):
            given.cap = protocol.CapOptions.model_construct(**limits, per=self.cap_per, policy=self.cap_policy)
        return given

    def inputs(self, codec: Codec) -> list[Any]:
        if codec.language is not None and self.language not in (None, "", codec.language):
            message = f"language is {self.language!r:.40}; this model writes {codec.language!r}: leave it out"
            raise APIError(400, message, param="language")
        return [self.file]


async def read_form(request: Request) -> TranscriptionRequest:
    """Read an upload. Raises APIError for what is not a form, and RequestValidationError for its fields."""
    found = request.headers.get("content-type", "")
    if found.partition(";")[0].strip().lower() != FORM:
        raise APIError(415, f"the content-type is {found!r:.100}; {FORM_HINT}", code="unsupported_format")
    try:
        async with request.form(max_files=1, max_fields=protocol.MAX_FIELDS) as form:
            _refuse_repeats([name for name, _ in form.multi_items()])
            fields = {name: await one.read() if isinstance(one, UploadFile) else one for name, one in form.items()}
    except (HTTPException, ValueError) as error:  # ValueError: a charset that cannot decode, such as `undefined`
        reason = error.detail if isinstance(error, HTTPException) else str(error)
        raise APIError(400, f"the form cannot be read: {reason.rstrip('.')}; {FORM_HINT}") from error
    if isinstance(fields.get("file"), str):
        raise APIError(400, "file is a text; send the content of a file, with a file name", param="file")
    try:
        return TranscriptionRequest.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in problems]) from error


def _refuse_repeats(names: Sequence[str]) -> None:
    """Refuse a field that is there twice: one of two caps would be ignored. A list, NAME[], may be."""
    for name in names:
        if names.count(name) > 1 and not name.endswith("[]"):
            raise APIError(400, f"the field {name!r:.80} is given more than once; give it once", param=name[:80])


def no_audio(name: str) -> APIError:
    message = f"the model {name!r} does not take audio; use /v1/completions or /v1/deferral/complete"
    return APIError(404, message, code="no_audio")


# -- responses -----------------------------------------------------------------------------------------------------


class _Authors(Shape):
    predictor_tokens: int
    expert_tokens: int
    switches: int


class InputTokenDetails(Shape):
    text_tokens: int
    audio_tokens: int


class TokenUsage(_Authors):
    """`input_tokens`: states of the encoder that the clip fills."""

    type: Literal["tokens"]
    input_tokens: int
    input_token_details: InputTokenDetails
    output_tokens: int
    total_tokens: int


class DurationUsage(_Authors):
    type: Literal["duration"]
    seconds: float


class VerboseDeferral(Deferral):
    tokens: list[TokenDetails]


class Transcription(Shape):
    text: str
    usage: TokenUsage
    deferral: Deferral


class VerboseTranscription(Shape):
    task: Literal["transcribe"]
    language: NotRequired[str]
    duration: float
    text: str
    usage: DurationUsage
    deferral: VerboseDeferral


@dataclass(frozen=True)
class TranscriptionFormat:
    """OpenAI's format of transcriptions; a stream has `transcript.text.delta` events and one `transcript.text.done`."""

    codec: Codec
    response_format: Literal["json", "text", "verbose_json"]

    def whole(self, transcript: Transcript) -> dict[str, Any] | str:
        text = self._text(transcript)
        if self.response_format == "text":
            return f"{text}\n"
        if self.response_format == "json":
            return {"text": text, "usage": _token_usage(transcript), "deferral": transcript.deferral()}
        language = {} if self.codec.language is None else {"language": self.codec.language}
        tokens = [token_details(token) for token in transcript.tokens[0]]
        assert self.codec.sample_rate is not None
        seconds = transcript.input_tokens * self.codec.columns_per_token / self.codec.sample_rate
        return {
            "task": "transcribe",
            **language,
            "duration": seconds,
            "text": text,
            "usage": {"type": "duration", "seconds": seconds, **_authors(transcript)},
            "deferral": {**transcript.deferral(), "tokens": tokens},
        }

    def chunk(self, token: Token, transcript: Transcript) -> dict[str, Any]:
        """Return the event of one token. The space before the first word is left out, as from the whole text."""
        begins = not transcript.texts[0][: len(transcript.texts[0]) - len(token.text)].strip()
        details: dict[str, Any] = {**token_details(token)}
        del details["text"]
        delta = token.text.lstrip() if begins else token.text
        return {"type": "transcript.text.delta", "delta": delta, "deferral": details}

    def usage_chunk(self, transcript: Transcript) -> dict[str, Any]:
        done = {"type": "transcript.text.done", "text": self._text(transcript)}
        return {**done, "usage": _token_usage(transcript), "deferral": transcript.deferral()}

    def _text(self, transcript: Transcript) -> str:
        return str(self.codec.decode([token.token for token in transcript.tokens[0]]))


def _authors(transcript: Transcript) -> dict[str, int]:
    usage = transcript.usage()
    return {name: usage[name] for name in ("predictor_tokens", "expert_tokens", "switches")}


def _token_usage(transcript: Transcript) -> dict[str, Any]:
    usage = transcript.usage()
    return {
        "type": "tokens",
        "input_tokens": usage["prompt_tokens"],
        "input_token_details": {"text_tokens": 0, "audio_tokens": usage["prompt_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
        **_authors(transcript),
    }


# -- the description -----------------------------------------------------------------------------------------------


def form_schema(name: str, codec: Codec, *, has_prices: bool) -> Schema:
    """Describe the form for OpenAPI, narrowed to the served model."""
    schema = TranscriptionRequest.model_json_schema(by_alias=True)
    schema["properties"]["model"] = {"type": "string", "pattern": protocol.name_pattern(name), "examples": [name]}
    if not has_prices:
        del schema["properties"]["deferral[budget_money]"], schema["properties"]["deferral[cap][money]"]
    if codec.language is not None:
        schema["properties"]["language"] = {"enum": ["", codec.language]}
    return {"requestBody": {"required": True, "content": {FORM: {"schema": schema}}}}


def transcription_responses() -> RouteResponses:
    responses = stream_responses(Transcription | VerboseTranscription)
    responses[200]["content"]["text/plain"] = {"schema": {"type": "string"}}
    return responses
