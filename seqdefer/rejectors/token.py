"""Networks that score token by token. A new one is a class here, or in another package (see `checkpoints`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.graphs import Replayed
from seqdefer.interfaces import TokenRejector
from seqdefer.rejectors.base import RejectorNetwork, Sizes, perceptron
from seqdefer.types import Proposal


class TokenNetwork(RejectorNetwork, TokenRejector[Tensor]):
    """Base of the token-level networks. The state is one tensor (B, S), so that a batch branches by indexing."""

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        self.reads_first = sizes.has_statistics
        self._replayed = Replayed(self._score)

    @abstractmethod
    def forward(self, state: Tensor, position: int | Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores (B,) and the next state, from standardised steps (B, sizes.step)."""

    def score(self, state: Tensor, position: int | Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        if self.training or self.reads_first or not state.is_cuda:
            return self._score(state, position, proposal)
        positions = torch.as_tensor(position, device=state.device).expand(len(state))
        scores, state = self._replayed.padded([state, positions, *proposal.tensors()])
        return scores, state

    def _score(self, state: Tensor, position: int | Tensor, *seen: Any) -> tuple[Tensor, Tensor]:
        """Score from a proposal or from its tensors."""
        proposal = seen[0] if isinstance(seen[0], Proposal) else Proposal(*seen)
        scores: Tensor
        scores, state = self(state, position, self._steps(self.sizes.step_inputs(proposal)))
        return scores, state

    def join(self, states: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(states))


class LSTMRejector(TokenNetwork):
    """The paper's network: hidden states start from the encoder's state, decoder states come in one by one."""

    kind = "lstm"

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        self.begin = nn.Linear(sizes.context, 2 * sizes.layers * sizes.units)
        inputs = [sizes.step] + [sizes.units] * (sizes.layers - 1)
        self.cells = nn.ModuleList(nn.LSTMCell(size, sizes.units) for size in inputs)
        self.dropout = nn.Dropout(sizes.dropout)
        self.head = nn.Linear(sizes.units, 1)

    def start(self, context: Tensor) -> Tensor:
        return torch.tanh(self.begin(self._context(context)))

    def forward(self, state: Tensor, position: int | Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        states = state.split(self.sizes.units, 1)
        following = []
        for layer, cell in enumerate(self.cells):
            hidden, memory = cell(steps, (states[2 * layer], states[2 * layer + 1]))
            following += [hidden, memory]
            steps = self.dropout(hidden)
        return self.head(steps).squeeze(1), torch.cat(following, 1)


class MLPRejector(TokenNetwork):
    """A network without memory: each position is scored from the context, the decoder state and the position."""

    kind = "mlp"
    has_memory = False

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        self.body = perceptron(sizes.context + sizes.step + sizes.length, sizes, 1)

    def start(self, context: Tensor) -> Tensor:
        return self._context(context)

    def forward(self, state: Tensor, position: int | Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        # Compared, not assigned: a number that is assigned is copied to a GPU, which no graph can record.
        places = torch.arange(self.sizes.length, device=state.device)
        where = places == (position[:, None] if isinstance(position, Tensor) else position)
        inputs = [state, steps, where.expand(len(state), -1).to(steps)]
        return self.body(torch.cat(inputs, 1)).squeeze(1), state
