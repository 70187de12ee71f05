"""A speech model with its tokenizer, restricted to greedy decoding as Whisper's `generate` does it.

The decoder starts with `<|startoftranscript|>`, the language, the task and `<|notimestamps|>`. Tokens that are not
speech (`suppress_tokens`) are never written, and no text begins with its end (`begin_suppress_tokens`). So
`model.generate(features, language=..., task="transcribe")` writes the same tokens as this package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from seqdefer.errors import CheckpointError, OptionError
from seqdefer.tasks.speech.attention import chosen_heads
from seqdefer.tasks.speech.audio import SAMPLE_RATE
from seqdefer.tasks.speech.encoder_states import ClipStates
from seqdefer.tasks.speech.network import SAMPLES_PER_STATE, SpeechNetwork
from seqdefer.tasks.text.loading import load_checkpoint
from seqdefer.tasks.text.models import TextModel, transformers

TASK = "transcribe"
LIKE = "choose one like openai/whisper-tiny"


def load_speech_model(
    source: str | Path,
    *,
    language: str,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    cache_bytes: int = 0,
    states: Path | None = None,
    is_watched: bool = False,
) -> TextModel:
    """Load a checkpoint of Whisper, a name on the Hub or a folder. See `speech_model`; `states` is a folder for encoder
    states, in which each model has its own."""
    found = load_checkpoint(source, speech_family, device=device, dtype=dtype)
    cache = ClipStates(cache_bytes)
    model = speech_model(
        found.model, found.tokenizer, found.name, language=language, cache=cache, is_watched=is_watched
    )
    if states is not None:
        cache.folder = states / model.fingerprint()
    return model


def speech_family(library: Any, config: Any, name: str) -> Any:
    """Return the auto class that loads a checkpoint as a model that reads log-mel features and writes text."""
    found = [*(config.architectures or ()), ""][0]
    classes = library.models.auto.modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    names = ("num_mel_bins", "max_source_positions", "max_target_positions")
    is_heard = found in classes.values() or (not found and config.model_type in classes)
    if not is_heard or not all(hasattr(config, one) for one in names):
        what = found or f"model of type {config.model_type!r}"
        raise CheckpointError(f"{name} is a {what}, which does not listen to speech; {LIKE}")
    return library.AutoModelForSpeechSeq2Seq


def speech_model(
    model: Any,
    tokenizer: Any,
    name: str = "",
    *,
    language: str,
    cache: ClipStates | None = None,
    is_watched: bool = False,
) -> TextModel:
    """Freeze a model of Whisper. `is_watched`: note where it listens (`seqdefer.tasks.speech.attention`)."""
    name, model = name or type(model).__name__, model.eval().requires_grad_(False)
    rules, n_tokens = model.generation_config, int(model.get_output_embeddings().weight.shape[0])
    cache = cache or ClipStates()
    heads = chosen_heads(model, getattr(rules, "alignment_heads", None)) if is_watched else None
    network = SpeechNetwork(model, prompt_of(rules, language, name), cache, _extractor(model), heads)
    return TextModel(
        name,
        model,
        tokenizer,
        network,
        ends=_ids(rules.eos_token_id),
        first_token=None,
        n_tokens=n_tokens,
        encoder_cache=cache,
        suppressed=_ids(getattr(rules, "suppress_tokens", None)),
        suppressed_first=_ids(getattr(rules, "begin_suppress_tokens", None)),
    )


def prompt_of(rules: Any, language: str, name: str) -> tuple[int, ...]:
    """Return the tokens that a decoder starts with. `rules` is a generation config of Whisper."""
    start, last = rules.decoder_start_token_id, getattr(rules, "no_timestamps_token_id", None)
    if start is None:
        raise CheckpointError(f"{name} does not name the token that its decoder starts with; {LIKE}")
    after = () if last is None else (last,)
    is_multilingual, languages = getattr(rules, "is_multilingual", None), getattr(rules, "lang_to_id", None) or {}
    if is_multilingual is None or (is_multilingual and not languages):
        advice = "copy the generation_config.json of the model that it was trained from"
        raise CheckpointError(f"{name} does not name its languages (is_multilingual, lang_to_id); {advice}")
    if not is_multilingual:  # whisper-tiny.en
        if language != "en":
            raise OptionError(
                f"{name} writes English only, and --language is {language!r}; choose a multilingual model"
            )
        return (start, *after)
    key = f"<|{language}|>"
    if key not in languages:
        known = ", ".join(sorted(one.strip("<|>") for one in languages))
        raise OptionError(f"--language is {language!r}; {name} knows {known}")
    return (start, languages[key], rules.task_to_id[TASK], *after)


def _extractor(model: Any) -> Any:
    """Return what makes log-mel features: it follows from the shapes of the model."""
    seconds = model.config.max_source_positions * SAMPLES_PER_STATE / SAMPLE_RATE
    if seconds != int(seconds):
        raise CheckpointError(f"the model hears {seconds:g} s at once; whole seconds are needed: {LIKE}")
    return transformers().WhisperFeatureExtractor(feature_size=model.config.num_mel_bins, chunk_length=int(seconds))


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)
