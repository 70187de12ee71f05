"""The cost of labels: counts against brute force and real labelling, seconds against their units and limits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.scaling import page
from benchmarks.scaling.label_cost import (
    DEFAULT_ROWS,
    MAX_LENGTH,
    Corpus,
    Cost,
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
    DEVICES,
    IDEAL,
    LLAMA_7B,
    LLAMA_70B,
    Device,
    Efficiency,
    Model,
    read_seconds,
    rows_that_fit,
    step_of,
)
from seqdefer.engine.drafts import draft
from seqdefer.errors import OptionError
from seqdefer.interfaces import NextTokenExpert, Predictor, SplitName, Task
from seqdefer.labels.branches import branch_out
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.exploration import explore_trees
from seqdefer.labels.jobs import LabelPart, make_jobs, run_job
from seqdefer.tasks.text.pairs import DEFAULT_BATCH
from seqdefer.testing.fakes import ToyState, ToyTask, mix
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec

VOCABULARY = 50
CORPUS = Corpus(documents=1000, input_tokens=500, length=20, disagreement=0.5)
H200 = DEVICES["H200"]


def cost_of(**options: Any) -> Cost:
    return label_cost(CORPUS, LLAMA_7B, LLAMA_70B, H200, **options)


# -- a pair that disagrees at a given rate --------------------------------------------------------------------------


class CountingExpert(NextTokenExpert[ToyState]):
    """An expert that hashes the prefix and counts its calls."""

    def __init__(self) -> None:
        self.asked = self.started = 0
        self.steps: list[int] = []  # rows of each step

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


class DisagreeingPredictor(Predictor[ToyState]):
    """A predictor that writes another token than the expert after a share of all prefixes, chosen by a hash."""

    fingerprint = "disagreeing"

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


class DisagreeingTask(Task):
    name, loss_unit = "disagreeing", "none"
    expert: CountingExpert
    predictor: DisagreeingPredictor

    def __init__(self, share: float, length: int, n: int) -> None:
        self.spec, self.n = SequenceSpec(length), n
        self.expert = CountingExpert()
        self.predictor = DisagreeingPredictor(self.expert, share)

    def split(self, name: SplitName) -> Examples:
        ids = torch.arange(self.n)
        return Examples(mix(ids, 9), ids[:, None], ids)

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        return torch.zeros(len(examples))

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return torch.zeros(len(examples))


# -- counts ---------------------------------------------------------------------------------------------------------


def branches_of(disagrees: Sequence[bool], hand_offs: Sequence[int]) -> set[int]:
    """Return the positions of the branches that the hand-offs of a draft need."""
    return {
        next(place for place in range(kept, len(disagrees)) if disagrees[place])
        for kept in hand_offs
        if any(disagrees[kept:])
    }


@pytest.mark.parametrize("hand_offs", [(0,), (3,), (0, 1, 2, 3, 4), (0, 2, 4), (1, 4)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_branch_counts_equal_enumeration(hand_offs: tuple[int, ...], share: float) -> None:
    """Sum over every pattern of disagreements, weighted by its probability."""
    branches = tokens = 0.0
    for pattern in product((False, True), repeat=5):
        weight = math.prod(share if disagrees else 1 - share for disagrees in pattern)
        left = branches_of(pattern, hand_offs)
        branches += weight * len(left)
        tokens += weight * sum(5 - 1 - place for place in left)
    assert branch_counts(5, share, hand_offs) == (pytest.approx(branches), pytest.approx(tokens))


def test_all_hand_offs_follow_the_formula_of_the_page() -> None:
    branches, tokens = branch_counts(20, 0.54, range(20))
    assert (branches, tokens) == (pytest.approx(0.54 * 20), pytest.approx(0.54 * 20 * 19 / 2))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_branching_writes_the_predicted_tokens(share: float) -> None:
    """Exact given the measured disagreement, except for its positions, which average out over 2,000 drafts."""
    task = DisagreeingTask(share, length=12, n=2000)
    examples = task.split("train")
    drafted = draft(task.predictor, examples, task.spec).sequences
    task.expert.asked, task.expert.batch_size = 0, 8000  # all drafts in one batch
    completed, _ = branch_out(task.expert, examples, drafted, torch.arange(12), task.spec)
    first = completed.tokens.view(2000, 12, 12).diagonal(dim1=1, dim2=2)
    found = float((first != drafted.tokens).float().mean())
    assert found == pytest.approx(share, abs=0.02)
    work = branching_work(replace(CORPUS, length=12, disagreement=found), range(12))
    assert task.expert.asked / 2000 == pytest.approx(work.written, rel=0.01)
    assert len(task.expert.steps) == work.steps
    # A branch that starts in the last step has no token to write: the prediction counts its row, the step does not.
    assert work.rows - found == pytest.approx(task.expert.steps[-1] / 2000, rel=0.01)


def test_the_naive_way_writes_the_predicted_tokens() -> None:
    task = DisagreeingTask(0.5, length=6, n=4)
    examples = task.split("train")
    drafted = draft(task.predictor, examples, task.spec).sequences
    task.expert.asked = 0
    for kept in (0, 2, 5):
        task.expert.complete(examples, drafted.truncate(torch.full((4,), kept)), task.spec)
    work = naive_work(replace(CORPUS, length=6), (0, 2, 5))
    assert task.expert.asked == 4 * work.written
    assert work.read == 3 * 500 + 7
    assert work.rows == 3
    assert (work.steps, naive_work(replace(CORPUS, length=6), (2, 5)).steps) == (6, 4)  # the longest completion


def distinct_prefixes(length: int, share: float, rollouts: int) -> float:
    """Sum the probability of a visit over all prefixes: strings of k (both agree), p (predictor) and e (expert)."""
    total, biases = 0.0, [rollout / (rollouts - 1) for rollout in range(rollouts)]
    for position in range(length):
        for prefix in product("kpe", repeat=position):
            exists = math.prod(1 - share if writer == "k" else share for writer in prefix)
            passes = [math.prod({"k": 1, "p": 1 - bias, "e": bias}[writer] for writer in prefix) for bias in biases]
            total += exists * (1 - math.prod(1 - chance for chance in passes))
    return total


@pytest.mark.parametrize("rollouts", [2, 3, 8])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_explored_nodes_equal_enumeration(share: float, rollouts: int) -> None:
    assert explored_nodes(6, share, rollouts) == pytest.approx(distinct_prefixes(6, share, rollouts))


@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_explored_trees_end_in_the_prefixes_of_the_last_step(length: int) -> None:
    work = exploring_work(replace(CORPUS, length=length, disagreement=0.3), 4)
    assert work.rows == pytest.approx(distinct_prefixes(length, 0.3, 4) - distinct_prefixes(length - 1, 0.3, 4))


@pytest.mark.parametrize(("share", "rollouts"), [(0.0, 8), (0.2, 4), (0.5, 2), (0.5, 8), (1.0, 8)])
def test_real_trees_have_the_predicted_nodes(share: float, rollouts: int) -> None:
    task = DisagreeingTask(share, length=10, n=1500)
    trees = explore_trees(task, task.split("train"), rollouts)
    work = exploring_work(replace(CORPUS, length=10, disagreement=share), rollouts)
    assert trees.nodes.size / 1500 == pytest.approx(work.written, rel=0.02)
    assert int((trees.nodes.position == 9).sum()) / 1500 == pytest.approx(work.rows, rel=0.02)
    assert task.predictor.started / 1500 == task.expert.started / 1500 == work.read / CORPUS.input_tokens


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_real_enumerated_trees_have_the_predicted_nodes(share: float) -> None:
    task = DisagreeingTask(share, length=6, n=1500)
    trees = enumerate_trees(task, task.split("train"))
    assert trees.nodes.size / 1500 == pytest.approx(enumerated_nodes(6, share), rel=0.02)


def test_nodes_at_the_ends() -> None:
    assert enumerated_nodes(MAX_LENGTH, 0.0) == MAX_LENGTH
    assert enumerated_nodes(6, 1.0) == 63
    assert explored_nodes(20, 0.0, 8) == pytest.approx(20)  # both models write the same sequence
    assert explored_nodes(20, 1.0, 2) == pytest.approx(39)  # two sequences that share the first node
    assert explored_nodes(8, 0.5, 5000) == pytest.approx(enumerated_nodes(8, 0.5), rel=1e-3)


def test_hand_offs_are_evenly_spaced() -> None:
    for length in range(1, 25):
        for n in range(1, length + 1):
            chosen = even_hand_offs(length, n)
            gaps = {following - one for one, following in pairwise([*chosen, length])}
            assert (chosen[0], len(chosen)) == (0, n)
            assert gaps <= {length // n, -(-length // n)}


# -- bytes ----------------------------------------------------------------------------------------------------------


def size_of(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for name, tensor in tensors.items() if name != "calls")


def test_shards_have_the_predicted_bytes() -> None:
    task = ToyTask(n=16, ends=False)
    task.expert.fingerprint = "toy"
    (table,) = make_jobs(task, LabelPart("hand-offs", "train", torch.arange(16)))
    (trees,) = make_jobs(task, LabelPart("trees", "train", torch.arange(16), rollouts=4))
    corpus = replace(CORPUS, length=task.spec.length, features=3, context=2)
    assert size_of(run_job(task, table)) == 16 * hand_off_bytes(corpus)
    grown = run_job(task, trees)
    assert size_of(grown) == pytest.approx(16 * tree_bytes(corpus, len(grown["example"]) / 16))
    assert node_bytes(3) == 56 + 4 * 7


# -- seconds --------------------------------------------------------------------------------------------------------


def test_reading_time() -> None:
    """10 tokens of 2 x 5 operations and attention of 4 x 1 x 1 x 25 each: 1,100 operations at 50 per second."""
    model, device = Model(5, layers=1, width=1, cache_width=1), Device("slow", flops=100, bandwidth=1, memory=1)
    assert read_seconds(10, 25, model, device, Efficiency(reading=0.5)) == pytest.approx(22)
    assert read_seconds(10, 25, replace(model, devices=2), device, Efficiency(reading=0.5)) == pytest.approx(11)


def test_a_step_moves_weights_once_and_the_caches_of_every_row() -> None:
    step = step_of(10, 100, LLAMA_7B, H200, IDEAL)
    assert LLAMA_7B.cache_bytes == 2 * 32 * 4096 * 2
    assert step.memory == pytest.approx((2 * 6.74e9 + 10 * 100 * LLAMA_7B.cache_bytes) / 4.8e12)
    assert (step.bound, step.seconds) == ("memory", step.memory)


def test_a_step_depends_on_efficiency_and_devices() -> None:
    """A step takes the longest of its three parts; caches move several times, weights once."""
    efficiency = Efficiency(reading=0.5, writing=0.25, launch=1e-3, cache_moves=3)
    plain, step = step_of(10, 100, LLAMA_7B, H200, IDEAL), step_of(10, 100, LLAMA_7B, H200, efficiency)
    caches = 10 * 100 * LLAMA_7B.cache_bytes / H200.bandwidth
    assert step.operations == pytest.approx(2 * plain.operations)
    assert step.memory == pytest.approx(4 * (plain.memory + 2 * caches))
    assert step.launches == pytest.approx(32e-3)
    assert (step.seconds, step.bound) == (step.launches, "launches")
    shared = step_of(10, 100, replace(LLAMA_7B, devices=2), H200, efficiency)
    assert (shared.operations, shared.memory) == (pytest.approx(step.operations / 2), pytest.approx(step.memory / 2))
    assert shared.launches == step.launches


def test_few_rows_are_bound_by_memory_and_many_by_operations() -> None:
    """Without attention the two are equal at rows x 2 N / flops = bytes of N / bandwidth."""
    crossing = H200.flops / H200.bandwidth
    assert step_of(0.99 * crossing, 0, LLAMA_7B, H200, IDEAL).bound == "memory"
    assert step_of(1.01 * crossing, 0, LLAMA_7B, H200, IDEAL).bound == "operations"
    assert step_of(1, 0, LLAMA_7B, H200, Efficiency(launch=1.0)).bound == "launches"


def test_caches_limit_the_rows() -> None:
    fit = rows_that_fit(LLAMA_7B, H200, IDEAL, 500)
    assert fit == int((0.9 * 141e9 - 2 * 6.74e9) / (500 * LLAMA_7B.cache_bytes))
    copies = rows_that_fit(LLAMA_7B, H200, replace(IDEAL, cache_copies=3), 500)
    assert copies == int((0.9 * 141e9 - 2 * 6.74e9) / (3 * 500 * LLAMA_7B.cache_bytes))
    cost = cost_of(rows=10**6, efficiency=IDEAL)
    assert cost.stages[0].rows == rows_that_fit(LLAMA_7B, H200, IDEAL, 520)
    assert cost_of(rows=8).stages[0].rows == 8


def test_a_model_that_does_not_fit_names_the_devices_it_needs() -> None:
    with pytest.raises(OptionError, match=r"6.9e\+10 parameters .* do not fit into 1 x H200 of 141 GB; .*devices=2"):
        rows_that_fit(replace(LLAMA_70B, devices=1), H200, IDEAL, 500)
    assert rows_that_fit(LLAMA_70B, H200, IDEAL, 500) > 0


@pytest.mark.parametrize("tokens", [500, 100_000, 1_000_000])
def test_the_named_number_of_devices_is_the_minimum(tokens: int) -> None:
    """The larger cases are bound by the cache."""
    with pytest.raises(OptionError, match="do not fit into 1 x A100 of 80 GB") as raised:
        rows_that_fit(replace(LLAMA_70B, devices=1), DEVICES["A100"], IDEAL, tokens)
    (needed,) = re.findall(r"devices=(\d+) or more", str(raised.value))
    assert rows_that_fit(replace(LLAMA_70B, devices=int(needed)), DEVICES["A100"], IDEAL, tokens) >= 1
    with pytest.raises(OptionError, match="do not fit"):
        rows_that_fit(replace(LLAMA_70B, devices=int(needed) - 1), DEVICES["A100"], IDEAL, tokens)


def test_a_stage_is_the_work_of_its_documents() -> None:
    """Computed by hand: 8 rows hold 8 drafts, so 1,000 documents take 125 times 20 steps."""
    stage = cost_of(rows=8, efficiency=IDEAL).stages[0]
    step = step_of(8, 510, LLAMA_7B, H200, IDEAL).seconds
    assert (stage.tokens_read, stage.tokens_written) == (500_000, 20_000)
    assert stage.write_seconds == pytest.approx(125 * 20 * step)
    assert stage.read_seconds == pytest.approx(read_seconds(500_000, 250, LLAMA_7B, H200, IDEAL))
    assert stage.device_hours == pytest.approx((stage.read_seconds + stage.write_seconds) / 3600)


def test_stages_with_many_rows_per_document() -> None:
    """Computed by hand. A table has 1 + 10 rows in its last step, and 20 + 0.5 x 190 tokens; 22 rows are 2 tables.
    The naive hand-offs after 5 and 10 tokens take 2 rows and 15 + 10 tokens; 22 rows are 11 documents."""
    cost = cost_of(rows=22, efficiency=IDEAL)
    table, (reader, writer) = cost.stages[1], cost.epoch
    step = step_of(2 * 115 / 20, 510, LLAMA_70B, H200, IDEAL).seconds
    assert (table.tokens_read, table.tokens_written) == (500_000, 115_000)
    assert table.write_seconds == pytest.approx(500 * 20 * step)
    assert table.device_hours == pytest.approx((table.read_seconds + table.write_seconds) * 2 / 3600)
    few = cost_of(rows=22, efficiency=IDEAL, hand_offs=(5, 10)).naive
    step = step_of(11 * 25 / 15, 510, LLAMA_70B, H200, IDEAL).seconds
    assert (few.tokens_read, few.tokens_written) == (1000 * (505 + 510), 25_000)
    assert few.write_seconds == pytest.approx(1000 / 11 * 15 * step)
    assert (reader, writer.devices) == (replace(cost.stages[0], name="predictor"), 2)
    assert writer.read_seconds == table.read_seconds


def test_a_document_is_not_split_if_its_rows_do_not_fit() -> None:
    table = cost_of(rows=1, efficiency=IDEAL).stages[1]
    assert table.write_seconds == pytest.approx(1000 * 20 * step_of(115 / 20, 510, LLAMA_70B, H200, IDEAL).seconds)


def test_trees_are_written_by_both_models() -> None:
    """Both do the same work; equal models have the same cost."""
    *_, ours, theirs = cost_of().stages
    assert (ours.tokens_read, ours.tokens_written) == (theirs.tokens_read, theirs.tokens_written)
    assert (ours.devices, theirs.devices) == (1, 2)
    assert label_cost(CORPUS, LLAMA_70B, LLAMA_70B, H200).stages[2] == replace(theirs, name=ours.name)


def test_default_rows_are_those_of_the_package() -> None:
    assert label_cost(CORPUS, LLAMA_7B, LLAMA_7B, H200, efficiency=IDEAL).stages[0].rows < DEFAULT_ROWS  # fewer fit
    assert label_cost(replace(CORPUS, input_tokens=50), LLAMA_7B, LLAMA_7B, H200).stages[0].rows == DEFAULT_ROWS
    assert DEFAULT_BATCH["cuda"] == DEFAULT_ROWS


def test_the_table_has_all_stages_and_their_total() -> None:
    cost = cost_of()
    lines = str(cost).splitlines()
    assert lines[0].startswith("1,000 documents of 500 tokens, 20 written, disagreement 0.5; 20 hand-offs, 8 rollouts")
    assert [line.split("  ")[0] for line in lines[2:6]] == [stage.name for stage in cost.stages]
    assert len({len(line) for line in lines[1:10]}) == 1  # columns
    assert (
        lines[-1]
        == f"on disk: hand-offs {readable_bytes(cost.hand_off_bytes)}, trees {readable_bytes(cost.tree_bytes)}"
    )
    assert cost.bytes == cost.hand_off_bytes + cost.tree_bytes
    assert cost.epoch_hours < cost.device_hours


@pytest.mark.parametrize(("n", "text"), [(999, "999 B"), (1000, "1 kB"), (3.21e9, "3.21 GB"), (4e12, "4 TB")])
def test_bytes_are_readable(n: float, text: str) -> None:
    assert readable_bytes(n) == text


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(CORPUS, documents=0), "Corpus: documents is 0; it must be above 0"),
        (lambda: replace(CORPUS, input_tokens=math.nan), "Corpus: input_tokens is nan; it must be 0 or more"),
        (lambda: replace(CORPUS, disagreement=1.5), "disagreement is 1.5; a share must be between 0 and 1"),
        (lambda: replace(CORPUS, length=4097), "length is 4097 tokens; it must be from 1 to 4096"),
        (lambda: replace(LLAMA_7B, parameters=math.inf), "Model: parameters is inf"),
        (lambda: replace(H200, bandwidth=0), "Device: bandwidth is 0"),
        (lambda: Efficiency(reading=1.2), "reading is 1.2; a share must be"),
        (lambda: Efficiency(launch=-1), "Efficiency: launch is -1; it must be 0 or more"),
        (lambda: even_hand_offs(20, 21), "21 hand-offs of 20 tokens; choose 1 to 20"),
        (lambda: cost_of(hand_offs=[3, 3]), r"hand-offs \[3, 3\] must increase, within 0 to 19"),
        (lambda: cost_of(hand_offs=[20]), r"hand-offs \[20\] must increase, within 0 to 19"),
        (lambda: cost_of(rollouts=1), "1 rollouts per example; choose 2 to 10000"),
        (lambda: cost_of(rows=0), "rows is 0; it must be 1 or more"),
    ],
)
def test_bad_input(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


# -- the page -------------------------------------------------------------------------------------------------------


def test_the_page_is_up_to_date() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.rendered(text) == text, "stale; run: python -m benchmarks.scaling.page"
