"""Prices of predictor and expert, and what sequences cost by them.

    prices = read_prices(Path("prices.toml"))
    prices.bill(input_tokens=40, authors=[0, 0, 1, 0, 1], by_token=True).saved

The file has a table for each model. Prices are per million tokens, per call, per hour of a machine and per minute of a
person; what is left out is free, except that cached input costs as much as other input.

    currency = "USD"

    [predictor]
    hour = 2.5
    seconds_per_token = 0.002    # else as `seqdefer calibrate` measured it

    [expert]
    input = 0.15
    cached_input = 0.075         # tokens that an earlier call for the same sequence has read
    output = 0.6
    call = 0.0001

What is counted depends on what is written, and not on the order of work: the predictor reads the input in one call and
proposes every token. By token, the expert is called for each of its tokens, and reads all that stands before it; what
its last call has read is cached input. After a hand-off it is called once. The expert alone would read the input once
and write a sequence of the same length.
"""

from __future__ import annotations

import math
import numbers
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from seqdefer.errors import OptionError, require_known, unknown

MILLION = 1e6
MAX_AMOUNT = 1e12  # of prices and caps: sums stay finite
TIMES = ("seconds_per_token", "seconds_per_call")


@dataclass(frozen=True)
class Rates:
    """What one model costs, as the file has it; None is left out."""

    input: float | None = None  # per million tokens, like the next two
    cached_input: float | None = None
    output: float | None = None
    call: float | None = None
    hour: float | None = None  # of a machine
    minute: float | None = None  # of a person
    seconds_per_token: float | None = None  # that hours and minutes are counted by
    seconds_per_call: float | None = None

    @property
    def lacks_time(self) -> bool:
        """Whether a price is per time, and the time is not known."""
        return bool(self.hour or self.minute) and all(getattr(self, name) is None for name in TIMES)

    def charge(self, input_tokens: int) -> Charge:
        """Return what calls for one sequence cost."""
        second = (self.hour or 0.0) / 3600 + (self.minute or 0.0) / 60
        cached = self.input if self.cached_input is None else self.cached_input
        return Charge(
            call=(self.call or 0.0) + second * (self.seconds_per_call or 0.0),
            read=(self.input or 0.0) / MILLION,
            cached=(cached or 0.0) / MILLION,
            write=(self.output or 0.0) / MILLION + second * (self.seconds_per_token or 0.0),
            input_tokens=input_tokens,
        )


@dataclass(frozen=True)
class Charge:
    """The price of a call, of a token that is read, read again and written, for a sequence with such an input."""

    call: float = 0.0
    read: float = 0.0
    cached: float = 0.0
    write: float = 0.0
    input_tokens: int = 0

    def of_call(self, position: int, tokens: float, last: int | None = None) -> float:
        """Return the price of writing `tokens` from `position` on, after a call at position `last`."""
        before = 0 if last is None else self.input_tokens + last
        new = self.input_tokens + position - before
        return self.call + self.cached * before + self.read * new + self.write * tokens


@dataclass(frozen=True)
class Bill:
    """What sequences cost. Savings are negative where the expert alone would be cheaper."""

    predictor: float
    expert: float
    alone: float  # the expert alone
    currency: str

    @property
    def spent(self) -> float:
        return self.predictor + self.expert

    @property
    def saved(self) -> float:
        return self.alone - self.spent

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        parts = {"predictor": self.predictor, "expert": self.expert, "spent": self.spent}
        return {"currency": self.currency, **parts, "expert_alone": self.alone, "saved": self.saved}


@dataclass(frozen=True)
class Prices:
    """The rates of both models."""

    predictor: Rates
    expert: Rates
    currency: str = "USD"

    def bill(self, input_tokens: int, authors: Sequence[int], *, by_token: bool) -> Bill:
        """Return what one sequence costs, from the author of each token: 0 is the predictor."""
        n, expert = len(authors), self.expert.charge(input_tokens)
        calls = expert_calls(authors, by_token=by_token)
        return Bill(
            self.predictor.charge(input_tokens).of_call(0, n),
            math.fsum(expert.of_call(*call) for call in calls),
            expert.of_call(0, n),
            self.currency,
        )

    def expected(self, input_tokens: int, length: float, share: float, *, by_token: bool) -> float:
        """Return about what a sequence of this length costs if the expert writes a share of it: tokens at even
        distances, or the last ones."""
        n, wanted = max(round(length), 1), share * max(round(length), 1)
        spent = [
            self.bill(input_tokens, _authors(n, min(count, n), by_token=by_token), by_token=by_token).spent
            for count in (math.floor(wanted), math.floor(wanted) + 1)
        ]
        return spent[0] + (wanted - math.floor(wanted)) * (spent[1] - spent[0])

    def alone(self, input_tokens: int, length: float) -> float:
        """Return about what the expert alone costs for a sequence of this length."""
        return self.expert.charge(input_tokens).of_call(0, max(round(length), 1))

    def with_times(self, predictor: float | None, expert: float | None) -> Prices:
        """Return prices that take measured seconds per token where the file has none. Raise where neither has."""
        rates = _with_time(self.predictor, "predictor", predictor), _with_time(self.expert, "expert", expert)
        return Prices(*rates, self.currency)


def is_amount(value: Any) -> bool:
    """Tell whether a price or a cap can be counted with."""
    if isinstance(value, bool):
        return False
    return issubclass(type(value), numbers.Real) and bool(0 <= value <= MAX_AMOUNT)


def total(bills: Sequence[Bill]) -> Bill:
    """Return the sum of bills in one currency."""
    predictor, expert, alone = (
        math.fsum(getattr(bill, part) for bill in bills) for part in ("predictor", "expert", "alone")
    )
    return Bill(predictor, expert, alone, bills[0].currency)


def require_prices(prices: Prices | None) -> Prices:
    """Return the prices, or raise where there are none for a budget in money."""
    if prices is None:
        raise OptionError("a budget in money needs prices; give --prices FILE (model.use_prices in Python)")
    return prices


def check_money(money: float) -> None:
    """Raise if a budget in money is not an amount."""
    if not (math.isfinite(money) and money >= 0):
        raise OptionError(f"budget in money is {money}; give an amount from 0 on")


def expert_calls(authors: Sequence[int], *, by_token: bool) -> list[tuple[int, int, int | None]]:
    """Return the expert's calls, as the arguments of `Charge.of_call`."""
    places = [place for place, author in enumerate(authors) if author]
    if by_token:
        return [(place, 1, last) for place, last in zip(places, [None, *places], strict=False)]
    return [(places[0], len(places), None)] if places else []


def _authors(n: int, count: int, *, by_token: bool) -> list[int]:
    """Return n authors, `count` of them the expert, at even distances or at the end."""
    if not by_token:
        return [0] * (n - count) + [1] * count
    chosen = {math.floor((place + 0.5) * n / count) for place in range(count)}
    return [int(place in chosen) for place in range(n)]


def _with_time(rates: Rates, name: str, seconds: float | None) -> Rates:
    if not rates.lacks_time:
        return rates
    if seconds is None:
        raise OptionError(
            f"the {name} has a price per hour or minute, but how long it takes was not measured; add "
            f"seconds_per_token or seconds_per_call to [{name}] in the file of prices"
        )
    return replace(rates, seconds_per_token=seconds)


# -- the file ------------------------------------------------------------------------------------------------------


def read_prices(path: Path) -> Prices:
    """Read and check a file of prices."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read {path}: {error}; --prices takes a TOML file") from error
    currency = content.pop("currency", "USD")
    if not isinstance(currency, str) or not currency.isprintable() or not 0 < len(currency) <= 8:
        raise OptionError(f"currency in {path} is {currency!r:.40}; give a name of at most 8 letters")
    for name in content:
        if name not in ("predictor", "expert"):
            raise unknown(f"part of {path}:", name, ("currency", "predictor", "expert"))
    return Prices(_read_rates(path, content, "predictor"), _read_rates(path, content, "expert"), currency)


def _read_rates(path: Path, content: Mapping[str, Any], name: str) -> Rates:
    table = content.get(name)
    if not isinstance(table, dict):
        raise OptionError(f"{path} has no prices of the {name}; add a table [{name}], with output = 0 if it is free")
    known = [field.name for field in fields(Rates)]
    for key, value in table.items():
        require_known(f"price in [{name}] of {path}:", key, known)
        if not is_amount(value):
            raise OptionError(f"{key} in [{name}] of {path} is {value!r:.40}; give a number from 0 to {MAX_AMOUNT:g}")
    if not set(table) - set(TIMES):
        raise OptionError(f"[{name}] in {path} has no price; give output, call, hour or minute, 0 if it is free")
    return Rates(**{key: float(value) for key, value in table.items()})
