"""Invalid requests: an error that names the field and says what to change, in OpenAI's format."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
import torch
from servers import CHAT, COMPLETE, COMPLETIONS, SCORE, RunningServer, check_error, check_healthy, events_of, toy_model

openai = pytest.importorskip("openai", reason="needs openai: pip install openai")

TEXTS = ["w3 w7 w11", "w5 w9"]
VALID = b'{"model": "toy", "prompt": "13"}'


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, SCORE])
@pytest.mark.parametrize(
    ("body", "media_type", "message"),
    [
        (b'{"model": ', "application/json", "the body is not valid JSON: Expecting value, character 10"),
        (b"{", "application/json", "the body is not valid JSON: "),
        (VALID, "text/plain", "send one, with the header content-type: application/json"),
        (VALID, "application/x-www-form-urlencoded", "content-type: application/json"),
        *((body, "application/json", "the body is not a JSON object") for body in (b"", b"[]", b"null", b'"toy"')),
        (gzip.compress(VALID, mtime=0), "application/json", "uncompressed"),
        (b'{"model": "toy", "prompt": "\xff"}', "application/json", "the body cannot be read; send an uncompressed"),
        (b"\xff\xfe", "application/json", "the body is not valid JSON"),
        (VALID[:-1] + b', "n": ' + b"9" * 5000 + b"}", "application/json", "numbers of thousands of digits"),
        (b"[" * 100_000, "application/json", "hundreds of nested lists"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_error_says_how_to_fix_the_body(
    server: RunningServer, path: str, body: bytes, media_type: str, message: str
) -> None:
    response = server.http.post(f"{server.address}{path}", content=body, headers={"content-type": media_type})
    assert check_error(response, 400, message)["param"] is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "2"]}, "prompt"),
        ({"prompt": ["1", 2]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, 2, 3]}, "prompt"),  # this model does not read token ids
        ({"prompt": ["1"] * 17}, None),
        ({"prompt": None}, "prompt"),
        ({"model": 5}, "model"),
        ({"model": "toy@2"}, "model"),
        ({"model": "toy@-0.1"}, "model"),
        ({"model": "toy@nan"}, "model"),
        ({"model": "toy@"}, "model"),
        ({"model": "toy@x"}, "model"),
        ({"model": "toy@0.2", "deferral": {"budget": 0.3}}, "deferral"),
        ({"deferral": {"budget": 1.5}}, "deferral.budget"),
        ({"deferral": {"budget": -1}}, "deferral.budget"),
        ({"deferral": {"budget": float("nan")}}, "deferral.budget"),
        ({"deferral": {"budget": float("inf")}}, "deferral.budget"),
        ({"deferral": {"budget": "0.2"}}, "deferral.budget"),
        ({"deferral": {"budget": True}}, "deferral.budget"),
        ({"deferral": {}}, "deferral"),
        ({"deferral": {"budget": 0.2, "burden": 1}}, "deferral.burden"),
        ({"deferal": {"budget": 0.2}}, "deferal"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": -(10**30)}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1, "echo": True}, None),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 0.7}, "temperature"),
        ({"\ud800": 1}, None),
    ],
)
def test_error_names_the_field(server: RunningServer, changes: dict[str, Any], param: str | None) -> None:
    body = json.dumps({"model": "toy", "prompt": "13", **changes}).encode()
    error = check_error(server.post(COMPLETIONS, body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize("path", [COMPLETE, SCORE])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "give either input"),
        ({"input": ["13", "14"]}, "give a number"),  # one input, but not of this model's type
        ({"input": "13", "inputs": ["13"]}, "give either input"),
        ({"inputs": []}, "inputs: "),
        ({"inputs": "13"}, "inputs: "),
        ({"inputs": ["1"] * 17}, "17 inputs; one request may have 16"),
        ({"input": "\ud800"}, "surrogate"),
        ({"input": {"\ud800": 1}}, "surrogate"),
        ({"input": "x"}, "give a number"),
        ({"input": "13", "stream": 1}, "stream: "),
        ({"input": "13", "prompt": "13"}, "prompt: "),
        ({"input": "13", "deferral": {"budget": 2}}, "deferral.budget: "),
        ({"input": "13", "model": "toy@2"}, "not a number from 0 to 1"),
    ],
)
def test_invalid_deferral_requests(server: RunningServer, path: str, changes: dict[str, Any], message: str) -> None:
    body = json.dumps({"model": "toy", **changes}).encode()
    assert check_error(server.post(path, body), 400, message)["type"] == "invalid_request_error"


def test_invalid_input_leaves_nothing_behind(server: RunningServer) -> None:
    check_error(server.post(COMPLETE, {"model": "toy", "inputs": ["13", "x"], "stream": True}), 400)
    check_healthy(server)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (COMPLETIONS, {"prompt": [[]] * 1000}, "prompt: a prompt must be a text, or a non-empty list of token ids"),
        (CHAT, {"messages": [5] * 1000}, "messages.0: Input should be "),
        (CHAT, {"messages": [{}] * 1000}, "messages.0.role: Field required; messages.0.content: Field required"),
        (CHAT, {"messages": [{"role": "user", "content": [5] * 1000}]}, "messages.0.content.0: Input should be "),
        (COMPLETE, {"inputs": ["\ud800"] * 1000}, "inputs: a lone surrogate is not valid text"),
        (COMPLETIONS, {str(place): 0 for place in range(1000)}, "1001 fields are too many; the limit is 100"),
    ],
)
def test_repeated_errors_are_reported_once(
    server: RunningServer, path: str, fields: dict[str, Any], message: str
) -> None:
    """All were reported: a request with a million stopped the server for ten seconds, and took a gigabyte."""
    response = server.post(path, json.dumps({"model": "toy", **fields}).encode())
    assert len(check_error(response, 400, message)["message"]) < 150


def test_nesting_just_below_the_parsers_limit(server: RunningServer) -> None:
    """Inputs that the parser just accepted once made the validation fail."""
    for depth in range(900, 1000):
        body = b'{"model": "toy", "input": ' + b"[" * depth + b"]" * depth + b"}"
        check_error(server.post(COMPLETE, body), 400)


@pytest.mark.parametrize(
    "messages",
    [[], "13", [{"role": "user"}], [{"role": "pope", "content": "13"}], [{"role": "user", "content": 13}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]],
)  # fmt: skip
def test_invalid_messages(server: RunningServer, messages: Any) -> None:
    check_error(server.post(CHAT, {"model": "toy", "messages": messages}), 400, "messages")


def test_message_without_content(server: RunningServer) -> None:
    """OpenAI's clients send null after a tool call."""
    messages = [{"role": "user", "content": "13"}, {"role": "assistant", "content": None}]
    response = server.post(CHAT, {"model": "toy", "messages": messages})
    error = check_error(response, 400, "null is not a text; give the content or leave the message out")
    assert error["param"] == "messages.1.content"


WITHOUT_EFFECT = {"temperature": 0, "top_p": 0.9, "seed": 3, "n": 1, "stop": None, "frequency_penalty": 0}
IGNORED = {
    "metadata": {"turn": "1"},
    "prompt_cache_key": "mine",
    "reasoning_effort": "low",
    "safety_identifier": "me",
    "service_tier": "auto",
    "store": False,
    "user": "me",
}


def test_options_without_effect_are_accepted(server: RunningServer) -> None:
    """Common clients send those of OpenAI's own service, and got a 400."""
    response = server.complete("13", 0.5, **WITHOUT_EFFECT, extra_body=IGNORED)
    assert response.choices[0].text == toy_model().generate(["13"], 0.5).outputs[0]
    chat = {"messages": [{"role": "user", "content": "13"}], "logprobs": False, "top_logprobs": None}
    answer = server.client.chat.completions.create(model="toy@0.5", **chat, **WITHOUT_EFFECT, **IGNORED)
    assert answer.choices[0].message.content == response.choices[0].text


def test_sampling_is_refused_with_a_way_out(server: RunningServer) -> None:
    """It was silently ignored, so that users took one greedy text for several samples."""
    response = server.post(COMPLETIONS, {"model": "toy", "prompt": "13", "temperature": 0.7})
    check_error(response, 400, "temperature: 0.7 asks for samples; both models write their likeliest token: leave it")
    check_error(server.post(COMPLETIONS, {"model": "toy", "prompt": "13", "n": 2}), 400, "decoding is greedy")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_prompts_are_echoed(server: RunningServer, is_streamed: bool) -> None:
    prompts = ["13", "26"]
    response = server.post(COMPLETIONS, {"model": "toy@0.5", "prompt": prompts, "echo": True, "stream": is_streamed})
    if is_streamed:
        texts = ["", ""]
        for event in events_of(response):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        texts = [choice["text"] for choice in response.json()["choices"]]
    written = toy_model().generate(prompts, 0.5).outputs
    assert texts == [prompt + text for prompt, text in zip(prompts, written, strict=True)]


def test_prompts_may_be_token_ids(text_server: RunningServer) -> None:
    codec = text_server.model.served.codec
    ids = [row[row >= 0].tolist() for row in map(torch.Tensor.squeeze, (codec.encode([one]).inputs for one in TEXTS))]
    plain = [choice.text for choice in text_server.complete(TEXTS, 0.5).choices]
    assert [choice.text for choice in text_server.complete(ids, 0.5).choices] == plain
    one = text_server.complete(ids[0], 0.5)
    assert one.choices[0].text == plain[0]
    assert one.usage.prompt_tokens == len(ids[0])
    echoed = text_server.complete(ids[0], 0.5, echo=True).choices[0].text
    assert echoed == codec.text(ids[0]) + plain[0]
    mixed = text_server.complete([TEXTS[0], ids[1]], 0.5)
    assert [choice.text for choice in mixed.choices] == plain


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([10**9], "token id 1000000000 is not in the vocabulary; give 0 to "),
        ([-1], "token id -1 is not in the vocabulary"),
        ([3] * 1000, "the prompt has 1000 token ids; give 1 to 16"),
    ],
)
def test_token_ids_that_are_refused(text_server: RunningServer, prompt: list[int], message: str) -> None:
    check_error(text_server.post(COMPLETIONS, {"model": "toy", "prompt": prompt}), 400, message)


def test_unknown_models(server: RunningServer) -> None:
    for name in ("gpt-4", "toy2", "Toy", "", "other@0.2", "\ud800"):
        for path, field in ((COMPLETIONS, "prompt"), (COMPLETE, "input")):
            error = check_error(server.post(path, json.dumps({"model": name, field: "1"}).encode()), 404)
            assert error["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError, match=r"toy@0\.20"):
        server.client.completions.create(model="gpt-4", prompt="13")
