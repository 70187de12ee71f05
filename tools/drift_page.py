"""docs/drift.md and its figure, from the output of `python -m benchmarks.drift`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page_parts import read_results, table
from pictures import EXPERT, PREDICTOR, RULE, SOFT, path, svg, text

from seqdefer.budgets.drift import CEILING_DELTA, DELTA, TEST_DELTA

COLOURS = {"scores": EXPERT, "spent, promised": PREDICTOR, "spent, measured": SOFT}
Row = Mapping[str, Any]

INTRODUCTION = f"""\
# Drift

Budgets were measured on some inputs, and hold for inputs like those. A server tests all the time whether what it
serves still is like them, and says so when it is not. Nothing needs to be switched on.

| test | hypothesis | alarm |
|---|---|---|
| `spent` | the expected share of each input, given those before, is within its limit | more is spent than the \
calibration allows |
| `scores` | inputs served are exchangeable with those of the calibration | the rejector's scores have changed, in \
either direction |

While both hypotheses hold, the probability that any alarm ever sounds is at most {100 * DELTA:g} %, however long the \
server runs and
however often one looks: {100 * TEST_DELTA:g} % for each test, and {100 * CEILING_DELTA:g} % for the limits.

- **Answers** have a sentence in `deferral.drift` after an alarm. They are never refused because of it.
- **`/v1/deferral`** has both tests in `drift`, and in `served` what each budget has spent so far. The page draws that
  over the limits.
- **`/metrics`** has `seqdefer_drift_evidence` and `seqdefer_drift_alarm`, by `test`. `deploy/prometheus/alerts.yml` has
  the rule `SeqdeferDrift`, and the dashboard a panel.

An alarm stays until the server ends. Then calibrate again, on new inputs or on the log of what was served:

<!-- no-test: calibrates from what was served in between -->
```sh
seqdefer serve models/news --served-log served.jsonl      # lengths, shares and scores; never texts
seqdefer calibrate models/news --from-log served.jsonl    # the newest 500 inputs; more: --inputs N
```

## What is tested

Each test is a gambler who bets against its hypothesis. The evidence is the gambler's wealth, which starts from 1 and
cannot grow in expectation while the hypothesis is true: it ever reaches {1 / TEST_DELTA:g} with probability \
{100 * TEST_DELTA:g} % at most. To be stricter,
alert on more: evidence of 1,000 is a false alarm in one of a thousand servers. The formulas are in
`seqdefer/budgets/drift.py`.

- **Limits of `spent`.** Where a calibration promises budgets with a confidence, the limit is the budget, and the alarm
  says that the promise is not kept. The calibration itself may be the reason: a confidence of 0.9 is wrong one time in
  ten. Without such a promise, the limit is an upper bound of the expected share at each setting, from the finite
  calibration, for all settings at once. It lies well above what was measured, so that only clear overspending is found.
  Thresholds that were chosen on the inputs of the calibration are treated as if they had been fixed before.
- **Mixed budgets.** Each input is compared with the limit of its own budget. Scores are compared where they do not
  depend on the budget: at the first token or, for whole and one-time deferral, the score of the draft.
- **A finite calibration.** `scores` uses ranks among all scores so far, those of the calibration first. They are
  uniform under the hypothesis, however few inputs were calibrated. The price: scores served after a change count, too,
  so that a small calibration may be outvoted before an alarm sounds.
- **What `fit` calibrates on.** Without a guarantee these are the validation inputs, which chose the rejector: their
  scores may differ a little from those of fresh inputs. For a test that is exact, calibrate on inputs of your own.
- **What counts.** All inputs count for `scores`. For `spent`, only answers that were written to their end count: not
  those with `stop`, with a smaller `max_tokens`, with a [cap](guarantees.md#hard-caps), or with a failed expert.
- **Exchangeable** means that order tells nothing. Daily rhythms, repeated questions, health checks with one input and
  windows of one time series are not: an alarm then is right about the hypothesis, and may be of no interest.
- The tests begin anew when a server starts. Several servers have several chances of a false alarm.

## Calibrating from a log

The file of `--served-log` has a line of JSON for each input that was written to its end: time, budget, threshold,
tokens written and deferred, and scores. It is handed to the system line by line, so that a killed server loses at most
the line it was writing, which is skipped later. `--served-log-mib` (64) bounds its size: the older half is in FILE.1.

- **Whole and one-time deferral**: drafts were scored before the hand-off, so that a log tells where every setting would
  have handed off. What the expert would have written there is known or, with `--guarantee`, counted as the rest of the
  longest sequence. So guarantees work. Inputs that the rejector was fitted on are marked in the log, and no guarantee
  counts them.
- **Token level**: what other settings would have spent is estimated from logged scores, because other decisions change
  the text that follows. Counts are exact for inputs that were served at that threshold. `--guarantee` is refused: it
  needs `--data`.

## Seasons

A rejector for the weather task, fitted on weeks from a whole year (Jena 2020). Windows of the test weeks are two
populations, {{summer:,}} of summer and {{winter:,}} of winter. {{calibrated}} inputs calibrate, {{streams:,}} times, \
drawn from one season with
replacement. A quiet stream goes on with {{quiet:,}} inputs of the same season; another with {{shift}}, and then
{{after:,}} of the other season. Every input asks for a budget of {{budgets}}, at random.

![Share of streams with an alarm, by the number of inputs](images/drift.svg)
"""

TABLE_NOTE = """\
"Promised" limits are budgets with a confidence of {confidence:g}, "measured" ones are upper bounds. An alarm of a quiet
stream is false if the hypothesis is true; where a calibration was unlucky and its promise does not hold, it is right.
{streams:,} streams tell a rate of {tolerated:g} % to {error:.1f} points (one standard error). Shifted streams with an \
alarm before
the change are not counted as found.
"""


def drift_page(folder: Path) -> str:
    """Return the page."""
    study = read_results(folder / "drift.json")
    budgets = [f"{budget:g}" for budget in study["budgets"]]
    words = {name: study[name] for name in ("calibrated", "streams", "quiet", "shift", "after")}
    introduction = INTRODUCTION.format(
        **words, **study["seasons"], budgets=f"{', '.join(budgets[:-1])} or {budgets[-1]}"
    )
    error = 100 * (TEST_DELTA * (1 - TEST_DELTA) / study["streams"]) ** 0.5
    note = TABLE_NOTE.format(**study, tolerated=100 * TEST_DELTA, error=error)
    parts = [introduction, _table_of_rows(study), note, _seasons_in_words(study)]
    parts += [_excess(study), _in_order(study), _recalibrated(study)]
    parts.append(
        "`python -m benchmarks.drift --data jena_2020.csv.gz` makes these figures "
        f"(seqdefer {study['version']}); its help says how.\n"
    )
    return "\n".join(parts)


def _table_of_rows(study: Row) -> str:
    head = ["calibrated, then served", "test", "false alarms", "right ones when quiet", "found after the change",
            "inputs to the alarm, median", "90 % within"]  # fmt: skip
    rows = [
        [
            f"{row['calibrated']}, {row['served']}",
            row["test"],
            _percent(row["false_alarms"]),
            f"{_percent(row['true_alarms'])} of {_percent(row['broken'])}",
            _percent(row["found"]),
            _count(row["median"]),
            _count(row["late"]),
        ]
        for row in study["rows"]
    ]
    return table(head, rows)


def _seasons_in_words(study: Row) -> str:
    winter = {row["budget"]: row for row in study["recalibrated"]}[0.2]
    return (
        f"With the thresholds of summer, winter spends less: {_percent(winter['winter'])} at a budget of 0.2. So "
        "`spent` has nothing to report\nthere, and `scores` finds the change.\n"
    )


def _excess(study: Row) -> str:
    rows = [
        [f"{row['limit']:g}", f"{row['spent']:g}", _percent(row["found"]), _count(row["median"])]
        for row in study["exceed"]
    ]
    return (
        "## Spending above a limit\n\n"
        f"How long `spent` takes, after {study['shift']} quiet inputs, where inputs are deferred whole or not at all: "
        "the most varied shares,\nand so the slowest to tell.\n\n"
        + table(["limit", "expected share", f"found within {study['after']:,}", "inputs to the alarm, median"], rows)
    )


def _in_order(study: Row) -> str:
    rows = [[row["served"], row["test"], _percent(row["alarms"]), _count(row["median"])] for row in study["in_order"]]
    return (
        "## In the order of time\n\n"
        "The same windows, served in their order. Neighbours overlap and resemble each other, so they are not "
        "exchangeable, and\nalarms sound in summer, too: hours differ, and so do weeks.\n\n"
        + table(["calibrated in summer, served", "test", "alarms", "after inputs, median"], rows)
    )


def _recalibrated(study: Row) -> str:
    rows = [
        [f"{row['budget']:g}", *(_percent(row[name]) for name in ("summer", "winter", "recalibrated"))]
        for row in study["recalibrated"]
    ]
    return (
        "## Calibrated again from the log\n\n"
        f"{study['logged']} winter windows were served at the thresholds of summer, and their log calibrated again. "
        "Shares of tokens by the\nexpert; the last two columns are of other winter windows.\n\n"
        + table(["budget", "summer, calibration", "winter, before", "winter, after"], rows)
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


# -- figure --------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, BASE, RIGHT = 760, 330, 60, 62, 272, 20


def drift_figure(folder: Path) -> str:
    """Draw how many streams have sounded an alarm after so many inputs: calibrated in summer, shifted and quiet."""
    study = read_results(folder / "drift.json")
    last = study["shift"] + study["after"]
    parts = []
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _height(level)
        parts.append(path([(LEFT, y), (WIDTH - RIGHT, y)], stroke=RULE, fill="none"))
        parts.append(text(LEFT - 8, y + 5, f"{100 * level:.0f} %", text_anchor="end", font_size=12, fill=SOFT))
    for n in range(0, last + 1, 500):
        parts.append(text(_across(n, last), BASE + 20, f"{n:,}", text_anchor="middle", font_size=12, fill=SOFT))
    shift = _across(study["shift"], last)
    parts.append(path([(shift, TOP - 6), (shift, BASE)], stroke=SOFT, fill="none", stroke_dasharray="3 4"))
    parts.append(text(shift + 6, TOP + 6, "winter begins", font_size=12, fill=SOFT))
    own = [row for row in study["rows"] if row["calibrated"] == "summer"]
    for place, row in enumerate(own):
        colour = COLOURS[row["test"]]
        for name, dash in (("shifted_by", "none"), ("quiet_by", "5 4")):
            points = [(_across(n * study["step"], last), _height(share)) for n, share in enumerate(row[name])]
            parts.append(path(points, stroke=colour, fill="none", stroke_width=2, stroke_dasharray=dash))
        parts.append(path([(LEFT + 170 * place, 22), (LEFT + 170 * place + 24, 22)], stroke=colour, stroke_width=3))
        parts.append(text(LEFT + 170 * place + 32, 27, row["test"], font_size=14))
    parts.append(text(LEFT, 48, "dashed: nothing changes", font_size=12, fill=SOFT))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "inputs served", text_anchor="middle", font_size=13))
    return svg(WIDTH, HEIGHT, "Share of streams with an alarm, by the number of inputs served", parts)


def _across(n: float, last: int) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * n / last, 1)


def _height(share: float) -> float:
    return round(BASE - (BASE - TOP) * share, 1)
