"""Sentences become clips with noise and a manifest: the same bytes for the same seed, taken up where it was stopped."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqdefer.errors import DataError, MissingExtraError, OptionError
from seqdefer.progress import Silent
from seqdefer.tasks.speech import synthesizers, synthetic
from seqdefer.tasks.speech.data import MANIFEST, read_manifest
from seqdefer.tasks.speech.synthesizers import ESPEAK, FLITE, Synthesizer, find_synthesizer, spoken_text
from seqdefer.tasks.speech.synthetic import SyntheticOptions, add_noise, main, make_corpus, read_sentences

soundfile = pytest.importorskip("soundfile")

SENTENCES = [f"This is sentence number {number}." for number in range(8)]
# Writes a tone whose length is that of the text; `silence` gives a silent clip, `fail` an error.
TALKER = """
import sys, numpy, soundfile
path, voice, text = sys.argv[1:]
if voice == "broken":
    sys.exit("no such voice")
times = numpy.arange(800 * len(text)) / 16000
soundfile.write(path, 0.0 * times if text == "silence" else 0.3 * numpy.sin(2000 * times), 16000, format="WAV")
"""
FAKE = Synthesizer("talker", ("a", "b"), lambda voice, path: (sys.executable, "-c", TALKER, path, voice))


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / MANIFEST).read_text(encoding="utf-8").splitlines()]


def make(folder: Path, sentences: list[str], count: int | None = None, **options: Any) -> list[dict[str, Any]]:
    make_corpus(sentences, folder, SyntheticOptions(FAKE, FAKE.voices, **options), count, Silent())
    return records(folder)


# -- noise ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [30.0, 13.0, 0.0, -10.0])
def test_noise_has_the_ratio(ratio: float) -> None:
    speech = (0.1 * np.sin(np.arange(160_000) / 7)).astype(np.float32)
    noisy = add_noise(speech, ratio, np.random.default_rng(0))
    assert np.abs(noisy).max() <= synthetic.PEAK + 1e-6
    gain = float(noisy @ speech / (speech @ speech))  # noise and speech are uncorrelated
    noise = noisy / gain - speech
    assert 10 * np.log10((speech**2).mean() / (noise**2).mean()) == pytest.approx(
        ratio, abs=0.3
    )  # the gain is an estimate
    assert np.array_equal(noisy, add_noise(speech, ratio, np.random.default_rng(0)))


# -- corpora -------------------------------------------------------------------------------------------------------


def test_a_corpus(tmp_path: Path) -> None:
    lines = make(tmp_path, SENTENCES, noise=(20.0, 10.0))
    assert [line["text"] for line in lines] == SENTENCES
    assert Counter((line["voice"], line["snr"]) for line in lines) == dict.fromkeys(
        [("a", 20.0), ("b", 20.0), ("a", 10.0), ("b", 10.0)], 2
    )
    assert all(line["synthetic"] is True and line["synthesizer"] == "talker" for line in lines)
    corpus = read_manifest(tmp_path)
    assert corpus.synthetic
    for line, clip in zip(lines, corpus.clips, strict=True):
        assert len(clip.read()) == 800 * len(clip.text) == round(16_000 * line["duration"])
        assert soundfile.info(clip.audio).format == "FLAC"


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder, seed in (("one", 0), ("two", 0), ("other", 1)):
        make(tmp_path / folder, SENTENCES, seed=seed)
    one, two, other = (files(tmp_path / folder) for folder in ("one", "two", "other"))
    assert one == two
    assert not one.keys() & other.keys() - {MANIFEST}


def test_more_sentences_begin_with_the_fewer(tmp_path: Path) -> None:
    few, many = make(tmp_path, SENTENCES, 3), make(tmp_path, SENTENCES, 5)
    assert many[:3] == few


def test_a_stopped_command_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def advance(steps: int) -> None:
        nonlocal made
        made += steps
        if made == 3:
            raise KeyboardInterrupt

    class Stopped(Silent):
        def stage(self, name: str, total: int) -> Any:
            return nullcontext(advance)

    options = SyntheticOptions(FAKE, FAKE.voices)
    with pytest.raises(KeyboardInterrupt):
        make_corpus(SENTENCES, tmp_path / "stopped", options, None, Stopped())
    assert not (tmp_path / "stopped" / MANIFEST).exists()
    spoken: list[str] = []
    real = synthetic.read_aloud

    def noted(program: Synthesizer, text: str, voice: str) -> Any:
        spoken.append(text)
        return real(program, text, voice)

    monkeypatch.setattr(synthetic, "read_aloud", noted)
    make(tmp_path / "stopped", SENTENCES)
    assert spoken == SENTENCES[3:]
    make(tmp_path / "fresh", SENTENCES)
    assert files(tmp_path / "stopped") == files(tmp_path / "fresh")


def test_sentences_that_cannot_be_used_are_passed_over(tmp_path: Path) -> None:
    sentences = ["silence", SENTENCES[0], "far too long " * 50, SENTENCES[1]]
    lines = make(tmp_path, sentences, 2)
    assert [(line["id"], line["text"], line["voice"]) for line in lines] == [
        ("0", SENTENCES[0], "a"),
        ("1", SENTENCES[1], "b"),
    ]
    with pytest.raises(OptionError, match="--sentences is 3, but talker can read 2 of the 4 different sentences"):
        make(tmp_path / "other", sentences, 3)
    with pytest.raises(OptionError, match="can read 0 of the 1 different sentences"):
        make(tmp_path / "other", sentences[:1])
    assert not (tmp_path / "other" / MANIFEST).exists()


@pytest.mark.parametrize("count", [3, None])
def test_jobs_do_not_change_the_corpus(tmp_path: Path, count: int | None) -> None:
    """A sentence that cannot be read changes the numbers, so voices and noise, of all clips after it."""
    sentences = [SENTENCES[0], "silence", *SENTENCES[1:4], "far too long " * 50, *SENTENCES[4:]]
    make(tmp_path / "one", sentences, count)
    make(tmp_path / "many", sentences, count, jobs=4)
    assert files(tmp_path / "one") == files(tmp_path / "many")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 0}, "--jobs is 0; it must be at least 1"),
        ({"noise": (20.0, 200.0)}, "--noise is 200; it must be from -20 to 100 dB"),
        ({"noise": (float("nan"),)}, "--noise is nan"),
        ({"seed": -1}, "--seed is -1"),
    ],
)
def test_bad_options(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SyntheticOptions(FAKE, FAKE.voices, **options)


# -- sentences -----------------------------------------------------------------------------------------------------


def test_sentences_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One  two.\n\nThree.\nOne two.\n", encoding="utf-8")
    assert read_sentences(tmp_path / "a.txt", "summary") == ["One two.", "Three."]
    content = "\n".join(json.dumps({"summary": text, "id": None}) for text in ("One.", " ", "Two."))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    assert read_sentences(tmp_path / "a.jsonl.gz", "summary") == ["One.", "Two."]
    with pytest.raises(DataError, match=r"line 1: there is no 'text'; the fields are: 'summary', 'id'; .*--field"):
        read_sentences(tmp_path / "a.jsonl.gz", "text")
    with pytest.raises(DataError, match=r"a.jsonl.gz, sentence 1: 'id' is null, not a text"):
        read_sentences(tmp_path / "a.jsonl.gz", "id")
    with pytest.raises(DataError, match=r"cannot read .*b.txt: No such file.*give sentences"):
        read_sentences(tmp_path / "b.txt", "summary")


def test_what_flite_cannot_read() -> None:
    assert spoken_text(FLITE, "“Café”  – it’s…") == '"Cafe" - it\'s...'
    assert spoken_text(FLITE, "It cost 5€, or ½") is None
    assert spoken_text(FLITE, "From £1,999, (£2.5m) or £3 billion.") == (
        "From 1,999 pounds, (2.5 million pounds) or 3 billion pounds."
    )
    assert spoken_text(ESPEAK, "It cost £5 in “Łódź”") == 'It cost £5 in "Łódź"'


# -- programs ------------------------------------------------------------------------------------------------------


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthesizers.shutil, "which", lambda name: None)
    with pytest.raises(MissingExtraError, match="needs flite or espeak-ng; install it with: apt-get install flite"):
        find_synthesizer()
    with pytest.raises(MissingExtraError, match="needs espeak-ng; install it with: apt-get install espeak-ng"):
        find_synthesizer("espeak-ng")
    with pytest.raises(OptionError, match="unknown synthesizer 'festival'; available: espeak-ng, flite"):
        find_synthesizer("festival")
    monkeypatch.setattr(synthesizers.shutil, "which", lambda name: "/bin/x" if name == "espeak-ng" else None)
    assert find_synthesizer() is ESPEAK


def test_a_program_that_fails(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="talker cannot speak with the voice 'broken': no such voice; choose one with"):
        make_corpus(SENTENCES, tmp_path, SyntheticOptions(FAKE, ("a", "broken")), 2, Silent())
    gone = Synthesizer("gone", ("a",), lambda voice, path: ("/nowhere/gone", path))
    with pytest.raises(DataError, match=r"gone did not run: .*No such file"):
        make_corpus(SENTENCES, tmp_path, SyntheticOptions(gone, ("a",)), 1, Silent())


@pytest.mark.parametrize("program", [FLITE, ESPEAK], ids=lambda program: program.name)
def test_real_programs(program: Synthesizer, tmp_path: Path) -> None:
    if shutil.which(program.name) is None:
        pytest.skip(f"needs {program.name}, which is not installed")
    (tmp_path / "sentences.txt").write_text("Hello there.\n-v is a flag.\nGood bye, all 20 of you.\n", encoding="utf-8")
    for folder in ("one", "two"):
        path = main([str(tmp_path / "sentences.txt"), str(tmp_path / folder), "--synthesizer", program.name, "--quiet"])
        assert path == str(tmp_path / folder / MANIFEST)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    lines = records(tmp_path / "one")
    assert [line["voice"] for line in lines] == list(program.voices)
    assert all(0.4 < line["duration"] < 5 for line in lines)
    with pytest.raises((OptionError, DataError), match=f"{program.name}.*nobody"):
        main([str(tmp_path / "sentences.txt"), str(tmp_path / "three"), "--voices", "nobody", "--quiet",
              "--synthesizer", program.name])  # fmt: skip
    assert not (tmp_path / "three").exists()


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "seqdefer.tasks.speech.synthetic", str(tmp_path / "no.txt"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("seqdefer: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_options_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(synthetic, "find_synthesizer", lambda name: FAKE)
    (tmp_path / "s.txt").write_text("\n".join(SENTENCES), encoding="utf-8")
    out = tmp_path / "out"
    main([str(tmp_path / "s.txt"), str(out), "--sentences", "4", "--voices", "b", "--noise", "15", "5", "--quiet"])
    assert [(line["voice"], line["snr"]) for line in records(out)] == [("b", 15.0), ("b", 5.0)] * 2
    with pytest.raises(OptionError, match="--sentences is 0; it must be at least 1"):
        main([str(tmp_path / "s.txt"), str(out), "--sentences", "0", "--quiet"])
    with pytest.raises(
        OptionError, match=r"invalid float value: 'loud'; see: python -m seqdefer.tasks.speech.synthetic"
    ):
        main([str(tmp_path / "s.txt"), str(out), "--noise", "loud"])
