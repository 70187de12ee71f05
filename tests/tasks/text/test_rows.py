"""Rows at their own positions say what whole passes say."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, LENGTH, documents, tiny_pair, tiny_text_model

from seqdefer.budgets.policies import Threshold
from seqdefer.engine.interleaved import roll_out
from seqdefer.engine.speculative import SpeculativeLoop, run_all
from seqdefer.rejectors.confidence import Confidence
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.rows import ModelRows, TextExpertRows, TextPredictorRows
from seqdefer.types import SequenceSpec


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_say_what_whole_passes_say(family: str) -> None:
    """Rows read chunks of their own lengths, go back, leave and come, in any order."""
    network = tiny_text_model(family, 2, seed=0).network
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(5, 40, shape, generator=random)

    rows, known = ModelRows(network), list[tuple[torch.Tensor, list[int]]]()

    def check(row: int, hidden: torch.Tensor, logits: torch.Tensor, n: int) -> None:
        given, tokens = known[row]
        run = network.prefill(given[None], torch.tensor([tokens[:n]], dtype=torch.long))
        assert torch.allclose(run.logits[0], logits, atol=2e-5)
        assert torch.allclose(run.hidden[0], hidden, atol=2e-5)

    def admit(n: int) -> None:
        lengths = [int(torch.randint(3, 9, (), generator=random)) for _ in range(n)]
        inputs = torch.full((n, max(lengths)), PADDING)
        for line, length in zip(inputs, lengths, strict=True):
            line[:length] = draw(length)
        said, context = rows.admit(inputs)
        for place in range(n):
            known.append((inputs[place, : lengths[place]], []))
            check(len(known) - 1, said.hidden[place, 0], said.logits[place, 0], 0)
            run = network.prefill(known[-1][0][None], torch.zeros(1, 0, dtype=torch.long))
            assert torch.allclose(run.context[0], context[place], atol=2e-5)

    admit(3)
    for turn in range(6):
        some = torch.randperm(len(known), generator=random)[: 1 + turn % len(known)]
        counts = torch.randint(1, 4, (len(some),), generator=random)
        tokens = draw(len(some), int(counts.max()))
        said = rows.read(some, tokens, counts)
        for place, row in enumerate(some.tolist()):
            for step in range(int(counts[place])):
                known[row][1].append(int(tokens[place, step]))
                check(row, said.hidden[place, step], said.logits[place, step], len(known[row][1]))
        steps = torch.tensor([int(torch.randint(0, 1 + min(2, len(one[1])), (), generator=random)) for one in known])
        rows.go_back(steps)
        for (_, written), n in zip(known, steps.tolist(), strict=True):
            del written[len(written) - n :]
        if turn in (1, 3):
            kept = torch.randperm(len(known), generator=random)[:-1]
            rows.keep(kept)
            known[:] = [known[row] for row in kept.tolist()]
            admit(2)


@pytest.mark.parametrize("at_once", [2, 7])
@pytest.mark.parametrize("ahead", [1, 3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_writes_what_the_interleaved_loop_writes(family: str, ahead: int, at_once: int) -> None:
    pair, examples = tiny_pair(family), documents(7)
    spec = SequenceSpec(LENGTH, pair.predictor.end)
    alone = roll_out(pair.predictor, pair.expert, examples, Threshold(Confidence(), 9e9), spec)
    for threshold in (-9e9, *alone.scores.flatten().quantile(torch.tensor([0.43, 0.81])).tolist(), 9e9):
        policy = Threshold(Confidence(), threshold)
        expected = roll_out(pair.predictor, pair.expert, examples, policy, spec)
        loop = SpeculativeLoop(
            TextPredictorRows(pair.predictor), TextExpertRows(pair.expert), policy, spec, ahead=ahead
        )
        found = run_all(loop, examples, at_once)
        assert torch.equal(found.sequences.tokens, expected.sequences.tokens)
        assert torch.equal(found.authors, expected.authors)
        assert torch.allclose(found.scores, expected.scores, atol=1e-4)
        assert (loop.work.expert_passes == 0) == (threshold == 9e9)
