"""What a deferring model returns: whole generations, decisions, and the tokens of a stream."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from seqdefer.budgets.prices import Bill
from seqdefer.interfaces import Codec
from seqdefer.report.markup import element
from seqdefer.report.notebook import generation_html
from seqdefer.types import Examples, Rollout, Sequences

SHOWN_OUTPUTS = 20  # in a notebook or an interpreter


@dataclass(frozen=True)
class Generation:
    """What was written for n inputs. `scores` are the rejector's: by token, of deferring it; one-time, of handing off
    there, compared with not at all; 0 past the hand-off and past the end. `authors` are the names of token authors.
    `capped` counts the tokens of each sequence that a cap kept from the expert, if there was one; `bills` are what the
    sequences cost, if the model has prices."""

    outputs: list[Any]  # what the sequences stand for: texts, tours
    rollout: Rollout
    authors: tuple[str, ...] = ("predictor", "expert")
    codec: Codec | None = None  # that tells what each token adds, to show them
    capped: list[int] | None = None
    bills: list[Bill] | None = None

    def __repr__(self) -> str:
        written = int(self.sequences.lengths.sum())
        head = f"Generation({len(self.outputs)} outputs, {sum(self.expert_tokens)} of {written} tokens by the expert)"
        shown = [f"{place}: {output!r:.100}" for place, output in enumerate(self.outputs[:SHOWN_OUTPUTS])]
        more = len(self.outputs) - len(shown)
        return "\n  ".join([head, *shown, *([f"... {more} more"] if more else [])])

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self) -> str:
        """Return the outputs as HTML, the expert's tokens in another colour."""
        if self.codec is None:
            return str(element("pre", repr(self)))
        rows = islice(self.rows(self.codec), SHOWN_OUTPUTS)
        return str(generation_html(rows, self.share, len(self.outputs)))

    @property
    def sequences(self) -> Sequences:
        return self.rollout.sequences

    @property
    def by_expert(self) -> Tensor:
        """Mark the tokens that the expert wrote. bool (n, L)"""
        return self.rollout.by_expert

    @property
    def scores(self) -> Tensor:
        """(n, L)"""
        return self.rollout.scores

    @property
    def sources(self) -> list[list[str]]:
        """The author of each token of each sequence: predictor or expert."""
        rows = zip(self.rollout.authors.tolist(), self._lengths, strict=True)
        return [[self.authors[author] for author in row[:length]] for row, length in rows]

    @property
    def expert_tokens(self) -> list[int]:
        return _integers(self.rollout.deferred)

    @property
    def predictor_tokens(self) -> list[int]:
        return _integers(self.sequences.lengths - self.rollout.deferred)

    @property
    def switches(self) -> list[int]:
        """How often the author changed within each sequence."""
        return _integers(self.rollout.switches)

    @property
    def share(self) -> float:
        """The share of all tokens that the expert wrote."""
        return self.rollout.share

    def cost(self, expert_token: float = 1.0, predictor_token: float = 0.0) -> list[float]:
        """Return the cost of each sequence. The predictor proposes every token, also where the expert then writes."""
        pairs = zip(self.expert_tokens, self._lengths, strict=True)
        return [expert_token * asked + predictor_token * length for asked, length in pairs]

    def rows(self, codec: Codec) -> Iterator[dict[str, Any]]:
        """Yield each sequence in plain values: the output, and its tokens with their sources and scores."""
        for place, (length, sources) in enumerate(zip(self._lengths, self.sources, strict=True)):
            tokens = self.sequences.tokens[place, :length].tolist()
            scores = self.scores[place, :length].tolist()
            parts = zip(tokens, codec.pieces(tokens), sources, scores, strict=True)
            yield {
                "output": self.outputs[place],
                "tokens": [dict(zip(("token", "text", "source", "score"), one, strict=True)) for one in parts],
                "expert_tokens": self.expert_tokens[place],
                "predictor_tokens": self.predictor_tokens[place],
                "switches": self.switches[place],
                "cost": self.cost()[place],
                **({} if self.capped is None else {"capped": self.capped[place]}),
                **({} if self.bills is None else {"money": self.bills[place].plain()}),
            }

    @property
    def _lengths(self) -> list[int]:
        return _integers(self.sequences.lengths)


@dataclass(frozen=True)
class Decisions:
    """What the predictor writes alone, and where the rejector would defer. By token that is certain up to the first
    deferral of a row: what the expert writes there changes all that follows."""

    outputs: list[Any]
    sequences: Sequences
    scores: Tensor  # (n, L), as in Generation
    defer: Tensor  # bool (n, L)


@dataclass(frozen=True)
class StreamedToken:
    """One token of a stream."""

    position: int
    token: Any
    text: str  # what it adds to the output; empty while a letter is half written
    source: str
    score: float
    capped: bool = False  # a cap kept it from the expert


def input_tokens(codec: Codec, inputs: Sequence[Any], joined: Examples) -> list[int]:
    """Return the length of each input; `joined` are all of them, encoded."""
    with warnings.catch_warnings():  # encoding all of them has warned already
        warnings.simplefilter("ignore")
        # Encoded alone, an input has no padding, and its width is its length.
        single = [joined] if len(inputs) == 1 else [codec.encode([one]) for one in inputs]
    widths = [one.inputs.shape[1] if one.inputs.ndim > 1 else 1 for one in single]
    return [math.ceil(width / codec.columns_per_token) for width in widths]


def _integers(counts: Tensor) -> list[int]:
    return [int(count) for count in counts]
