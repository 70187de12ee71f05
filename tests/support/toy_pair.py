"""A toy pair for inputs of users' own, which are numbers, and rejectors with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from seqdefer.errors import InputError
from seqdefer.interfaces import Codec, Served
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.draft import DraftMLP, DraftNetwork
from seqdefer.rejectors.losses import hand_off_grid
from seqdefer.rejectors.token import LSTMRejector, TokenNetwork
from seqdefer.testing import ToyTask
from seqdefer.types import Examples

METHODS = ("TokenwiseModel", "OneTimeModel", "OneTimeCost")


class LetterCodec(Codec):
    """Numbers in, letters out."""

    field = "number"

    def encode(self, inputs: Sequence[Any]) -> Examples:
        for one in inputs:
            if not isinstance(one, int):
                raise InputError(f"{one!r} is no number; give one")
        numbers = torch.tensor(inputs)
        return Examples(numbers, numbers[:, None], torch.arange(len(numbers)))

    def decode(self, tokens: Sequence[Any]) -> str:
        return self.text(tokens)

    def text(self, tokens: Sequence[Any]) -> str:
        return "".join("abcdefgh"[token] for token in tokens)


@dataclass(frozen=True)
class Toy:
    task: ToyTask
    served: Served

    @classmethod
    def of(cls, **options: Any) -> Toy:
        task = ToyTask(n=8, **options)
        return cls(task, Served(task.predictor, task.expert, task.spec, LetterCodec()))

    def model(self, method: str) -> DeferringModel:
        return DeferringModel(self.served, self.rejector(method))

    def rejector(self, method: str) -> TokenNetwork | DraftNetwork:
        """Random, but lively: its scores differ from prefix to prefix."""
        length = self.task.spec.length
        torch.manual_seed(1)
        if method == "TokenwiseModel":
            sizes = Sizes(2, 3, length, True, layers=1, units=8, dropout=0.0)
            network: TokenNetwork | DraftNetwork = LSTMRejector(sizes, self.task.predictor.fingerprint)
        else:
            grid = tuple(hand_off_grid(length, 4).tolist())
            rule = "cost" if method == "OneTimeCost" else "odds"
            sizes = Sizes(2, 3, length, True, layers=1, units=8, dropout=0.0, hand_offs=grid, rule=rule)
            network = DraftMLP(sizes, self.task.predictor.fingerprint)
        for weight in network.parameters():
            weight.data *= 3
        return network.eval()


def numbers(n: int, first: int = 0) -> list[int]:
    return [7919 * number + 13 for number in range(first, first + n)]
