"""Speculative deferral: the tokens of the interleaved loop, in another order of work.

The predictor runs ahead. At a deferred position it goes on with its own token, as a guess. One pass of the expert then
reads what the rows with open questions have written since they last asked, and names its token at every question. Where
it differs from the guess, it is written and the row goes back to it; elsewhere the guess was right. Rows therefore
stand at their own positions; a row that ends leaves at once, and another may take its place between two turns. Where it
costs little, the expert reads to the end of a row's guesses and names the token after them too: if that position is
deferred and the guesses were right, its question is answered before it is asked.

Without deferral the expert never runs. With deferral everywhere this is lossless speculative decoding.

    loop = speculative_loop(predictor, expert, policy, spec)
    rows = loop.admit(examples)
    while loop.rows:
        loop.turn()

`turning` is a turn that hands its questions to the caller, who may do other things until the answers are there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seqdefer.engine.interleaved import not_a_number
from seqdefer.engine.pace import MAX_STEPS_AHEAD, Pace, Turn
from seqdefer.engine.rows import StateRows, rows_of_expert, rows_of_predictor
from seqdefer.environment import fetch, send
from seqdefer.errors import ContractError
from seqdefer.interfaces import NextTokenExpert, Policy, Predictor
from seqdefer.rows import Chunk, ExpertRows, PredictorRows, run_turn
from seqdefer.types import EXPERT, PREDICTOR, Examples, Proposal, Rollout, Sequences, SequenceSpec

SHOWN_SECONDS = 0.05  # a turn without open questions ends after these: what is settled can be shown


@dataclass
class Work:
    """What a loop has done so far."""

    expert_passes: int = 0  # batches
    chunks: int = 0  # that rows asked the expert with
    tokens_read: int = 0  # by the expert


@dataclass
class RowWritten:
    """A row as far as it is written. All of it is settled between two turns."""

    number: int  # counts the rows in the order in which they came
    tokens: list[Any] = field(default_factory=list)
    authors: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    is_over: bool = False
    n_read: int = 0  # tokens that the expert has read
    foreseen: Any = None  # the expert's next token, if it has read all others
    error: ContractError | None = None  # why it could not be written further

    def check_scores(self, begin: int) -> None:
        """End the row if a score from position `begin` on is not a number: no decision can rest on it."""
        for position in range(begin, len(self.scores)):
            if math.isnan(self.scores[position]):
                self.is_over, self.error = True, not_a_number(f"token {position}")
                return


@dataclass
class _Guesses:
    """What a row wrote in a turn, none of it settled."""

    row: RowWritten
    tokens: list[Any]
    scores: list[float]
    deferred: list[int]  # positions of this turn
    questions: list[int]  # those whose answer is not known
    asked: list[int] = field(default_factory=list)  # the first of them
    looks_on: bool = False  # whether the expert also names the token after all

    @property
    def unread(self) -> list[Any]:
        """The tokens that the expert reads: those before the last place asked that it has not read."""
        end = len(self.tokens) if self.looks_on else self.asked[-1]
        return [*self.row.tokens[self.row.n_read :], *self.tokens[:end]]

    def chunk(self, place: int) -> Chunk:
        begin, end = len(self.row.tokens) - self.row.n_read, [len(self.tokens)] if self.looks_on else []
        guesses = [self.tokens[step] for step in self.asked]
        return Chunk(place, self.unread, [begin + step for step in (*self.asked, *end)], guesses)


class SpeculativeLoop:
    """Rows that are written together. `admit` adds some at any time between two turns, `drop` ends some.

    `policy` decides for all rows; the policy that a row is admitted with starts its state, so that rows may have
    thresholds of their own. `pace` says how far a turn goes. `decides_late`: once the predictor has run ahead, for all
    its steps together, as on a GPU, which takes hardly longer for many positions than for one, and which looking at
    decisions would hold up."""

    decides_late = False

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
        self.policies: StateRows[Any] = StateRows(policy.select, policy.join, MAX_STEPS_AHEAD)
        self.rows: list[RowWritten] = []
        self.work, self._n_admitted, self._device = Work(), 0, torch.device("cpu")
        self.last_turn = Turn()

    @torch.no_grad()
    def admit(self, examples: Examples, policy: Policy[Any] | None = None) -> list[RowWritten]:
        """Add rows. Where a model fails to read them, none is added."""
        context = self.predictor.admit(examples.inputs)
        self._device, self.decides_late = context.device, self.decides_late or context.device.type != "cpu"
        try:
            state = (policy or self.policy).start(context)
            self.expert.admit(examples)
        except BaseException:
            self.predictor.keep(range(len(self.rows)))
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

    def turn(self) -> list[RowWritten]:
        """Write more tokens of every row. Return the rows, some of which are now over and have left."""
        return run_turn(self.turning(), self.expert.read)

    @torch.no_grad()
    def turning(self) -> Generator[list[Chunk], list[list[Any]], list[RowWritten]]:
        """Take a turn that yields what it asks the expert, if anything, and must be sent the answers. Until it is over,
        no row may come or be dropped; one that is abandoned leaves the loop unusable."""
        start, turned, turn = time.perf_counter(), self.rows, Turn(rows=len(self.rows))
        begin = [len(row.tokens) for row in turned]
        guesses, steps = self._run_ahead(begin, turn)
        yield from self._ask(guesses, turn)
        turn.written = sum(len(row.tokens) for row in turned) - sum(begin)
        going = self._keep_going()
        if self.rows:
            kept = [(begin[place], turned[place]) for place in going]
            back = [before + steps - len(row.tokens) for before, row in kept]
            settled = time.perf_counter()
            self.predictor.go_back(back)
            self.predictor.append(self._tensor([row.tokens[-1] for row in self.rows]))
            turn.last_step_seconds = time.perf_counter() - settled
            self.policies.go_back(back)  # while a GPU reads these tokens
        turn.seconds = time.perf_counter() - start
        self.pace.note(turn)
        self.last_turn = turn
        return turned

    def _tensor(self, values: list[Any]) -> Tensor:
        return send(values, self._device)

    # -- the predictor ---------------------------------------------------------------------------------------------

    def _run_ahead(self, begin: list[int], turn: Turn) -> tuple[list[_Guesses], int]:
        """Write tokens of every row, all of them guesses. Return them, and the number of steps.

        The last ones are not read yet: the expert may change them."""
        start, length = time.perf_counter(), self.spec.length
        positions, columns, decided = self._tensor(begin), list[Tensor](), list[tuple[Tensor, Tensor]]()
        furthest = min(begin) if self.predictor.runs_past_end else max(begin)
        most = min(self.pace.most_steps(), MAX_STEPS_AHEAD, length - furthest)
        progress = _Progress(self, len(begin))
        for step in range(most):
            here, is_open = (positions + step).clamp(max=length - 1), None
            tokens = self.predictor.guess() if self.decides_late else None
            if tokens is None:
                proposal = self.predictor.propose()
                tokens = proposal.tokens
                decided += self._decide(here[None], proposal)
                is_open = decided[-1][1]
            if step == 0 and any(row.foreseen is not None for row in self.rows):
                decided += self._decide_late(positions, decided, 1)
                tokens, is_open = self._foreseen(tokens, decided[0][1])
            columns.append(tokens)
            if not self.predictor.runs_past_end and bool(self.spec.is_end(tokens).any()):
                break
            if step + 1 == most or not self.pace.goes_on(progress.useful(step, here, tokens, is_open)):
                break
            if progress.is_settled and time.perf_counter() - start > SHOWN_SECONDS:
                break
            self.predictor.append(tokens)
        decided += self._decide_late(positions, decided, len(columns))
        written = fetch([torch.stack(list(parts), 1) for parts in (columns, *zip(*decided, strict=True))])
        turn.steps, turn.step_seconds = len(columns), time.perf_counter() - start
        guesses = [self._own(*parts) for parts in zip(self.rows, *written, strict=True)]
        turn.proposed = sum(len(one.tokens) for one in guesses)
        turn.deferred = sum(len(one.deferred) for one in guesses)
        return guesses, len(columns)

    def _foreseen(self, tokens: Tensor, defer: Tensor) -> tuple[Tensor, Tensor]:
        """Write the expert's token where it is known and wanted. Return all tokens, and where questions are open."""
        known = [row.foreseen is not None for row in self.rows]
        named = self._tensor([row.foreseen if is_known else 0 for row, is_known in zip(self.rows, known, strict=True)])
        is_known = self._tensor(known)
        return torch.where(is_known & defer, named.to(tokens.dtype), tokens), defer & ~is_known

    def _decide_late(
        self, begin: Tensor, decided: list[tuple[Tensor, Tensor]], steps: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Decide at the steps before `steps` that are not decided yet."""
        late = torch.arange(len(decided), steps, device=self._device)
        if not len(late):
            return []
        positions = (begin + late[:, None]).clamp(max=self.spec.length - 1)
        return self._decide(positions, self.predictor.propose_guessed())

    def _decide(self, positions: Tensor, proposal: Proposal) -> list[tuple[Tensor, Tensor]]:
        """Return scores and decisions of all rows, (n,) each, at each of several steps. `positions` is (S, n), and
        `proposal` has the n rows of the first step, then those of the next."""
        steps, n = positions.shape
        if steps == 1:
            return [self._decide_step(positions[0], proposal)]
        state = self.policies.batches[0].states[-1]
        if len(self.policies.batches) > 1 or not self.policy.is_fixed(state):
            places = torch.arange(steps * n, device=self._device).view(steps, n)
            return [self._decide_step(*one) for one in zip(positions, map(proposal.select, places), strict=True)]
        copies = self.policy.select(state, torch.arange(n, device=self._device).repeat(steps))
        scores, defer, _ = self.policy.decide(copies, positions.flatten(), proposal)
        for _ in range(steps):
            self.policies.advance(lambda state, _: state)
        return list(zip(scores.view(steps, n), defer.view(steps, n), strict=True))

    def _decide_step(self, positions: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        scores, defer = list[Tensor](), list[Tensor]()

        def decide(state: Any, rows: Tensor | slice) -> Any:
            some = proposal if isinstance(rows, slice) else proposal.select(rows)
            own, wanted, state = self.policy.decide(state, positions[rows], some)
            scores.append(own)
            defer.append(wanted)
            return state

        self.policies.advance(decide)
        return self.policies.in_order(scores), self.policies.in_order(defer)

    def _own(self, row: RowWritten, tokens: list[Any], scores: list[float], defer: list[bool]) -> _Guesses:
        """Return the guesses that belong to a row's sequence."""
        tokens = tokens[: self.spec.length - len(row.tokens)]
        if self.spec.end in tokens:
            tokens = tokens[: tokens.index(self.spec.end) + 1]
        deferred = [step for step in range(len(tokens)) if defer[step]]
        questions = deferred if row.foreseen is None else [step for step in deferred if step > 0]
        return _Guesses(row, tokens, scores, deferred, questions)

    # -- the expert ------------------------------------------------------------------------------------------------

    def _ask(self, guesses: list[_Guesses], turn: Turn) -> Generator[list[Chunk], list[list[Any]], None]:
        """Ask the expert at open questions, and settle all rows."""
        asking = [(place, one) for place, one in enumerate(guesses) if one.questions]
        for _, one in asking:
            self._choose_questions(one, len(asking))
        answers: list[list[Any]] = [[] for _ in guesses]
        if asking:
            chunks = [one.chunk(place) for place, one in asking]
            start, read_before = time.perf_counter(), self.expert.tokens_read
            named = yield chunks
            for (place, _), answer in zip(asking, named, strict=True):
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
            if not self.pace.reads_on(one.questions[: number + 1], rows):
                one.tokens = one.tokens[:step]
                return
            one.asked.append(step)
        if self.expert.foresees and not self._is_over(one.row.tokens + one.tokens):
            one.looks_on = self.pace.looks_on(len(one.asked), len(one.tokens) - one.asked[-1], rows)

    def _is_over(self, tokens: list[Any]) -> bool:
        return len(tokens) == self.spec.length or tokens[-1] == self.spec.end

    def _settle(self, one: _Guesses, answers: list[Any], turn: Turn) -> int:
        """Write a row as far as it is right. Return how many tokens of its chunk the expert has read for nothing."""
        row, begin, back = one.row, len(one.row.tokens), 0
        row.n_read += len(one.unread) if one.asked else 0
        n = len(one.asked)
        row.foreseen = answers[n] if len(answers) > n else None  # rows of a failed expert repeat the guesses alone
        for step, answer in zip(one.asked, answers[:n], strict=True):
            turn.asked += 1
            if answer != one.tokens[step]:
                one.tokens = [*one.tokens[:step], answer]
                back = row.n_read - (begin + step)
                row.n_read, row.foreseen = row.n_read - back, None
                break
            turn.agreed += 1
        row.tokens += one.tokens
        n, deferred = len(one.tokens), set(one.deferred)
        row.authors += [EXPERT if step in deferred else PREDICTOR for step in range(n)]
        row.scores += one.scores[:n]
        row.is_over = self._is_over(row.tokens)
        row.check_scores(begin)
        return back

    def _keep_going(self) -> list[int]:
        """Let rows that are over leave; return the places of the others."""
        going = [place for place, row in enumerate(self.rows) if not row.is_over]
        if len(going) < len(self.rows):
            self.predictor.keep(going)
            self.policies.keep(going)
            self.expert.keep(going)
            self.rows = [self.rows[place] for place in going]
        return going


class _Progress:
    """The share of rows of which the next step of a turn is expected to gain a token, and whether no question is open.
    Where decisions are late, usual ones are assumed."""

    def __init__(self, loop: SpeculativeLoop, n: int) -> None:
        self.spec, self.pace = loop.spec, loop.pace
        self.weights = None if loop.decides_late else torch.ones(n)
        self.questions = [list[int]() for _ in range(n)]  # of each row, their steps
        self.expected, self.is_settled = 1.0, not loop.decides_late

    def useful(self, step: int, positions: Tensor, tokens: Tensor, is_open: Tensor | None) -> float:
        if self.weights is None or is_open is None:
            self.expected *= 1 - self.pace.share * (1 - self.pace.agreement)
            return self.expected
        opened = (is_open & (self.weights > 0)).nonzero().squeeze(1).tolist()
        for row in opened:
            self.questions[row].append(step)
        asking = sum(map(bool, self.questions))
        for row in opened:
            # Past a question that will wait, all is written in vain.
            self.weights[row] *= self.pace.agreement if self.pace.reads_on(self.questions[row], asking) else 0.0
        self.is_settled &= not opened
        self.weights[self.spec.is_end(tokens) | (positions + 1 >= self.spec.length)] = 0
        return float(self.weights.mean())


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
    """Return rows that are over as a rollout, on the CPU. Raises the error of a row that has one."""
    for error in (row.error for row in rows if row.error is not None):
        raise error

    def padded(lists: Iterator[list[Any]]) -> Tensor:
        return torch.tensor([[*one, *[0] * (spec.length - len(one))] for one in lists])

    lengths = torch.tensor([len(row.tokens) for row in rows])
    return Rollout(
        Sequences(padded(row.tokens for row in rows), lengths),
        padded(row.authors for row in rows),
        padded(row.scores for row in rows).float(),
    )
