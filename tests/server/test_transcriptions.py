"""Uploads of sound: OpenAI's client gets what the model writes, and bad uploads get one clear line."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
from servers import (
    BUDGETS,
    IGNORE_BUDGETS,
    TRANSCRIPTIONS,
    FaultyExpert,
    RunningServer,
    check_error,
    events_of,
    metric,
    running,
    speech_model,
    toy_model,
    with_parts,
)

from seqdefer.server.http import Limits

pytest.importorskip("transformers", reason="needs the extra 'speech'")
pytest.importorskip("soundfile", reason="needs the extra 'speech'")

import soundfile
from tiny_whisper import clips

from seqdefer.tasks.speech.waveforms import to_waveform

pytestmark = IGNORE_BUDGETS


def as_file(samples: Any, kind: str = "WAV", subtype: str = "PCM_16", rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


@cache
def sounds(n: int) -> list[bytes]:
    """Return WAV and FLAC files by turns."""
    rows = clips(n, seed=9).inputs
    return [as_file(to_waveform(row), "FLAC" if place % 2 else "WAV") for place, row in enumerate(rows)]


def upload(
    server: RunningServer, content: bytes, *, file_name: str = "clip.wav", headers: Any = None, **fields: str
) -> Any:
    data = {"model": "toy@0.5", **fields}
    address = f"{server.address}{TRANSCRIPTIONS}"
    return server.http.post(address, files={"file": (file_name, content)}, data=data, headers=headers)


# -- what is written -----------------------------------------------------------------------------------------------


def test_concurrent_uploads_equal_single_ones(speech_server: RunningServer) -> None:
    """Half of them streamed."""
    files, budgets = sounds(12), [BUDGETS[place % len(BUDGETS)] for place in range(12)]

    def ask(place: int) -> tuple[str, list[str] | None, Any]:
        asked = {"model": f"toy@{budgets[place]}", "file": ("clip", files[place])}
        if place % 2:
            whole = speech_server.client.audio.transcriptions.create(**asked)
            return whole.text, None, whole.usage
        *deltas, done = speech_server.client.audio.transcriptions.create(**asked, stream=True)
        assert {one.type for one in deltas} == {"transcript.text.delta"}
        assert done.type == "transcript.text.done"
        assert "".join(one.delta for one in deltas).rstrip() == done.text
        return done.text, [one.deferral["author"] for one in deltas], done.usage

    with ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(ask, range(12)))
    assert len({text for text, _, _ in responses}) > 6
    for file, budget, (text, authors, usage) in zip(files, budgets, responses, strict=True):
        written = speech_model().generate([file], budget)
        assert text == written.outputs[0]
        assert authors in (None, written.sources[0])
        assert (usage.predictor_tokens, usage.expert_tokens) == (written.predictor_tokens[0], written.expert_tokens[0])
        assert usage.output_tokens == len(written.sources[0])
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_formats(speech_server: RunningServer) -> None:
    (file,) = sounds(1)  # one second
    written = speech_model().generate([file], 0.5)
    plain = upload(speech_server, file, response_format="text")
    assert plain.headers["content-type"] == "text/plain; charset=utf-8"
    assert plain.text == f"{written.outputs[0]}\n"
    short = upload(speech_server, file, response_format="json").json()
    assert set(short) == {"text", "usage", "deferral"}
    assert short["usage"]["input_token_details"] == {"text_tokens": 0, "audio_tokens": 50}
    assert short["deferral"]["budget"] == 0.5
    assert short["deferral"]["degraded"] is False
    client = speech_server.client.audio.transcriptions
    long = client.create(model="toy@0.5", file=file, response_format="verbose_json", language="en", temperature=0)
    assert (long.text, long.language, long.duration, long.task) == (written.outputs[0], "en", 1.0, "transcribe")
    assert long.usage.seconds == 1.0
    tokens = long.deferral["tokens"]
    assert [one["author"] for one in tokens] == written.sources[0]
    assert [one["token"] for one in tokens] == written.sequences.tokens[0, : len(tokens)].tolist()
    assert "".join(one["text"] for one in tokens).strip() == written.outputs[0]


def test_events_name_the_author_of_every_token(speech_server: RunningServer) -> None:
    (file,) = sounds(1)
    written = speech_model().generate([file], 0.5)
    *deltas, done = events_of(upload(speech_server, file, stream="true"))
    assert [set(one) for one in deltas] == [{"type", "delta", "deferral"}] * len(written.sources[0])
    assert [one["deferral"]["position"] for one in deltas] == list(range(len(deltas)))
    assert {"predictor", "expert"} == {one["deferral"]["author"] for one in deltas}
    assert done["deferral"]["share"] == pytest.approx(written.sources[0].count("expert") / len(deltas))
    assert not deltas[0]["delta"].startswith(" ")


def test_budget_as_a_field(speech_server: RunningServer) -> None:
    (file,) = sounds(1)
    client = speech_server.client.audio.transcriptions
    for budget in (0.0, 1.0):
        response = client.create(model="toy", file=file, extra_body={"deferral": {"budget": budget}})
        assert response.deferral["budget"] == budget
        assert response.text == speech_model().generate([file], budget).outputs[0]
    assert client.create(model="toy", file=file).deferral["budget"] == 0.2
    assert "give it once" in check_error(upload(speech_server, file, **{"deferral[budget]": "0.1"}), 400)["message"]


def test_clips_count_20_ms_as_a_token_in_other_routes(speech_server: RunningServer) -> None:
    import base64

    body = {"model": "toy@0.5", "input": base64.b64encode(sounds(1)[0]).decode()}
    assert speech_server.post("/v1/deferral/complete", body).json()["usage"]["prompt_tokens"] == 50


def test_predictor_finishes_when_the_expert_fails() -> None:
    def fail() -> None:
        raise RuntimeError("no expert today")

    (file,) = sounds(1)
    model = speech_model()
    with running(with_parts(model, expert=FaultyExpert(model.served.expert, fail))) as server:
        response = upload(server, file, model="toy@1.0").json()
        assert response["deferral"]["degraded"] is True
        assert response["deferral"]["reason"] == "the expert failed (RuntimeError)"
        assert response["text"] == model.generate([file], 0.0).outputs[0]
        assert metric(server, f'seqdefer_requests_total{{path="{TRANSCRIPTIONS}",status="200"}}') == 1
        assert metric(server, 'seqdefer_tokens_total{author="expert"}') == 0


# -- what is refused -----------------------------------------------------------------------------------------------


def noise(n: int = 8_000) -> Any:
    return np.random.default_rng(0).normal(0, 0.1, n).astype(np.float32)


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (lambda: as_file(noise() * 0), 400, "is silent"),
        (lambda: as_file(noise() + np.nan, subtype="FLOAT"), 400, "not numbers"),
        (lambda: as_file(noise(), "FLAC")[:2_000] + bytes(5_000), 400, "is damaged"),
        (lambda: as_file(noise(100)), 400, "at least 0.1 s"),
        (lambda: b"", 400, "is empty"),
        (lambda: as_file(noise(20_000)), 413, "lasts 1.25 s; cut it into clips of at most 1 s"),
        (lambda: b"ID3\x04 nothing but noise", 415, "is not a WAV or FLAC file"),
        (lambda: as_file(noise(), "OGG", "VORBIS"), 415, "is not a WAV or FLAC file"),
    ],
    ids=["silence", "nan", "corrupt", "short", "empty", "long", "not audio", "ogg"],
)
@pytest.mark.parametrize("stream", ["false", "true"])
def test_bad_clips_get_one_line(
    speech_server: RunningServer, content: Any, status: int, message: str, stream: str
) -> None:
    found = check_error(upload(speech_server, content(), stream=stream), status, message)["message"]
    assert "\n" not in found
    assert upload(speech_server, sounds(1)[0]).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"language": "de"}, "language", "this model writes 'en'"),
        ({"temperature": "0.7"}, "temperature", "asks for samples"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"response_format": "srt"}, "response_format", "'json', 'text' or 'verbose_json'"),
        ({"response_format": "verbose_json", "stream": "true"}, None, "leave out response_format or stream"),
        ({"prompt": "names: Ada"}, "prompt", "not supported"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]", "not supported"),
        ({"include[]": "logprobs"}, "include[]", "not supported"),
        ({"deferral[budget]": "2", "model": "toy"}, "deferral[budget]", "less than or equal to 1"),
        ({"budget": "0.5"}, "budget", "unknown field"),
        ({"stream": "perhaps"}, "stream", "boolean"),
        ({"model": "toy@2"}, "model", "not a number from 0 to 1"),
    ],
)
def test_bad_fields_are_refused(speech_server: RunningServer, fields: Any, param: str | None, message: str) -> None:
    assert check_error(upload(speech_server, sounds(1)[0], **fields), 400, message)["param"] == param


def test_other_models_are_unknown(speech_server: RunningServer) -> None:
    assert check_error(upload(speech_server, b"x", model="whisper-1"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("content", "kind", "status", "message"),
    [
        (b"{}", "application/json", 415, "send multipart/form-data with the fields file and model"),
        (b"a=1", "application/x-www-form-urlencoded", 415, "send multipart/form-data"),
        (b"", None, 415, "send multipart/form-data"),
        (b"--x\r\n", "multipart/form-data", 400, "Missing boundary"),
        (b"nonsense", "multipart/form-data; boundary=x", 400, "cannot be read"),
        (b"--x--\r\n", "multipart/form-data; boundary=x", 400, "model: Field required; file: Field required"),
        (b"--x\r\ncontent-disposition: form-data; name=file\r\n\r\n1\r\n--x--\r\n",
         "multipart/form-data; boundary=x", 400, "file is a text"),
        (2 * b"--x\r\ncontent-disposition: form-data; name=file; filename=a\r\n\r\n1\r\n" + b"--x--\r\n",
         "multipart/form-data; boundary=x", 400, "Too many files"),
        (b"--x\r\ncontent-disposition: form-data; name=model\r\n\r\ntoy\r\n--x--\r\n",
         "multipart/form-data; boundary=x; charset=undefined", 400, "cannot be read"),
    ],
    ids=["json", "urlencoded", "nothing", "no boundary", "no parts", "no fields", "text", "two files", "charset"],
)  # fmt: skip
def test_other_bodies_are_refused(
    speech_server: RunningServer, content: bytes, kind: str | None, status: int, message: str
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = speech_server.http.post(f"{speech_server.address}{TRANSCRIPTIONS}", content=content, headers=headers)
    found = check_error(response, status)["message"]
    assert re.search(message, found, re.IGNORECASE), found
    assert "JSON" not in found


def test_uploads_may_be_larger_than_other_bodies() -> None:
    with running(speech_model(), limits=Limits(body_bytes=1_000, audio_bytes=40_000, grace_seconds=0.5)) as server:
        (file,) = sounds(1)
        assert len(file) > 30_000
        assert upload(server, file).status_code == 200
        message = "the body is larger than 40000 bytes; cut the sound into clips, or send it as FLAC"
        assert check_error(upload(server, file + bytes(10_000)), 413, message)["code"] == "body_too_large"
        body = {"model": "toy", "input": "x" * 2_000}
        assert check_error(server.post("/v1/deferral/complete", body), 413)["code"] == "body_too_large"


def test_key_is_required() -> None:
    with running(speech_model(), api_key="secret") as server:
        check_error(upload(server, sounds(1)[0]), 401)
        assert upload(server, sounds(1)[0], headers={"authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), (None, 200)]
)
def test_pages_of_other_sites_cannot_upload(site: str | None, status: int) -> None:
    """A form needs no permission of the server, unlike JSON."""
    headers = {} if site is None else {"sec-fetch-site": site}
    with running(speech_model(), only_host="127.0.0.1") as server:
        response = upload(server, sounds(1)[0], headers=headers)
        assert response.status_code == status
        if status == 403:
            assert check_error(response, 403)["code"] == "wrong_site"
        assert server.get("/", headers=headers).status_code == 200  # a link to the page


def test_models_of_texts_say_so() -> None:
    with running(toy_model()) as server:
        error = check_error(upload(server, b"x"), 404, "the model 'toy' does not take audio; use /v1/completions")
        assert error["code"] == "no_audio"
        assert TRANSCRIPTIONS not in server.get("/openapi.json").json()["paths"]
        assert server.get("/v1/deferral").json()["audio"] is None


# -- the description -----------------------------------------------------------------------------------------------


def test_description_of_the_route(speech_server: RunningServer) -> None:
    schema = speech_server.get("/openapi.json").json()
    route = schema["paths"][TRANSCRIPTIONS]["post"]
    form = route["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["model", "file"]
    assert form["properties"]["file"]["format"] == "binary"
    assert form["properties"]["language"] == {"enum": ["", "en"]}
    assert re.fullmatch(form["properties"]["model"]["pattern"], "toy@0.25")
    assert form["additionalProperties"] is False
    assert {"200", "400", "404", "413", "415", "429", "504"} <= set(route["responses"])
    assert "415" in schema["paths"]["/v1/deferral/complete"]["post"]["responses"]
    assert set(route["responses"]["200"]["content"]) == {"application/json", "text/event-stream", "text/plain"}
    assert speech_server.get("/v1/deferral").json()["audio"] == {"max_seconds": 1.0, "language": "en"}


def test_responses_fit_the_description(speech_server: RunningServer) -> None:
    from pydantic import TypeAdapter

    from seqdefer.server.transcriptions import Transcription, VerboseTranscription

    for name, shape in {"json": Transcription, "verbose_json": VerboseTranscription}.items():
        TypeAdapter(shape).validate_python(upload(speech_server, sounds(1)[0], response_format=name).json())


def test_caps_of_forms_are_never_ignored(speech_server: RunningServer) -> None:
    """A cap without a limit, and one of two caps, were ignored."""
    answer = upload(speech_server, sounds(1)[0], **{"deferral[cap][per]": "request"})
    check_error(answer, 400, "a cap limits nothing; give deferral[cap][tokens], [passes] or [money]")
    twice: Any = {"deferral[cap][tokens]": ["1", "5"]}
    check_error(upload(speech_server, sounds(1)[0], **twice), 400, "'deferral[cap][tokens]' is given more than once")
