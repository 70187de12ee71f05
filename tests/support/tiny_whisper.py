"""Tiny random Whisper models with a tokenizer of 70 words, clips for them, and what `generate` writes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tiny_models import lively
from torch import Tensor

from seqdefer.tasks.speech.models import speech_model
from seqdefer.tasks.speech.waveforms import stack_waveforms, to_waveform
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.types import Examples

N_WORDS = 60
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, NO_TIMES = 1, 60, 61, 62, 63, 64, 65
SPECIAL = ("<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>")
N_TOKENS = N_WORDS + len(SPECIAL)
SECONDS = 1  # of the window
LENGTH = 8  # tokens to write
SUPPRESSED = (5, 9, 17, 23, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, NO_TIMES)
SUPPRESSED_FIRST = (END, 30, 31, 32)


@cache
def tokenizer() -> Any:
    """Return a tokenizer whose words begin with spaces, capitals or digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kinds = ("Ġw{}", "Ġ{}", "ĠW{}", "x{}")
    words = {"Ġw0": 0, "<|endoftext|>": END, "<unk>": 2}
    words |= {kinds[number % 4].format(number): number for number in range(3, N_WORDS)}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    spaces = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokens.pre_tokenizer = pre_tokenizers.Sequence([spaces, pre_tokenizers.Split("Ġ", "merged_with_next")])
    tokens.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|endoftext|>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return fast


def tiny_whisper(n_layers: int, seed: int) -> Any:
    """Return a model whose greedy sequences differ from clip to clip and often end early."""
    import transformers as hf

    config = hf.WhisperConfig(
        vocab_size=N_TOKENS, num_mel_bins=8, d_model=16, max_source_positions=50 * SECONDS, max_target_positions=40,
        encoder_layers=n_layers, encoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_layers=n_layers, decoder_attention_heads=2, decoder_ffn_dim=32,
        pad_token_id=END, bos_token_id=END, eos_token_id=END, decoder_start_token_id=START,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = lively(hf.WhisperForConditionalGeneration(config), seed)
    model.generation_config = hf.GenerationConfig(
        pad_token_id=END, bos_token_id=END, eos_token_id=END, decoder_start_token_id=START, is_multilingual=True,
        lang_to_id={"<|en|>": ENGLISH, "<|de|>": GERMAN}, no_timestamps_token_id=NO_TIMES, return_timestamps=False,
        task_to_id={"translate": TRANSLATE, "transcribe": TRANSCRIBE},
        suppress_tokens=list(SUPPRESSED), begin_suppress_tokens=list(SUPPRESSED_FIRST),
    )  # fmt: skip
    return model


def tiny_speech_model(n_layers: int, seed: int, **how: Any) -> TextModel:
    return speech_model(tiny_whisper(n_layers, seed), tokenizer(), "tiny", **{"language": "en", **how})


@cache
def tiny_speech_pair(shown: str = "states") -> TextPair:
    """Return a cached pair. Shared: do not modify."""
    is_watched = shown != "states"
    facts = None
    if is_watched:
        from seqdefer.tasks.speech.features import SpeechFacts

        facts = SpeechFacts(tokenizer(), N_TOKENS)
    small, large = tiny_speech_model(1, 0, is_watched=is_watched), tiny_speech_model(2, 1)
    return TextPair.of(small, large, shown, facts)


def clips(n: int, seed: int = 0) -> Examples:
    """Return clips of tones and noise, of different lengths up to the whole window."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(n):
        most = 16_000 * SECONDS
        length = int(torch.randint(2_000, most, (), generator=generator)) if number else most
        times = torch.arange(length) / 16_000
        pitches, loud = torch.rand(3, generator=generator) * 3000 + 100, torch.rand(3, generator=generator)
        tones = (loud[:, None] * (pitches[:, None] * times * 6.2832).sin() * (times * 9 + loud[:, None]).sin()).sum(0)
        noise = torch.randn(length, generator=generator) * 0.05
        rows.append(((tones / 4 + noise).clamp(-1, 1) * 32_000).to(torch.int16))
    targets = torch.randint(3, N_WORDS, (n, 8), generator=generator)
    return Examples(stack_waveforms(rows), targets, torch.arange(n))


def generated(model: TextModel, inputs: Tensor, length: int, language: str | None = "en") -> list[list[int]]:
    """Return what Whisper's own `generate` writes: at most `length` tokens, with the end token where it ended."""
    network: Any = model.network
    rows = []
    for row in inputs:
        options = {} if language is None else {"language": language, "task": "transcribe"}
        written = model.model.generate(network.features(row[None]), max_new_tokens=length, do_sample=False, **options)
        tokens = [token for token in written[0].tolist() if token not in network.prompt and token not in model.ends]
        rows.append(tokens if len(tokens) == length else [*tokens, model.ends[0]])
    return rows


def save_place(folder: Path) -> Path:
    """Save checkpoints of a tiny pair."""
    for name, (n_layers, seed) in {"predictor": (1, 0), "expert": (2, 1)}.items():
        tiny_whisper(n_layers, seed).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    return folder


# -- corpora and tasks ---------------------------------------------------------------------------------------------


def write_corpus(folder: Path, n: int, *, synthetic: bool = False) -> Path:
    """Write clips with a manifest."""
    import json

    from seqdefer.tasks.speech.audio import write_clip

    lines, generator = [], torch.Generator().manual_seed(1)
    for number, row in enumerate(clips(n, seed=7).inputs):
        write_clip(folder / f"{number}.flac", to_waveform(row))
        words = [tokenizer().decode([int(token)]) for token in torch.randint(3, N_WORDS, (5,), generator=generator)]
        record: dict[str, Any] = {"audio_filepath": f"{number}.flac", "text": f"{''.join(words).strip()} {number}"}
        lines.append(json.dumps(record | ({"synthetic": True} if synthetic else {})))
    (folder / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "manifest.jsonl"
