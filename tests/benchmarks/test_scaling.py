"""What labels cost: the counts against brute force and real labelling, the seconds against their units and limits."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise, product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.scaling.label_cost import (
    MOST_LENGTH,
    ROWS,
    Corpus,
    branch_counts,
    branching_work,
    enumerated_nodes,
    even_hand_offs,
    explored_nodes,
    exploring_work,
    hand_off_bytes,
    label_cost,
    naive_work,
    node_bytes,
    readable_bytes,
    tree_bytes,
)
from benchmarks.scaling.roofline import (
    BEST,
    DEVICES,
    LLAMA_7B,
    LLAMA_70B,
    Device,
    Engine,
    Model,
    read_seconds,
    rows_that_fit,
    step_of,
)
from seqdefer.engine.interleaved import draft
from seqdefer.errors import OptionError
from seqdefer.interfaces import NextTokenExpert, Predictor, SplitName, Task
from seqdefer.labels.branches import branch_out
from seqdefer.labels.exploration import explore_trees
from seqdefer.labels.jobs import LabelPart, make_jobs, run_job
from seqdefer.labels.trees import enumerate_trees
from seqdefer.tasks.text.pairs import DEFAULT_BATCH
from seqdefer.testing.fakes import ToyState, ToyTask, mix
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec
from tests.test_docs import ROOT

VOCABULARY = 50
CORPUS = Corpus(documents=1000, input_tokens=500, length=20, disagreement=0.5)
H200 = DEVICES["H200"]


# -- a pair that disagrees as often as wanted ----------------------------------------------------------------------


class CountingExpert(NextTokenExpert[ToyState]):
    """Names a token that hangs on the prefix, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked = self.started = 0
        self.steps: list[int] = []  # the rows of each

    def start(self, examples: Examples) -> ToyState:
        self.started += len(examples)
        return ToyState.before(examples.inputs)

    def named(self, state: ToyState) -> Tensor:
        return mix(state.inputs, state.prefix, 1) % VOCABULARY

    def next(self, state: ToyState, rows: Tensor) -> tuple[Tensor, ToyState]:
        self.asked += len(rows)
        self.steps.append(len(rows))
        return self.named(state.select(rows)), state

    def append(self, state: ToyState, tokens: Tensor) -> ToyState:
        return state.append(tokens)

    def select(self, state: ToyState, rows: Tensor) -> ToyState:
        return state.select(rows)


class StrayPredictor(Predictor[ToyState]):
    """Writes another token than the expert after `share` of all prefixes, picked by a hash."""

    fingerprint = "stray"

    def __init__(self, expert: CountingExpert, share: float) -> None:
        self.expert, self.share = expert, share
        self.started = 0

    def start(self, inputs: Tensor) -> tuple[ToyState, Tensor]:
        self.started += len(inputs)
        return ToyState.before(inputs), inputs[:, None].float()

    def propose(self, state: ToyState) -> Proposal:
        draw = mix(state.inputs, state.prefix, 2) / 2**31
        named = self.expert.named(state)
        tokens = torch.where(draw < self.share, (named + 1) % VOCABULARY, named)
        return Proposal(tokens, draw[:, None].float(), draw.float())

    def append(self, state: ToyState, tokens: Tensor) -> ToyState:
        return state.append(tokens)

    def select(self, state: ToyState, rows: Tensor) -> ToyState:
        return state.select(rows)


class StrayTask(Task):
    name, loss_unit = "stray", "nothing"
    expert: CountingExpert
    predictor: StrayPredictor

    def __init__(self, share: float, length: int, n: int) -> None:
        self.spec, self.n = SequenceSpec(length), n
        self.expert = CountingExpert()
        self.predictor = StrayPredictor(self.expert, share)

    def split(self, name: SplitName) -> Examples:
        ids = torch.arange(self.n)
        return Examples(mix(ids, 9), ids[:, None], ids)

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        return torch.zeros(len(examples))

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return torch.zeros(len(examples))


# -- counts --------------------------------------------------------------------------------------------------------


def branches_of(disagrees: Sequence[bool], hand_offs: Sequence[int]) -> set[int]:
    """Where the branches leave that the hand-offs of a draft lead to."""
    return {
        next(place for place in range(kept, len(disagrees)) if disagrees[place])
        for kept in hand_offs
        if any(disagrees[kept:])
    }


@pytest.mark.parametrize("hand_offs", [(0,), (3,), (0, 1, 2, 3, 4), (0, 2, 4), (1, 4)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_branches_are_those_of_all_drafts(hand_offs: tuple[int, ...], share: float) -> None:
    """Every pattern of disagreements, weighted by its probability."""
    branches = tokens = 0.0
    for pattern in product((False, True), repeat=5):
        weight = math.prod(share if disagrees else 1 - share for disagrees in pattern)
        left = branches_of(pattern, hand_offs)
        branches += weight * len(left)
        tokens += weight * sum(5 - 1 - place for place in left)
    assert branch_counts(5, share, hand_offs) == (pytest.approx(branches), pytest.approx(tokens))


def test_all_hand_offs_have_the_formula_of_the_page() -> None:
    branches, tokens = branch_counts(20, 0.54, range(20))
    assert (branches, tokens) == (pytest.approx(0.54 * 20), pytest.approx(0.54 * 20 * 19 / 2))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_branching_writes_what_is_predicted(share: float) -> None:
    """Given the disagreements that there were, to the last token but for where they stood; their mean place is that of
    2,000 drafts."""
    task = StrayTask(share, length=12, n=2000)
    examples = task.split("train")
    drafted = draft(task.predictor, examples, task.spec).sequences
    task.expert.asked, task.expert.batch_size = 0, 8000  # all drafts at once
    completed, _ = branch_out(task.expert, examples, drafted, torch.arange(12), task.spec)
    first = completed.tokens.view(2000, 12, 12).diagonal(dim1=1, dim2=2)
    found = float((first != drafted.tokens).float().mean())
    assert found == pytest.approx(share, abs=0.02)
    work = branching_work(replace(CORPUS, length=12, disagreement=found), range(12))
    assert task.expert.asked / 2000 == pytest.approx(work.written, rel=0.01)
    assert len(task.expert.steps) == work.steps
    # The last step takes the rows that have a token to write; the branch that leaves there has none, and is counted.
    assert work.rows - found == pytest.approx(task.expert.steps[-1] / 2000, rel=0.01)


def test_the_naive_way_writes_what_is_predicted() -> None:
    task = StrayTask(0.5, length=6, n=4)
    examples = task.split("train")
    drafted = draft(task.predictor, examples, task.spec).sequences
    task.expert.asked = 0
    for kept in (0, 2, 5):
        task.expert.complete(examples, drafted.truncate(torch.full((4,), kept)), task.spec)
    work = naive_work(replace(CORPUS, length=6), (0, 2, 5))
    assert task.expert.asked == 4 * work.written
    assert work.read == 3 * 500 + 7
    assert work.rows == 3
    assert (work.steps, naive_work(replace(CORPUS, length=6), (2, 5)).steps) == (6, 4)  # as the longest completion


def distinct_prefixes(length: int, share: float, rollouts: int) -> float:
    """By brute force: every prefix as a string of k (both agree), p and e, times the chance that it is passed."""
    total, biases = 0.0, [rollout / (rollouts - 1) for rollout in range(rollouts)]
    for position in range(length):
        for prefix in product("kpe", repeat=position):
            exists = math.prod(1 - share if writer == "k" else share for writer in prefix)
            passes = [math.prod({"k": 1, "p": 1 - bias, "e": bias}[writer] for writer in prefix) for bias in biases]
            total += exists * (1 - math.prod(1 - chance for chance in passes))
    return total


@pytest.mark.parametrize("rollouts", [2, 3, 8])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_explored_nodes_are_those_of_all_prefixes(share: float, rollouts: int) -> None:
    assert explored_nodes(6, share, rollouts) == pytest.approx(distinct_prefixes(6, share, rollouts))


@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_explored_trees_end_in_the_prefixes_of_the_last_step(length: int) -> None:
    work = exploring_work(replace(CORPUS, length=length, disagreement=0.3), 4)
    assert work.rows == pytest.approx(distinct_prefixes(length, 0.3, 4) - distinct_prefixes(length - 1, 0.3, 4))


@pytest.mark.parametrize(("share", "rollouts"), [(0.0, 8), (0.2, 4), (0.5, 2), (0.5, 8), (1.0, 8)])
def test_real_trees_have_the_predicted_nodes(share: float, rollouts: int) -> None:
    task = StrayTask(share, length=10, n=1500)
    trees = explore_trees(task, task.split("train"), rollouts)
    work = exploring_work(replace(CORPUS, length=10, disagreement=share), rollouts)
    assert trees.nodes.size / 1500 == pytest.approx(work.written, rel=0.02)
    assert int((trees.nodes.position == 9).sum()) / 1500 == pytest.approx(work.rows, rel=0.02)
    assert task.predictor.started / 1500 == task.expert.started / 1500 == work.read / CORPUS.input_tokens


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_real_enumerated_trees_have_the_predicted_nodes(share: float) -> None:
    task = StrayTask(share, length=6, n=1500)
    trees = enumerate_trees(task, task.split("train"))
    assert trees.nodes.size / 1500 == pytest.approx(enumerated_nodes(6, share), rel=0.02)


def test_nodes_at_the_ends() -> None:
    assert enumerated_nodes(MOST_LENGTH, 0.0) == MOST_LENGTH
    assert enumerated_nodes(6, 1.0) == 63
    assert explored_nodes(20, 0.0, 8) == pytest.approx(20)  # one sequence, whoever writes
    assert explored_nodes(20, 1.0, 2) == pytest.approx(39)  # two that share the first node
    assert explored_nodes(8, 0.5, 5000) == pytest.approx(enumerated_nodes(8, 0.5), rel=1e-3)


@pytest.mark.parametrize("name", ["length", "rollouts", "disagreement"])
def test_more_of_anything_is_more_nodes(name: str) -> None:
    values: dict[str, Sequence[Any]] = {"length": (2, 5, 20), "rollouts": (2, 4, 16), "disagreement": (0.1, 0.5, 0.9)}
    start = {"length": 10, "rollouts": 8, "disagreement": 0.5}
    nodes = [explored_nodes(**{**start, name: value}) for value in values[name]]
    assert nodes == sorted(set(nodes))


def test_hand_offs_are_spread_evenly() -> None:
    for length in range(1, 25):
        for n in range(1, length + 1):
            chosen = even_hand_offs(length, n)
            gaps = {following - one for one, following in pairwise([*chosen, length])}
            assert (chosen[0], len(chosen)) == (0, n)
            assert gaps <= {length // n, -(-length // n)}


def test_more_hand_offs_never_need_less() -> None:
    counts = [branch_counts(20, 0.5, even_hand_offs(20, n)) for n in range(1, 21)]
    assert counts[-1] == branch_counts(20, 0.5, range(20))
    assert all(counts[-1] >= each for each in counts)
    nested = [branch_counts(20, 0.5, range(0, 20, step)) for step in (20, 10, 5, 1)]
    assert nested == sorted(nested)


# -- bytes ---------------------------------------------------------------------------------------------------------


def size_of(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for name, tensor in tensors.items() if name != "calls")


def test_shards_hold_the_predicted_bytes() -> None:
    task = ToyTask(n=16, ends=False)
    task.expert.fingerprint = "toy"
    (table,) = make_jobs(task, LabelPart("hand-offs", "train", torch.arange(16)))
    (trees,) = make_jobs(task, LabelPart("trees", "train", torch.arange(16), rollouts=4))
    corpus = replace(CORPUS, length=task.spec.length, features=3, context=2)
    assert size_of(run_job(task, table)) == 16 * hand_off_bytes(corpus)
    grown = run_job(task, trees)
    assert size_of(grown) == pytest.approx(16 * tree_bytes(corpus, len(grown["example"]) / 16))
    assert node_bytes(3) == 56 + 4 * 7


# -- seconds -------------------------------------------------------------------------------------------------------


def test_reading_has_its_units() -> None:
    """10 tokens of 2 x 5 operations, and attention of 4 x 1 x 1 x 25 each: 1,100 operations at 50 of 100 a second."""
    model, device = Model(5, layers=1, width=1, cache_width=1), Device("slow", flops=100, bandwidth=1, memory=1)
    assert read_seconds(10, 25, model, device, Engine(reading=0.5)) == pytest.approx(22)
    assert read_seconds(10, 25, replace(model, devices=2), device, Engine(reading=0.5)) == pytest.approx(11)


def test_a_step_moves_weights_once_and_caches_of_every_row() -> None:
    step = step_of(10, 100, LLAMA_7B, H200, BEST)
    assert LLAMA_7B.cache_bytes == 2 * 32 * 4096 * 2
    assert step.memory == pytest.approx((2 * 6.74e9 + 10 * 100 * LLAMA_7B.cache_bytes) / 4.8e12)
    assert (step.bound, step.seconds) == ("memory", step.memory)


def test_numbers_of_half_the_bytes_are_half_the_bytes() -> None:
    """Of weights and of caches: they take half the memory, and half the time to move."""
    small = replace(LLAMA_7B, bytes_per_number=1)
    assert (small.weight_bytes, small.cache_bytes) == (LLAMA_7B.weight_bytes / 2, LLAMA_7B.cache_bytes / 2)
    for rows in (1, 1000):
        usual, halved = (step_of(rows, 500, model, H200, BEST) for model in (LLAMA_7B, small))
        assert (halved.memory, halved.operations) == (pytest.approx(usual.memory / 2), usual.operations)


def test_a_step_takes_what_the_engine_and_the_devices_make_of_it() -> None:
    """The longest of its three parts; caches are moved several times, and weights once."""
    engine = Engine(reading=0.5, writing=0.25, launch=1e-3, cache_moves=3)
    plain, step = step_of(10, 100, LLAMA_7B, H200, BEST), step_of(10, 100, LLAMA_7B, H200, engine)
    caches = 10 * 100 * LLAMA_7B.cache_bytes / H200.bandwidth
    assert step.operations == pytest.approx(2 * plain.operations)
    assert step.memory == pytest.approx(4 * (plain.memory + 2 * caches))
    assert step.launches == pytest.approx(32e-3)
    assert (step.seconds, step.bound) == (step.launches, "launches")
    shared = step_of(10, 100, replace(LLAMA_7B, devices=2), H200, engine)
    assert (shared.operations, shared.memory) == (pytest.approx(step.operations / 2), pytest.approx(step.memory / 2))
    assert shared.launches == step.launches


def test_few_rows_wait_for_memory_and_many_compute() -> None:
    """Without attention the two cross where rows x 2 N / flops = bytes of N / bandwidth."""
    crossing = H200.flops / H200.bandwidth
    assert step_of(0.99 * crossing, 0, LLAMA_7B, H200, BEST).bound == "memory"
    assert step_of(1.01 * crossing, 0, LLAMA_7B, H200, BEST).bound == "operations"
    assert step_of(1, 0, LLAMA_7B, H200, Engine(launch=1.0)).bound == "launches"


def test_caches_limit_the_rows() -> None:
    fit = rows_that_fit(LLAMA_7B, H200, BEST, 500)
    assert fit == int((0.9 * 141e9 - 2 * 6.74e9) / (500 * LLAMA_7B.cache_bytes))
    copies = rows_that_fit(LLAMA_7B, H200, replace(BEST, cache_copies=3), 500)
    assert copies == int((0.9 * 141e9 - 2 * 6.74e9) / (3 * 500 * LLAMA_7B.cache_bytes))
    cost = label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200, rows=10**6, engine=BEST)
    assert cost.stages[0].rows == rows_that_fit(LLAMA_7B, H200, BEST, 520)
    assert label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200, rows=8).stages[0].rows == 8


def test_a_model_that_does_not_fit_says_how_many_devices_it_needs() -> None:
    with pytest.raises(OptionError, match=r"6.9e\+10 parameters .* do not fit into 1 x H200 of 141 GB; .*devices=2"):
        rows_that_fit(replace(LLAMA_70B, devices=1), H200, BEST, 500)
    assert rows_that_fit(LLAMA_70B, H200, BEST, 500) > 0


@pytest.mark.parametrize("tokens", [500, 100_000, 1_000_000])
def test_as_many_devices_as_were_named_are_enough_and_fewer_are_not(tokens: int) -> None:
    """Also where the cache is what does not fit."""
    with pytest.raises(OptionError, match="do not fit into 1 x A100 of 80 GB") as told:
        rows_that_fit(replace(LLAMA_70B, devices=1), DEVICES["A100"], BEST, tokens)
    (needed,) = re.findall(r"devices=(\d+) or more", str(told.value))
    assert rows_that_fit(replace(LLAMA_70B, devices=int(needed)), DEVICES["A100"], BEST, tokens) >= 1
    with pytest.raises(OptionError, match="do not fit"):
        rows_that_fit(replace(LLAMA_70B, devices=int(needed) - 1), DEVICES["A100"], BEST, tokens)


@pytest.mark.parametrize(
    ("change", "is_dearer"),
    [
        ({"documents": 2000}, True),
        ({"input_tokens": 900}, True),
        ({"length": 40}, True),
        ({"disagreement": 0.8}, True),
        ({"disagreement": 0.2}, False),
    ],
)
def test_more_of_anything_costs_more(change: dict[str, Any], is_dearer: bool) -> None:
    usual, other = (label_cost(corpus, LLAMA_7B, LLAMA_70B, H200) for corpus in (CORPUS, replace(CORPUS, **change)))
    assert (other.device_hours > usual.device_hours) == is_dearer


def test_fewer_hand_offs_rollouts_and_copies_cost_less() -> None:
    usual = label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200)
    assert label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200, hand_offs=5).device_hours < usual.device_hours
    assert label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200, rollouts=4).device_hours < usual.device_hours
    assert label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200, engine=BEST).device_hours < usual.device_hours
    assert usual.naive.device_hours > 5 * usual.stages[1].device_hours


def test_a_stage_is_the_work_of_its_documents() -> None:
    """Worked out by hand: 8 rows hold 8 drafts, 125 times 20 steps for 1,000 documents."""
    stage = label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200, rows=8, engine=BEST).stages[0]
    step = step_of(8, 510, LLAMA_7B, H200, BEST).seconds
    assert (stage.tokens_read, stage.tokens_written) == (500_000, 20_000)
    assert stage.write_seconds == pytest.approx(125 * 20 * step)
    assert stage.read_seconds == pytest.approx(read_seconds(500_000, 250, LLAMA_7B, H200, BEST))
    assert stage.device_hours == pytest.approx((stage.read_seconds + stage.write_seconds) / 3600)


def test_stages_with_many_rows_a_document() -> None:
    """Worked out by hand. A table has 1 + 10 rows in its last step, and 20 + 0.5 x 190 tokens; 22 rows are 2 tables.
    Of the hand-offs after 5 and 10 tokens each is a run: 2 rows, 15 + 10 tokens; 22 rows are 11 documents."""
    cost = label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200, rows=22, engine=BEST)
    table, (reader, writer) = cost.stages[1], cost.epoch
    step = step_of(2 * 115 / 20, 510, LLAMA_70B, H200, BEST).seconds
    assert (table.tokens_read, table.tokens_written) == (500_000, 115_000)
    assert table.write_seconds == pytest.approx(500 * 20 * step)
    assert table.device_hours == pytest.approx((table.read_seconds + table.write_seconds) * 2 / 3600)
    few = label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200, rows=22, engine=BEST, hand_offs=(5, 10)).naive
    step = step_of(11 * 25 / 15, 510, LLAMA_70B, H200, BEST).seconds
    assert (few.tokens_read, few.tokens_written) == (1000 * (505 + 510), 25_000)
    assert few.write_seconds == pytest.approx(1000 / 11 * 15 * step)
    assert (reader, writer.devices) == (replace(cost.stages[0], name="predictor"), 2)
    assert writer.read_seconds == table.read_seconds


def test_a_document_is_not_cut_where_its_rows_are_more_than_fit() -> None:
    table = label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200, rows=1, engine=BEST).stages[1]
    assert table.write_seconds == pytest.approx(1000 * 20 * step_of(115 / 20, 510, LLAMA_70B, H200, BEST).seconds)


def test_trees_are_written_by_both_models() -> None:
    """The same work; of equal models the same cost."""
    *_, ours, theirs = label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200).stages
    assert (ours.tokens_read, ours.tokens_written) == (theirs.tokens_read, theirs.tokens_written)
    assert (ours.devices, theirs.devices) == (1, 2)
    assert label_cost(CORPUS, LLAMA_70B, LLAMA_70B, H200).stages[2] == replace(theirs, name=ours.name)


def test_bytes_are_those_of_all_documents() -> None:
    one, many = (label_cost(replace(CORPUS, documents=n), LLAMA_7B, LLAMA_70B, H200) for n in (1, 1000))
    assert (one.hand_off_bytes, one.tree_bytes) == (hand_off_bytes(CORPUS), tree_bytes(CORPUS, one.nodes))
    assert (many.hand_off_bytes, many.tree_bytes) == (1000 * one.hand_off_bytes, 1000 * one.tree_bytes)


def test_the_usual_rows_are_those_of_the_package() -> None:
    assert label_cost(CORPUS, LLAMA_7B, LLAMA_7B, H200, engine=BEST).stages[0].rows < ROWS  # fewer fit
    assert label_cost(replace(CORPUS, input_tokens=50), LLAMA_7B, LLAMA_7B, H200).stages[0].rows == ROWS
    assert DEFAULT_BATCH["cuda"] == ROWS


def test_the_table_says_all_stages_and_what_they_add_up_to() -> None:
    cost = label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200)
    assert str(cost) == cost.table()
    lines = cost.table().splitlines()
    assert lines[0].startswith("1,000 documents of 500 tokens, 20 written, disagreement 0.5; 20 hand-offs, 8 rollouts")
    assert [line.split("  ")[0] for line in lines[2:6]] == [stage.name for stage in cost.stages]
    assert len({len(line) for line in lines[1:10]}) == 1  # columns
    assert (
        lines[-1]
        == f"on disk: hand-offs {readable_bytes(cost.hand_off_bytes)}, trees {readable_bytes(cost.tree_bytes)}"
    )
    assert cost.bytes == cost.hand_off_bytes + cost.tree_bytes
    assert cost.epoch_hours < cost.device_hours


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (12, "12 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1500, "1.5 kB"),
        (2e6, "2 MB"),
        (3.21e9, "3.21 GB"),
        (4e12, "4 TB"),
    ],
)
def test_bytes_are_readable(n: float, text: str) -> None:
    assert readable_bytes(n) == text


# -- nonsense ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nonsense:
    make: Any
    message: str


@pytest.mark.parametrize(
    "case",
    [
        Nonsense(lambda: replace(CORPUS, documents=0), "Corpus: documents is 0; it must be above 0"),
        Nonsense(lambda: replace(CORPUS, input_tokens=-1), "Corpus: input_tokens is -1; it must be 0 or more"),
        Nonsense(lambda: replace(CORPUS, input_tokens=math.inf), "input_tokens is inf"),
        Nonsense(lambda: replace(CORPUS, features=-1), "Corpus: features is -1; it must be 0 or more"),
        Nonsense(lambda: replace(CORPUS, context=-1), "Corpus: context is -1; it must be 0 or more"),
        Nonsense(lambda: replace(CORPUS, input_tokens=math.nan), "input_tokens is nan"),
        Nonsense(lambda: replace(CORPUS, disagreement=1.5), "disagreement is 1.5; it is a share, from 0 to 1"),
        Nonsense(lambda: replace(CORPUS, length=4097), "outputs of 4097 tokens; there can be 1 to 4096"),
        Nonsense(lambda: replace(LLAMA_7B, parameters=math.inf), "Model: parameters is inf"),
        Nonsense(lambda: replace(LLAMA_7B, devices=0), "Model: devices is 0"),
        Nonsense(lambda: replace(H200, bandwidth=0), "Device: bandwidth is 0"),
        Nonsense(lambda: replace(H200, memory=0), "Device: memory is 0"),
        Nonsense(lambda: Engine(reading=1.2), "reading is 1.2; it is a share"),
        Nonsense(lambda: Engine(writing=1.2), "writing is 1.2; it is a share"),
        Nonsense(lambda: Engine(cache_moves=0), "Engine: cache_moves is 0; it must be above 0"),
        Nonsense(lambda: Engine(cache_copies=0), "Engine: cache_copies is 0; it must be above 0"),
        Nonsense(lambda: Engine(launch=-1), "Engine: launch is -1; it must be 0 or more"),
        Nonsense(lambda: even_hand_offs(20, 0), "0 hand-offs of 20 tokens"),
        Nonsense(lambda: branch_counts(20, 0.5, [-1, 3]), r"hand-offs \[-1, 3\]: they must rise, from 0 or more"),
        Nonsense(lambda: even_hand_offs(20, 21), "21 hand-offs of 20 tokens; there can be 1 to 20"),
        Nonsense(lambda: branch_counts(20, 0.5, [3, 3]), r"hand-offs \[3, 3\]: they must rise, from 0 or more to 19"),
        Nonsense(lambda: branch_counts(20, 0.5, [20]), "must rise, from 0 or more to 19 or less"),
        Nonsense(lambda: branch_counts(20, 0.5, []), "must rise"),
        Nonsense(lambda: explored_nodes(20, 0.5, 1), "1 rollouts an example; there can be 2 to 10000"),
        Nonsense(lambda: enumerated_nodes(0, 0.5), "outputs of 0 tokens"),
        Nonsense(lambda: label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200, rows=0), "0 rows at once; give 1 or more"),
    ],
    ids=lambda case: case.message[:40],
)
def test_nonsense_is_told(case: Nonsense) -> None:
    with pytest.raises(OptionError, match=case.message):
        case.make()


def test_a_calculation_needs_no_torch() -> None:
    code = "import sys, benchmarks.scaling.label_cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


# -- the page ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """benchmarks/scaling/page.py"""
    return import_module("benchmarks.scaling.page")


def test_the_page_is_up_to_date(page: ModuleType) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.rendered(text) == text, "stale; renew it with: python -m benchmarks.scaling.page"


def test_a_block_that_nobody_renders_is_told(page: ModuleType) -> None:
    with pytest.raises(KeyError, match="nothing"):
        page.rendered("<!-- begin nothing -->\n<!-- end nothing -->\n")
