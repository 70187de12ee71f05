"""Hard caps on the expert, for a sequence or a whole request: they always hold.

    cap = Cap(tokens=20)                          # of the expert, in each sequence
    cap = Cap(money=0.002, per="request")         # needs prices

A cap counts what the expert does: tokens that it writes, passes (how often it is asked: by token once for each of its
tokens, though one pass of the speculative loop may settle several; a hand-off is one), or money (`budgets.prices`).

A cap of a request is divided equally among its sequences. What one leaves is not given to the others, so that what
is written does not depend on which is written first.

Where the cap forbids what the rejector wants, the predictor writes on. `rising` raises the threshold on the way, so
that late tokens are not starved: what is left, divided by the tokens that are still expected, is a budget, and the
calibration knows its threshold. `cut-off` defers as if there were no cap until it is used up. A hand-off is one
decision, made among those hand-offs after which the longest possible sequence still fits; both policies are the same
there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from seqdefer.budgets.prices import MAX_AMOUNT, Charge, Prices, is_amount
from seqdefer.errors import OptionError, require_known

CapScope = Literal["sequence", "request"]
CapPolicy = Literal["cut-off", "rising"]
ROUNDING = 1e-9  # relative, of sums of money


@dataclass(frozen=True)
class Cap:
    """The most that the expert may do; None is no limit."""

    tokens: int | None = None
    passes: int | None = None
    money: float | None = None
    per: CapScope = "sequence"
    policy: CapPolicy = "rising"

    def __post_init__(self) -> None:
        limits = {"tokens": self.tokens, "passes": self.passes, "money": self.money}
        if all(limit is None for limit in limits.values()):
            raise OptionError("a cap limits nothing; give tokens, passes or money")
        for name, limit in limits.items():
            if limit is not None and not is_amount(limit):
                raise OptionError(f"a cap of {limit!r:.40} {name}; give a number from 0 to {MAX_AMOUNT:g}")
            if name != "money" and limit is not None and int(limit) != limit:
                raise OptionError(f"a cap of {limit} {name}; give a whole number")
        require_known("scope of a cap", self.per, get_args(CapScope))
        require_known("policy of a cap", self.policy, get_args(CapPolicy))


@dataclass(frozen=True)
class Allowance:
    """What the expert may do for one sequence."""

    tokens: float = math.inf
    passes: float = math.inf
    money: float = math.inf
    rises: bool = False
    charge: Charge = field(default_factory=Charge)

    @property
    def questions(self) -> float:
        """How many tokens the expert may be asked for one by one, leaving money aside."""
        return min(self.tokens, self.passes)

    def allows(self, position: int, tokens: int) -> bool:
        """Tell whether the expert may write `tokens` from `position` on in one pass, its first."""
        pays = self.charge.of_call(position, tokens) <= self.money * (1 + ROUNDING)
        return tokens <= self.tokens and self.passes >= 1 and pays

    def most_tokens(self, length: int) -> int:
        """Return the most tokens that the expert may write of a sequence, leaving money aside."""
        return int(min(self.tokens, length))


UNLIMITED = Allowance()


def allowances(
    caps: Sequence[Cap], input_tokens: Sequence[int], prices: Prices | None = None
) -> list[Allowance] | None:
    """Return what caps allow for each sequence of a request, with `input_tokens` of each; None without a cap."""
    if not caps:
        return None
    if prices is None and any(cap.money is not None for cap in caps):
        raise OptionError("a cap in money needs prices; give --prices FILE")
    found = []
    for place, n in enumerate(input_tokens):
        allowed = Allowance(charge=Charge() if prices is None else prices.expert.charge(n))
        for cap in caps:
            allowed = _least(allowed, cap, place, len(input_tokens))
        found.append(allowed)
    return found


def _least(allowed: Allowance, cap: Cap, place: int, n: int) -> Allowance:
    """Return what is also allowed by a cap, for the sequence at this place among n."""
    among = n if cap.per == "request" else 1
    limits = {
        "tokens": _part(cap.tokens, place, among),
        "passes": _part(cap.passes, place, among),
        "money": math.inf if cap.money is None else cap.money / among,
    }
    least = {name: min(limit, getattr(allowed, name)) for name, limit in limits.items()}
    return replace(allowed, **least, rises=allowed.rises or cap.policy == "rising")


def _part(limit: int | None, place: int, among: int) -> float:
    """Return the part of a limit for one of several sequences; the first get what is left over."""
    if limit is None:
        return math.inf
    return limit // among + (place < limit % among)
