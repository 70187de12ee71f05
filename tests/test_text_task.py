"""The tasks `xsum` and `text`: losses by plain counting, runs from end to end on tiny models, bad input in one line."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqdefer import cli, experiment, exploration, labels
from seqdefer.engine import HandOff, draft, interleave, roll_out
from seqdefer.errors import OptionError
from seqdefer.experiment import Experiment
from seqdefer.exploration import explore_trees
from seqdefer.interfaces import Silent
from seqdefer.labels import hand_off_table
from seqdefer.results import load_results
from seqdefer.settings import GRANULARITY, ExperimentSettings, experiment_settings
from seqdefer.testing import check_task
from seqdefer.trees import END, UNKNOWN, DecisionTrees, enumerate_trees
from seqdefer.types import Examples, Rollout, Sequences

pytest.importorskip("transformers", reason="needs the extra 'text'")

from test_text_loading import unknown_host
from test_text_models import Decided, rows_of, unpacked
from tiny_models import generated, tiny, tiny_pair
from tiny_models import tokenizer as tiny_tokenizer

from seqdefer.tasks.text.codec import END_SIGN, CutWarning
from seqdefer.tasks.text.data import Document, encode
from seqdefer.tasks.text.memory import SmallerBatchWarning
from seqdefer.tasks.text.models import TextModel, text_model
from seqdefer.tasks.text.pairs import SHOWN, TextExpert, TextPair, load_pair
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.task import TEXT, XSUM, TextOptions, TextTask, _remembered

pytestmark = pytest.mark.usefixtures("one_thread")
Spy = Callable[[Any, str], list[tuple[Any, ...]]]
Capture = pytest.CaptureFixture[str]
LENGTH = 14  # more than trees are enumerated for


def words(generator: random.Random, most: int) -> str:
    return " ".join(f"w{generator.randrange(3, 60)}" for _ in range(generator.randint(1, most)))


def random_documents(n: int, seed: int = 0) -> list[Document]:
    generator = random.Random(seed)
    return [Document(str(number), words(generator, 12), words(generator, 8)) for number in range(n)]


def pair_of(family: str, shown: str = "facts") -> TextPair:
    return TextPair.of(tiny_pair(family).predictor.model, tiny_pair(family).expert.model, shown)


def task_of(pair: TextPair, documents: Sequence[Document], **options: Any) -> TextTask:
    """A third of the documents in each part."""
    thirds = {"train": documents[::3], "validation": documents[1::3], "test": documents[2::3]}
    return TextTask("text", TextOptions(**{"rouge": "words", **options}), pair, thirds)  # type: ignore[arg-type]


# -- losses --------------------------------------------------------------------------------------------------------

token = st.integers(1, 7)  # 1 is the end, 2 unknown; few, so that many are equal
texts = st.lists(token, min_size=1, max_size=6)


SUMMARIES = [
    "w3 w4 w4 w5", "W3, w4! w4-w6", "w3 w3 w3", "Paris in April", "???", "Ωμέγα", "w3_w4 é w5", "</s> w7", "w6"
]  # fmt: skip


def padded(rows: Sequence[Sequence[int]], width: int, value: int) -> Tensor:
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


@cache
def counting(**options: str) -> TextTask:
    """Nobody may change it."""
    documents = [Document(str(row), f"w{row + 3}", text) for row, text in enumerate(SUMMARIES)]
    return task_of(tiny_pair("t5"), documents, **options)


def with_references(references: list[list[int]]) -> Examples:
    n, width = len(references), max(map(len, references))
    return Examples(torch.zeros(n, 1), padded(references, width, PADDING), torch.arange(n))


@given(st.lists(st.tuples(texts, texts, st.integers(0, 5), token), min_size=1, max_size=5))
def test_token_losses_are_those_of_plain_counting(cases: list[tuple[list[int], list[int], int, int]]) -> None:
    """Prefixes are longer than their lengths say; what stands behind means nothing."""
    references = [[*reference, 1] for reference, _, _, _ in cases]
    examples, tokens = with_references(references), torch.tensor([one for *_, one in cases])
    lengths = [min(kept, len(prefix)) for _, prefix, kept, _ in cases]
    prefixes = Sequences(padded([prefix for _, prefix, _, _ in cases], 6, 3), torch.tensor(lengths))
    paper, clipped = [], []
    for reference, (_, prefix, _, one), kept in zip(references, cases, lengths, strict=True):
        paper.append(float(one not in reference))
        clipped.append(float(prefix[:kept].count(one) >= reference.count(one)))
    for rule, expected in {"paper": paper, "clipped": clipped}.items():
        task = counting(token_loss=rule)
        assert task.token_loss(examples, prefixes, tokens).tolist() == expected
        assert task.token_cost(examples, prefixes, tokens).tolist() == expected


@pytest.mark.parametrize("rule", ["paper", "clipped"])
def test_the_end_is_always_right_and_unwritten_prefixes_count_nothing(rule: str) -> None:
    task = task_of(tiny_pair("t5"), random_documents(9), token_loss=rule)
    examples = task.split("train")
    blank = Sequences(examples.inputs[:, :0], torch.zeros(3, dtype=torch.long))
    assert task.token_loss(examples, blank, torch.ones(3, dtype=torch.long)).tolist() == [0, 0, 0]
    assert task.token_loss(examples, blank, examples.targets[:, 0]).tolist() == [0, 0, 0]
    assert task.token_rule == rule


def package_scores(written: list[str], references: list[str]) -> list[float]:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1"])
    both = zip(references, written, strict=True)
    return [100 * (1 - scorer.score(reference, text)["rouge1"].fmeasure) for reference, text in both]


def id_score(written: list[int], reference: list[int]) -> float:
    one, other = (Counter(token for token in row if token != 1) for row in (written, reference))
    common = (one & other).total()
    return 100.0 * (1 - (2 * common / (one.total() + other.total()) if common else 0))


@given(st.lists(st.tuples(st.integers(0, len(SUMMARIES) - 1), texts, st.integers(1, 6)), min_size=1, max_size=6))
@settings(max_examples=60)
def test_sequence_losses_are_those_of_the_package_and_of_plain_counting(
    cases: list[tuple[int, list[int], int]],
) -> None:
    lengths = torch.tensor([min(kept, len(tokens)) for _, tokens, kept in cases])
    sequences = Sequences(padded([tokens for _, tokens, _ in cases], 6, 4), lengths)
    kept = [tokens[:length] for (_, tokens, _), length in zip(cases, lengths.tolist(), strict=True)]
    vocabulary = {number: word for word, number in tiny_tokenizer().get_vocab().items() if number > 2}
    for rule in ("words", "ids"):
        task = counting(rouge=rule)
        order = {one.summary: place for place, one in enumerate(task.documents)}
        everyone = [task.split(name) for name in ("test", "validation", "train")]  # in the order of ids
        targets = torch.cat([part.targets for part in everyone])
        rows = torch.tensor([order[SUMMARIES[which]] for which, _, _ in cases])
        examples = Examples(torch.zeros(len(rows), 1), targets[rows], rows)
        found = task.sequence_loss(examples, sequences)
        if rule == "words":
            written = [" ".join(vocabulary[one] for one in row if one in vocabulary) for row in kept]
            expected = package_scores(written, [SUMMARIES[which] for which, _, _ in cases])
        else:
            plain = [tiny_tokenizer()(SUMMARIES[which])["input_ids"] for which, _, _ in cases]
            expected = [id_score(row, reference) for row, reference in zip(kept, plain, strict=True)]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-4)


def test_labels_kept_for_words_know_the_words() -> None:
    """Words that the tokenizer does not know have one id."""
    one, other = (
        task_of(tiny_pair("t5"), [Document(str(row), f"w{row + 3}", text) for row in range(6)])
        for text in ("red", "blue")
    )
    assert torch.equal(one.split("test").targets, other.split("test").targets)
    assert one.loss_key(one.split("test")) != other.loss_key(other.split("test"))


def test_equal_texts_are_counted_once(spy: Spy) -> None:
    task = task_of(tiny_pair("t5"), random_documents(6))
    examples = task.split("test").select(torch.tensor([0, 1, 0, 0, 1]))
    scored = spy(task.references, "score")
    tokens = torch.tensor([[3, 4, 9], [3, 4, 9], [3, 4, 5], [3, 5, 9], [3, 4, 7]])
    loss = task.sequence_loss(examples, Sequences(tokens, torch.tensor([2, 2, 2, 2, 2])))
    assert len(scored[0][0]) == 3
    assert loss[0] == loss[2]
    assert loss[1] == loss[4]


def test_a_summary_without_words_is_worth_nothing_and_breaks_nothing() -> None:
    task = task_of(tiny_pair("t5"), [replace(one, summary="???") for one in random_documents(3)])
    examples = task.split("test")
    drafts = draft(task.predictor, examples, task.spec).sequences
    assert task.sequence_loss(examples, drafts).tolist() == [100]


# -- the contract --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_a_task_keeps_its_contract(family: str, shown: str) -> None:
    options = {"suffix": "w7 w8"} if family == "gpt2" else {"prefix": "w9 "}
    check_task(task_of(pair_of(family, shown), random_documents(6), length=4, **options), n=2)


@pytest.mark.parametrize("choice", [{"rouge": "ids", "token_loss": "paper"}, {"length": 1}])
def test_a_task_keeps_its_contract_however_it_counts(choice: dict[str, Any]) -> None:
    check_task(task_of(pair_of("t5"), random_documents(6), **{"length": 3, **choice}), n=2)


@pytest.fixture(scope="module")
def endless() -> TextPair:
    """Two models that never end."""
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


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_short_sequences_are_enumerated_as_the_engine_writes_them(family: str) -> None:
    """And document by document: of several at once the states would fill any memory."""
    task = task_of(pair_of(family), random_documents(12), length=5)
    examples = task.split("test")
    trees, lazy = enumerate_trees(task, examples), DecisionTrees(task, examples)
    assert task.expert.examples_at_once == 1
    pattern = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    expected = rows_of(roll_out(task.predictor, task.expert, examples, Decided(pattern), task.spec).sequences)
    for grown in (trees, lazy):
        assert walked(grown, pattern) == expected


def walked(trees: DecisionTrees, pattern: Tensor) -> list[list[int]]:
    """The sequences at the ends of the paths that `pattern` (n, L) takes."""
    found: list[list[int]] = [[] for _ in range(len(trees))]
    nodes, rows = trees.roots, torch.arange(len(trees))
    for decided in pattern.unbind(1):
        following = trees.children(nodes, decided[rows])
        over = following == END
        leaves = rows_of(trees.sequences(nodes[over], decided[rows][over]))
        for row, tokens in zip(rows[over].tolist(), leaves, strict=True):
            found[row] = tokens
        nodes, rows = following[~over], rows[~over]
    return found


# -- inputs --------------------------------------------------------------------------------------------------------


def test_a_suffix_follows_what_is_left_of_a_document() -> None:
    reader = tiny_tokenizer()
    ids, n_cut = encode(reader, ["w5 w6", "w5 w6 w7 w8 w9", "w5 w6 w7"], "w3 ", 6, suffix=" w10 w11")
    assert ids.tolist() == [[3, 5, 6, 10, 11, PADDING], [3, 5, 6, 7, 10, 11], [3, 5, 6, 7, 10, 11]]
    assert n_cut == 1


class Ending:
    """One word, one number; the end token is added, as T5's tokenizer does it."""

    eos_token_id = 1

    def __call__(
        self, texts: list[str], *, verbose: bool, add_special_tokens: bool = True, **cut: Any
    ) -> dict[str, list[list[int]]]:
        end = [1] if add_special_tokens else []
        most = cut["max_length"] - len(end) if cut else None
        return {"input_ids": [[*[int(word) for word in text.split()][:most], *end] for text in texts]}


def test_a_suffix_stands_before_the_end_token() -> None:
    ids, n_cut = encode(Ending(), ["5 6", "5 6 7 8"], "3 ", 6, suffix="9")
    assert ids.tolist() == [[3, 5, 6, 9, 1, PADDING], [3, 5, 6, 7, 9, 1]]
    assert n_cut == 1
    with pytest.raises(
        OptionError, match="cut at 3 tokens, which leaves nothing of it beside prefix and suffix; allow"
    ):
        encode(Ending(), ["5"], "3 ", 3, suffix="9")


class Silencing(Ending):
    """Adds no end token, and knows no letters."""

    def __call__(self, texts: list[str], **how: Any) -> dict[str, list[list[int]]]:
        digits = ["".join(letter for letter in text if letter.isdigit() or letter == " ") for text in texts]
        return super().__call__(digits, **{**how, "add_special_tokens": False})


def test_a_suffix_after_a_text_without_tokens() -> None:
    """Once an IndexError."""
    assert encode(Silencing(), ["abc"], "", 4, suffix="9")[0].tolist() == [[9]]


def test_documents_are_cut_to_what_both_models_can_read() -> None:
    """GPT-2's 64 positions hold the prompt and what is written."""
    long = [Document("0", " ".join(["w5"] * 80), "w6"), *random_documents(2)]
    with pytest.warns(CutWarning, match="^1 of 3 documents are longer than 44 tokens and were cut there$"):
        task = task_of(pair_of("gpt2"), long, length=20, suffix="w9 w9")
    assert task.split("train").inputs[0].tolist() == [5] * 42 + [9, 9]
    assert "1 cut at 44 tokens" in task.describe()["data"]  # once the 448 of the options
    rollout = roll_out(task.predictor, task.expert, task.split("train"), HandOff(torch.tensor([10])), task.spec)
    assert rollout.sequences.lengths.item() <= 20


@pytest.mark.parametrize(
    ("family", "most", "wanted"), [("gpt2", 63, 64), ("gpt2", 63, 200), ("bart", 40, 41), ("bart", 40, 100)]
)
def test_more_tokens_than_a_model_has_positions_are_refused(family: str, most: int, wanted: int) -> None:
    """BART once failed inside its embeddings, which on a GPU ends the process."""
    documents = [Document(str(row), f"w{row + 5}", "w3") for row in range(3)]
    positions = 64 if family == "gpt2" else 40
    with pytest.raises(
        OptionError, match=f"{family} has {positions} positions, too few to write {wanted} tokens; write f"
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


# -- pictures ------------------------------------------------------------------------------------------------------


def drawn(task: TextTask, tokens: list[int], by_expert: list[bool]) -> str:
    length = task.spec.length
    row = torch.tensor([[*tokens, *[0] * (length - len(tokens))]])
    authors = torch.tensor([[*by_expert, *[False] * (length - len(tokens))]])
    rollout = Rollout(Sequences(row, torch.tensor([len(tokens)])), authors, torch.zeros(1, length))
    return task.draw(task.split("test"), {0.25: rollout})


def test_a_picture_shows_document_reference_authors_and_end() -> None:
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


class Halves:
    """Two tokens make a letter, as bytes do; a mark takes the space before it away, as tidy tokenizers do."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool, **_: bool) -> str:
        assert skip_special_tokens
        text, rest = "", list(tokens)
        while rest:
            one = rest.pop(0)
            if one == 20:
                text += "€" if rest[:1] == [21] else "\ufffd"
                rest = rest[1:] if rest[:1] == [21] else rest
            else:
                text += {1: "", 2: "", 3: " do", 4: " n", 5: "'t"}.get(one, "\ufffd")
        return text.replace(" n't", "n't")


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        ([3, 20, 21, 3, 1], [" do", "", "€", " do", END_SIGN]),  # once "\ufffd" and nothing, for good
        ([3, 4, 5], [" do", "", "n't"]),  # once " do", " n", "t"
        ([3, 2, 3], [" do", "", " do"]),
        ([3, 20], [" do", "\ufffd"]),
        ([1], [END_SIGN]),
        ([2, 2], ["", ""]),
    ],
)
def test_pieces_are_together_the_text(tokens: list[int], pieces: list[str]) -> None:
    task = task_of(pair_of("t5"), random_documents(3))
    task.codec.tokenizer = Halves()
    assert task.codec.pieces(tokens) == pieces
    assert "".join(pieces).replace(END_SIGN, "") == Halves().decode(tokens, skip_special_tokens=True)


# -- from end to end -----------------------------------------------------------------------------------------------

N_TEST, N_TRAIN = 12, 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of tiny pairs, and documents for them. Nobody may change them."""
    folder = tmp_path_factory.mktemp("text")
    for family in ("t5", "gpt2"):
        for name, (n_layers, seed) in {"predictor": (1, 1), "expert": (2, 6)}.items():
            tiny(family, n_layers, seed).save_pretrained(folder / family / name)
            tiny_tokenizer().save_pretrained(folder / family / name)
    documents = random_documents(N_TEST + N_TRAIN)
    write_lines(folder / "test.jsonl", documents[:N_TEST])
    write_lines(folder / "train.jsonl", documents[N_TEST:])
    return folder


def write_lines(path: Path, documents: Sequence[Document]) -> Path:
    lines = [json.dumps({"document": one.document, "summary": one.summary}) for one in documents]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def models(place: Path, family: str = "t5") -> list[str]:
    return ["--predictor", str(place / family / "predictor"), "--expert", str(place / family / "expert")]


def command(place: Path, out: Path, *more: str, family: str = "t5") -> list[str]:
    data = ["--train", str(place / "train.jsonl"), "--test", str(place / "test.jsonl"), "--device", "cpu", "--quiet"]
    sizes = ["--seeds", "2", "--instances", str(N_TEST // 2), "--length", str(LENGTH), "--rouge", "words"]
    return ["run", "text", *models(place, family), *data, *sizes, "--out", str(out), *more]


def finished(place: Path, out: Path, *more: str, family: str = "t5") -> Path:
    with redirect_stdout(StringIO()):
        assert cli.main(command(place, out, *more, family=family)) == 0
    return out


@pytest.fixture(scope="module")
def done(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from end to end. Nobody may change it."""
    return finished(place, tmp_path_factory.mktemp("done") / "run")


def results_in(folder: Path) -> dict[str, Any]:
    """All but seconds and the folder's name."""
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    del found["provenance"]["seconds"], found["provenance"]["command"]
    return found


def labels_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "labels").glob("*.safetensors"))}


def documents_in(path: Path) -> list[Document]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Document(str(number), row["document"], row["summary"]) for number, row in enumerate(rows)]


def written_by_itself(folder: Path, family: str, documents: Sequence[Document], suffix: str = "") -> list[str]:
    """What `generate` of the checkpoint writes, one document at a time."""
    import transformers as hf

    kind = hf.AutoModelForSeq2SeqLM if family == "t5" else hf.AutoModelForCausalLM
    network, reader = kind.from_pretrained(folder).eval(), hf.AutoTokenizer.from_pretrained(folder)
    texts = []
    for one in documents:
        ids = reader(one.document + suffix, return_tensors="pt")["input_ids"]
        ids = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
        texts.append(reader.decode(ids[0, 0 if family == "t5" else -LENGTH :], skip_special_tokens=True))
    return texts


def test_every_method_is_in_the_results_and_in_the_report(done: Path) -> None:
    results = load_results(done)
    assert set(results.summary) == set(GRANULARITY)
    assert [set(seed.methods) for seed in results.seeds] == [set(GRANULARITY)] * 2
    assert results.task == "text"
    assert results.units.loss == "100 x (1 - ROUGE-1)"
    report = (done / "report.html").read_text()
    for name in GRANULARITY:
        assert name in report


def test_the_report_shows_coloured_tokens_and_the_reference(done: Path, place: Path) -> None:
    report = (done / "report.html").read_text()
    first = torch.randperm(N_TEST, generator=torch.Generator().manual_seed(0))[:3].tolist()
    for row in first:
        one = documents_in(place / "test.jsonl")[row]
        assert one.document in report
        assert f">{one.summary}<" in report
    assert report.count('class="tokens-example"') == 3
    assert 'class="tokens-expert">' in report
    assert 'class="tokens-predictor">' in report
    assert f"{END_SIGN} the end of a text" in report
    assert "by the expert" in report


def test_the_ends_of_the_curves_are_the_models_alone(done: Path, place: Path) -> None:
    """As `generate` of transformers writes and rouge-score counts; both seeds together see all documents."""
    documents = documents_in(place / "test.jsonl")
    for end, name in enumerate(("predictor", "expert")):
        texts = written_by_itself(place / "t5" / name, "t5", documents)
        expected = package_scores(texts, [one.summary for one in documents])
        for method in ("Random", "ChowMean", "OneTimeModel", "TokenwiseModel", "TokenwiseEntropy"):
            found = [seed.methods[method].curve[-end][1] for seed in load_results(done).seeds]
            assert sum(found) / 2 == pytest.approx(sum(expected) / N_TEST, abs=1e-4)
    assert all(seed.methods["Random"].curve[0][0] == 0 for seed in load_results(done).seeds)


def test_the_oracles_are_at_least_as_good_as_everything(done: Path) -> None:
    for seed in load_results(done).seeds:
        best = seed.methods["OptimalToken"]
        assert best.audc <= min(one.audc for one in seed.methods.values())
        assert seed.methods["OptimalOneTime"].audc <= min(
            one.audc for name, one in seed.methods.items() if GRANULARITY[name] != "token"
        )
        for one in seed.methods.values():
            for deferred, loss in one.curve:
                assert at(best.curve, deferred) <= loss + 1e-4


def at(curve: Sequence[tuple[float, float]], deferred: float) -> float:
    """The loss of a curve there."""
    left = max((point for point in curve if point[0] <= deferred), default=curve[0])
    right = min((point for point in curve if point[0] >= deferred), default=curve[-1])
    if right[0] == left[0]:
        return min(left[1], right[1])
    return left[1] + (right[1] - left[1]) * (deferred - left[0]) / (right[0] - left[0])


def test_notes_and_provenance(done: Path, place: Path) -> None:
    results = load_results(done)
    assert any("OptimalToken is the best found by a beam" in note and "a bound" in note for note in results.notes)
    provenance = results.provenance
    assert provenance.expert_calls.made > N_TRAIN
    assert provenance.expert_calls.saved > 0
    assert provenance.models["predictor"].startswith(f"{place / 't5' / 'predictor'} (")
    assert "20 documents of train.jsonl" in provenance.data["data"]
    assert provenance.data["documents"] == "train 16, validation 4, test 12"
    assert provenance.settings["task"]["shown"] == "facts"
    assert provenance.settings["rollouts"] == 8


def test_the_same_command_again_asks_only_what_is_not_stored(done: Path, place: Path, tmp_path: Path, spy: Spy) -> None:
    shutil.copytree(done, tmp_path / "run")
    fits = [spy(experiment, f"fit_{name}") for name in ("whole", "once", "cost", "token")]
    labelled, explored = spy(labels, "branch_out"), spy(exploration, "_explored")
    asked = spy(TextExpert, "start")
    finished(place, tmp_path / "run")
    assert (labelled, explored, fits) == ([], [], [[], [], [], []])
    documents = {one for _, examples in asked for one in examples.ids.tolist()}
    assert documents <= set(range(16))  # the expert is not asked about what rejectors learn from
    assert results_in(tmp_path / "run") == results_in(done)
    assert labels_in(tmp_path / "run") == labels_in(done)


KILLED = """
import os, signal, sys
from seqdefer import cli, store
left, replace = 3, os.replace
def killed(aside, path):
    global left
    left -= "labels" in str(path)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(aside, path)
store.os.replace = killed
cli.main(sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of this kind are not there")
def test_a_killed_run_goes_on(done: Path, place: Path, tmp_path: Path, spy: Spy) -> None:
    """No warning, no clean-up: what was finished is whole, and the rest is made as if nothing had been."""
    folder = tmp_path / "run"
    start = [sys.executable, "-c", KILLED, *command(place, folder)]
    assert subprocess.run(start, capture_output=True, check=False).returncode == -signal.SIGKILL
    kept = labels_in(folder)
    assert 0 < len(kept) < len(labels_in(done))
    assert not (folder / "results.json").exists()
    explored = spy(exploration, "_explored")
    finished(place, folder)
    assert len(explored) == 2
    assert labels_in(folder) == labels_in(done)
    assert kept.items() <= labels_in(folder).items()
    assert results_in(folder) == results_in(done)


def test_decoder_only_models_from_end_to_end(place: Path, tmp_path: Path) -> None:
    more = ["--suffix", " w7 w8", "--methods", "ChowMean,TokenwiseScore", "--rouge", "ids", "--token-loss", "paper"]
    results = load_results(finished(place, tmp_path / "run", *more, "--shown", "states", family="gpt2"))
    documents = documents_in(place / "test.jsonl")
    assert results.units.loss == "100 x (1 - ROUGE-1 on token ids)"
    for end, name in enumerate(("predictor", "expert")):
        model = text_model(tiny("gpt2", *((1, 1) if name == "predictor" else (2, 6))), tiny_tokenizer())
        inputs, _ = encode(tiny_tokenizer(), [one.document for one in documents], "", 40, suffix=" w7 w8")
        wanted = [tiny_tokenizer()(one.summary)["input_ids"] for one in documents]
        losses = map(id_score, generated(model, inputs, LENGTH), wanted)
        found = [seed.methods["Random"].curve[-end][1] for seed in results.seeds]
        assert sum(found) / 2 == pytest.approx(sum(losses) / N_TEST, abs=1e-4)


@pytest.mark.parametrize("more", [["--length", "1"], ["--length", "4", "--dtype", "bfloat16", "--shown", "both"]])
def test_short_sequences_from_end_to_end(more: list[str], place: Path, tmp_path: Path) -> None:
    """Enumerated: the oracle is exact."""
    methods = ["--methods", "ChowMean,TokenwiseScore"]
    results = load_results(finished(place, tmp_path / "run", *more, *methods))
    assert not any("a bound" in note for note in results.notes)
    for seed in results.seeds:
        assert seed.methods["OptimalToken"].audc <= min(one.audc for one in seed.methods.values())


def test_one_file_is_dealt_into_three_parts(place: Path, tmp_path: Path) -> None:
    arguments = command(place, tmp_path / "run", "--methods", "ChowMean", "--instances", "2", "--length", "3")
    where = arguments.index("--test")
    with redirect_stdout(StringIO()):
        assert cli.main([*arguments[:where], *arguments[where + 2 :]]) == 0
    parts = load_results(tmp_path / "run").provenance.data["documents"]
    assert parts == "train 10, validation 2, test 8"


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
    assert task_of(pair, documents).is_papers
    assert not task_of(pair, documents, length=14).is_papers


@pytest.mark.parametrize(("free", "most"), [(2**40, 2**33), (2**34, 2**31)])
def test_encodings_leave_a_gpu_room(free: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They once took 8 GiB for each model, of a GPU that might not have them; batches were then halved in vain."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    assert _remembered(torch.device("cuda")) == most
    assert _remembered(torch.device("cpu")) == 2**30


# -- bad input -----------------------------------------------------------------------------------------------------


def refused(capsys: Capture, *arguments: str | Path) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err.removeprefix("seqdefer: ").rstrip("\n")


def test_checkpoints_that_are_no_pair(place: Path, tmp_path: Path, capsys: Capture) -> None:
    import transformers as hf

    other = tmp_path / "other"
    shutil.copytree(place / "t5" / "expert", other)
    spelling = json.loads((other / "tokenizer.json").read_text())
    spelling["model"]["vocab"]["x7"] = spelling["model"]["vocab"].pop("w7")
    (other / "tokenizer.json").write_text(json.dumps(spelling))
    said = refused(capsys, *command(place, tmp_path / "run", "--expert", str(other)))
    assert "the pair shares no vocabulary: id 7 is 'w7' for the predictor and 'x7' for the expert" in said
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    hf.BertForMaskedLM(hf.BertConfig(vocab_size=60, **sizes)).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    said = refused(capsys, *command(place, tmp_path / "run", "--predictor", str(tmp_path / "bert")))
    assert "is a BertForMaskedLM, which does not write sequences; take one like T5, BART or GPT-2" in said
    assert not (tmp_path / "run").exists()


def test_what_must_be_named(place: Path, tmp_path: Path, capsys: Capture) -> None:
    out, data, pair = ["--out", str(tmp_path / "run")], ["--train", str(place / "train.jsonl")], models(place)
    assert refused(capsys, "run", "text", *data, *out) == "--predictor is missing: name a model"
    assert refused(capsys, "run", "text", *data, *pair[:2], *out) == "--expert is missing: name a model"
    assert refused(capsys, "run", "text", *pair, *out) == "--train is missing: name the documents"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{no JSON", "bad.jsonl, line 3: not JSON ("),
        ('{"document": "w5"}', "bad.jsonl, line 3: there is no 'summary'; the fields are: 'document'"),
        (
            '{"document": " ", "summary": "w5"}',
            "bad.jsonl, line 3: 'document' is empty; fill it in, or remove the line",
        ),
        ('{"document": "w5", "summary": ""}', "bad.jsonl, line 3: 'summary' is empty; fill it in, or remove the line"),
        ('{"document": 5, "summary": "w5"}', "bad.jsonl, line 3: 'document' is a number, not a text"),
    ],
)
def test_lines_that_cannot_be_used(line: str, message: str, place: Path, tmp_path: Path, capsys: Capture) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", random_documents(2))
    bad.write_text(bad.read_text() + line + "\n")
    for option in ("--train", "--test"):
        assert message in refused(capsys, *command(place, tmp_path / "run", option, str(bad)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rouge", "2"], "unknown way to count ROUGE '2'; available: ids, words"),
        (["--shown", "all"], "unknown choice of what rejectors see 'all'; available: both, facts, states"),
        (["--token-loss", "0/1"], "unknown token loss '0/1'; available: clipped, paper"),
        (["--dtype", "int4"], "unknown dtype 'int4'; available: bfloat16, float16, float32"),
        (["--rollouts", "1"], "--rollouts is 1; it must be at least 2"),
        (["--length", "0"], "--length is 0; it must be at least 1"),
        (["--max-words", "0"], "summaries of at most 0 words were asked for; it must be at least 1"),
        (["--summary-field", "gist"], "there is no 'gist'; the fields are: 'document', 'summary'"),
        (["--train", "./nowhere.jsonl"], "cannot read nowhere.jsonl: No such file or directory; give a JSONL file"),
        (
            ["--instances", "7"],
            "the test split has 12 examples, 2 seeds x 7 instances need more; lower --seeds or --ins",
        ),
        (["--prefix", "w3 w4", "--input-tokens", "2"], "cut at 2 tokens, which leaves nothing of it beside prefix and"),
    ],
)
def test_choices_that_cannot_be(more: list[str], message: str, place: Path, tmp_path: Path, capsys: Capture) -> None:
    assert message in refused(capsys, *command(place, tmp_path / "run", *more))


def test_a_limit_of_words_that_leaves_nothing(place: Path, tmp_path: Path, capsys: Capture) -> None:
    wordy = write_lines(tmp_path / "wordy.jsonl", [replace(one, summary="w3 w4 w5") for one in random_documents(5)])
    arguments = command(place, tmp_path / "run", "--train", str(wordy), "--max-words", "2")
    assert refused(capsys, *arguments) == "wordy.jsonl has no summary of at most 2 words: allow more"


def test_long_documents_are_cut_and_it_is_said_once(place: Path, tmp_path: Path, recwarn: Any) -> None:
    finished(place, tmp_path / "run", "--input-tokens", "5", "--length", "2", "--methods", "ChowMean")
    told = [str(one.message) for one in recwarn if issubclass(one.category, CutWarning)]
    longer = sum(
        len(one.document.split()) > 5 for name in ("train", "test") for one in documents_in(place / f"{name}.jsonl")
    )
    assert told == [f"{longer} of 32 documents are longer than 5 tokens and were cut there"]
    assert f"{longer} cut at 5 tokens" in load_results(tmp_path / "run").provenance.data["data"]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("socket.getaddrinfo", unknown_host)
    monkeypatch.setattr("seqdefer.tasks.text.hub.getproxies", dict)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.mark.usefixtures("offline")
def test_without_a_network_models_of_the_hub_are_asked_for_as_files(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    data = ["--train", str(place / "train.jsonl"), "--test", str(place / "test.jsonl")]
    said = refused(capsys, "run", "xsum", *data, "--out", tmp_path / "run")
    assert said.startswith(
        "google/flan-t5-small is not in the cache of the Hub, and there is no network; give a folder"
    )
    assert "config.json, model.safetensors, and tokenizer.json" in said


@pytest.mark.usefixtures("offline")
def test_without_a_network_documents_of_the_hub_are_asked_for_as_files(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's client once tried for half a minute, and wrote of each attempt."""
    from huggingface_hub import constants

    class Datasets:
        __version__ = "4.0.0"

        @staticmethod
        def load_dataset(name: str, config: str | None, *, split: str) -> Any:
            assert constants.HF_HUB_OFFLINE, "it would be tried again and again"
            raise ConnectionError(f"Couldn't reach {name!r} on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    said = refused(capsys, "run", "xsum", "--out", tmp_path / "run")
    assert said.startswith(
        "cannot load the dataset EdinburghNLP/xsum/train: it is not in the cache of the Hub, and ther"
    )
    assert said.endswith(
        "give files instead: JSONL, plain or gzip, one object a line with the fields 'document' and 'summary'"
    )
    assert not constants.HF_HUB_OFFLINE


# -- memory --------------------------------------------------------------------------------------------------------


def failing_once(method: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Call number `at` of more than one row does not fit."""
    calls = 0

    def limited(first: Any, tokens: Tensor) -> Any:
        nonlocal calls
        calls += len(tokens) > 1
        if calls == at and len(tokens) > 1:
            calls += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return method(first, tokens)

    return limited


def label(task: TextTask, folder: Path) -> experiment.Labelled:
    return Experiment(task, ExperimentSettings(seeds=1, instances=1, rollouts=4), folder).splits.train


@pytest.mark.parametrize(
    ("writer", "name", "at"), [("predictor", "begin", 1), ("expert", "go_on", 1), ("expert", "go_on", 9)]
)
def test_a_batch_that_does_not_fit_loses_nothing(
    writer: str, name: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = random_documents(24)
    expected = label(task_of(pair_of("t5"), documents, length=LENGTH), tmp_path / "plain")
    task = task_of(pair_of("t5"), documents, length=LENGTH)
    network = getattr(task, writer).model.network
    monkeypatch.setattr(network, name, failing_once(getattr(network, name), at))
    with pytest.warns(SmallerBatchWarning, match="rows do not fit into the memory of the GPU; going on with"):
        found = label(task, tmp_path / "halved")
    assert torch.equal(found.table.loss, expected.table.loss)
    assert torch.equal(found.table.deferred, expected.table.deferred)
    assert found.trees is not None
    assert expected.trees is not None
    assert known(found.trees) == known(expected.trees)


def known(trees: DecisionTrees) -> dict[tuple[int, ...], list[Any]]:
    """Tokens and losses of every node, by its example and the tokens before it."""
    table, places = trees.nodes, list[tuple[int, ...]]()
    for node in range(table.size):
        parent = int(table.parent[node])
        choice = table.children[parent].tolist().index(node) if parent >= 0 else 0
        places.append(
            (*places[parent], int(table.tokens[parent, choice])) if parent >= 0 else (int(table.example[node]),)
        )
    return {
        place: [table.tokens[node].tolist(), table.losses[node].tolist(), (table.children[node] == UNKNOWN).tolist()]
        for node, place in enumerate(places)
    }


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_labels_and_pictures_on_a_gpu_are_those_on_the_cpu(family: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    documents = random_documents(24)
    here = task_of(pair_of(family), documents, length=LENGTH)
    networks = [text_model(tiny(family, *sizes).cuda(), tiny_tokenizer(), family) for sizes in ((1, 1), (2, 6))]
    there = task_of(TextPair.of(*networks, "both"), documents, length=LENGTH)
    found, expected = label(there, tmp_path / "there"), label(here, tmp_path / "here")
    assert torch.equal(found.table.loss, expected.table.loss)
    assert found.trees is not None
    assert expected.trees is not None
    assert known(found.trees) == known(expected.trees)
    kept = HandOff(torch.full((8,), 3))
    pictures = [
        task.draw(task.split("test"), {0.5: roll_out(task.predictor, task.expert, task.split("test"), kept, task.spec)})
        for task in (here, there)
    ]
    assert pictures[0] == pictures[1]


# -- the real pair -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def news(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TextTask:
    """Six short documents for the real pair, two in each part."""
    from seqdefer.tasks.text.data import read_corpus

    pair = load_pair(*unpacked(shared_dir, tmp_path_factory.mktemp("pair")), remember=2**26, shown="both")
    documents = read_corpus(shared_dir / "data" / "xsum" / "xsum_test.jsonl.gz").documents[:6]
    with pytest.warns(CutWarning):
        return task_of(pair, documents, prefix="summarize: ", input_tokens=64, length=20)


def everyone(task: TextTask) -> Examples:
    parts = [task.split(name) for name in ("train", "validation", "test")]
    return Examples(*(torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "targets", "ids")))


def test_the_real_pair_alone_is_generate(news: TextTask) -> None:
    examples = everyone(news)
    for kept, writer in ((20, news.predictor), (0, news.expert)):
        model: TextModel = writer.model
        rollout = roll_out(news.predictor, news.expert, examples, HandOff(torch.full((6,), kept)), news.spec)
        assert rows_of(rollout.sequences) == generated(model, examples.inputs, 20)
        texts = [model.decode(torch.tensor(row)) for row in rows_of(rollout.sequences)]
        expected = package_scores(texts, [news.documents[place].summary for place in examples.ids.tolist()])
        torch.testing.assert_close(
            news.sequence_loss(examples, rollout.sequences), torch.tensor(expected), rtol=0, atol=1e-4
        )


def test_branches_of_the_real_pair_are_completions(news: TextTask) -> None:
    examples = everyone(news).select(torch.arange(3))
    drafted = draft(news.predictor, examples, news.spec)
    short, calls = hand_off_table(news, examples, drafted)
    plain, naive = hand_off_table(news, examples, drafted, shortcut=False)
    assert torch.equal(short.loss, plain.loss)
    assert torch.equal(short.deferred, plain.deferred)
    assert calls.made < naive.made / 1.5


def test_explored_trees_of_the_real_pair_hold_what_the_engine_meets(news: TextTask) -> None:
    examples = news.split("test")
    trees = explore_trees(news, examples, 3)
    for leaf in (trees.nodes.children[: trees.nodes.size] == END).any(1).nonzero().squeeze(1).tolist()[::2]:
        row, path = int(trees.nodes.example[leaf]), path_to(trees, leaf)
        pattern = torch.zeros(1, 20, dtype=torch.bool)
        pattern[0, : len(path)] = torch.tensor([defer for _, defer in path])
        one = examples.select(torch.tensor([row]))
        steps = interleave(news.predictor, news.expert, one, Decided(pattern), news.spec)
        for (node, defer), step in zip(path, steps, strict=False):
            kept = trees.proposal(torch.tensor([node]))
            assert torch.equal(step.proposal.tokens, kept.tokens)
            torch.testing.assert_close(step.proposal.features, kept.features, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(step.proposal.uncertainty, kept.uncertainty, rtol=1e-3, atol=1e-3)
            assert int(step.tokens) == int(trees.nodes.tokens[node, int(defer)])


def path_to(trees: DecisionTrees, leaf: int) -> list[tuple[int, bool]]:
    """The nodes from the root to `leaf`, and the decisions taken there; at the leaf, the one that ends it."""
    children, path = trees.nodes.children, [(leaf, bool(trees.nodes.children[leaf, 0] != END))]
    node = leaf
    while (parent := int(trees.nodes.parent[node])) >= 0:
        path.append((parent, bool(children[parent, 0] != node)))
        node = parent
    return path[::-1]


def test_own_documents_for_xsum_are_reported_on_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the Hub, which are the default."""
    asked: list[TextOptions] = []
    monkeypatch.setattr("seqdefer.tasks.text.task.prepare", lambda _, options, *rest: asked.append(options))
    usual = XSUM.presets["paper"]
    for options in (usual, replace(usual, train="own.jsonl"), replace(usual, train="own.jsonl", test="later.jsonl")):
        XSUM.prepare(options, place, torch.device("cpu"), Silent())
    assert [one.test for one in asked] == [usual.test, None, "later.jsonl"]
