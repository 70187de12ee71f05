"""Sockets, shutdown with requests in flight, and the command `seqdefer serve`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from processes import SUPPORT, ServerProcess, is_ready, server_process
from servers import COMPLETIONS, RunningServer, check_error, running, slow_model, text_model, toy_model, until

from benchmarks.service.processes import free_port
from seqdefer import cli
from seqdefer.server.http import Limits
from seqdefer.server.serve import listen

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
openai = pytest.importorskip("openai", reason="needs openai: pip install openai")

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]


def test_responses_are_sent_without_delay() -> None:
    """asyncio sets TCP_NODELAY only on its own sockets: every response once took 40 ms longer."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_server_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `>&-`, uvicorn's logging configuration failed."""
    monkeypatch.setattr(sys, "stdout", None)
    with running(toy_model()) as server:
        assert server.get("/health").status_code == 200


# -- shutdown ------------------------------------------------------------------------------------------------------


def test_requests_finish_within_the_grace_period() -> None:
    model, _ = slow_model(0.05)
    with running(model, limits=Limits(grace_seconds=60)) as server:
        chunks = iter(server.complete("13", 0, stream=True))
        texts = [next(chunks).choices[0].text]
        server.server.should_exit = True
        texts += [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == toy_model().generate(["13"], 0.0).outputs[0]


SLOW_EXPERT = """
expert = type(toy_model().served.expert)
next_token = expert.next
gate = Path({gate!r})

def pause():
    time.sleep({seconds})
    while gate.name == "closed" and not (gate / "open").exists():
        time.sleep(0.01)

expert.next = lambda self, state, rows: (pause(), next_token(self, state, rows))[1]
"""


def toy_process(
    folder: Path, *, grace: float, seconds: float = 0.0, waits: bool = False
) -> AbstractContextManager[ServerProcess]:
    """Serve a toy pair in a process. Its expert takes `seconds` for a token, or waits for a file `closed/open`."""
    (folder / "closed").mkdir()
    before = SLOW_EXPERT.format(gate=str(folder / "closed" if waits else folder), seconds=seconds)
    return server_process(folder, before=before, limits=f"grace_seconds={grace}")


@pytest.mark.parametrize(("number", "hangs"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_signal_with_requests_in_flight(tmp_path: Path, number: signal.Signals, hangs: bool) -> None:
    body = {"model": "toy@1", "prompt": "13"}
    with toy_process(tmp_path, grace=0.5, seconds=1.0, waits=hangs) as server, ThreadPoolExecutor(4) as pool:
        responses = []
        for expected in (
            {"seqdefer_sequences_running 1.0"},
            {"seqdefer_sequences_running 2.0", "seqdefer_queue_length 1.0"},
        ):
            responses.append(pool.submit(httpx.post, server.address + COMPLETIONS, json=body, timeout=60))
            until(lambda lines=expected: lines & set(server.get("/metrics").text.splitlines()))
        server.process.send_signal(number)
        for response in responses:
            assert check_error(response.result(), 503)["code"] == "shutting_down"
        printed, _ = server.process.communicate(timeout=60)
    assert server.process.returncode == 0
    assert "Traceback" not in server.logged
    assert hangs or printed == "ended\n"


def test_a_server_without_its_model_thread_ends(tmp_path: Path) -> None:
    """Regression: it went on listening, and no request was ever answered."""
    broken = "from seqdefer.server.scheduler import Scheduler\nScheduler._answer_refused = lambda self, batch: 1 / 0"
    with server_process(tmp_path, before=broken) as server:
        response = server.post(COMPLETIONS, {"model": "toy@0", "prompt": "13"})
        assert check_error(response, 503)["code"] == "models_died"
        server.process.communicate(timeout=60)
        assert server.process.returncode == 1
        assert "ZeroDivisionError" in server.logged


def test_probes_while_draining(tmp_path: Path) -> None:
    """After SIGTERM a request in flight finishes; others are refused, and probes tell why until the end."""
    with toy_process(tmp_path, grace=60, waits=True) as server, ThreadPoolExecutor(1) as pool:
        body = {"model": "toy@1", "prompt": "13", "max_tokens": 3}
        whole = pool.submit(httpx.post, server.address + COMPLETIONS, json=body, timeout=60)
        until(lambda: "seqdefer_sequences_running 1.0\n" in server.get("/metrics").text)
        assert server.get("/ready").json() == {"status": "ok"}
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/ready").status_code == 503)
        assert server.get("/ready").json() == server.get("/health").json() == {"status": "stopping"}
        assert server.get("/live").json() == {"status": "ok"}
        refused = httpx.post(server.address + COMPLETIONS, json=body, timeout=60)
        assert check_error(refused, 503)["code"] == "shutting_down"
        (tmp_path / "closed" / "open").touch()
        text = toy_model().generate(["13"], 1.0).outputs[0]
        assert whole.result().json()["choices"][0]["text"] == text[:3]
        printed, _ = server.process.communicate(timeout=60)
    assert (server.process.returncode, printed, server.logged) == (0, "ended\n", "")


def test_second_signal_ends_the_grace_period(tmp_path: Path) -> None:
    """uvicorn dropped all connections with tracebacks, also those whose request was incomplete."""
    body = {"model": "toy@1", "prompt": "13"}
    with toy_process(tmp_path, grace=100, seconds=1.0) as server, ThreadPoolExecutor(1) as pool:
        url = server.address + COMPLETIONS
        slow = server.connect(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        with slow, httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith('data: {"id"')
            whole = pool.submit(httpx.post, url, json=body, timeout=60)
            until(lambda: "seqdefer_sequences_running 2.0\n" in server.get("/metrics").text)
            server.process.send_signal(signal.SIGINT)
            until(lambda: not is_ready(server.address))
            server.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
            assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
            assert events[-1] == "data: [DONE]"
            assert check_error(whole.result(), 503)["code"] == "shutting_down"
            printed, _ = server.process.communicate(timeout=60)
    assert (server.process.returncode, printed, server.logged) == (0, "ended\n", "")


LOADING = """
import sys, time
sys.path.insert(0, {support!r})
from pathlib import Path
from servers import toy_model
from seqdefer import cli
from seqdefer.model.deferring_model import DeferringModel

def load(*_, **__):
    while not Path({gate!r}).exists():
        time.sleep(0.05)
    return toy_model()

DeferringModel.from_pretrained = load
sys.exit(cli.main(["serve", "toy", "--port", "{port}"]))
"""


def test_probes_while_loading(tmp_path: Path) -> None:
    port = free_port()
    address, gate = f"http://127.0.0.1:{port}", tmp_path / "gate"
    with process([sys.executable, "-c", LOADING.format(support=SUPPORT, gate=str(gate), port=port)]) as server:
        until(lambda: status_of(address, "/live") == 200)
        with httpx.Client(base_url=address, timeout=60) as client:
            assert client.get("/ready").json() == client.get("/health").json() == {"status": "loading"}
            assert client.get("/ready").status_code == 503
            response = client.post(COMPLETIONS, json={"model": "toy", "prompt": "13"})
            assert check_error(response, 503)["code"] == "loading"
        gate.touch()
        statuses = set[int]()

        def is_loaded() -> bool:
            statuses.add(httpx.get(f"{address}/ready", timeout=60).status_code)  # no connection is refused in between
            return 200 in statuses

        until(is_loaded)
        assert statuses <= {200, 503}
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


# -- the command ---------------------------------------------------------------------------------------------------


def save_text_model(folder: Path) -> Path:
    from tiny_models import tiny, tokenizer

    from seqdefer.model.deferring_model import DeferringModel
    from seqdefer.model.folders import pairing_of
    from seqdefer.tasks.text.task import TextOptions

    for name, (n_layers, seed) in {"predictor": (1, 1), "expert": (2, 6)}.items():
        tiny("t5", n_layers, seed).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    model = text_model()
    options = TextOptions(
        str(folder / "predictor"), str(folder / "expert"), length=12, input_tokens=16, shown="states"
    )  # those of text_model
    pairing = pairing_of("text", options, model.served)
    return DeferringModel(model.served, model.rejector, model.calibration, pairing).save_pretrained(folder / "news")


@contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def status_of(address: str, path: str) -> int:
    try:
        return int(httpx.get(f"{address}{path}", timeout=30).status_code)
    except httpx.HTTPError:
        return 0


def test_command_serves_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'text'")
    folder = save_text_model(tmp_path)
    options = ["--port", "0", "--device", "cpu", "--quiet", "--log-format", "json"]
    with process([sys.executable, "-m", "seqdefer", "serve", str(folder), *options]) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        message = json.loads(line)["message"]
        assert message.startswith("serving news at http://127.0.0.1:"), line + server.stderr.read()
        address = message.split()[3].removesuffix(";")
        until(lambda: is_ready(address.removesuffix("/v1")))
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        response = client.completions.create(model="news@0.5", prompt="w5 w6 w7")
        assert response.choices[0].text == text_model().generate(["w5 w6 w7"], 0.5).outputs[0]
        foreign = httpx.get(f"{address}/models", headers={"host": "evil.example"})
        assert check_error(foreign, 403, "localhost or 127.0.0.1")["code"] == "wrong_host"
        client.close()
        server.send_signal(signal.SIGINT)
        printed, errors = server.communicate(timeout=60)
    assert (server.returncode, printed) == (0, "")
    records = [json.loads(line) for line in errors.splitlines()]
    assert [record.get("status") for record in records] == [200, 403, None]
    assert {record["level"] for record in records} == {"info"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key", ""], "API key is empty"),
        (["--queue", "0"], "queue is 0"),
        (["--request-seconds", "nan"], "request seconds is nan"),
        (["--request-seconds", "inf"], "request seconds is inf; give more than 0 and at most "),
        (["--expert-seconds", "1e300"], "expert seconds is 1e+300"),
        (["--inputs", "64"], "must fit into a batch"),
        (["--port", "99999"], "from 0 to 65535"),
        (["--host", "no.such.host.invalid"], "cannot listen"),
        (["--host", "ä..b"], "cannot listen"),
        (["--port", "x"], "invalid int value"),
        (["--port", "0"], "no deferring model"),
        (["--host", "0.0.0.0", "--port", "0"], "anyone who reaches 0.0.0.0 could use this server"),
        (["--host", "0.0.0.0", "--port", "0", "--allow-anyone"], "no deferring model"),
        (["--host", "0.0.0.0", "--port", "0", "--api-key", "k"], "no deferring model"),
        (["--connections", "1000000000"], "need up to 1000000288 open files"),
        (["--keys", "missing.json"], "seqdefer keys add missing.json NAME"),
        (["--log-format", "xml"], "unknown log format 'xml'; available: human, json"),
        (["--log-level", "all"], "unknown log level 'all'"),
        (["--grace-seconds", "-1"], "grace seconds is -1"),
        (["--budget", "20"], "budget is 20.0; it is the share of tokens the expert writes, from 0 to 1: 0.2 is 20 %"),
        (["--cap-money", "0.1"], "a cap in money needs prices; give --prices FILE"),
        (["--cap-tokens", "3", "--within", "1"], "leave out --within, or the cap of the server"),
        (["--cap-passes", "3", "--guarantee", "expected"], "leave out --guarantee, or the cap of the server"),
        (["--cap-tokens", "3", "--served-log", "served.jsonl"], "leave out --served-log, or the cap of the server"),
    ],
)
def test_invalid_arguments(tmp_path: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    assert cli.main(["serve", str(tmp_path), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_port_in_use(server: RunningServer, tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["serve", str(tmp_path), "--port", server.address.rsplit(":", 1)[1]]) == 2
    assert "choose another --host or --port" in capsys.readouterr().err


def test_missing_extra(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "pip install 'seqdefer[server]'" in capsys.readouterr().err
