"""Remote experts: a tiny model behind seqdefer's own server, or a scripted endpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs the extra 'text'")
pytest.importorskip("httpx", reason="needs the extra 'remote'")

from text_runs import Capture, refused
from tiny_models import generated, random_documents, tiny, tiny_text_model, write_lines

from seqdefer import cli
from seqdefer.engine.drafts import draft
from seqdefer.errors import OptionError
from seqdefer.interfaces import Served
from seqdefer.labels.hand_offs import Calls, hand_off_table
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.checkpoints import load_rejector
from seqdefer.rejectors.draft import DraftMLP
from seqdefer.rejectors.losses import hand_off_grid
from seqdefer.rejectors.token import LSTMRejector
from seqdefer.remote.client import Endpoint, EndpointClient, EndpointCompletion
from seqdefer.remote.keys import HOST_VARIABLE, KEY_VARIABLE
from seqdefer.tasks.text.codec import encode
from seqdefer.tasks.text.data import Document
from seqdefer.tasks.text.models import TextModel, text_model
from seqdefer.tasks.text.pairs import MixedPair, TextPair
from seqdefer.tasks.text.remote import DOCUMENTS_PER_BATCH, PROMPT, ExpertCallsWarning, PromptAdapter
from seqdefer.tasks.text.remote_tokens import RemoteTokenExpert
from seqdefer.tasks.text.task import TextOptions, TextTask, _warn_about_calls, codec_of
from seqdefer.testing import check_expert
from seqdefer.types import Examples, Sequences, SequenceSpec
from tests.remote.test_client import SECRET, Handler, Misbehaving, completion, server, status  # noqa: F401, server is a fixture

pytestmark = pytest.mark.usefixtures("one_thread")
Spy = Callable[[Any, str], list[tuple[Any, ...]]]
LENGTH = 8
ignore_call_warnings = pytest.mark.filterwarnings("ignore::seqdefer.tasks.text.remote.ExpertCallsWarning")
TEXTS = [" ".join(one.document.split()[:4]) for one in random_documents(6, seed=5)]


@cache
def pieces(kind: str) -> Any:
    """Return a tokenizer of 60 pieces: bytes like GPT-2's, or texts that begin with a space like T5's and Llama's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    tokens.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False) if kind == "bytes" else pre_tokenizers.Metaspace()
    )
    tokens.decoder = decoders.ByteLevel() if kind == "bytes" else decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False)
    tokens.train_from_iterator([one.document for one in random_documents(200)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def made_of(kind: str, family: str, n_layers: int, seed: int) -> TextModel:
    return text_model(tiny(family, n_layers, seed), pieces(kind), family)


def remote_pair(
    url: str, predictor: TextModel, *, by_token: bool = False, prompt: str = PROMPT, **patience: Any
) -> MixedPair:
    client = EndpointClient(Endpoint(url, "toy", **patience))
    return MixedPair.of_remote(predictor, client, prompt=prompt, by_token=by_token, shown="facts")


def served_of(pair: TextPair | MixedPair) -> Served:
    options = TextOptions(length=LENGTH, input_tokens=50)
    spec = SequenceSpec(LENGTH, pair.predictor.end)
    return Served(pair.predictor, pair.expert, spec, codec_of(options, pair))


def with_rejector(served: Served, kind: str) -> DeferringModel:
    """Return an uncalibrated model with a random rejector."""
    drafted = draft(served.predictor, served.codec.encode(TEXTS), served.spec)
    torch.manual_seed(0)
    context, features = drafted.context.shape[1], drafted.features.shape[2]
    common: dict[str, Any] = {"layers": 1, "units": 8, "dropout": 0.0}
    if kind == "token":
        network: Any = LSTMRejector(Sizes(context, features, LENGTH, True, **common), served.predictor.fingerprint)
        network.standardise(drafted.context, network.sizes.step_inputs(drafted)[:, 0])
    else:
        grid = tuple(hand_off_grid(LENGTH, 4).tolist())
        sizes = Sizes(context, features, LENGTH, True, hand_offs=grid, rule="cost", **common)
        network = DraftMLP(sizes, served.predictor.fingerprint)
    return DeferringModel(served, network.eval())


@pytest.fixture(scope="module")
def expert() -> TextModel:
    """The model behind the endpoint."""
    return made_of("bytes", "gpt2", 2, 6)


@pytest.fixture(scope="module")
def endpoint(expert: TextModel) -> Iterator[str]:
    """seqdefer's own server, whose expert writes everything. Shared: do not modify."""
    pytest.importorskip("fastapi", reason="needs the extra 'server'")
    from tests.server.test_app import running

    pair = TextPair.of(made_of("bytes", "gpt2", 1, 1), expert, "facts")
    model = with_rejector(served_of(pair), "token")
    model.calibrate(TEXTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        with running(model, budget=1.0) as found:
            yield f"{found.address}/v1"


def alone(expert: TextModel, prompt: str, n_tokens: int) -> str:
    """Return what `generate` of transformers writes locally."""
    inputs, _ = encode(expert.tokenizer, [prompt], "", max_tokens=1000)
    (row,) = generated(expert, inputs, n_tokens)
    text: str = expert.tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


# -- texts and tokens -----------------------------------------------------------------------------------------------


def read(adapter: PromptAdapter, inputs: tuple[int, ...], written: tuple[int, ...]) -> str:
    return adapter._text(written if adapter.model.is_encoder_decoder else inputs + written)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_tokens_continue_the_text_as_the_expert_wrote_it(data: st.DataObject) -> None:
    """Wherever the predictor stopped, even within a word. The output of an encoder-decoder begins without a space."""
    kind, family = data.draw(st.sampled_from([("bytes", "gpt2"), ("spaces", "llama"), ("spaces", "t5")]))
    adapter = PromptAdapter(made_of_once(kind, family), 1)
    piece = st.integers(3, 59)
    inputs, written = (tuple(data.draw(st.lists(piece, min_size=1, max_size=6))) for _ in range(2))
    text = data.draw(st.lists(st.sampled_from(["w", " w", "7", "41", " w3", " w25"]), min_size=1, max_size=5))
    answer = EndpointCompletion("".join(text), is_finished=True)
    before, new = read(adapter, inputs, written), adapter.tokens(inputs, written, answer)
    added = answer.text.lstrip() if adapter.model.is_encoder_decoder and not before else answer.text
    assert read(adapter, inputs, (*written, *new)) == before + added
    assert adapter.prompt(inputs, written).endswith(before[-5:])


@cache
def made_of_once(kind: str, family: str) -> TextModel:
    return made_of(kind, family, 1, 1)


@pytest.mark.parametrize(("kind", "family"), [("bytes", "gpt2"), ("spaces", "llama"), ("spaces", "t5")])
def test_a_text_continues_the_prompt(kind: str, family: str) -> None:
    model = made_of_once(kind, family)
    adapter, tokenizer = PromptAdapter(model, 1), model.tokenizer
    inputs = tuple(tokenizer("w3 w41")["input_ids"])
    assert adapter.prompt(inputs, ()) == "w3 w41"
    begun = tuple(adapter.tokens(inputs, (), EndpointCompletion(" w25 w7", is_finished=False)))
    assert adapter._text(begun) == (" w25 w7" if kind == "bytes" else "w25 w7")
    assert adapter.prompt(inputs, begun) == "w3 w41 w25 w7"
    new = tuple(adapter.tokens(inputs, begun, EndpointCompletion("8 w3", is_finished=False)))
    assert adapter.prompt(inputs, begun + new) == "w3 w41 w25 w78 w3"


def test_partial_letters_and_end_tokens_in_a_text() -> None:
    adapter = PromptAdapter(made_of_once("bytes", "gpt2"), 1)
    assert adapter.tokens((13,), (), EndpointCompletion("\ufffd", is_finished=False)) == []
    assert adapter._text(adapter.tokens((13,), (), EndpointCompletion("7\ufffd", is_finished=False))) == "7"
    assert adapter._text(adapter.tokens((13,), (), EndpointCompletion("7</s>8", is_finished=True))) == "7"
    assert adapter.tokens((13,), (), EndpointCompletion("", is_finished=True)) == []


def test_a_custom_prompt() -> None:
    model = made_of_once("spaces", "t5")
    inputs = tuple(model.tokenizer("w3 w4")["input_ids"])
    adapter = PromptAdapter(model, 1, "News: {input}\nIn short:{written}")
    assert adapter.prompt(inputs, ()) == "News: w3 w4\nIn short:"
    assert adapter.prompt(inputs, tuple(model.tokenizer("w5")["input_ids"])) == "News: w3 w4\nIn short: w5"
    for bad in ("", "{input}", "{written}", "{written}{input}", "{input}{written} ", "{input}{written}{written}"):
        with pytest.raises(OptionError, match=r"must contain \{input\} and end with \{written\}"):
            TextOptions(expert_prompt=bad)


# -- a model behind a server ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "family"), [("bytes", "gpt2"), ("spaces", "llama"), ("spaces", "t5")])
def test_completions_equal_local_generation(kind: str, family: str, endpoint: str, expert: TextModel) -> None:
    """For a predictor with the expert's tokenizer and for two with others."""
    pair = remote_pair(endpoint, made_of(kind, family, 1, 3))
    served = served_of(pair)
    examples = served.codec.encode(TEXTS)
    drafts = draft(pair.predictor, examples, served.spec).sequences
    rows, adapter, n_ended = range(len(TEXTS)), pair.expert.adapter, 0
    for kept in (0, 1, 3, 7):
        prefixes = drafts.truncate(torch.full_like(drafts.lengths, kept))
        completed = pair.expert.complete(examples, prefixes, served.spec)
        for row in rows:
            inputs = tuple(int(token) for token in examples.inputs[row] if token >= 0)
            before = tuple(prefixes.tokens[row, : int(prefixes.lengths[row])].tolist())
            after = tuple(completed.tokens[row, : int(completed.lengths[row])].tolist())
            assert after[: len(before)] == before
            if before[-1:] == (1,):
                assert after == before
                continue
            expected = alone(expert, adapter.prompt(inputs, before), LENGTH - len(before))
            found, whole = read(adapter, inputs, after), read(adapter, inputs, before) + expected
            whole = whole if before or family != "t5" else whole.lstrip()
            n_ended += after[-1] == 1
            assert found == whole if after[-1] == 1 else whole.startswith(found) and len(after) == LENGTH
    assert n_ended


@ignore_call_warnings
@pytest.mark.parametrize("by_token", [False, True])
def test_contract(by_token: bool, endpoint: str) -> None:
    pair = remote_pair(endpoint, made_of("bytes", "gpt2", 1, 3), by_token=by_token)
    served = served_of(pair)
    examples = served.codec.encode(TEXTS[:3])
    check_expert(pair.expert, examples, served.spec, drafts=draft(pair.predictor, examples, served.spec).sequences)
    assert pair.expert.waits
    assert not pair.expert.deterministic


@ignore_call_warnings
def test_next_tokens_begin_the_experts_text(endpoint: str, expert: TextModel, spy: Spy) -> None:
    pair = remote_pair(endpoint, made_of("bytes", "gpt2", 1, 3), by_token=True)
    assert isinstance(pair.expert, RemoteTokenExpert)
    served, adapter = served_of(pair), pair.expert.adapter
    examples = served.codec.encode(TEXTS)
    calls, state = spy(EndpointClient, "_post"), pair.expert.start(examples)
    rows = torch.tensor([4, 0, 4])
    for _ in range(3):
        named, state = pair.expert.next(state, rows)
        for row, token in zip(rows.tolist(), named.tolist(), strict=True):
            inputs, written = state.inputs[row], state.written[row]
            text = alone(expert, adapter.prompt(inputs, written), 1)
            assert text.startswith(adapter._text([token]))
            assert text or token == 1
        assert named[0] == named[2]
        again, state = pair.expert.next(state, rows)
        assert again.tolist() == named.tolist()
        state = pair.expert.append(state, torch.full((len(TEXTS),), 36))
    assert len(calls) == 1 + 3 * 2  # the first finds out that this server takes no token ids


def test_hand_offs_are_completions(endpoint: str, spy: Spy) -> None:
    """Labelling makes one call for each hand-off of a draft that has not ended."""
    pair = remote_pair(endpoint, made_of("bytes", "gpt2", 1, 3))
    thirds: Any = {name: random_documents(9)[place::3] for place, name in enumerate(("train", "validation", "test"))}
    task = TextTask("text", TextOptions(length=LENGTH, input_tokens=40), pair, thirds)
    examples = task.split("train")
    drafted = draft(task.predictor, examples, task.spec)
    calls = spy(EndpointClient, "_post")
    table, counted = hand_off_table(task, examples, drafted)
    assert len(calls) == int(drafted.sequences.lengths.sum()) == counted.made
    plain, naive = hand_off_table(task, examples, drafted, shortcut=False)
    assert torch.equal(table.loss, plain.loss)
    assert torch.equal(table.deferred, plain.deferred)
    assert naive == Calls(counted.made, 0)


@ignore_call_warnings
def test_a_forced_first_token_needs_no_call(server: Misbehaving, spy: Spy) -> None:  # noqa: F811
    """BART's first token is always the same."""
    calls, model = spy(EndpointClient, "_post"), tiny_text_model("bart", 1, 1)
    pair = remote_pair(server.url, model, by_token=True)
    assert isinstance(pair.expert, RemoteTokenExpert)
    server.behaviours = [completion("w9 w8")] * 2
    examples = Examples(torch.tensor([[3, 4]]), torch.tensor([[3]]), torch.tensor([0]))
    named, state = pair.expert.next(pair.expert.start(examples), torch.tensor([0]))
    assert (named.tolist(), len(calls)) == ([5], 0)
    named, _ = pair.expert.next(pair.expert.append(state, named), torch.tensor([0]))
    assert (named.tolist(), len(calls)) == ([9], 1)
    nothing = Sequences(torch.zeros(1, LENGTH, dtype=torch.long), torch.tensor([0]))
    completed = pair.expert.complete(examples, nothing, SequenceSpec(LENGTH, 1))
    assert completed.tokens[0, : int(completed.lengths[0])].tolist() == [5, 9, 8, 1]


@ignore_call_warnings
def test_a_partial_letter_is_requested_again_with_more_tokens(server: Misbehaving) -> None:  # noqa: F811
    pair = remote_pair(server.url, made_of("bytes", "gpt2", 1, 3), by_token=True, at_once=1)
    assert isinstance(pair.expert, RemoteTokenExpert)
    texts = [completion("\ufffd", "length"), completion("", "stop"), completion("41", "length")]
    server.behaviours = [completion("no token ids"), *texts]
    examples = Examples(torch.tensor([[13, 4], [13, 5]]), torch.tensor([[3], [3]]), torch.arange(2))
    named, _ = pair.expert.next(pair.expert.start(examples), torch.arange(2))
    assert pair.expert.adapter._text(named[:1].tolist()) == "41"
    assert named[1] == 1
    assert [request.body["max_tokens"] for request in server.asked] == [1, 1, 1, 4]


def test_a_predictor_without_an_end_token(server: Misbehaving) -> None:  # noqa: F811
    network, tokenizer = tiny("gpt2", 1, 1), pieces.__wrapped__("bytes")
    network.generation_config.eos_token_id, tokenizer.eos_token = None, None
    with pytest.raises(OptionError, match="endless has no end token"):
        remote_pair(server.url, text_model(network, tokenizer, "endless"))


# -- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    tiny("gpt2", 1, 3).save_pretrained(folder / "predictor")
    pieces("bytes").save_pretrained(folder / "predictor")
    write_lines(folder / "train.jsonl", random_documents(24))
    (folder / "inputs.txt").write_text("\n".join(TEXTS))
    return folder


def fit(place: Path, out: Path, url: str, *more: str) -> list[str]:
    return [
        "fit", "text", "--predictor", str(place / "predictor"), "--expert", url, "--expert-model", "toy",
        "--train", str(place / "train.jsonl"), "--test-documents", "1", "--length", str(LENGTH), "--input-tokens", "40",
        "--suffix", " w1",
        "--device", "cpu", "--quiet", "--out", str(out), "--expert-retries", "0", *more,
    ]  # fmt: skip


def test_calls_for_documents_of_the_test_are_announced() -> None:
    """Those that `fit --guarantee` and `run` keep apart are labelled, too, and were left out of the number, and of the
    options to lower."""
    options = TextOptions("small", "https://host/v1", length=8, expert_model="large")
    documents = [Document("1", "a text", "its summary")] * 3
    said = r"may call https://host/v1 72 times \(8 hand-offs of 9 documents\); .* and --test-documents to make fewer"
    with pytest.warns(ExpertCallsWarning, match=said):
        _warn_about_calls(options, {"train": documents, "validation": documents, "test": documents})


def test_fit_calibrate_and_generate(
    place: Path, endpoint: str, tmp_path: Path, spy: Spy, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    monkeypatch.setenv(HOST_VARIABLE, endpoint.split("/")[2])
    calls, out = spy(EndpointClient, "_post"), tmp_path / "model"
    with pytest.warns(ExpertCallsWarning, match=r"may call http.* 192 times \(8 hand-offs of 24 documents\)"):
        assert cli.main(fit(place, out, endpoint)) == 0
    assert 24 < len(calls) <= 192
    shown = capsys.readouterr().out
    assert "what budgets buy" in shown  # losses, though a remote expert is not timed
    assert "Random" in shown
    pairing = json.loads((out / "deferral.json").read_text())
    assert pairing["options"]["expert"] == endpoint
    assert load_rejector(out / "rejector").notes["method"] == "OneTimeCost"
    calls.clear()
    assert cli.main(["calibrate", str(out), "--data", str(place / "inputs.txt"), "--quiet", "--device", "cpu"]) == 0
    assert 0 < len(calls) <= LENGTH * len(TEXTS)
    calls.clear()
    capsys.readouterr()
    assert cli.main(["generate", str(out), *TEXTS, "--budget", "0", "--json", "--quiet", "--device", "cpu"]) == 0
    assert calls == []
    assert cli.main(["generate", str(out), *TEXTS, "--budget", "1", "--json", "--quiet", "--device", "cpu"]) == 0
    assert len(calls) == len(TEXTS)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {token["source"] for row in rows[: len(TEXTS)] for token in row["tokens"]} == {"predictor"}
    assert {token["source"] for row in rows[len(TEXTS) :] for token in row["tokens"]} == {"expert"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not any(SECRET.encode() in path.read_bytes() for path in files)


@ignore_call_warnings
def test_python_takes_an_endpoint_for_the_expert(place: Path, endpoint: str) -> None:
    options = {"expert_model": "toy", "expert_retries": 0, "length": 4, "input_tokens": 40, "device": "cpu"}
    options["suffix"] = " w1"
    model = DeferringModel.from_pair(tiny("gpt2", 1, 3), endpoint, pieces("bytes"), **options)
    sizes = {"train_documents": 6, "validation_documents": 3}
    model.fit(place / "train.jsonl", metric="exact_match", progress=False, **sizes)
    assert model.method == "OneTimeCost"
    assert {source for row in model.generate(TEXTS[:2], 1.0).sources for source in row} == {"expert"}
    with pytest.raises(OptionError, match="--expert-model is missing"):
        DeferringModel.from_pair(tiny("gpt2", 1, 3), endpoint, pieces("bytes"))


@ignore_call_warnings
def test_by_token(place: Path, endpoint: str, tmp_path: Path, capsys: Capture) -> None:
    out, options = tmp_path / "model", ["--length", "3", "--train-documents", "6", "--validation-documents", "3"]
    error = refused(capsys, *fit(place, out, endpoint, *options, "--method", "TokenwiseModel"))
    assert "completes sequences and names no next token" in error
    refusal = "for every token that it names, because it cannot be read in chunks: it refused a prompt of token ids"
    with pytest.warns(ExpertCallsWarning, match=refusal):
        assert cli.main(fit(place, out, endpoint, *options, "--expert-by-token")) == 0
    model = DeferringModel.from_pretrained(out, device="cpu")
    assert isinstance(model.served.expert, RemoteTokenExpert)
    assert model.rejector.notes["method"] == "TokenwiseModel"
    with pytest.warns(ExpertCallsWarning, match=refusal):
        written = model.generate(TEXTS[:2], 1.0)
    assert {source for row in written.sources for source in row} == {"expert"}


@ignore_call_warnings
def test_answers_are_stored(
    place: Path,
    server: Misbehaving,  # noqa: F811
    tmp_path: Path,
    capsys: Capture,
) -> None:
    """An endpoint that dies midway loses at most the answers of one batch of documents."""
    whole, lived = tmp_path / "whole", 60
    assert cli.main(fit(place, whole, server.url)) == 0
    total = len(server.asked)
    assert total > 2 * lived
    server.asked.clear()
    server.behaviours = [*[completion("fine")] * lived, *[status(402, "no money left")] * 100]
    error = refused(capsys, *fit(place, tmp_path / "model", server.url))
    assert "refused the call for 'toy' (status 402, 'no money left')" in error
    server.behaviours.clear()
    server.asked.clear()
    assert cli.main(fit(place, tmp_path / "model", server.url)) == 0
    assert total - lived <= len(server.asked) <= total - lived + DOCUMENTS_PER_BATCH * LENGTH
    server.asked.clear()
    assert cli.main(fit(place, tmp_path / "model", server.url)) == 0
    assert server.asked == []


def test_options_are_checked(capsys: Capture, place: Path, tmp_path: Path) -> None:
    url = "https://host/v1"
    with pytest.raises(OptionError, match="--expert-model is missing; give the name of a model at https://host/v1"):
        TextOptions(expert=url)
    for more in ({"expert_model": "m"}, {"expert_by_token": True}):
        with pytest.raises(OptionError, match="need --expert https://HOST/v1, not 'models/large'"):
            TextOptions(expert="models/large", **more)  # type: ignore[arg-type]
    for bad, match in (
        ({"expert_retries": -1}, "--expert-retries is -1; it must be at least 0"),
        ({"expert_at_once": 1000}, "--expert-at-once is 1000; it must be at most 256"),
        ({"expert_seconds": 0.0}, "more than 0"),
    ):
        with pytest.raises(OptionError, match=match):
            TextOptions(expert=url, expert_model="m", **bad)  # type: ignore[arg-type]
    for more in ([], ["--expert-model", ""]):
        error = refused(capsys, *fit(place, tmp_path / "model", "https://me:hush@host/v1", *more))
        assert KEY_VARIABLE in error
        assert "hush" not in error


def test_the_fingerprint_ignores_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prints = made_of_once("bytes", "gpt2"), list[str]()
    for key in ("one", "two"):
        monkeypatch.setenv(KEY_VARIABLE, key)
        for url in ("https://host/v1", "https://other/v1"):
            monkeypatch.setenv(HOST_VARIABLE, url.split("/")[2])
            prints += [remote_pair(url, model, prompt=prompt).expert.fingerprint for prompt in (PROMPT, "x" + PROMPT)]
    assert prints[:4] == prints[4:]
    assert len({*prints}) == 4
    monkeypatch.delenv(KEY_VARIABLE)
    same = [remote_pair("https://host/v1", model, by_token=choice, retries=choice) for choice in (False, True)]
    assert {pair.expert.fingerprint for pair in same} == {prints[0]}


# -- served ---------------------------------------------------------------------------------------------------------


def test_the_predictor_finishes_if_the_endpoint_dies(
    server: Misbehaving,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("fastapi", reason="needs the extra 'server'")
    from tests.server.test_app import running

    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    pair = remote_pair(server.url, made_of("bytes", "gpt2", 1, 3), retries=0)
    model = with_rejector(served_of(pair), "once")
    model.calibrate(TEXTS)
    alone = model.generate(TEXTS[:1], 0.0).outputs[0]
    with running(model) as front:
        server.behaviours = [completion(" w41 w5", "stop"), *[status(500, f"it was {SECRET}")] * 10]
        answers = [front.post("/v1/completions", {"model": "toy@1", "prompt": TEXTS[0]}).json() for _ in range(2)]
        assert answers[0]["choices"][0]["text"] == " w41 w5"
        assert answers[0]["deferral"]["degraded"] is False
        assert answers[1]["choices"][0]["text"] == alone
        assert answers[1]["deferral"]["degraded"] is True
        assert answers[1]["deferral"]["reason"] == "the expert failed (EndpointError)"
        n = len(server.asked)
        unasked = front.post("/v1/completions", {"model": "toy@0", "prompt": TEXTS[0]}).json()
        assert unasked["deferral"]["degraded"] is False
        assert len(server.asked) == n
    assert server.asked[-1].headers["authorization"] == f"Bearer {SECRET}"
    assert "the expert failed, the predictor finished" in caplog.text
    assert SECRET not in caplog.text + json.dumps(answers)
