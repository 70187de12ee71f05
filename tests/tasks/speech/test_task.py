"""The speech task on tiny pairs: losses, the contract, and the commands."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'speech'")
pytest.importorskip("soundfile", reason="needs the extra 'speech'")

from text_runs import Capture, refused, unknown_host
from tiny_models import tiny
from tiny_models import tokenizer as words_tokenizer
from tiny_whisper import LENGTH, generated, save_place, tiny_speech_pair, tokenizer, write_corpus

from seqdefer import cli
from seqdefer.errors import DataError, InputError, OptionError
from seqdefer.evaluation.settings import choose_settings
from seqdefer.interfaces import SplitName
from seqdefer.progress import Silent
from seqdefer.tasks.speech.audio import read_clip, write_clip
from seqdefer.tasks.speech.data import Clip
from seqdefer.tasks.speech.options import SpeechOptions
from seqdefer.tasks.speech.task import ENTRY, SpeechTask, prepare
from seqdefer.testing import check_task
from seqdefer.types import Sequences

pytestmark = pytest.mark.usefixtures("one_thread", "one_timed_budget")
N_CLIPS = 24
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_place(tmp_path_factory.mktemp("speech"))
    write_corpus(folder, N_CLIPS)
    return folder


def options_of(place: Path, **more: Any) -> SpeechOptions:
    sizes = {"train_clips": 12, "validation_clips": 4, "test_clips": 8, "length": LENGTH}
    files = {"predictor": "predictor", "expert": "expert", "train": "manifest.jsonl"}
    given = {name: str(place / file) for name, file in files.items()}
    return SpeechOptions(**{**given, **sizes, **more})


@pytest.fixture(scope="module")
def task(place: Path, tmp_path_factory: pytest.TempPathFactory) -> SpeechTask:
    return prepare(options_of(place), tmp_path_factory.mktemp("run"), CPU, Silent())


def sequences_of(texts: list[list[int]]) -> Sequences:
    padded = [[*text, *[0] * (LENGTH - len(text))] for text in texts]
    return Sequences(torch.tensor(padded), torch.tensor([len(text) for text in texts]))


# -- losses ---------------------------------------------------------------------------------------------------------


def test_the_task_keeps_its_promises(task: SpeechTask) -> None:
    check_task(task)


@pytest.mark.parametrize("rate", ["words", "characters"])
def test_losses_are_error_rates(place: Path, tmp_path: Path, rate: str) -> None:
    """jiwer counts the same."""
    jiwer = pytest.importorskip("jiwer")
    task = prepare(options_of(place, error_rate=rate), tmp_path, CPU, Silent())
    examples = task.split("test")
    written = generated(task.expert.model, examples.inputs, LENGTH)
    losses = task.sequence_loss(examples, sequences_of(written)).tolist()
    count = jiwer.wer if rate == "words" else jiwer.cer
    for row, (place_of, loss) in enumerate(zip(examples.ids.tolist(), losses, strict=True)):
        text = tokenizer().decode(written[row], skip_special_tokens=True)
        expected = count(task.normalize(task.clips[place_of].text), task.normalize(text))
        assert loss == pytest.approx(100 * expected, rel=1e-5)
    assert task.loss_unit == f"{rate[:-1]} error rate, %"


def test_token_losses_add_up_to_the_edits_of_the_text(task: SpeechTask) -> None:
    examples = task.split("test")
    written = [row[: LENGTH - 1] for row in generated(task.predictor.model, examples.inputs, LENGTH)]
    written = [row if row[-1] == task.spec.end else [*row, task.spec.end] for row in written]
    total = torch.zeros(len(examples))
    for row, tokens in enumerate(written):
        only = examples.select(torch.tensor([row]))
        for n, token in enumerate(tokens):
            prefix = sequences_of([tokens]).truncate(torch.tensor([n]))
            total[row] += task.token_loss(only, prefix, torch.tensor([token]))[0]
    texts = [tokenizer().decode(row, skip_special_tokens=True) for row in written]
    assert torch.equal(total, task.alignments.whole(texts, examples.ids.tolist()).float())
    assert total.max() > 0


def test_tokens_of_languages_without_spaces_lose_characters(place: Path) -> None:
    """Regression: the error rate counted characters, and the token loss took the whole text for one word."""
    clips: dict[SplitName, list[Clip]] = {
        "train": [],
        "validation": [],
        "test": [Clip("1", place / "3.flac", "東京です", 1.0)],
    }
    task = SpeechTask(options_of(place, language="ja"), tiny_speech_pair(), clips)
    assert task.token_rule == "unavoidable edits in characters"
    assert task.alignments.whole(["東京だ"], [0]).tolist() == [2]


def test_spellings_come_with_the_expert_s_tokenizer(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: they were read from a folder, so models of the Hub had none."""
    spelling = {"colour": "color"}
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.english_spelling_normalizer", spelling, raising=False)
    task = prepare(options_of(place), tmp_path, CPU, Silent())
    assert task.normalize("Colour!") == "color"


def test_prefixes_may_have_no_columns(task: SpeechTask) -> None:
    examples = task.split("test")
    empty = Sequences(torch.zeros(len(examples), 0, dtype=torch.long), torch.zeros(len(examples), dtype=torch.long))
    assert task.token_loss(examples, empty, torch.full((len(examples),), 6)).shape == (len(examples),)


def test_synthetic_speech_is_called_so(place: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    manifest = write_corpus(tmp_path / "corpus", 12, synthetic=True)
    task = prepare(options_of(place, train=str(manifest)), tmp_path, CPU, Silent())
    assert task.loss_unit == "word error rate, %, synthetic speech"
    assert task.describe()["speech"].startswith("synthetic")
    assert "synthetic" in task.describe()["data"]


def test_clips_are_encoded_once(place: Path, tmp_path: Path) -> None:
    for n_encoded in (8, 0):  # the second run finds them on disk
        task = prepare(options_of(place), tmp_path, CPU, Silent())
        for _ in range(2):
            task.predictor.start(task.split("test").inputs)
        assert task.predictor.model.encoder_cache.n_encoded == n_encoded
    task = prepare(options_of(place, keep_states=False), tmp_path / "other", CPU, Silent())
    task.predictor.start(task.split("test").inputs)
    assert not (tmp_path / "other").exists()


# -- commands -------------------------------------------------------------------------------------------------------


def arguments(place: Path) -> list[str]:
    models = ["--predictor", str(place / "predictor"), "--expert", str(place / "expert")]
    sizes = ["--train-clips", "12", "--validation-clips", "4", "--length", str(LENGTH), "--device", "cpu", "--quiet"]
    return [*models, "--train", str(place / "manifest.jsonl"), *sizes]


def test_a_run_writes_a_report(place: Path, tmp_path: Path, capsys: Capture) -> None:
    more = ["--test-clips", "8", "--instances", "8", "--seeds", "1", "--no-timing", "--out", str(tmp_path / "run")]
    assert cli.main(["run", "speech", *arguments(place), *more]) == 0
    assert "TokenwiseModel" in capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["units"]["loss"] == "word error rate, %" or "word error rate" in json.dumps(results["units"])
    report = (tmp_path / "run" / "report.html").read_text()
    assert "∎" in report
    sounds = re.findall('<audio class="tokens-sound" controls="" src="data:audio/flac;base64,([^"]+)"></audio>', report)
    heard = {read_clip(base64.b64decode(sound)).tobytes() for sound in sounds}
    assert len(heard) == 3
    assert heard <= {read_clip(path).tobytes() for path in place.glob("*.flac")}


@pytest.fixture(scope="module")
def fitted(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted") / "model"
    assert cli.main(["fit", "speech", *arguments(place), "--method", "TokenwiseModel", "--out", str(folder)]) == 0
    return folder


def test_generate_writes_down_a_file(place: Path, fitted: Path, capsys: Capture) -> None:
    capsys.readouterr()
    for threshold, role in (("inf", "predictor"), ("-inf", "expert")):
        file = str(place / "3.flac")
        assert cli.main(["generate", str(fitted), file, f"--threshold={threshold}", "--json", "--device", "cpu"]) == 0
        out, err = capsys.readouterr()
        row = json.loads(out)
        task = prepare(options_of(place), fitted / "other", CPU, Silent())
        inputs = task.codec.encode([Path(file)]).inputs
        (tokens,) = generated(getattr(task, role).model, inputs, LENGTH)
        assert [one["token"] for one in row["tokens"]] == tokens
        assert row["output"] == tokenizer().decode(tokens, skip_special_tokens=True).strip()
        assert {one["source"] for one in row["tokens"]} == {role}
        assert "is a file" not in err


def test_calibrate_reads_a_manifest(place: Path, fitted: Path, capsys: Capture) -> None:
    data = ["--data", str(place / "manifest.jsonl"), "--inputs", "6", "--device", "cpu", "--quiet", "--json"]
    assert cli.main(["calibrate", str(fitted), *data]) == 0
    assert json.loads(capsys.readouterr().out)["inputs"] == 6


# -- what users give --------------------------------------------------------------------------------------------------


def test_inputs_may_be_files_bytes_base64_or_samples(task: SpeechTask, place: Path) -> None:
    path = place / "3.flac"
    content = path.read_bytes()
    code = base64.b64encode(content).decode()
    inputs = [path, content, code, f"data:audio/flac;base64,{code}", read_clip(path)]
    rows = task.codec.encode(inputs).inputs
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize(
    ("one", "what"),
    [
        ("/etc/hostname", "input 1 of 1 is not the base64 code of a WAV or FLAC file"),
        (7, "input 1 of 1 is a int; give a Path"),
        (np.zeros((2, 5), dtype=np.float32), "give floats"),
        (np.full(2_000, np.nan), "samples that are not numbers"),
        (np.zeros(2_000), "is silent"),  # regression: files were checked, samples were not
        (np.linspace(-9e3, 9e3, 2_000), "has a sample of 9000; samples lie between -1 and 1"),
        (np.zeros(0), "has no samples"),
        (np.zeros(20_000), r"lasts 1\.25 s; give samples of at most 1 s"),
        (b"nothing", "is not a WAV or FLAC file"),
    ],
)
def test_other_inputs_are_refused(task: SpeechTask, one: Any, what: str) -> None:
    with pytest.raises(InputError, match=what):
        task.codec.encode([one])


def spoiled(place: Path, folder: Path, line: dict[str, Any], name: str = "bad.jsonl") -> Path:
    good = [json.loads(text) for text in (place / "manifest.jsonl").read_text().splitlines()]
    records = [{**record, "audio_filepath": str(place / record["audio_filepath"])} for record in good]
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in [*records[:-1], line]))
    return folder / name


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("silence", "is silent"),
        ("nan", "not numbers"),
        ("corrupt", "is damaged"),
        ("long", "lasts 31 s; cut it"),
        ("text", "is empty"),
        ("no words", r"bad\.jsonl, line 24: no words in the text"),
        ("no file", "cannot read"),
        ("no field", "there is no 'audio_filepath'"),
        ("too long for the model", r"bad\.wav lasts 2 s; the models hear 1 s"),
    ],
)
def test_bad_clips_end_in_one_line(kind: str, what: str, place: Path, tmp_path: Path, capsys: Capture) -> None:
    import soundfile

    path, noise = tmp_path / "bad.wav", np.random.default_rng(0).normal(0, 0.1, 8_000).astype(np.float32)
    line: dict[str, Any] = {"audio_filepath": str(path), "text": "some words"}
    sounds = {
        "silence": noise * 0,
        "nan": noise + np.nan,
        "long": np.tile(noise, 62),
        "too long for the model": np.tile(noise, 4),
    }
    if kind == "corrupt":
        path = write_clip(tmp_path / "bad.flac", noise)
        path.write_bytes(path.read_bytes()[:2_000] + bytes(5_000))
        line["audio_filepath"] = str(path)
    elif kind != "no file":
        soundfile.write(path, sounds.get(kind, noise), 16_000, subtype="FLOAT")
    if kind in ("text", "no words"):
        line["text"] = " " if kind == "text" else "..."
    if kind == "no field":
        line = {"text": "some words"}
    manifest = spoiled(place, tmp_path, line)
    sizes = ["--train-clips", "20", "--validation-clips", "2", "--test-clips", "2", "--length", LENGTH, "--quiet"]
    models = ["--predictor", place / "predictor", "--expert", place / "expert"]
    message = refused(capsys, "run", "speech", *models, "--train", manifest, *sizes, "--out", tmp_path / "out")
    assert re.search(what, message), message
    assert not (tmp_path / "out").exists()


def test_other_models_end_in_one_line(place: Path, tmp_path: Path, capsys: Capture) -> None:
    tiny("t5", 1, 0).save_pretrained(tmp_path / "t5")
    words_tokenizer().save_pretrained(tmp_path / "t5")
    other = save_place(tmp_path / "other") / "expert"
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    names = vocabulary["model"]["vocab"]
    names["Ġelse"] = names.pop("Ġw4")
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    data = ["--train", place / "manifest.jsonl", "--length", LENGTH, "--quiet", "--out", tmp_path / "out"]
    for expert, what in (
        (tmp_path / "t5", "does not listen to speech; choose one like openai/whisper-tiny"),
        (other, "do not share a vocabulary: id 4 is"),
        (tmp_path / "nothing", "no folder"),
    ):
        message = refused(capsys, "run", "speech", "--predictor", place / "predictor", "--expert", expert, *data)
        assert what in message
        assert not (tmp_path / "out").exists()


def test_too_many_tokens_end_in_one_line(place: Path) -> None:
    with pytest.raises(OptionError, match=r"--length is 40; .* writes at most 36 tokens"):
        prepare(options_of(place, length=40), place, CPU, Silent())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"facts": "margin,loudness"}, "unknown --facts 'loudness'; available: alike, all, "),
        ({"error_rate": "letters"}, "unknown --error-rate 'letters'"),
        ({"shown": "all"}, "unknown --shown 'all'"),
        ({"length": 0}, "--length is 0; it must be at least 1"),
        ({"predictor": ""}, "--predictor is empty"),
    ],
)
def test_options_are_checked(options: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        SpeechOptions(**options)


def test_without_the_hub_the_commands_are_named(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", unknown_host)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    commands = r"python -m seqdefer\.tasks\.speech\.synthetic .* python -m seqdefer\.tasks\.speech\.checkpoints "
    with pytest.raises(OptionError, match=commands):
        prepare(options_of(place, predictor="openai/whisper-none"), tmp_path, CPU, Silent())
    with pytest.raises(DataError, match=commands):
        prepare(SpeechOptions(train="nobody/nothing", test=None), tmp_path, CPU, Silent())


def test_the_entry_has_both_recipes() -> None:
    assert set(ENTRY.recipes) == {"ours", "published"}
    assert ENTRY.recipes["published"].options == {"shown": "states"}


@pytest.mark.parametrize(
    ("given", "kind"),
    [({}, "branched"), ({"strategy": "free"}, "open"), ({"strategy": "free", "trees": "closed"}, "closed")],
)
def test_another_strategy_has_trees_of_its_own(given: dict[str, Any], kind: str) -> None:
    """The recipe names branched trees, and the paper's strategies learned from them too."""
    assert choose_settings(ENTRY, given)[1].tree_kind == kind
