"""A client of one completions endpoint as OpenAI, vLLM and llama.cpp serve it: POST URL/completions, text in, text out.

    client = Completions(Endpoint("https://host/v1", "my-model"))
    client.ask_all([Ask("Once upon a", 8), Ask("The cat", 8)])

It knows nothing of tasks. What may pass is tried again (no connection, no answer in time, 408, 409, 429, 5xx), later
each time; what will not pass fails at once. A call takes at most (retries + 1) x seconds, and the waits between;
whoever has less time runs it with a `seqdefer.remote.cancellation.Patience`, and ends that.
The key is read from the environment for each call, and is nowhere else: not in an object, a file, a log or an error.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from seqdefer.errors import OptionError, SeqdeferError, missing_extra
from seqdefer.remote.cancellation import ends_with

if TYPE_CHECKING:
    import httpx

KEY = "SEQDEFER_EXPERT_KEY"
PASSING = (408, 409, 429)  # and all from 500 on
LARGEST = 2**22  # bytes of an answer
FIRST_WAIT, LAST_WAIT = 0.5, 8.0  # seconds before the second try, doubled before each further one, up to the last
LONGEST_WAIT = 60.0  # that a server may ask for
SHOWN = 200  # letters of what a server says
Result = TypeVar("Result")


class EndpointError(SeqdeferError):
    """An endpoint did not give what was asked for."""


@dataclass(frozen=True)
class Endpoint:
    """Where a model answers, and how patient we are with it."""

    url: str  # up to /v1
    model: str
    seconds: float = 30.0  # for one try
    retries: int = 4
    at_once: int = 8  # calls under way together

    def __post_init__(self) -> None:
        check_url(self.url)
        if not self.model:
            raise OptionError(f"no model is named at {self.url}; name one that it serves")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise OptionError(f"{self.seconds} seconds for a call; it must be more than 0")
        if self.retries < 0 or self.at_once < 1:
            raise OptionError(f"{self.retries} retries and {self.at_once} calls at once; at least 0 and 1 are needed")

    @property
    def address(self) -> str:
        return self.url.rstrip("/").removesuffix("/completions") + "/completions"


def require_extra() -> None:
    """Before anything is loaded that takes long."""
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise missing_extra("httpx", "remote", "an expert behind an endpoint") from error


def is_url(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def check_url(url: str) -> None:
    if any(sign in url for sign in "@?#"):  # said without it: it may hold a password
        raise OptionError(f"the address of an endpoint holds more than a host and a path; give a key in {KEY} alone")
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_whole = False
    if not (is_whole and is_url(url) and url.isprintable()) or " " in url:
        raise OptionError(f"{url!r:.80} is no address of an endpoint; give one like https://host/v1")
    if "/chat" in parts.path:
        raise OptionError(f"{url:.80} is for chats, which cannot go on within a text; give the address up to /v1")


@dataclass(frozen=True)
class Ask:
    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Completion:
    text: str
    is_finished: bool  # the model ended it; else it has all the tokens it may have, or was cut otherwise


class _Passing(Exception):
    """What may pass: why a try failed, and how long the server wants us to wait, if it says so."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class Completions:
    """Calls to an endpoint, from any thread. Connections are opened when they are needed, and kept.

    `sleep`, `jitter` (0 to 1) and `now` are for those who have no time to wait."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.endpoint, self.sleep, self.jitter, self.now = endpoint, sleep, jitter, now
        self._opening = threading.Lock()
        self._line: _Line | None = None

    def ask_all(self, asks: Sequence[Ask]) -> list[Completion]:
        """The answers in the order of what was asked, `at_once` at a time. The first that fails ends all."""
        if not asks:
            return []
        _key()  # a bad one is said before anything is sent
        with self._opening:
            self._line = self._line or _Line(self.endpoint.at_once)
        return self._line.run(self._ask_all(self._line, asks))

    async def _ask_all(self, line: _Line, asks: Sequence[Ask]) -> list[Completion]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._in_turn(line, ask)) for ask in asks]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _in_turn(self, line: _Line, ask: Ask) -> Completion:
        async with line.turns:
            tries, reason = self.endpoint.retries + 1, ""
            for number in range(1, tries + 1):
                try:
                    return self._completion(await self._try(line.http, ask))
                except _Passing as failed:
                    reason, wait = str(failed), self._wait(number, failed.wait)
                if wait > LONGEST_WAIT:
                    raise self._error(f"{reason}; it asks to wait {wait:.0f} seconds", "ask again then")
                if number < tries:
                    await self.sleep(wait)
        times = "1 try" if tries == 1 else f"{tries} tries"
        raise self._error(
            f"gave no answer in {times}: {reason}",
            "ask again later, or allow more time and tries: --expert-seconds, --expert-retries",
        )

    def _wait(self, number: int, asked: float | None) -> float:
        """What the server asks for; else longer each time, and not the same for all who were sent away together."""
        if asked is not None:
            return asked
        return min(LAST_WAIT, FIRST_WAIT * 2.0 ** (number - 1)) * (1 + self.jitter()) / 2

    async def _try(self, http: httpx.AsyncClient, ask: Ask) -> bytes:
        import httpx

        try:
            async with asyncio.timeout(self.endpoint.seconds):
                return await self._post(http, ask)
        except TimeoutError:
            raise _Passing(f"no answer within {self.endpoint.seconds:g} seconds") from None
        # From None: these errors know the request, and so the key.
        except httpx.InvalidURL as error:
            raise self._error(f"cannot be called: {self._said(str(error))}", "mend the address") from None
        except httpx.HTTPError as error:
            said = self._said(str(error) or type(error).__name__)
            if "CERTIFICATE_VERIFY_FAILED" in said:
                raise self._error(f"cannot be trusted: {said}", "mend its certificate, or trust its issuer") from None
            raise _Passing(said) from None

    async def _post(self, http: httpx.AsyncClient, ask: Ask) -> bytes:
        body = {"model": self.endpoint.model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0}
        key = _key()
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        async with http.stream("POST", self.endpoint.address, content=json.dumps(body), headers=headers) as answer:
            if answer.headers.get("content-encoding", "identity") != "identity":  # a small one may unpack to any size
                raise self._error("answers with packed bytes, which nobody asked for", "give another address")
            content = bytearray()
            async for part in answer.aiter_raw():
                content += part
                if len(content) > LARGEST:
                    raise self._error(f"answers with more than {LARGEST >> 20} MiB", "give another address")
        if answer.status_code != 200:
            raise self._refused(answer, bytes(content))
        return bytes(content)

    # -- what comes back -------------------------------------------------------------------------------------------

    def _refused(self, answer: httpx.Response, content: bytes) -> Exception:
        status, said = answer.status_code, self._said(_message(content))
        if status in PASSING or status >= 500:
            return _Passing(f"status {status}, {said}", _asked_wait(answer.headers.get("retry-after"), self.now()))
        if 300 <= status < 400:
            place = self._said(answer.headers.get("location", "nowhere"))
            return self._error(f"sends calls on to {place}, where they do not go", "if you trust that, give it instead")
        key = f"the key in {KEY} is not taken" if _key() else f"set the key: {KEY}"
        address = "the address (it usually ends in /v1)" if status == 404 else "the address"
        mend = key if status in (401, 403) else f"check {address} and the model's name"
        return self._error(f"refused the call for {self.endpoint.model!r:.80} (status {status}, {said})", mend)

    def _completion(self, content: bytes) -> Completion:
        try:
            choice = json.loads(content)["choices"][0]
            text, reason = choice["text"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            text, reason = None, None
        if not isinstance(text, str):
            said = self._said(content[: 2 * SHOWN].decode(errors="replace"))
            raise self._error(f"gave an answer that is no completion: {said}", "give the address up to /v1")
        # Half a surrogate pair, which JSON can spell, is no text.
        return Completion(text.encode(errors="replace").decode(), reason == "stop")

    def _said(self, text: str) -> str:
        """What a server says, without our key, in one line and not too long."""
        key = _key()
        text = " ".join((text.replace(key, "***") if key else text).split())
        return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…")

    def _error(self, what: str, mend: str) -> EndpointError:
        return EndpointError(f"{self.endpoint.url} {what}; {mend}")


def _key() -> str:
    key = os.environ.get(KEY, "")
    if not (key.isascii() and key.isprintable()) or " " in key:  # what sends it would show it in its complaint
        raise OptionError(f"the key in {KEY} holds a space or a letter that no key has; give it without")
    return key


def _message(content: bytes) -> str:
    """What an error's body says, in the forms of OpenAI and others; else the body."""
    try:
        body: Any = json.loads(content)
    except (ValueError, RecursionError):
        return content[: 2 * SHOWN].decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and name in body:
            body = body[name]
    return body if isinstance(body, str) else json.dumps(body)


def _asked_wait(header: str | None, now: float) -> float | None:
    """Seconds of a Retry-After, which may also be a date."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - now
        except (ValueError, OverflowError, OSError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


# -- connections -----------------------------------------------------------------------------------------------------


class _Line:
    """An event loop in a thread of its own, with connections that outlive calls. Callers may be anywhere (a notebook
    has a loop already), and who waits hears Ctrl-C. It ends when nobody holds it."""

    def __init__(self, at_once: int) -> None:
        self.turns = asyncio.Semaphore(at_once)
        opened: Future[tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Event]] = Future()
        thread = threading.Thread(target=_hold, args=(at_once, opened), name="seqdefer-remote", daemon=True)
        thread.start()
        self.loop, self.http, over = opened.result()
        weakref.finalize(self, self.loop.call_soon_threadsafe, over.set)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            with ends_with(future.cancel):
                return future.result()
        finally:
            future.cancel()  # of a caller that was interrupted, the calls end with it


def _hold(at_once: int, opened: Future[Any]) -> None:
    try:
        asyncio.run(_open(at_once, opened))
    except Exception as error:  # httpx is absent, or cannot read a setting of the environment
        if opened.done():
            raise
        opened.set_exception(error)


async def _open(at_once: int, opened: Future[Any]) -> None:
    require_extra()
    import httpx

    over = asyncio.Event()
    # asyncio.timeout bounds a try as a whole, which httpx's own limits on each of its parts do not.
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits, follow_redirects=False) as http:
        opened.set_result((asyncio.get_running_loop(), http, over))
        await over.wait()
