"""docs/guarantees.md and its figure, from the output of `python -m benchmarks.coverage` and `benchmarks.caps`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from page_parts import read_results, table
from pictures import EXPERT, PREDICTOR, RULE, SOFT, path, svg, text

from seqdefer.budgets.promises import Confident, Expected

RULES = {"nearest": SOFT, "expected": PREDICTOR, "confident": EXPERT}
WORDS = {"tokens": "share of all tokens", "inputs": "mean share of the inputs"}
LEAST = (0.02, 0.05, 0.1, 0.2, 0.5)
Row = Mapping[str, Any]

INTRODUCTION = """\
# Budgets with a guarantee

"Asked for 0.2, spent 0.203" is a measurement. A guarantee is about inputs to come: the expert writes at most 20 % of
their tokens. Its condition is that inputs to come are like those of the calibration (exchangeable with them, and
independent of each other where a confidence is given), and that the rejector was not fitted on these.

```sh
seqdefer fit text --predictor models/small --expert models/large --train news.jsonl \\
    --guarantee confident --confidence 0.9 --out models/promised
seqdefer calibrate models/promised --data fresh.jsonl --guarantee confident --confidence 0.9
seqdefer serve models/promised --guarantee confident --confidence 0.9
```

`fit` then keeps the test split apart and promises on that. `calibrate` refuses inputs that the rejector was fitted on.
`serve` refuses a model whose calibration promises less. Answers have the promise in `deferral.promise`, and
`/v1/deferral` has it in `promise`.

| `--guarantee` | what is promised | how |
|---|---|---|
| none (`nearest`) | nothing: the setting that spent nearest to the budget | |
| `expected` | the share stays within the budget in expectation, over the inputs of the calibration and the next one \
| conformal risk control; where decisions change the prefix, on the largest share at any higher threshold |
| `confident` | the expected share stays within the budget, except with probability 1 - confidence over the inputs \
of the calibration | learn then test: thresholds are tested from "never" downwards until one fails, by a betting test |

`--share-of tokens` (the default) is about the expert's share of all tokens, `--share-of inputs` about the mean of the
inputs' shares. In Python it is `model.calibrate(inputs, guarantee="confident", confidence=0.9)`. The rules themselves:

```python
from seqdefer import Confidence
from seqdefer.budgets.promises import budget_rule
from seqdefer.methods.deferral import deferral_of
from seqdefer.testing import ToyTask

task = ToyTask(n=300)
spending = deferral_of(Confidence("uncertainty")).spending(task, task.split("test"), set_aside=True)
rule = budget_rule("confident", confidence=0.9)
setting = rule.choose(spending, 0.25)
print(f"threshold {setting.threshold:.3f} spent {setting.share:.1%} of the tokens")
print(rule.promise(spending.inputs).in_words(0.25))
assert setting.share < 0.25
```

- A promise is about one budget. Of ten budgets with a confidence of 0.9, one may be exceeded.
- It is about whole sequences. Answers to requests with `stop`, a smaller `max_tokens` or a cap have no `promise`, and
  say why.
- At token level, a fifth of the inputs, at most 32, choose the thresholds to test, and are not counted.
- `calibrate` refuses inputs of the fit, whatever their order and white space. It cannot tell that one was reworded.
- Windows of one time series, or questions of one user, are not independent: their number overstates what they tell.
- The betting test is much tighter than that of Hoeffding and Bentkus where inputs are deferred in part. Where they are
  deferred whole or not at all, the two are close, and either may be the tighter one. The test is fixed in advance: the
  better of two, chosen by the data, would be no test.
- `calibration.json` records the rule, the test (`bound`), the inputs counted and the confidence.
- The report of `seqdefer run` lets half of the test inputs promise budgets, after some have chosen the thresholds as
  above. It draws the bound as a band over the budget, and what the other half spent. The page of a server draws limits
  and what was served. A server tests whether inputs still are like those of the calibration: [Drift](drift.md).
"""

QUALITY = """\
## Quality

Where references exist and losses have an upper limit (texts: 100 x (1 - ROUGE-1)), a fit can promise quality: the
setting that spends the least among those whose expected loss is at most X above the expert's.

<!-- no-test: needs the models and the data of the Hub -->
```sh
seqdefer fit xsum --within 1 --confidence 0.9 --out models/news  # at most 1 ROUGE point below the expert, 90 % sure
seqdefer generate models/news --threshold 0.31 "A long ..."       # as fit printed it, and in quality.json
seqdefer serve models/news --within 1                            # for requests that name no budget
```

Settings are tested from "always" upwards, on the test split with its references, until one fails; thresholds are
fixed on inputs set aside. If nothing but the expert alone can be promised, the message says how many inputs it would
take: by the variance seen, and at least as many as an equal of the expert would need. Differences of losses vary more
than shares do, so quality takes more inputs than spending.
"""

LEAST_INPUTS = """\
## How many inputs

With fewer inputs than these no setting but "never" can be promised, even if the expert wrote nothing on all of them.
Answers then say so, and how many are needed.
"""

COVERAGE = """\
## How often a budget is exceeded

From a population of labelled inputs of each task, n are drawn {draws} times, with replacement, and calibrate. What the
chosen threshold spends on the population is then exactly the expectation that the promise is about. With a confidence
of {confidence:g}, `confident` may exceed the budget in {tolerated:.0f} % of the draws, which {draws} draws tell to \
{error:.1f} points (one
standard error). `expected` promises nothing about single draws; its mean must stay within the budget.

![Share of draws that exceed the budget, by rule, task and number of inputs](images/coverage.svg)

The figure has the mean over budgets of 0.1, 0.2 and 0.5; the line is at {tolerated:.0f} %.
"""

PRICE = """\
## What a promise costs

Points of the budget left unspent, on average over the draws: 2 of a budget of 0.2 means that the expert wrote 18 % of
the tokens. Negative numbers are overspent. `HB` is `confident` by the test of Hoeffding and Bentkus.
"""


CAPS = """\
## Hard caps

A promise is about many inputs. A cap is about each: it always holds.

```sh
seqdefer generate models/news --cap-tokens 20 "A long article ..."
seqdefer serve models/news --prices prices.toml --cap-money 0.002 --cap-per request
```

```python
from seqdefer import Cap, DeferringModel

model = DeferringModel.from_pretrained("models/news")
written = model.generate(["A long article ...", "Another one ..."], budget=0.2, cap=Cap(tokens=20))
print(written.capped)  # tokens of each text that the cap kept from the expert
```

In a request it is `"deferral": {"cap": {"tokens": 20}}`; the cap of the server holds as well.

| field | option | what the expert does, at most |
|---|---|---|
| `tokens` | `--cap-tokens` | tokens that it writes |
| `passes` | `--cap-passes` | how often it is asked: by token once for each of its tokens, a hand-off is one |
| `money` | `--cap-money` | what it costs, by the file of [prices](prices.md) |
| `per` | `--cap-per` | `sequence`, or `request`: divided equally among its sequences |
| `policy` | `--cap-policy` | `rising`, or `cut-off`: defer as usual until the cap is used up |

- Where a cap forbids what the rejector wants, the predictor writes on, and the answer says so: `capped` counts these
  tokens, and `seqdefer generate` prints the number.
- A cap changes what is written, so promises of spending and of quality do not hold under it: answers then have no
  `promise`, and a server with a cap for all refuses `--guarantee`, `--within` and `--served-log`. `stop`, a smaller
  `max_tokens` and a failed expert change it, too: such answers have none either.
- Both loops write the same tokens under a cap. The speculative one makes at most as many passes as are counted.
- What one sequence of a request leaves is not given to the others: texts must not depend on which is written first.
- Whole and one-time deferral hand off where the rejector wants it or later, if the longest sequence that could follow
  fits the cap. With texts, which mostly end before their longest length, a small cap therefore forbids most hand-offs.
- `rising`, at token level: what is left of the cap, divided by the number of tokens still expected (from the lengths in
  the calibration), is a budget; the threshold is that of this budget if it is the higher one.
"""


def guarantees_page(folder: Path) -> str:
    """Return the page."""
    study = read_results(folder / "coverage.json")
    draws, delta = study["draws"], 1 - study["confidence"]
    parts = [INTRODUCTION, QUALITY, CAPS, *_cap_parts(folder), LEAST_INPUTS, _least_table()]
    words = {"draws": draws, "confidence": study["confidence"], "tolerated": 100 * delta}
    parts += [COVERAGE.format(**words, error=100 * (delta * (1 - delta) / draws) ** 0.5), _populations(study)]
    for share_of, what in WORDS.items():
        parts += [f"### {what[:1].upper()}{what[1:]}\n", _exceeds_table(study, share_of)]
    parts += [_rest(study), PRICE, _envelope(study)]
    for share_of, what in WORDS.items():
        parts += [f"### {what[:1].upper()}{what[1:]}: points unspent\n", _price_table(study, share_of)]
    parts.append(
        f"`python -m benchmarks.coverage` makes these figures (seqdefer {study['version']}); its help says how.\n"
    )
    return "\n".join(parts)


def _cap_parts(folder: Path) -> list[str]:
    """Return how rising caps compare with the cut-off, and what became of requests under load."""
    study = read_results(folder / "caps.json")
    pairs: dict[tuple[str, int, float], dict[str, Row]] = {}
    for row in study["rows"]:
        pairs.setdefault((row["task"], row["cap"], row["budget"]), {})[row["policy"]] = row
    head = ["task", "cap", "budget", "loss: cut-off", "rising", "difference", "share: cut-off", "rising", "capped"]
    body = [[*map(str, key), *_cap_cells(found)] for key, found in pairs.items()]
    load = study["load"]
    tasks = ", ".join(f"{name} ({one['unit']}, {one['inputs']} inputs)" for name, one in study["tasks"].items())
    lengths = " and ".join(f"{one['length']:.1f}" for one in study["tasks"].values())
    return [
        "### Rising against the cut-off\n",
        f"{tasks},\nwith TokenwiseModel of the quick preset. `cap` is in tokens of the expert per sequence, which has "
        f"{lengths}\non average. `capped`: sequences in which the cut-off kept a token from the expert. The difference "
        "has its\nstandard error over the inputs; below 0 rising is better.\n",
        table(head, body),
        _cap_verdict(list(pairs.values())),
        f"Under load: {load['requests']:,} requests with caps in tokens, passes and money, {load['at_once']} at once, "
        f"to a running server\n(`python -m benchmarks.caps --requests {load['requests']}`). {load['capped']:,} answers "
        f"were capped, and {load['exceeded']} exceeded their cap.\n",
    ]


def _cap_cells(found: Mapping[str, Row]) -> list[str]:
    cut, rising = found["cut-off"], found["rising"]
    losses = [f"{one['loss']:.4g}" for one in (cut, rising)]
    shares = [f"{one['share']:.3f}" for one in (cut, rising)]
    return [*losses, f"{rising['difference']:+.3g} ({rising['error']:.2g})", *shares, f"{100 * cut['capped']:.0f} %"]


def _cap_verdict(pairs: Sequence[Mapping[str, Row]]) -> str:
    rising = [found["rising"] for found in pairs]
    better = sum(row["difference"] < -2 * row["error"] for row in rising)
    worse = sum(row["difference"] > 2 * row["error"] for row in rising)
    less = sum(found["rising"]["share"] < found["cut-off"]["share"] for found in pairs)
    best = [
        f"{task} with {cap} token{'s' * (cap != 1)}: {rising:.4g} instead of {cut:.4g}"
        for (task, cap), (cut, rising) in _least_losses(pairs).items()
    ]
    return (
        f"By more than two standard errors, rising is better in {better} of {len(pairs)} rows and worse in {worse}. It "
        f"spends less than\nthe cut-off in {less}. The least loss at any of these budgets, under each cap:\n\n"
        + "".join(f"- {line}\n" for line in best)
    )


def _least_losses(pairs: Sequence[Mapping[str, Row]]) -> dict[tuple[str, int], list[float]]:
    """Return the least loss of the cut-off and of rising, by task and cap."""
    keys = dict.fromkeys((found["rising"]["task"], found["rising"]["cap"]) for found in pairs)
    return {
        key: [
            min(found[policy]["loss"] for found in pairs if (found[policy]["task"], found[policy]["cap"]) == key)
            for policy in ("cut-off", "rising")
        ]
        for key in keys
    }


def _least_table() -> str:
    rules = {
        "`expected`": Expected(),
        "`confident`, 0.9": Confident(0.9),
        "`confident`, 0.95": Confident(0.95),
        "`confident`, 0.99": Confident(0.99),
    }
    rows = [[name, *(str(rule.promise(1).least_inputs(budget)) for budget in LEAST)] for name, rule in rules.items()]
    return table(["budget", *(f"{budget:g}" for budget in LEAST)], rows)


def _populations(study: Mapping[str, Any]) -> str:
    rows = [
        [name, one["method"], f"{one['inputs']:,}", f"{one['settings']:,}"] for name, one in study["subjects"].items()
    ]
    return table(["task", "method", "inputs in the population", "settings"], rows)


def _exceeds_table(study: Mapping[str, Any], share_of: str) -> str:
    return _by_rule(study, share_of, list(RULES), lambda row: f"{100 * row['exceeds']:.1f}", "% of draws, budget")


def _price_table(study: Mapping[str, Any], share_of: str) -> str:
    rules = [*RULES, "hoeffding-bentkus"]
    return _by_rule(study, share_of, rules, lambda row: f"{round(row['unspent'], 1) + 0.0:.1f}", "points, budget")


def _by_rule(study: Mapping[str, Any], share_of: str, rules: Sequence[str], cell: Any, heading: str) -> str:
    """Return a table with a row for each task and n, and a column for each rule and budget."""
    rows = {
        (row["subject"], row["n"], row["rule"], row["budget"]): row
        for row in study["rows"]
        if row["share_of"] == share_of
    }
    budgets = sorted({key[3] for key in rows})
    names = {"hoeffding-bentkus": "HB"}
    head = ["task", "n", *(f"{names.get(rule, rule)} {budget:g}" for rule in rules for budget in budgets)]
    keys = list(dict.fromkeys((subject, n) for subject, n, _, _ in rows))
    body = [
        [subject, f"{n:,}", *(cell(rows[subject, n, rule, budget]) for rule in rules for budget in budgets)]
        for subject, n in keys
    ]
    return f"Columns: {heading}.\n\n{table(head, body)}"


def _rest(study: Mapping[str, Any]) -> str:
    """Return one sentence about the inputs that were not drawn, and one about means."""
    rows = study["rows"]
    counted = [row for row in rows if row["exceeds_rest"] is not None and row["rule"] == "confident"]
    worst = max(rows_of(rows, "confident"), key=lambda row: row["exceeds"])
    rest = max(counted, key=lambda row: row["exceeds_rest"])
    over = max(rows_of(rows, "expected"), key=lambda row: row["mean"] - row["budget"])
    return (
        f"The most that `confident` exceeded a budget is {100 * worst['exceeds']:.1f} % of the draws\n"
        f"({_cell(worst)}).\n"
        "Judged by the inputs that were not drawn, whose own share varies, it is "
        f"{100 * rest['exceeds_rest']:.1f} %\n({_cell(rest)}).\n"
        f"The mean of `expected` {_over(over)}\n({_cell(over)}; standard error {100 * over['error']:.2f}).\n"
    )


def _envelope(study: Mapping[str, Any]) -> str:
    """Return a sentence about the place where the envelope costs most beside a confidence."""
    costs = {
        (row["subject"], row["share_of"], row["n"], row["budget"], row["rule"]): row["unspent"] for row in study["rows"]
    }
    cells = {key[:4] for key in costs}
    subject, share_of, n, budget = max(
        sorted(cells), key=lambda cell: costs[*cell, "expected"] - costs[*cell, "confident"]
    )
    expected, confident = (costs[subject, share_of, n, budget, rule] for rule in ("expected", "confident"))
    if expected <= confident:
        return ""
    return (
        "Where decisions change the prefix, `expected` is about the largest share at any higher threshold, which has\n"
        f"a price of its own: on {subject}, n = {n:,}, budget {budget:g}, it left {expected:.1f} points, and "
        f"`confident` {confident:.1f}.\n"
    )


def _over(row: Row) -> str:
    by = 100 * (row["mean"] - row["budget"])
    return (
        f"was above its budget by {by:.2f} points at most"
        if by > 0
        else f"was always below its budget, by {-by:.2f} points at least"
    )


def rows_of(rows: Iterable[Row], rule: str) -> list[Row]:
    return [row for row in rows if row["rule"] == rule]


def _cell(row: Row) -> str:
    return f"{row['subject']}, {WORDS[row['share_of']]}, n = {row['n']:,}, budget {row['budget']:g}"


# -- figure --------------------------------------------------------------------------------------------------------

PANEL, HEIGHT, LEFT, BASE, TOP, BAR, MOST = 215, 300, 46, 240, 66, 15, 0.7


def coverage_figure(folder: Path) -> str:
    """Draw how often each rule exceeds the budget: a panel for each task, a group of bars for each n."""
    study = read_results(folder / "coverage.json")
    subjects, delta = list(study["subjects"]), 1 - study["confidence"]
    width = LEFT + PANEL * len(subjects)
    parts = []
    for place, (rule, colour) in enumerate(RULES.items()):
        x = LEFT + 130 * place
        parts += [f'<rect x="{x}" y="14" width="14" height="14" rx="3" fill="{colour}"/>', text(x + 20, 27, rule)]
    for level in (0.0, 0.25, 0.5):
        y = _height(level)
        parts.append(path([(LEFT, y), (width - 12, y)], stroke=RULE, fill="none"))
        parts.append(text(LEFT - 6, y + 5, f"{100 * level:.0f} %", text_anchor="end", font_size=12, fill=SOFT))
    for place, subject in enumerate(subjects):
        parts += _panel(study["rows"], subject, LEFT + PANEL * place)
    limit = _height(delta)
    parts.append(path([(LEFT, limit), (width - 12, limit)], stroke=EXPERT, fill="none", stroke_dasharray="5 4"))
    return svg(width, HEIGHT, "Share of draws that exceed the budget", parts)


def _panel(rows: Iterable[Row], subject: str, left: float) -> list[str]:
    own = [row for row in rows if row["subject"] == subject and row["share_of"] == "tokens"]
    parts = [text(left + 6, 56, subject, font_weight=600)]
    for group, n in enumerate(sorted({row["n"] for row in own})):
        x = left + 10 + group * (len(RULES) * BAR + 20)
        for place, (rule, colour) in enumerate(RULES.items()):
            values = [row["exceeds"] for row in own if row["n"] == n and row["rule"] == rule]
            y = _height(sum(values) / len(values))
            bar = f'x="{x + place * BAR:g}" y="{y:.1f}" width="{BAR - 2}" height="{BASE - y:.1f}"'
            parts.append(f'<rect {bar} fill="{colour}"/>')
        parts.append(text(x + 1.5 * BAR, BASE + 20, f"n = {n:,}", text_anchor="middle", font_size=12, fill=SOFT))
    return parts


def _height(share: float) -> float:
    return BASE - (BASE - TOP) * min(share, MOST) / MOST
