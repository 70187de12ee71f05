"""The server against its own description: schemathesis asks every route for what it says it takes, and for what not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")
pytest.importorskip("uvicorn", reason="needs the extra 'server'")
pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
pytest.importorskip("openai", reason="needs the official client: pip install openai")

from tests.server.test_app import Running, running, text_model, toy_model

pytestmark = pytest.mark.usefixtures("one_thread")
KEY = "secret"
EXAMPLES = 8  # of each route and phase
RUN = "import sys; from schemathesis.cli import schemathesis; sys.argv[0] = 'schemathesis'; schemathesis()"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """Texts: the only inputs that a JSON schema can describe to the last."""
    with running(text_model(), api_key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def described(served: Running) -> dict[str, Any]:
    found: dict[str, Any] = served.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
    return found


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="needs schemathesis: pip install schemathesis")
def test_schemathesis_finds_nothing(served: Running, tmp_path: Path) -> None:
    """All its checks: statuses, headers, types and shapes of answers, refusals, keys. The same examples every time."""
    options = ["--max-examples", str(EXAMPLES), "--generation-deterministic", "--no-color", "--checks", "all"]
    key = ["--header", f"Authorization: Bearer {KEY}"]
    command = [sys.executable, "-c", RUN, "run", f"{served.address}/openapi.json", *options, *key]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout
    assert served.scheduler.is_working


def test_every_route_tells_its_errors(described: dict[str, Any]) -> None:
    writing = {"200", "400", "401", "404", "408", "413", "429", "500", "503", "504"}
    routes = {
        (path, method): set(one["responses"])
        for path, methods in described["paths"].items()
        for method, one in methods.items()
    }
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/deferral/complete", "/v1/deferral/score"):
        assert routes.pop((path, "post")) == writing
    always = {"200", "401", "408", "413", "500", "503"}
    assert routes.pop(("/health", "get")) == always - {"401"}
    assert routes.pop(("/v1/models/{model}", "get")) == always | {"404"}
    assert set(routes) == {(path, "get") for path in ("/v1/models", "/v1/deferral", "/metrics")}
    assert all(found == always for found in routes.values())


def test_it_is_the_model_that_is_described(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"]["max_tokens"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    for kind in ("CompleteRequest", "ScoreRequest"):
        assert schemas[kind]["properties"]["input"] == {"type": "string", "pattern": r"\S"}
        assert schemas[kind]["properties"]["inputs"]["maxItems"] == 16
    assert "HTTPValidationError" not in schemas


def test_the_key_is_described_where_there_is_one(described: dict[str, Any]) -> None:
    assert described["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in described["paths"]["/health"]["get"]
    with running(toy_model()) as server:
        without = server.get("/openapi.json").json()
    assert "securitySchemes" not in without["components"]
    assert not {"401", "403"} & set(without["paths"]["/v1/models"]["get"]["responses"])
    with running(toy_model(), only_host="127.0.0.1") as server:
        minding = server.get("/openapi.json").json()
    assert all("403" in minding["paths"][path]["get"]["responses"] for path in ("/v1/models", "/health"))
