"""Statistics of both models at the nodes of trees, against a loop over the vocabulary."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from oracles import WithExpert, completing, rows_of
from toy_budgets import each_toy

from seqdefer.errors import ContractError, OptionError
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.exploration import draw_decisions, grow_along
from seqdefer.labels.jobs import LabelPart, make_jobs, run_job, unpack_trees
from seqdefer.labels.label_store import LabelStore
from seqdefer.labels.pair_statistics import can_read_first, compare_distributions
from seqdefer.labels.trees import DecisionTrees
from seqdefer.storage.shards import Store
from seqdefer.testing import ToyTask
from seqdefer.types import PairStatistics, Sequences


def by_loop(q: list[float], p: list[float], v: int, named: int) -> list[float]:
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    distance = sum(max(0.0, y - x) for x, y in zip(q, p, strict=True))
    return [max(q), max(p), q[v], p[v], entropy, distance, float(v != named)]


def test_statistics_are_those_of_a_loop_over_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    log_q, log_p = (torch.randn(50, 7, generator=generator).mul(3).log_softmax(1) for _ in range(2))
    log_p[0] = -torch.inf
    log_p[0, 3] = 0.0  # a forced token
    tokens = torch.stack([log_q.argmax(1), log_p.argmax(1)], 1)
    found = compare_distributions(log_q, log_p, tokens)
    for row in range(50):
        expected = by_loop(log_q[row].exp().tolist(), log_p[row].exp().tolist(), *tokens[row].tolist())
        assert found.stack()[row].tolist() == pytest.approx(expected, abs=1e-6)
    rows = torch.tensor([4, 4, 0])
    assert torch.equal(found.select(rows).stack(), found.stack()[rows])
    assert torch.equal(PairStatistics.of(found.stack()).p_v, found.p_v)


def test_the_vocabulary_is_one() -> None:
    with pytest.raises(ContractError, match=r"predictor have shape \(2, 3\), those of the expert \(2, 4\)"):
        compare_distributions(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 2))


@each_toy
def test_every_node_has_the_statistics_of_its_prefix(task: ToyTask) -> None:
    examples = task.split("test")
    complete, lazy = enumerate_trees(task, examples, reads_first=True), DecisionTrees(task, examples, reads_first=True)
    lazy.typical_nodes()
    decisions = draw_decisions(0, len(examples), 3, task.spec.length)
    for trees in (complete, lazy, grow_along(task, examples, decisions, reads_first=True)):
        nodes = torch.arange(trees.nodes.size)[::5]
        found = trees.proposal(nodes).pair
        assert found is not None
        for place, node in enumerate(nodes.tolist()):
            one = rows_of(examples)[int(trees.nodes.example[node])]
            before = trees.sequences(torch.tensor([node]), torch.tensor([False]))
            prefix = Sequences(before.tokens, before.lengths - 1)
            state, expert = task.predictor.start(one.inputs)[0], task.expert.start(one)
            for token in prefix.tokens[0, : int(prefix.lengths)].tolist():
                state = task.predictor.append(state, torch.tensor([token]))
                expert = task.expert.append(expert, torch.tensor([token]))
            q, p = task.predictor.log_probs(state), task.expert.log_probs(expert, torch.tensor([0]))
            expected = by_loop(q[0].exp().tolist(), p[0].exp().tolist(), *trees.nodes.tokens[node].tolist())
            assert found.stack()[place].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["whole-trees", "trees"])
def test_stored_labels_have_statistics_where_they_were_asked_for(kind: str, tmp_path: Path) -> None:
    """Labels without them keep the names, the columns and the bytes that they always had."""
    task = ToyTask(n=6, length=4)
    task.expert.fingerprint = "toy expert"
    plain = LabelPart(kind, "test", torch.arange(6), rollouts=3)  # type: ignore[arg-type]
    full = LabelPart(kind, "test", torch.arange(6), rollouts=3, reads_first=True)  # type: ignore[arg-type]
    labels = LabelStore(task, Store(tmp_path))
    (before,), (with_them,) = labels.read(plain), labels.read(full)
    assert "statistics" not in before
    assert with_them["statistics"].shape == (len(with_them["example"]), 7)
    assert {job.name for job in make_jobs(task, plain)}.isdisjoint(job.name for job in make_jobs(task, full))
    for name, column in before.items():
        assert torch.equal(column, with_them[name])
    assert unpack_trees(task, plain, [before]).proposal(torch.tensor([0])).pair is None
    trees = unpack_trees(task, full, [with_them])
    assert trees.reads_first
    assert trees.proposal(torch.tensor([0])).pair is not None
    (job,) = make_jobs(task, full)
    assert torch.equal(run_job(task, job)["statistics"], with_them["statistics"])


def test_trees_that_were_grown_before_grow_on_with_statistics() -> None:
    task = ToyTask(n=6, length=4)
    first = DecisionTrees(task, task.split("test"), reads_first=True)
    again = DecisionTrees(task, task.split("test"), grown=first.tensors())
    again.typical_nodes()
    assert again.nodes.size > first.nodes.size
    first.typical_nodes()
    assert torch.equal(again.nodes.used()["statistics"], first.nodes.used()["statistics"])


def test_a_pair_without_probabilities_is_refused() -> None:
    task = ToyTask(n=4)
    assert can_read_first(task)
    assert not can_read_first(WithExpert(completing, n=4))
    task.expert.with_log_probs = lambda: None  # type: ignore[assignment,method-assign,return-value]
    assert not can_read_first(task)
    with pytest.raises(OptionError, match="the expert of task 'toy' gives no probabilities"):
        DecisionTrees(task, task.split("test"), reads_first=True)
