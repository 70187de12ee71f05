"""Chats: rendered with the model's chat template if it has one, else joined with a remark."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from servers import CHAT, IGNORE_BUDGETS, LENGTH, RunningServer, check_error, running, text_model, with_random_rejector

from seqdefer.errors import InputError
from seqdefer.model.deferring_model import DeferringModel

pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import tiny, tokenizer

from seqdefer.tasks.text.codec import Rendered
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.models import text_model as as_text_model
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.tasks.text.task import TextOptions, codec_of

pytestmark = IGNORE_BUDGETS
TEMPLATE = (
    "{% for one in messages %}"
    "{% if not loop.first and one.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}"
    "{{ {'system': 'w10', 'user': 'w11', 'assistant': 'w12'}[one.role] }} {{ one.content }} "
    "{% endfor %}{% if add_generation_prompt %}w12{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "w20 w21"},
    {"role": "user", "content": "w22"},
    {"role": "assistant", "content": "w23"},
    {"role": "user", "content": "w24 w25"},
]
RENDERED = "w10 w20 w21 w11 w22 w12 w23 w11 w24 w25 w12"


def model_with(family: str, template: str | None) -> DeferringModel:
    """Return a tiny pair, whose task adds a prefix and a suffix, and a rejector with random weights."""
    words = deepcopy(tokenizer())
    words.chat_template = template

    def part(n_layers: int, seed: int) -> TextModel:
        return as_text_model(tiny(family, n_layers, seed), words, family)

    pair = TextPair.of(part(1, 1), part(2, 6))
    codec = codec_of(TextOptions(length=LENGTH, input_tokens=16, prefix="w50 ", suffix=" w51"), pair)
    return with_random_rejector(pair, codec, [f"w{number}" for number in range(5, 25)])


@cache
def chat_model() -> DeferringModel:
    """A pair with a chat template. Shared: do not change it."""
    return model_with("qwen2", TEMPLATE)


@pytest.fixture(scope="module")
def chat_server() -> Iterator[RunningServer]:
    with running(chat_model()) as server:
        yield server


def ids(*texts: str) -> list[list[int]]:
    return [[int(word[1:]) for word in text.split()] for text in texts]


def ask(server: RunningServer, messages: list[dict[str, str]], **more: Any) -> Any:
    return server.client.chat.completions.create(model="toy@0.5", messages=messages, **more)


def test_template_renders_roles() -> None:
    codec = chat_model().served.codec
    assert codec.knows_roles
    assert codec.chat(MESSAGES) == RENDERED
    assert codec.encode([codec.chat(MESSAGES)]).inputs.tolist() == ids(RENDERED)  # without prefix and suffix


def test_chats_and_documents_share_a_batch() -> None:
    codec = chat_model().served.codec
    rows = codec.encode(["w5 w6", codec.chat(MESSAGES[1:2]), "w7"]).inputs.tolist()
    assert [[token for token in row if token >= 0] for row in rows] == ids("w50 w5 w6 w51", "w11 w22 w12", "w50 w7 w51")


def test_response_is_that_to_the_rendered_chat(chat_server: RunningServer) -> None:
    model = chat_model()
    written = model.generate([model.served.codec.chat(MESSAGES)], 0.5)
    response = ask(chat_server, MESSAGES)
    assert response.choices[0].message.content == written.outputs[0]
    assert response.usage.prompt_tokens == len(RENDERED.split())
    assert "remarks" not in response.deferral
    chunks = ask(chat_server, MESSAGES, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == written.outputs[0]


def test_developer_is_the_system_role(chat_server: RunningServer) -> None:
    response = ask(chat_server, [{**MESSAGES[0], "role": "developer"}, *MESSAGES[1:]])
    assert response.choices[0].message.content == ask(chat_server, MESSAGES).choices[0].message.content


def test_template_errors_are_reported(chat_server: RunningServer) -> None:
    body = {"model": "toy", "messages": [MESSAGES[1], MESSAGES[1]]}
    check_error(chat_server.post(CHAT, body), 400, "roles must take turns")


def test_long_chat_is_not_truncated(chat_server: RunningServer) -> None:
    """Its end says whose turn it is, so truncation would change its meaning."""
    long = [{"role": "user", "content": " ".join(["w5"] * 20)}]
    check_error(chat_server.post(CHAT, {"model": "toy", "messages": long}), 400, "22 tokens")
    with pytest.raises(InputError, match="17 tokens"):
        chat_model().served.codec.encode([Rendered(" ".join(["w5"] * 17))])


@pytest.mark.parametrize(("family", "template"), [("qwen2", None), ("t5", TEMPLATE)])
def test_messages_are_joined_without_a_template_or_with_an_encoder(family: str, template: str | None) -> None:
    codec = model_with(family, template).served.codec
    assert not codec.knows_roles
    assert codec.chat(MESSAGES) == "w20 w21\n\nw22\n\nw23\n\nw24 w25"


@pytest.mark.parametrize(
    ("messages", "has_remark"),
    [(MESSAGES[1:2], False), (MESSAGES[:1], True), (MESSAGES[:2], True), (MESSAGES[1:4], True)],
)
def test_joining_gets_a_remark_if_roles_matter(
    text_server: RunningServer, messages: list[dict[str, str]], has_remark: bool
) -> None:
    response = ask(text_server, messages)
    joined = "\n\n".join(one["content"] for one in messages)
    assert response.choices[0].message.content == text_model().generate([joined], 0.5).outputs[0]
    assert any("does not distinguish roles" in remark for remark in response.deferral.get("remarks", [])) == has_remark
