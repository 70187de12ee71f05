"""The section of the report on promised budgets: the bound as a band over the budget, and what unseen inputs spent."""

from __future__ import annotations

from seqdefer.evaluation.results import PromiseCheck, PromisedBudget, Results
from seqdefer.report.markup import NBSP, Markup, element, folded_table, number, section

INK, SOFT, RULE, BAND = "var(--ink)", "var(--soft)", "var(--rule)", "var(--token-0)"  # of the page, light or dark
WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 48
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


def promise_section(results: Results) -> Markup:
    """Draw what was promised and spent, where a run has checked it."""
    check = results.promise
    if check is None:
        return Markup()
    over = sum(one.spent > one.budget for one in check.budgets)
    words = (
        f"{check.inputs} of the test inputs calibrated {check.method}: with confidence {check.confidence:g}, the "
        "expected share of an input is within its budget, below the dashed line. The band ends at the bound that "
        f"they prove. Dots are what the other {check.unseen} inputs spent, which calibration never saw, with 95{NBSP}% "
        f"intervals: above the budget at {over} of {len(check.budgets)} budgets."
    )
    figure = element("figure", _drawing(check), class_="drawn")
    return section("Promised and spent", element("p", words), figure, _table(check))


def _x(budget: float) -> float:
    return round(LEFT + budget * (WIDTH - LEFT - RIGHT), 1)


def _y(share: float) -> float:
    return round(HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - TOP - BOTTOM), 1)


def _drawing(check: PromiseCheck) -> Markup:
    edge = "".join(f"L{_x(one.budget)} {_y(one.bound)}" for one in check.budgets)
    dots = [part for one in check.budgets for part in _dot(one)]
    return element(
        "svg",
        *_axes(),
        element("path", d=f"M{_x(0)} {_y(0)}{edge}L{_x(1)} {_y(0)}Z", fill=BAND, fill_opacity=0.15),
        element("path", d=f"M{_x(0)} {_y(0)}L{_x(1)} {_y(1)}", fill="none", stroke=SOFT, stroke_dasharray="5 4"),
        *dots,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        role="img",
        aria_label="Share promised and spent at each budget; the table below has the values",
    )


def _dot(one: PromisedBudget) -> tuple[Markup, Markup]:
    x = _x(one.budget)
    bar = element("path", d=f"M{x} {_y(one.spent - one.error)}V{_y(one.spent + one.error)}", stroke=INK, fill="none")
    return bar, element("circle", cx=x, cy=_y(one.spent), r=3.5, fill=INK)


def _axes() -> list[Markup]:
    parts = []
    for tick in TICKS:
        parts.append(element("path", d=f"M{LEFT} {_y(tick)}H{WIDTH - RIGHT}", stroke=RULE, fill="none"))
        text = f"{100 * tick:.0f}"
        parts.append(_label(text, LEFT - 8, _y(tick) + 4, "end"))
        parts.append(_label(text, _x(tick), HEIGHT - BOTTOM + 19))
    title = f"Budget, %{NBSP}of an input's tokens; upwards, the share spent"
    parts.append(_label(title, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8))
    return parts


def _label(text: str, x: float, y: float, anchor: str = "middle") -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor, font_size=13, fill=SOFT)


def _table(check: PromiseCheck) -> Markup:
    titles = ("Budget", "bound", "calibration", "unseen", "±")
    rows = []
    for one in check.budgets:
        shares = (one.bound, one.calibrated, one.spent, one.error)
        rows.append([f"{100 * one.budget:.0f}{NBSP}%", *(f"{number(100 * share, 1)}{NBSP}%" for share in shares)])
    caption = "Mean share of the inputs: the bound, and what both halves spent"
    return folded_table("Promised budgets", caption, titles, rows)
