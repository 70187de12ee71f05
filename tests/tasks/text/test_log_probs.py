"""Log probabilities of text models, against a pass without a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import SOME_FAMILIES, documents, full_pass, tiny_pair

from seqdefer.tasks.text.models import TextModel

pytestmark = pytest.mark.usefixtures("one_thread")


def expected_log_probs(model: TextModel, one: Tensor, prefix: list[int], end: int | None) -> Tensor:
    log_probs = full_pass(model, one, prefix)[0].log_softmax(0)
    if not prefix and model.first_token is not None:
        return torch.full_like(log_probs, -torch.inf).index_fill(0, torch.tensor([model.first_token]), 0.0)
    ends = sorted({*model.ends, end} - {None})
    total = log_probs[ends].logsumexp(0)
    log_probs[ends] = -torch.inf
    log_probs[end] = total
    return log_probs


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_log_probs_are_those_of_a_plain_pass(family: str) -> None:
    """Also for a forced first token, for several end tokens, and for rows that the expert reads late."""
    pair, examples = tiny_pair(family), documents(5)
    predictor, expert = pair.predictor.with_log_probs(), pair.expert.with_log_probs()
    tokens = torch.randint(3, 60, (5, 3), generator=torch.Generator().manual_seed(1))
    state, expert_state = predictor.start(examples.inputs)[0], expert.start(examples)
    for position in range(4):
        rows = torch.tensor([4, 1, 0]) if position < 3 else torch.arange(5)
        named, expert_state = expert.next(expert_state, rows)
        log_q, log_p = predictor.log_probs(state), expert.log_probs(expert_state, rows)
        for row in range(5):
            prefix, one = tokens[row, :position].tolist(), examples.inputs[row]
            expected = expected_log_probs(predictor.model, one, prefix, predictor.end)
            torch.testing.assert_close(log_q[row], expected, rtol=1e-4, atol=1e-4)
        for place, row in enumerate(rows.tolist()):
            prefix, one = tokens[row, :position].tolist(), examples.inputs[row]
            expected = expected_log_probs(expert.model, one, prefix, expert.end)
            torch.testing.assert_close(log_p[place], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(named, pair.expert.read(pair.expert.start(examples), tokens[:, :position])[0][rows, -1])
        if position < 3:
            state = predictor.append(state, tokens[:, position])
            expert_state = expert.append(expert_state, tokens[:, position])


def test_a_model_keeps_logits_only_where_they_are_wanted() -> None:
    pair, inputs = tiny_pair("t5"), documents(3).inputs
    plain, telling = pair.predictor, pair.predictor.with_log_probs()
    assert all(block.logits is None for block in plain.start(inputs)[0].blocks)
    assert all(block.logits is not None for block in telling.start(inputs)[0].blocks)
    assert plain.fingerprint == telling.fingerprint
