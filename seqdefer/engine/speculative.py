"""Speculative deferral: the tokens of the interleaved loop, in another order of work.

The predictor runs ahead. At a deferred position it goes on with its own token, as a guess. One pass of the expert then
reads what the rows with open questions have written since they last asked, and names its token at every question. Where
it differs from the guess, it is written and the row goes back to it; elsewhere the guess was right. Rows therefore
stand at their own positions; a row that ends leaves at once, and another may take its place between two turns.

Without deferral the expert never runs. With deferral everywhere this is lossless speculative decoding.

    loop = speculative_loop(predictor, expert, policy, spec)
    rows = loop.admit(examples)
    while loop.rows:
        loop.turn()
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seqdefer.engine.pace import AT_MOST, Pace, Turn
from seqdefer.engine.rows import StateRows, rows_of_expert, rows_of_predictor
from seqdefer.interfaces import NextTokenExpert, Policy, Predictor
from seqdefer.rows import Chunk, ExpertRows, PredictorRows
from seqdefer.types import EXPERT, PREDICTOR, Examples, Proposal, Rollout, Sequences, SequenceSpec

SHOWN_SECONDS = 0.05  # a turn without open questions ends after these: what is settled can be shown


@dataclass
class Work:
    """What a loop has done so far."""

    predictor_steps: int = 0  # batches
    expert_passes: int = 0  # batches
    chunks: int = 0  # that rows asked the expert with
    tokens_read: int = 0  # by the expert
    taken_back: int = 0  # tokens that the predictor wrote for nothing


@dataclass
class RowWritten:
    """A row as far as it is written. All of it is settled between two turns."""

    number: int  # counts the rows in the order in which they came
    tokens: list[Any] = field(default_factory=list)
    authors: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    is_over: bool = False
    n_read: int = 0  # tokens that the expert has read


@dataclass
class _Guesses:
    """What a row wrote in a turn, none of it settled."""

    row: RowWritten
    tokens: list[Any]
    scores: list[float]
    questions: list[int]  # deferred positions of this turn
    asked: list[int] = field(default_factory=list)  # the first of them

    @property
    def unread(self) -> list[Any]:
        """The tokens before the last question asked that the expert has not read."""
        return [*self.row.tokens[self.row.n_read :], *self.tokens[: self.asked[-1]]]

    def chunk(self, place: int) -> Chunk:
        begin = len(self.row.tokens) - self.row.n_read
        guesses = [self.tokens[step] for step in self.asked]
        return Chunk(place, self.unread, [begin + step for step in self.asked], guesses)


class SpeculativeLoop:
    """Rows that are written together. `admit` adds some at any time between two turns, `drop` ends some.

    `policy` decides for all rows; the policy that a row is admitted with starts its state, so that rows may have
    thresholds of their own. `pace` says how far a turn goes."""

    def __init__(
        self,
        predictor: PredictorRows,
        expert: ExpertRows,
        policy: Policy[Any],
        spec: SequenceSpec,
        pace: Pace | None = None,
    ) -> None:
        self.predictor, self.expert, self.policy, self.spec = predictor, expert, policy, spec
        self.pace = Pace() if pace is None else pace
        self.policies: StateRows[Any] = StateRows(policy.select, policy.join, AT_MOST)
        self.rows: list[RowWritten] = []
        self.work, self._n_admitted, self._device = Work(), 0, torch.device("cpu")

    @torch.no_grad()
    def admit(self, examples: Examples, policy: Policy[Any] | None = None) -> list[RowWritten]:
        """Add rows. Where a model fails to read them, none is added."""
        context = self.predictor.admit(examples.inputs)
        self._device = context.device
        try:
            state = (policy or self.policy).start(context)
            self.expert.admit(examples)
        except BaseException:
            self.predictor.keep(torch.arange(len(self.rows), device=context.device))
            raise
        self.policies.admit(state, len(examples), context.device)
        new = [RowWritten(self._n_admitted + place) for place in range(len(examples))]
        self._n_admitted += len(new)
        self.rows += new
        return new

    def drop(self, rows: list[RowWritten]) -> None:
        """End rows."""
        for row in rows:
            row.is_over = True
        self._keep_going()

    @torch.no_grad()
    def turn(self) -> list[RowWritten]:
        """Write more tokens of every row. Return the rows, some of which are now over and have left."""
        start, turned, turn = time.perf_counter(), self.rows, Turn(rows=len(self.rows))
        begin = [len(row.tokens) for row in turned]
        guesses, steps = self._run_ahead(begin, turn)
        self._ask(guesses, turn)
        turn.written = sum(len(row.tokens) for row in turned) - sum(begin)
        self.work.taken_back += sum(len(one.tokens) for one in guesses) - turn.written
        going = self._keep_going()
        if self.rows:
            kept = [(begin[place], turned[place]) for place in going]
            back = [before + steps - len(row.tokens) for before, row in kept]
            self.predictor.go_back(back)
            self.policies.go_back(back)
            self.predictor.append(self._tensor([row.tokens[-1] for row in self.rows]))
        turn.seconds = time.perf_counter() - start
        self.pace.note(turn)
        return turned

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self._device)

    # -- the predictor ---------------------------------------------------------------------------------------------

    def _run_ahead(self, begin: list[int], turn: Turn) -> tuple[list[_Guesses], int]:
        """Write tokens of every row, all of them guesses. Return them, and the number of steps.

        The last ones are not read yet: the expert may change them."""
        start, length = time.perf_counter(), self.spec.length
        positions, columns = self._tensor(begin), list[tuple[Tensor, Tensor, Tensor]]()
        furthest = min(begin) if self.predictor.runs_past_end else max(begin)
        most = min(self.pace.most_steps(), AT_MOST, length - furthest)
        progress = _Progress(self, len(begin))
        for step in range(most):
            proposal = self.predictor.propose()
            here = (positions + step).clamp(max=length - 1)
            columns.append((proposal.tokens, *self._decide(here, proposal)))
            if not self.predictor.runs_past_end and bool(self.spec.is_end(proposal.tokens).any()):
                break
            if step + 1 == most or not self.pace.goes_on(progress.useful(here, *columns[-1])):
                break
            if progress.is_settled and time.perf_counter() - start > SHOWN_SECONDS:
                break
            self.predictor.append(proposal.tokens)
        tokens, scores, defer = (torch.stack(parts, 1).tolist() for parts in zip(*columns, strict=True))
        turn.steps, turn.step_seconds = len(columns), time.perf_counter() - start
        self.work.predictor_steps += len(columns)
        guesses = [self._own(*parts) for parts in zip(self.rows, tokens, scores, defer, strict=True)]
        turn.proposed = sum(len(one.tokens) for one in guesses)
        turn.deferred = sum(len(one.questions) for one in guesses)
        return guesses, len(columns)

    def _decide(self, positions: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        scores, defer = list[Tensor](), list[Tensor]()

        def decide(state: Any, rows: Tensor) -> Any:
            is_all = len(rows) == len(positions)
            here = (positions, proposal) if is_all else (positions[rows], proposal.select(rows))
            own, wanted, state = self.policy.decide(state, *here)
            scores.append(own)
            defer.append(wanted)
            return state

        self.policies.advance(decide)
        if len(scores) == 1:
            return scores[0], defer[0]
        order = self.policies.order()
        return torch.cat(scores)[order], torch.cat(defer)[order]

    def _own(self, row: RowWritten, tokens: list[Any], scores: list[float], defer: list[bool]) -> _Guesses:
        """Return the guesses that belong to a row's sequence."""
        tokens = tokens[: self.spec.length - len(row.tokens)]
        if self.spec.end in tokens:
            tokens = tokens[: tokens.index(self.spec.end) + 1]
        return _Guesses(row, tokens, scores, [step for step in range(len(tokens)) if defer[step]])

    # -- the expert ------------------------------------------------------------------------------------------------

    def _ask(self, guesses: list[_Guesses], turn: Turn) -> None:
        """Ask the expert at open questions, and settle all rows."""
        asking = [(place, one) for place, one in enumerate(guesses) if one.questions]
        for _, one in asking:
            self._choose_questions(one, len(asking))
        answers: list[list[Any]] = [[] for _ in guesses]
        if asking:
            chunks = [one.chunk(place) for place, one in asking]
            start, read_before = time.perf_counter(), self.expert.tokens_read
            for (place, _), answer in zip(asking, self.expert.read(chunks), strict=True):
                answers[place] = answer
            turn.pass_seconds = time.perf_counter() - start
            turn.passes, turn.chunks = 1, len(chunks)
            turn.tokens_read = self.expert.tokens_read - read_before
            turn.inputs_read = max(turn.tokens_read - sum(len(chunk.tokens) for chunk in chunks), 0)
            self.work.expert_passes += 1
            self.work.chunks += len(chunks)
            self.work.tokens_read += turn.tokens_read
        back = [self._settle(one, answer, turn) for one, answer in zip(guesses, answers, strict=True)]
        if any(back):
            self.expert.go_back(back)

    def _choose_questions(self, one: _Guesses, rows: int) -> None:
        """Choose how far the expert reads. A question that waits ends the row for this turn: the predictor comes back
        to it."""
        for number, step in enumerate(one.questions):
            gap = step - one.questions[number - 1] if number else 0
            if not self.pace.reads_on(number, gap, rows):
                one.tokens = one.tokens[:step]
                return
            one.asked.append(step)

    def _settle(self, one: _Guesses, answers: list[Any], turn: Turn) -> int:
        """Write a row as far as it is right. Return how many tokens of its chunk the expert has read for nothing."""
        row, begin, back = one.row, len(one.row.tokens), 0
        row.n_read += len(one.unread) if one.asked else 0
        for step, answer in zip(one.asked, answers, strict=True):
            turn.asked += 1
            if answer != one.tokens[step]:
                one.tokens = [*one.tokens[:step], answer]
                back = row.n_read - (begin + step)
                row.n_read -= back
                break
            turn.agreed += 1
        row.tokens += one.tokens
        n, deferred = len(one.tokens), set(one.questions)
        row.authors += [EXPERT if step in deferred else PREDICTOR for step in range(n)]
        row.scores += one.scores[:n]
        row.is_over = len(row.tokens) == self.spec.length or row.tokens[-1] == self.spec.end
        return back

    def _keep_going(self) -> list[int]:
        """Let rows that are over leave; return the places of the others."""
        going = [place for place, row in enumerate(self.rows) if not row.is_over]
        if len(going) < len(self.rows):
            kept = torch.tensor(going, dtype=torch.long, device=self._device)
            self.predictor.keep(kept)
            self.policies.keep(kept)
            self.expert.keep(kept)
            self.rows = [self.rows[place] for place in going]
        return going


class _Progress:
    """How many tokens the next step of a turn is expected to gain, and whether no question is open. On a GPU, looking
    at decisions would hold up the work that follows, so usual ones are assumed."""

    def __init__(self, loop: SpeculativeLoop, n: int) -> None:
        self.spec, self.pace = loop.spec, loop.pace
        self.weights = torch.ones(n) if loop._device.type == "cpu" else None
        self.expected, self.is_settled = float(n), loop._device.type == "cpu"

    def useful(self, positions: Tensor, tokens: Tensor, scores: Tensor, defer: Tensor) -> float:
        agreement = self.pace.agreement
        if self.weights is None:
            self.expected *= 1 - self.pace.share * (1 - agreement)
            return self.expected
        self.weights[defer] *= agreement
        self.is_settled &= not bool(defer.any())
        self.weights[self.spec.is_end(tokens) | (positions + 1 >= self.spec.length)] = 0
        return float(self.weights.sum())


def speculative_loop(
    predictor: Predictor[Any],
    expert: NextTokenExpert[Any],
    policy: Policy[Any],
    spec: SequenceSpec,
    pace: Pace | None = None,
) -> SpeculativeLoop:
    """Return a loop without rows."""
    return SpeculativeLoop(rows_of_predictor(predictor), rows_of_expert(expert), policy, spec, pace)


def run_all(loop: SpeculativeLoop, examples: Examples, at_once: int | None = None) -> Rollout:
    """Write all rows, `at_once` at a time: others take the place of those that end."""
    rows, n, at_once = list[RowWritten](), len(examples), at_once or len(examples)
    while loop.rows or len(rows) < n:
        free = min(at_once - len(loop.rows), n - len(rows))
        if free:
            rows += loop.admit(examples.select(torch.arange(len(rows), len(rows) + free, device=examples.ids.device)))
        loop.turn()
    return collect(rows, loop.spec)


def collect(rows: list[RowWritten], spec: SequenceSpec) -> Rollout:
    """Return rows that are over as a rollout, on the CPU."""

    def padded(lists: Iterator[list[Any]]) -> Tensor:
        return torch.tensor([[*one, *[0] * (spec.length - len(one))] for one in lists])

    lengths = torch.tensor([len(row.tokens) for row in rows])
    return Rollout(
        Sequences(padded(row.tokens for row in rows), lengths),
        padded(row.authors for row in rows),
        padded(row.scores for row in rows).float(),
    )
