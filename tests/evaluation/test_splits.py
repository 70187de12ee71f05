"""Splits: labelled once, test instances disjoint, and test data kept out of whatever is fitted or chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import WithExpert, completing
from small_runs import TINY

from seqdefer.engine.drafts import draft
from seqdefer.errors import ContractError, DataError
from seqdefer.evaluation import splits as module
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.splits import Splits
from seqdefer.interfaces import SplitName, Task
from seqdefer.labels import jobs
from seqdefer.labels.enumeration import MAX_ENUMERATED_LENGTH
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.labels.labelled import LabelledData, LearningData, TestData, require_learning_data
from seqdefer.progress import Clock
from seqdefer.testing import ToyTask

ROOT = Path(__file__).resolve().parents[2]
TASK = ToyTask(n=40, length=3)


def split_toy(folder: Path, task: Task = TASK, *, seeds: int = 2, instances: int = 12, **more: Any) -> Splits:
    return Splits(task, folder, seeds=seeds, instances=instances, **more)


# -- what is labelled ----------------------------------------------------------------------------------------------


def test_each_split_is_labelled_once_on_first_use(tmp_path: Path, spy: Callable[[Any, str], list[Any]]) -> None:
    labelled, grown = spy(jobs, "hand_off_table"), spy(module, "enumerate_trees")
    splits = split_toy(tmp_path)
    splits.test_rows()
    assert labelled == grown == []
    names: list[SplitName] = ["validation", "train", "validation", "test", "train", "test"]
    parts = [getattr(splits, name) for name in names]
    assert (len(labelled), len(grown)) == (3, 3)
    assert parts[0] is parts[2]
    assert [type(part) for part in parts[:2]] == [LearningData, LearningData]
    assert type(splits.test) is TestData


def test_labels_are_those_of_the_split(tmp_path: Path) -> None:
    splits = split_toy(tmp_path)
    for name, part in {"train": splits.train, "validation": splits.validation}.items():
        examples = TASK.split(name)  # type: ignore[arg-type]
        table, _ = hand_off_table(TASK, examples, draft(TASK.predictor, examples, TASK.spec), shortcut=False)
        assert torch.equal(part.examples.ids, examples.ids)
        assert torch.equal(part.table.loss, table.loss)
        assert torch.equal(part.table.deferred, table.deferred)
        assert part.trees is not None
    assert len(splits.test.examples) == 24  # no more than the seeds need


def test_chosen_hand_offs_are_labelled(tmp_path: Path) -> None:
    """Training data gets the chosen hand-offs; test data gets all, which oracles need."""
    every, some = (split_toy(tmp_path / name, kept=kept) for name, kept in (("every", None), ("some", [3, 0])))
    for part, whole in ((some.train, every.train), (some.validation, every.validation)):
        assert torch.equal(part.table.loss[:, [0, 3]], whole.table.loss[:, [0, 3]])
        assert bool(part.table.loss[:, [1, 2]].isnan().all())
        assert torch.equal(part.draft.sequences.tokens, whole.draft.sequences.tokens)
    assert torch.equal(some.test.table.loss, every.test.table.loss)
    assert some.table_calls.made < every.table_calls.made


def test_stored_hand_offs_are_not_labelled_again(tmp_path: Path, spy: Callable[[Any, str], list[Any]]) -> None:
    task = ToyTask(n=20, length=3)
    task.expert.fingerprint = "toy expert"
    every, labelled = split_toy(tmp_path, task, instances=4).train, spy(jobs, "hand_off_table")
    some = split_toy(tmp_path, task, instances=4, kept=(1,))
    assert torch.equal(some.train.table.loss, every.table.loss)
    assert labelled == []
    assert bool(some.validation.table.loss[:, 0].isnan().all())


def test_trees_where_methods_need_them(tmp_path: Path) -> None:
    """The oracle and token-level confidence need trees of the test data in any case."""
    splits = split_toy(tmp_path, by_token=False)
    assert splits.train.trees is splits.validation.trees is None
    assert splits.test.trees is not None
    only_completes = split_toy(tmp_path, WithExpert(completing, n=30, length=3))
    assert only_completes.train.trees is only_completes.test.trees is None
    assert only_completes.grown == []


def test_all_decisions_are_tried_of_the_longest_sequences_that_can_be_enumerated(tmp_path: Path) -> None:
    for length, searches in ((MAX_ENUMERATED_LENGTH, False), (MAX_ENUMERATED_LENGTH + 1, True)):
        assert Splits(ToyTask(n=1, length=length), tmp_path, seeds=1, instances=1).searches is searches


@pytest.mark.parametrize("role", ["predictor", "expert"])
def test_expensive_models_enumerate_shorter_sequences(tmp_path: Path, role: str) -> None:
    """Tiny models took 3.5 minutes for 12 tokens, all enumerated, and 19 seconds for 13."""
    for length, searches in ((6, False), (7, True)):
        task = ToyTask(n=1, length=length)
        getattr(task, role).max_tree_nodes = 2**6
        assert Splits(task, tmp_path, seeds=1, instances=1).searches is searches


def test_expert_calls_count_what_was_labelled(tmp_path: Path) -> None:
    splits = split_toy(tmp_path)
    assert (splits.calls.made, splits.calls.saved) == (0, 0)
    _ = splits.train
    table, trees = splits.table_calls, splits.train.trees
    assert trees is not None
    assert splits.calls == table + trees.calls
    before = splits.calls.made
    _ = splits.test
    assert splits.calls.made > before


# -- test instances ------------------------------------------------------------------------------------------------


def test_seeds_have_disjoint_test_instances(tmp_path: Path) -> None:
    splits = split_toy(tmp_path, seeds=3)
    drawn = [splits.test.examples.ids[splits.rows(seed)].tolist() for seed in range(3)]
    assert [len(set(ids)) for ids in drawn] == [12, 12, 12]
    assert len({one for ids in drawn for one in ids}) == 36
    assert {one for ids in drawn for one in ids} <= set(TASK.split("test").ids.tolist())


def test_more_seeds_keep_the_instances_of_fewer(tmp_path: Path) -> None:
    """Otherwise results on fewer seeds could not be reused."""
    few, many = split_toy(tmp_path, seeds=1), split_toy(tmp_path, seeds=3)
    assert torch.equal(many.test_rows()[:12], few.test_rows())
    assert torch.equal(many.test.table.loss[many.rows(0)], few.test.table.loss[few.rows(0)])


def test_too_few_test_instances_are_refused_before_labelling(tmp_path: Path) -> None:
    clock = Clock()
    with pytest.raises(DataError, match="the test split has 40 examples, 4 seeds x 11 instances need more; lower"):
        _ = split_toy(tmp_path, clock=clock, seeds=4, instances=11).test
    assert clock.seconds == {}
    assert len(split_toy(tmp_path, seeds=4, instances=10).test_rows()) == 40


# -- test data is for the report alone -----------------------------------------------------------------------------


def test_only_learning_data_is_accepted(tmp_path: Path) -> None:
    splits = split_toy(tmp_path)
    train, test = splits.train, splits.test
    require_learning_data(train, splits.validation)
    require_learning_data()
    plain = LabelledData(train.examples, train.draft, train.table, train.make_trees)
    for parts in ([test], [train, test], [test, train], [plain]):
        name = type(next(part for part in parts if part is not train)).__name__
        with pytest.raises(ContractError, match=f"fitted or chosen with {name}; only LearningData"):
            require_learning_data(*parts)


@pytest.mark.parametrize("places", [("train", "test"), ("test", "validation"), ("test", "test")])
def test_nothing_is_fitted_with_test_data(places: tuple[str, str], tmp_path: Path) -> None:
    experiment = Experiment(TASK, TINY, tmp_path)
    parts = [getattr(experiment.splits, name) for name in places]
    with pytest.raises(ContractError, match="test data is for the report alone"):
        experiment.fit(*parts, 0)
    assert not (tmp_path / "rejectors").exists()
