"""Facts about clips and proposed tokens."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch

from seqdefer.errors import OptionError

pytest.importorskip("transformers", reason="needs the extra 'speech'")

from tiny_whisper import END, N_TOKENS, clips, tiny_speech_pair, tokenizer

from seqdefer.tasks.speech.features import (
    FACTS,
    MIN_LOG_PROB,
    SpeechFacts,
    level_at,
    reading_table,
    speech_facts,
    word_table,
)
from seqdefer.tasks.speech.waveforms import NO_SAMPLE, stack_waveforms
from seqdefer.tasks.text.facts import ProposedTokens
from seqdefer.tasks.text.passes import PADDING

pytestmark = pytest.mark.usefixtures("one_thread")


def tone(amplitude: float, seconds: float) -> torch.Tensor:
    times = torch.arange(int(16_000 * seconds)) / 16_000
    return (amplitude * 2**15 * (times * 6.2831853 * 400).sin()).round().to(torch.int16)


def test_words_have_spaces_digits_and_capitals() -> None:
    table = word_table(tokenizer(), N_TOKENS)
    kinds = {text: table[tokenizer().convert_tokens_to_ids(text)].tolist() for text in ("Ġw4", "Ġ13", "ĠW6", "x7")}
    assert kinds == {"Ġw4": [1, 1, 0, 0, 0], "Ġ13": [1, 1, 0, 0, 0], "ĠW6": [1, 1, 1, 0, 0], "x7": [0, 1, 0, 0, 0]}
    assert table[END].tolist() == [0, 0, 0, 1, 1]
    assert len(table) == N_TOKENS
    assert len(word_table(tokenizer(), N_TOKENS + 5)) == N_TOKENS + 5, "a vocabulary may be padded"


def test_tokens_read_alike_whatever_their_case_and_punctuation() -> None:
    names = tokenizer()
    table = reading_table(names, N_TOKENS)
    read = {text: int(table[names.convert_tokens_to_ids(text)]) for text in ("Ġw4", "ĠW6", "Ġ13", "x7")}
    assert len(set(read.values())) == 4
    assert table[END] == 0
    assert len(reading_table(names, N_TOKENS + 5)) == N_TOKENS + 5
    cased = SimpleTokenizer([" The", " the", "the", " THE!", ",", "."])
    assert reading_table(cased, 6).tolist() == [1, 1, 2, 1, 0, 0]


class SimpleTokenizer:
    """Tokens that are their own texts."""

    all_special_ids: ClassVar[list[int]] = []

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.texts[one] for one in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def test_the_distribution_is_weighed_by_how_tokens_read() -> None:
    facts = SpeechFacts(SimpleTokenizer([" The", " the", "the", " THE!", ",", "."]), 6)
    log_probs = torch.tensor([[0.3, 0.25, 0.2, 0.1, 0.09, 0.06], [1.0, 0, 0, 0, 0, 0]]).log()
    weighed = facts.of_distribution(log_probs, torch.tensor([0, 0]))
    assert weighed[0].exp().tolist() == pytest.approx([0.65, 0.2])
    assert weighed[1].tolist() == [0, MIN_LOG_PROB], "finite even where no other token is allowed"


def test_levels_are_those_of_tones() -> None:
    """A sine of amplitude a has a level of 20 log10(a) - 3.01 dB."""
    loud, soft = tone(0.5, 0.5), tone(0.05, 0.5)
    inputs = stack_waveforms([torch.cat([loud, soft]), torch.cat([soft, loud])])
    found = level_at(inputs, torch.tensor([12.0, 12.0]))
    assert found.tolist() == pytest.approx([-9.03, -29.03], abs=0.05)
    assert level_at(inputs, torch.tensor([37.0, 37.0])).tolist() == pytest.approx([-29.03, -9.03], abs=0.05)


def test_beyond_a_clip_it_is_silent() -> None:
    inputs = stack_waveforms([tone(0.5, 1.0), tone(0.5, 0.2)])
    assert level_at(inputs, torch.tensor([25.0, 40.0])).tolist() == pytest.approx([-9.03, -100], abs=0.05)
    assert level_at(inputs[1:, :3200], torch.tensor([500.0])).tolist() == [-100]
    assert int(inputs[1, -1]) == NO_SAMPLE


def test_facts_about_a_clip_are_its_length_and_levels() -> None:
    facts = SpeechFacts(tokenizer(), N_TOKENS)
    inputs = stack_waveforms([torch.cat([tone(0.5, 0.5), tone(0.005, 0.5)]), tone(0.5, 0.01)])
    seconds, log_seconds, speech, _, background = facts.of_inputs(inputs)[0].tolist()
    assert (seconds, log_seconds) == (1, 0)
    assert (speech, background) == (pytest.approx(-9.03, abs=0.05), pytest.approx(-49.03, abs=0.1))
    assert facts.of_inputs(inputs).isfinite().all(), "a clip may be shorter than a window"


def test_facts_about_a_token() -> None:
    inputs = stack_waveforms([tone(0.5, 1.0)])
    proposed = ProposedTokens(
        inputs,
        torch.tensor([[6, 7, 6, PADDING]]),
        torch.tensor([[6, 9]]),
        torch.tensor([[-0.1, -2.1]]),
        torch.tensor([[-0.5, 1.5, 25.0]]),
        torch.tensor([[-0.05, -3.05]]),
    )
    found = {name: float(value) for name, value in speech_facts(proposed, word_table(tokenizer(), N_TOKENS)).items()}
    assert list(found) == list(FACTS)
    assert found == pytest.approx(
        {
            "margin": 2.0, "alike": -0.05, "rival": 3.0, "rarity": math.log(7), "begins_word": 1, "is_digit": 1,
            "is_capital": 1, "is_mark": 0, "is_end": 0, "repeats": math.log(3), "sharpness": -0.5, "spread": 1.5,
            "place": 0.5, "level": -9.03, "position": 3,
        },
        abs=0.01,
    )  # fmt: skip


def test_a_study_can_leave_facts_out() -> None:
    every = SpeechFacts(tokenizer(), N_TOKENS)
    some = SpeechFacts(tokenizer(), N_TOKENS, [name for name in FACTS if name != "level"])
    assert every.name != some.name
    proposed = ProposedTokens(
        clips(2).inputs,
        torch.full((2, 1), PADDING),
        torch.tensor([[3, 4]] * 2),
        torch.zeros(2, 2),
        torch.ones(2, 3),
        torch.zeros(2, 2),
    )
    kept = [number for number, name in enumerate(FACTS) if name != "level"]
    assert torch.equal(some.of_tokens(proposed), every.of_tokens(proposed)[:, kept])
    with pytest.raises(OptionError, match="unknown fact 'loudness'; available: alike, begins_word, is_capital"):
        SpeechFacts(tokenizer(), N_TOKENS, ["loudness"])


def test_what_is_shown_is_part_of_the_fingerprint() -> None:
    names = {tiny_speech_pair(shown).predictor.fingerprint for shown in ("states", "facts", "both")}
    assert len(names) == 3
    assert len({tiny_speech_pair(shown).predictor.writer for shown in ("states", "facts", "both")}) == 1
