"""The door in Python: from two models and data to a fitted model, in lines that a Hugging Face user would guess."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import seqdefer
from seqdefer import DeferringModel, Metric, cli
from seqdefer.errors import CheckpointError, DataError, OptionError
from seqdefer.evaluation.settings import choose_settings
from seqdefer.model import calibrated_pair, deferring_model
from seqdefer.progress import Silent
from seqdefer.registry import load_task
from seqdefer.storage.files import read_json
from seqdefer.tasks.text.codec import TextCodec
from seqdefer.tasks.text.task import PromptWarning

pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import random_documents, tiny, tokenizer, write_lines

pytestmark = pytest.mark.usefixtures("one_thread", "one_timed_budget")
DOCUMENTS = random_documents(30)
PAIRS = [(one.document, one.summary) for one in DOCUMENTS]
TEXTS = [one.document for one in random_documents(12, seed=9)]


def loaded(family: str = "t5", **options: Any) -> DeferringModel:
    pair = tiny(family, 1, 1), tiny(family, 2, 6)
    return DeferringModel.from_pair(*pair, tokenizer(), device="cpu", **options)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair on disk. Nobody may change it."""
    folder = tmp_path_factory.mktemp("pair")
    for name, (n_layers, seed) in {"predictor": (1, 1), "expert": (2, 6)}.items():
        tiny("t5", n_layers, seed).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    write_lines(folder / "train.jsonl", DOCUMENTS)
    return folder


@pytest.fixture(scope="module", params=["t5", "gpt2"])
def model(request: pytest.FixtureRequest) -> DeferringModel:
    """A fitted model of each kind. Nobody may change it."""
    return loaded(request.param, suffix=" w1" if request.param == "gpt2" else "").fit(PAIRS, progress=False)


def test_the_eight_lines(model: DeferringModel, tmp_path: Path) -> None:
    """Each line but those about the Hub, which are in test_hub.py."""
    found = model.calibrate(TEXTS, progress=False)
    assert found.inputs == len(TEXTS)
    written = model.generate(TEXTS, budget=0.2)
    assert len(written.outputs) == len(TEXTS)
    assert 0 < written.share < 0.5
    model.save_pretrained(tmp_path / "mine", bundle=True)
    again = DeferringModel.from_pretrained(tmp_path / "mine", device="cpu")
    assert again.generate(TEXTS, budget=0.2).outputs == written.outputs
    assert again.calibration == found


def test_the_door_and_the_command_line_are_one(checkpoints: Path, tmp_path: Path) -> None:
    """Names and a file, loaded models and a list, and the command: the same rejector, budgets and curve."""
    pair = [str(checkpoints / name) for name in ("predictor", "expert")]
    command = ["fit", "text", "--predictor", pair[0], "--expert", pair[1], "--train", str(checkpoints / "train.jsonl")]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert cli.main([*command, "--device", "cpu", "--quiet", "--out", str(tmp_path / "cli")]) == 0
    by_name = DeferringModel.from_pair(*pair, device="cpu")
    talk = StringIO()
    with redirect_stderr(talk):
        by_name.fit(checkpoints / "train.jsonl", folder=tmp_path / "names")
    assert "what budgets buy and what they take" in talk.getvalue()
    assert f"on {len(PAIRS)} inputs for training and validation" in talk.getvalue()  # all of them
    assert "inputs only: by 95 % of resamples, a budget of 0.2 spends" in talk.getvalue()
    loaded().fit(PAIRS, folder=tmp_path / "objects", progress=False)
    for other in ("names", "objects"):
        for record in ("rejector/config.json", "curve.json", "learned_from.json"):
            assert read_json(tmp_path / other / record) == read_json(tmp_path / "cli" / record), record
        found, expected = (read_json(tmp_path / name / "calibration.json")["settings"] for name in (other, "cli"))
        for one, its in zip(found, expected, strict=True):  # passes of other sizes round scores differently
            assert one == {**its, "threshold": pytest.approx(its["threshold"], rel=1e-5)}
    options = read_json(tmp_path / "names" / "deferral.json")["options"]
    assert options == read_json(tmp_path / "cli" / "deferral.json")["options"]
    assert options["length"] == max(len(reference.split()) for _, reference in PAIRS) + 1  # with the end token


def test_a_model_is_not_replaced_by_accident(checkpoints: Path, tmp_path: Path) -> None:
    """`fit` used to overwrite a model that was fitted another way without a word."""
    pair = [str(checkpoints / name) for name in ("predictor", "expert")]
    data, out = str(checkpoints / "train.jsonl"), tmp_path / "mine"
    model = DeferringModel.from_pair(*pair, device="cpu")
    talk = StringIO()
    with redirect_stderr(talk):
        model.fit(data, folder=out, method="TokenwiseScore", progress=False)
    assert not talk.getvalue()
    before = read_json(out / "deferral.json")
    model.fit(data, folder=out, method="TokenwiseScore", progress=False)  # the same fit may run again
    with pytest.raises(OptionError, match=r"holds a model that was fitted another way \(recipe ours, .*--replace"):
        model.fit(data, folder=out, method="TokenwiseEntropy", progress=False)
    assert read_json(out / "deferral.json") == before
    model.fit(data, folder=out, method="TokenwiseEntropy", replace=True, progress=False)
    assert read_json(out / "deferral.json")["request"] != before["request"]


def test_defaults_have_one_home() -> None:
    entry = load_task("text")
    assert choose_settings(entry, {})[1].token.architecture == "mlp"
    signature = inspect.signature(DeferringModel.fit)
    assert signature.parameters["preset"].default == "quick"


def as_dataset(rows: list[dict[str, str]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


def as_frame(rows: list[dict[str, str]]) -> Any:
    return pytest.importorskip("pandas").DataFrame(rows)


@pytest.mark.parametrize("convert", [as_dataset, as_frame, list, iter])
def test_data_of_every_kind_is_the_same(convert: Any, checkpoints: Path, tmp_path: Path) -> None:
    from seqdefer.tasks.text.data import Fields, read_corpus
    from seqdefer.tasks.text.given import Given

    rows = [{"question": document, "answer": reference} for document, reference in PAIRS]
    found = Given(train=convert(rows)).corpus(Fields("question", "answer"))
    assert found.fingerprint == read_corpus(checkpoints / "train.jsonl").fingerprint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": PAIRS}, r"the data is a dict of train; give one of its parts, such as data\['train'\]"),
        ([{"text": "a", "summary": "b"}], "row 1: there is no 'document'; the fields are: 'text', 'summary'; choose"),
        ([("a", "b", "c")], "row 1 is .*; give a dictionary, or a pair"),
        ([("a", " ")], "row 1: 'summary' is empty"),
        (7.0, None),
        (object(), "cannot read data of type object; give a datasets.Dataset"),
    ],
)
def test_data_that_cannot_be_read(data: Any, message: str | None) -> None:
    with pytest.raises((DataError, OptionError), match=message):
        loaded().fit(data, progress=False)


def test_what_can_go_wrong() -> None:
    unfitted = loaded()
    assert repr(unfitted) == (
        "DeferringModel(T5ForConditionalGeneration -> T5ForConditionalGeneration, not fitted: call fit(data))"
    )
    for use in (lambda: unfitted.generate(TEXTS), lambda: unfitted.calibrate(TEXTS), lambda: unfitted.served):
        with pytest.raises(OptionError, match=r"not fitted yet; fit it: model.fit\(data\)"):
            use()
    with pytest.raises(OptionError, match=r"unknown option 'lenght'; available: .*length"):
        loaded(lenght=3)
    with pytest.raises(OptionError, match="--length is 0"):
        loaded(length=0)
    with pytest.raises(OptionError, match="both models are names"):
        DeferringModel.from_pair("small", "large", tokenizer())
    with pytest.raises(OptionError, match=r"the predictor is a loaded T5.* without a name; give its tokenizer"):
        DeferringModel.from_pair(tiny("t5", 1, 1), tiny("t5", 2, 6), device="cpu").fit(PAIRS, progress=False)
    with pytest.raises(OptionError, match="not made by from_pair"):
        DeferringModel().fit(PAIRS)


# -- metrics of one's own ------------------------------------------------------------------------------------------


def test_a_function_is_what_is_learned_and_reported(tmp_path: Path) -> None:
    seen: list[tuple[str, str, str]] = []

    def last_word(prediction: str, reference: str, text: str) -> float:
        seen.append((prediction, reference, text))
        return float(prediction.split()[-1:] == text.split()[-1:])

    model = loaded(length=4).fit(PAIRS, metric=last_word, folder=tmp_path, progress=False)
    assert model.curve is not None
    assert model.curve.unit == "100 x (1 - last_word)"
    assert {(text, reference) for _, reference, text in seen} <= set(PAIRS)
    assert read_json(tmp_path / "deferral.json")["options"]["metric"] == "function:last_word"
    alone = model.generate([text for text, _ in PAIRS], threshold=float("inf")).outputs
    assert set(alone) & {prediction for prediction, _, _ in seen}
    # Another function in the same folder is another fit, whatever its name.
    first = model.rejector.fingerprint
    other = loaded(length=4).fit(PAIRS, metric=Metric(lambda *_: 1.0, "last_word"), folder=tmp_path, progress=False)
    assert other.rejector.fingerprint != first
    assert other.curve is not None
    assert {point.loss for point in other.curve.points} == {0.0}
    DeferringModel.from_pretrained(tmp_path, predictor=tiny("t5", 1, 1), expert=tiny("t5", 2, 6), tokenizer=tokenizer())


def test_metrics_that_make_no_sense() -> None:
    with pytest.raises(OptionError, match=r"unknown --metric 'rouge'; available: .*chrf.*rouge1"):
        loaded().fit(PAIRS, metric="rouge")
    with pytest.raises(DataError, match=r"metric 'many' is 37.0 .*between 0 and 1: say Metric\(function, best=...\)"):
        loaded(length=4).fit(PAIRS, metric=Metric(lambda *_: 37.0, "many"), progress=False)


def test_a_metric_of_ones_own_compares_texts_without_the_space_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most decoder-only models begin with a space: `prediction == reference` was false for the best of experts."""
    decode, seen = TextCodec.decode, list[tuple[str, str]]()
    monkeypatch.setattr(TextCodec, "decode", lambda self, tokens: f" {decode(self, tokens)}")

    def same(prediction: str, reference: str, text: str) -> float:
        seen.append((prediction, reference))
        return float(prediction == reference)

    pairs = [(text, f"{reference} ") for text, reference in PAIRS]
    loaded("gpt2", suffix=" w1", length=4).fit(pairs, metric=same, progress=False)
    assert seen
    assert all(text == text.strip() for texts in seen for text in texts)


def test_a_decoder_only_model_without_a_suffix_is_warned_of() -> None:
    """It continued the documents, and the fit said nothing. Documents that end the prompt themselves need no suffix."""

    def fit(ending: str) -> DeferringModel:
        pairs = [(text + ending, reference) for text, reference in PAIRS]
        return loaded("gpt2", length=2).fit(pairs, method="ChowSum", train_documents=4, progress=False)

    with pytest.warns(
        PromptWarning, match=r"GPT2LMHeadModel is decoder-only .*--suffix ' TL;DR:' \(suffix= in Python\)"
    ):
        fit("")
    fit(" w7 w8")


def test_objects_of_the_wrong_kind_are_named(checkpoints: Path, model: DeferringModel, tmp_path: Path) -> None:
    """These ended in an AttributeError or a TypeError, some of them after the models were loaded."""
    small, large = tiny("t5", 1, 1), tiny("t5", 2, 6)
    for pair in ((small.state_dict(), large, tokenizer()), (tokenizer(), small, large)):
        with pytest.raises(
            OptionError, match=r"the predictor is a .*, not a loaded model; give a model of transformers"
        ):
            DeferringModel.from_pair(*pair)
    with pytest.raises(OptionError, match=r"tokenizer is 'somewhere'; give a loaded one"):
        DeferringModel.from_pair(small, large, "somewhere")
    with pytest.raises(OptionError, match="suffix is 3, of type int; give a text"):
        loaded(suffix=3)
    with pytest.raises(OptionError, match="--length is '20'; give a number"):
        loaded(length="20")
    with pytest.raises(OptionError, match=r"cap is 20; give a Cap, such as Cap\(tokens=20\)"):
        model.generate(TEXTS[:1], cap=20)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="not fitted yet"):
        loaded().save_pretrained(tmp_path / "unfitted")
    assert not (tmp_path / "unfitted").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_models_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"cannot write into .*file.*; choose another folder with folder="):
        DeferringModel.from_pair("nowhere/small", "nowhere/large").fit(PAIRS, folder=tmp_path / "file", progress=False)


def test_a_folder_without_a_tokenizer_says_so(checkpoints: Path, tmp_path: Path) -> None:
    """The message was about sentencepiece and tiktoken."""
    tiny("t5", 1, 1).save_pretrained(tmp_path / "bare")
    model = DeferringModel.from_pair(tmp_path / "bare", checkpoints / "expert", device="cpu")
    with pytest.raises(
        CheckpointError, match=r"bare holds no tokenizer; save it there, too: tokenizer.save_pretrained"
    ):
        model.fit(PAIRS, progress=False)


# -- folders that travel -------------------------------------------------------------------------------------------


def test_a_moved_pair_is_pointed_at_anew(checkpoints: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    for name, (n_layers, seed) in {"predictor": (1, 1), "expert": (2, 6)}.items():
        tiny("t5", n_layers, seed).save_pretrained(here / name)
        tokenizer().save_pretrained(here / name)
    model = DeferringModel.from_pair(here / "predictor", here / "expert", device="cpu")
    model.fit(PAIRS, folder=tmp_path / "model", length=5, progress=False)
    here.rename(tmp_path / "there")
    with pytest.raises(OptionError, match=r"the predictor .*here.*, which is not there; say where it is: --predictor"):
        DeferringModel.from_pretrained(tmp_path / "model")
    pair = {name: tmp_path / "there" / name for name in ("predictor", "expert")}
    moved = DeferringModel.from_pretrained(tmp_path / "model", **pair)
    assert moved.generate(TEXTS).outputs == model.generate(TEXTS).outputs
    with pytest.raises(CheckpointError, match=r"fitted with expert .*say where it is: --expert of"):
        DeferringModel.from_pretrained(tmp_path / "model", **{**pair, "expert": pair["predictor"]})
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
        named = [f"--{name}={folder}" for name, folder in pair.items()]
        assert cli.main(["generate", str(tmp_path / "model"), TEXTS[0], "--json", "--quiet", *named]) == 0
    assert json.loads(out.getvalue())["output"] == model.generate(TEXTS[:1]).outputs[0]


def test_a_bundle_needs_nothing_else(tmp_path: Path) -> None:
    model = loaded(length=5).fit(PAIRS, folder=tmp_path / "fitted", progress=False)
    with pytest.raises(OptionError, match="--predictor is missing"):  # loaded models have no name to be found by
        DeferringModel.from_pretrained(tmp_path / "fitted")
    model.save_pretrained(tmp_path / "bundle", bundle=True)
    (tmp_path / "bundle").rename(tmp_path / "moved")
    moved = DeferringModel.from_pretrained(tmp_path / "moved")
    moved.save_pretrained(tmp_path / "moved")  # in place: still a bundle
    (tmp_path / "moved").rename(tmp_path / "again")
    again = DeferringModel.from_pretrained(tmp_path / "again")
    assert again.generate(TEXTS).outputs == model.generate(TEXTS).outputs


# -- what people see -----------------------------------------------------------------------------------------------


def test_progress_is_shown_unless_it_is_not_wanted(model: DeferringModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []

    class Recorder:
        @contextmanager
        def stage(self, name: str, total: int) -> Iterator[Any]:
            stages.append(name)
            yield lambda steps: None

    @contextmanager
    def show(*, quiet: bool) -> Iterator[Any]:
        yield Silent() if quiet else Recorder()

    for module in (calibrated_pair, deferring_model):
        monkeypatch.setattr(module, "show_progress", show)
    model.calibrate(TEXTS, progress=False)
    assert not stages
    model.calibrate(TEXTS)
    assert stages == ["calibrate budgets"]
    loaded(length=3).fit(PAIRS, metric="exact_match")
    assert {"read the documents", "load the models", "fit TokenwiseModel (seed 0)", "time budgets"} <= set(stages)


def test_signatures_have_no_lambdas() -> None:
    for name in seqdefer.__all__:
        thing = getattr(seqdefer, name)
        members = [thing, *vars(thing).values()] if inspect.isclass(thing) else [thing]
        for one in members:
            if inspect.isfunction(one) or inspect.isclass(one):
                with_defaults = str(inspect.signature(one)) if inspect.isfunction(one) else ""
                assert "lambda" not in with_defaults, f"{name}: {with_defaults}"


def test_models_and_outputs_say_what_they_are(model: DeferringModel) -> None:
    assert repr(model).startswith("DeferringModel(")
    assert "TokenwiseModel, budgets from" in repr(model)
    assert "<svg" in model._repr_html_()
    written = model.generate(TEXTS, budget=0.2)
    lines = repr(written).splitlines()
    assert lines[0] == (
        f"Generation(12 outputs, {sum(written.expert_tokens)} of {int(written.sequences.lengths.sum())} "
        "tokens by the expert)"
    )
    assert len(lines) == 13
    assert written._repr_html_().count("underline") == sum(written.expert_tokens) + 1  # one in the legend


@pytest.mark.filterwarnings("ignore::seqdefer.model.calibrated_pair.BudgetWarning")  # two inputs measure little
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/your-own-pair.md, with tiny models in the folders that it names."""
    from doc_pages import ROOT, run_blocks

    monkeypatch.chdir(tmp_path)
    for name, (n_layers, seed) in {"small": (1, 1), "large": (2, 6)}.items():
        tiny("t5", n_layers, seed).save_pretrained(tmp_path / "models" / name)
        tokenizer().save_pretrained(tmp_path / "models" / name)
    write_lines(tmp_path / "news.jsonl", DOCUMENTS)
    names = run_blocks(ROOT / "docs" / "your-own-pair.md")
    model: DeferringModel = names["model"]
    assert model.curve is not None
    assert model.curve.unit == "100 x (1 - ends_alike)"
    assert model.generate(names["texts"], budget=0.2).outputs == names["written"].outputs


def test_the_real_pair(shared_dir: Path, tmp_path: Path) -> None:
    """A real T5 pair through the door, on a few documents."""
    import gzip
    import runpy

    script = shared_dir / "models" / "unpack.py"
    if not script.is_file():
        pytest.skip("needs the pair in shared/models")
    unpack = runpy.run_path(str(script))["unpack"]
    for name in ("predictor", "expert"):
        unpack(script.parent / "xsum-t5" / name, tmp_path / name)
    with gzip.open(shared_dir / "data" / "xsum" / "xsum_test.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(16), strict=False)]
    model = DeferringModel.from_pair(
        tmp_path / "predictor", tmp_path / "expert", prefix="summarize: ", input_tokens=32, length=4, device="cpu"
    )
    with pytest.warns(UserWarning, match="truncated"):
        model.fit(rows, metric="rougeL", progress=False)
    with pytest.warns(UserWarning, match="truncated"):
        written = model.generate([row["document"] for row in rows[:2]], budget=0.5)
    assert all(written.outputs)


def test_frames_with_gaps_say_where() -> None:
    from seqdefer.tasks.text.data import Fields
    from seqdefer.tasks.text.given import Given

    frame = pytest.importorskip("pandas").DataFrame
    gaps = frame([{"document": "a", "summary": "b"}, {"document": float("nan"), "summary": "c"}])
    with pytest.raises(DataError, match=r"row 2: 'document' is missing \(nan\), not a text"):
        Given(train=gaps).corpus(Fields())
    with pytest.raises(DataError, match="row 1: there is no 'document'; the fields are: '0', '1'"):
        Given(train=frame([["a", "b"]])).corpus(Fields())


def letter_tokenizer() -> Any:
    """A tokenizer that keeps all white space, as byte-level ones do."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "w0123456789 \n\t"
    names = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    tokens = Tokenizer(models.WordLevel({**names, **{one: 3 + n for n, one in enumerate(letters)}}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokens.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def test_white_space_does_not_make_inputs_of_a_fit_new() -> None:
    """Fits know documents that differ in white space alone for one, and guarantees took them for fresh ones."""
    shorts = [(" ".join(text.split()[:3]), reference) for text, reference in PAIRS]
    pair = tiny("gpt2", 1, 1), tiny("gpt2", 2, 6)
    model = DeferringModel.from_pair(*pair, letter_tokenizer(), device="cpu", length=4, input_tokens=40, suffix=" w")
    model.fit(shorts, progress=False)
    for change in (str, lambda text: f" {text}\n", lambda text: text.replace(" ", "  ")):
        texts = [change(text) for text, _ in shorts]
        with pytest.raises(OptionError, match=f"of {len(PAIRS)} inputs were used to fit this rejector"):
            model.calibrate(texts, guarantee="expected", progress=False)
