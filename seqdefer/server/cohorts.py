"""Cohorts: requests whose inputs are written together in one batch, each with its own threshold.

Rows of a batch are independent, so every request gets the tokens that it would get alone. A cohort delivers tokens to
each request until all its sequences end. When no request of a cohort is left, it closes and its caches are freed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from seqdefer.interfaces import Codec
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.fallback import CooperativeThread, ExpertCaller, FallbackExpert
from seqdefer.server.plans import CohortPlan, CohortStep
from seqdefer.types import Examples, SequenceSpec

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class WriteRequest:
    """What one request asks the models to write."""

    inputs: Sequence[Any]
    threshold: float
    max_tokens: int
    may_defer: bool = True  # False: only score the predictor's sequence
    is_streamed: bool = False  # False: events may be delivered together at the end


@dataclass(frozen=True)
class InputsRead:
    """The first event of a request: the length of each input, and remarks on how the inputs were read."""

    input_tokens: list[int]
    remarks: list[str]


@dataclass(frozen=True)
class Token:
    """One token of one of the inputs."""

    index: int
    position: int
    token: Any
    text: str  # what it adds; empty while a character is incomplete
    author: str
    score: float
    defer: bool  # the rejector's decision, even if the expert failed
    finish: FinishReason | None  # for the last token
    degraded: str | None  # why the expert failed to write this token or an earlier one


@dataclass(frozen=True)
class Failed:
    """The last event of a request that failed."""

    error: Exception


Event = InputsRead | Token | Failed


class Recipient(Protocol):
    """A request as its cohort sees it."""

    request: WriteRequest
    is_cancelled: bool

    def deliver(self, events: Sequence[Event], made_at: float) -> None: ...


@dataclass(frozen=True)
class EncodedInputs:
    """The inputs of one request as examples."""

    examples: Examples
    event: InputsRead


def encode_inputs(codec: Codec, inputs: Sequence[Any]) -> EncodedInputs:
    """Encode the inputs of one request, turning warnings into remarks. Raises InputError."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        joined = codec.encode(inputs)
    with warnings.catch_warnings():  # caught above
        warnings.simplefilter("ignore")
        # Encoded alone, an input has no padding, and its width is its length.
        single = [joined] if len(inputs) == 1 else [codec.encode([one]) for one in inputs]
    lengths = [one.inputs.shape[1] if one.inputs.ndim > 1 else 1 for one in single]
    return EncodedInputs(joined, InputsRead(lengths, sorted({str(warning.message) for warning in caught})))


def _join(codec: Codec, members: Sequence[tuple[Recipient, EncodedInputs]]) -> Examples:
    if len(members) == 1:
        examples = members[0][1].examples
    else:
        inputs = [one for recipient, _ in members for one in recipient.request.inputs]
        with warnings.catch_warnings():  # each request has its remarks already
            warnings.simplefilter("ignore")
            examples = codec.encode(inputs)
    return replace(examples, ids=torch.arange(len(examples)))  # FallbackExpert finds drafts by these


@dataclass
class _Row:
    """One sequence and the request that it belongs to."""

    recipient: Recipient
    index: int  # among the inputs of its request
    tokens: list[Any] = field(default_factory=list)
    text: str = ""
    is_finished: bool = False

    @property
    def is_active(self) -> bool:
        return not (self.is_finished or self.recipient.is_cancelled)

    def finish_reason(self, spec: SequenceSpec, is_end: bool) -> FinishReason | None:
        """Return why the sequence ends after its last token, or None if it does not."""
        n = len(self.tokens)
        if is_end or (spec.end is None and n == spec.length):
            return "stop"
        return "length" if n >= min(spec.length, self.recipient.request.max_tokens) else None

    def new_text(self, codec: Codec, *, is_last: bool) -> str:
        """Return what the last token adds to the text."""
        added = codec.added(self.tokens, self.text, is_last=is_last)
        self.text += added
        return added


class Cohort:
    """A batch of requests at work.

    The constructor runs no model: `advance` does all the work. With an expert that waits, the cohort runs in `thread`
    and is not ready to advance while it waits."""

    def __init__(
        self,
        model: DeferringModel,
        members: Sequence[tuple[Recipient, EncodedInputs]],
        call: ExpertCaller,
        thread: CooperativeThread | None = None,
    ) -> None:
        self.model, self.members, self.call, self.thread = model, list(members), call, thread
        self.has_delivered = False
        self._rows = [_Row(one, index) for one, _ in members for index in range(len(one.request.inputs))]
        self._guard: FallbackExpert | None = None
        self._steps = self._write()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_active(self) -> bool:
        """Whether a request still needs tokens."""
        return any(row.is_active for row in self._rows)

    @property
    def is_ready(self) -> bool:
        return self.thread is None or not self.thread.is_waiting

    @property
    def failure(self) -> Exception | None:
        """The expert's exception, if any."""
        return self._guard.error if self._guard else None

    def advance(self) -> None:
        """Write one position, or as much of it as possible without waiting, and deliver it. Raises what the predictor
        raises."""
        if self.thread is None:
            self._advance()
        else:
            self.thread.run(self._advance)

    def _advance(self) -> None:
        step = next(self._steps, None)
        if step is None:
            raise RuntimeError("the engine stopped before all sequences had ended")
        self._deliver(step, time.perf_counter())

    def close(self) -> None:
        """Free the caches of both models; if the expert is waiting, as soon as its call returns."""
        if self.thread is not None:
            self.thread.close()
            self.call.close()
        if self.thread is None or self.thread.is_idle:
            self._steps.close()
        if self._guard is not None:
            self._guard.proposed = None

    def _write(self) -> Generator[CohortStep, None, None]:
        requests = [row.recipient.request for row in self._rows]
        thresholds = [request.threshold for request in requests]
        may_defer = torch.tensor([request.may_defer for request in requests])
        examples = _join(self.model.served.codec, self.members)
        plan = CohortPlan(self.model, examples, thresholds, may_defer, self.call)
        self._guard = plan.guard
        yield from plan.steps(self._inactive_rows)

    def _inactive_rows(self) -> Tensor:
        return torch.tensor([not row.is_active for row in self._rows]).nonzero().squeeze(1)

    def _deliver(self, cohort_step: CohortStep, made_at: float) -> None:
        step = cohort_step.written
        tokens, ends = step.tokens.tolist(), self.model.served.spec.is_end(step.tokens).tolist()
        parts = (step.authors, step.scores, step.active, step.wanted, cohort_step.missed)
        authors, scores, active, wanted, missed = (part.tolist() for part in parts)
        events: dict[int, list[Event]] = {}
        for place, row in enumerate(self._rows):
            if not (active[place] and row.is_active):
                continue
            row.tokens.append(tokens[place])
            finish = row.finish_reason(self.model.served.spec, ends[place])
            text = row.new_text(self.model.served.codec, is_last=finish is not None)
            row.is_finished = finish is not None
            reason = self._guard.reason if self._guard and missed[place] else None
            token = Token(
                row.index, step.position, tokens[place], text, self.model.served.authors[authors[place]],
                scores[place], wanted[place], finish, reason,
            )  # fmt: skip
            events.setdefault(id(row.recipient), []).append(token)
        for recipient, encoded in self.members:
            first: list[Event] = [] if self.has_delivered else [encoded.event]
            recipient.deliver([*first, *events.get(id(recipient), [])], made_at)
        self.has_delivered = True
