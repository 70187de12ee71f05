"""Speculative deferral: the tokens of the interleaved loop, in another order of work.

The predictor runs ahead. At a deferred position it goes on with its own token, as a guess. One pass of the expert then
reads what each row has written since its last one, and names its own token at every deferred position. Where it differs
from the guess, it is written and the row goes back to it; elsewhere the guess was right. Rows therefore stand at their
own positions; a row that ends leaves at once, and another may take its place between two passes.

Without deferral the expert never runs. With deferral everywhere this is lossless speculative decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seqdefer.engine.rows import ExpertRows, PredictorRows, StateExpertRows, StatePredictorRows, StateRows
from seqdefer.interfaces import NextTokenExpert, Policy, Predictor
from seqdefer.types import EXPERT, PREDICTOR, Examples, Proposal, Rollout, Sequences, SequenceSpec


@dataclass
class Work:
    """What a loop has cost so far."""

    predictor_steps: int = 0  # batches
    expert_passes: int = 0  # batches
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


class SpeculativeLoop:
    """Rows that are written together. `admit` adds some at any time between two turns, `drop` ends some.

    `policy` decides for all rows; the policy that a row is admitted with starts its state, so that rows may have
    thresholds of their own. In a turn the predictor writes `ahead` tokens of every row, and the expert is asked at the
    first `asks` deferred positions of each: where guesses are often wrong, reading on would be for nothing."""

    def __init__(
        self,
        predictor: PredictorRows,
        expert: ExpertRows,
        policy: Policy[Any],
        spec: SequenceSpec,
        *,
        ahead: int = 8,
        asks: int | None = None,
    ) -> None:
        self.predictor, self.expert, self.policy, self.spec, self.ahead = predictor, expert, policy, spec, ahead
        self.asks = asks
        self.policies: StateRows[Any] = StateRows(policy.select, policy.join, ahead)
        self.rows: list[RowWritten] = []
        self.work, self._n_admitted = Work(), 0

    def admit(self, examples: Examples, policy: Policy[Any] | None = None) -> list[RowWritten]:
        context = self.predictor.admit(examples.inputs)
        self.policies.admit((policy or self.policy).start(context), len(examples), context.device)
        self.expert.admit(examples)
        new = [RowWritten(self._n_admitted + place) for place in range(len(examples))]
        self._n_admitted += len(new)
        self.rows += new
        self.device = context.device
        return new

    def drop(self, numbers: set[int]) -> None:
        """End rows by their numbers."""
        for row in self.rows:
            row.is_over |= row.number in numbers
        self._keep_going()

    @torch.no_grad()
    def turn(self) -> list[RowWritten]:
        """Write up to `ahead` more tokens of every row. Return the rows, some of which are now over and leave."""
        turned, begin = self.rows, [len(row.tokens) for row in self.rows]
        ahead = min(self.ahead, self.spec.length - min(begin))
        tokens, scores, defer = self._run_ahead(torch.tensor(begin, device=self.device), ahead)
        ends = [self._end_of(line, start) for line, start in zip(tokens.tolist(), begin, strict=True)]
        settled = self._settle(tokens, scores.tolist(), defer.tolist(), ends)
        steps = [start + ahead - len(row.tokens) for row, start in zip(turned, begin, strict=True)]
        self.work.taken_back += sum(end - count for end, count in zip(ends, settled, strict=True))
        going = self._keep_going()
        if self.rows:
            back = torch.tensor([steps[place] for place in going], device=self.device)
            self.predictor.go_back(back)
            self.policies.go_back(back)
            last = torch.tensor([row.tokens[-1] for row in self.rows], dtype=tokens.dtype, device=self.device)
            self.predictor.append(last)
        return turned

    def _run_ahead(self, begin: Tensor, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
        """Write `ahead` tokens of every row, all of them guesses. Return tokens, scores, defer: (n, ahead), on the CPU.

        The last ones are not read yet: the expert may change them."""
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        for step in range(ahead):
            proposal = self.predictor.propose()
            positions = (begin + step).clamp(max=self.spec.length - 1)
            columns.append((proposal.tokens, *self._decide(positions, proposal)))
            if step + 1 < ahead:
                self.predictor.append(proposal.tokens)
        self.work.predictor_steps += ahead
        tokens, scores, defer = (torch.stack(parts, 1).cpu() for parts in zip(*columns, strict=True))
        return tokens, scores.float(), defer

    def _decide(self, positions: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        scores = torch.zeros(len(positions), device=positions.device)
        defer = torch.zeros(len(positions), dtype=torch.bool, device=positions.device)

        def decide(state: Any, rows: Tensor) -> Any:
            part = proposal if len(rows) == len(positions) else proposal.select(rows)
            scores[rows], defer[rows], state = self.policy.decide(state, positions[rows], part)
            return state

        self.policies.advance(decide)
        return scores, defer

    def _end_of(self, tokens: list[Any], begin: int) -> int:
        """Return how many of a row's guesses belong to its sequence."""
        room = min(len(tokens), self.spec.length - begin)
        if self.spec.end in tokens[:room]:
            return tokens.index(self.spec.end) + 1
        return room

    def _settle(self, tokens: Tensor, scores: list[list[float]], defer: list[list[bool]], ends: list[int]) -> list[int]:
        """Ask the expert at the deferred positions; write all rows as far as they are right. Return how many tokens."""
        every = [[step for step in range(end) if line[step]] for line, end in zip(defer, ends, strict=True)]
        asked = [steps[: self.asks] for steps in every]
        # A question that waits ends the row for this turn: the predictor comes back to it.
        ends = [
            every[place][len(steps)] if len(steps) < len(every[place]) else end
            for place, (steps, end) in enumerate(zip(asked, ends, strict=True))
        ]
        named = self._read(tokens, asked)
        settled = []
        for place, row in enumerate(self.rows):
            guesses, start = tokens[place, : ends[place]].tolist(), len(row.tokens)
            wrong = next((step for step in asked[place] if named[place][step] != guesses[step]), None)
            if wrong is not None:
                guesses = [*guesses[:wrong], named[place][wrong]]
                row.n_read = start + wrong
            n = len(guesses)
            row.tokens += guesses
            row.authors += [EXPERT if line else PREDICTOR for line in defer[place][:n]]
            row.scores += scores[place][:n]
            row.is_over = len(row.tokens) == self.spec.length or (
                self.spec.end is not None and guesses[-1] == self.spec.end
            )
            settled.append(n)
        return settled

    def _read(self, tokens: Tensor, asked: list[list[int]]) -> list[dict[int, Any]]:
        """Let the rows that ask read up to their last question. Return the expert's token at each question; rows whose
        guess was wrong have gone back to it."""
        named: list[dict[int, Any]] = [{} for _ in asked]
        places = [place for place, steps in enumerate(asked) if steps]
        if not places:
            return named
        chunks = [self._unread(tokens, place, asked[place][-1]) for place in places]
        counts = torch.tensor([len(chunk) for chunk in chunks], device=self.device)
        padded = torch.zeros(len(chunks), int(counts.max()), dtype=tokens.dtype)
        for line, chunk in zip(padded, chunks, strict=True):
            line[: len(chunk)] = chunk
        answers = self.expert.read(torch.tensor(places, device=self.device), padded.to(self.device), counts).cpu()
        self.work.expert_passes += 1
        self.work.tokens_read += int(counts.sum())
        back = [0] * len(asked)
        for place, chunk, line in zip(places, chunks, answers.to(tokens.dtype).tolist(), strict=True):
            row, steps = self.rows[place], asked[place]
            first = len(row.tokens) - row.n_read  # the place of this turn's first position among the answers
            named[place] = {step: line[first + step] for step in steps}
            row.n_read += len(chunk)
            wrong = next((step for step in steps if named[place][step] != tokens[place, step].item()), None)
            back[place] = 0 if wrong is None else row.n_read - len(row.tokens) - wrong
        self.expert.go_back(torch.tensor(back, device=self.device))
        return named

    def _unread(self, tokens: Tensor, place: int, last: int) -> Tensor:
        """Return the tokens before position `last` of this turn that the expert has not read."""
        row = self.rows[place]
        return torch.cat([torch.tensor(row.tokens[row.n_read :], dtype=tokens.dtype), tokens[place, :last]])

    def _keep_going(self) -> list[int]:
        """Let rows that are over leave; return the places of the others."""
        going = [place for place, row in enumerate(self.rows) if not row.is_over]
        if len(going) < len(self.rows):
            kept = torch.tensor(going, dtype=torch.long, device=self.device)
            self.predictor.keep(kept)
            self.policies.keep(kept)
            self.expert.keep(kept)
            self.rows = [self.rows[place] for place in going]
        return going


def speculate(
    predictor: Predictor[Any],
    expert: NextTokenExpert[Any],
    examples: Examples,
    policy: Policy[Any],
    spec: SequenceSpec,
    *,
    ahead: int = 8,
    at_once: int | None = None,
) -> tuple[Rollout, Work]:
    """Do what `roll_out` does; `at_once` rows at a time, where others take the place of those that end.

    With `at_once`, rows have the thresholds of the policy in common."""
    loop = SpeculativeLoop(StatePredictorRows(predictor, ahead), StateExpertRows(expert), policy, spec, ahead=ahead)
    return run_all(loop, examples.to(predictor.device), at_once), loop.work


def run_all(loop: SpeculativeLoop, examples: Examples, at_once: int | None = None) -> Rollout:
    """Write all rows, `at_once` at a time."""
    rows, n, at_once = list[RowWritten](), len(examples), at_once or len(examples)
    while loop.rows or len(rows) < n:
        free = min(at_once - len(loop.rows), n - len(rows))
        if free:
            rows += loop.admit(examples.select(torch.arange(len(rows), len(rows) + free, device=examples.ids.device)))
        loop.turn()
    return _collect(rows, loop.spec)


def _collect(rows: list[RowWritten], spec: SequenceSpec) -> Rollout:
    def padded(lists: list[list[Any]]) -> Tensor:
        return torch.tensor([[*one, *[0] * (spec.length - len(one))] for one in lists])

    lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens = padded([row.tokens for row in rows])
    return Rollout(
        Sequences(tokens, lengths), padded([row.authors for row in rows]), padded([row.scores for row in rows]).float()
    )
