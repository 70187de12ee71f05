"""Real servers on free ports, the pairs that they serve, and checks of their responses."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from labelling_toy import until
from torch import Tensor
from toy_pair import LetterCodec, Toy, numbers

pytest.importorskip("fastapi", reason="needs the extra 'server'")
pytest.importorskip("uvicorn", reason="needs the extra 'server'")
pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
if find_spec("openai") is None:
    pytest.skip("needs the official client: pip install openai", allow_module_level=True)

import httpx

from seqdefer.engine.drafts import draft
from seqdefer.errors import InputError
from seqdefer.interfaces import Codec, NextTokenExpert, Served
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.token import LSTMRejector
from seqdefer.server.app import create_app
from seqdefer.server.gateway import Gateway
from seqdefer.server.http import Limits
from seqdefer.server.serve import address_of, listen, make_server
from seqdefer.types import Examples, Sequences, SequenceSpec

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
COMPLETE, SCORE = "/v1/deferral/complete", "/v1/deferral/score"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
LENGTH, N_CITIES = 12, 7
BUDGETS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
IGNORE_BUDGETS = pytest.mark.filterwarnings("ignore::seqdefer.model.calibrated_pair.BudgetWarning")


# -- models --------------------------------------------------------------------------------------------------------


class NumberCodec(LetterCodec):
    """Numbers as texts in, letters out."""

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": "^[0-9]{1,9}$"}

    def encode(self, inputs: Sequence[Any]) -> Examples:
        try:
            return super().encode([int(one) for one in inputs])
        except (ValueError, TypeError) as error:
            raise InputError(f"{error}; give a number") from error


@cache
def toy_model(method: str = "TokenwiseModel") -> DeferringModel:
    """A calibrated toy pair. Shared: do not change it."""
    model = Toy.of(length=LENGTH).model(method)
    model.calibrate(numbers(60), progress=False)
    return with_parts(model, codec=NumberCodec())


def with_parts(model: DeferringModel, **parts: Any) -> DeferringModel:
    """Return the same model with another expert, predictor or codec."""
    return DeferringModel(replace(model.served, **parts), model.rejector, model.calibration)


def inputs_of(n: int) -> list[str]:
    return [str(number) for number in numbers(n)]


def documents(n: int) -> list[str]:
    generator = random.Random(3)
    return [" ".join(f"w{generator.randrange(3, 60)}" for _ in range(generator.randint(1, 12))) for _ in range(n)]


@cache
def text_model() -> DeferringModel:
    """A tiny pair of Hugging Face models and a rejector with random weights. Shared: do not change it."""
    pytest.importorskip("transformers", reason="needs the extra 'text'")
    from tiny_models import tiny_pair

    from seqdefer.tasks.text.task import TextOptions, codec_of

    pair = tiny_pair("t5")
    codec = codec_of(TextOptions(length=LENGTH, input_tokens=16), pair)
    return with_random_rejector(pair, codec, documents(24))


@cache
def speech_model() -> DeferringModel:
    """A tiny pair of Whisper models and a rejector with random weights. Shared: do not change it."""
    pytest.importorskip("transformers", reason="needs the extra 'speech'")
    pytest.importorskip("soundfile", reason="needs the extra 'speech'")
    from tiny_whisper import clips, tiny_speech_pair

    from seqdefer.tasks.speech.codec import SpeechCodec
    from seqdefer.tasks.speech.waveforms import to_waveform

    pair = tiny_speech_pair()
    sounds = [to_waveform(row) for row in clips(24, seed=5).inputs]
    return with_random_rejector(pair, SpeechCodec(pair, "en"), sounds)


def with_random_rejector(pair: Any, codec: Codec, inputs: Sequence[Any]) -> DeferringModel:
    served = Served(pair.predictor, pair.expert, SequenceSpec(LENGTH, pair.predictor.end), codec)
    drafted = draft(served.predictor, codec.encode(inputs[:8]), served.spec)
    torch.manual_seed(0)
    sizes = Sizes(drafted.context.shape[1], drafted.features.shape[2], LENGTH, True, layers=1, units=8, dropout=0.0)
    rejector = LSTMRejector(sizes, served.predictor.fingerprint).eval()
    rejector.standardise(drafted.context, sizes.step_inputs(drafted)[:, 0])
    model = DeferringModel(served, rejector)
    model.calibrate(inputs, progress=False)
    return model


class SlowPredictor:
    """Sleeps before every proposal, blocks after `pause_after` of them while `gate` is closed, records batch sizes.
    Raise `pause_after` to let some more pass."""

    def __init__(self, inner: Any, seconds: float, pause_after: int) -> None:
        self.inner, self.seconds, self.pause_after = inner, seconds, pause_after
        self.calls, self.sizes, self.gate = 0, list[int](), threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, state: Any) -> Any:
        self.calls += 1
        time.sleep(self.seconds)
        until(lambda: self.calls <= self.pause_after or self.gate.is_set())
        proposal = self.inner.propose(state)
        self.sizes.append(len(proposal.tokens))
        return proposal


def slow_model(seconds: float = 0.0, pause_after: int = 0) -> tuple[DeferringModel, SlowPredictor]:
    slow = SlowPredictor(toy_model().served.predictor, seconds, pause_after)
    return with_parts(toy_model(), predictor=slow), slow


def fail() -> None:
    raise ConnectionError("secret address 10.0.0.1")


class FaultyExpert(NextTokenExpert[Any]):
    """An expert that calls `fault` first whenever it is asked for tokens, from the call after `after` on."""

    def __init__(self, inner: Any, fault: Callable[[], object] | None = None, after: int = 0) -> None:
        self.inner, self.fault, self.after, self.calls = inner, fault, after, 0
        self.fingerprint = inner.fingerprint

    def start(self, examples: Examples) -> Any:
        return self.inner.start(examples)

    def next(self, state: Any, rows: Tensor) -> tuple[Tensor, Any]:
        self._before()
        return self.inner.next(state, rows)  # type: ignore[no-any-return]

    def append(self, state: Any, tokens: Tensor) -> Any:
        return self.inner.append(state, tokens)

    def select(self, state: Any, rows: Tensor) -> Any:
        return self.inner.select(state, rows)

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        self._before()
        return self.inner.complete(examples, prefixes, spec)  # type: ignore[no-any-return]

    def _before(self) -> None:
        self.calls += 1
        if self.fault is not None and self.calls > self.after:
            self.fault()


# -- servers -------------------------------------------------------------------------------------------------------


@dataclass
class RunningServer:
    address: str
    app: Any
    http: httpx.Client
    server: Any

    @property
    def scheduler(self) -> Any:
        return self.app.state.scheduler

    @property
    def model(self) -> DeferringModel:
        model: DeferringModel = self.scheduler.model
        return model

    @property
    def client(self) -> Any:
        import openai  # not above: processes that serve import this module, and do not need it

        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, http_client=self.http)

    def post(self, path: str, content: Any) -> Any:
        given = {"content": content} if isinstance(content, bytes) else {"json": content}
        return self.http.post(f"{self.address}{path}", **given, headers={"content-type": "application/json"})

    def get(self, path: str, **options: Any) -> Any:
        return self.http.get(f"{self.address}{path}", **options)

    def complete(self, prompt: Any, budget: float, **options: Any) -> Any:
        return self.client.completions.create(model=f"toy@{budget}", prompt=prompt, **options)

    @property
    def gateway(self) -> Gateway:
        found = self.app.middleware_stack
        while not isinstance(found, Gateway):
            found = found.app
        return found

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", int(self.address.rsplit(":", 1)[1])), timeout=60)

    def wait_until_idle(self) -> None:
        """Wait until no request is open, queued or running. A request that begins is in neither list for a moment."""
        until(lambda: not (self.scheduler._open or self.scheduler._queue or self.scheduler._batches))

    @contextmanager
    def client_that_leaves(self, body: dict[str, Any], *headers: str) -> Iterator[socket.socket]:
        """Send a request, and close the connection at the end of the block."""
        content = json.dumps(body).encode()
        lines = [f"POST {COMPLETIONS} HTTP/1.1", "Host: localhost", f"Content-Length: {len(content)}", *headers]
        with self.connect() as client:
            client.sendall("\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + content)
            yield client


@contextmanager
def running(
    model: DeferringModel, *, name: str = "toy", port: int = 0, limits: Limits | None = None, **options: Any
) -> Iterator[RunningServer]:
    """Run a real server, on a free port by default."""
    limits = limits or Limits(grace_seconds=0.5)
    app, listening = create_app(model, name, limits=limits, **options), listen("127.0.0.1", port)
    server = make_server(app, limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(lambda: server.started)
        with httpx.Client(verify=False, timeout=60) as http:
            yield RunningServer(address_of(listening), app, http, server)
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()
        assert not thread.is_alive()


def step_until_written(server: RunningServer, slow: SlowPredictor, prompt: str) -> None:
    """Let a paused predictor go on, one call after the other, until a request has its first token."""

    def is_written() -> bool:
        tickets = [ticket for ticket in list(server.scheduler._open) if list(ticket.request.inputs) == [prompt]]
        if any(sum(ticket.tokens_written.values()) for ticket in tickets):
            return True
        slow.pause_after += slow.calls > slow.pause_after
        return False

    until(is_written)


# -- responses -----------------------------------------------------------------------------------------------------


def metric(server: RunningServer, line: str) -> float:
    found = [one for one in server.get("/metrics").text.splitlines() if one.startswith(line + " ")]
    return float(found[0].split()[-1]) if found else 0.0


def events_of(response: Any) -> list[dict[str, Any]]:
    """Return the server-sent events of a complete stream."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def check_error(response: Any, status: int, message: str = "") -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert "Traceback" not in response.text
    return error


def check_healthy(server: RunningServer) -> None:
    """Check that the server still writes the right tokens, and that nothing is left of earlier requests."""
    server.wait_until_idle()
    assert server.complete("13", 0.5).choices[0].text == toy_model().generate(["13"], 0.5).outputs[0]
    assert server.get("/health").json() == {"status": "ok"}
