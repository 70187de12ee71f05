"""Synthetic models to measure the cost of labels: Llamas of any size with random weights, and predictors that disagree
with an expert at a given rate. Their output is noise, but its cost is realistic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.text import IdTokenizer
from seqdefer.interfaces import NextTokenExpert, Predictor, SplitName, Task
from seqdefer.tasks.text.models import text_model, transformers
from seqdefer.tasks.text.pairs import TextExpert
from seqdefer.testing.fakes import ToyState, mix
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec

MAX_POSITIONS = 4096


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama: `inner` is the width of its feed-forward layers, `cache_heads` counts key-value heads."""

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    cache_heads: int
    vocabulary: int = 32_000

    @property
    def parameters(self) -> int:
        attention = 2 * self.width * (self.width + self.cache_width)
        layer = attention + 3 * self.width * self.inner + 2 * self.width
        return self.layers * layer + 2 * self.vocabulary * self.width + self.width

    @property
    def cache_width(self) -> int:
        return self.width // self.heads * self.cache_heads


def random_expert(shape: Shape, device: torch.device, dtype: torch.dtype) -> TextExpert:
    """Make an expert with random weights and no end token, so that all sequences have the full length."""
    config = transformers().LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.cache_heads,
        max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # create the weights in their final type: there is no memory for two copies
    try:
        with torch.random.fork_rng(devices=()), torch.device(device):
            torch.manual_seed(0)
            model = transformers().LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return TextExpert(text_model(model, IdTokenizer(shape.vocabulary, end=None), shape.name))


@dataclass(frozen=True)
class _State:
    expert: Any
    place: ToyState
    named: Tensor  # (B,) the expert's next token


class DisagreeingPredictor(Predictor[_State]):
    """A predictor that writes another token than the expert after a share of all prefixes, chosen by a hash."""

    def __init__(self, expert: NextTokenExpert[Any], share: float, vocabulary: int, device: torch.device) -> None:
        self.expert, self.share, self.vocabulary, self.device = expert, share, vocabulary, device
        self.batch_size, self.fingerprint = expert.batch_size, f"straying-{share}"

    def start(self, inputs: Tensor) -> tuple[_State, Tensor]:
        key = inputs.sum(1)
        state = self.expert.start(Examples(inputs, inputs[:, :0], torch.arange(len(inputs), device=self.device)))
        return self._at(state, ToyState.before(key)), key[:, None].float()

    def propose(self, state: _State) -> Proposal:
        draw = mix(state.place.inputs, state.place.prefix, 5) / 2**31
        tokens = torch.where(draw < self.share, (state.named + 1) % self.vocabulary, state.named)
        return Proposal(tokens, draw[:, None].float(), draw.float())

    def append(self, state: _State, tokens: Tensor) -> _State:
        return self._at(self.expert.append(state.expert, tokens), state.place.append(tokens))

    def select(self, state: _State, rows: Tensor) -> _State:
        return _State(self.expert.select(state.expert, rows), state.place.select(rows), state.named[rows])

    def _at(self, expert_state: Any, place: ToyState) -> _State:
        named, expert_state = self.expert.next(expert_state, torch.arange(len(place.inputs), device=self.device))
        return _State(expert_state, place, named.to(self.device))


class DisagreeingTask(Task):
    """Random documents, an expert, and a predictor that disagrees with it at a given rate. All losses are 0."""

    name, loss_unit = "straying", "nothing"

    def __init__(self, expert: TextExpert, share: float, n: int, width: int, length: int) -> None:
        vocabulary = expert.n_tokens
        self.expert, self.spec = expert, SequenceSpec(length)
        self.predictor = DisagreeingPredictor(expert, share, vocabulary, expert.device)
        inputs = torch.randint(3, vocabulary, (n, width), generator=torch.Generator().manual_seed(0))
        self.examples = Examples(inputs, inputs[:, :0], torch.arange(n)).to(expert.device)

    def split(self, name: SplitName) -> Examples:
        return self.examples

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        return torch.zeros(len(examples), device=examples.ids.device)

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return torch.zeros(len(examples), device=examples.ids.device)


@dataclass
class TokenCounts:
    """Tokens processed by a model: those in passes over one token per row, and all others."""

    read: int = 0
    written: int = 0

    def add(self, ids: Tensor, *, is_input: bool = False) -> None:
        if ids.shape[1] == 1 and not is_input:
            self.written += ids.numel()
        else:
            self.read += ids.numel()


@contextmanager
def count_tokens(model: Any) -> Iterator[TokenCounts]:
    """Count the tokens of every pass of a Hugging Face model, including padding and finished rows."""
    tokens = TokenCounts()

    def ids_of(arguments: Any, options: Any) -> Tensor:
        ids: Tensor = options["input_ids"] if options.get("input_ids") is not None else arguments[0]
        return ids

    def read(_: Any, arguments: Any, options: Any) -> None:
        tokens.add(ids_of(arguments, options), is_input=True)

    def write(_: Any, arguments: Any, options: Any) -> None:
        tokens.add(ids_of(arguments, options))

    has_encoder = model.config.is_encoder_decoder
    hooked = [(model.get_encoder(), read), (model.get_decoder(), write)] if has_encoder else [(model.model, write)]
    hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooked]
    try:
        yield tokens
    finally:
        for hook in hooks:
            hook.remove()
