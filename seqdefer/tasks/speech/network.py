"""Forward passes of Whisper: waveforms in; key-value cache, last hidden state and its logits out.

The encoder reads log-mel features of a window of 30 s. Shorter clips are padded with silence, to which the decoder
attends as to the rest: there is no mask. The decoder starts with a prompt that names the language and the task.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import DataError
from seqdefer.tasks.speech.attention import N_NOTED, attention_by_clip, watched_attention
from seqdefer.tasks.speech.audio import SAMPLE_RATE
from seqdefer.tasks.speech.waveforms import NO_SAMPLE, n_samples, stack_waveforms, to_waveform
from seqdefer.tasks.text.encoder_cache import Encode, EncoderCache
from seqdefer.tasks.text.passes import EncoderDecoder, EncoderStates, ForwardPass, KeyValueCache

SAMPLES_PER_STATE = 320  # two frames of 10 ms


class SpeechNetwork(EncoderDecoder):
    """Whisper and models like it. Inputs are waveforms, int16 (R, W), padded with NO_SAMPLE.

    `extractor` makes features of waveforms. `heads`: cross-attention heads to watch, by layer.
    """

    padding = NO_SAMPLE
    reads_ids = False
    attends_by_document = True

    def __init__(
        self,
        model: Any,
        prompt: Sequence[int],
        encoder_cache: EncoderCache,
        extractor: Any,
        heads: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(model, prompt, encoder_cache)
        self.extractor, self.heads = extractor, heads or {}
        self.n_noted = N_NOTED if self.heads else 0
        self.n_states = int(model.config.max_source_positions)

    @property
    def max_seconds(self) -> float:
        """Return the length of the window."""
        return self.n_states * SAMPLES_PER_STATE / SAMPLE_RATE

    def limit(self) -> int:
        return int(self.model.config.max_target_positions)

    def check_inputs(self, inputs: Tensor) -> None:
        if inputs.dtype != torch.int16 or inputs.ndim != 2:
            raise DataError(f"inputs are {inputs.dtype} {tuple(inputs.shape)}; give waveforms as int16 (n, samples)")
        if inputs.shape[1] > self.n_states * SAMPLES_PER_STATE:
            seconds = inputs.shape[1] / SAMPLE_RATE
            raise DataError(f"a clip has {seconds:.1f} s; the model hears {self.max_seconds:g} s: cut it into clips")

    def split_inputs(self, inputs: Tensor) -> list[Any]:
        return [row[row != NO_SAMPLE] for row in inputs]

    def stack_inputs(self, rows: Sequence[Any]) -> Tensor:
        return stack_waveforms(rows).to(self.device)

    def input_size(self, row: Any) -> int:
        return self.n_states

    def encode(self, inputs: Tensor) -> EncoderStates:
        states = self.encoder_cache.get(inputs, self._encode)
        n_heard = -(-n_samples(inputs) // SAMPLES_PER_STATE)  # states of the clip, not of the silence after it
        given = torch.arange(self.n_states, device=inputs.device) < n_heard[:, None]
        return EncoderStates(states, given, None)

    def extend(self, cache: KeyValueCache, tokens: Tensor, *, says_all: bool = False) -> ForwardPass:
        if not (self.attends_by_document and cache.shared_layers(even_one=True)):
            return super().extend(cache, tokens, says_all=says_all)
        with self.lock, attention_by_clip(self.model):
            return super().extend(cache, tokens, says_all=says_all)

    def features(self, inputs: Tensor) -> Tensor:
        """Return the log-mel features of waveforms (R, W). (R, mel bins, frames)"""
        waveforms = [to_waveform(row) for row in inputs]
        device = str(self.device)  # a core takes 40 ms for a clip
        made = self.extractor(waveforms, sampling_rate=SAMPLE_RATE, return_tensors="pt", device=device).input_features
        features: Tensor = made.to(self.device, self.model.dtype)
        return features

    def _encode(self, inputs: Tensor) -> Tensor:
        states: Tensor = self.encoder(input_features=self.features(inputs)).last_hidden_state
        return states

    @contextmanager
    def watching(self) -> Iterator[Callable[[Tensor], Tensor]]:
        if not self.heads:
            yield lambda hidden: hidden
            return
        with watched_attention(self.model, self.heads) as noted:
            yield noted

    def for_trial(self) -> tuple[SpeechNetwork, list[Any]]:
        """Return a network whose encoder states are random: a trial of the decoder does not need real ones, which take
        seconds."""
        other = copy.copy(self)
        other.lock = self.lock
        other.encoder_cache = _RandomStates(self.n_states, int(self.model.config.d_model), self.model.dtype)
        return other, [torch.ones(n, dtype=torch.int16) for n in (5, 2)]


class _RandomStates(EncoderCache):
    """Random states, the same for waveforms of the same length."""

    def __init__(self, n_states: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = (n_states, size), dtype

    def get(self, inputs: Tensor, encode: Encode) -> Tensor:
        rows = [torch.randn(self.shape, generator=torch.Generator().manual_seed(n)) for n in n_samples(inputs).tolist()]
        return torch.stack(rows).to(inputs.device, self.dtype)
