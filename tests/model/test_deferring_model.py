"""A fitted rejector at work: its ends are the models alone, streams and batches agree, wrong folders are refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_pair import METHODS, LetterCodec, Toy, numbers

from seqdefer.engine.drafts import draft
from seqdefer.errors import CheckpointError, InputError, OptionError
from seqdefer.hyperparameters import COST_PERCEPTRON, LSTM
from seqdefer.interfaces import Codec
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.labels.labelled import LearningData
from seqdefer.methods.base import FitContext
from seqdefer.methods.plans import scored_hand_offs
from seqdefer.methods.registry import fittable_methods, get_method
from seqdefer.model.calibrated_pair import BudgetWarning
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.recipes import LearningSettings
from seqdefer.rejectors.checkpoints import load_rejector
from seqdefer.rejectors.draft import DraftNetwork
from seqdefer.rejectors.losses import hand_off_grid
from seqdefer.testing import ToyTask
from seqdefer.testing.fakes import blank_prefixes
from seqdefer.types import Sequences

pytestmark = pytest.mark.usefixtures("one_thread")
each_method = pytest.mark.parametrize("method", METHODS)
each_one_time = pytest.mark.parametrize("method", METHODS[1:])
INPUTS = numbers(40)
QUICK, QUICK_DRAFT = (replace(one, epochs=2, units=8, layers=1) for one in (LSTM, COST_PERCEPTRON))


@cache
def model_of(method: str) -> DeferringModel:
    """Nobody may change it."""
    model = Toy.of(length=6).model(method)
    model.calibrate(numbers(80))
    return model


def tokens_of(sequences: Sequences) -> list[list[int]]:
    rows = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
    return [tokens[:length] for tokens, length in rows]


# -- writing -------------------------------------------------------------------------------------------------------


@each_method
def test_without_a_budget_the_predictor_writes_alone(method: str) -> None:
    model = model_of(method)
    written = model.generate(INPUTS, 0.0)
    alone = draft(model.served.predictor, model.served.codec.encode(INPUTS), model.served.spec).sequences
    assert tokens_of(written.sequences) == tokens_of(alone)
    assert written.share == 0
    assert written.switches == [0] * len(INPUTS)


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeCost"])
def test_with_the_whole_budget_the_expert_writes_alone(method: str) -> None:
    model = model_of(method)
    examples = model.served.codec.encode(INPUTS)
    alone = model.served.expert.complete(examples, blank_prefixes(examples, model.served.spec), model.served.spec)
    written = model.generate(INPUTS, 1.0)
    assert tokens_of(written.sequences) == tokens_of(alone)
    assert written.share == 1


@each_method
@pytest.mark.parametrize("size", [1, 7, 40, 10**9])
def test_batches_of_any_size_write_the_same(method: str, size: int) -> None:
    model = model_of(method)
    together = model.generate(INPUTS, 0.4, batch_size=size)
    for place, one in enumerate(INPUTS):
        apart = model.generate([one], 0.4)
        assert tokens_of(apart.sequences)[0] == tokens_of(together.sequences)[place]
        assert apart.sources[0] == together.sources[place]
        torch.testing.assert_close(apart.scores[0], together.scores[place])


@each_method
def test_a_stream_is_what_is_generated(method: str) -> None:
    model = model_of(method)
    written = model.generate(INPUTS, 0.4)
    for place, one in enumerate(INPUTS):
        pieces = list(model.stream(one, 0.4))
        assert [piece.token for piece in pieces] == tokens_of(written.sequences)[place]
        assert [piece.source for piece in pieces] == written.sources[place]
        assert [piece.position for piece in pieces] == list(range(len(pieces)))
        assert "".join(piece.text for piece in pieces) == written.outputs[place]
        scores = torch.tensor([piece.score for piece in pieces])
        torch.testing.assert_close(scores, written.scores[place, : len(pieces)])


def test_a_stream_refuses_before_it_begins() -> None:
    with pytest.raises(OptionError, match="budget is 2"):
        model_of("TokenwiseModel").stream(5, 2.0)
    with pytest.raises(InputError, match="'x' is no number"):
        model_of("TokenwiseModel").stream("x")


def test_a_stream_comes_token_by_token() -> None:
    model = model_of("TokenwiseModel")
    asked: list[int] = []
    predictor = model.served.predictor

    class Watched(type(predictor)):  # type: ignore[misc]
        def propose(self, state: Any) -> Any:
            asked.append(state.position)
            return super().propose(state)

    watched = DeferringModel(replace(model.served, predictor=Watched(predictor.task)), model.rejector)  # type: ignore[attr-defined]
    stream = watched.stream(INPUTS[0], threshold=0.0)
    next(stream)
    assert asked == [0]


@each_method
def test_decisions_are_the_scores_of_what_is_never_deferred(method: str) -> None:
    model = model_of(method)
    decided, alone = model.decide(INPUTS, 0.4, batch_size=9), model.generate(INPUTS, threshold=math.inf)
    assert decided.outputs == alone.outputs
    assert torch.equal(decided.sequences.tokens, alone.sequences.tokens)
    torch.testing.assert_close(decided.scores, alone.scores)
    assert decided.scores[decided.sequences.mask()].unique().numel() > 10
    assert not decided.defer[~decided.sequences.mask()].any()


@each_method
def test_decisions_are_those_of_writing_up_to_the_first_deferral(method: str) -> None:
    model = model_of(method)
    decided, written = model.decide(INPUTS, 0.4), model.generate(INPUTS, 0.4)
    assert 0 < decided.defer.any(1).sum() < len(INPUTS)
    for wish, by_expert in zip(decided.defer.tolist(), written.by_expert.tolist(), strict=True):
        first = wish.index(True) if True in wish else len(wish)
        assert by_expert[: first + 1] == wish[: first + 1]


@each_method
def test_deciding_does_not_ask_the_expert(method: str, spy: Callable[[Any, str], list[Any]]) -> None:
    model = model_of(method)
    asked = [spy(model.served.expert, name) for name in ("next", "complete")]
    model.decide(INPUTS, 0.4)
    assert asked == [[], []]


@pytest.mark.parametrize("method", ["OneTimeModel", "OneTimeCost"])
def test_one_time_scores_are_compared_with_no_deferral(method: str) -> None:
    model = model_of(method)
    assert isinstance(model.rejector, DraftNetwork)
    drafted = draft(model.served.predictor, model.served.codec.encode(INPUTS), model.served.spec)
    raw, grid = model.rejector.score(drafted), list(model.rejector.sizes.hand_offs)
    found = model.decide(INPUTS, 0.4).scores
    for row, length in enumerate(drafted.sequences.lengths.tolist()):
        for position in range(model.served.spec.length):
            expected = 0.0
            if position in grid[:-1] and position < length:
                expected = float(raw[row, grid.index(position)] - raw[row, -1])
            assert float(found[row, position]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("method", "choose"), [("OneTimeModel", "odds"), ("OneTimeCost", "cost")])
def test_one_time_decisions_follow_the_rule_of_the_rejector(method: str, choose: str) -> None:
    model = model_of(method)
    assert isinstance(model.rejector, DraftNetwork)
    threshold = model.setting(0.4).threshold
    drafted = draft(model.served.predictor, model.served.codec.encode(INPUTS), model.served.spec)
    assert model.rejector.rule == choose
    kept = scored_hand_offs(model.rejector, drafted, model.served.spec.length).kept(threshold)
    kept = torch.minimum(torch.from_numpy(kept), drafted.sequences.lengths)
    written = model.generate(INPUTS, 0.4)
    assert [row.count("predictor") for row in written.sources] == kept.tolist()


@each_one_time
def test_one_time_sequences_are_drafted_once(method: str, spy: Callable[[Any, str], list[Any]]) -> None:
    model = Toy.of(length=6).model(method)
    started, completed = spy(model.served.predictor, "start"), spy(model.served.expert, "complete")
    model.generate(INPUTS, threshold=0.0, batch_size=16)
    assert len(started) == 3
    assert len(completed) <= 3
    model.decide(INPUTS, threshold=0.0, batch_size=16)
    assert len(started) == 6
    list(model.stream(INPUTS[0], threshold=0.0))
    assert len(started) == 7


def test_a_stream_shows_what_is_kept_before_the_expert_is_asked(spy: Callable[[Any, str], list[Any]]) -> None:
    model = model_of("OneTimeCost")
    written = model.generate(INPUTS, 0.4)
    place = next(place for place, row in enumerate(written.sources) if row[:2] == ["predictor", "predictor"]
                 and "expert" in row)  # fmt: skip
    asked = spy(model.served.expert, "complete")
    stream = model.stream(INPUTS[place], 0.4)
    assert [next(stream).source, next(stream).source] == ["predictor", "predictor"]
    assert asked == []
    list(stream)
    assert len(asked) == 1


# -- texts ---------------------------------------------------------------------------------------------------------


class ByteCodec(LetterCodec):
    """A token is a byte: three make a euro sign, and others make none."""

    def text(self, tokens: Sequence[Any]) -> str:
        return bytes(b"\xe2\x82\xaca "[token] for token in tokens).decode("utf-8", "replace")


@each_method
def test_a_stream_shows_letters_when_they_are_whole(method: str) -> None:
    toy, inputs = Toy.of(length=12, ends=False), numbers(60)
    model = DeferringModel(replace(toy.served, codec=ByteCodec()), toy.rejector(method))
    written = model.generate(inputs, threshold=0.0, batch_size=60)
    assert any("€" in text for text in written.outputs)
    assert any(text.endswith("\ufffd") for text in written.outputs)
    for place, row in enumerate(written.rows(model.served.codec)):
        texts = [piece.text for piece in model.stream(inputs[place], threshold=0.0)]
        assert "".join(texts) == "".join(token["text"] for token in row["tokens"]) == written.outputs[place]
        assert not any(text.endswith("\ufffd") for text in texts[:-1])


def test_what_is_not_text_is_shown_by_its_tokens() -> None:
    class Plain(LetterCodec):
        text = Codec.text

        def decode(self, tokens: Sequence[Any]) -> Any:
            return list(tokens)

    toy = Toy.of(length=4)
    model = DeferringModel(replace(toy.served, codec=Plain()), toy.rejector("TokenwiseModel"))
    written = model.generate(numbers(1), threshold=0.0)
    pieces = list(model.stream(numbers(1)[0], threshold=0.0))
    assert written.outputs == [[piece.token for piece in pieces]]
    assert "".join(piece.text for piece in pieces) == " ".join(map(str, written.outputs[0]))


@each_method
def test_a_check_tells_what_budgets_spend_on_other_inputs(method: str) -> None:
    model, others, told = model_of(method), numbers(50, first=500), list[int]()
    with warnings.catch_warnings(action="ignore", category=BudgetWarning):
        found = model.check(others, progress=told.append)
        assert sum(told) == len(found) == 6
        for one in found:
            assert one.threshold == model.setting(one.budget).threshold
            assert one.share == pytest.approx(model.generate(others, one.budget).share)
            assert one.low <= one.share <= one.high


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [[], "a text instead of a list", ()])
def test_inputs_are_a_list_of_some(inputs: Any) -> None:
    with pytest.raises(InputError, match="give a list of one input or more"):
        model_of("TokenwiseModel").generate(inputs)


@pytest.mark.parametrize("kind", ["dict", "DataFrame"])
def test_a_table_is_not_read_as_the_names_of_its_columns(kind: str) -> None:
    """`calibrate(frame)` once measured budgets on the names of the columns."""
    columns = {"document": ["a", "b"], "summary": ["c", "d"]}
    inputs: Any = columns if kind == "dict" else pytest.importorskip("pandas").DataFrame(columns)
    with pytest.raises(InputError, match=f"inputs are a {kind}; .* one column"):
        model_of("TokenwiseModel").calibrate(inputs)


def test_choices_that_cannot_be() -> None:
    model = model_of("TokenwiseModel")
    with pytest.raises(OptionError, match="batch size 0; it must be at least 1"):
        model.generate(INPUTS, batch_size=0)
    with pytest.raises(OptionError, match="threshold is nan"):
        model.generate(INPUTS, threshold=math.nan)
    with pytest.raises(OptionError, match="were not measured; do that with inputs like yours: seqdefer calibrate"):
        DeferringModel(model.served, model.rejector).generate(INPUTS)
    assert DeferringModel(model.served, model.rejector).generate(INPUTS, threshold=math.inf).share == 0


def test_a_budget_and_a_threshold_exclude_each_other() -> None:
    """The threshold was taken, and the budget forgotten."""
    model = model_of("TokenwiseModel")
    for write in (model.generate, model.decide, model.stream):
        with pytest.raises(OptionError, match=r"^budget and threshold exclude each other; give one of them$"):
            list(write(INPUTS[:1], budget=0.2, threshold=0.5))
    with pytest.raises(OptionError, match="threshold and budget_money exclude each other"):
        model.generate(INPUTS, threshold=0.5, budget_money=1.0)


def test_rejectors_that_do_not_fit() -> None:
    toy, rejector = Toy.of(length=6), Toy.of(length=6).rejector("TokenwiseModel")
    with pytest.raises(CheckpointError, match="was fitted for predictor toy-5-6-0, not for toy-5-6-9"):
        DeferringModel(Toy.of(length=6, seed=9).served, rejector)
    longer = replace(toy.served, spec=replace(toy.served.spec, length=9))
    with pytest.raises(CheckpointError, match="fitted for sequences of 6 tokens, not of 9; fit one for these"):
        DeferringModel(longer, rejector)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.setting(1.0),
        lambda model: model.generate([1], 1.0),
        lambda model: model.decide([1], 1.0),
        lambda model: model.stream(1, 1.0),
        lambda model: model.check([1, 2], [1.0]),
    ],
    ids=("setting", "generate", "decide", "stream", "check"),
)
def test_a_budget_warning_names_the_line_that_asked(ask: Callable[[DeferringModel], Any]) -> None:
    """It once named a line of the library."""
    with pytest.warns(BudgetWarning) as told:
        ask(model_of("OneTimeModel"))
    assert [one.filename for one in told] == [__file__]


@pytest.mark.slow
@pytest.mark.parametrize("name", fittable_methods())
def test_every_method_can_be_saved_calibrated_and_run(name: str, tmp_path: Path) -> None:
    """Confidence rules and whole deferral are methods like the others; decisions cost the expert nothing."""
    toy, task = Toy.of(length=6), ToyTask(n=40, length=6)
    examples = task.split("train")
    drafted = draft(task.predictor, examples, task.spec)
    table, _ = hand_off_table(task, examples, drafted)
    data = LearningData(examples, drafted, table, lambda _: enumerate_trees(task, examples))
    settings = LearningSettings(token=QUICK, once=QUICK_DRAFT, cost=QUICK_DRAFT)
    context = FitContext(task, settings, hand_off_grid(6, 7), data, data)
    rejector, _ = get_method(name).fit(context).run(lambda _: None)
    rejector.save_pretrained(tmp_path / name)
    model = DeferringModel(toy.served, load_rejector(tmp_path / name, toy.served.predictor))
    model.calibrate(numbers(60))
    for budget in (0.0, 0.3, 1.0):
        threshold = model.calibration.for_budget(budget).threshold
        written, decided = model.generate(INPUTS, threshold=threshold), model.decide(INPUTS, threshold=threshold)
        assert (written.share == 0) == (budget == 0)
        streamed = [token.source for token in model.stream(INPUTS[0], threshold=threshold)]
        assert streamed == written.sources[0]
        if get_method(name).granularity == "whole":
            assert all(len(set(row)) == 1 for row in written.sources)
        first = [row.index("expert") if "expert" in row else None for row in written.sources]
        wanted = [row.index(True) if any(row) else None for row in decided.defer.tolist()]
        assert first == wanted


def test_few_inputs_are_said_to_be_rough(capsys: pytest.CaptureFixture[str]) -> None:
    model = Toy.of(length=6).model("TokenwiseModel")
    found = model.calibrate(numbers(5))
    setting, talk = found.for_budget(0.2), capsys.readouterr().err
    assert "budgets were measured on 5 inputs only: by 95 % of resamples, a budget of 0.2 spends" in talk
    assert f"{setting.low:.2f} to {setting.high:.2f}" in talk
    model.calibrate(numbers(5), progress=False)
    model.calibrate(numbers(200))
    assert not capsys.readouterr().err


def test_inputs_that_choose_thresholds_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = Toy.of(length=6).model("TokenwiseModel").calibrate(numbers(60), guarantee="expected")
    assert found.inputs == 48
    assert "12 of 60 inputs, drawn at random, chose the thresholds and are not counted" in capsys.readouterr().err
