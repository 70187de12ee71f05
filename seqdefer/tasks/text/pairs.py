"""A predictor and an expert over Hugging Face models, decoding greedily.

    pair = load_pair("google/flan-t5-small", "google/flan-t5-base")
    inputs, n_truncated = encode(pair.predictor.model.tokenizer, documents, "summarize: ", max_tokens=448)

Inputs are token ids (n, S), padded on the right with PADDING; tokens follow the decoder's start token or the prompt.
Both models cache what they have read. The expert is lazy: it encodes a document when a row first needs it, and later
reads all unread tokens of the row in one pass. A row that never defers costs nothing.
The expert may also be remote (`seqdefer.tasks.text.remote`, `remote_tokens`) or come from another package.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from seqdefer.errors import OptionError, require_known
from seqdefer.graphs import Replayed
from seqdefer.interfaces import EXPECTED_BRANCHES, Expert, NextTokenExpert, Predictor
from seqdefer.remote.client import EndpointClient
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.text.batches import AdaptiveBatch
from seqdefer.tasks.text.facts import DocumentFacts, ProposedTokens, TokenFacts
from seqdefer.tasks.text.loading import load_text_model, quiet_transformers
from seqdefer.tasks.text.model_rows import RowsOf
from seqdefer.tasks.text.models import TextModel, check_vocabulary
from seqdefer.tasks.text.reading import Reader, Reading
from seqdefer.tasks.text.remote import PromptAdapter, RemoteExpert
from seqdefer.tasks.text.remote_tokens import RemoteTokenExpert
from seqdefer.tasks.text.row_probe import rows_stand_apart
from seqdefer.tasks.text.rows import TextExpertRows, TextPredictorRows, complete_rows
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec

FEATURE_SETS = ("facts", "states", "both")
DEFAULT_BATCH = {"cpu": 32, "cuda": 512}  # rows; halved if they do not fit into GPU memory
MAX_GRAPHED_ROWS = 64  # of a completion; of more, rows of one document share its cache
MAX_TREE_NODES = 2**6  # of a decision tree to enumerate: exploring 6 tokens along 8 rollouts visits nearly as many


class _Writer(ABC):
    """The common part of predictor and expert. `end` is the end token of the pair."""

    max_tree_nodes = MAX_TREE_NODES
    max_examples = sys.maxsize  # in memory at once

    def __init__(self, model: TextModel, *, end: int | None = None, n_tokens: int | None = None) -> None:
        self.model, self.device = model, model.device
        self.end = end if end is not None else next(iter(model.ends), None)
        self.n_tokens = min(n_tokens or model.n_tokens, model.n_tokens)
        self.batch = AdaptiveBatch(DEFAULT_BATCH.get(model.device.type, 32))
        self.reader = Reader(model.network, self.to_proposal, self.batch)
        self.rows_of = RowsOf(model.network, self.to_proposal)
        self.fingerprint = fingerprint(model.fingerprint(), self.end, self.n_tokens)

    @property
    def name(self) -> str:
        return self.model.name

    def save_pretrained(self, folder: Path) -> None:
        """Write a checkpoint of the model, with its tokenizer."""
        with quiet_transformers():
            self.model.model.save_pretrained(folder)
            self.model.tokenizer.save_pretrained(folder)

    @property
    def rows_at_once(self) -> int:
        """Return the rows of a pass, which shrink if they do not fit into GPU memory."""
        return self.batch.size

    @property
    def batch_size(self) -> int:
        return min(self.batch.size, self.max_examples)

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self.batch.size = AdaptiveBatch(size).size

    @property
    def examples_at_once(self) -> int:
        """Return 1 on a CPU where rows of several documents need copies, which are slower to make than to attend to."""
        makes_copies = self.device.type == "cpu" and not self.model.network.attends_by_document
        return 1 if makes_copies else max(1, min(self.rows_at_once // EXPECTED_BRANCHES, self.max_examples))

    @cached_property
    def has_rows(self) -> bool:
        """Tell whether rows can stand at their own positions, which is tried out on first use."""
        return rows_stand_apart(self.model.network, self.name)

    @abstractmethod
    def to_proposal(self, hidden: Tensor, logits: Tensor, is_first: Tensor) -> Proposal:
        """Return proposals from the hidden states (R, H) and logits (R, V) of a position; `is_first` (bool (R,)) marks
        rows that have read no token."""

    def start_reading(self, inputs: Tensor) -> Reading:
        self.model.network.check_inputs(inputs)
        return Reading.of(inputs, self.model.network)

    def next_tokens(self, logits: Tensor, is_first: Tensor) -> Tensor:
        """Return the likeliest tokens (R,), or the forced token where it is the first (bool (R,))."""
        likeliest = logits.argmax(1)
        return likeliest if self.model.first_token is None else likeliest.masked_fill(is_first, self.model.first_token)

    def with_log_probs(self) -> Self:
        """Return a copy whose readings have logits."""
        other = copy.copy(self)
        other.reader = Reader(self.model.network, other.to_proposal, self.batch, keeps_logits=True)
        return other

    def log_probs_of(self, reading: Reading, rows: Tensor | None = None) -> Tensor:
        """Return log probabilities (R, V) from a reading with logits. A forced token is certain, and the pair's end
        token has the probability of all end tokens of the model."""
        logits = reading.logits(rows)[:, : self.n_tokens].float()
        is_first = torch.full((len(logits),), not reading.tokens.shape[1], device=logits.device)
        log_probs = self.model.restrict(logits, is_first).log_softmax(1)
        if self.model.first_token is not None and not reading.tokens.shape[1]:
            log_probs = torch.full_like(log_probs, -torch.inf)
            log_probs[:, self.model.first_token] = 0
        ends = [one for one in self.model.ends if one < self.n_tokens]
        if self.end is not None and set(ends) - {self.end}:
            every = log_probs[:, list({*ends, self.end})].logsumexp(1)
            log_probs[:, ends] = -torch.inf
            log_probs[:, self.end] = every
        return log_probs

    def unify_ends(self, tokens: Tensor) -> Tensor:
        """Replace every end token of the model by the pair's."""
        for other in self.model.ends:
            if other != self.end and self.end is not None:
                tokens = torch.where(tokens == other, self.end, tokens)
        return tokens


class TextPredictor(_Writer, Predictor[Reading]):
    """A predictor that proposes the likeliest token. Uncertainty is -log p(token), in nats; entropy is given too.

    `shown` chooses what rejectors see:

    states   as in the paper: context is the mean state of the encoder (or of the prompt), features are the input of the
             output layer at the last position
    facts    plain numbers about the input and the proposed token: `facts`, by default those of a document
    both     states, then facts
    """

    def __init__(
        self,
        model: TextModel,
        *,
        end: int | None = None,
        n_tokens: int | None = None,
        shown: str = "states",
        facts: TokenFacts | None = None,
    ) -> None:
        super().__init__(model, end=end, n_tokens=n_tokens)
        require_known("choice of what rejectors see", shown, FEATURE_SETS)
        self.vocabulary_size = self.n_tokens
        self.shown, self.facts = shown, facts or DocumentFacts()
        self.showing = Replayed(lambda inputs, tokens, *parts: self.show(Proposal(*parts), inputs, tokens).tensors())
        named = [self.facts.name] if self.facts.name and shown != "states" else []
        self.writer, self.fingerprint = self.fingerprint, fingerprint(self.fingerprint, shown, *named)

    def to_proposal(self, hidden: Tensor, logits: Tensor, is_first: Tensor) -> Proposal:
        """Return proposals whose features are the hidden state, what facts make of the distribution, the second
        likeliest token and its log p."""
        log_probs = self.model.restrict(logits[:, : self.n_tokens].float(), is_first).log_softmax(1)
        best, likeliest = _best_two(log_probs)
        tokens = self.next_tokens(log_probs, is_first)
        # Finite even if a model allows a single token and the second has log p = -inf.
        weighed = [self.facts.of_distribution(log_probs, tokens)] if self.shown != "states" else []
        second = [likeliest[:, 1:].float(), best[:, 1:].clamp(min=-1e4)]
        features = torch.cat([hidden.float(), *weighed, *second], 1)
        uncertainty = -log_probs.gather(1, tokens[:, None]).squeeze(1)
        entropy = -torch.linalg.vecdot(log_probs.exp(), log_probs.clamp(min=-1e4))  # 0 x log 0 is 0
        if self.model.first_token is not None:  # a forced token is certain
            uncertainty, entropy = uncertainty.masked_fill(is_first, 0), entropy.masked_fill(is_first, 0)
        return Proposal(self.unify_ends(tokens), features, uncertainty, entropy.clamp(min=0))

    def start(self, inputs: Tensor) -> tuple[Reading, Tensor]:
        reading = self.reader.catch_up(self.start_reading(inputs))
        return reading, self.context_of(reading.inputs, reading.context())

    def context_of(self, inputs: Tensor, states: Tensor) -> Tensor:
        """Return what rejectors see of inputs (B, S): the mean state (B, C) of each, facts, or both."""
        parts = [states] if self.shown != "facts" else []
        if self.shown != "states":
            parts.append(self.facts.of_inputs(inputs))
        return torch.cat(parts, 1)

    def propose(self, state: Reading) -> Proposal:
        return self.show(state.proposal(), state.inputs, state.tokens)

    def show(self, proposal: Proposal, inputs: Tensor, tokens: Tensor) -> Proposal:
        """Replace the features of `to_proposal` by what rejectors see. Tokens (R, T) are padded with PADDING."""
        n_noted, n_weighed = self.model.network.n_noted, self.facts.n_weighed if self.shown != "states" else 0
        n_states = proposal.features.shape[1] - n_noted - n_weighed - 2
        hidden, noted, weighed, second, log_prob = proposal.features.split([n_states, n_noted, n_weighed, 1, 1], 1)
        parts = [hidden] if self.shown != "facts" else []
        if self.shown != "states":
            likeliest = torch.cat([proposal.tokens[:, None], second.long()], 1)
            log_probs = torch.cat([-proposal.uncertainty[:, None], log_prob], 1)
            parts.append(self.facts.of_tokens(ProposedTokens(inputs, tokens, likeliest, log_probs, noted, weighed)))
        return replace(proposal, features=torch.cat(parts, 1))

    def log_probs(self, state: Reading) -> Tensor:
        return self.log_probs_of(state)

    def append(self, state: Reading, tokens: Tensor) -> Reading:
        return self.extend(state, tokens[:, None])

    def extend(self, state: Reading, tokens: Tensor) -> Reading:
        return self.reader.catch_up(state.append(tokens))

    def rows(self) -> TextPredictorRows | None:
        return TextPredictorRows(self) if self.has_rows else None


class TextExpert(_Writer, NextTokenExpert[Reading]):
    """An expert that names the likeliest next token.

    `reads_along`: when one row reads, all rows that have ever read do, so that they stay in one block. On a GPU the
    number of rows hardly changes the cost of a pass, and gathering rows from many blocks costs more.
    """

    def __init__(self, model: TextModel, *, end: int | None = None, n_tokens: int | None = None) -> None:
        super().__init__(model, end=end, n_tokens=n_tokens)
        self.reads_along = self.device.type == "cuda"

    def to_proposal(self, hidden: Tensor, logits: Tensor, is_first: Tensor) -> Proposal:
        allowed = self.model.restrict(logits[:, : self.n_tokens], is_first)
        tokens = self.unify_ends(self.next_tokens(allowed, is_first))
        return Proposal(tokens, hidden, tokens)  # an expert's uncertainty is not used

    def start(self, examples: Examples) -> Reading:
        return self.start_reading(examples.inputs)

    def next(self, state: Reading, rows: Tensor) -> tuple[Tensor, Reading]:
        read = torch.cat([rows.cpu(), state.started_rows()]) if self.reads_along else rows
        state = self.reader.catch_up(state, read)
        return state.proposal(rows).tokens.to(rows.device), state

    def read(self, state: Reading, tokens: Tensor) -> tuple[Tensor, Reading]:
        named, state = self.reader.read(state, tokens)
        return named.to(tokens.device), state

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        going = (~spec.is_over(prefixes)).nonzero().squeeze(1)
        is_graphed = self.device.type == "cuda" and 0 < len(going) <= MAX_GRAPHED_ROWS
        if not (is_graphed and self.has_rows):
            return super().complete(examples, prefixes, spec)
        self.start_reading(examples.inputs)  # checks them
        some = prefixes.select(going)
        written = complete_rows(self.rows_of.rows(), examples.inputs[going.to(examples.inputs.device)], some, spec)
        tokens = prefixes.tokens.index_copy(0, going, written.tokens)
        return Sequences(tokens, prefixes.lengths.index_copy(0, going, written.lengths))

    def log_probs(self, state: Reading, rows: Tensor) -> Tensor:
        return self.log_probs_of(state, rows).to(rows.device)

    def append(self, state: Reading, tokens: Tensor) -> Reading:
        return state.append(tokens[:, None])

    def extend(self, state: Reading, tokens: Tensor) -> Reading:
        return state.append(tokens)

    def rows(self) -> TextExpertRows | None:
        return TextExpertRows(self) if self.has_rows else None


def _best_two(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two largest values of each row (R, V) and their columns, each (R, 2). A GPU takes longer to sort."""
    if not values.is_cuda:
        best, columns = values.topk(2, 1)
        return best, columns
    first, column = values.max(1, keepdim=True)
    second, other = values.scatter(1, column, -torch.inf).max(1, keepdim=True)
    return torch.cat([first, second], 1), torch.cat([column, other], 1)


@dataclass(frozen=True)
class TextPair:
    """Two local models that share a vocabulary and an end token."""

    predictor: TextPredictor
    expert: TextExpert

    @property
    def models(self) -> tuple[TextModel, ...]:
        """Return the local models."""
        return self.predictor.model, self.expert.model

    @classmethod
    def of(
        cls, predictor: TextModel, expert: TextModel, shown: str = "states", facts: TokenFacts | None = None
    ) -> TextPair:
        check_vocabulary(predictor.tokenizer, expert.tokenizer)
        end = next(iter(predictor.ends or expert.ends), None)
        n_tokens = min(predictor.n_tokens, expert.n_tokens)  # further ids only pad a vocabulary to a round size
        return cls(
            TextPredictor(predictor, end=end, n_tokens=n_tokens, shown=shown, facts=facts),
            TextExpert(expert, end=end, n_tokens=n_tokens),
        )


@dataclass(frozen=True)
class MixedPair:
    """A local predictor and an expert of another kind: remote, or from another package."""

    predictor: TextPredictor
    expert: Expert

    @property
    def models(self) -> tuple[TextModel, ...]:
        """Return the local models."""
        return (self.predictor.model,)

    @classmethod
    def of_remote(
        cls, predictor: TextModel, client: EndpointClient, *, prompt: str, by_token: bool = False, shown: str = "states"
    ) -> MixedPair:
        """Return a pair whose expert exchanges texts, so that it needs no common vocabulary; by token, it exchanges
        token ids where the server allows it."""
        writer = TextPredictor(predictor, shown=shown)
        if writer.end is None:
            raise OptionError(f"{predictor.name} has no end token, which a remote expert needs; choose another model")
        adapter = PromptAdapter(predictor, writer.end, prompt)
        return cls(writer, (RemoteTokenExpert if by_token else RemoteExpert)(adapter, client))


def load_pair(
    predictor: str | Path,
    expert: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    cache_bytes: int = 0,
    shown: str = "states",
) -> TextPair:
    """Load two checkpoints as a pair. See `load_text_model`; `shown`: see `TextPredictor`."""
    small, large = (
        load_text_model(source, device=device, dtype=dtype, cache_bytes=cache_bytes) for source in (predictor, expert)
    )
    return TextPair.of(small, large, shown)
