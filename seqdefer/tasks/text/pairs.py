"""A predictor and an expert over Hugging Face models, decoding greedily.

    pair = load_pair("google/flan-t5-small", "google/flan-t5-base")
    inputs, cut = pair.predictor.model.encode(["summarize: ..."], longest=448)

Inputs are token ids (n, S), rows ending with PADDING where they are shorter; tokens are what follows the decoder's
start token or the prompt. Both models keep their caches. The expert is lazy: it encodes a document when a row first
asks, and reads the tokens it has not read in one pass when the row asks again; a row that never asks costs nothing.
The expert may also be elsewhere (`seqdefer.tasks.text.remote`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from seqdefer.errors import OptionError, unknown
from seqdefer.interfaces import BRANCHES, NextTokenExpert, Predictor
from seqdefer.remote.client import EndpointClient
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.text.facts import facts_of
from seqdefer.tasks.text.loading import load_text_model
from seqdefer.tasks.text.memory import Halving
from seqdefer.tasks.text.models import TextModel, check_inputs, check_vocabulary
from seqdefer.tasks.text.passes import Pass
from seqdefer.tasks.text.reading import Reader, Reading
from seqdefer.tasks.text.remote import RemoteExpert, RemoteTokenExpert, Script
from seqdefer.types import Examples, Proposal

SHOWN = ("facts", "states", "both")
DEFAULT_BATCH = {"cpu": 32, "cuda": 512}  # rows at once; a GPU that holds fewer says so and goes on


class _Writer(ABC):
    """What predictor and expert share. `end` is the token that ends a sequence of the pair."""

    def __init__(self, model: TextModel, *, end: int | None = None, n_tokens: int | None = None) -> None:
        self.model, self.device = model, model.device
        self.end = end if end is not None else next(iter(model.ends), None)
        self.n_tokens = min(n_tokens or model.n_tokens, model.n_tokens)
        self.halving = Halving(DEFAULT_BATCH.get(model.device.type, 32))
        self.reader = Reader(model.network, self.judge, self.halving)
        self.fingerprint = fingerprint(model.fingerprint(), self.end, self.n_tokens)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def batch_size(self) -> int:
        """Rows worked on at once. It shrinks where they do not fit into the memory of a GPU."""
        return self.halving.size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self.halving.size = Halving(size).size

    @property
    def examples_at_once(self) -> int:
        """On a CPU one: its rows share what was read of the document, which costs more to copy than to read with."""
        return 1 if self.device.type == "cpu" else max(1, self.batch_size // BRANCHES)

    @abstractmethod
    def judge(self, run: Pass, read: int) -> Proposal:
        """What is said of the rows of a pass that has read `read` tokens."""

    def unread(self, inputs: Tensor) -> Reading:
        check_inputs(inputs, self.model.n_tokens)
        return Reading.of(inputs, self.device)

    def named(self, logits: Tensor, read: int) -> Tensor:
        """The next tokens (R,): the likeliest ones, or the one that every sequence begins with."""
        if read == 0 and self.model.first is not None:
            return torch.full_like(logits[:, 0], self.model.first, dtype=torch.long)
        return logits.argmax(1)

    def as_end(self, tokens: Tensor) -> Tensor:
        """Every end token of the model becomes that of the pair."""
        for other in self.model.ends:
            if other != self.end and self.end is not None:
                tokens = torch.where(tokens == other, self.end, tokens)
        return tokens


class TextPredictor(_Writer, Predictor[Reading]):
    """Proposes the likeliest token. Uncertainty: -log p(token), in nats; entropy.

    `shown` is what rejectors may look at. states, as in the paper: context is the mean of the encoder's states (without
    an encoder: of the prompt's), features the last hidden state, as the output layer sees it. facts: context is the
    length of the document, features those of `facts_of`. both: one after the other."""

    def __init__(
        self, model: TextModel, *, end: int | None = None, n_tokens: int | None = None, shown: str = "states"
    ) -> None:
        super().__init__(model, end=end, n_tokens=n_tokens)
        if shown not in SHOWN:
            raise unknown("choice of what rejectors see", shown, SHOWN)
        self.shown = shown
        self.fingerprint = fingerprint(self.fingerprint, shown)

    def judge(self, run: Pass, read: int) -> Proposal:
        """The features are the hidden state, and the second likeliest token with its log p for the facts."""
        log_probs = run.logits[:, : self.n_tokens].float().log_softmax(1)
        best, likeliest = log_probs.topk(2, 1)
        tokens = self.named(log_probs, read)
        # A model that allows one token alone gives the second -inf, which no network could read.
        features = torch.cat([run.hidden.float(), likeliest[:, 1:].float(), best[:, 1:].clamp(min=-1e4)], 1)
        if read == 0 and self.model.first is not None:  # certain
            zero = torch.zeros_like(log_probs[:, 0])
            return Proposal(tokens, features, zero, zero)
        uncertainty = -log_probs.gather(1, tokens[:, None]).squeeze(1)
        entropy = -torch.linalg.vecdot(log_probs.exp(), log_probs.clamp(min=-1e4))  # 0 x log 0 is 0
        return Proposal(self.as_end(tokens), features, uncertainty, entropy.clamp(min=0))

    def start(self, inputs: Tensor) -> tuple[Reading, Tensor]:
        reading = self.reader.catch_up(self.unread(inputs))
        length = reading.lengths[:, None].to(reading.tokens.device).float().log()
        parts = {"states": [reading.context()], "facts": [length], "both": [reading.context(), length]}
        return reading, torch.cat(parts[self.shown], 1)

    def propose(self, state: Reading) -> Proposal:
        said = state.said()
        hidden, second, log_prob = said.features.split([said.features.shape[1] - 2, 1, 1], 1)
        parts = [hidden] if self.shown != "facts" else []
        if self.shown != "states":
            likeliest = torch.cat([said.tokens[:, None], second.long()], 1)
            log_probs = torch.cat([-said.uncertainty[:, None], log_prob], 1)
            parts.append(facts_of(state.inputs, state.tokens, likeliest, log_probs))
        return replace(said, features=torch.cat(parts, 1))

    def append(self, state: Reading, tokens: Tensor) -> Reading:
        return self.extend(state, tokens[:, None])

    def extend(self, state: Reading, tokens: Tensor) -> Reading:
        return self.reader.catch_up(state.append(tokens))

    def select(self, state: Reading, rows: Tensor) -> Reading:
        return state.select(rows)


class TextExpert(_Writer, NextTokenExpert[Reading]):
    """Names the likeliest next token to whoever asks.

    `reads_along`: when one row asks, all that have ever asked read on with it, so that they stay together in one block.
    On a GPU a pass costs nearly the same however many rows it has, and gathering rows from many blocks costs more."""

    def __init__(self, model: TextModel, *, end: int | None = None, n_tokens: int | None = None) -> None:
        super().__init__(model, end=end, n_tokens=n_tokens)
        self.reads_along = self.device.type == "cuda"

    def judge(self, run: Pass, read: int) -> Proposal:
        tokens = self.as_end(self.named(run.logits[:, : self.n_tokens], read))
        return Proposal(tokens, run.hidden, tokens)  # nobody asks an expert how sure it is

    def start(self, examples: Examples) -> Reading:
        return self.unread(examples.inputs)

    def next(self, state: Reading, rows: Tensor) -> tuple[Tensor, Reading]:
        reading = torch.cat([rows.cpu(), state.begun()]) if self.reads_along else rows
        state = self.reader.catch_up(state, reading)
        return state.said(rows).tokens.to(rows.device), state

    def append(self, state: Reading, tokens: Tensor) -> Reading:
        return state.append(tokens[:, None])

    def extend(self, state: Reading, tokens: Tensor) -> Reading:
        return state.append(tokens)

    def select(self, state: Reading, rows: Tensor) -> Reading:
        return state.select(rows)


@dataclass(frozen=True)
class TextPair:
    """Two writers that share a vocabulary and an end token."""

    predictor: TextPredictor
    expert: TextExpert

    @property
    def models(self) -> tuple[TextModel, ...]:
        """Those that read here."""
        return self.predictor.model, self.expert.model

    @classmethod
    def of(cls, predictor: TextModel, expert: TextModel, shown: str = "states") -> TextPair:
        check_vocabulary(predictor.tokenizer, expert.tokenizer)
        end = next(iter(predictor.ends or expert.ends), None)
        n_tokens = min(predictor.n_tokens, expert.n_tokens)  # beyond, ids that pad a vocabulary to a round size
        return cls(
            TextPredictor(predictor, end=end, n_tokens=n_tokens, shown=shown),
            TextExpert(expert, end=end, n_tokens=n_tokens),
        )


@dataclass(frozen=True)
class RemotePair:
    """A writer here, and one elsewhere that is sent texts. They need not share a vocabulary."""

    predictor: TextPredictor
    expert: RemoteExpert | RemoteTokenExpert

    @property
    def models(self) -> tuple[TextModel, ...]:
        return (self.predictor.model,)

    @classmethod
    def of(
        cls, predictor: TextModel, client: EndpointClient, *, prompt: str, by_token: bool = False, shown: str = "states"
    ) -> RemotePair:
        writer = TextPredictor(predictor, shown=shown)
        if writer.end is None:
            raise OptionError(
                f"{predictor.name} has no end token, so what an endpoint wrote could not end; take another"
            )
        script = Script(predictor, writer.end, prompt)
        return cls(writer, (RemoteTokenExpert if by_token else RemoteExpert)(script, client))


def load_pair(
    predictor: str | Path,
    expert: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    remember: int = 0,
    shown: str = "states",
) -> TextPair:
    """Two checkpoints (see `load_text_model`) as a pair; `shown`: see `TextPredictor`."""
    small, large = (
        load_text_model(source, device=device, dtype=dtype, remember=remember) for source in (predictor, expert)
    )
    return TextPair.of(small, large, shown)
