"""Plans: how rows are written at their settings, for Python, evaluation and the server.

    plan = TokenPlan(pair, rejector)
    rows = plan.admit(examples, settings)      # more may join at any time
    while plan.rows:
        plan.turn()                            # what it writes is settled: row.tokens, row.authors

`turning` is a turn that hands its questions to the caller, who may do other things until the expert has answered.

Token level, each row has its own threshold, and rows stand at their own positions. One-time, rows that were admitted
together are drafted in one turn, and what comes before their hand-offs is shown; in the next one the expert completes
those that are handed off in one call. A plan may run with other rows than the expert's (which fall back to the
predictor where the expert fails). Rows may be barred from deferring, and then only show where they would; or have a cap
(`budgets.caps`).
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from seqdefer.budgets.capped import Schedule
from seqdefer.budgets.caps import UNLIMITED, Allowance
from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.policies import Threshold
from seqdefer.engine.drafts import HandedOff, completing, draft
from seqdefer.engine.interleaved import not_a_number
from seqdefer.engine.pace import Pace, Turn
from seqdefer.engine.rows import rows_of_expert, rows_of_predictor
from seqdefer.engine.speculative import RowWritten, SpeculativeLoop, Work, collect
from seqdefer.interfaces import DraftRejector, Expert, Predictor, TokenRejector
from seqdefer.rows import Chunk, ExpertRows, run_turn
from seqdefer.types import PREDICTOR, Draft, Examples, Rollout, Sequences, SequenceSpec

BATCH_SIZE = 32  # rows that are written at once, unless callers say otherwise


class Pair(Protocol):
    """A predictor and an expert; tasks and served pairs are pairs."""

    @property
    def predictor(self) -> Predictor[Any]: ...
    @property
    def expert(self) -> Expert: ...
    @property
    def spec(self) -> SequenceSpec: ...


@dataclass(frozen=True)
class ScoredDraft:
    """What was known of a one-time row before its hand-off: the length of its draft, and where other settings would
    hand off (`ScoredHandOffs.steps`)."""

    length: int
    hand_offs: Sequence[tuple[float, int]]

    @property
    def first_setting(self) -> float:
        """The highest setting at which it is handed off."""
        return self.hand_offs[0][0] if self.hand_offs else -math.inf


@dataclass(eq=False)
class PlanRow:
    """A sequence as far as it is written, and the setting that it is written at."""

    setting: float
    may_defer: bool
    written: RowWritten
    wanted: list[bool] = field(default_factory=list)  # by token: whether the rejector wants the expert
    draft: ScoredDraft | None = None  # whole and one-time deferral, once it is written
    allowed: Allowance | None = None  # its cap, if any

    @property
    def is_over(self) -> bool:
        return self.written.is_over

    def is_capped(self, position: int) -> bool:
        """Tell whether the cap kept a token from the expert."""
        is_kept = self.wanted[position] and self.written.authors[position] == PREDICTOR
        return is_kept and self.may_defer and self.allowed is not None


class Plan(ABC):
    """Rows at work. Those that are over have left `rows`."""

    work: Work
    last_turn: Turn  # what it did and took

    def __init__(self) -> None:
        self.rows: list[PlanRow] = []

    def admit(
        self,
        examples: Examples,
        settings: Tensor,
        may_defer: Tensor | None = None,
        allowed: Sequence[Allowance] | None = None,
    ) -> list[PlanRow]:
        """Add rows with `settings` (n,) of their own; `may_defer` (bool (n,)): all by default; `allowed`: caps, none by
        default."""
        may = torch.ones(len(settings), dtype=torch.bool) if may_defer is None else may_defer
        written = self._start(examples, torch.where(may, settings, math.inf), allowed)
        caps = [None] * len(settings) if allowed is None else allowed
        parts = zip(settings.tolist(), may.tolist(), written, caps, strict=True)
        new = [PlanRow(setting, can, row, allowed=cap) for setting, can, row, cap in parts]
        self.rows += new
        return new

    @abstractmethod
    def _start(
        self, examples: Examples, thresholds: Tensor, allowed: Sequence[Allowance] | None
    ) -> Sequence[RowWritten]:
        """Begin rows with nothing written. The thresholds (n,) of those that may not defer are infinite."""

    def turn(self) -> None:
        """Write more of every row."""
        run_turn(self.turning(), self.answer)

    @abstractmethod
    def turning(self) -> Generator[Any, Any, None]:
        """Write more of every row, but yield what the expert is asked: chunks, or drafts to complete (`HandedOff`).
        Send the answer. Until the turn is over, no row may come or be dropped."""

    @abstractmethod
    def answer(self, question: Any) -> Any:
        """Return the expert's answer to a question of `turning`."""

    @abstractmethod
    def drop(self, rows: Sequence[PlanRow]) -> None:
        """End rows that need nothing more."""

    @abstractmethod
    def room(self, at_once: int) -> int:
        """Return how many rows may join now, where `at_once` may run together."""

    def _leave(self) -> None:
        self.rows = [row for row in self.rows if not row.is_over]


class TokenPlan(Plan):
    """Token-level deferral. `pace` learns how far to run ahead, and may be shared by plans of one pair. `schedule` is
    what rising caps go by."""

    def __init__(
        self,
        pair: Pair,
        rejector: TokenRejector[Any],
        *,
        expert_rows: ExpertRows | None = None,
        pace: Pace | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        self.rejector, self.device = rejector, pair.predictor.device
        self.loop = SpeculativeLoop(
            rows_of_predictor(pair.predictor),
            rows_of_expert(pair.expert) if expert_rows is None else expert_rows,
            Threshold(rejector, schedule=schedule),
            pair.spec,
            pace,
        )

    @property
    def work(self) -> Work:  # type: ignore[override]
        return self.loop.work

    def _start(
        self, examples: Examples, thresholds: Tensor, allowed: Sequence[Allowance] | None
    ) -> Sequence[RowWritten]:
        return self.loop.admit(examples.to(self.device), Threshold(self.rejector, thresholds, allowed))

    def turning(self) -> Generator[list[Chunk], list[list[Any]], None]:
        yield from self.loop.turning()
        self.last_turn = self.loop.last_turn
        for row in self.rows:
            row.wanted += [score >= row.setting for score in row.written.scores[len(row.wanted) :]]
        self._leave()

    def answer(self, question: list[Chunk]) -> list[list[Any]]:
        return self.loop.expert.read(question)

    def drop(self, rows: Sequence[PlanRow]) -> None:
        self.loop.drop([row.written for row in rows])
        self._leave()

    def room(self, at_once: int) -> int:
        return at_once - len(self.rows)


@dataclass
class _Drafted:
    """Rows that were admitted together; once drafted, with the tokens that each keeps."""

    rows: list[PlanRow]
    examples: Examples
    draft: Draft | None = None
    wanted: Tensor = field(default_factory=lambda: torch.arange(0))  # tokens to keep before the hand-off
    kept: Tensor = field(default_factory=lambda: torch.arange(0))  # the same within caps
    scores: Tensor = field(default_factory=lambda: torch.zeros(0))


class HandOffPlan(Plan):
    """Whole and one-time deferral. A `schedule` makes no difference: it decides once."""

    def __init__(self, pair: Pair, rejector: DraftRejector, *, schedule: Schedule | None = None) -> None:
        super().__init__()
        self.pair, self.rejector = pair, rejector
        self.work, self._batches, self._n_admitted = Work(), list[_Drafted](), 0
        self.last_turn = Turn()

    def admit(self, examples: Examples, *given: Any, **options: Any) -> list[PlanRow]:
        new = super().admit(examples, *given, **options)
        self._batches.append(_Drafted(new, examples))
        return new

    def _start(
        self, examples: Examples, thresholds: Tensor, allowed: Sequence[Allowance] | None
    ) -> Sequence[RowWritten]:
        first, self._n_admitted = self._n_admitted, self._n_admitted + len(thresholds)
        return [RowWritten(number) for number in range(first, self._n_admitted)]

    def turning(self) -> Generator[HandedOff, Sequences, None]:
        batches, self._batches, turn = self._batches, [], Turn(rows=len(self.rows))
        for batch in batches:
            start = time.perf_counter()
            if batch.draft is None:
                self._write_draft(batch)
                turn.steps += self.pair.spec.length
                turn.step_seconds += time.perf_counter() - start
            else:
                yield from self._hand_off(batch, batch.draft)
                turn.passes, turn.chunks = turn.passes + 1, turn.chunks + len(batch.rows)
                turn.pass_seconds += time.perf_counter() - start
            if any(not row.is_over for row in batch.rows):
                self._batches.append(batch)
        turn.seconds = turn.step_seconds + turn.pass_seconds
        self.last_turn = turn
        self._leave()

    def answer(self, question: HandedOff) -> Sequences:
        return self.pair.expert.complete(question.examples, question.prefixes, self.pair.spec)

    def drop(self, rows: Sequence[PlanRow]) -> None:
        for row in rows:
            row.written.is_over = True
        self._leave()

    def room(self, at_once: int) -> int:
        return 0 if self.rows else at_once  # the expert completes all rows of a batch in one call

    def _write_draft(self, batch: _Drafted) -> None:
        spec = self.pair.spec
        batch.draft = drafted = draft(self.pair.predictor, batch.examples, spec)
        scored = scored_hand_offs(self.rejector, drafted, spec.length)
        settings = torch.tensor([row.setting for row in batch.rows], dtype=torch.float64)
        batch.wanted, batch.scores = torch.from_numpy(scored.kept(settings)), torch.from_numpy(scored.by_position())
        batch.kept = self._within_caps(batch, scored, settings)
        kept = [
            kept if row.may_defer else spec.length for row, kept in zip(batch.rows, batch.kept.tolist(), strict=True)
        ]
        alone = run_turn(self._completing(batch, drafted, torch.full_like(batch.kept, spec.length)), self.answer)
        facts = zip(drafted.sequences.lengths.tolist(), scored.steps(), strict=True)
        for place, (row, fact) in enumerate(zip(batch.rows, facts, strict=True)):
            row.draft = ScoredDraft(*fact)
            if not row.is_over:
                self._show(batch, alone, place, kept[place])

    def _within_caps(self, batch: _Drafted, scored: ScoredHandOffs, settings: Tensor) -> Tensor:
        """Return the tokens to keep: hand off where the rejector wants it or later, if the longest sequence that could
        follow fits the cap."""
        if all(row.allowed is None for row in batch.rows):
            return batch.wanted
        length = self.pair.spec.length
        fits = [
            [kept >= first and (row.allowed or UNLIMITED).allows(kept, length - kept) for kept in scored.grid.tolist()]
            for row, first in zip(batch.rows, batch.wanted.tolist(), strict=True)
        ]
        return torch.from_numpy(scored.kept_within(settings, np.array(fits)))

    def _hand_off(self, batch: _Drafted, drafted: Draft) -> Generator[HandedOff, Sequences, None]:
        """Let the expert complete the rows that are not over: those that are handed off."""
        kept = [
            self.pair.spec.length if row.is_over else kept for row, kept in zip(batch.rows, batch.kept, strict=True)
        ]
        rollout = yield from self._completing(batch, drafted, torch.tensor([int(one) for one in kept]))
        self.work.expert_passes += 1
        self.work.chunks += sum(not row.is_over for row in batch.rows)
        for place, row in enumerate(batch.rows):
            if not row.is_over:
                self._show(batch, rollout, place, self.pair.spec.length)

    def _completing(self, batch: _Drafted, drafted: Draft, kept: Tensor) -> Generator[HandedOff, Sequences, Rollout]:
        return completing(
            self.pair.predictor.device, batch.examples, drafted.sequences, kept, batch.scores.float(), self.pair.spec
        )

    def _show(self, batch: _Drafted, rollout: Rollout, place: int, stop: int) -> None:
        """Write a row up to `stop` as the rollout has it. It is over where the rollout ends before."""
        row, length = batch.rows[place].written, int(rollout.sequences.lengths[place])
        span = slice(len(row.tokens), min(stop, length))
        row.tokens += rollout.sequences.tokens[place, span].tolist()
        row.authors += rollout.authors[place, span].tolist()
        row.scores += rollout.scores[place, span].tolist()
        batch.rows[place].wanted += [at >= int(batch.wanted[place]) for at in range(span.start, span.stop)]
        row.is_over = stop >= length


@dataclass(frozen=True)
class PlanResult:
    """What n rows came to, on the CPU."""

    rollout: Rollout
    wanted: Tensor  # bool (n, L), False past the end
    work: Work
    capped: Tensor  # int64 (n,) tokens that caps kept from the expert


def write_all(
    plan: Plan,
    examples: Examples,
    settings: Tensor,
    spec: SequenceSpec,
    *,
    at_once: int,
    may_defer: bool = True,
    allowed: Sequence[Allowance] | None = None,
) -> PlanResult:
    """Write all rows, `at_once` at a time."""
    rows, n = list[PlanRow](), len(examples)
    while plan.rows or len(rows) < n:
        free = min(plan.room(at_once), n - len(rows))
        if free:
            some = torch.arange(len(rows), len(rows) + free)
            caps = None if allowed is None else allowed[len(rows) : len(rows) + free]
            may = torch.full((free,), may_defer)
            rows += plan.admit(examples.select(some.to(examples.ids.device)), settings[some], may, caps)
        plan.turn()
    wanted = [[*row.wanted, *[False] * (spec.length - len(row.wanted))] for row in rows]
    capped = torch.tensor([sum(row.is_capped(place) for place in range(len(row.wanted))) for row in rows])
    return PlanResult(collect([row.written for row in rows], spec), torch.tensor(wanted), plan.work, capped)


def scored_hand_offs(rejector: DraftRejector, drafted: Draft, length: int) -> ScoredHandOffs:
    """Score drafts, with the rule that the rejector decides by."""
    scores = rejector.score(drafted)
    if bool(scores.isnan().any()):
        raise not_a_number("a draft")
    return ScoredHandOffs.of(
        scores, length, hand_offs=rejector.hand_offs, rule=rejector.rule,
        lengths=drafted.sequences.lengths,
    )  # fmt: skip
