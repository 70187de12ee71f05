"""A synthetic corpus of speech: sentences read aloud by a program, with noise, as FLAC files and a manifest.

    python -m seqdefer.tasks.speech.synthetic sentences.txt corpus --sentences 1000 --noise 30 20 13

For machines that reach no corpus of real speech; every line of the manifest says that it is synthetic. Voices and
signal-to-noise ratios take turns, so that each pair of them has as many clips as any other. The same sentences, options
and seed give the same bytes, whatever the number of jobs. Clips are named by what made them and the manifest is written
last: a command that was stopped goes on where it was, and a manifest that exists is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from seqdefer.cli.common import Parser, run_module
from seqdefer.errors import OptionError
from seqdefer.progress import Meter
from seqdefer.progress_bars import show_progress
from seqdefer.storage.files import fingerprint, writable_folder
from seqdefer.storage.user_files import check_text, parse_inputs, read_lines
from seqdefer.tasks.speech.audio import Samples, read_seconds, write_clip
from seqdefer.tasks.speech.data import MANIFEST, write_manifest
from seqdefer.tasks.speech.synthesizers import (
    SYNTHESIZERS,
    Synthesizer,
    check_voices,
    find_synthesizer,
    read_aloud,
    spoken_text,
)

PEAK = 0.95  # of a clip, so that noise does not clip it
SNR_RANGE = (-20.0, 100.0)  # dB


@dataclass(frozen=True)
class SyntheticOptions:
    """What a synthetic corpus is made of."""

    program: Synthesizer
    voices: Sequence[str]
    noise: Sequence[float] = (30.0, 20.0, 13.0)  # signal-to-noise ratios in dB
    seed: int = 0
    jobs: int = 1  # sentences that are read at once

    def __post_init__(self) -> None:
        for ratio in self.noise:
            if not SNR_RANGE[0] <= ratio <= SNR_RANGE[1]:
                raise OptionError(f"--noise is {ratio:g}; it must be from {SNR_RANGE[0]:g} to {SNR_RANGE[1]:g} dB")
        for name, least in {"seed": 0, "jobs": 1}.items():
            if getattr(self, name) < least:
                raise OptionError(f"--{name} is {getattr(self, name)}; it must be at least {least}")
        check_voices(self.program, self.voices)


def make_corpus(
    sentences: Sequence[str], folder: Path, options: SyntheticOptions, count: int | None, meter: Meter
) -> Path:
    """Read `count` sentences aloud (None: all), write them into `folder`, and return the path of the manifest.

    Sentences that the program cannot read, or that take longer than 30 s, are passed over."""
    records, total = [], len(sentences) if count is None else count
    with meter.stage(f"read {total} sentences aloud with {options.program.name}", total) as advance:
        for record in islice(_spoken(sentences, folder, options), total):
            records.append(record)
            advance(1)
    if len(records) < (count or 1):
        raise OptionError(
            f"--sentences is {total}, but {options.program.name} can read {len(records)} of the {len(sentences)}"
            " different sentences; ask for fewer, or give others"
        )
    return write_manifest(folder / MANIFEST, records)


@dataclass(frozen=True)
class _Spoken:
    """A sentence read aloud: its record in the manifest, and samples that are yet to be written, if any."""

    record: Mapping[str, Any]
    samples: Samples | None


def _spoken(sentences: Sequence[str], folder: Path, options: SyntheticOptions) -> Iterator[Mapping[str, Any]]:
    """Yield the manifest's record of each sentence that can be read aloud, once its file is written."""
    done = number = 0  # sentences that were tried, and clips
    with ThreadPoolExecutor(options.jobs) as pool:
        while done < len(sentences):
            some = sentences[done : done + options.jobs]
            numbers = range(number, number + len(some))
            for one in pool.map(lambda sentence, at: _speak(sentence, at, folder, options), some, numbers):
                done += 1
                if one is None:
                    break  # clips after it get other numbers, so they are read again
                yield _write(one, folder)
                number += 1


def _speak(sentence: str, number: int, folder: Path, options: SyntheticOptions) -> _Spoken | None:
    text, program = spoken_text(options.program, sentence), options.program.name
    if not text:
        return None
    voice = options.voices[number % len(options.voices)]
    ratio = options.noise[number // len(options.voices) % len(options.noise)]
    file = f"clips/{number:05}-{fingerprint([program, voice, text, ratio, options.seed])}.flac"
    noisy = None
    if not (folder / file).is_file():
        samples = read_aloud(options.program, text, voice)
        if samples is None:
            return None
        noisy = add_noise(samples, ratio, np.random.default_rng([options.seed, number]))
    made = {"synthetic": True, "synthesizer": program, "voice": voice, "snr": ratio}
    return _Spoken({"id": str(number), "audio_filepath": file, "text": sentence, **made}, noisy)


def _write(one: _Spoken, folder: Path) -> Mapping[str, Any]:
    path = folder / one.record["audio_filepath"]
    if one.samples is not None:
        write_clip(path, one.samples)
    return {**one.record, "duration": round(read_seconds(path), 3)}


def add_noise(samples: Samples, ratio: float, generator: np.random.Generator) -> Samples:
    """Return samples with white noise at a signal-to-noise ratio in dB, scaled down where they would clip."""
    power = float(np.mean(np.square(samples, dtype=np.float64))) / 10 ** (ratio / 10)
    noisy = samples + np.sqrt(power) * generator.standard_normal(len(samples))
    noisy *= min(1.0, PEAK / float(np.abs(noisy).max()))
    scaled: Samples = noisy.astype(np.float32)
    return scaled


# -- the command ---------------------------------------------------------------------------------------------------


def read_sentences(path: Path, field: str) -> list[str]:
    """Return different sentences: the lines of a text, or a field of JSON lines (*.jsonl), plain or gzip."""
    kind = f"sentences: lines of text, or JSON lines with the field {field!r}"
    sentences = parse_inputs(read_lines(path, kind=kind), path, field)
    for number, one in enumerate(sentences, start=1):
        check_text(one, field, f"{path.name}, sentence {number}")
    return list(dict.fromkeys(" ".join(one.split()) for one in sentences if one.strip()))


def main(arguments: list[str]) -> str:
    """Make the corpus that the arguments describe, and return the path of its manifest."""
    chosen = _parser().parse_args(arguments)
    program = find_synthesizer(chosen.synthesizer)
    options = SyntheticOptions(program, chosen.voices or program.voices, chosen.noise, chosen.seed, chosen.jobs)
    sentences = read_sentences(chosen.sentences_file, chosen.field)
    if chosen.sentences is not None and chosen.sentences < 1:
        raise OptionError(f"--sentences is {chosen.sentences}; it must be at least 1")
    with writable_folder(chosen.out, "OUT"), show_progress(quiet=chosen.quiet) as meter:
        return str(make_corpus(sentences, chosen.out, options, chosen.sentences, meter))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m seqdefer.tasks.speech.synthetic",
        description="Make a synthetic corpus of speech: sentences read aloud by a program, with noise.",
        epilog="Defaults are in parentheses.",
    )
    words = "text with a sentence a line, or JSON lines (*.jsonl); plain or gzip"
    parser.add_argument("sentences_file", type=Path, metavar="SENTENCES", help=words)
    parser.add_argument("out", type=Path, metavar="OUT", help=f"folder for the clips and {MANIFEST}")
    parser.add_argument("--sentences", type=int, metavar="N", help="how many to read, from the first on (all)")
    parser.add_argument("--field", default="summary", metavar="NAME", help="field of JSON lines (summary)")
    words = "program that reads (the first that is installed)"
    parser.add_argument("--synthesizer", metavar="|".join(SYNTHESIZERS), help=words)
    defaults = "; ".join(f"{one.name}: {' '.join(one.voices)}" for one in SYNTHESIZERS.values())
    parser.add_argument("--voices", nargs="+", metavar="VOICE", help=f"voices that take turns ({defaults})")
    words = "signal-to-noise ratios in dB that take turns (30 20 13)"
    parser.add_argument("--noise", nargs="+", type=float, default=[30.0, 20.0, 13.0], metavar="DB", help=words)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the noise (0)")
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, metavar="N", help="sentences read at once (one per core)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


if __name__ == "__main__":
    raise SystemExit(run_module(main))
