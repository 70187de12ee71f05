"""Tables and texts for the terminal: results of a run, budgets of a model, generated sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from seqdefer.budgets.calibration import Calibration, LossCurve
from seqdefer.budgets.rules import FINITE_LIMIT, Setting
from seqdefer.evaluation.results import Cost, Results, Summary
from seqdefer.methods.timing import TIMED_BUDGETS, Timing
from seqdefer.report.drawn_curves import names_by_block
from seqdefer.report.style import BLOCKS, HEADROOM, decimals_for


def results_table(results: Results) -> Table:
    runs, what = len(results.seeds), escape(f"{results.task}, recipe {results.recipe_in_words}")
    table = Table(
        title=f"{what}: mean (std) over {runs} run{'s' * (runs > 1)}; lower AUDC is better",
        box=box.SIMPLE_HEAD,
        caption=escape(
            f"AUDC: area under the curve of loss, {results.units.loss}, against deferred {results.units.deferred}. "
            f"{HEADROOM}"
        ),
    )
    table.add_column("method", no_wrap=True)
    costs: tuple[Cost, ...] = ("passes", "seconds")
    by_cost = {cost: found for cost in costs if cost in results.cost_comparisons and (found := results.by_cost(cost))}
    headings = ["AUDC", "% over\nRandom", "% of\nheadroom"]
    headings += ["paper: %\nover Random"] if results.paper else []
    headings += [f"by {cost}: %\nover Random" for cost in by_cost]
    for heading in headings:
        table.add_column(heading, justify="right")
    decimals = decimals_for(row.audc_mean for row in results.summary.values())
    for block, names in names_by_block(results).items():
        rows = {name: results.summary[name] for name in names}
        table.add_row(f"[bold]{BLOCKS[block]}[/bold]")
        best = max(row.improvement_mean for row in rows.values())
        for name, row in rows.items():
            is_best = block != "reference" and row.improvement_mean == best
            others = [found.summary.get(name) for found in by_cost.values()]
            more = ["" if other is None else _improvement(other, runs) for other in others]
            table.add_row(*_cells(name, row, results, is_best, decimals), *more)
    return table


def _with_std(mean: float, std: float, decimals: int, runs: int) -> str:
    """Return a mean with its standard deviation, which one run does not have."""
    return f"{mean:.{decimals}f} ({'–' if runs == 1 else f'{std:.{decimals}f}'})"


def _improvement(row: Summary, runs: int) -> str:
    return _with_std(row.improvement_mean, row.improvement_std, 2, runs)


def _cells(name: str, row: Summary, results: Results, is_best: bool, decimals: int) -> list[str]:
    runs = len(results.seeds)
    cells = [
        f"  {escape(name)}",
        _with_std(row.audc_mean, row.audc_std, decimals, runs),
        _improvement(row, runs),
        "" if (share := results.headroom(name)) is None else _with_std(*share, 0, runs),
    ]
    if results.paper:
        figure = results.paper.get(name)
        cells.append("" if figure is None else f"{figure.improvement:.2f} ({figure.improvement_std or 0:.2f})")
    return [f"[bold]{cell}[/bold]" if is_best else cell for cell in cells]


def calibration_table(found: Calibration) -> Table:
    """Return a table of the share that each budget spends."""
    promise = found.promise
    title = "budgets and what they spend" if promise is None else "budgets that are promised, and what they spend"
    table = _budget_table(title, "threshold", f"{found.inputs} inputs")
    if promise is not None:
        table.caption = f"{table.caption}. At a budget of 0.20: {promise.in_words(0.2)}"
    for setting in shown_settings(found):
        is_met = found.shortfall(setting.budget) is None
        met = "" if is_met else "cannot be met" if promise is None else "cannot be promised"
        table.add_row(f"{setting.budget:.2f}", _threshold_text(setting.threshold), _spent(setting), met)
    return table


@dataclass(frozen=True)
class _Bought:
    """A row of `bought_table`; `took`: how often the expert is asked, and seconds per sequence, where it was timed."""

    name: str
    share: float
    took: tuple[float, float] | None = None


def bought_table(found: Calibration, timing: Timing | None, curve: LossCurve | None) -> Table | None:
    """Return a table of what budgets buy and what they take, beside each model alone; None where neither was measured.
    Remote experts are not timed."""
    if timing is None and curve is None:
        return None
    title = " and ".join(["what budgets buy"] * (curve is not None) + ["what they take"] * (timing is not None))
    table = Table(title=title, box=box.SIMPLE_HEAD, caption="; ".join(_bought_captions(timing, curve)))
    headings = ("loss", "Random") * (curve is not None) + ("asked", "ms", "times\nas fast") * (timing is not None)
    for heading in ("budget", "spent", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in _bought_rows(found, timing):
        cells = [f"{row.share:.3f}"]
        if curve is not None:
            cells += [f"{curve.loss_at(row.share):.4g}", f"{curve.random_at(row.share):.4g}"]
        if timing is not None and row.took is not None:
            asked, seconds = row.took
            cells += [f"{asked:.1f}", _milliseconds(seconds), f"{timing.expert / seconds:.2f}"]
            cells += ["slower"] * (seconds > timing.expert)
        table.add_row(row.name, *cells)
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"


def _bought_rows(found: Calibration, timing: Timing | None) -> list[_Bought]:
    if timing is None:
        budgets = [_Bought(f"{budget:.2f}", found.for_budget(budget).share) for budget in TIMED_BUDGETS]
        return [_Bought("predictor", 0.0), *budgets, _Bought("expert", 1.0)]
    budgets = [_Bought(f"{one.budget:.2f}", one.share, (one.asked, one.seconds)) for one in timing.budgets]
    first = _Bought("predictor", 0.0, (0.0, timing.predictor))
    return [first, *budgets, _Bought("expert", 1.0, (1.0, timing.expert))]


def _bought_captions(timing: Timing | None, curve: LossCurve | None) -> Iterator[str]:
    if timing is not None:
        where = f"{timing.machine['device']} with {timing.machine['cores']} cores"
        inputs = f"{timing.inputs} input{'s' * (timing.inputs != 1)}"
        yield f"{inputs}, {timing.at_once} at once, on {where}; slower: than the expert alone"
    if curve is not None:  # calibrate measures no losses: they stay those of fit
        yield escape(f"loss and Random: {curve.unit}, on the {curve.inputs} validation inputs of fit")
    if timing is None:
        yield "an expert that runs elsewhere is not timed"


def money_table(settings: Sequence[Setting], spent: Sequence[float], alone: float, currency: str, tokens: int) -> Table:
    """Return a table of what a sequence costs at each budget, beside the expert alone."""
    caption = f"{currency} per sequence, expected, for inputs of {tokens} tokens; the expert alone: {alone:.3g}"
    table = Table(title="budgets in money", box=box.SIMPLE_HEAD, caption=escape(caption))
    for heading in ("budget", "spent", "saved"):
        table.add_column(heading, justify="right")
    for setting, money in zip(settings, spent, strict=True):
        table.add_row(f"{setting.budget:.2f}", f"{money:.3g}", f"{alone - money:.3g}")
    return table


def check_table(seen: Sequence[Setting], expected: Sequence[float], inputs: int) -> Table:
    """Return a table of the shares that budgets spend on inputs outside the calibration."""
    table = _budget_table("budgets, checked", "calibrated", f"{inputs} other inputs")
    for one, share in zip(seen, expected, strict=True):
        held = "" if one.is_near(one.budget) else f"off by {100 * abs(one.share - one.budget):.1f} points"
        table.add_row(f"{one.budget:.2f}", f"{share:.3f}", _spent(one), held)
    return table


def _budget_table(title: str, beside: str, inputs: str) -> Table:
    caption = f"share of the tokens that the expert wrote, of {inputs}; 95 % of resamples in brackets"
    table = Table(title=title, box=box.SIMPLE_HEAD, caption=caption)
    for heading in ("budget", beside, "spent"):
        table.add_column(heading, justify="right")
    table.add_column("")
    return table


def _spent(setting: Setting) -> str:
    return escape(f"{setting.share:.3f} [{setting.low:.3f}, {setting.high:.3f}]")


def shown_settings(found: Calibration) -> tuple[Setting, ...]:
    """Return the settings of the budgets 0, 0.05, ..., 1."""
    return found.settings[::5]


def _threshold_text(threshold: float) -> str:
    if abs(threshold) < FINITE_LIMIT:
        return f"{threshold:.4g}"
    return "always" if threshold < 0 else "never"


def written_lines(row: Mapping[str, Any], *, colours: bool) -> Iterator[Text]:
    """Yield a sequence with the expert's tokens in colour, or in brackets, and a line with the counts."""
    text = Text()
    for source, tokens in groupby(row["tokens"], key=lambda token: token["source"]):
        written = _visible("".join(token["text"] for token in tokens))
        if source == "expert":
            word = written.lstrip() or written  # a space before a word is not marked; a space alone is
            text.append(written.removesuffix(word))
            text.append(word if colours else f"[{word}]", style="bold magenta" if colours else "")
        else:
            text.append(written)
    yield text
    n, switches = row["expert_tokens"] + row["predictor_tokens"], row["switches"]
    how = "coloured" if colours else "in brackets"
    took = f"{row['expert_tokens']} of {n} tokens by the expert ({how}), {switches} switch{'es' * (switches != 1)}"
    if kept := row.get("capped"):
        took += f"; the cap kept {kept} token{'s' * (kept != 1)} from the expert"
    yield Text(took, style="dim" if colours else "")
    if "money" in row:
        yield Text(money_line(row["money"]), style="dim" if colours else "")


def money_line(money: Mapping[str, Any]) -> str:
    """Return what was spent and saved; a loss is called one."""
    spent, alone, saved = (f"{abs(money[name]):.3g} {money['currency']}" for name in ("spent", "expert_alone", "saved"))
    return f"spent {spent}, the expert alone {alone}: {'saved' if money['saved'] >= 0 else 'lost'} {saved}"


def _visible(text: str) -> str:
    """Make control characters visible, so that generated text cannot send escape sequences to the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
