"""API keys: made at random, stored as hashes in a JSON file, and read again when the file changes.

    key = add_key(Path("keys.json"), "alice", requests_per_minute=60)    # shown once
    KeyRing(Path("keys.json")).find(key.encode()).name                   # alice

A key has 256 random bits, so a plain SHA-256 of it cannot be reversed by guessing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from seqdefer.errors import CheckpointError, OptionError
from seqdefer.storage.files import read_json, write_json

PREFIX = "sd-"
ONLY_KEY = "default"  # the name of --api-key
API_KEY_PATTERN = re.compile(r"[\x21-\x7e]+")
NAME_PATTERN = re.compile(r"[\w.-]{1,64}", re.ASCII)  # it goes into logs and metrics
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger("seqdefer.server")


@dataclass(frozen=True)
class APIKey:
    """The hash of a key, and what its owner may use. None means no limit."""

    name: str
    sha256: str
    requests_per_minute: int | None = None
    expert_tokens_per_day: int | None = None
    created: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or NAME_PATTERN.fullmatch(self.name) is None:
            raise OptionError(f"the name of a key is {self.name!r:.80}; use 1 to 64 ASCII letters, digits, _, . and -")
        for limit in ("requests_per_minute", "expert_tokens_per_day"):
            value = getattr(self, limit)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise OptionError(f"{limit} of key {self.name!r} is {value!r:.80}; give a whole number from 1 on")
        if not isinstance(self.sha256, str) or SHA256_PATTERN.fullmatch(self.sha256) is None:
            raise OptionError(f"sha256 of key {self.name!r} is not 64 hexadecimal digits; make keys with seqdefer keys")


def check_api_key(key: str) -> None:
    if API_KEY_PATTERN.fullmatch(key) is None:
        raise OptionError(
            "the API key is empty, or contains a space or a non-ASCII character; use ASCII letters, digits and "
            "punctuation"
        )


def hash_key(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


# -- the file ------------------------------------------------------------------------------------------------------


def read_keys(path: Path) -> list[APIKey]:
    """Read and check a file of keys."""
    try:
        content = read_json(path)
    except CheckpointError as error:
        raise OptionError(f"{error}; make keys with: seqdefer keys add {path} NAME") from error
    try:
        keys = [APIKey(**entry) for entry in content["keys"]]
    except (TypeError, KeyError) as error:
        raise OptionError(f"{path} is not a file of keys: {error}; make one with: seqdefer keys add") from error
    names = [key.name for key in keys]
    if len(set(names)) < len(names) or ONLY_KEY in names:
        raise OptionError(f"{path} has a name twice, or the reserved name {ONLY_KEY!r}; every key needs its own")
    return keys


def add_key(path: Path, name: str, **limits: int | None) -> str:
    """Add a key to a file, which is made if it does not exist. Return the key, which is not stored."""
    keys = read_keys(path) if path.exists() else []
    if name in {ONLY_KEY, *(key.name for key in keys)}:
        raise OptionError(f"{path} has a key {name!r} already, or the name is reserved; revoke it, or take another")
    key = PREFIX + secrets.token_urlsafe(32)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    _write(path, [*keys, APIKey(name, hash_key(key.encode()), **limits, created=created)])
    return key


def revoke_key(path: Path, name: str) -> None:
    """Remove a key. A running server refuses it from its next request on."""
    keys = read_keys(path)
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        raise OptionError(f"no key {name!r:.80} in {path}; available: {', '.join(key.name for key in keys) or 'none'}")
    _write(path, left)


def _write(path: Path, keys: Sequence[APIKey]) -> None:
    write_json(path, {"keys": [asdict(key) for key in keys]})


# -- in a server ---------------------------------------------------------------------------------------------------


class KeyRing:
    """The keys that a server accepts: those of a file, which may change, and the one of --api-key."""

    def __init__(self, path: Path | None = None, api_key: str | None = None) -> None:
        if api_key is not None:
            check_api_key(api_key)
        self.path = path
        self.fixed = [] if api_key is None else [APIKey(ONLY_KEY, hash_key(api_key.encode()))]
        self.stored: list[APIKey] = []
        self._version: Any = None
        if path is not None:
            self._version, self.stored = _version(path), read_keys(path)

    def find(self, key: bytes) -> APIKey | None:
        """Return the record of a key. It is compared with all of them: the time taken does not tell which is near."""
        self._reread()
        given, found = hash_key(key), None
        for one in (*self.fixed, *self.stored):
            if hmac.compare_digest(one.sha256, given):
                found = one
        return found

    def may_read_metrics(self, key: APIKey) -> bool:
        """Tell whether a key may read the metrics, which name all keys: where --api-key is set, that one alone."""
        return not self.fixed or key in self.fixed

    def _reread(self) -> None:
        """Take over a changed file; keep the keys of the last one that could be read."""
        if self.path is None or (version := _version(self.path)) == self._version:
            return
        self._version = version
        try:
            self.stored = read_keys(self.path)
            log.info("read %d keys from %s", len(self.stored), self.path)
        except OptionError as error:
            log.error("the API keys stay as they were: %s", error)


def _version(path: Path) -> Any:
    """Return what changes when a file does."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino
