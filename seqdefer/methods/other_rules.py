"""Rules of other people that score every token: Chow, and those that let the expert read first.

`seqdefer.rejectors.other_rules` has the conditions, the scores and the references. They run where `--methods` names
them.
"""

from __future__ import annotations

from seqdefer.methods.base import Method, rule_fit
from seqdefer.rejectors.other_rules import READ_FIRST_SCORES, ChowToken, ReadFirstRule

SOURCES = {"Typical": "Cai et al., 2024"}
CASCADES = "Narasimhan et al., 2024"


def _read_first(rule: str, order: int) -> Method:
    source = SOURCES.get(rule, CASCADES)
    return Method(
        rule, "token", rule_fit(lambda _: ReadFirstRule(rule)), order=order, needs_entropy=True, reads_first=True,
        source=source, about=f"A rule of {source}: the expert reads every position, then both models are compared.",
        note=lambda _: f"{rule} is a rule of {source}; the expert reads before it decides.",
    )  # fmt: skip


METHODS = (
    Method(
        "Chow", "token", rule_fit(lambda _: ChowToken()), needs_entropy=True, order=20, source="Chow, 1970",
        about="Asks the expert for single tokens to which the predictor gives a low probability.",
    ),
    *(_read_first(rule, order) for order, rule in enumerate(READ_FIRST_SCORES, 21)),
)  # fmt: skip
