"""The server against its own description: schemathesis sends valid and invalid requests to every route."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from servers import RunningServer, running, text_model, toy_model

KEY = "secret"
MAX_EXAMPLES = 5  # per route and phase
RUN = "import sys; from schemathesis.cli import schemathesis; sys.argv[0] = 'schemathesis'; schemathesis()"


@pytest.fixture(scope="module")
def locked_server() -> Iterator[RunningServer]:
    """A server for texts, the only inputs that a JSON schema describes completely."""
    with running(text_model(), api_key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def description(locked_server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = locked_server.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
    return found


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="needs schemathesis: pip install schemathesis")
def test_schemathesis_finds_no_issue(locked_server: RunningServer, tmp_path: Path) -> None:
    """All its checks: statuses, headers, types and shapes of responses, refusals, keys. Examples are deterministic."""
    options = ["--max-examples", str(MAX_EXAMPLES), "--generation-deterministic", "--no-color", "--checks", "all"]
    key = ["--header", f"Authorization: Bearer {KEY}"]
    command = [sys.executable, "-c", RUN, "run", f"{locked_server.address}/openapi.json", *options, *key]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout
    assert locked_server.scheduler.is_working


def test_every_route_lists_its_errors(description: dict[str, Any]) -> None:
    writing = {"200", "400", "401", "404", "408", "413", "429", "500", "503", "504"}
    routes = {
        (path, method): set(one["responses"])
        for path, methods in description["paths"].items()
        for method, one in methods.items()
    }
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/deferral/complete", "/v1/deferral/score"):
        assert routes.pop((path, "post")) == writing
    always = {"200", "401", "408", "413", "500", "503"}
    for path in ("/live", "/ready", "/health"):
        assert routes.pop((path, "get")) == always - {"401"}
    assert routes.pop(("/metrics", "get")) == always
    always.add("429")
    assert routes.pop(("/v1/models/{model}", "get")) == always | {"404"}
    assert set(routes) == {(path, "get") for path in ("/v1/models", "/v1/deferral", "/v1/usage")}
    assert all(found == always for found in routes.values())


def test_requests_are_narrowed_to_the_model(description: dict[str, Any]) -> None:
    schemas = description["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"]["max_tokens"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    for kind in ("CompleteRequest", "ScoreRequest"):
        assert schemas[kind]["properties"]["input"] == {"type": "string", "pattern": r"\S"}
        assert schemas[kind]["properties"]["inputs"]["maxItems"] == 16
    assert "HTTPValidationError" not in schemas


def test_key_and_host_errors_are_listed_if_possible(description: dict[str, Any]) -> None:
    assert description["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in description["paths"]["/health"]["get"]
    with running(toy_model()) as server:
        public = server.get("/openapi.json").json()
    assert "securitySchemes" not in public["components"]
    assert not {"401", "403"} & set(public["paths"]["/v1/models"]["get"]["responses"])
    with running(toy_model(), only_host="127.0.0.1") as server:
        local = server.get("/openapi.json").json()
    assert all("403" in local["paths"][path]["get"]["responses"] for path in ("/v1/models", "/health"))
