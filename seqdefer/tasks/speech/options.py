"""Options of the speech task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from seqdefer.errors import OptionError, unknown
from seqdefer.tasks.common.options import check_ranges, option
from seqdefer.tasks.speech.alignment import UNITS
from seqdefer.tasks.speech.features import FACTS
from seqdefer.tasks.text.loading import DTYPES
from seqdefer.tasks.text.pairs import FEATURE_SETS

ALL_FACTS = "all"
RANGES = {
    "length": (1, 444),
    "train_clips": (1, 10**9),
    "validation_clips": (1, 10**9),
    "test_clips": (0, 10**9),
    "seed": (0, 2**63 - 1),
}


@dataclass(frozen=True)
class SpeechOptions:
    """Options of the speech task, which are also its command-line options."""

    usual_options: ClassVar = ("predictor", "expert", "train", "test", "language", "length", "dtype", "train_clips")
    test_options: ClassVar = ("test", "test_clips")
    choices: ClassVar = {"error_rate": UNITS, "shown": FEATURE_SETS, "dtype": DTYPES}
    predictor: str = option(
        "openai/whisper-tiny", "the small model: a name on the Hugging Face Hub, or a folder", is_path=True
    )
    expert: str = option(
        "openai/whisper-small", "the large model: a name on the Hub, or a folder; same vocabulary", is_path=True
    )
    train: str = option(
        "openslr/librispeech_asr:other/validation",
        "clips to fit rejectors on: a manifest (JSON lines with audio_filepath and text), or a dataset's "
        "NAME[:CONFIG][/SPLIT]",
        is_path=True,
    )
    test: str | None = option(
        "openslr/librispeech_asr:other/test",
        "clips to report on, in the same form; without it, a part of --train",
        is_path=True,
    )
    language: str = option("en", "language of the clips, by its code")
    length: int = option(64, "maximum number of tokens to write")
    error_rate: str = option("words", "what errors are counted in: words or characters")
    shown: str = option(
        "facts", "what rejectors see: facts about token and sound, states of the predictor as in the paper, or both"
    )
    facts: str = option(ALL_FACTS, f"facts that rejectors see: all, or some of {', '.join(FACTS)}")
    dtype: str = option("float32", "precision of both models: float32, or bfloat16 or float16 to save GPU memory")
    keep_states: bool = option(
        True, "store what the encoders make of each clip, so that each is encoded once (4.6 MB with whisper-small)"
    )
    train_clips: int = option(800, "maximum number of clips to fit rejectors on")
    validation_clips: int = option(200, "maximum number of clips for early stopping and model selection")
    test_clips: int = option(500, "maximum number of clips to report on")
    seed: int = option(0, "seed of the split")

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        for name, available in self.choices.items():
            if getattr(self, name) not in available:
                raise unknown(f"--{name.replace('_', '-')}", getattr(self, name), available)
        for name in self.fact_names():
            if name not in FACTS:
                raise unknown("--facts", name, (ALL_FACTS, *FACTS))
        for name in ("predictor", "expert", "train", "language"):
            if not getattr(self, name):
                raise OptionError(f"--{name} is empty; leave it out for the default, {getattr(type(self), name)}")

    def fact_names(self) -> tuple[str, ...]:
        """Return the names of the facts to show."""
        return tuple(FACTS) if self.facts == ALL_FACTS else tuple(self.facts.replace(",", " ").split())

    def without_test(self) -> SpeechOptions:
        return replace(self, test=None, test_clips=0)
