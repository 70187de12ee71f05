"""The pronunciation task: networks, training, losses, the codec, and small runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import TINY_MLP
from torch import Tensor

from seqdefer import cli
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.errors import CheckpointError, InputError, OptionError
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.labels.labelled import input_names
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.progress import Silent
from seqdefer.report.panels import is_harmless
from seqdefer.report.run import run_task
from seqdefer.rows import Chunk
from seqdefer.tasks.pronounce import model as module
from seqdefer.tasks.pronounce.codec import PhonemeCodec
from seqdefer.tasks.pronounce.data import MAX_TOKENS, SYMBOLS, encode_words, parse_dictionary, spelling
from seqdefer.tasks.pronounce.model import (
    BEGIN,
    PronounceExpert,
    PronouncePredictor,
    Pronouncer,
    PronouncerOptions,
    load_or_train,
    name_of,
    train_pronouncer,
)
from seqdefer.tasks.pronounce.task import ENTRY, FEE, PronounceOptions, PronounceTask, prepare
from seqdefer.testing import check_task
from seqdefer.types import Examples, Sequences, SequenceSpec

pytestmark = pytest.mark.usefixtures("one_thread", "one_timed_budget")

CPU = torch.device("cpu")
SPEC = SequenceSpec(MAX_TOKENS, end=0)
SAID = dict(zip("abcdefghij", "AH B K D EH F G HH IH JH".split(), strict=True))  # noqa: SIM905
TINY = PronounceOptions(predictor_hidden=6, predictor_epochs=1, expert_hidden=12, expert_epochs=3)


def made_up_dictionary(n: int = 900) -> str:
    """Return a dictionary with one phoneme per letter, except that double letters are one phoneme."""
    generator, lines = torch.Generator().manual_seed(0), {}
    for index in range(n):
        letters = ["abcdefghij"[i] for i in torch.randint(10, (3 + index % 8,), generator=generator).tolist()]
        said = [SAID[letter] for place, letter in enumerate(letters) if letters[place - 1 : place] != [letter]]
        lines["".join(letters)] = f"{''.join(letters)} {' '.join(said)}"
        if index % 10 == 0:
            lines[f"{''.join(letters)}(2)"] = f"{''.join(letters)}(2) {' '.join(said[:-1])} Z"
    return "\n".join(lines.values()) + "\n"


@pytest.fixture(scope="module")
def dictionary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dictionary") / "made-up.dict"
    path.write_text(made_up_dictionary())
    return path


@pytest.fixture(scope="module")
def task(dictionary: Path, tmp_path_factory: pytest.TempPathFactory) -> PronounceTask:
    return prepare(replace(TINY, data=str(dictionary)), tmp_path_factory.mktemp("task"), CPU, Silent())


def words(n: int = 200) -> tuple[Tensor, Tensor]:
    inputs, targets = encode_words([entry for entry in parse_dictionary(made_up_dictionary(n).encode(), "x").entries
                                    if len(entry.pronunciations) == 1])  # fmt: skip
    return inputs, targets[:, 0]


def network(hidden: int = 7, *, sharp: float = 3.0) -> Pronouncer:
    """Return an untrained network with weights large enough that outputs differ between words."""
    torch.manual_seed(3)
    model = Pronouncer(hidden, embedding=5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(sharp)
    return model


def examples(n: int = 6) -> Examples:
    inputs, targets = words(60)
    return Examples(inputs[:n], targets[:n, None].expand(-1, 4, -1), torch.arange(n))


# -- the networks --------------------------------------------------------------------------------------------------


def test_padding_changes_nothing() -> None:
    model, (letters, targets) = network(), words(60)
    together = model(letters, targets)
    for row in range(8):
        n = int((letters[row] > 0).sum())
        short = model(letters[row : row + 1, :n], targets[row : row + 1])
        torch.testing.assert_close(short[0], together[row], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_steps_are_the_forward_pass() -> None:
    """Teacher forcing in one pass equals the predictor and the expert step by step."""
    model, batch = network().eval(), examples()
    targets = batch.targets[:, 0]
    logits = model(batch.inputs, targets)
    predictor, expert = PronouncePredictor(model), PronounceExpert(model)
    state, _ = predictor.start(batch.inputs)
    silent = expert.start(batch)
    for position in range(MAX_TOKENS):
        proposal = predictor.propose(state)
        assert torch.equal(proposal.tokens, logits[:, position].argmax(1))
        torch.testing.assert_close(proposal.uncertainty, -logits[:, position].log_softmax(1).amax(1))
        distribution = torch.distributions.Categorical(logits=logits[:, position])
        torch.testing.assert_close(proposal.entropy, distribution.entropy(), rtol=1e-4, atol=1e-5)
        named, _ = expert.next(silent, torch.arange(len(batch)))  # its first call
        assert torch.equal(named, proposal.tokens)
        state, silent = (
            predictor.append(state, targets[:, position]),
            expert.append(silent, targets[:, position]),
        )


def test_rows_of_the_expert_read_lazily(spy: Callable[[Any, str], list[tuple[Any, ...]]]) -> None:
    model, batch = network(), examples()
    rows, encoded, read = PronounceExpert(model).rows(), spy(model, "encode"), spy(model, "read")
    rows.admit(batch)
    assert not encoded
    rows.read([Chunk(4, [3, 1, 4], [3]), Chunk(1, [3, 1, 4], [3])])
    assert [line[line > 0].tolist() for line in encoded[0][0]] == [
        line[line > 0].tolist() for line in batch.inputs[[4, 1]]
    ]
    assert [call[2].tolist() for call in read] == [[BEGIN] * 2, [3] * 2, [1] * 2, [4] * 2]
    read.clear()
    rows.read([Chunk(1, [5], [1]), Chunk(0, [3], [1])])
    assert len(encoded) == 2
    assert [call[2].tolist() for call in read] == [[5, BEGIN], [3]]


def test_branches_of_a_word_share_its_letters() -> None:
    predictor, batch = PronouncePredictor(network()), examples()
    state, _ = predictor.start(batch.inputs)
    assert predictor.select(state, torch.tensor([2, 2, 2])).encoded is state.encoded


# -- training ------------------------------------------------------------------------------------------------------


def test_training_learns_and_repeats() -> None:
    letters, targets = words(500)
    options = PronouncerOptions(hidden=24, embedding=16, epochs=12, learning_rate=2e-2, batch_size=32)
    seen: list[int] = []
    model = train_pronouncer(letters, targets, options, CPU, seen.append)
    assert seen == [1] * 12
    right = (model(letters, targets).argmax(2) == targets)[targets > 0].float().mean()
    assert right > 0.7
    again = train_pronouncer(letters[:50], targets[:50], replace(options, epochs=1), CPU)
    same = train_pronouncer(letters[:50], targets[:50], replace(options, epochs=1), CPU)
    other = train_pronouncer(letters[:50], targets[:50], replace(options, epochs=1, seed=1), CPU)
    assert PronouncePredictor(again).fingerprint == PronouncePredictor(same).fingerprint
    assert PronouncePredictor(again).fingerprint != PronouncePredictor(other).fingerprint


def test_every_word_is_in_one_batch() -> None:
    letters, targets = words(100)
    lengths = (targets > 0).sum(1) + 1
    batches = list(module._batches(letters, lengths, 8, torch.Generator().manual_seed(0)))
    assert sorted(torch.cat(batches).tolist()) == list(range(len(letters)))
    assert all(len(batch) <= 8 for batch in batches)


def test_networks_are_trained_once(tmp_path: Path, spy: Callable[[Any, str], list[tuple[Any, ...]]]) -> None:
    options, some = PronouncerOptions(hidden=4, embedding=3, epochs=2), words(30)
    trained = spy(module, "train_pronouncer")
    home = tmp_path / name_of("predictor", some, options)
    for _ in range(2):
        load_or_train(home, "predictor", some, options, CPU, Silent())
    assert len(trained) == 1
    others = [
        ("expert", some, options),
        ("predictor", words(20), options),
        ("predictor", some, replace(options, seed=1)),
    ]
    assert len({home.name, *(name_of(*other) for other in others)}) == 4


# -- the task ------------------------------------------------------------------------------------------------------


def test_the_task_keeps_the_contract(task: PronounceTask) -> None:
    check_task(task)


def test_no_word_is_in_two_parts(task: PronounceTask, dictionary: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The words of both networks and of all splits are disjoint."""
    taught = []

    def note(folder: Path, who: str, words: tuple[Tensor, Tensor], *_: Any) -> Pronouncer:
        taught.append(words[0])
        return network()

    monkeypatch.setattr("seqdefer.tasks.pronounce.task.load_or_train", note)
    prepare(replace(TINY, data=str(dictionary)), tmp_path, CPU, Silent())
    parts = [*taught, *(task.split(name).inputs for name in ("train", "validation", "test"))]
    everyone = torch.cat(parts)
    assert len(torch.unique(everyone, dim=0)) == len(everyone)
    assert min(map(len, parts)) > 20


def test_limits_keep_the_other_splits(task: PronounceTask, dictionary: Path, tmp_path: Path) -> None:
    small = prepare(replace(TINY, data=str(dictionary), train=10, validation=5), tmp_path, CPU, Silent())
    assert [len(small.split(name)) for name in ("train", "validation")] == [10, 5]
    assert torch.equal(small.split("test").inputs, task.split("test").inputs)


def test_token_losses_add_to_the_error_rate(task: PronounceTask) -> None:
    targets = torch.tensor([[[5, 6, 7, 8] + [0] * 8, [5, 9] + [0] * 10]])
    batch = Examples(torch.ones(1, 12, dtype=torch.long), targets, torch.arange(1))

    def after(position: int) -> Sequences:
        return Sequences(torch.zeros(1, position, dtype=torch.long), torch.tensor([position]))

    def loss(position: int, token: int) -> float:
        return float(task.token_loss(batch, after(position), torch.tensor([token])))

    assert [loss(0, 5), loss(0, 6)] == [0.0, 25.0]
    assert [loss(1, 6), loss(1, 9), loss(1, 7)] == [0.0, 0.0, 25.0]  # either pronunciation
    assert [loss(4, 0), loss(2, 0), loss(1, 0), loss(9, 0), loss(9, 3)] == [0.0, 0.0, 25.0, 0.0, 25.0]
    costs = task.token_cost(batch, after(0), torch.tensor([6]))
    assert costs.tolist() == [25.0 + FEE]


def test_description(task: PronounceTask) -> None:
    described = task.describe()
    assert described["data"].startswith("made-up.dict (")
    assert described["words"].startswith("train ")
    examples, model = task.split("validation"), {"predictor": task.predictor.model, "expert": task.expert.model}
    for who, size in (("predictor", TINY.predictor_hidden), ("expert", TINY.expert_hidden)):
        rates = task.sequence_loss(examples, draft(PronouncePredictor(model[who]), examples, task.spec).sequences)
        wrong = f"{rates.mean():.1f} % of phonemes and {100 * (rates > 0).float().mean():.1f} % of words wrong"
        assert described[who].startswith(f"GRU with attention of {size} (")
        assert described[who].endswith(f": {wrong} in validation")
        assert model[who].cell.hidden_size == size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_hidden": 1}, "--expert-hidden is 1; it must be at least 2"),
        ({"predictor_epochs": 0}, "--predictor-epochs is 0; it must be at least 1"),
        ({"train": 10**12}, "--train is 1000000000000; it must be at most"),
        ({"seed": -1}, "--seed is -1; it must be at least 0"),
    ],
)
def test_options_out_of_range(changes: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PronounceOptions(**changes)


# -- drawing, and everything at once -------------------------------------------------------------------------------


def test_drawing_shows_words_tokens_and_reference(task: PronounceTask) -> None:
    some = task.split("test").select(torch.arange(3))
    drafted = draft(task.predictor, some, task.spec)
    rollouts = {
        budget: roll_out(task.predictor, task.expert, some, HandOff(torch.full((3,), kept)), task.spec)
        for budget, kept in {0.0: MAX_TOKENS, 0.5: 2}.items()
    }
    html = task.draw(some, rollouts)
    assert is_harmless(html)
    assert html.count('class="tokens-example"') == 3
    assert html.count("tokens-score") >= sum(int(rollout.sequences.lengths.sum()) for rollout in rollouts.values())
    first = drafted.sequences.tokens[0, : int(drafted.sequences.lengths[0])].tolist()
    assert all(f">{SYMBOLS[token] or '∎'}<" in html for token in first)
    assert task.draw(some.select(torch.arange(0)), rollouts) == ""


@pytest.mark.slow
def test_a_small_run(dictionary: Path, tmp_path: Path) -> None:
    rejector = replace(TINY_MLP, architecture="mlp", epochs=2)
    by_draft = replace(rejector, architecture="draft_mlp")
    settings = ExperimentSettings(seeds=1, instances=8, token=rejector, once=by_draft, cost=by_draft, resamples=10)
    options = replace(TINY, data=str(dictionary), train=24, validation=8)
    results = run_task(ENTRY, options, settings, tmp_path, device="cpu")
    assert {"OptimalToken", "TokenwiseModel", "TokenwiseEntropy", "OneTimeCost", "WholeModelEmbed"} < set(
        results.summary
    )
    assert results.units.loss == "phoneme error rate (%)"
    best, model, random = (results.summary[name].audc_mean for name in ("OptimalToken", "TokenwiseModel", "Random"))
    assert best <= min(model, random)
    report = (tmp_path / "report.html").read_text()
    assert 'class="tokens-example"' in report
    again = run_task(ENTRY, options, settings, tmp_path, device="cpu")
    assert again.summary == results.summary


# -- the codec, and fitted pairs -----------------------------------------------------------------------------------


def test_words_become_letters_and_tokens_phonemes() -> None:
    codec = PhonemeCodec()
    encoded = codec.encode(["cat", " Onomatopoeia\n", "O\N{RIGHT SINGLE QUOTATION MARK}Brien"])
    assert [spelling(row) for row in encoded.inputs] == ["cat", "onomatopoeia", "o'brien"]
    expected, _ = encode_words(parse_dictionary(b"cat K AE1 T", "x").entries)
    assert torch.equal(encoded.inputs[:1], expected)
    assert codec.encode(["cat"]).inputs.tolist() == expected[:, :3].tolist()  # no padding: its width is its length
    tokens = [SYMBOLS.index(symbol) for symbol in ("K", "AE", "T", "")]
    assert codec.decode(tokens) == codec.text(tokens) == "K AE T"
    assert codec.pieces(tokens) == ["K", " AE", " T", "∎"]
    assert [codec.text(tokens[:n]) for n in range(4)] == ["", "K", "K AE", "K AE T"]
    assert (codec.kind, codec.field) == ("tokens", "word")
    assert len(codec.encode([codec.hint, *codec.examples])) == 1 + len(codec.examples) > 1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "hello world",
            "input 2 of 2 has ' ', which is not a letter from a to z; give one word, such as 'onomatopoeia'",
        ),
        ("naïve", "input 2 of 2 has 'ï', which is not a letter from a to z"),
        ("b2b", "input 2 of 2 has '2', which is not a letter"),
        ("at", "input 2 of 2 has 2 letters; give a word of 3 to 12"),
        ("", "input 2 of 2 has 0 letters; give a word of 3 to 12"),
        ("thirteenlette", "input 2 of 2 has 13 letters"),
        ("'''", "which has no letter; give a word"),
        (None, "input 2 of 2 is a NoneType; give a word"),
        (["cat"], "input 2 of 2 is a list; give a word"),
    ],
)
def test_bad_words(word: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PhonemeCodec().encode(["cat", word])


def test_the_schema_accepts_what_is_read() -> None:
    pattern = PhonemeCodec().schema()["pattern"]
    read = ("cat", " O'Brien ", "ONOMATOPOEIA", "it\N{RIGHT SINGLE QUOTATION MARK}s")
    assert all(re.search(pattern, word) for word in read)
    assert not any(re.search(pattern, word) for word in ("at", "", "two words", "naïve", "thirteenlette", "b2b"))


def fit_tiny(dictionary: Path, out: Path, *more: str) -> Path:
    sizes = {"predictor-hidden": 6, "predictor-epochs": 1, "expert-hidden": 12, "expert-epochs": 3, "train": 40}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = ["fit", "pronounce", "--data", str(dictionary), *options, "--validation", "24", "--architecture", "mlp"]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as told:
        assert cli.main([*command, *more, "--device", "cpu", "--quiet", "--out", str(out)]) == 0
    assert f"seqdefer generate {out} onomatopoeia --budget 0.2\nor: seqdefer serve {out}\n" in told.getvalue()
    return out


@pytest.fixture(scope="module")
def fitted(dictionary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fitted pair. Do not change it."""
    return fit_tiny(dictionary, tmp_path_factory.mktemp("fitted") / "model")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::seqdefer.model.calibrated_pair.BudgetWarning")  # how near depends on the machine
def test_a_fitted_pair_needs_no_dictionary_and_may_be_moved(
    dictionary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.dict"
    shutil.copy(dictionary, own)
    model, moved = fit_tiny(own, tmp_path / "here"), tmp_path / "there"

    def generated(folder: Path, *options: str) -> list[str]:
        assert cli.main(["generate", str(folder), "abacab", "jade", "--device", "cpu", "--quiet", *options]) == 0
        return capsys.readouterr().out.splitlines()

    before = [generated(model, "--budget", "0.2", "--json"), generated(model, "--budget", "1")]
    own.unlink()
    shutil.move(model, moved)
    assert generated(moved, "--budget", "1") == before[1]
    assert "by the expert" in before[1][-1]
    for line, expected in zip(generated(moved, "--budget", "0.2", "--json"), before[0], strict=True):
        assert without_scores(line) == without_scores(expected)  # scores depend on how rows are batched


def without_scores(line: str) -> dict[str, Any]:
    answer = json.loads(line)
    for token in answer["tokens"]:
        del token["score"]
    return answer


def test_budgets_0_and_1_are_the_networks_alone(fitted: Path, task: PronounceTask) -> None:
    model, some = DeferringModel.from_pretrained(fitted, device="cpu"), ["abacab", "jade", "bad", "fee"]
    served, examples = model.served, task.codec.encode(some)
    nothing = torch.zeros(len(some), MAX_TOKENS, dtype=torch.long)
    alone = served.expert.complete(examples, Sequences(nothing, nothing[:, 0]), SPEC)
    for budget, sequences in {0.0: draft(served.predictor, examples, SPEC).sequences, 1.0: alone}.items():
        written = model.generate(some, budget)
        rows = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
        assert written.outputs == [task.codec.text(tokens[:length]) for tokens, length in rows]
        assert written.share == budget
        for one, output in zip(some, written.outputs, strict=True):
            assert "".join(piece.text for piece in model.stream(one, budget)) == output


def spoil(work: Path, what: str) -> None:
    match what:
        case "no networks":
            shutil.rmtree(work)
        case "no names":
            (work / "pair.json").write_text("[]")
        case "no names of folders":
            (work / "pair.json").write_text('{"predictor": 5}')
        case "no expert":
            shutil.rmtree(next(work.glob("expert-*")))
        case "half an expert":
            (next(work.glob("expert-*")) / "config.json").unlink()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "no networks",
            r"the two networks are not in .*work: it has no pair\.json; copy the whole folder that fit wrote",
        ),
        ("no names", r"pair\.json does not name the predictor; copy the whole folder"),
        ("no names of folders", r"pair\.json does not name the predictor; copy the whole folder"),
        ("no expert", "the expert is not in .*work: there is no 'expert-.*'; copy the whole folder"),
        ("half an expert", r"cannot read .*config\.json"),
    ],
)
def test_networks_that_are_missing(what: str, message: str, fitted: Path, tmp_path: Path) -> None:
    shutil.copytree(fitted, tmp_path / "model")
    spoil(tmp_path / "model" / "work", what)
    with pytest.raises(CheckpointError, match=message):
        DeferringModel.from_pretrained(tmp_path / "model", device="cpu")


def test_the_pair_of_the_last_fit_is_served(fitted: Path, dictionary: Path, tmp_path: Path) -> None:
    """A folder may hold the networks of several fits."""
    shutil.copytree(fitted, tmp_path / "model")
    fit_tiny(dictionary, tmp_path / "model", "--seed", "1", "--replace")
    assert len(list((tmp_path / "model" / "work").glob("predictor-*"))) == 2
    one, other = (DeferringModel.from_pretrained(folder, device="cpu") for folder in (fitted, tmp_path / "model"))
    assert one.served.predictor.fingerprint != other.served.predictor.fingerprint


def test_a_fit_with_a_guarantee_promises_on_words_that_it_has_not_seen(
    dictionary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fit_tiny(dictionary, tmp_path / "model", "--guarantee", "confident", "--confidence", "0.6")
    model = DeferringModel.from_pretrained(folder, device="cpu")
    assert model.learned_from is not None
    assert model.calibration is not None
    promise = model.calibration.promise
    assert promise is not None
    assert (promise.rule, promise.confidence, promise.share_of) == ("confident", 0.6, "tokens")
    assert len(model.learned_from.inputs) == 40 + 24
    spelled = dict.fromkeys(re.sub(r"\(.*", "", line.split()[0]) for line in dictionary.read_text().splitlines())
    words = [word for word in spelled if 3 <= len(word) <= 12]
    names = dict(zip(input_names(model.served.codec.encode(words)), words, strict=True))
    seen = tmp_path / "seen.txt"
    seen.write_text("\n".join(names[name] for name in model.learned_from.inputs if name in names))
    command = ["calibrate", str(folder), "--data", str(seen), "--device", "cpu", "--quiet"]
    assert cli.main([*command, "--guarantee", "expected"]) == 2
    assert "inputs were used to fit this rejector, the first at place 1; a guarantee needs" in capsys.readouterr().err
    fresh = tmp_path / "fresh.txt"
    unseen = [word for name, word in names.items() if name not in model.learned_from.inputs]
    fresh.write_text("\n".join(unseen[:200]))
    command[3] = str(fresh)
    assert cli.main([*command, "--guarantee", "expected", "--share-of", "inputs", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["promise"]["rule"] == "expected"
    assert printed["promise"]["inputs"] == printed["inputs"]
    assert (
        cli.main(["serve", str(folder), "--guarantee", "confident", "--device", "cpu", "--quiet", "--port", "0"]) == 2
    )
    assert "has another guarantee: in expectation" in capsys.readouterr().err


def test_no_quality_is_promised_where_losses_have_no_limit(
    dictionary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--predictor-hidden", "6", "--predictor-epochs", "1", "--expert-hidden", "6", "--expert-epochs", "1"]
    command = ["fit", "pronounce", "--data", str(dictionary), *sizes, "--device", "cpu", "--quiet"]
    assert cli.main([*command, "--out", str(tmp_path / "model"), "--within", "1"]) == 2
    assert "the loss of task 'pronounce' (phoneme error rate (%)) has no upper limit" in capsys.readouterr().err
