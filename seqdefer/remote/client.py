"""A client of a completions endpoint as OpenAI, vLLM and llama.cpp serve it: POST URL/completions, text in, text out.
Servers that take and return token ids (vLLM) can be sent these instead.

    client = EndpointClient(Endpoint("https://host/v1", "my-model"))
    client.complete_all([EndpointRequest("Once upon a", 8), EndpointRequest("The cat", 8)])

Transient failures (no connection, a timeout, 408, 409, 429, 5xx) are retried with growing delays; other failures raise
at once. A call takes at most (retries + 1) x seconds plus the delays. All calls of a client share one thread with an
event loop. `submit` starts a coroutine there and returns a future, which can be cancelled; `run` waits for it.

Calls of `run`, such as those of labelling, also wait for an endpoint that cannot be reached. Those of `submit` have
someone who waits for them: where a connection is refused or reset, they try once more, and fail.

The API key is read from the environment for each call and never stored: it is in no object, file, log or error. It is
sent to one host alone, which the environment names too: the address may come from a file that someone else wrote.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from seqdefer.errors import OptionError, SeqdeferError, import_extra
from seqdefer.remote.keys import KEY_VARIABLE, hide_key, read_key

if TYPE_CHECKING:
    import httpx

TRANSIENT_STATUSES = (408, 409, 429)  # and all from 500 on
MAX_RESPONSE_BYTES = 2**22
BASE_RESPONSE_BYTES = 2**16  # of a response besides its tokens
BYTES_PER_TOKEN = 2**10  # of a token in a response, with all that is said about it
MAX_LETTERS_PER_TOKEN = 2**7
FIRST_DELAY, MAX_DELAY = 0.5, 8.0  # seconds before the first retry, doubled for each further one up to the maximum
MAX_RETRY_AFTER = 60.0  # seconds that a server may ask to wait
MAX_QUOTED_LETTERS = 200  # of a server's message
HURRIED_ATTEMPTS = 2  # to reach an endpoint, where a caller waits: a connection that was kept open may be stale
Result = TypeVar("Result")
logger = logging.getLogger(__name__)
# Whether a coroutine may wait for an endpoint that cannot be reached. The event loop copies the caller's context.
_is_patient: ContextVar[bool] = ContextVar("is_patient", default=False)


class EndpointError(SeqdeferError):
    """An endpoint failed, or its response is not a completion. `status` and `reason` are those of a refused call."""

    status: int | None = None
    reason: str = ""
    is_unreachable: bool = False  # the connection was refused or reset


@dataclass(frozen=True)
class Endpoint:
    """The address of a model, with the limits of its calls."""

    url: str  # up to /v1
    model: str
    seconds: float = 30.0  # per attempt
    retries: int = 4
    at_once: int = 8  # concurrent calls

    def __post_init__(self) -> None:
        check_url(self.url)
        if not self.model:
            raise OptionError(f"no model is named for {self.url}; name one that it serves")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise OptionError(f"seconds per call is {self.seconds}; it must be more than 0")
        if self.retries < 0 or self.at_once < 1:
            raise OptionError(f"{self.retries} retries and {self.at_once} concurrent calls; give at least 0 and 1")

    @property
    def address(self) -> str:
        return self.url.rstrip("/").removesuffix("/completions") + "/completions"


def require_extra() -> None:
    """Raise MissingExtraError if httpx is not installed."""
    import_extra("httpx", "remote", "an expert behind an endpoint")


def is_url(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def check_url(url: str) -> None:
    """Raise OptionError if `url` is not the address of an endpoint. The message quotes no password."""
    if any(sign in url for sign in "@?#"):
        raise OptionError(f"the endpoint's address has more than a host and a path; pass a key in {KEY_VARIABLE} only")
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_whole = False
    if not (is_whole and is_url(url) and url.isprintable()) or " " in url:
        raise OptionError(f"{url!r:.80} is not the address of an endpoint; give one like https://host/v1")
    if "/chat" in parts.path:
        raise OptionError(f"{url:.80} is a chat endpoint, which cannot continue a text; give the address up to /v1")


@dataclass(frozen=True)
class EndpointRequest:
    """A text to continue, or its token ids. `options` are further fields of the request's body."""

    prompt: str | Sequence[int]
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_bytes(self) -> int:
        """How long a response may be. Only those about token ids say something about each of the prompt."""
        n_tokens = self.max_tokens + (0 if isinstance(self.prompt, str) else len(self.prompt))
        return min(BASE_RESPONSE_BYTES + BYTES_PER_TOKEN * n_tokens, MAX_RESPONSE_BYTES)


@dataclass(frozen=True)
class EndpointCompletion:
    """What an endpoint wrote. `choice` holds everything that the server sent about it, unchecked."""

    text: str
    is_finished: bool  # the model ended it; otherwise it was cut, by max_tokens or a filter
    choice: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


class _TransientError(Exception):
    """Why an attempt failed, and the seconds that the server asks to wait, if it does."""

    def __init__(self, reason: str, wait: float | None = None, *, is_unreachable: bool = False) -> None:
        super().__init__(reason)
        self.wait, self.is_unreachable = wait, is_unreachable


class EndpointClient:
    """Calls to an endpoint, from any thread. Connections open on first use and are reused. `n_calls` counts the calls
    so far, without retries.

    `sleep`, `jitter` (0 to 1) and `now` can be replaced in tests."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        now: Callable[[], float] = time.time,
    ) -> None:
        read_key(endpoint.url)  # a key for another host is refused before anything else happens
        self.endpoint, self.sleep, self.jitter, self.now = endpoint, sleep, jitter, now
        self._opening = threading.Lock()
        self._session: _Session | None = None
        self.n_calls = 0

    def complete_all(self, requests: Sequence[EndpointRequest]) -> list[EndpointCompletion]:
        """Return the completions in order, `at_once` calls at a time. The first failure cancels the rest."""
        return self.run(self.complete(requests)) if requests else []

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine that calls `complete`, and wait for its result."""
        before = _is_patient.set(True)
        try:
            future = self.submit(work)
        finally:
            _is_patient.reset(before)
        try:
            return future.result()
        finally:
            future.cancel()  # if the caller was interrupted, its calls end too

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine that calls `complete`. Cancelling the future ends its calls."""
        try:
            with self._opening:
                self._session = self._session or _Session(self.endpoint.at_once)
        except BaseException:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._session.loop)

    async def complete(self, requests: Sequence[EndpointRequest]) -> list[EndpointCompletion]:
        """Do what `complete_all` does, in a coroutine of `run` or `submit`."""
        read_key(self.endpoint.url)  # a bad key fails before anything is sent
        session = self._session
        assert session is not None, "submit opens it"
        self.n_calls += len(requests)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._complete(session, request)) for request in requests]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _complete(self, session: _Session, request: EndpointRequest) -> EndpointCompletion:
        async with session.slots:
            number, is_unreachable = 0, False
            while True:
                number += 1
                try:
                    return self._parse(await self._attempt(session.http, request), request)
                except _TransientError as failed:
                    reason, is_unreachable = str(failed), failed.is_unreachable
                    delay = self._delay(number, failed.wait)
                if delay > MAX_RETRY_AFTER:
                    raise self.error(f"{reason}; it asks to wait {delay:.0f} seconds", "try again then")
                is_hurried = is_unreachable and not _is_patient.get()
                if number > self.endpoint.retries or (is_hurried and number >= HURRIED_ATTEMPTS):
                    break
                if not is_hurried:
                    await self._wait(delay, reason)
        what = f"gave no answer in {number} attempt{'s' if number > 1 else ''}: {reason}"
        error = self.error(what, "try again later, or allow more time: --expert-seconds, --expert-retries")
        error.is_unreachable = is_unreachable
        raise error

    async def _wait(self, seconds: float, reason: str) -> None:
        """Sleep before the next attempt. Log the reason if the caller gives up meanwhile: it sees only a timeout."""
        try:
            await self.sleep(seconds)
        except asyncio.CancelledError:
            logger.warning("%s was not asked again in time: %s", self.endpoint.url, reason)
            raise

    def _delay(self, number: int, requested: float | None) -> float:
        """Return the server's Retry-After, or an exponential delay with jitter."""
        if requested is not None:
            return requested
        return min(MAX_DELAY, FIRST_DELAY * 2.0 ** (number - 1)) * (1 + self.jitter()) / 2

    async def _attempt(self, http: httpx.AsyncClient, request: EndpointRequest) -> bytes:
        import httpx

        try:
            async with asyncio.timeout(self.endpoint.seconds):
                return await self._post(http, request)
        except TimeoutError:
            raise _TransientError(f"no answer within {self.endpoint.seconds:g} seconds") from None
        # `from None`: these errors hold the request, and so the key.
        except httpx.InvalidURL as error:
            raise self.error(f"cannot be called: {self._quote(str(error))}", "correct the address") from None
        except httpx.HTTPError as error:
            message = self._quote(str(error) or type(error).__name__)
            if "CERTIFICATE_VERIFY_FAILED" in message:
                raise self.error(f"cannot be trusted: {message}", "fix its certificate, or trust its issuer") from None
            raise _TransientError(message, is_unreachable=isinstance(error, httpx.TransportError)) from None

    async def _post(self, http: httpx.AsyncClient, request: EndpointRequest) -> bytes:
        asked = {"prompt": request.prompt, "max_tokens": request.max_tokens, **request.options}
        body = {"model": self.endpoint.model, **asked, "temperature": 0}
        key = read_key(self.endpoint.url)
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        async with http.stream("POST", self.endpoint.address, content=json.dumps(body), headers=headers) as response:
            if response.headers.get("content-encoding", "identity") != "identity":  # could expand to any size
                raise self.error("sends a compressed response, which was not requested", "give another address")
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > request.max_bytes:
                    what = f"sends more than {request.max_bytes} bytes for {request.max_tokens} tokens"
                    raise self.error(what, "check that it respects max_tokens")
        if response.status_code != 200:
            raise self._status_error(response, bytes(content))
        return bytes(content)

    def _status_error(self, response: httpx.Response, content: bytes) -> Exception:
        status, message = response.status_code, self._quote(_error_message(content))
        if status in TRANSIENT_STATUSES or status >= 500:
            wait = _parse_retry_after(response.headers.get("retry-after"), self.now())
            return _TransientError(f"status {status}, {message}", wait)
        if 300 <= status < 400:
            target = self._quote(response.headers.get("location", "nowhere"))
            return self.error(f"redirects to {target}, which is not followed", "if you trust that, give it instead")
        key = (
            f"the key in {KEY_VARIABLE} is not accepted"
            if read_key(self.endpoint.url)
            else f"set the key: {KEY_VARIABLE}"
        )
        address = "the address (it usually ends in /v1)" if status == 404 else "the address"
        action = key if status in (401, 403) else f"check {address} and the model's name"
        what = f"refused the call for {self.endpoint.model!r:.80} (status {status}, {message})"
        error = self.error(what, action)
        error.status, error.reason = status, message
        return error

    def _parse(self, content: bytes, request: EndpointRequest) -> EndpointCompletion:
        try:
            choice = json.loads(content)["choices"][0]
            text, reason = choice["text"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            text, reason = None, None
        if not isinstance(text, str):
            found = self._quote(_decode_start(content))
            raise self.error(f"sent a response that is not a completion: {found}", "give the address up to /v1")
        most = MAX_LETTERS_PER_TOKEN * request.max_tokens  # to split a text into tokens takes long if it is long
        is_finished, text = reason == "stop" and len(text) <= most, text[:most]
        # JSON can spell half a surrogate pair, which is not valid text.
        return EndpointCompletion(text.encode(errors="replace").decode(), is_finished, choice)

    def _quote(self, text: str) -> str:
        """Quote a server's message in one short line, without our key."""
        text = " ".join(hide_key(text).split())
        return repr(text if len(text) <= MAX_QUOTED_LETTERS else f"{text[: MAX_QUOTED_LETTERS - 1]}…")

    def error(self, what: str, action: str) -> EndpointError:
        """Return an error that names the endpoint, what happened and what helps."""
        return EndpointError(f"{self.endpoint.url} {what}; {action}")


def _decode_start(content: bytes) -> str:
    return content[: 2 * MAX_QUOTED_LETTERS].decode(errors="replace")


def _error_message(content: bytes) -> str:
    """Return the message in an error's body, in the forms of OpenAI and others; else the body."""
    try:
        body: Any = json.loads(content)
    except (ValueError, RecursionError):
        return _decode_start(content)
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and name in body:
            body = body[name]
    return body if isinstance(body, str) else json.dumps(body)


def _parse_retry_after(header: str | None, now: float) -> float | None:
    """Return the seconds of a Retry-After header, which may be a number or a date."""
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


class _Session:
    """An HTTP client on an event loop in its own thread, shared by all calls. Callers may have a loop (notebooks
    do), and Ctrl-C still interrupts them. The thread ends when the session is garbage-collected."""

    def __init__(self, at_once: int) -> None:
        self.slots = asyncio.Semaphore(at_once)
        opened: Future[tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Event]] = Future()
        thread = threading.Thread(target=_run_loop, args=(at_once, opened), name="seqdefer-remote", daemon=True)
        thread.start()
        self.loop, self.http, closed = opened.result()
        weakref.finalize(self, self.loop.call_soon_threadsafe, closed.set)


def _run_loop(at_once: int, opened: Future[Any]) -> None:
    try:
        asyncio.run(_hold_open(at_once, opened))
    except Exception as error:  # httpx is missing, or cannot read a setting of the environment
        if opened.done():
            raise
        opened.set_exception(error)


async def _hold_open(at_once: int, opened: Future[Any]) -> None:
    require_extra()
    import httpx

    closed = asyncio.Event()
    # asyncio.timeout bounds a whole attempt; httpx's own timeouts bound only its parts.
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits, follow_redirects=False) as http:
        opened.set_result((asyncio.get_running_loop(), http, closed))
        await closed.wait()
