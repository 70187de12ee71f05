"""Chats: rendered with their roles where the model has a template for them, else joined, which is said."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

from seqdefer.engine.drafts import draft
from seqdefer.errors import InputError
from seqdefer.interfaces import Served
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.token import LSTMRejector
from seqdefer.types import SequenceSpec

pytest.importorskip("fastapi", reason="needs the extra 'server'")
pytest.importorskip("uvicorn", reason="needs the extra 'server'")
pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
pytest.importorskip("openai", reason="needs the official client: pip install openai")
pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import tiny, tokenizer

from seqdefer.tasks.text.codec import Rendered
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.models import text_model as as_text_model
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.tasks.text.task import TextOptions, codec_of
from tests.server.test_app import Running, running, text_model
from tests.server.test_faults import check_refused

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::seqdefer.model.deferring_model.BudgetWarning"),
]
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for one in messages %}"
    "{% if not loop.first and one.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}"
    "{{ {'system': 'w10', 'user': 'w11', 'assistant': 'w12'}[one.role] }} {{ one.content }} "
    "{% endfor %}{% if add_generation_prompt %}w12{% endif %}"
)
SAID = [
    {"role": "system", "content": "w20 w21"},
    {"role": "user", "content": "w22"},
    {"role": "assistant", "content": "w23"},
    {"role": "user", "content": "w24 w25"},
]
RENDERED = "w10 w20 w21 w11 w22 w12 w23 w11 w24 w25 w12"


def model_with(family: str, template: str | None) -> DeferringModel:
    """A tiny pair with a prefix and a suffix of the task's own, and a rejector with random weights."""
    words = deepcopy(tokenizer())
    words.chat_template = template

    def part(n_layers: int, seed: int) -> TextModel:
        return as_text_model(tiny(family, n_layers, seed), words, family)

    pair = TextPair.of(part(1, 1), part(2, 6))
    codec = codec_of(TextOptions(length=8, input_tokens=16, prefix="w50 ", suffix=" w51"), pair)
    served = Served(pair.predictor, pair.expert, SequenceSpec(8, pair.predictor.end), codec)
    drafted = draft(served.predictor, codec.encode(["w5", "w6 w7"]), served.spec)
    torch.manual_seed(0)
    sizes = Sizes(drafted.context.shape[1], drafted.features.shape[2], 8, True, layers=1, units=8, dropout=0.0)
    model = DeferringModel(served, LSTMRejector(sizes, served.predictor.fingerprint).eval())
    model.calibrate([f"w{number}" for number in range(5, 25)])
    return model


@cache
def chatty() -> DeferringModel:
    """Nobody may change it."""
    return model_with("qwen2", TEMPLATE)


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(chatty()) as server:
        yield server


def ids(*texts: str) -> list[list[int]]:
    return [[int(word[1:]) for word in text.split()] for text in texts]


def ask(server: Running, said: list[dict[str, str]], **more: Any) -> Any:
    return server.client.chat.completions.create(model="toy@0.5", messages=said, **more)


def test_the_template_renders_the_roles() -> None:
    codec = chatty().served.codec
    assert codec.knows_roles
    assert codec.chat(SAID) == RENDERED
    assert codec.encode([codec.chat(SAID)]).inputs.tolist() == ids(RENDERED)  # neither prefix nor suffix


def test_chats_and_documents_share_a_batch() -> None:
    codec = chatty().served.codec
    rows = codec.encode(["w5 w6", codec.chat(SAID[1:2]), "w7"]).inputs.tolist()
    assert [[token for token in row if token >= 0] for row in rows] == ids("w50 w5 w6 w51", "w11 w22 w12", "w50 w7 w51")


def test_the_answer_is_that_to_the_rendered_chat(served: Running) -> None:
    model = chatty()
    written = model.generate([model.served.codec.chat(SAID)], 0.5)
    answer = ask(served, SAID)
    assert answer.choices[0].message.content == written.outputs[0]
    assert answer.usage.prompt_tokens == len(RENDERED.split())
    assert "remarks" not in answer.deferral
    chunks = ask(served, SAID, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == written.outputs[0]


def test_developers_are_the_system_under_a_new_name(served: Running) -> None:
    answer = ask(served, [{**SAID[0], "role": "developer"}, *SAID[1:]])
    assert answer.choices[0].message.content == ask(served, SAID).choices[0].message.content


def test_what_the_template_refuses_is_refused(served: Running) -> None:
    body = {"model": "toy", "messages": [SAID[1], SAID[1]]}
    check_refused(served.post(CHAT, body), 400, "roles must take turns")


def test_a_chat_is_not_cut(served: Running) -> None:
    """Its end says whose turn it is."""
    long = [{"role": "user", "content": " ".join(["w5"] * 20)}]
    check_refused(served.post(CHAT, {"model": "toy", "messages": long}), 400, "22 tokens, and 16 can be read; say less")
    with pytest.raises(InputError, match="say less"):
        chatty().served.codec.encode([Rendered(" ".join(["w5"] * 17))])


@pytest.mark.parametrize(("family", "template"), [("qwen2", None), ("t5", TEMPLATE)])
def test_without_a_template_or_with_an_encoder_messages_are_joined(family: str, template: str | None) -> None:
    codec = model_with(family, template).served.codec
    assert not codec.knows_roles
    assert codec.chat(SAID) == "w20 w21\n\nw22\n\nw23\n\nw24 w25"


@pytest.mark.parametrize(
    ("said", "is_remarked"), [(SAID[1:2], False), (SAID[:1], True), (SAID[:2], True), (SAID[1:4], True)]
)
def test_joining_is_remarked_where_it_matters(said: list[dict[str, str]], is_remarked: bool) -> None:
    with running(text_model()) as server:
        answer = ask(server, said)
    joined = "\n\n".join(one["content"] for one in said)
    assert answer.choices[0].message.content == text_model().generate([joined], 0.5).outputs[0]
    assert any("knows no roles" in remark for remark in answer.deferral.get("remarks", [])) == is_remarked
