"""Plain numbers about a proposed token of a transcript: what it is, where the predictor listens, how loud it is there.

Log probability and entropy come with every proposal (`Settings.inputs`); `FACTS` names what is added. A rejector can be
fitted without one of them, to see what it is worth: SpeechFacts(tokenizer, n_tokens, names=[...]).

Facts about a clip are its length in seconds and the log of it, and the levels in dB that 90, 50 and 10 % of its windows
of 20 ms stay below: speech, average and background.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import unknown
from seqdefer.tasks.speech.audio import SAMPLE_RATE
from seqdefer.tasks.speech.network import SAMPLES_PER_STATE
from seqdefer.tasks.speech.waveforms import NO_SAMPLE, SCALE, n_samples
from seqdefer.tasks.text.facts import ProposedTokens, TokenFacts
from seqdefer.tasks.text.passes import PADDING

FACTS = {
    "margin": "log probability of the token less that of the runner-up",
    "alike": "log probability of all tokens that read like it: case and punctuation do not count",
    "rival": "that less the log probability of the likeliest token that reads otherwise",
    "rarity": "log of its number in the vocabulary, which is sorted by frequency",
    "begins_word": "it begins with a space",
    "is_digit": "it has a digit",
    "is_capital": "its first letter is a capital",
    "is_mark": "it has neither letter nor digit: punctuation, or the end",
    "is_end": "it ends the text",
    "repeats": "log(1 + how often it was written before)",
    "sharpness": "log of the largest weight of cross-attention",
    "spread": "entropy of cross-attention",
    "place": "where cross-attention points, in seconds",
    "level": "signal level there, in dB",
    "position": "number of tokens before it",
}
MIN_LEVEL = -100.0  # dB, below the noise of 16-bit samples
HEARD = SAMPLE_RATE // 5  # samples around a place whose level is measured: 200 ms
QUANTILES = (0.9, 0.5, 0.1)
MIN_LOG_PROB = -1e4  # finite even where no other token is allowed


class SpeechFacts(TokenFacts):
    """Facts about clips and their transcripts. `names`: those of `FACTS` to show, by default all."""

    n_weighed = 2

    def __init__(self, tokenizer: Any, n_tokens: int, names: Sequence[str] = tuple(FACTS)) -> None:
        for name in names:
            if name not in FACTS:
                raise unknown("fact", name, FACTS)
        self.names = [name for name in FACTS if name in names]
        self.name = " ".join(["speech", *self.names])
        self.words = word_table(tokenizer, n_tokens)  # (V, 5)
        self.readings = reading_table(tokenizer, n_tokens)  # (V,)

    def of_inputs(self, inputs: Tensor) -> Tensor:
        seconds = n_samples(inputs)[:, None].float() / SAMPLE_RATE
        levels = torch.stack([_level_quantiles(row) for row in inputs])
        return torch.cat([seconds, seconds.log(), levels], 1)

    def of_distribution(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """Return the log probability of all tokens that read like the proposed one, and of the likeliest other."""
        self.readings = self.readings.to(log_probs.device)
        is_alike = self.readings == self.readings[tokens][:, None]  # (B, V)
        alike = log_probs.masked_fill(~is_alike, -torch.inf).logsumexp(1)
        other = log_probs.masked_fill(is_alike, -torch.inf).amax(1)
        return torch.stack([alike, other], 1).clamp(min=MIN_LOG_PROB)

    def of_tokens(self, proposed: ProposedTokens) -> Tensor:
        self.words = self.words.to(proposed.likeliest.device)  # once: a CUDA graph cannot record it
        facts = speech_facts(proposed, self.words)
        return torch.stack([facts[name] for name in self.names], 1)


def speech_facts(proposed: ProposedTokens, words: Tensor) -> dict[str, Tensor]:
    """Return the facts by name, (B,) each. `words`: see `word_table`."""
    token = proposed.likeliest[:, 0]
    begins_word, is_digit, is_capital, is_mark, is_end = words[token.clamp(max=len(words) - 1)].unbind(1)
    alike, other = proposed.weighed.unbind(1)
    sharpness, spread, place = proposed.noted.unbind(1)
    return {
        "margin": proposed.log_probs[:, 0] - proposed.log_probs[:, 1],
        "alike": alike,
        "rival": alike - other,
        "rarity": token.log1p() * (1 - is_end),
        "begins_word": begins_word,
        "is_digit": is_digit,
        "is_capital": is_capital,
        "is_mark": is_mark,
        "is_end": is_end,
        "repeats": (proposed.prefix == token[:, None]).sum(1).log1p(),
        "sharpness": sharpness,
        "spread": spread,
        "place": place * SAMPLES_PER_STATE / SAMPLE_RATE,
        "level": level_at(proposed.inputs, place),
        "position": (proposed.prefix != PADDING).sum(1).float(),
    }


def word_table(tokenizer: Any, n_tokens: int) -> Tensor:
    """Return what each token is: begins with a space, has a digit, begins with a capital, has neither letter nor digit,
    is special. float32 (V, 5)"""
    special, rows = set(tokenizer.all_special_ids), []
    for number, text in enumerate(_texts(tokenizer, n_tokens)):
        has_digit, is_mark = any(letter.isdigit() for letter in text), not any(letter.isalnum() for letter in text)
        rows.append([text.startswith(" "), has_digit, text.lstrip()[:1].isupper(), is_mark, number in special])
    table = torch.tensor(rows, dtype=torch.float32)
    return torch.nn.functional.pad(table, (0, 0, 0, n_tokens - len(table)))


def reading_table(tokenizer: Any, n_tokens: int) -> Tensor:
    """Return a number for each token, the same for those that read alike: they begin a word or go on with one, and have
    the same letters and digits whatever their case. Punctuation and special tokens are 0. int64 (V,)"""
    numbers: dict[tuple[bool, str], int] = {}
    rows = []
    for text in _texts(tokenizer, n_tokens):
        read = "".join(letter for letter in text.casefold() if letter.isalnum())
        rows.append(numbers.setdefault((text.startswith(" "), read), 1 + len(numbers)) if read else 0)
    return torch.tensor(rows + [0] * (n_tokens - len(rows)))


def _texts(tokenizer: Any, n_tokens: int) -> list[str]:
    """Return the tokens as text, special ones as nothing."""
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(list(range(min(n_tokens, len(tokenizer)))))
    return [
        "" if number in special else str(tokenizer.convert_tokens_to_string([name]))
        for number, name in enumerate(names)
    ]


def level_at(inputs: Tensor, places: Tensor) -> Tensor:
    """Return the level of the 200 ms around places (B,), in states of the encoder, in dB; of waveforms (B, W)."""
    first = ((places + 0.5) * SAMPLES_PER_STATE - HEARD / 2).long()
    columns = first[:, None] + torch.arange(HEARD, device=inputs.device)
    is_within = (columns >= 0) & (columns < inputs.shape[1])
    heard = inputs.gather(1, columns.clamp(0, inputs.shape[1] - 1))
    power = (heard.float() / SCALE).square() * (is_within & (heard != NO_SAMPLE))
    return _decibels(power.mean(1))


def _level_quantiles(row: Tensor) -> Tensor:
    """Return the quantiles of the levels of all whole windows of 20 ms of one waveform (W,). (3,)"""
    samples = row[row != NO_SAMPLE].float() / SCALE
    windows = samples[: len(samples) // SAMPLES_PER_STATE * SAMPLES_PER_STATE].view(-1, SAMPLES_PER_STATE)
    windows = windows if len(windows) else samples[None]
    return _decibels(windows.square().mean(1)).quantile(torch.tensor(QUANTILES, device=row.device))


def _decibels(power: Tensor) -> Tensor:
    return 10 * power.clamp(min=10 ** (MIN_LEVEL / 10)).log10()
