"""Remote experts that name tokens: read in chunks from a server that speaks vLLM's protocol, else text by text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from thresholds import between

pytest.importorskip("transformers", reason="needs the extra 'text'")
pytest.importorskip("httpx", reason="needs the extra 'remote'")

from tiny_models import LENGTH, documents, random_documents, task_of, tiny, tiny_text_model, tokenizer
from vllm_like import FIELDS, VllmLike, forty_documents, vllm_like

from seqdefer import cli
from seqdefer.budgets.policies import Threshold
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import roll_out
from seqdefer.engine.pace import FixedPace
from seqdefer.engine.speculative import run_all, speculative_loop
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.exploration import explore_trees
from seqdefer.labels.trees import DecisionTrees
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.rejectors.confidence import Confidence
from seqdefer.remote.client import Endpoint, EndpointClient, EndpointError
from seqdefer.tasks.text.models import TextModel, text_model
from seqdefer.tasks.text.pairs import MixedPair, TextPair
from seqdefer.tasks.text.remote import PROMPT, ExpertCallsWarning
from seqdefer.tasks.text.remote_tokens import IdExchange, RemoteTokenExpert, TextExchange
from seqdefer.testing import check_expert
from seqdefer.types import Examples, Sequences, SequenceSpec
from tests.labels.test_exploration import by_prefix
from tests.remote.test_client import Misbehaving, server, status  # noqa: F401, server is a fixture
from tests.tasks.text.test_remote import made_of, pieces

pytestmark = pytest.mark.usefixtures("one_thread")
DECODERS = ("gpt2", "llama", "qwen2")
PROBE = 1  # calls


@pytest.fixture(params=DECODERS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def vllm(family: str) -> Iterator[VllmLike]:
    with vllm_like(tiny_text_model(family, 2, 6)) as running:
        yield running


def expert_at(url: str, predictor: TextModel, prompt: str = PROMPT) -> RemoteTokenExpert:
    client = EndpointClient(Endpoint(url, "toy", retries=0))
    expert = MixedPair.of_remote(predictor, client, prompt=prompt, by_token=True).expert
    assert isinstance(expert, RemoteTokenExpert)
    return expert


def local_pair(vllm: VllmLike, family: str) -> TextPair:
    return TextPair.of(tiny_text_model(family, 1, 1), vllm.model)


# -- chunks ---------------------------------------------------------------------------------------------------------


def test_a_chunk_names_the_tokens_of_the_same_model_here(vllm: VllmLike, family: str) -> None:
    """After every prefix, in one call for each row; and completions are the same, too."""
    pair, spec = local_pair(vllm, family), SequenceSpec(LENGTH, 1)
    expert, examples = expert_at(vllm.url, pair.predictor.model), documents(6)
    drafts = draft(pair.predictor, examples, spec).sequences
    for size in (0, 1, 4, LENGTH):
        chunk = torch.randint(3, 60, (6, size), generator=torch.Generator().manual_seed(size))
        named, state = expert.read(expert.start(examples), chunk)
        expected, _ = pair.expert.read(pair.expert.start(examples), chunk)
        assert torch.equal(named, expected)
        assert [len(written) for written in state.written] == [size] * 6
    for kept in (0, 2, LENGTH - 1):
        prefixes = drafts.truncate(torch.full_like(drafts.lengths, kept))
        completed, expected = (one.complete(examples, prefixes, spec) for one in (expert, pair.expert))
        assert torch.equal(completed.lengths, expected.lengths)
        assert torch.equal(completed.tokens[completed.mask()], expected.tokens[expected.mask()])
    assert isinstance(expert.exchange, IdExchange)


def test_contract(vllm: VllmLike, family: str) -> None:
    """It is not deterministic, because servers need not be; this one is, so that all rules can be checked."""
    pair = local_pair(vllm, family)
    expert, examples, spec = expert_at(vllm.url, pair.predictor.model), documents(2), SequenceSpec(5, 1)
    assert (expert.deterministic, expert.waits, expert.pays_by_call) == (False, True, True)
    expert.deterministic = True
    check_expert(expert, examples, spec, drafts=draft(pair.predictor, examples, spec).sequences)


@pytest.mark.parametrize("family", ["gpt2"], indirect=True)
def test_calls(vllm: VllmLike, family: str) -> None:
    expert, examples = expert_at(vllm.url, tiny_text_model(family, 1, 1)), documents(4)
    chunk, every = torch.full((4, 5), 9), torch.arange(4)
    state = expert.start(examples)
    named, after = expert.read(state, chunk)
    assert len(vllm.asked) == PROBE + 4
    assert all(body["prompt_logprobs"] == 1 for body in vllm.asked)
    assert all((body["max_tokens"], body["temperature"]) == (1, 0) for body in vllm.asked)
    assert vllm.asked[1]["prompt"][-5:] == [9] * 5
    for position in range(6):  # every shorter prefix is known
        answer, state = expert.next(state, every)
        assert torch.equal(answer, named[:, position])
        state = expert.append(state, chunk[:, 0])
    assert torch.equal(expert.read(expert.start(examples.select(every[:0])), chunk[:0])[0], named[:0])
    again, _ = expert.read(expert.select(after, torch.tensor([2, 2])), chunk[:2, :0])
    assert torch.equal(again, named[[2, 2], 5:])
    assert len(vllm.asked) == PROBE + 4 == expert.n_calls
    expert.next(expert.append(after, chunk[:, 0]), torch.tensor([1]))
    assert "prompt_logprobs" not in vllm.asked[-1]  # nothing within it is new


@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_calls_that_write_ahead(vllm: VllmLike, family: str) -> None:
    expert, examples = expert_at(vllm.url, tiny_text_model(family, 1, 1)), documents(4)
    state, rows, n = expert.write_ahead(expert.start(examples), LENGTH), torch.arange(4), 0
    alone = expert.complete(examples, *_blank(4))
    before = len(vllm.asked)
    for position in range(LENGTH):
        rows = (alone.lengths > position).nonzero().squeeze(1)
        if len(rows):
            named, _ = expert.next(state, rows)
            assert torch.equal(named, alone.tokens[rows, position])
            n += len(rows)
        state = expert.append(state, alone.tokens[:, position])
    assert len(vllm.asked) == before + 4 < before + n


def _blank(n: int) -> tuple[Sequences, SequenceSpec]:
    return Sequences(torch.zeros(n, LENGTH, dtype=torch.long), torch.zeros(n, dtype=torch.long)), SequenceSpec(
        LENGTH, 1
    )


@pytest.mark.parametrize("family", ["gpt2"], indirect=True)
def test_a_custom_prompt_is_sent_as_ids(vllm: VllmLike, family: str) -> None:
    model = tiny_text_model(family, 1, 1)
    expert = expert_at(vllm.url, model, "w5 w6 {input} w7{written}")
    examples = Examples(torch.tensor([[13, 14, -1]]), torch.tensor([[3]]), torch.tensor([0]))
    expert.read(expert.start(examples), torch.tensor([[8, 9]]))
    assert vllm.asked[-1]["prompt"] == [5, 6, 13, 14, 7, 8, 9]


# -- decision trees -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "qwen2"], indirect=True)
def test_trees_hold_the_labels_of_the_same_model_here(vllm: VllmLike, family: str) -> None:
    pair, some = local_pair(vllm, family), random_documents(12)
    here = task_of(TextPair.of(pair.predictor.model, vllm.model, "facts"), some, length=LENGTH)
    there = task_of(_mixed(vllm, pair.predictor.model), some, length=LENGTH)  # type: ignore[arg-type]
    examples = here.split("train")
    for make in (enumerate_trees, partial(explore_trees, rollouts=8), _grown):
        before = len(vllm.asked)
        one, other = make(here, examples), make(there, examples)
        assert _labels(one) == _labels(other)
        calls = len(vllm.asked) - before
        assert calls < one.calls.made * 0.6
        assert calls - other.calls.made in (0, PROBE)


def _mixed(vllm: VllmLike, predictor: TextModel) -> MixedPair:
    client = EndpointClient(Endpoint(vllm.url, "toy"))
    return MixedPair.of_remote(predictor, client, prompt=PROMPT, by_token=True, shown="facts")


def _grown(task: Any, examples: Any) -> DecisionTrees:
    trees = DecisionTrees(task, examples)
    trees.typical_nodes()
    trees.ask_late()
    return trees


def _labels(trees: DecisionTrees) -> dict[Any, Any]:
    """Return tokens, losses and children of every node; features of other batches differ in their last digits."""
    return {place: [content[0], content[1], *content[5:]] for place, content in by_prefix(trees).items()}


# -- servers that cannot be read in chunks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unknown", "reason"),
    [
        ("prompt_logprobs", "its responses have no prompt_logprobs"),
        ("return_token_ids", "its responses have no token_ids"),
        ("decoded_token", "its prompt_logprobs have no decoded_token, so vocabularies cannot be compared"),
        ("ids", r"it refused a prompt of token ids \(status 400, 'prompt must be a string'\)"),
    ],
)
def test_other_servers_exchange_texts(unknown: str, reason: str) -> None:
    """They say so once, and name the tokens as before: one call each."""
    model, examples = made_of("bytes", "gpt2", 1, 1), documents(2)
    with vllm_like(made_of("bytes", "gpt2", 2, 6), FIELDS - {unknown}) as running:
        expert = expert_at(running.url, model)
        with pytest.warns(ExpertCallsWarning, match=f"cannot be read in chunks: {reason}") as warned:
            named, state = expert.read(expert.start(examples), torch.full((2, 3), 9))
        assert len(warned) == 1
        assert isinstance(expert.exchange, TextExchange)
        assert named.shape == (2, 4)
        assert len(running.asked) >= PROBE + 2 * 4
        assert {type(body["prompt"]) for body in running.asked[PROBE:]} == {str}
        expert.next(state, torch.arange(2))  # known, and no second warning


def test_another_vocabulary_is_not_sent_ids() -> None:
    with vllm_like(made_of("bytes", "gpt2", 2, 6)) as running:  # as many tokens, which mean others
        expert = expert_at(running.url, tiny_text_model("gpt2", 1, 1))
        with pytest.warns(ExpertCallsWarning, match=r"it has another vocabulary: token \d+ is '.+', the predictor's"):
            assert isinstance(expert.exchange, TextExchange)
        assert len(running.asked) == PROBE


def test_a_larger_vocabulary_of_the_predictor_is_not_sent_ids() -> None:
    added = tokenizer.__wrapped__()
    added.add_tokens(["w60", "w61"])
    network = tiny("gpt2", 1, 1)
    network.resize_token_embeddings(62, mean_resizing=False)
    with vllm_like(tiny_text_model("gpt2", 2, 6)) as running:
        expert = expert_at(running.url, text_model(network, added, "larger"))
        with pytest.warns(ExpertCallsWarning, match="Token id 60 is out of vocabulary"):
            assert isinstance(expert.exchange, TextExchange)


def test_a_predictor_with_an_encoder_exchanges_texts() -> None:
    with vllm_like(tiny_text_model("gpt2", 2, 6)) as running:
        expert = expert_at(running.url, tiny_text_model("t5", 1, 1))
        with pytest.warns(ExpertCallsWarning, match="the predictor t5 has an encoder"):
            assert isinstance(expert.exchange, TextExchange)
        assert running.asked == []


def test_a_server_that_fails_is_not_taken_for_another_kind(server: Misbehaving) -> None:  # noqa: F811
    """An outage or a bad key must not change how tokens are asked for."""
    expert, examples = expert_at(server.url, tiny_text_model("gpt2", 1, 1)), documents(1)
    for number in (401, 404, 500):
        server.behaviours = [status(number)]
        with pytest.raises(EndpointError):
            expert.next(expert.start(examples), torch.tensor([0]))


def test_a_server_that_changes_is_an_error() -> None:
    with vllm_like(tiny_text_model("gpt2", 2, 6)) as running:
        expert, examples = expert_at(running.url, tiny_text_model("gpt2", 1, 1)), documents(1)
        expert.next(expert.start(examples), torch.tensor([0]))
        running.knows = FIELDS - {"return_token_ids"}
        with pytest.raises(EndpointError, match="was read in chunks until now, but its responses have no token_ids"):
            expert.next(expert.start(examples), torch.tensor([0]))


# -- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::seqdefer.tasks.text.remote.ExpertCallsWarning")
def test_fit_makes_few_calls(tmp_path: Path) -> None:
    """Regression: one call for every prefix, 10,396 for 40 documents like these."""
    tiny("qwen2", 1, 1).save_pretrained(tmp_path / "predictor")
    pieces("bytes").save_pretrained(tmp_path / "predictor")
    with vllm_like(made_of("bytes", "qwen2", 2, 6)) as running:
        assert cli.main(forty_documents(tmp_path, running.url)) == 0
        asked = len(running.asked)
        assert 40 < asked <= 500
        assert {type(body["prompt"]) for body in running.asked} == {list}
        assert cli.main(forty_documents(tmp_path, running.url)) == 0  # labels are stored; budgets are measured again
        assert len(running.asked) - asked < 100
    model = DeferringModel.from_pretrained(tmp_path / "model", device="cpu")
    assert model.rejector.notes["method"] == "TokenwiseModel"


@pytest.mark.parametrize("metric", ["rouge1", "chrf"])
def test_no_more_calls_are_made_than_announced(metric: str, tmp_path: Path) -> None:
    """By token, 264 were announced and 422 made: those of hand-offs were counted, which such a fit does not make."""
    tiny("qwen2", 1, 1).save_pretrained(tmp_path / "predictor")
    pieces("bytes").save_pretrained(tmp_path / "predictor")
    with vllm_like(made_of("bytes", "qwen2", 2, 6), FIELDS - {"prompt_logprobs"}) as running:
        few = ["--train-documents", "6", "--validation-documents", "3", "--metric", metric]
        with pytest.warns(ExpertCallsWarning) as warned:
            assert cli.main([*forty_documents(tmp_path, running.url), *few]) == 0
        (announced,) = re.findall(
            r"may call \S+ ([0-9,]+) times \(8 hand-offs and 47 tokens on 8", str(warned[0].message)
        )
        assert (
            9 * 8
            < len(running.asked)
            <= int(announced.replace(",", ""))
            == 9 * (8 + 47 * (1 if metric == "rouge1" else 3))
        )


# -- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2"], indirect=True)
@pytest.mark.parametrize("ahead", [1, 3, 8])
def test_speculation_asks_a_call_per_chunk(vllm: VllmLike, family: str, ahead: int) -> None:
    """Tokens are those of the same model loaded here; a text without open questions makes no call."""
    pair, spec, examples = local_pair(vllm, family), SequenceSpec(LENGTH, 1), documents(5)
    expert = expert_at(vllm.url, pair.predictor.model)
    alone = roll_out(pair.predictor, pair.expert, examples, Threshold(Confidence(), 9e9), spec)
    for threshold in (-9e9, *(between(alone.scores, share) for share in (0.43, 0.81)), 9e9):
        policy, before = Threshold(Confidence(), threshold), expert.n_calls
        expected = roll_out(pair.predictor, pair.expert, examples, policy, spec)
        loop = speculative_loop(pair.predictor, expert, policy, spec, FixedPace(ahead, foresees=True))
        found = run_all(loop, examples, 3)
        assert torch.equal(found.sequences.tokens, expected.sequences.tokens)
        assert torch.equal(found.authors, expected.authors)
        assert expert.n_calls - before - PROBE <= loop.work.chunks <= int(expected.deferred.sum())
        assert (expert.n_calls == before) == (threshold == 9e9)
