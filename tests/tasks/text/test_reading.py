"""Models read no more than they must: an expert what it is asked for, rows of one document that document once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from seqdefer.labels.branches import branch_out
from seqdefer.types import Sequences, SequenceSpec

pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import (
    ENCODER_DECODERS,
    FAMILIES,
    LENGTH,
    SOME_FAMILIES,
    Decided,
    documents,
    full_pass,
    rows_of,
    spec_of,
    tiny_pair,
    tiny_text_model,
    written,
)

from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.pairs import TextExpert, TextPredictor
from seqdefer.tasks.text.passes import Memory

pytestmark = pytest.mark.usefixtures("one_thread")
Spy = Callable[[Any, str], list[tuple[Any, ...]]]
each_family = pytest.mark.parametrize("family", FAMILIES)
each_encoder_decoder = pytest.mark.parametrize("family", ENCODER_DECODERS)
some_families = pytest.mark.parametrize("family", SOME_FAMILIES)


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
