"""Pairs of Hugging Face models write exactly what `generate` writes, for every pattern of deferral."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff
from seqdefer.errors import DataError
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.labels.nodes import END
from seqdefer.labels.trees import DecisionTrees
from seqdefer.testing import check_expert, check_predictor
from seqdefer.types import Examples

pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import (
    DECODERS,
    FAMILIES,
    LENGTH,
    SOME_FAMILIES,
    Decided,
    PairTask,
    documents,
    full_pass,
    generated,
    random_pattern,
    rows_of,
    slow,
    spec_of,
    tiny_pair,
    written,
)

from seqdefer.tasks.text.passes import PADDING

pytestmark = pytest.mark.usefixtures("one_thread")
Spy = Callable[[Any, str], list[tuple[Any, ...]]]
each_family = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize("family", SOME_FAMILIES)


# -- the same tokens as generate ------------------------------------------------------------------------------------


@each_family
def test_never_deferring_is_the_predictors_generate(family: str) -> None:
    pair, examples = tiny_pair(family), documents(32)
    never = written(pair, examples, Decided(torch.zeros(32, LENGTH, dtype=torch.bool)))
    assert never == generated(pair.predictor.model, examples.inputs, LENGTH)
    assert len({len(row) for row in never}) > 1, "some end early"
    assert rows_of(draft(pair.predictor, examples, spec_of(pair)).sequences) == never


@each_family
def test_always_deferring_is_the_experts_generate(family: str) -> None:
    pair, examples = tiny_pair(family), documents(32)
    expected = generated(pair.expert.model, examples.inputs, LENGTH)
    assert written(pair, examples, Decided(torch.ones(32, LENGTH, dtype=torch.bool))) == expected
    assert written(pair, examples, HandOff(torch.zeros(32, dtype=torch.long))) == expected
    assert len({len(row) for row in expected}) > 1, "some end early"


@each_family
@pytest.mark.parametrize("kept", [1, 3, LENGTH - 1])
def test_a_hand_off_is_the_experts_generate_after_the_prefix(family: str, kept: int) -> None:
    pair, examples = tiny_pair(family), documents(32)
    drafts = draft(pair.predictor, examples, spec_of(pair)).sequences
    going_on = (drafts.lengths > kept).nonzero().squeeze(1)
    examples, prefixes = examples.select(going_on), drafts.tokens[going_on, :kept]
    assert len(examples) > 3
    expected = generated(pair.expert.model, examples.inputs, LENGTH, prefixes)
    assert written(pair, examples, HandOff(torch.full_like(going_on, kept))) == expected
    pattern = (torch.arange(LENGTH) >= kept).expand(len(examples), LENGTH)
    assert written(pair, examples, Decided(pattern)) == expected


@each_family
def test_rows_may_hand_off_at_different_places(family: str) -> None:
    pair, examples = tiny_pair(family), documents(32)
    kept = torch.randint(0, LENGTH + 1, (32,), generator=torch.Generator().manual_seed(0))
    together = written(pair, examples, HandOff(kept))
    for row in range(32):
        only = torch.tensor([row])
        assert written(pair, examples.select(only), HandOff(kept[only])) == [together[row]]


@each_family
@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("reads_along", [False, True])
def test_interleaved_rows_equal_full_passes_without_a_cache(
    family: str, share: float, reads_along: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, examples = tiny_pair(family), documents(12)
    monkeypatch.setattr(pair.expert, "reads_along", reads_along)
    pattern = random_pattern(12, share=share)
    together = written(pair, examples, Decided(pattern))
    assert together == [slow(pair, one, row) for one, row in zip(examples.inputs, pattern.tolist(), strict=True)]


def test_several_end_tokens_count_as_the_first() -> None:
    pair = tiny_pair("llama")
    assert pair.expert.model.ends == (1, 7, 8)
    sequences = written(pair, documents(32), HandOff(torch.zeros(32, dtype=torch.long)))
    assert not {7, 8} & {token for row in sequences for token in row}


# -- the contract ---------------------------------------------------------------------------------------------------


@some_families
def test_contracts(family: str) -> None:
    pair, examples, spec = tiny_pair(family), documents(3), spec_of(tiny_pair(family), 5)
    check_predictor(pair.predictor, examples.inputs, spec)
    drafts = draft(pair.predictor, examples, spec).sequences
    check_expert(pair.expert, examples, spec, drafts=drafts)
    completed = pair.expert.complete(examples, drafts.truncate(torch.zeros_like(drafts.lengths)), spec)
    check_predictor(pair.predictor, examples.inputs, spec, paths=completed)


@each_family
def test_a_cached_step_equals_a_full_pass(family: str) -> None:
    pair, inputs = tiny_pair(family), documents(6).inputs
    tokens = torch.randint(3, 60, (6, 5), generator=torch.Generator().manual_seed(1))
    state, _ = pair.predictor.start(inputs)
    for position in range(6):
        proposal = pair.predictor.propose(state)
        for row in range(6):
            logits, hidden = full_pass(pair.predictor.model, inputs[row], tokens[row, :position].tolist())
            torch.testing.assert_close(proposal.features[row], hidden, rtol=1e-4, atol=1e-4)
            if position == 0 and pair.predictor.model.first_token is not None:
                assert (int(proposal.tokens[row]), float(proposal.uncertainty[row])) == (
                    pair.predictor.model.first_token,
                    0,
                )
                continue
            log_probs = logits.log_softmax(0)
            ends = pair.predictor.model.ends
            token = int(log_probs.argmax())
            assert int(proposal.tokens[row]) == (ends[0] if token in ends else token)
            torch.testing.assert_close(proposal.uncertainty[row], -log_probs.max(), rtol=1e-4, atol=1e-4)
            assert proposal.entropy is not None
            entropy = torch.distributions.Categorical(logits=logits).entropy()
            torch.testing.assert_close(proposal.entropy[row], entropy, rtol=1e-4, atol=1e-4)
        if position < 5:
            state = pair.predictor.append(state, tokens[:, position])


@each_family
def test_the_context_is_the_mean_state_of_the_input(family: str) -> None:
    model, inputs = tiny_pair(family).predictor.model, documents(6).inputs
    _, context = tiny_pair(family).predictor.start(inputs)
    for row, one in enumerate(inputs):
        alone = one[one != PADDING][None]
        with torch.no_grad():
            if model.is_encoder_decoder:
                states = model.model.get_encoder()(input_ids=alone).last_hidden_state
            else:
                states = model.model(input_ids=alone, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(context[row], states[0].mean(0), rtol=1e-4, atol=1e-4)


@each_family
def test_many_tokens_are_read_in_one_pass(family: str, spy: Spy) -> None:
    predictor, inputs = tiny_pair(family).predictor, documents(5).inputs
    tokens = torch.randint(3, 60, (5, 4), generator=torch.Generator().manual_seed(1))
    state, _ = predictor.start(inputs)
    passes = spy(predictor.model.model, "forward")
    at_once = predictor.propose(predictor.extend(state, tokens))
    assert len(passes) == 1
    for column in tokens.unbind(1):
        state = predictor.append(state, column)
    one_by_one = predictor.propose(state)
    assert torch.equal(at_once.tokens, one_by_one.tokens)
    torch.testing.assert_close(at_once.features, one_by_one.features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(at_once.uncertainty, one_by_one.uncertainty, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "key", "value"), [("gpt2", "n_head", 4), ("t5", "prompt", (9,))])
def test_a_fingerprint_covers_more_than_the_weights(family: str, key: str, value: Any) -> None:
    model = tiny_pair(family).expert.model
    before = model.fingerprint()
    owner = model.network if key == "prompt" else model.model.config
    before_change = getattr(owner, key)
    setattr(owner, key, value)
    try:
        assert model.fingerprint() != before
    finally:
        setattr(owner, key, before_change)
    assert model.fingerprint() == before


# -- labels ---------------------------------------------------------------------------------------------------------


@some_families
def test_the_agreement_short_cut_is_exact(family: str) -> None:
    task = PairTask(tiny_pair(family), documents(20), LENGTH)
    drafted = draft(task.predictor, task.examples, task.spec)
    short, calls = hand_off_table(task, task.examples, drafted)
    plain, all_calls = hand_off_table(task, task.examples, drafted, shortcut=False)
    assert torch.equal(short.loss, plain.loss)
    assert torch.equal(short.deferred, plain.deferred)
    assert calls.made + calls.saved == all_calls.made


@some_families
def test_a_tree_holds_what_the_engine_writes(family: str) -> None:
    task = PairTask(tiny_pair(family), documents(4), 5)
    trees, lazy = enumerate_trees(task, task.examples), DecisionTrees(task, task.examples)
    assert task.expert.examples_at_once == 1  # on a CPU: rows of one document share its cache
    for decisions in product([False, True], repeat=5):
        pattern = torch.tensor([decisions] * 4)
        expected = written(tiny_pair(family), task.examples, Decided(pattern), 5)
        assert follow(trees, decisions) == expected
        assert follow(lazy, decisions) == expected


def follow(trees: DecisionTrees, decisions: tuple[bool, ...]) -> list[list[int]]:
    """Return the sequences at the ends of the paths of `decisions`."""
    found: list[list[int]] = [[]] * len(trees)
    nodes, rows = trees.roots, torch.arange(len(trees))
    for choice in decisions:
        defer = torch.full((len(nodes),), choice)
        following = trees.children(nodes, defer)
        over = following == END
        for row, tokens in zip(rows[over].tolist(), rows_of(trees.sequences(nodes[over], defer[over])), strict=True):
            found[row] = tokens
        nodes, rows = following[~over], rows[~over]
    return found


# -- bad inputs -----------------------------------------------------------------------------------------------------


@each_family
def test_an_empty_input(family: str) -> None:
    inputs = documents(3).inputs.clone()
    inputs[1] = PADDING
    with pytest.raises(DataError, match="input 1 of 3 is empty"):
        tiny_pair(family).predictor.start(inputs)


@pytest.mark.parametrize("family", ["bart", *DECODERS])
def test_an_input_beyond_the_positions(family: str) -> None:
    predictor = tiny_pair(family).predictor
    longest = predictor.model.max_input_tokens(LENGTH)
    assert longest is not None
    fits = documents(2, longest=longest)
    written(tiny_pair(family), fits, HandOff(torch.full((2,), LENGTH)))
    with pytest.raises(DataError, match="positions: shorten the input"):
        predictor.start(torch.full((1, 80), 5))


def test_an_unknown_id() -> None:
    with pytest.raises(DataError, match="inputs hold ids from -1 to 60; the model has 0 to 59, and -1 is padding"):
        tiny_pair("t5").expert.start(Examples(torch.tensor([[5, 60, PADDING]]), torch.zeros(1, 1), torch.zeros(1)))
