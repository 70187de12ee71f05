"""Rejectors see states of the predictor, facts about its likeliest tokens, or both."""

from __future__ import annotations

import pytest
import torch

from seqdefer.errors import OptionError

pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import SOME_FAMILIES, documents, full_pass, tiny_pair, tiny_text_model

from seqdefer.tasks.text.facts import facts_of
from seqdefer.tasks.text.pairs import FEATURE_SETS, TextPredictor
from seqdefer.tasks.text.passes import PADDING, ForwardPass, KeyValueCache

pytestmark = pytest.mark.usefixtures("one_thread")
some_families = pytest.mark.parametrize("family", SOME_FAMILIES)


@some_families
def test_both_is_states_then_facts(family: str) -> None:
    model, inputs = tiny_pair(family).predictor.model, documents(5).inputs
    tokens = torch.randint(3, 60, (5, 3), generator=torch.Generator().manual_seed(1))
    seen = {}
    for shown in FEATURE_SETS:
        predictor = TextPredictor(model, shown=shown)
        state, context = predictor.start(inputs)
        seen[shown] = [context, predictor.propose(state).features]
        seen[shown].append(predictor.propose(predictor.extend(state, tokens)).features)
    for states, facts, both in zip(*(seen[shown] for shown in ("states", "facts", "both")), strict=True):
        assert torch.equal(torch.cat([states, facts], 1), both)
    lengths = (inputs != PADDING).sum(1, keepdim=True)
    torch.testing.assert_close(seen["facts"][0], lengths.log())


@some_families
def test_facts_describe_the_two_likeliest_tokens(family: str) -> None:
    """Also for a forced first token and for an end token that another one replaces."""
    model, inputs = tiny_pair(family).predictor.model, documents(8).inputs
    predictor = TextPredictor(model, shown="facts")
    tokens = torch.randint(3, 60, (8, 2), generator=torch.Generator().manual_seed(1))
    state, _ = predictor.start(inputs)
    for position in range(3):
        proposal, prefix = predictor.propose(state), tokens[:, :position]
        for row in range(8):
            log_probs = full_pass(model, inputs[row], prefix[row].tolist())[0].log_softmax(0)
            second = log_probs.topk(2).indices[1:]
            likeliest = torch.cat([proposal.tokens[row : row + 1], second])[None]
            expected = facts_of(inputs[row : row + 1], prefix[row : row + 1], likeliest, log_probs[likeliest])
            torch.testing.assert_close(proposal.features[row], expected[0], rtol=1e-4, atol=1e-4)
        state = predictor.append(state, tokens[:, position]) if position < 2 else state


def test_the_fingerprint_depends_on_what_is_shown() -> None:
    model = tiny_pair("t5").predictor.model
    assert len({TextPredictor(model, shown=shown).fingerprint for shown in FEATURE_SETS}) == 3
    with pytest.raises(OptionError, match="unknown choice of what rejectors see 'all'; available: both, facts, states"):
        TextPredictor(model, shown="all")


def test_facts_are_finite_if_a_single_token_is_possible() -> None:
    """The second token then has log p = -inf."""
    predictor = TextPredictor(tiny_text_model("t5", 1, 1), shown="both")
    logits = torch.full((2, 60), -torch.inf).index_fill(1, torch.tensor([5]), 0.0)
    run = ForwardPass(KeyValueCache((), (), None, 1), torch.zeros(2, 16), logits)
    proposal = predictor.to_proposal(run.hidden, run.logits, torch.zeros(len(run.hidden), dtype=torch.bool))
    assert proposal.tokens.tolist() == [5, 5]
    assert bool(proposal.features.isfinite().all())
    assert bool(proposal.uncertainty.isfinite().all())
