"""The tasks `xsum` and `text`: contract, inputs, options, plug-in experts and drawings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.errors import OptionError
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.progress import Silent
from seqdefer.registry import EXPERTS
from seqdefer.testing import check_task
from seqdefer.types import Rollout, Sequences

pytest.importorskip("transformers", reason="needs the extra 'text'")

from text_runs import save_place
from tiny_models import pair_of, random_documents, task_of, tiny
from tiny_models import tokenizer as tiny_tokenizer

from seqdefer.tasks.text import task as task_module
from seqdefer.tasks.text.codec import END_SIGN, TruncationWarning
from seqdefer.tasks.text.data import Document
from seqdefer.tasks.text.models import text_model
from seqdefer.tasks.text.pairs import FEATURE_SETS, TextExpert, TextPair
from seqdefer.tasks.text.task import TEXT, XSUM, TextOptions, TextTask
from tests.tasks.text.test_remote import pieces

pytestmark = pytest.mark.usefixtures("one_thread")


# -- the contract ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", FEATURE_SETS)
@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_contract(family: str, shown: str) -> None:
    options = {"suffix": "w7 w8"} if family == "gpt2" else {"prefix": "w9 "}
    check_task(task_of(pair_of(family, shown), random_documents(6), length=3, **options), n=2)


@pytest.mark.parametrize("choice", [{"rouge": "ids", "token_loss": "paper"}, {"length": 1}])
def test_contract_of_other_losses_and_lengths(choice: dict[str, Any]) -> None:
    check_task(task_of(pair_of("t5"), random_documents(6), **{"length": 3, **choice}), n=2)


@pytest.fixture(scope="module")
def endless() -> TextPair:
    """Return a pair of models without an end token."""
    from copy import deepcopy

    reader = deepcopy(tiny_tokenizer())
    reader.eos_token = None
    networks = [tiny("gpt2", 1, 1), tiny("gpt2", 2, 6)]
    for network in networks:
        network.config.eos_token_id = network.generation_config.eos_token_id = None
        network.generation_config.pad_token_id = 0
    return TextPair.of(*(text_model(network, reader, "endless") for network in networks), "both")


def test_a_pair_without_an_end_token(endless: TextPair) -> None:
    task = task_of(endless, random_documents(6), length=4, suffix="w5")
    assert task.spec.end is None
    check_task(task, n=2)
    assert draft(task.predictor, task.split("test"), task.spec).sequences.lengths.tolist() == [4, 4]
    assert task.split("test").targets[0].tolist()[0] > 2


# -- inputs ---------------------------------------------------------------------------------------------------------


def test_spaces_around_references_change_nothing() -> None:
    """Data for decoder-only models often has a space before each answer, which made other tokens of its first word."""
    plain = random_documents(6)
    spaced = [replace(one, summary=f" {one.summary}\n") for one in plain]
    models = [text_model(tiny("gpt2", 1, seed), pieces("bytes"), "gpt2") for seed in (1, 2)]
    one, other = (task_of(TextPair.of(*models), some, rouge="ids") for some in (plain, spaced))
    assert torch.equal(one.split("train").targets, other.split("train").targets)


def test_documents_are_truncated_to_what_both_models_can_read() -> None:
    """GPT-2's 64 positions hold the prompt and the output."""
    long = [Document("0", " ".join(["w5"] * 80), "w6"), *random_documents(2)]
    with pytest.warns(TruncationWarning, match="^1 of 3 documents are longer than 44 tokens and were truncated$"):
        task = task_of(pair_of("gpt2"), long, length=20, suffix="w9 w9")
    assert task.split("train").inputs[0].tolist() == [5] * 42 + [9, 9]
    assert "1 cut at 44 tokens" in task.describe()["data"]  # was the 448 of the options
    rollout = roll_out(task.predictor, task.expert, task.split("train"), HandOff(torch.tensor([10])), task.spec)
    assert rollout.sequences.lengths.item() <= 20


@pytest.mark.parametrize(
    ("family", "most", "wanted"), [("gpt2", 63, 64), ("gpt2", 63, 200), ("bart", 40, 41), ("bart", 40, 100)]
)
def test_more_tokens_than_a_model_has_positions(family: str, most: int, wanted: int) -> None:
    """BART once failed inside its embeddings, which ends a GPU process."""
    documents = [Document(str(row), f"w{row + 5}", "w3") for row in range(3)]
    positions = 64 if family == "gpt2" else 40
    with pytest.raises(
        OptionError, match=f"{family} has {positions} positions, too few to write {wanted} tokens; lower --length"
    ):
        task_of(pair_of(family), documents, length=wanted)
    task = task_of(pair_of(family), documents, length=most)
    blank = HandOff(torch.tensor([most // 2]))
    assert len(roll_out(task.predictor, task.expert, task.split("test"), blank, task.spec).sequences) == 1


def test_options_out_of_range() -> None:
    for wrong in ({"length": 0}, {"length": 5000}, {"input_tokens": 0}, {"train_documents": 0}, {"seed": -1}):
        (name,) = wrong
        with pytest.raises(OptionError, match=f"--{name.replace('_', '-')} is {wrong[name]}; it must be at"):
            TextOptions(**wrong)


def test_presets() -> None:
    for entry in (XSUM, TEXT):
        quick, paper = (experiment_settings(entry, preset) for preset in ("quick", "paper"))
        assert (quick.instances, paper.instances) == (entry.quick_instances, 100) == (20, 100)
        for preset, options in entry.presets.items():
            sizes = experiment_settings(entry, preset)
            assert sizes.seeds * sizes.instances <= options.test_documents
    assert XSUM.presets["paper-token"].max_words == 14  # summaries under 15 words
    assert XSUM.presets["paper-token"].train_documents == 800


def test_the_papers_figures_are_for_twenty_tokens() -> None:
    documents, pair = random_documents(3), pair_of("t5")
    assert task_of(pair, documents, length=20).has_published_figures
    assert not task_of(pair, documents, length=14).has_published_figures


# -- experts of other packages --------------------------------------------------------------------------------------


def test_an_expert_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed plug-in wins over the Hub; other names are checkpoints."""
    expert = pair_of("t5").expert
    calls: list[tuple[Any, ...]] = []

    class Point:
        def load(self) -> Any:
            return lambda *arguments: calls.append(arguments) or expert

    monkeypatch.setattr(task_module, "find_plugins", lambda group: {"text.mine": Point()} if group == EXPERTS else {})
    folder = save_place(tmp_path) / "t5"
    options = TextOptions(predictor=str(folder / "predictor"), expert="mine", length=4)
    served = TEXT.serve(options, tmp_path, torch.device("cpu"), Silent())
    assert served.expert is expert
    assert calls == [(options, served.predictor, torch.device("cpu"))]
    assert served.codec.encode(["w5"]).inputs.tolist() == [[5]]
    other = replace(options, expert=str(folder / "expert"))
    assert isinstance(TEXT.serve(other, tmp_path, torch.device("cpu"), Silent()).expert, TextExpert)


# -- drawings -------------------------------------------------------------------------------------------------------


def drawn(task: TextTask, tokens: list[int], by_expert: list[bool]) -> str:
    length = task.spec.length
    row = torch.tensor([[*tokens, *[0] * (length - len(tokens))]])
    authors = torch.tensor([[*by_expert, *[False] * (length - len(tokens))]])
    rollout = Rollout(Sequences(row, torch.tensor([len(tokens)])), authors, torch.zeros(1, length))
    return task.draw(task.split("test"), {0.25: rollout})


def test_a_drawing_shows_document_reference_authors_and_end() -> None:
    documents = [Document(str(row), f"w{row} <b>bold</b> " + "w5 " * 200, f"a & w{row}") for row in range(3)]
    task = task_of(pair_of("t5"), documents, length=6, input_tokens=700)
    page = drawn(task, [3, 4, 2, 5, 1], [False, True, True, False, True])
    assert "w2 &lt;b&gt;bold&lt;/b&gt;" in page
    assert "…" in page
    assert "a &amp; w2" in page
    assert "ROUGE-1 0, 3 of 5 by the expert" in page
    assert "budget 25\u00a0%" in page
    pieces = (("predictor", "w3"), ("expert", " w4"), ("expert", ""), ("predictor", " w5"), ("expert", END_SIGN))
    assert all(f'class="tokens-{author}">{piece}<' in page for author, piece in pieces)
