"""Random requests, most of them nearly valid: no response is a 5xx, nothing hangs, nothing is left behind.

`SEQDEFER_TEST_FUZZ=10000` sends that many; a tenth of them are uploads of sound.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fuzzing import Fuzz
from records import record_result
from servers import IGNORE_BUDGETS, RunningServer, running, speech_model, toy_model

from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.http import Limits
from seqdefer.server.keys import add_key

pytestmark = [pytest.mark.slow, IGNORE_BUDGETS]

N = int(os.environ.get("SEQDEFER_TEST_FUZZ", "1000"))
# Clients that want more bytes than a response has wait until the server closes the connection.
LIMITS = Limits(head_seconds=0.5, request_seconds=10, grace_seconds=0.5, keep_alive_seconds=0.5)
BEGUN = re.compile(r"^seqdefer_queue_seconds_count\{.*\} (\S+)", re.MULTILINE)


def check(name: str, model: DeferringModel, folder: Path, n: int, clips: Sequence[bytes] = ()) -> None:
    """Send requests, and check their statuses and what they leave behind."""
    path = folder / "keys.json"
    key, capped = add_key(path, "fuzz"), add_key(path, "capped", requests_per_minute=60, expert_tokens_per_day=200)
    keys = [key] * 18 + [capped, "wrong"]
    with running(model, keys=path, limits=LIMITS) as server, ThreadPoolExecutor(24) as pool:  # some wait long
        port = int(server.address.rsplit(":", 1)[1])
        statuses = Counter(pool.map(lambda seed: Fuzz(seed, keys, clips).request().send(port), range(n)))
        check_nothing_is_left(server)
        shown = server.get("/metrics", headers={"authorization": f"Bearer {key}"}).text
    reached = sum(float(number) for number in BEGUN.findall(shown))
    record_result(f"service-fuzz-{name}", {"statuses": statuses, "reached": int(reached)})
    assert sum(statuses.values()) == n
    assert not [status for status in statuses if status.startswith("5")], statuses
    assert statuses["none"] < n / 10
    assert reached > n / 3, statuses


def check_nothing_is_left(server: RunningServer) -> None:
    server.wait_until_idle()
    assert not server.scheduler._open
    assert server.app.state.ledger.accounts["fuzz"].reserved == 0
    assert server.get("/health").json() == {"status": "ok"}


@pytest.fixture(autouse=True)
def no_errors_are_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Clients must not fill the log with tracebacks."""
    yield
    assert not [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]


def test_no_request_breaks_the_server(tmp_path: Path) -> None:
    check("requests", toy_model(), tmp_path, N - N // 10)


def test_no_upload_breaks_the_server(tmp_path: Path) -> None:
    model = speech_model()  # skips without the extra 'speech'
    from tests.server.test_transcriptions import sounds

    check("uploads", model, tmp_path, N // 10, sounds(4))
