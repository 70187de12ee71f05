"""Log-probabilities of written tokens, each under the model that wrote it.

A row is read again beside the loop that writes it, by copies of both models that keep their distributions. A model
reads only up to the tokens that it wrote itself. Only requests that ask for log-probabilities pay for these passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqdefer.interfaces import NextTokenExpert, Served
from seqdefer.types import EXPERT, Examples

MIN_LOG_PROB = -9999.0  # JSON has no infinity; OpenAI writes this, too


@dataclass(frozen=True)
class TokenLogProb:
    """A token as text, and log p under the model that is asked."""

    text: str
    log_prob: float


@dataclass(frozen=True)
class WrittenLogProb(TokenLogProb):
    """A written token, and the likeliest tokens in its place."""

    likeliest: tuple[TokenLogProb, ...]


class RowLogProbs:
    """One row of a served pair, read as far as its tokens were asked about. `n_likeliest` are told for each."""

    def __init__(self, served: Served, example: Examples, n_likeliest: int) -> None:
        self._codec, self._n_likeliest, device = served.codec, n_likeliest, served.predictor.device
        self._example, self._place = example.to(device), torch.zeros(1, dtype=torch.long, device=device)
        assert isinstance(served.expert, NextTokenExpert)
        self._models: tuple[Any, Any] = (served.predictor.with_log_probs(), served.expert.with_log_probs())
        self._states: list[Any] = [None, None]  # by author
        self._n_read = [0, 0]

    @torch.no_grad()
    def read(self, tokens: Sequence[int], author: int) -> WrittenLogProb:
        """Return the log-probability of the last of `tokens`, which `author` wrote after the others."""
        log_probs = self._log_probs(tokens[:-1], author).float()
        n_likeliest = min(self._n_likeliest, len(log_probs))
        likeliest = log_probs.topk(n_likeliest).indices.tolist()
        written, *others = (
            TokenLogProb(self._codec.text([token]), max(float(log_probs[token]), MIN_LOG_PROB))
            for token in (tokens[-1], *likeliest)
        )
        return WrittenLogProb(written.text, written.log_prob, tuple(others))

    def _log_probs(self, prefix: Sequence[int], author: int) -> Tensor:
        """Let a model read up to the end of a prefix; return the log-probabilities of what follows it. (V,)"""
        model, state = self._models[author], self._states[author]
        if state is None:
            state = model.start(self._example) if author == EXPERT else model.start(self._example.inputs)[0]
        if unread := list(prefix[self._n_read[author] :]):
            state = model.extend(state, torch.tensor([unread], device=self._place.device))
        if author == EXPERT:
            _, state = model.next(state, self._place)
        found: Tensor = model.log_probs(state, self._place) if author == EXPERT else model.log_probs(state)
        self._states[author], self._n_read[author] = state, len(prefix)
        return found[0]
