"""What each API key uses in a day (UTC): rate limits, spend caps, and a file that survives a restart.

    account = ledger.account(key)
    account.count_request()                  # raises APIError 429 above the key's requests per minute
    account.check_spending(most)             # raises APIError 429 if what is left of the day may be spent already
    account.reserved += most
    account.settle(most, {"predictor": 9, "expert": 3})

A cap counts tokens of the expert. To cap money, give `Spent` a price and compare that in `Account._left`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

from seqdefer.errors import CheckpointError, OptionError
from seqdefer.server.http import APIError
from seqdefer.server.keys import APIKey
from seqdefer.storage.files import read_json, write_json

SAVE_SECONDS = 0.5  # between two writes: a killed server forgets at most this much
ANYONE = APIKey("anyone", "0" * 64)  # the account of a server without keys

log = logging.getLogger("seqdefer.server")


@dataclass
class Spent:
    """What a key used since midnight."""

    requests: int = 0
    refused: int = 0
    predictor_tokens: int = 0
    expert_tokens: int = 0


@dataclass
class Account:
    """One key: what it may use, what it used today, and what its requests in flight may use at most."""

    key: APIKey
    now: Callable[[], float]
    spent: Spent = field(default_factory=Spent)
    reserved: int = 0  # tokens of the expert
    _allowance: float = 1.0  # share of a minute's requests that may be sent at once
    _counted_at: float = 0.0

    def count_request(self) -> None:
        """Count a request, or refuse it with APIError: a bucket that holds a minute's requests and fills evenly."""
        rate = self.key.requests_per_minute
        if rate is not None:
            now = self.now()
            # A clock that is set back must not lock a key out.
            self._allowance = min(1.0, self._allowance + max(0.0, now - self._counted_at) / 60)
            self._counted_at = now
            if self._allowance < 1 / rate - 1e-9:
                wait = 60 * (1 / rate - self._allowance)
                self._refuse(f"key {self.key.name!r} may send {rate} requests a minute", "rate_limit_exceeded", wait)
            self._allowance -= 1 / rate
        self.spent.requests += 1

    def check_spending(self, most: int) -> None:
        """Refuse a request that may use `most` tokens of the expert if the daily cap may be used up. One that needs
        no expert passes. So a cap is exceeded by less than what one request may use."""
        left, cap = self._left(), self.key.expert_tokens_per_day
        if most == 0 or left is None or left > self.reserved:
            return
        message = f"key {self.key.name!r} may use {cap} tokens of the expert a day (UTC), and has used "
        if left > 0:
            message += f"{self.spent.expert_tokens}; its requests in flight may use the rest"
            self._refuse(message, "spend_cap_reached", 1)
        message += "them; ask at budget 0, which needs no expert"
        self._refuse(message, "spend_cap_reached", seconds_to_midnight(self.now()))

    def settle(self, most: int, tokens: Mapping[str, int]) -> None:
        """Record the tokens that each author wrote for a request, and release what was reserved for it."""
        self.reserved -= most
        self.spent.predictor_tokens += tokens.get("predictor", 0)
        self.spent.expert_tokens += tokens.get("expert", 0)

    def response(self, day: str) -> dict[str, Any]:
        """Return the response of /v1/usage."""
        limits = {name: getattr(self.key, name) for name in ("requests_per_minute", "expert_tokens_per_day")}
        left = self._left()
        left = None if left is None else max(0, left)
        used = {"object": "usage", "key": self.key.name, "day": day, **asdict(self.spent)}
        return {**used, "expert_tokens_left": left, "limits": limits}

    def _left(self) -> int | None:
        cap = self.key.expert_tokens_per_day
        return None if cap is None else cap - self.spent.expert_tokens

    def _refuse(self, message: str, code: str, seconds: float) -> NoReturn:
        wait = max(1, math.ceil(seconds - 1e-6))
        self.spent.refused += 1
        message = f"{message}; try again in {wait} seconds"
        raise APIError(429, message, code=code, headers={"retry-after": str(wait)})


class Ledger:
    """The accounts of all keys. Used by the event loop only; `path` is where the day's usage is kept, if anywhere."""

    def __init__(self, path: Path | None = None, now: Callable[[], float] = time.time) -> None:
        self.path, self.now, self.day = path, now, _day(now())
        self.accounts: dict[str, Account] = {}
        self._saved: Any = None
        self._writing = threading.Lock()
        if path is not None:
            self._open(path)

    def account(self, key: APIKey | None) -> Account:
        """Return the account of a key, with its limits as they are now; without a key, that of anyone."""
        self._turn_day()
        key = key or ANYONE
        account = self.accounts.setdefault(key.name, Account(key, self.now))
        account.key = key
        return account

    def by_key(self) -> dict[str, Spent]:
        """Return what each key used today."""
        self._turn_day()
        return {name: account.spent for name, account in self.accounts.items()}

    async def keep_saved(self) -> None:
        """Write the file whenever something changed, forever."""
        while self.path is not None:
            await asyncio.sleep(SAVE_SECONDS)
            if self._content() != self._saved:
                await asyncio.to_thread(self.save)

    def save(self) -> None:
        """Write what is new. A write that was begun earlier ends first, so that the newest comes last."""
        with self._writing:
            if self.path is not None and (content := self._content()) != self._saved:
                self._write(content)

    def _content(self) -> dict[str, Any]:
        return {"day": self.day, "keys": {name: asdict(spent) for name, spent in self.by_key().items()}}

    def _write(self, content: dict[str, Any]) -> None:
        assert self.path is not None
        try:
            write_json(self.path, content)
        except OSError as error:
            log.error("cannot write what API keys used: %s", error)
        self._saved = content  # after a failure too: the next change tries again

    def _open(self, path: Path) -> None:
        """Read the file if it exists, and write it: what cannot be kept is found out before the first request."""
        try:
            if path.exists():
                self._load(path)
            write_json(path, self._content())
        except OSError as error:
            raise OptionError(
                f"cannot write {path}: {error}; choose where to keep what keys use with --usage"
            ) from error

    def _load(self, path: Path) -> None:
        try:
            content = read_json(path)
            day, used = content["day"], content["keys"].items()
            spent = {name: Spent(**{what: int(n) for what, n in one.items()}) for name, one in used}
        except (CheckpointError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise OptionError(f"cannot read what API keys used from {path}: {error}; move that file away") from error
        if day == self.day:
            self.accounts = {name: Account(APIKey(name, ANYONE.sha256), self.now, one) for name, one in spent.items()}

    def _turn_day(self) -> None:
        today = _day(self.now())
        if today != self.day:
            self.day = today
            for account in self.accounts.values():
                account.spent = Spent()


def usage_file(keys: Path) -> Path:
    """Return where the usage of a file of keys is kept: keys.json -> keys.usage.json"""
    return keys.with_suffix(".usage.json")


def seconds_to_midnight(now: float) -> float:
    """Return the seconds until the next day (UTC) begins."""
    today = datetime.fromtimestamp(now, UTC)
    return ((today + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0) - today).total_seconds()


def _day(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).date().isoformat()
