"""Fakes for tests: tiny, exact, instant.

>>> task = ToyTask(n=10)
>>> task.expert.complete(task.split("test"), blank_prefixes(task.split("test"), task.spec), task.spec).lengths
tensor([5, 5, 5, 2, 5, 2, 5, 1, 2, 1])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqdefer.interfaces import Expert, NextTokenExpert, Predictor, SplitName, Task
from seqdefer.types import BatchRecord, Examples, Proposal, Sequences, SequenceSpec


@np.errstate(over="ignore")  # int64 overflow wraps around on purpose
def mix(*parts: Tensor | int) -> Tensor:
    """Hash the integers `parts` to a number in 0..2^31-1, element by element.

    NumPy computes it: on arrays of a few numbers it is several times faster than PyTorch.
    """
    value: Any = np.int64(0)
    device = torch.device("cpu")
    for part in parts:
        if isinstance(part, Tensor):
            device = part.device
        value = value ^ (part.numpy(force=True) if isinstance(part, Tensor) else part)
        value = value * 0x9E3779B97F4A7C1 + 0x7F4A7C15  # multiply by odd constants and shift
        value = (value ^ (value >> 29)) * 0x58476D1CE4E5B9
        value = value ^ (value >> 32)
    return torch.as_tensor(value & 0x7FFFFFFF, device=device)


@dataclass(frozen=True)
class ToyState(BatchRecord):
    """The state of a toy model: its answers are a function of the input and the prefix."""

    inputs: Tensor  # int64 (B,)
    prefix: Tensor  # int64 (B,) a hash of the tokens so far
    position: int

    @classmethod
    def before(cls, inputs: Tensor) -> ToyState:
        return cls(inputs, torch.zeros_like(inputs), 0)

    def append(self, tokens: Tensor) -> ToyState:
        return ToyState(self.inputs, mix(self.prefix, tokens), self.position + 1)


class ToyTask(Task):
    """A task of integer tokens and different lengths, made by hashing: equal questions get exactly equal answers.

    Each input has a target of 1 to `length` tokens, the end token last (or none, where the target is cut off). The
    predictor errs at about every second token, and its features show where, not quite reliably; the expert errs at
    about one in eight. Errors depend on input and prefix, so another prefix changes all that follows. Losses and costs
    are multiples of 1/4: sums are exact in any order.
    Each split has `n` examples; `ends=False` makes all sequences `length` tokens long.
    """

    name = "toy"
    loss_unit = "weighted errors"

    def __init__(self, n: int = 32, length: int = 5, vocabulary: int = 5, seed: int = 0, *, ends: bool = True) -> None:
        # The end token is not 0, so that padding cannot be mistaken for it.
        self.spec = SequenceSpec(length, end=vocabulary - 1 if ends else None)
        self.n, self.vocabulary, self.seed = n, vocabulary, seed
        self.predictor, self.expert = ToyPredictor(self), ToyExpert(self)

    def split(self, name: SplitName) -> Examples:
        first = self.n * ("train", "validation", "test").index(name)
        ids = torch.arange(first, first + self.n)
        inputs = mix(ids, self.seed)
        targets = torch.stack([self.target(inputs, position) for position in range(self.spec.length)], 1)
        return Examples(inputs, targets, ids)

    def target(self, inputs: Tensor, position: int) -> Tensor:
        """Return the right token at a position; the end token from the target's end on. (B,)"""
        words = mix(inputs, position, 1) % (self.vocabulary - 1)
        if self.spec.end is None:
            return words
        return torch.where(self.words(inputs) <= position, self.spec.end, words)

    def words(self, inputs: Tensor) -> Tensor:
        """Count the tokens of the target before its end. (B,)"""
        return mix(inputs, 2) % (self.spec.length + 1)

    def stray(self, state: ToyState, often: int, salt: int) -> Tensor:
        """Return the right token, but any token in `often` of 8 cases. (B,)"""
        draw = mix(state.inputs, state.prefix, salt)
        right = self.target(state.inputs, state.position)
        return torch.where(draw % 8 < often, (draw >> 3) % self.vocabulary, right)

    def log_probs(self, state: ToyState, tokens: Tensor, salt: int) -> Tensor:
        """Return log probabilities (B, V) whose likeliest token is that of `tokens` (B,)."""
        words = torch.arange(self.vocabulary)
        draws = mix(state.inputs[:, None], state.prefix[:, None], words, salt) % 64 / 16
        boost = 1 + mix(state.inputs, state.prefix, salt + 1) % 16 / 4
        return draws.scatter(1, tokens[:, None], (draws.amax(1) + boost)[:, None]).log_softmax(1)

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        positions = prefixes.lengths
        right = examples.targets.gather(1, positions[:, None]).squeeze(1)
        return (tokens != right) * (1 + mix(examples.inputs, positions, 3) % 4 / 4)

    def token_cost(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return self.token_loss(examples, prefixes, tokens) + 1 / 4  # a price per expert token

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        """Add up the token losses, and 1 for each missing token of the target."""
        rows, positions = sequences.mask().nonzero(as_tuple=True)
        loss = torch.zeros(sequences.tokens.shape, device=rows.device)
        prefixes, tokens = Sequences(sequences.tokens[rows], positions), sequences.tokens[rows, positions]
        loss[rows, positions] = self.token_loss(examples.select(rows), prefixes, tokens)
        if self.spec.end is not None:
            loss[~sequences.mask() & (examples.targets != self.spec.end)] = 1
        return loss.sum(1)

    def describe(self) -> dict[str, str]:
        return {"data": f"hashes of seed {self.seed}", "predictor": "strays often", "expert": "strays rarely"}


class ToyPredictor(Predictor[ToyState]):
    """A predictor that errs in 5 of 8 cases, with features that are right about it in 7 of 8."""

    def __init__(self, task: ToyTask) -> None:
        self.task, self.vocabulary_size = task, task.vocabulary
        self.fingerprint = f"toy-{task.vocabulary}-{task.spec.length}-{task.seed}"

    def start(self, inputs: Tensor) -> tuple[ToyState, Tensor]:
        return ToyState.before(inputs), torch.stack([mix(inputs, 4) % 8, self.task.words(inputs)], 1) / 8

    def propose(self, state: ToyState) -> Proposal:
        draw, noise = (mix(state.inputs, state.prefix, salt) for salt in (5, 6))
        calm = torch.where(noise % 8 == 0, noise >> 3, draw) % 8
        return Proposal(
            tokens=self.task.stray(state, often=5, salt=5),
            features=torch.stack([calm < 5, calm / 8, noise % 16 / 16], 1),
            uncertainty=(9 - calm + noise % 4 / 4) / 4,
            entropy=(9 - calm) / 8,
        )

    def append(self, state: ToyState, tokens: Tensor) -> ToyState:
        return state.append(tokens)

    def with_log_probs(self) -> ToyPredictor:
        return self

    def log_probs(self, state: ToyState) -> Tensor:
        return self.task.log_probs(state, self.propose(state).tokens, salt=8)


class ToyExpert(NextTokenExpert[ToyState]):
    """An expert that errs in 1 of 8 cases."""

    def __init__(self, task: ToyTask) -> None:
        self.task = task

    def start(self, examples: Examples) -> ToyState:
        return ToyState.before(examples.inputs)

    def next(self, state: ToyState, rows: Tensor) -> tuple[Tensor, ToyState]:
        return self.task.stray(state.select(rows), often=1, salt=7), state

    def append(self, state: ToyState, tokens: Tensor) -> ToyState:
        return state.append(tokens)

    def with_log_probs(self) -> ToyExpert:
        return self

    def log_probs(self, state: ToyState, rows: Tensor) -> Tensor:
        return self.task.log_probs(state.select(rows), self.next(state, rows)[0], salt=10)


class FunctionExpert(Expert):
    """An expert that only completes: `function(input, prefix)` returns the whole sequence that starts with the prefix.

    `input` is one row of `Examples.inputs`; prefix and answer are lists of tokens, the end token included. The function
    is not called for prefixes that have ended.
    """

    def __init__(self, function: Callable[[Tensor, list[Any]], Sequence[Any]], *, deterministic: bool = True) -> None:
        self.function = function
        self.deterministic = deterministic

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        tokens, lengths = prefixes.tokens.clone(), prefixes.lengths.clone()
        for row in (~spec.is_over(prefixes)).nonzero().squeeze(1).tolist():
            written = self.function(examples.inputs[row], tokens[row, : lengths[row]].tolist())
            tokens[row, : len(written)] = torch.as_tensor(written, dtype=tokens.dtype)
            lengths[row] = len(written)
        return Sequences(tokens, lengths)


@dataclass(frozen=True)
class _Written:
    inputs: Tensor  # (B, ...)
    prefixes: tuple[tuple[Any, ...], ...]


class FunctionPredictor(Predictor[_Written]):
    """A predictor from `function(input, prefix) -> (token, uncertainty)`, called row by row.

    Its only feature is the uncertainty; the context is the input, flattened.
    """

    def __init__(self, function: Callable[[Tensor, list[Any]], tuple[Any, float]], fingerprint: str) -> None:
        self.function, self.fingerprint = function, fingerprint

    def start(self, inputs: Tensor) -> tuple[_Written, Tensor]:
        return _Written(inputs, ((),) * len(inputs)), inputs.reshape(len(inputs), -1).float()

    def propose(self, state: _Written) -> Proposal:
        proposals = [self.function(one, list(prefix)) for one, prefix in zip(state.inputs, state.prefixes, strict=True)]
        uncertainty = torch.tensor([float(doubt) for _, doubt in proposals])
        return Proposal(torch.tensor([token for token, _ in proposals]), uncertainty[:, None], uncertainty)

    def append(self, state: _Written, tokens: Tensor) -> _Written:
        pairs = zip(state.prefixes, tokens.tolist(), strict=True)
        return _Written(state.inputs, tuple((*prefix, token) for prefix, token in pairs))

    def select(self, state: _Written, rows: Tensor) -> _Written:
        return _Written(state.inputs[rows], tuple(state.prefixes[row] for row in rows.tolist()))

    def join(self, states: Sequence[_Written]) -> _Written:
        return _Written(torch.cat([one.inputs for one in states]), sum((one.prefixes for one in states), start=()))


def blank_prefixes(examples: Examples, spec: SequenceSpec) -> Sequences:
    """Return empty prefixes, which make `complete` the expert alone; of floats where the targets are floats."""
    is_real = spec.end is None and examples.targets.is_floating_point()
    dtype = examples.targets.dtype if is_real else torch.long
    tokens = torch.zeros(len(examples), spec.length, dtype=dtype, device=examples.ids.device)
    return Sequences(tokens, torch.zeros_like(examples.ids))
