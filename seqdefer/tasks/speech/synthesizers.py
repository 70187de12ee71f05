"""Programs that read sentences aloud: flite and espeak-ng, as Debian and others package them.

program = find_synthesizer()
read_aloud(program, "Hello there.", "slt")  # samples at 16,000 Hz, the same in every run
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from seqdefer.errors import DataError, MissingExtraError, unknown
from seqdefer.tasks.speech.audio import Samples, read_clip

MAX_SECONDS_TO_SPEAK = 120  # programs need less than a second for a sentence
_TYPOGRAPHY = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " "})
_POUNDS = re.compile(r"£(?P<number>\d[\d,]*(\.\d+)?)( ?(?P<unit>k|m|bn|thousand|million|billion))?\b")
_UNITS = {"k": "thousand", "m": "million", "bn": "billion"}


@dataclass(frozen=True)
class Synthesizer:
    """A program that reads text aloud into a WAV file."""

    name: str  # also of its Debian package
    voices: Sequence[str]  # by default
    command: Callable[[str, str], Sequence[str]]  # of a voice and the path of the WAV file; the text follows
    list_voices: Sequence[str] = ()  # prints `Voices available: a b c`; () where unknown voices fail by themselves
    reads_unicode: bool = True


FLITE = Synthesizer(
    "flite",
    voices=("slt", "rms", "awb"),
    command=lambda voice, path: ("flite", "-voice", voice, "-o", path, "-t"),
    list_voices=("flite", "-lv"),
    reads_unicode=False,
)
ESPEAK = Synthesizer(
    "espeak-ng",
    voices=("en-us", "en-gb", "en-gb-scotland"),
    command=lambda voice, path: ("espeak-ng", "-v", voice, "-w", path, "--"),
)
SYNTHESIZERS = {one.name: one for one in (FLITE, ESPEAK)}


def find_synthesizer(name: str | None = None) -> Synthesizer:
    """Return the synthesizer of this name, or the first that is installed."""
    if name is not None and name not in SYNTHESIZERS:
        raise unknown("synthesizer", name, SYNTHESIZERS)
    wanted = [name] if name else list(SYNTHESIZERS)
    for one in wanted:
        if shutil.which(one):
            return SYNTHESIZERS[one]
    raise MissingExtraError(
        f"reading sentences aloud needs {' or '.join(wanted)}; install it with: apt-get install {wanted[0]}"
    )


def check_voices(program: Synthesizer, voices: Sequence[str]) -> None:
    """Refuse voices that the program does not have; flite would read with another one, or download it."""
    if not program.list_voices:
        return
    listed = _run(program.list_voices, program).stdout.partition(":")[2].split()
    for voice in voices:
        if voice not in listed:
            raise unknown(f"voice of {program.name}", voice, listed)


def spoken_text(program: Synthesizer, text: str) -> str | None:
    """Return the text as the program can read it, or None where it would skip or garble letters."""
    text = " ".join(text.translate(_TYPOGRAPHY).split())
    if program.reads_unicode:
        return text
    text = _POUNDS.sub(_spell_pounds, text)
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return plain if plain.isascii() else None


def _spell_pounds(match: re.Match[str]) -> str:
    """£2.5m -> 2.5 million pounds"""
    unit = match["unit"]
    return " ".join([match["number"], *([_UNITS.get(unit, unit)] if unit else []), "pounds"])


def read_aloud(program: Synthesizer, text: str, voice: str) -> Samples | None:
    """Return a text as the program speaks it, or None if that is silent, too short or longer than 30 s."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        done = _run([*program.command(voice, str(path)), text], program)
        if done.returncode != 0 or not path.is_file():
            reason = " ".join((done.stderr or done.stdout).split()) or f"status {done.returncode}"
            raise DataError(f"{program.name} cannot speak with the voice {voice!r}: {reason}; choose one with --voices")
        with suppress(DataError):
            return read_clip(path)
    return None


def _run(command: Sequence[str], program: Synthesizer) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, check=False, capture_output=True, text=True, errors="replace", timeout=MAX_SECONDS_TO_SPEAK
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"{program.name} did not run: {error}; choose the other one with --synthesizer") from error
