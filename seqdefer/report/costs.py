"""The sections of the report that show curves by other costs than written tokens: expert passes and seconds."""

from __future__ import annotations

from seqdefer.budgets.prices import Prices
from seqdefer.evaluation.results import PairTiming, Results
from seqdefer.report.comparisons import MethodTable, forest
from seqdefer.report.markup import NBSP, Markup, element, folded_table, number, scrolling, section, values_table
from seqdefer.report.svg import inline_svg

COIN = (
    " RandomSpeculative is a coin for each sequence between the predictor alone and lossless speculative decoding, "
    "where the expert checks drafts of all its tokens."
)
MONEY_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0)


def passes_section(results: Results) -> Markup:
    """Show curves and methods by the expert's passes, where they were counted."""
    by_pass = results.by_cost("passes")
    if by_pass is None:
        return Markup()
    words = (
        "Written tokens do not tell what a rule costs that lets the expert read before it decides. Here the predictor "
        f"runs ahead and the expert settles its tokens in chunks: {by_pass.units.deferred}. A rule that decides first "
        "takes a pass for each chunk with a deferred token, one that reads first a pass for each chunk; whole and "
        "one-time deferral a pass for each token of the expert. Random and both ends are those above."
    )
    return section("Loss against expert passes", element("p", words + _coin(by_pass)), *_compared(by_pass, "passes"))


def seconds_section(results: Results) -> Markup:
    """Show curves and methods by seconds, where the pair was timed."""
    timing, by_second = results.timing, results.by_cost("seconds")
    if timing is None:
        return Markup()
    device, cores = (timing.machine.get(key, "unknown") for key in ("device", "cores"))
    costs = (
        f"Measured on {device}, {cores} cores, with {timing.inputs} test inputs, {timing.at_once} at once: a sequence "
        f"takes the predictor alone {_duration(timing.predictor)}, the expert alone "
        f"{_duration(timing.expert)}. "
    )
    if by_second is None:
        no_room = "The expert takes no longer than the predictor, so deferral has no time to save."
        too_slow = "By what its passes take, every setting of every method takes longer than the expert alone."
        words = too_slow if timing.expert > timing.predictor else no_room
        return section("Loss against seconds", element("p", f"{costs}{words}"), _timed_table(timing))
    words = (
        f"{costs}A token that the expert writes on its own takes {_duration(timing.a_token)}, a pass over a chunk "
        f"{_duration(timing.a_pass)}, with what the predictor writes again after it. Lines are derived from these: "
        "the predictor's seconds, and those of the passes that a setting takes; whole and one-time deferral take the "
        "expert's tokens. Settings that take longer than the expert alone are left out, and methods without any other."
    )
    measured = [one for settings in timing.methods.values() for one in settings]
    slower = sum(one.measured > timing.expert for one in measured)
    dots = (
        "Dots are measured: the method wrote these inputs at a setting, with the loss that the setting has on the test "
        "instances of the first seed. Methods that let the expert read first cannot write and have lines alone. "
        f"{slower} of {len(measured)} measured settings take{'s' * (slower == 1)} longer than the expert alone; "
        "the table at the end has them all."
    )
    parts = (element("p", words + _coin(by_second)), element("p", dots), *_compared(by_second, "seconds"))
    return section("Loss against seconds", *parts, _timed_table(timing))


def money_section(results: Results, prices: Prices | None) -> Markup:
    """Show what shares of the tokens cost by a file of prices, per sequence; empty without one."""
    if prices is None:
        return Markup()
    length = max(x for seed in results.seeds for method in seed.methods.values() for x, _ in method.curve)
    kinds = {"By token": True, "Whole and one-time": False}
    titles = ("share of the tokens", *(f"{kind}: {what}" for kind in kinds for what in ("spent", "saved")))
    alone, rows = prices.alone(0, length), []
    for share in MONEY_SHARES:
        spent = [prices.expected(0, length, share, by_token=by_token) for by_token in kinds.values()]
        cells = [_amount(value) for one in spent for value in (one, alone - one)]
        rows.append([f"{100 * share:.0f}{NBSP}%", *cells])
    table = values_table(f"{prices.currency} per sequence", titles, rows)
    words = (
        f"By the prices given, the expert alone costs {_amount(alone)} {prices.currency} for a sequence of "
        f"{length:.1f} tokens. The predictor proposes every token; by token, the expert is called for each of its "
        "tokens. What reading the inputs costs is left out. Negative savings are losses."
    )
    return section("Money", element("p", words), scrolling(table, "What shares of the tokens cost"))


def _amount(value: float) -> str:
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


def _compared(results: Results, cost: str) -> tuple[Markup, ...]:
    names = [name for name in results.summary if results.summary[name].granularity == "token"]
    coins = [name for name in results.summary if name.startswith("Random")]
    figure = element("figure", inline_svg(results, [*names, *coins]), class_="drawn")
    table = scrolling(MethodTable.of(results).draw(), f"Methods by {cost}")
    return scrolling(figure, f"Curves by {cost}"), table, forest(results.comparisons)


def _coin(results: Results) -> str:
    return COIN if "RandomSpeculative" in results.summary else ""


def _timed_table(timing: PairTiming) -> Markup:
    titles = ("Method", "share of the tokens", "measured", "derived", "measured / derived")
    rows = []
    for name, settings in timing.methods.items():
        for one in settings:
            ratio = number(one.measured / one.derived, 2) if one.derived else "–"
            share = f"{100 * one.share:.0f}{NBSP}%"
            rows.append((name, share, _duration(one.measured), _duration(one.derived), ratio))
    return folded_table(
        "Measured seconds", "What the timed inputs took per sequence, measured and derived", titles, rows
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.3g}{NBSP}s" if seconds >= 1 else f"{1000 * seconds:.3g}{NBSP}ms"
