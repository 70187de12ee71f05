"""Models read no more than they must: the expert only deferred rows, and each document once."""

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
from seqdefer.tasks.text.passes import KeyValueCache

pytestmark = pytest.mark.usefixtures("one_thread")
Spy = Callable[[Any, str], list[tuple[Any, ...]]]
each_family = pytest.mark.parametrize("family", FAMILIES)
each_encoder_decoder = pytest.mark.parametrize("family", ENCODER_DECODERS)
some_families = pytest.mark.parametrize("family", SOME_FAMILIES)


# -- the expert is lazy ---------------------------------------------------------------------------------------------


def read_by(model: TextModel, spy: Spy) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return the calls of `prefill` and of `extend`."""
    return spy(model.network, "prefill"), spy(model.network, "extend")


@each_family
def test_an_expert_without_deferrals_does_nothing(family: str, spy: Spy) -> None:
    pair, examples = tiny_pair(family), documents(8)
    passes = spy(pair.expert.model.model, "forward")
    written(pair, examples, Decided(torch.zeros(8, LENGTH, dtype=torch.bool)))
    assert not passes


@each_encoder_decoder
def test_the_encoder_reads_a_document_once_at_its_first_deferral(family: str, spy: Spy) -> None:
    expert, examples = tiny_pair(family).expert, documents(6)
    prefilled, extended = read_by(expert.model, spy)
    encoded = spy(expert.model.network, "_encode")
    state = expert.append(expert.start(examples), torch.full((6,), 3))
    assert not encoded
    _, state = expert.next(state, torch.tensor([4, 1]))
    assert [len(call[0]) for call in prefilled] == [2]
    assert sum(len(call[0]) for call in encoded) == 2
    state = expert.extend(state, torch.full((6, 3), 4))
    _, state = expert.next(state, torch.tensor([1, 2, 4]))
    assert [len(call[0]) for call in prefilled] == [2, 1]  # row 2 is new
    assert sum(len(call[0]) for call in encoded) == 3
    assert [call[1].shape for call in extended] == [(2, 3)]  # the two others catch up with three tokens in one pass
    expert.next(state, torch.tensor([4, 2]))
    assert (len(prefilled), len(extended)) == (2, 1)  # known already


@some_families
def test_rows_at_different_positions_catch_up_in_one_pass(family: str, spy: Spy) -> None:
    expert, examples = tiny_pair(family).expert, documents(4)
    tokens = torch.randint(3, 60, (4, 6), generator=torch.Generator().manual_seed(2))
    state = expert.start(examples)
    for position in range(6):  # row 0 is asked at 0, row 1 at 1 and 3, row 2 at 3, row 3 at 4
        asked = [row for row, places in enumerate(([0], [1, 3], [3], [4])) if position in places]
        state = expert.next(state, torch.tensor(asked))[1] if asked else state
        state = expert.append(state, tokens[:, position])
    _, extended = read_by(expert.model, spy)
    named, _ = expert.next(state, torch.tensor([3, 1, 0, 2]))
    assert [call[1].shape for call in extended] == [(4, 6)]  # from where row 0 stands
    expected = [
        int(full_pass(expert.model, examples.inputs[row], tokens[row].tolist())[0].argmax()) for row in (3, 1, 0, 2)
    ]
    ends = expert.model.ends
    assert named.tolist() == [ends[0] if token in ends else token for token in expected]


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
    assert state.started_rows().tolist() == [0, 1, 2]  # row 3 never asked: nothing is read of it


@some_families
def test_finished_rows_are_not_read(family: str, spy: Spy) -> None:
    predictor = tiny_pair(family).predictor
    state, _ = predictor.start(documents(10).inputs)
    _, extended = read_by(predictor.model, spy)
    for n in (10, 9, 8, 7, 2):  # caches are copied once a fifth of the rows is unused
        state = predictor.select(state, torch.arange(n))
        state = predictor.append(state, torch.full((n,), 3))
    assert [len(call[1]) for call in extended] == [10, 10, 10, 7, 2]


@each_encoder_decoder
def test_cached_encoder_states_change_nothing(family: str, spy: Spy) -> None:
    examples, spec = documents(12), SequenceSpec(LENGTH, 1)
    plain, caching = (TextExpert(tiny_text_model(family, 2, 6, cache_bytes=size)) for size in (0, 2**20))
    encoded = spy(caching.model.network, "_encode")
    blank = Sequences(torch.zeros(12, LENGTH, dtype=torch.long), torch.zeros(12, dtype=torch.long))
    expected = rows_of(plain.complete(examples, blank, spec))
    for order in (torch.arange(12), torch.arange(12), torch.tensor([3, 11, 5])):
        got = caching.complete(examples.select(order), blank.select(order), spec)
        assert rows_of(got) == [expected[row] for row in order.tolist()]
    assert sum(len(call[0]) for call in encoded) == 12
    assert caching.model.encoder_cache.n_encoded == 12


def test_the_encoder_cache_evicts_the_oldest_documents() -> None:
    model = tiny_text_model("t5", 1, 1, cache_bytes=3 * 12 * 16 * 4)  # three documents of 12 tokens
    inputs = torch.randint(3, 60, (5, 12), generator=torch.Generator().manual_seed(0))
    predictor = TextPredictor(model)
    predictor.start(inputs)
    predictor.start(inputs[2:])
    assert model.encoder_cache.n_encoded == 5
    predictor.start(inputs[:1])
    assert model.encoder_cache.n_encoded == 6


# -- one document, many rows ----------------------------------------------------------------------------------------


def random_cache(n: int, n_inputs: int, read: int, seed: int) -> KeyValueCache:
    generator = torch.Generator().manual_seed(seed)
    own = tuple((torch.randn(n, 2, 1 + read, 3, generator=generator),) * 2 for _ in range(2))
    source = tuple((torch.randn(n, 2, n_inputs, 3, generator=generator),) * 2 for _ in range(2))
    return KeyValueCache(own, source, None, 1)


def is_shared(cache: KeyValueCache) -> bool:
    return all(tensor.stride(0) == 0 for layer in cache.source for tensor in layer)


def assert_same(found: KeyValueCache, own: list[Tensor], source: list[Tensor]) -> None:
    """Compare keys and values layer by layer, those of sources row by row."""
    documents = torch.arange(len(found)) if found.documents is None else found.documents
    by_row = [(keys[documents], values[documents]) for keys, values in found.source]
    for (keys, values), (expected, _) in zip((*found.own, *by_row), ((x, x) for x in (*own, *source)), strict=True):
        assert torch.equal(keys, expected)
        assert torch.equal(values, expected)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("rows", [torch.tensor([0, 0]), slice(0, 1), torch.tensor([0])])
def test_rows_of_one_document_share_its_memory(n: int, rows: Tensor | slice) -> None:
    cache = random_cache(n, 5, 3, seed=0)
    taken = cache.take(rows, 2)
    assert_same(taken, [keys[rows, :, :3] for keys, _ in cache.own], [keys[rows] for keys, _ in cache.source])
    again = taken.take(torch.zeros(4, dtype=torch.long), 2)
    assert_same(again, [keys[[0] * 4, :, :3] for keys, _ in cache.own], [keys[[0] * 4] for keys, _ in cache.source])
    assert is_shared(again) == (n == 1 or len(taken) == 1)


def test_parts_of_one_document_are_joined_without_a_copy() -> None:
    cache = random_cache(1, 5, 3, seed=0)
    some = cache.take(torch.tensor([0, 0, 0]), 3)
    grown = replace(
        some, own=random_cache(3, 5, 3, seed=1).own
    )  # what a pass leaves: caches of its own, the same document
    joined = KeyValueCache.join([some, grown.take(slice(1, 3), 3), cache])
    assert is_shared(joined)
    assert joined.source[0][0].data_ptr() == cache.source[0][0].data_ptr()
    own = [torch.cat([one, other[1:3], last]) for (one, _), (other, _), (last, _) in
           zip(some.own, grown.own, cache.own, strict=True)]  # fmt: skip
    assert_same(joined, own, [keys.expand(6, -1, -1, -1) for keys, _ in cache.source])


def test_different_documents_are_not_taken_for_one() -> None:
    one, other = random_cache(1, 5, 2, seed=0), random_cache(1, 4, 2, seed=1)
    joined = KeyValueCache.join([one.take(torch.tensor([0, 0]), 2), other])
    padding = [torch.nn.functional.pad(keys, (0, 0, 0, 1)) for keys, _ in other.source]
    source = [torch.cat([keys[[0, 0]], padded]) for (keys, _), padded in zip(one.source, padding, strict=True)]
    assert_same(joined, [torch.cat([a[[0, 0]], b]) for (a, _), (b, _) in zip(one.own, other.own, strict=True)], source)
    assert joined.mask is not None
    assert joined.mask.tolist() == [[True] * 5, [True] * 5, [True] * 4 + [False]]


def test_rows_share_the_memory_of_several_documents() -> None:
    """Each row of a tree used to hold a copy of its document, which with Whisper filled a GPU."""
    cache = random_cache(3, 5, 3, seed=0)
    some, others = cache.take(torch.tensor([2, 0, 2, 2]), 3), cache.take(torch.tensor([1, 1]), 3)
    again = some.take(torch.tensor([1, 3, 0]), 2)
    joined = KeyValueCache.join([again, others.take(slice(0, 1), 2), cache.take(torch.tensor([0, 0]), 2)])
    for found in (some, again, joined):
        assert found.source[0][0].data_ptr() == cache.source[0][0].data_ptr()
    rows = [0, 2, 2, 1, 0, 0]
    assert_same(joined, [keys[rows, :, :3] for keys, _ in cache.own], [keys[rows] for keys, _ in cache.source])


def test_documents_that_meet_are_stored_once_each() -> None:
    one, other = random_cache(2, 5, 2, seed=0), random_cache(2, 5, 2, seed=1)
    taken = [(one, torch.tensor([1, 1, 0])), (other, torch.tensor([0, 0])), (one, torch.tensor([0, 0]))]
    joined = KeyValueCache.join([cache.take(rows, 2) for cache, rows in taken])
    assert len(joined.source[0][0]) == 4
    own, source = (
        [torch.cat([getattr(cache, name)[layer][0][rows] for cache, rows in taken]) for layer in range(2)]
        for name in ("own", "source")
    )
    assert_same(joined, own, source)


@each_encoder_decoder
def test_gathered_documents_give_the_same_pass(family: str) -> None:
    network = tiny_pair(family).expert.model.network
    inputs = documents(3).inputs
    rows, tokens = torch.tensor([2, 0, 2, 1]), torch.tensor([[5], [6], [7], [8]])
    with torch.no_grad():
        cache = network.prefill(inputs, torch.full((3, 1), 9)).cache
        shared = cache.take(rows, 1)
        assert shared.documents is not None
        copied = replace(shared, source=tuple((k[rows], v[rows]) for k, v in cache.source), documents=None)
        found, expected = network.extend(shared, tokens), network.extend(copied, tokens)
    assert torch.equal(found.logits, expected.logits)
    assert found.cache.documents is shared.documents


@each_encoder_decoder
def test_branches_of_one_document_share_its_memory(family: str, spy: Spy) -> None:
    pair, one = tiny_pair(family), documents(1)
    tokens = torch.randint(3, 60, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    drafts = Sequences(tokens, torch.tensor([LENGTH]))
    _, extended = read_by(pair.expert.model, spy)
    branch_out(pair.expert, one, drafts, torch.arange(LENGTH), spec_of(pair))
    sources = [cache.source[0][0] for cache, _ in extended]
    assert max(len(source) for source in sources) > 1
    assert len({source.data_ptr() for source in sources}) == 1
