"""Rows of Whisper at their own positions say what whole passes say."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from thresholds import interleaved

pytest.importorskip("transformers", reason="needs the extra 'speech'")

from tiny_whisper import LENGTH, clips, tiny_speech_model, tiny_speech_pair

from seqdefer.budgets.policies import Threshold
from seqdefer.engine.pace import FixedPace, Pace
from seqdefer.engine.speculative import run_all, speculative_loop
from seqdefer.rejectors.confidence import Confidence
from seqdefer.rows import Chunk
from seqdefer.tasks.text.model_rows import ModelRows
from seqdefer.tasks.text.row_passes import RowPasses
from seqdefer.tasks.text.row_probe import probe
from seqdefer.types import Proposal, Rollout, SequenceSpec

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("is_rounded", [False, True])
def test_rows_say_what_whole_passes_say(is_rounded: bool) -> None:
    network = tiny_speech_model(2, 1, is_watched=True).network
    passes = RowPasses(network, lambda hidden, logits, _: Proposal(logits.argmax(1), hidden, logits))
    passes.is_rounded = is_rounded
    rows, inputs, read = ModelRows(passes), clips(3).inputs, [list[int](), list[int](), list[int]()]

    def check(row: int, n: int, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        run = network.prefill(inputs[row : row + 1], torch.tensor([read[row][:n]], dtype=torch.long).view(1, n))
        assert torch.allclose(run.logits[0], logits, atol=2e-4)
        assert torch.allclose(run.hidden[0], hidden, atol=2e-4, rtol=1e-4)

    said, _ = rows.admit(inputs[:2])
    rows.add(inputs[2:])
    for row in range(2):
        check(row, 0, said.features[row], said.uncertainty[row])
    chunks = [Chunk(0, [3, 4, 6], [1, 3]), Chunk(1, [7], [1]), Chunk(2, [8, 9], [0, 2])]
    said = rows.read(chunks)
    for chunk in chunks:
        read[chunk.row].extend(chunk.tokens)
    for place, (row, n) in enumerate([(0, 1), (0, 3), (1, 1), (2, 0), (2, 2)]):
        check(row, n, said.features[place], said.uncertainty[place])
    rows.go_back([2, 0, 1])
    read = [read[0][:1], read[1], read[2][:1]]
    said = rows.step(torch.tensor([10, 11, 12]))
    for row, token in enumerate([10, 11, 12]):
        read[row].append(token)
        check(row, len(read[row]), said.features[row], said.uncertainty[row])


@pytest.mark.parametrize("shown", ["states", "both"])
def test_rows_can_stand_apart(shown: str) -> None:
    pair = tiny_speech_pair(shown)
    assert probe(pair.predictor.model.network) < 1e-4
    assert pair.predictor.has_rows
    assert pair.expert.has_rows


def test_a_trial_of_rows_encodes_nothing() -> None:
    model = tiny_speech_model(1, 0)
    probe(model.network)
    assert model.encoder_cache.n_encoded == 0


@cache
def written(shown: str) -> dict[float, Rollout]:
    pair = tiny_speech_pair(shown)
    return interleaved(pair.predictor, pair.expert, clips(7), SequenceSpec(LENGTH, pair.predictor.end))


@pytest.mark.parametrize("at_once", [2, 7])
@pytest.mark.parametrize("ahead", [1, 3, None])
@pytest.mark.parametrize("shown", ["states", "facts"])
def test_speculation_writes_what_the_interleaved_loop_writes(shown: str, ahead: int | None, at_once: int) -> None:
    pair, examples = tiny_speech_pair(shown), clips(7)
    spec = SequenceSpec(LENGTH, pair.predictor.end)
    for threshold, expected in written(shown).items():
        policy, pace = Threshold(Confidence(), threshold), Pace() if ahead is None else FixedPace(ahead)
        found = run_all(speculative_loop(pair.predictor, pair.expert, policy, spec, pace), examples, at_once)
        assert torch.equal(found.sequences.tokens, expected.sequences.tokens)
        assert torch.equal(found.authors, expected.authors)
        assert torch.allclose(found.scores, expected.scores, atol=1e-4)


def test_both_loops_show_the_same_facts() -> None:
    predictor, inputs = tiny_speech_pair("facts").predictor, clips(5).inputs
    rows = predictor.rows()
    assert rows is not None
    state, context = predictor.start(inputs)
    torch.testing.assert_close(rows.admit(inputs), context)
    for _ in range(4):
        expected = predictor.propose(state)
        torch.testing.assert_close(rows.propose().features, expected.features, rtol=1e-3, atol=1e-3)
        state = predictor.append(state, expected.tokens)
        rows.append(expected.tokens)
