"""Tables of hand-offs: the short-cuts change nothing but the number of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import WithExpert, completing, expert_after, hand_off, rows_of, write_all
from torch import Tensor

from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.interfaces import DraftExpert, Expert, SplitName, Task
from seqdefer.labels.hand_offs import Calls, hand_off_table
from seqdefer.labels.jobs import Part, calls_in, hand_offs_in
from seqdefer.labels.label_store import Labels
from seqdefer.storage.files import write_tensors
from seqdefer.storage.shards import DamagedShardWarning, Store
from seqdefer.tasks.weather.task import WeatherTask
from seqdefer.testing import FunctionExpert, FunctionPredictor, ToyTask
from seqdefer.types import Draft, Examples, Sequences, SequenceSpec

Spy = Callable[[Any, str], list[tuple[Any, ...]]]

TASKS: dict[str, Task] = {
    "lengths differ": ToyTask(n=24),
    "all of one length": ToyTask(n=12, length=4, ends=False),
    "two words": ToyTask(n=24, length=6, vocabulary=3, seed=1),
    "completes only": WithExpert(completing, n=12, length=4),
}


@pytest.fixture(params=[*TASKS, "weather"])
def task(request: pytest.FixtureRequest) -> Task:
    found: Task = TASKS.get(request.param) or request.getfixturevalue("weather")
    return found


def examples_and_draft(task: Task) -> tuple[Examples, Draft]:
    examples = task.split("test")
    examples = examples.select(torch.arange(min(len(examples), 24)))
    return examples, draft(task.predictor, examples, task.spec)


def test_short_cuts_change_nothing(task: Task) -> None:
    examples, drafted = examples_and_draft(task)
    quick, calls = hand_off_table(task, examples, drafted)
    plain, naive = hand_off_table(task, examples, drafted, shortcut=False)
    assert torch.equal(quick.loss, plain.loss)
    assert torch.equal(quick.deferred, plain.deferred)
    assert naive.saved == 0
    assert calls.made < naive.made


@pytest.mark.parametrize("shortcut", [True, False])
@pytest.mark.parametrize("kept", [(), (0,), (2,), (0, 2), (2, 1, 2), (1, 3)], ids=str)
def test_some_hand_offs_are_those_of_all(task: Task, kept: tuple[int, ...], shortcut: bool) -> None:
    examples, drafted = examples_and_draft(task)
    every, _ = hand_off_table(task, examples, drafted, shortcut=False)
    some, calls = hand_off_table(task, examples, drafted, kept=kept, shortcut=shortcut)
    known = sorted({*kept, task.spec.length})
    assert torch.equal(some.loss[:, known], every.loss[:, known])
    assert torch.equal(some.deferred[:, known], every.deferred[:, known])
    others = [column for column in range(task.spec.length) if column not in known]
    assert bool(some.loss[:, others].isnan().all())
    assert bool((some.deferred[:, others] == -1).all())
    naive = sum(int((drafted.sequences.lengths > each).sum()) for each in set(kept))
    assert calls.made + calls.saved == naive
    assert calls.saved >= 0 if shortcut else calls.saved == 0


def test_every_column_is_what_the_engine_writes(task: Task) -> None:
    examples, drafted = examples_and_draft(task)
    table, _ = hand_off_table(task, examples, drafted)
    assert table.loss.shape == table.deferred.shape == (len(examples), task.spec.length + 1)
    for kept in range(task.spec.length + 1):
        policy = HandOff(torch.full((len(examples),), kept))
        rollout = roll_out(task.predictor, task.expert, examples, policy, task.spec)
        torch.testing.assert_close(table.loss[:, kept], task.sequence_loss(examples, rollout.sequences))
        assert table.deferred[:, kept].tolist() == rollout.deferred.tolist()


def test_the_ends_are_both_writers_alone() -> None:
    task = TASKS["lengths differ"]
    examples, drafted = examples_and_draft(task)
    table, _ = hand_off_table(task, examples, drafted)
    expert = write_all(task, examples, hand_off(0))
    assert table.deferred[:, 0].tolist() == [len(one) for one in expert]
    assert table.deferred[:, -1].tolist() == [0] * len(examples)
    assert torch.equal(table.loss[:, 0], loss_of(task, examples, [one.tokens for one in expert]))
    assert torch.equal(table.loss[:, -1], task.sequence_loss(examples, drafted.sequences))


def loss_of(task: Task, examples: Examples, rows: list[list[Any]]) -> Tensor:
    tokens = torch.tensor([[*row, *[0] * (task.spec.length - len(row))] for row in rows])
    return task.sequence_loss(examples, Sequences(tokens, torch.tensor([len(row) for row in rows])))


def test_calls_made_and_saved_are_those_of_the_naive_way(task: Task) -> None:
    """Naively: one call for every token of every draft, before which it may be handed off."""
    examples, drafted = examples_and_draft(task)
    _, calls = hand_off_table(task, examples, drafted)
    _, naive = hand_off_table(task, examples, drafted, shortcut=False)
    assert calls.made + calls.saved == naive.made == int(drafted.sequences.lengths.sum())


@pytest.mark.parametrize("name", ["lengths differ", "all of one length", "two words"])
def test_a_row_is_run_once_and_after_each_disagreement(name: str, spy: Spy) -> None:
    task = TASKS[name]
    examples, drafted = examples_and_draft(task)
    named = spy(task.expert, "next")
    for row, (one, tokens, length) in enumerate(zip(rows_of(examples), *sequences_of(drafted), strict=True)):
        del named[:]
        _, calls = hand_off_table(task, examples.select(torch.tensor([row])), drafted.select(torch.tensor([row])))
        asked = sum(len(rows) for _, rows in named)
        differ = [j for j in range(length) if expert_after(task, one, tokens[:j]) != tokens[j]]
        # What the two write last does not matter: nothing can be handed off after it.
        assert calls.made == 1 + sum(j < length - 1 for j in differ)
        # The draft is read once, and of each branch only what the expert itself writes.
        branches = [write_all(task, examples, hand_off(j))[row] for j in differ]
        written = sum(len(branch) - j - 1 for j, branch in zip(differ, branches, strict=True))
        assert asked == length + written


def sequences_of(drafted: Draft) -> tuple[list[list[Any]], list[int]]:
    return drafted.sequences.tokens.tolist(), drafted.sequences.lengths.tolist()


def test_an_expert_that_ignores_prefixes_is_asked_once(weather: WeatherTask) -> None:
    examples, drafted = examples_and_draft(weather)
    _, calls = hand_off_table(weather, examples, drafted)
    assert calls == Calls(made=len(examples), saved=5 * len(examples))


def test_an_expert_that_is_not_deterministic_is_always_asked() -> None:
    answers = iter(range(10_000))

    def moody(row: Tensor, prefix: list[int]) -> list[int]:
        return [*prefix, *(next(answers) % 4 for _ in range(4 - len(prefix)))]

    task = WithExpert(lambda _: FunctionExpert(moody, deterministic=False), n=6, length=4, ends=False)
    _, calls = hand_off_table(task, *examples_and_draft(task))
    assert calls == Calls(made=24, saved=0)


class ReadsOff(FunctionExpert):
    """Ignores the prefix like a reader of a thermometer, in sequences that can end."""

    reads_prefix = False


def test_an_expert_that_ignores_prefixes_may_end_a_sequence() -> None:
    """Its completion is not the same for every prefix then: a kept token goes past the end of an earlier answer."""

    def read_off(task: ToyTask) -> FunctionExpert:
        def complete(row: Tensor, prefix: list[int]) -> list[int]:
            tokens = list(prefix)
            while len(tokens) < task.spec.length and (not tokens or tokens[-1] != task.spec.end):
                tokens.append(int(task.target(row, len(tokens))))
            return tokens

        return ReadsOff(complete)

    task = WithExpert(read_off, n=24)
    examples, drafted = examples_and_draft(task)
    quick, calls = hand_off_table(task, examples, drafted)
    plain, _ = hand_off_table(task, examples, drafted, shortcut=False)
    assert calls.saved > 0
    assert torch.equal(quick.loss, plain.loss)
    assert torch.equal(quick.deferred, plain.deferred)


def test_batches_and_progress() -> None:
    task, finished = TASKS["lengths differ"], []
    examples, drafted = examples_and_draft(task)
    whole, calls = hand_off_table(task, examples, drafted)
    parts, same_calls = hand_off_table(task, examples, drafted, batch_size=7, progress=finished.append)
    assert finished == [7, 7, 7, 3]
    assert calls == same_calls
    assert torch.equal(whole.loss, parts.loss)
    assert torch.equal(whole.deferred, parts.deferred)


def test_a_free_completion_keeps_prefixes_and_ended_rows() -> None:
    """`complete` of an expert with `next`: prefixes of every length in one batch."""
    task = ToyTask(n=12)
    examples = task.split("test")
    drafted = draft(task.predictor, examples, task.spec).sequences
    kept = torch.minimum(torch.arange(12) % (task.spec.length + 1), drafted.lengths)
    completed = task.expert.complete(examples, drafted.truncate(kept), task.spec)
    for row, one in enumerate(rows_of(examples)):
        expected = write_all(task, one, hand_off(int(kept[row])))[0].tokens
        assert completed.tokens[row, : completed.lengths[row]].tolist() == expected


def test_spec_knows_the_end() -> None:
    tokens = torch.tensor([0, 3, 4])
    assert SequenceSpec(3, end=3).is_end(tokens).tolist() == [False, True, False]
    assert SequenceSpec(3).is_end(tokens).tolist() == [False, False, False]


# -- experts that complete all prefixes of a draft at once ---------------------------------------------------------


class Handing(DraftExpert):
    """Completes as another expert does. Of a draft's prefixes it runs those alone that do not follow from a shorter
    one, and writes rubbish where the draft has ended, which nobody should read."""

    def __init__(self, inner: Expert) -> None:
        self.inner, self.runs = inner, 0

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        self.runs += len(examples)
        return self.inner.complete(examples, prefixes, spec)

    def hand_offs(
        self, examples: Examples, drafts: Sequences, kept: Tensor, spec: SequenceSpec
    ) -> tuple[Sequences, int]:
        rows, runs = [], 0
        for row, length in enumerate(drafts.lengths.tolist()):
            one, alone = examples.select(torch.tensor([row])), drafts.select(torch.tensor([row]))
            last: Sequences | None = None
            for first in kept.tolist():
                if first >= length:
                    rows.append(Sequences(torch.full_like(alone.tokens, 99), torch.tensor([77])))
                    continue
                if last is None or last.tokens[0, :first].tolist() != alone.tokens[0, :first].tolist():
                    last, runs = self.inner.complete(one, alone.truncate(torch.tensor([first])), spec), runs + 1
                rows.append(last)
        completed = Sequences(torch.cat([one.tokens for one in rows]), torch.cat([one.lengths for one in rows]))
        return completed, runs


class TinyTours(Task):
    """Tours through five places on a lattice: the predictor goes to the nearest, the expert tries all permutations."""

    name, loss_unit, spec = "tiny tours", "steps", SequenceSpec(5)

    def __init__(self) -> None:
        self.predictor = FunctionPredictor(self.nearest, "nearest")
        self.expert = Handing(FunctionExpert(self.shortest))

    def split(self, name: SplitName) -> Examples:
        seed = ("train", "validation", "test").index(name)
        places = torch.randint(9, (16, 5, 2), generator=torch.Generator().manual_seed(seed))
        return Examples(places, torch.zeros(16, 5, dtype=torch.long), torch.arange(16))

    @staticmethod
    def nearest(places: Tensor, prefix: list[int]) -> tuple[int, float]:
        left = [city for city in range(5) if city not in prefix]
        here = places[prefix[-1] if prefix else 0]
        city = min(left, key=lambda city: int((places[city] - here).abs().sum()))
        return city, 1.0 + city

    @staticmethod
    def length(places: Tensor, tour: list[int]) -> int:
        return int((places[tour] - places[tour[1:] + tour[:1]]).abs().sum())

    @classmethod
    def shortest(cls, places: Tensor, prefix: list[int]) -> list[int]:
        left = [city for city in range(5) if city not in prefix]
        return min(([*prefix, *rest] for rest in permutations(left)), key=lambda tour: cls.length(places, tour))

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        pairs = zip(examples.inputs, sequences.tokens.tolist(), strict=True)
        return torch.tensor([float(self.length(places, tour)) if max(tour) < 5 else -1.0 for places, tour in pairs])


HANDING: dict[str, Callable[[], Task]] = {
    "tours": TinyTours,
    "lengths differ": lambda: WithExpert(lambda task: Handing(completing(task)), n=16),
    "all of one length": lambda: WithExpert(lambda task: Handing(completing(task)), n=8, length=4, ends=False),
}


@pytest.mark.parametrize("make", HANDING.values(), ids=HANDING)
def test_an_expert_that_takes_whole_drafts_gives_the_same_table(make: Callable[[], Task]) -> None:
    task = make()
    assert isinstance(task.expert, Handing)
    examples, drafted = examples_and_draft(task)
    quick, calls = hand_off_table(task, examples, drafted)
    assert task.expert.runs == 0  # nobody asked for a single prefix
    plain, naive = hand_off_table(task, examples, drafted, shortcut=False)
    assert torch.equal(quick.loss, plain.loss)
    assert torch.equal(quick.deferred, plain.deferred)
    assert (quick.loss.dtype, quick.deferred.dtype) == (plain.loss.dtype, plain.deferred.dtype)
    assert calls.made + calls.saved == naive.made == int(drafted.sequences.lengths.sum())
    assert len(examples) <= calls.made < naive.made
    parts, same_calls = hand_off_table(task, examples, drafted, batch_size=5)
    assert torch.equal(parts.loss, quick.loss)
    assert same_calls == calls


def test_an_exact_expert_only_gains_from_keeping_less() -> None:
    """The tours are right: with more to choose from, the shortest is no longer."""
    task = TinyTours()
    table, _ = hand_off_table(task, *examples_and_draft(task))
    assert bool((table.loss.diff(dim=1) >= 0).all())
    assert bool((table.loss[:, 0] < table.loss[:, -1]).any())
    assert table.deferred.tolist() == [[5, 4, 3, 2, 1, 0]] * 16


def test_the_expert_says_how_many_examples_it_takes_at_once() -> None:
    task, finished = TinyTours(), list[int]()
    task.expert.batch_size = 6
    hand_off_table(task, *examples_and_draft(task), progress=finished.append)
    assert finished == [6, 6, 4]


# -- labels that are kept ------------------------------------------------------------------------------------------


class Named(FunctionExpert):
    """Its answers depend on nothing but the toy it writes for; notes which examples it was asked about."""

    def __init__(self, task: ToyTask) -> None:
        super().__init__(completing(task).function)
        self.fingerprint, self.batch_size, self.asked = f"named-{task.seed}", 5, list[int]()
        self.stop_after = 10**9

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        if len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += examples.ids.tolist()
        return super().complete(examples, prefixes, spec)


class Kept:
    """A toy whose labels go to a folder."""

    def __init__(self, folder: Path, **sizes: Any) -> None:
        self.task, self.folder = WithExpert(Named, **{"n": 18, "length": 4, **sizes}), folder
        self.examples = self.task.split("test")
        self.task.split = lambda _: self.examples  # type: ignore[method-assign]

    @property
    def expert(self) -> Named:
        assert isinstance(self.task.expert, Named)
        return self.task.expert

    def label(self, shard_size: int | None = None) -> tuple[list[list[float]], list[list[int]], Calls]:
        labels = Labels(self.task, Store(self.folder), shard_size=shard_size)
        shards = labels.read(Part("hand-offs", "test", torch.arange(18)))
        table, counts = hand_offs_in(shards)[1], [calls_in(shard)[0] for shard in shards]
        return table.loss.tolist(), table.deferred.tolist(), sum(counts, start=Calls())

    def fresh(self) -> tuple[list[list[float]], list[list[int]], Calls]:
        drafted = draft(self.task.predictor, self.examples, self.task.spec)
        table, calls = hand_off_table(self.task, self.examples, drafted)
        return table.loss.tolist(), table.deferred.tolist(), calls

    @property
    def shards(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.folder.glob("*.safetensors"))}


def test_another_key_of_losses_finds_no_labels(tmp_path: Path) -> None:
    first, other = Kept(tmp_path), Kept(tmp_path)
    first.label()
    other.task.loss_key = lambda _: "other words"  # type: ignore[method-assign]
    other.label()
    assert len(other.expert.asked) == len(first.expert.asked) > 0


def test_kept_labels_are_found_again(tmp_path: Path) -> None:
    """By another process, too: nothing but the folder is known."""
    kept = Kept(tmp_path)
    first = kept.label()
    assert first == kept.fresh()
    assert len(kept.shards) == 4  # 18 examples by fives
    assert len(list(tmp_path.iterdir())) == 4 + 1  # and the manifest
    again = Kept(tmp_path)
    assert again.label() == first
    assert again.expert.asked == []


def another_input(kept: Kept) -> None:
    inputs = kept.examples.inputs.clone()
    inputs[7] += 1
    kept.examples = replace(kept.examples, inputs=inputs)


def another_target(kept: Kept) -> None:
    targets = kept.examples.targets.clone()
    targets[7] = (targets[7] + 1) % 4
    kept.examples = replace(kept.examples, targets=targets)


def another_predictor(kept: Kept) -> None:
    kept.task.predictor.fingerprint = "hasty"
    target = kept.task.target
    kept.task.predictor.task.target = lambda example, position: (target(example, position) + 1) % 4  # type: ignore[attr-defined]


def another_order(kept: Kept) -> None:
    rows = torch.arange(17, -1, -1)
    kept.examples = kept.examples.select(rows)


def another_identity(kept: Kept) -> None:
    """An expert may know an example by its number, as the reader of a thermometer does; here the loss does."""
    ids = kept.examples.ids.clone()
    ids[7] += 100
    kept.examples = replace(kept.examples, ids=ids)
    whole = kept.task.sequence_loss
    kept.task.sequence_loss = lambda examples, sequences: whole(examples, sequences) + examples.ids // 100  # type: ignore[method-assign]


def another_end(kept: Kept) -> None:
    kept.task.spec = replace(kept.task.spec, end=3)
    whole = kept.task.sequence_loss
    kept.task.sequence_loss = lambda examples, sequences: whole(examples, sequences) + 1  # type: ignore[method-assign]


def another_expert(kept: Kept) -> None:
    kept.expert.fingerprint = "hasty"
    kept.expert.function = lambda row, prefix: [*prefix, 4]  # the end, at once


def another_loss(kept: Kept) -> None:
    kept.task.loss_unit = "halves"
    whole = kept.task.sequence_loss
    kept.task.sequence_loss = lambda examples, sequences: whole(examples, sequences) / 2  # type: ignore[method-assign]


def another_task(kept: Kept) -> None:
    kept.task.name = "other"
    whole = kept.task.sequence_loss
    kept.task.sequence_loss = lambda examples, sequences: whole(examples, sequences) + 1  # type: ignore[method-assign]


CHANGES: list[tuple[Callable[[Kept], None], int]] = [
    (another_input, 1), (another_target, 1), (another_identity, 1), (another_predictor, 4),
    (another_order, 4), (another_end, 4), (another_expert, 4), (another_loss, 4), (another_task, 4),
]  # fmt: skip


@pytest.mark.parametrize(("change", "batches"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_labels_are_never_those_of_something_else(change: Callable[[Kept], None], batches: int, tmp_path: Path) -> None:
    """And where one example of many has changed, the batches of the others are found."""
    old = Kept(tmp_path)
    before = old.label()
    kept = Kept(tmp_path)
    change(kept)
    found = kept.label()
    asked = set(kept.expert.asked)
    assert found == kept.fresh()
    assert found[:2] != before[:2]
    assert len(kept.shards) == 4 + batches
    assert asked == set(kept.examples.ids.tolist()) if batches == 4 else asked == set(kept.examples.ids[5:10].tolist())


def test_shards_of_another_size_have_names_of_their_own(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    first = kept.label()
    assert kept.label(shard_size=18) == first
    assert len(kept.shards) == 4 + 1
    asked = len(kept.expert.asked)
    assert kept.label() == first  # as they were cut the last time
    assert len(kept.expert.asked) == asked


@pytest.mark.parametrize("damage", ["cut short", "empty", "other tensors", "not tensors"])
def test_damaged_labels_are_made_again(damage: str, tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    first = kept.label()
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = path.read_bytes()
    if damage == "other tensors":
        write_tensors(path, {"loss": torch.zeros(5, 5), "deferred": torch.zeros(5, 5)})
    else:
        path.write_bytes({"cut short": whole[:-9], "empty": b"", "not tensors": b"x" * 300}[damage])
    again = Kept(tmp_path)
    with pytest.warns(DamagedShardWarning, match=f"{path.name} is damaged: .*; it is removed and made again"):
        assert again.label() == first
    assert 5 >= len(set(again.expert.asked)) > 0
    assert path.read_bytes() == whole


def test_an_expert_without_a_name_leaves_nothing_behind(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "labels")
    kept.expert.fingerprint = ""
    kept.label()
    kept.label()
    assert not (tmp_path / "labels").exists()
    assert Counter(kept.expert.asked).most_common()[-1][1] >= 2  # all were asked again


def test_labelling_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    fresh = Kept(tmp_path / "fresh")
    expected = fresh.label()
    batches = [set(kept.tolist()) for kept in fresh.examples.ids.split(5)]
    stopped = Kept(tmp_path / "stopped")
    stopped.expert.stop_after = 1 + next(
        place for place, one in enumerate(fresh.expert.asked) if one in batches[2]
    )  # in the middle of the third batch
    with pytest.raises(KeyboardInterrupt):
        stopped.label()
    assert len(list(stopped.folder.iterdir())) == 2  # nothing half written, and no manifest
    going_on = Kept(tmp_path / "stopped")
    assert going_on.label() == expected
    assert set(going_on.expert.asked) == batches[2] | batches[3]
    names = [{path.name: path.read_bytes() for path in kept.folder.iterdir()} for kept in (fresh, going_on)]
    assert names[0] == names[1]
