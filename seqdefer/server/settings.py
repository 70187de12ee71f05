"""The settings of `seqdefer serve`: from the command line, else from the environment, else from a file, else a default.

    seqdefer serve models/news --port 9000
    SEQDEFER_PORT=9000 seqdefer serve models/news
    seqdefer serve models/news --config serve.toml      # which has the line: port = 9000

The fields of `ServerSettings` and `Limits` are all there is; their names are the same everywhere, and others raise.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from seqdefer.budgets.caps import Cap
from seqdefer.errors import OptionError, require_known, unknown
from seqdefer.model.calibrated_pair import DEFAULT_BUDGET
from seqdefer.server.http import Limits, option
from seqdefer.server.logs import FORMATS, LEVELS

PREFIX = "SEQDEFER_"
CONFIG = "config"
OTHER_VARIABLES = {  # which other parts read
    f"{PREFIX}{name}"
    for name in ("CACHE", "EXPERT_HOST", "EXPERT_KEY", "MAX_DATA_MIB", "MAX_LINE_MIB", "THREADS", "TRACING")
}
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
Group = TypeVar("Group")
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}


@dataclass(frozen=True)
class ServerSettings:
    """Where and how a server runs."""

    host: str = option("127.0.0.1", "where to listen; other than this machine, it needs a key")
    port: int = option(8000, "0 takes a free one")
    allow_anyone: bool = option(False, "let other machines use a server without a key")
    name: str | None = option(None, "name of the model for clients (the name of the folder)")
    budget: float = option(DEFAULT_BUDGET, "budget of requests that name none")
    guarantee: str | None = option(
        None,
        "least promise of the calibration: expected or confident; serve refuses a model that promises less (none)",
    )
    confidence: float | None = option(None, "of guarantee confident (0.9)")
    share_of: str | None = option(None, "of guarantee: tokens or inputs (tokens)")
    within: float | None = option(
        None,
        "least promise of quality, as of fit --within; requests that name no budget then get its setting (none)",
    )
    prices: Path | None = option(  # noqa: RUF009
        None, "TOML file of the prices of predictor and expert: answers say what was spent and saved (none)"
    )
    cap_tokens: int | None = option(None, "tokens that the expert writes, at most; a hard cap (none)")
    cap_passes: int | None = option(
        None, "how often the expert is asked, at most: by token once for each, one for a hand-off; a hard cap (none)"
    )
    cap_money: float | None = option(None, "money for the expert, at most; a hard cap, needs prices (none)")
    cap_per: str | None = option(None, "what a cap is about: sequence or request (sequence)")
    cap_policy: str | None = option(
        None, "rising: raise the threshold as the cap is used up; cut-off: defer as usual until it is (rising)"
    )
    api_key: str | None = option(
        None, "one key that clients must send; SEQDEFER_API_KEY is safer, as lists of processes do not show it (none)"
    )
    keys: Path | None = option(None, "file of several keys with limits, made by seqdefer keys (none)")  # noqa: RUF009
    usage: Path | None = option(None, "file that keeps what keys used (beside --keys)")  # noqa: RUF009
    served_log: Path | None = option(  # noqa: RUF009
        None,
        "file that gets lengths, shares and scores of what is served, never texts, for calibrate --from-log (none)",
    )
    served_log_mib: int = option(64, "size of that file, the older half of its lines in FILE.1")
    log_format: str = option("human", f"form of the log on stderr: {' or '.join(FORMATS)}")
    log_level: str = option("info", f"what is logged: {', '.join(LEVELS)}")
    device: str = option("auto", "where to compute: auto, cpu or cuda; auto uses a GPU if there is one")
    quiet: bool = option(False, "show no progress while the models are loaded")

    def __post_init__(self) -> None:
        require_known("log format", self.log_format, FORMATS)
        require_known("log level", self.log_level, LEVELS)


def check_promises(caps: Collection[Cap], **asked: object) -> None:
    """Raise OptionError if every request is capped, and a promise or the log of what is served is asked for: a cap
    changes what is written. `asked` are the settings `guarantee`, `within` and `served_log`."""
    names = [f"--{name.replace('_', '-')}" for name, value in asked.items() if value is not None]
    if caps and names:
        raise OptionError(
            "a cap changes what is written, so nothing is promised or logged for another calibration; leave out "
            f"{' and '.join(names)}, or the cap of the server"
        )


def all_settings() -> Iterator[tuple[Field[Any], Any]]:
    """Yield every setting and its type, without None."""
    for group in (ServerSettings, Limits):
        hints = typing.get_type_hints(group)
        for field in fields(group):
            kinds = [kind for kind in typing.get_args(hints[field.name]) if kind is not type(None)]
            yield field, kinds[0] if kinds else hints[field.name]


def read_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[ServerSettings, Limits]:
    """Join the options that were given, the environment, and the file that either of them names as `config`."""
    kinds = {field.name: kind for field, kind in all_settings()}
    variables = _variables(environment, {*kinds, CONFIG})
    config = given.get(CONFIG) or variables.pop(CONFIG, None)
    found = {} if config is None else _read_file(Path(config), kinds)
    found |= {name: _parse(f"{PREFIX}{name.upper()}", text, kinds[name]) for name, text in variables.items()}
    found |= {name: value for name, value in given.items() if name in kinds}
    return _build(ServerSettings, found), _build(Limits, found)


def _build(group: Callable[..., Group], found: Mapping[str, Any]) -> Group:
    names = {field.name for field in fields(group)}  # type: ignore[arg-type]
    return group(**{name: value for name, value in found.items() if name in names})


def _variables(environment: Mapping[str, str], known: set[str]) -> dict[str, str]:
    """Return the settings in the environment, by name."""
    own = {name: text for name, text in environment.items() if name.startswith(PREFIX)}
    for name in own.keys() - OTHER_VARIABLES:
        if name != name.upper() or name.removeprefix(PREFIX).lower() not in known:
            raise unknown("environment variable", name, (f"{PREFIX}{one.upper()}" for one in known))
    return {name.removeprefix(PREFIX).lower(): text for name, text in own.items() if name not in OTHER_VARIABLES}


def _parse(where: str, text: str, kind: Any) -> Any:
    try:
        return BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise OptionError(f"{where} is {text!r:.80}; give {KINDS[kind]}") from None


def _read_file(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read {path}: {error}; --config takes a TOML file") from error
    return {name: _check(path, name, value, kinds) for name, value in content.items()}


def _check(path: Path, name: str, value: Any, kinds: Mapping[str, Any]) -> Any:
    """Return the value of a setting in a file as its type, where TOML has no such type."""
    require_known(f"setting in {path}:", name, kinds)
    kind = kinds[name]
    accepted = {float: (int, float), Path: (str,)}.get(kind, (kind,))
    if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
        raise OptionError(f"{name} in {path} is {value!r:.80}; give {KINDS[kind]}")
    try:
        return kind(value)
    except OverflowError:
        raise OptionError(f"{name} in {path} is {value!r:.80}; give a smaller number") from None
