"""API keys: hashes in a file, rotation, rate limits, spend caps, usage that survives a restart."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import server_process
from servers import COMPLETIONS, LENGTH, RunningServer, check_error, running, slow_model, toy_model, until

from seqdefer import cli
from seqdefer.budgets.quality import QualityPromise
from seqdefer.engine.speculative import SHOWN_SECONDS
from seqdefer.errors import OptionError
from seqdefer.server.http import APIError
from seqdefer.server.keys import APIKey, KeyRing, add_key, hash_key, read_keys, revoke_key
from seqdefer.server.usage import SAVE_SECONDS, Ledger, seconds_to_midnight, usage_file

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install httpx")

NOON = 1_794_916_800.0  # 2026-11-17, 12:00 UTC
HASH = hash_key(b"")
EXPERT = {"model": "toy@1", "prompt": "13"}


def entry(**fields: Any) -> str:
    return json.dumps({"keys": [{"name": "a", **fields}]})


def consume(calls: Iterator[object]) -> None:
    deque(calls, maxlen=0)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(server: RunningServer, key: str, body: dict[str, Any] = EXPERT) -> Any:
    return httpx.post(server.address + COMPLETIONS, json=body, headers=bearer(key), timeout=30)


# -- the file ------------------------------------------------------------------------------------------------------


def test_keys_are_stored_as_hashes(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, other = add_key(path, "alice", requests_per_minute=60), add_key(path, "bob")
    text = path.read_text(encoding="utf-8")
    assert len({key, other}) == 2
    assert not {key, other} & set(text.split('"'))
    assert key.removeprefix("sd-") not in text
    assert len(key) == 46  # 256 bits
    ring = KeyRing(path, "fixed")
    assert [ring.find(one.encode()).name for one in (key, other, "fixed")] == ["alice", "bob", "default"]  # type: ignore[union-attr]
    for wrong in (b"", b"fixe", b"fixed ", key.encode()[:-1], read_keys(path)[0].sha256.encode(), b"\xff\x00"):
        assert ring.find(wrong) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ("[]", "not a file of keys"),
        (entry(), "not a file of keys.*sha256"),
        (entry(sha256="12"), "64 hexadecimal digits"),
        (entry(sha256=HASH, name="two words"), "two words"),
        (entry(sha256=HASH, name="default"), "reserved"),
        (entry(sha256=HASH, requests_per_minute=0), "is 0; give a whole"),
        (entry(sha256=HASH, extra=0), "extra"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(OptionError, match=message):
        KeyRing(path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "keys.json")
    assert cli.main(["keys", "add", file, "alice", "--expert-tokens-per-day", "9"]) == 0
    key = capsys.readouterr().out.strip()
    assert KeyRing(Path(file)).find(key.encode()) is not None
    assert cli.main(["keys", "list", file]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["expert_tokens_per_day"], listed["requests_per_minute"]) == ("alice", 9, None)
    assert "sha256" not in listed
    for wrong, message in (
        (["add", file, "alice"], "'alice' already"),
        (["revoke", file, "bob"], "no key 'bob'"),
        (["add", file, "default"], "reserved"),
        (["add", file, "b", "--requests-per-minute", "0"], "is 0"),
        (["list", file + "x"], "cannot read"),
    ):
        assert cli.main(["keys", *wrong]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["keys", "revoke", file, "alice"]) == 0
    assert read_keys(Path(file)) == []


# -- in a server ---------------------------------------------------------------------------------------------------


def test_keys_change_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.json"
    old = add_key(path, "old")
    with running(toy_model(), keys=path) as server:
        assert ask(server, old).status_code == 200
        check_error(ask(server, "sd-wrong"), 401)
        new = add_key(path, "new")
        assert [ask(server, key).status_code for key in (old, new)] == [200, 200]
        revoke_key(path, "old")
        assert [ask(server, key).status_code for key in (old, new)] == [401, 200]
        path.write_text("{", encoding="utf-8")  # a mistake locks nobody out, and lets nobody in
        assert [ask(server, key).status_code for key in (old, new, new)] == [401, 200, 200]
        path.unlink()
        assert [ask(server, key).status_code for key in (old, new)] == [401, 200]
    assert [record.levelname for record in caplog.records if "stay as they were" in record.message] == ["ERROR"] * 2


def test_rate_limit(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    limited, free = add_key(path, "limited", requests_per_minute=3), add_key(path, "free")
    with running(toy_model(), keys=path) as server:
        responses = [ask(server, limited) for _ in range(5)]
        assert [response.status_code for response in responses] == [200] * 3 + [429] * 2
        error = check_error(responses[-1], 429, "key 'limited' may send 3 requests a minute; try again in ")
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert 1 <= int(responses[-1].headers["retry-after"]) <= 20
        assert {ask(server, free).status_code for _ in range(8)} == {200}
        used = server.get("/v1/usage", headers=bearer(limited)).json()  # not limited itself
        assert (used["requests"], used["refused"]) == (3, 2)


def test_bucket_fills_evenly() -> None:
    now = [NOON]
    account = Ledger(now=lambda: now[0]).account(APIKey("a", HASH, requests_per_minute=60))

    def allowed() -> int:
        before = account.spent.requests
        with pytest.raises(APIError) as caught:
            consume(iter(account.count_request, "never"))
        assert caught.value.headers["retry-after"] == "1"
        return account.spent.requests - before

    assert allowed() == 60
    for seconds, expected in ((0.5, 0), (0.5, 1), (10, 10), (3600, 60), (-7200, 0), (1, 1)):
        now[0] += seconds
        assert allowed() == expected


def test_spend_cap(tmp_path: Path) -> None:
    """It is exceeded by less than one request, and what needs no expert passes."""
    path = tmp_path / "keys.json"
    key = add_key(path, "alice", expert_tokens_per_day=LENGTH + 1)
    with running(toy_model(), keys=path) as server:
        written = [ask(server, key).json()["usage"]["expert_tokens"] for _ in range(2)]
        while sum(written) <= LENGTH:
            written.append(ask(server, key).json()["usage"]["expert_tokens"])
        refused = ask(server, key)
        error = check_error(refused, 429, f"may use {LENGTH + 1} tokens of the expert a day (UTC), and has used them")
        assert error["code"] == "spend_cap_reached"
        assert 0 < int(refused.headers["retry-after"]) <= 86_400
        assert ask(server, key, {"model": "toy@0", "prompt": "13"}).status_code == 200
        used = server.get("/v1/usage", headers=bearer(key)).json()
        assert used["expert_tokens"] == sum(written)
        assert used["expert_tokens_left"] == 0
        assert used["limits"] == {"requests_per_minute": None, "expert_tokens_per_day": LENGTH + 1}
        line = f'seqdefer_key_tokens_total{{author="expert",key="alice"}} {sum(written)}.0'
        assert line in server.get("/metrics", headers=bearer(key)).text.splitlines()
        add = read_keys(path)[0]
        path.write_text(json.dumps({"keys": [{**vars(add), "expert_tokens_per_day": 10**6}]}), encoding="utf-8")
        assert ask(server, key).status_code == 200  # a higher cap takes effect


def test_a_setting_that_spent_nothing_may_still_ask(tmp_path: Path) -> None:
    """A promised quality may have spent nothing on the inputs it was tested on; its requests count all the same."""
    path, model = tmp_path / "keys.json", toy_model()
    key = add_key(path, "alice", expert_tokens_per_day=1)
    quality = QualityPromise(-1e90, 0.0, 2.0, 1.5, 60, 1.0, 0.9, "loss", model.rejector.fingerprint)
    with running(model, keys=path, quality=quality) as server:
        spent = ask(server, key, {"model": "toy", "prompt": "13"}).json()["usage"]["expert_tokens"]
        assert spent > 1
        for _ in range(2):
            check_error(ask(server, key, {"model": "toy", "prompt": "13"}), 429, "and has used them")


def test_metrics_are_for_the_operator(tmp_path: Path) -> None:
    """They name all keys. With a file of keys alone, any of them will do."""
    path = tmp_path / "keys.json"
    key = add_key(path, "alice")
    with running(toy_model(), keys=path, api_key="operator") as server:
        refused = server.get("/metrics", headers=bearer(key))
        assert check_error(refused, 401, "--api-key")["code"] == "operator_only"
        assert "alice" not in refused.text
        assert server.get("/v1/models", headers=bearer(key)).status_code == 200
        assert server.get("/metrics", headers=bearer("operator")).status_code == 200
    with running(toy_model(), keys=path) as server:
        assert server.get("/metrics", headers=bearer(key)).status_code == 200


def test_spend_cap_holds_for_requests_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, cap = add_key(path, "alice", expert_tokens_per_day=2 * LENGTH), 2 * LENGTH
    with running(slow_model(0.02)[0], keys=path) as server, ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(lambda _: ask(server, key), range(16)))
        spent = server.get("/v1/usage", headers=bearer(key)).json()["expert_tokens"]
    statuses = [response.status_code for response in responses]
    assert set(statuses) == {200, 429}
    assert spent == sum(one.json()["usage"]["expert_tokens"] for one in responses if one.status_code == 200)
    assert spent < cap + LENGTH
    assert server.app.state.ledger.accounts["alice"].reserved == 0


def test_clients_that_leave_pay(tmp_path: Path) -> None:
    """Their tokens were written, even if nobody read them."""
    path = tmp_path / "keys.json"
    key = add_key(path, "alice")
    model, slow = slow_model(SHOWN_SECONDS * 1.2, pause_after=2)
    slow.gate.clear()
    with running(model, keys=path) as server:
        with server.client_that_leaves(EXPERT, f"Authorization: Bearer {key}"):
            until(lambda: slow.calls == 3)
        until(lambda: not server.scheduler._open)
        slow.gate.set()
        server.wait_until_idle()
        until(lambda: server.app.state.ledger.by_key()["alice"].expert_tokens > 0)
        assert server.app.state.ledger.accounts["alice"].reserved == 0


def test_clients_that_leave_during_a_hand_off_pay_for_it(tmp_path: Path) -> None:
    """It is one turn: nothing was counted, however often a client left."""
    path, model = tmp_path / "keys.json", toy_model("OneTimeCost")
    key, begun, left = add_key(path, "alice"), threading.Event(), threading.Event()

    def complete(*_: Any) -> Any:
        begun.set()
        left.wait(60)
        raise RuntimeError("nobody is there")

    expert = model.served.expert
    with pytest.MonkeyPatch.context() as patch, running(model, keys=path) as server:
        patch.setattr(type(expert), "complete", complete)
        with server.client_that_leaves(EXPERT, f"Authorization: Bearer {key}"):
            assert begun.wait(60)
        until(lambda: server.app.state.ledger.by_key()["alice"].expert_tokens == LENGTH)
        left.set()
        server.wait_until_idle()
        assert server.app.state.ledger.accounts["alice"].reserved == 0


def test_days_start_at_zero() -> None:
    now = [NOON]
    ledger, key = Ledger(now=lambda: now[0]), APIKey("a", HASH, expert_tokens_per_day=5)
    ledger.account(key).settle(0, {"expert": 5, "predictor": 2})
    with pytest.raises(APIError) as caught:
        ledger.account(key).check_spending(1)
    assert int(caught.value.headers["retry-after"]) == 12 * 3600 == seconds_to_midnight(NOON)
    now[0] += 12 * 3600
    ledger.account(key).check_spending(1)
    assert ledger.by_key()["a"].expert_tokens == 0


def test_usage_without_keys(server: RunningServer) -> None:
    server.complete("13", 1)
    used = server.get("/v1/usage").json()
    assert used["key"] == "anyone"
    assert used["expert_tokens"] > 0


def test_a_key_sees_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    alice, bob = add_key(path, "alice"), add_key(path, "bob")
    with running(toy_model(), keys=path) as server:
        ask(server, alice)
        assert server.get("/v1/usage", headers=bearer(alice)).json()["requests"] == 1
        response = server.get("/v1/usage", headers=bearer(bob))
        assert response.json()["requests"] == 0
        assert "alice" not in response.text
        check_error(server.get("/v1/usage"), 401)


# -- restarts ------------------------------------------------------------------------------------------------------


def test_usage_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "alice")
    for count in (1, 2):
        with running(toy_model(), keys=path) as server:
            assert ask(server, key).status_code == 200
            assert server.get("/v1/usage", headers=bearer(key)).json()["requests"] == count
    stored = json.loads(usage_file(path).read_text(encoding="utf-8"))
    stored["day"] = "2020-01-01"
    usage_file(path).write_text(json.dumps(stored), encoding="utf-8")
    elsewhere = tmp_path / "usage.json"
    elsewhere.write_text(json.dumps(stored), encoding="utf-8")
    assert Ledger(elsewhere).by_key() == {}  # of another day
    usage_file(path).write_text("{}", encoding="utf-8")
    with pytest.raises(OptionError, match="move that file away"):
        Ledger(usage_file(path))
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="choose where to keep what keys use with --usage"):
        Ledger(tmp_path / "file" / "usage.json")


@pytest.mark.slow
def test_a_killed_server_forgets_a_second_at_most(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "alice")
    for expected in (20, 40):
        with server_process(tmp_path, options=f"keys=Path({str(path)!r})") as server:
            with httpx.Client(headers=bearer(key), timeout=60) as client:
                for _ in range(20):
                    assert client.post(server.address + COMPLETIONS, json=EXPERT).status_code == 200
            until(lambda expected=expected: _stored_requests(path) == expected)  # while the server runs
            os.kill(server.process.pid, signal.SIGKILL)
            assert _stored_requests(path) == expected
    assert SAVE_SECONDS <= 1
    assert not list(tmp_path.glob(".*"))  # nothing half written


def _stored_requests(path: Path) -> int:
    if not usage_file(path).exists():
        return 0
    keys = json.loads(usage_file(path).read_text(encoding="utf-8"))["keys"]
    return int(keys["alice"]["requests"]) if "alice" in keys else 0
