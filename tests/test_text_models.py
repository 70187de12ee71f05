"""Pairs of Hugging Face models write exactly what `generate` writes, whoever takes over where, and read no more."""

from __future__ import annotations

import gzip
import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqdefer.branches import branch_out
from seqdefer.engine import HandOff, draft, roll_out
from seqdefer.errors import DataError, OptionError
from seqdefer.interfaces import Policy, SplitName, Task
from seqdefer.labels import hand_off_table
from seqdefer.testing import check_expert, check_predictor, check_task
from seqdefer.trees import END, DecisionTrees, enumerate_trees
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec

pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import DECODERS, ENCODER_DECODERS, FAMILIES, documents, generated, tiny_pair, tiny_text_model

from seqdefer.tasks.text.facts import facts_of
from seqdefer.tasks.text.memory import Halving, SmallerBatchWarning
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.pairs import SHOWN, TextExpert, TextPair, TextPredictor, load_pair
from seqdefer.tasks.text.passes import PADDING, Memory, Pass

pytestmark = pytest.mark.usefixtures("one_thread")
Spy = Callable[[Any, str], list[tuple[Any, ...]]]
LENGTH = 8
each_family = pytest.mark.parametrize("family", FAMILIES)
each_encoder_decoder = pytest.mark.parametrize("family", ENCODER_DECODERS)
some_families = pytest.mark.parametrize("family", ["t5", "bart", "gpt2", "llama"])  # one of each kind of position


class Decided(Policy[Tensor]):
    """Defers where `pattern` (n, L) says so, and gets the pen back."""

    def __init__(self, pattern: Tensor) -> None:
        self.pattern = pattern

    def start(self, context: Tensor) -> Tensor:
        return self.pattern

    def decide(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Tensor, Tensor, Tensor]:
        return state[:, position].float(), state[:, position], state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]


class PairTask(Task):
    """A pair with losses: tokens that the target does not hold."""

    name, loss_unit = "pair", "share of tokens"

    def __init__(self, pair: TextPair, examples: Examples, length: int) -> None:
        self.predictor, self.expert, self.examples = pair.predictor, pair.expert, examples
        self.spec = SequenceSpec(length, pair.predictor.end)

    def split(self, name: SplitName) -> Examples:
        third = {"train": 0, "validation": 1, "test": 2}[name]
        return self.examples.select(torch.arange(third, len(self.examples), 3))

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        wrong = (sequences.tokens[:, :, None] != examples.targets[:, None, :]).all(2) & sequences.mask()
        return wrong.sum(1) / sequences.lengths

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return (examples.targets != tokens[:, None]).all(1).float()


def spec_of(pair: TextPair, length: int = LENGTH) -> SequenceSpec:
    return SequenceSpec(length, pair.predictor.end)


def rows_of(sequences: Sequences) -> list[list[int]]:
    both = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
    return [tokens[:length] for tokens, length in both]


def written(pair: TextPair, examples: Examples, policy: Policy[Any], length: int = LENGTH) -> list[list[int]]:
    return rows_of(roll_out(pair.predictor, pair.expert, examples, policy, spec_of(pair, length)).sequences)


def random_pattern(n: int, length: int = LENGTH, seed: int = 0, share: float = 0.4) -> Tensor:
    return torch.rand(n, length, generator=torch.Generator().manual_seed(seed)) < share


@torch.no_grad()
def full_pass(model: TextModel, one: Tensor, prefix: list[int]) -> tuple[Tensor, Tensor]:
    """Logits (V,) and what the output layer sees (H,) after a prefix: one row, no cache, no padding."""
    inputs, after = one[one != PADDING][None], torch.tensor([prefix], dtype=torch.long)
    options = {"use_cache": False, "output_hidden_states": True}
    if not model.is_encoder_decoder:
        output = model.model(input_ids=torch.cat([inputs, after], 1), **options)
        return output.logits[0, -1], output.hidden_states[-1][0, -1]
    start = torch.tensor([[model.model.generation_config.decoder_start_token_id]])
    output = model.model(input_ids=inputs, decoder_input_ids=torch.cat([start, after], 1), **options)
    scale = model.model.config.hidden_size**-0.5 if model.name == "t5-tied" else 1.0
    return output.logits[0, -1], output.decoder_hidden_states[-1][0, -1] * scale


def slow(pair: TextPair, one: Tensor, decisions: list[bool]) -> list[int]:
    """The interleaved loop for one row, everything computed anew for each token."""
    tokens: list[int] = []
    for defer in decisions:
        model = (pair.expert if defer else pair.predictor).model
        token = int(full_pass(model, one, tokens)[0].argmax())
        if not tokens and model.first is not None:
            token = model.first
        tokens.append(model.ends[0] if token in model.ends else token)
        if tokens[-1] == pair.predictor.end:
            break
    return tokens


# -- the same tokens as generate -----------------------------------------------------------------------------------


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
def test_a_hand_off_is_the_experts_generate_from_the_prefix(family: str, kept: int) -> None:
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
def test_writers_in_turn_write_what_full_passes_without_a_cache_write(
    family: str, share: float, reads_along: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, examples = tiny_pair(family), documents(12)
    monkeypatch.setattr(pair.expert, "reads_along", reads_along)
    pattern = random_pattern(12, share=share)
    together = written(pair, examples, Decided(pattern))
    assert together == [slow(pair, one, row) for one, row in zip(examples.inputs, pattern.tolist(), strict=True)]


@each_family
def test_a_batch_of_32_equals_32_batches_of_one(family: str) -> None:
    pair, examples, pattern = tiny_pair(family), documents(32), random_pattern(32)
    together = roll_out(pair.predictor, pair.expert, examples, Decided(pattern), spec_of(pair))
    for row in range(32):
        only = torch.tensor([row])
        alone = roll_out(pair.predictor, pair.expert, examples.select(only), Decided(pattern[only]), spec_of(pair))
        assert rows_of(alone.sequences) == rows_of(together.sequences.select(only))
        assert torch.equal(alone.by_expert, together.by_expert[only])


# -- the contract --------------------------------------------------------------------------------------------------


@each_family
def test_predictor_and_expert_keep_their_contracts(family: str) -> None:
    pair, examples, spec = tiny_pair(family), documents(3), spec_of(tiny_pair(family), 5)
    check_predictor(pair.predictor, examples.inputs, spec)
    drafts = draft(pair.predictor, examples, spec).sequences
    check_expert(pair.expert, examples, spec, drafts=drafts)
    completed = pair.expert.complete(examples, drafts.truncate(torch.zeros_like(drafts.lengths)), spec)
    check_predictor(pair.predictor, examples.inputs, spec, paths=completed)


@each_family
def test_a_step_with_a_cache_is_a_full_pass(family: str) -> None:
    pair, inputs = tiny_pair(family), documents(6).inputs
    tokens = torch.randint(3, 60, (6, 5), generator=torch.Generator().manual_seed(1))
    state, _ = pair.predictor.start(inputs)
    for position in range(6):
        proposal = pair.predictor.propose(state)
        for row in range(6):
            logits, hidden = full_pass(pair.predictor.model, inputs[row], tokens[row, :position].tolist())
            torch.testing.assert_close(proposal.features[row], hidden, rtol=1e-4, atol=1e-4)
            if position == 0 and pair.predictor.model.first is not None:
                assert (int(proposal.tokens[row]), float(proposal.uncertainty[row])) == (pair.predictor.model.first, 0)
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
def test_many_tokens_are_read_in_one_pass_and_as_one_by_one(family: str, spy: Spy) -> None:
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


@some_families
def test_a_state_branches_and_stays_as_it_is(family: str) -> None:
    predictor, inputs = tiny_pair(family).predictor, documents(3).inputs
    state = predictor.extend(predictor.start(inputs)[0], torch.tensor([[3, 4], [5, 6], [7, 8]]))
    before = predictor.propose(state)
    caches = [tensor.clone() for block in state.blocks for layer in block.memory.own for tensor in layer]
    branches = predictor.select(state, torch.tensor([2, 0, 0, 2, 1]))
    grown = predictor.append(branches, torch.tensor([9, 10, 11, 12, 13]))
    for row, (source, token) in enumerate(zip([2, 0, 0, 2, 1], [9, 10, 11, 12, 13], strict=True)):
        only = torch.tensor([source])
        alone = predictor.propose(predictor.append(predictor.select(state, only), torch.tensor([token])))
        torch.testing.assert_close(predictor.propose(grown).features[row], alone.features[0], rtol=1e-4, atol=1e-4)
    after = predictor.propose(state)
    assert torch.equal(before.features, after.features)
    now = [tensor for block in state.blocks for layer in block.memory.own for tensor in layer]
    assert all(torch.equal(one, other) for one, other in zip(caches, now, strict=True))


# -- the expert is lazy --------------------------------------------------------------------------------------------


def read_by(model: TextModel, spy: Spy) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Calls of the network that read inputs, and calls that read on."""
    return spy(model.network, "begin"), spy(model.network, "go_on")


@each_family
def test_an_expert_that_nobody_asks_does_nothing(family: str, spy: Spy) -> None:
    pair, examples = tiny_pair(family), documents(8)
    passes = spy(pair.expert.model.model, "forward")
    written(pair, examples, Decided(torch.zeros(8, LENGTH, dtype=torch.bool)))
    assert not passes


@each_encoder_decoder
def test_the_encoder_reads_a_document_at_its_first_deferral_and_never_again(family: str, spy: Spy) -> None:
    expert, examples = tiny_pair(family).expert, documents(6)
    begun, gone_on = read_by(expert.model, spy)
    encoded = spy(expert.model.network, "_encode")
    state = expert.append(expert.start(examples), torch.full((6,), 3))
    assert not encoded
    _, state = expert.next(state, torch.tensor([4, 1]))
    assert [len(call[0]) for call in begun] == [2]
    assert sum(len(call[0]) for call in encoded) == 2
    state = expert.extend(state, torch.full((6, 3), 4))
    _, state = expert.next(state, torch.tensor([1, 2, 4]))
    assert [len(call[0]) for call in begun] == [2, 1]  # row 2 is new
    assert sum(len(call[0]) for call in encoded) == 3
    assert [call[1].shape for call in gone_on] == [(2, 3)]  # the two others catch up with three tokens in one pass
    expert.next(state, torch.tensor([4, 2]))
    assert (len(begun), len(gone_on)) == (2, 1)  # known already


@some_families
def test_rows_that_stand_apart_catch_up_in_one_pass(family: str, spy: Spy) -> None:
    expert, examples = tiny_pair(family).expert, documents(4)
    tokens = torch.randint(3, 60, (4, 6), generator=torch.Generator().manual_seed(2))
    state = expert.start(examples)
    for position in range(6):  # row 0 is asked at 0, row 1 at 1 and 3, row 2 at 3, row 3 at 4
        asked = [row for row, places in enumerate(([0], [1, 3], [3], [4])) if position in places]
        state = expert.next(state, torch.tensor(asked))[1] if asked else state
        state = expert.append(state, tokens[:, position])
    _, gone_on = read_by(expert.model, spy)
    said, _ = expert.next(state, torch.tensor([3, 1, 0, 2]))
    assert [call[1].shape for call in gone_on] == [(4, 6)]  # from where row 0 stands
    expected = [
        int(full_pass(expert.model, examples.inputs[row], tokens[row].tolist())[0].argmax()) for row in (3, 1, 0, 2)
    ]
    ends = expert.model.ends
    assert said.tolist() == [ends[0] if token in ends else token for token in expected]


@some_families
def test_rows_that_read_along_stay_in_one_block(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expert, examples = tiny_pair(family).expert, documents(4)
    monkeypatch.setattr(expert, "reads_along", True)
    state = expert.start(examples)
    for position, asked in enumerate(([0], [1], [0], [2, 1], [2])):
        _, state = expert.next(state, torch.tensor(asked))
        is_new = position in (0, 1, 3)  # a row begins in a block of its own, and joins the others at the next question
        assert len(state.blocks) == (1 if position == 0 else 1 + is_new)
        state = expert.append(state, torch.full((4,), 3 + position))
    assert state.begun().tolist() == [0, 1, 2]  # row 3 never asked: nothing is read of it


@some_families
def test_rows_that_have_left_are_not_read_any_more(family: str, spy: Spy) -> None:
    predictor = tiny_pair(family).predictor
    state, _ = predictor.start(documents(10).inputs)
    _, gone_on = read_by(predictor.model, spy)
    for n in (10, 9, 8, 7, 2):  # caches are copied when a fifth of the rows has left
        state = predictor.select(state, torch.arange(n))
        state = predictor.append(state, torch.full((n,), 3))
    assert [len(call[1]) for call in gone_on] == [10, 10, 10, 7, 2]


@each_encoder_decoder
def test_remembered_encodings_change_nothing(family: str, spy: Spy) -> None:
    examples, spec = documents(12), SequenceSpec(LENGTH, 1)
    plain, keeping = (TextExpert(tiny_text_model(family, 2, 6, remember=size)) for size in (0, 2**20))
    encoded = spy(keeping.model.network, "_encode")
    blank = Sequences(torch.zeros(12, LENGTH, dtype=torch.long), torch.zeros(12, dtype=torch.long))
    expected = rows_of(plain.complete(examples, blank, spec))
    for order in (torch.arange(12), torch.arange(12), torch.tensor([3, 11, 5])):
        got = keeping.complete(examples.select(order), blank.select(order), spec)
        assert rows_of(got) == [expected[row] for row in order.tolist()]
    assert sum(len(call[0]) for call in encoded) == 12
    assert keeping.model.encodings.n_encoded == 12


def test_encodings_forget_the_oldest_documents() -> None:
    model = tiny_text_model("t5", 1, 1, remember=3 * 12 * 16 * 4)  # three documents of 12 tokens
    inputs = torch.randint(3, 60, (5, 12), generator=torch.Generator().manual_seed(0))
    predictor = TextPredictor(model)
    predictor.start(inputs)
    predictor.start(inputs[2:])
    assert model.encodings.n_encoded == 5
    predictor.start(inputs[:1])
    assert model.encodings.n_encoded == 6


# -- what rejectors are shown --------------------------------------------------------------------------------------


@some_families
def test_what_is_shown_are_states_facts_or_both(family: str) -> None:
    model, inputs = tiny_pair(family).predictor.model, documents(5).inputs
    tokens = torch.randint(3, 60, (5, 3), generator=torch.Generator().manual_seed(1))
    seen = {}
    for shown in SHOWN:
        predictor = TextPredictor(model, shown=shown)
        state, context = predictor.start(inputs)
        seen[shown] = [context, predictor.propose(state).features]
        seen[shown].append(predictor.propose(predictor.extend(state, tokens)).features)
    for states, facts, both in zip(*(seen[shown] for shown in ("states", "facts", "both")), strict=True):
        assert torch.equal(torch.cat([states, facts], 1), both)
    lengths = (inputs != PADDING).sum(1, keepdim=True)
    torch.testing.assert_close(seen["facts"][0], lengths.log())


@some_families
def test_facts_are_of_the_two_likeliest_tokens(family: str) -> None:
    """Of a token that every sequence begins with, too, and of an end token that another one stands for."""
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


def test_what_is_shown_has_a_name() -> None:
    model = tiny_pair("t5").predictor.model
    assert len({TextPredictor(model, shown=shown).fingerprint for shown in SHOWN}) == 3
    with pytest.raises(OptionError, match="unknown choice of what rejectors see 'all'; available: both, facts, states"):
        TextPredictor(model, shown="all")


def test_facts_are_numbers_where_one_token_alone_is_allowed() -> None:
    """The second likeliest then has log p = -inf."""
    predictor = TextPredictor(tiny_text_model("t5", 1, 1), shown="both")
    logits = torch.full((2, 60), -torch.inf).index_fill(1, torch.tensor([5]), 0.0)
    run = Pass(Memory((), (), None, 1), torch.zeros(2, 16), logits)
    proposal = predictor.judge(run, 1)
    assert proposal.tokens.tolist() == [5, 5]
    assert bool(proposal.features.isfinite().all())
    assert bool(proposal.uncertainty.isfinite().all())


# -- one document, many rows ---------------------------------------------------------------------------------------


def memory_of(n: int, n_inputs: int, read: int, seed: int) -> Memory:
    generator = torch.Generator().manual_seed(seed)
    own = tuple((torch.randn(n, 2, 1 + read, 3, generator=generator),) * 2 for _ in range(2))
    source = tuple((torch.randn(n, 2, n_inputs, 3, generator=generator),) * 2 for _ in range(2))
    return Memory(own, source, None, 1)


def is_shared(memory: Memory) -> bool:
    return all(tensor.stride(0) == 0 for layer in memory.source for tensor in layer)


def assert_same(found: Memory, own: list[Tensor], source: list[Tensor]) -> None:
    """Layer by layer, keys as values."""
    for (keys, values), (expected, _) in zip(
        (*found.own, *found.source), ((x, x) for x in (*own, *source)), strict=True
    ):
        assert torch.equal(keys, expected)
        assert torch.equal(values, expected)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("rows", [torch.tensor([0, 0]), slice(0, 1), torch.tensor([0])])
def test_rows_of_one_document_share_it_and_rows_of_several_do_not(n: int, rows: Tensor | slice) -> None:
    memory = memory_of(n, 5, 3, seed=0)
    taken = memory.take(rows, 2)
    assert_same(taken, [keys[rows, :, :3] for keys, _ in memory.own], [keys[rows] for keys, _ in memory.source])
    again = taken.take(torch.zeros(4, dtype=torch.long), 2)
    assert_same(again, [keys[[0] * 4, :, :3] for keys, _ in memory.own], [keys[[0] * 4] for keys, _ in memory.source])
    assert is_shared(again) == (n == 1 or len(taken) == 1)


def test_parts_of_one_document_are_joined_without_copying_it() -> None:
    memory = memory_of(1, 5, 3, seed=0)
    some = memory.take(torch.tensor([0, 0, 0]), 3)
    grown = replace(
        some, own=memory_of(3, 5, 3, seed=1).own
    )  # what a pass leaves: caches of its own, the same document
    joined = Memory.join([some, grown.take(slice(1, 3), 3), memory])
    assert is_shared(joined)
    assert joined.source[0][0].data_ptr() == memory.source[0][0].data_ptr()
    own = [torch.cat([one, other[1:3], last]) for (one, _), (other, _), (last, _) in
           zip(some.own, grown.own, memory.own, strict=True)]  # fmt: skip
    assert_same(joined, own, [keys.expand(6, -1, -1, -1) for keys, _ in memory.source])


def test_different_documents_of_one_row_each_are_not_taken_for_one() -> None:
    one, other = memory_of(1, 5, 2, seed=0), memory_of(1, 4, 2, seed=1)
    joined = Memory.join([one.take(torch.tensor([0, 0]), 2), other])
    padding = [torch.nn.functional.pad(keys, (0, 0, 0, 1)) for keys, _ in other.source]
    source = [torch.cat([keys[[0, 0]], padded]) for (keys, _), padded in zip(one.source, padding, strict=True)]
    assert_same(joined, [torch.cat([a[[0, 0]], b]) for (a, _), (b, _) in zip(one.own, other.own, strict=True)], source)
    assert joined.mask is not None
    assert joined.mask.tolist() == [[True] * 5, [True] * 5, [True] * 4 + [False]]


@each_encoder_decoder
def test_branches_of_one_document_share_what_was_read_of_it(family: str, spy: Spy) -> None:
    pair, one = tiny_pair(family), documents(1)
    tokens = torch.randint(3, 60, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    drafts = Sequences(tokens, torch.tensor([LENGTH]))
    _, gone_on = read_by(pair.expert.model, spy)
    branch_out(pair.expert, one, drafts, torch.arange(LENGTH), spec_of(pair))
    sources = [memory.source[0][0] for memory, _ in gone_on]
    assert max(len(source) for source in sources) > 1
    assert len({source.data_ptr() for source in sources}) == 1


# -- labels --------------------------------------------------------------------------------------------------------


@some_families
def test_the_agreement_short_cut_changes_nothing(family: str) -> None:
    task = PairTask(tiny_pair(family), documents(20), LENGTH)
    drafted = draft(task.predictor, task.examples, task.spec)
    short, calls = hand_off_table(task, task.examples, drafted)
    plain, all_calls = hand_off_table(task, task.examples, drafted, shortcut=False)
    assert torch.equal(short.loss, plain.loss)
    assert torch.equal(short.deferred, plain.deferred)
    assert calls.made + calls.saved == all_calls.made


@some_families
def test_a_tree_holds_what_the_loop_writes(family: str) -> None:
    task = PairTask(tiny_pair(family), documents(4), 5)
    trees, lazy = enumerate_trees(task, task.examples), DecisionTrees(task, task.examples)
    for decisions in product([False, True], repeat=5):
        pattern = torch.tensor([decisions] * 4)
        expected = written(tiny_pair(family), task.examples, Decided(pattern), 5)
        assert follow(trees, decisions) == expected
        assert follow(lazy, decisions) == expected


def follow(trees: DecisionTrees, decisions: tuple[bool, ...]) -> list[list[int]]:
    """The sequences at the ends of the paths that `decisions` take."""
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


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_a_task_over_a_pair_keeps_its_contract(family: str) -> None:
    check_task(PairTask(tiny_pair(family), documents(6), 3), n=2)


def test_several_end_tokens_count_as_the_first() -> None:
    pair = tiny_pair("llama")
    assert pair.expert.model.ends == (1, 7, 8)
    sequences = written(pair, documents(32), HandOff(torch.zeros(32, dtype=torch.long)))
    assert not {7, 8} & {token for row in sequences for token in row}


@each_family
def test_an_empty_input_is_refused(family: str) -> None:
    inputs = documents(3).inputs.clone()
    inputs[1] = PADDING
    with pytest.raises(DataError, match="input 1 of 3 is empty"):
        tiny_pair(family).predictor.start(inputs)


@pytest.mark.parametrize("family", ["bart", *DECODERS])
def test_an_input_beyond_the_positions_is_refused(family: str) -> None:
    predictor = tiny_pair(family).predictor
    longest = predictor.model.longest_input(LENGTH)
    assert longest is not None
    fits = documents(2, longest=longest)
    written(tiny_pair(family), fits, HandOff(torch.full((2,), LENGTH)))
    with pytest.raises(DataError, match="positions: cut the input"):
        predictor.start(torch.full((1, 80), 5))


def test_an_id_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(DataError, match="inputs hold ids from -1 to 60; the model has 0 to 59, and -1 pads"):
        tiny_pair("t5").expert.start(Examples(torch.tensor([[5, 60, PADDING]]), torch.zeros(1, 1), torch.zeros(1)))


# -- out of memory -------------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that holds three rows: the same tokens come out, in passes of at most three rows."""
    pair, examples = TextPair.of(tiny_text_model("t5", 1, 1), tiny_text_model("t5", 2, 6)), documents(12)
    pattern = random_pattern(12)
    expected = written(pair, examples, Decided(pattern))
    for writer in (pair.predictor, pair.expert):
        for name in ("begin", "go_on"):
            monkeypatch.setattr(writer.model.network, name, holding_three(getattr(writer.model.network, name)))
    with pytest.warns(SmallerBatchWarning) as told:
        assert written(pair, examples, Decided(pattern)) == expected
    assert str(told[0].message) == "12 rows do not fit into the memory of the GPU; going on with 6 at once"
    assert pair.predictor.batch_size == 3


def holding_three(method: Callable[..., Any]) -> Callable[..., Any]:
    def limited(first: Any, tokens: Tensor) -> Any:
        if len(tokens) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return method(first, tokens)

    return limited


def test_one_row_that_does_not_fit_ends_it() -> None:
    def full(_: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OptionError, match="one row alone does not fit"), pytest.warns(SmallerBatchWarning):
        Halving(2).over(torch.arange(5), full)
    with pytest.raises(OptionError, match="a batch of 0 rows"):
        Halving(0)


# -- the real pair -------------------------------------------------------------------------------------------------


def unpacked(shared_dir: Path, folder: Path) -> tuple[Path, Path]:
    """The checkpoints of predictor and expert."""
    script = shared_dir / "models" / "unpack.py"
    if not script.is_file():
        pytest.skip("needs the pair in shared/models")
    unpack = runpy.run_path(str(script))["unpack"]
    for name in ("predictor", "expert"):
        unpack(script.parent / "xsum-t5" / name, folder / name)
    return folder / "predictor", folder / "expert"


@pytest.fixture(scope="module")
def real_pair(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TextPair:
    return load_pair(*unpacked(shared_dir, tmp_path_factory.mktemp("pair")))


@pytest.fixture(scope="module")
def news(shared_dir: Path, real_pair: TextPair) -> Examples:
    with gzip.open(shared_dir / "data" / "xsum" / "xsum_test.jsonl.gz", "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line, _ in zip(lines, range(4), strict=False)]
    inputs, _ = real_pair.predictor.model.encode(["summarize: " + each["document"] for each in found], longest=64)
    return Examples(inputs, inputs[:, :8], torch.arange(len(found)))


def test_the_real_pair_writes_what_generate_writes(real_pair: TextPair, news: Examples) -> None:
    n, length = len(news), 20
    drafts = generated(real_pair.predictor.model, news.inputs, length)
    assert written(real_pair, news, HandOff(torch.full((n,), length)), length) == drafts
    expected = generated(real_pair.expert.model, news.inputs, length)
    assert written(real_pair, news, Decided(torch.ones(n, length, dtype=torch.bool)), length) == expected
    assert drafts != expected
    prefixes = torch.tensor([row[:4] for row in drafts])
    handed = generated(real_pair.expert.model, news.inputs, length, prefixes)
    assert written(real_pair, news, HandOff(torch.full((n,), 4)), length) == handed


def test_the_real_pair_in_turn(real_pair: TextPair, news: Examples) -> None:
    two, pattern = news.select(torch.arange(2)), random_pattern(2)
    together = written(real_pair, two, Decided(pattern))
    assert together == [slow(real_pair, one, row) for one, row in zip(two.inputs, pattern.tolist(), strict=True)]
    task = PairTask(real_pair, two, LENGTH)
    drafted = draft(real_pair.predictor, two, task.spec)
    short, calls = hand_off_table(task, two, drafted)
    assert torch.equal(short.loss, hand_off_table(task, two, drafted, shortcut=False)[0].loss)
    assert calls.saved > 0


@pytest.mark.parametrize(("family", "key", "value"), [("gpt2", "n_head", 4), ("t5", "start", 9)])
def test_the_name_of_a_model_tells_what_the_weights_do_not(family: str, key: str, value: int) -> None:
    model = tiny_pair(family).expert.model
    before = model.fingerprint()
    owner = model.network if key == "start" else model.model.config
    usual = getattr(owner, key)
    setattr(owner, key, value)
    try:
        assert model.fingerprint() != before
    finally:
        setattr(owner, key, usual)
    assert model.fingerprint() == before
