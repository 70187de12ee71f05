"""Real checkpoints of Whisper write what `generate` writes, in both loops."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'speech'")

from tiny_models import Decided, written
from tiny_whisper import clips, generated

from seqdefer.budgets.policies import Threshold
from seqdefer.engine.interleaved import roll_out
from seqdefer.engine.pace import FixedPace
from seqdefer.engine.speculative import run_all, speculative_loop
from seqdefer.rejectors.confidence import Confidence
from seqdefer.tasks.speech.features import SpeechFacts
from seqdefer.tasks.speech.models import load_speech_model
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.types import SequenceSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
FOLDER, LENGTH, N = "SEQDEFER_WHISPER", 16, 4


@pytest.fixture(scope="module")
def pair() -> TextPair:
    folder = Path(os.environ.get(FOLDER, "nowhere"))
    if not all((folder / size).is_dir() for size in ("tiny", "base")):
        command = "python -m seqdefer.tasks.speech.checkpoints FOLDER tiny base"
        pytest.skip(f"set {FOLDER} to a folder with real checkpoints; make one with: {command}")
    small = load_speech_model(folder / "tiny", language="en", cache_bytes=2**28, is_watched=True)
    large = load_speech_model(folder / "base", language="en", cache_bytes=2**28)
    return TextPair.of(small, large, "both", SpeechFacts(small.tokenizer, small.n_tokens))


@pytest.mark.parametrize("defers", [False, True])
def test_both_ends_are_generates(pair: TextPair, defers: bool) -> None:
    examples, model = clips(N), (pair.expert if defers else pair.predictor).model
    rows = written(pair, examples, Decided(torch.full((N, LENGTH), defers)), LENGTH)
    assert rows == generated(model, examples.inputs, LENGTH)


def test_speculation_writes_what_the_interleaved_loop_writes(pair: TextPair) -> None:
    examples, spec = clips(N), SequenceSpec(LENGTH, pair.predictor.end)
    policy = Threshold(Confidence(), 0.5)
    expected = roll_out(pair.predictor, pair.expert, examples, policy, spec)
    assert 0 < expected.share < 1
    for ahead in (1, 4):
        loop = speculative_loop(pair.predictor, pair.expert, policy, spec, FixedPace(ahead))
        found = run_all(loop, examples, 3)
        assert torch.equal(found.sequences.tokens, expected.sequences.tokens)
        assert torch.equal(found.authors, expected.authors)
