"""docs/speed.md, from the output of `python -m benchmarks`: docs/results/bench*.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks_page import number
from page_parts import read_results, table

ALONE = "the expert alone"
WHAT = re.compile(r"(?P<pair>.+), (?P<at_once>\d+) at once, budget (?P<budget>[\d.]+): (?P<way>.+)")
SHOWN = {"server": "clients?: the (bare|expert)|a streamed request", "rejector": "predictor without it"}
NOTE = re.compile(r"spends ([\d.]+), the expert agrees at ([\d.]+)")
PAGE = """\
# How fast is a budget?

Deferral saves tokens of the expert. Whether it saves seconds depends on four things: how much cheaper the predictor's
step is, how often the expert agrees with its guesses, how many sequences run at once, and the machine. `seqdefer fit`
measures it for your pair and says where a budget takes longer than the expert alone. This page says what to expect.
It is generated from the [benchmarks](benchmarks.md), which compare tokens with the interleaved loop first.

## On a GPU

Random weights in the shapes of Qwen2.5 0.5B and 7B; prompts of 128 tokens, 128 new tokens, documents streaming in (a
row that ends makes room at once), deferred by the predictor's uncertainty. How many times as fast as the expert
alone, **in the same engine** (CUDA graphs, kernels of our own):

{{bench-gpu.json: the expert alone}}

as `generate` of Transformers, as it comes, with the same expert:

{{bench-gpu.json: generate of the expert}}

and as the *bound*: the predictor alone plus the expert's reading of everything before the last deferred token, in
chunks that are known beforehand. Where the expert agrees with most guesses, speculation needs fewer passes than that:

{{bench-gpu.json: the bound}}

{{bench-gpu.json: spent}}

{{bench-gpu.json: source}}

- **100 % is lossless speculative decoding**: every token is the expert's.
- **From 32 at once on, the gain ends.** A pass over 300 tokens fills the GPU, so that reading a token is no longer
  nearly free. At 20 % even the bound is only {bound_32:.2f} times as fast as the expert alone. From 20 % on, the
  expert alone is faster.
- In bfloat16, batches of different shapes round differently, and a tie can change what follows; in float32 all tokens
  are equal.

### What the rejector costs

To score every token and never defer takes, against the same predictor without a rejector:

{{bench-gpu.json: rejector}}

The predictor runs ahead first; then all its steps are scored together, in about as many kernels as one step takes. A
predictor of 0.5B, which takes 1.2 milliseconds a step, loses 4 to 9 %; one of two layers, whose steps take less time
than Python takes to start them, loses more.

## On a CPU

Random weights in the shapes of two small Qwen2 (5 and 248 million parameters), two threads, prompts of 32 tokens, 24
new ones. How many times as fast as the expert alone, in the same engine; `generate` of Transformers is as fast as
that here:

{{bench-speculation.json: the expert alone}}

and as the bound:

{{bench-speculation.json: the bound}}

{{bench-speculation.json: spent}}

{{bench-speculation.json: source}}

A pass over many tokens takes much longer here than one over few, so the loop asks late, and gains shrink as more
sequences run at once.

## With a T5 pair

The expert of the [XSum pair](text.md) spends most of its time encoding documents, and its predictor takes half as
long for a step. A budget must pay both, so it is near or above the time of the expert alone. On a CPU, against the
expert alone and the bound:

{{bench-t5.json: the expert alone}}

{{bench-t5.json: the bound}}

{{bench-t5.json: source}}

On a GPU:

{{bench-t5-gpu.json: the expert alone}}

{{bench-t5-gpu.json: the bound}}

{{bench-t5-gpu.json: source}}

`python -m benchmarks --only speculation --pair SMALL LARGE --documents FILE` measures your pair.

## Behind the server

A T5 pair with random weights, 20 % of the tokens by the expert. Clients send one document each; *the bare engine* is
one call with all of them.

{{bench-server.json: server}}

{{bench-server.json: source}}
"""


def speed_page(folder: Path) -> str:
    """Return the page: PAGE with `{{file: what}}` replaced by a table or by what was run."""
    cells = {
        way: _cells(read_results(folder / "bench-gpu.json"), way)[32]["0.2"]["median"] for way in (ALONE, "the bound")
    }
    page = PAGE.replace("{bound_32:.2f}", f"{cells[ALONE] / cells['the bound']:.2f}")
    return re.sub(r"\{\{(.+?): (.+?)\}\}", lambda found: _filled(folder / found[1], found[2]), page)


def _filled(path: Path, what: str) -> str:
    written = read_results(path)
    if what == "source":
        return _source(written)
    if what == "spent":
        return _table(_cells(written, ALONE), "at once: share spent, agreement", lambda row: _spent(row["note"]))
    if what in SHOWN:
        return _rows([row for row in written["rows"] if re.search(SHOWN[what], row["what"])])
    return _table(_cells(written, what), "at once", lambda row: f"{row['median']:.2f}")


def _source(written: Mapping[str, Any]) -> str:
    machine, text = written["machine"], written["text"]
    return (
        f"`{written['command']}` took {written['seconds']:.0f} seconds: {text['device']}, {text['dtype']}, "
        f"{machine['threads']} threads, PyTorch {machine['torch']}, Transformers {text['transformers']}; medians of "
        f"{written['repeats']} rounds. {written.get('remark', '')}".rstrip()
    )


def _cells(written: Mapping[str, Any], way: str) -> dict[int, dict[str, Any]]:
    """Return the rows of one way, by the number at once and the budget."""
    cells: dict[int, dict[str, Any]] = {}
    for row in written["rows"]:
        found = WHAT.fullmatch(row["what"])
        if found and found["way"] == way:
            cells.setdefault(int(found["at_once"]), {})[found["budget"]] = row
    return cells


def _table(cells: Mapping[int, Mapping[str, Any]], corner: str, show: Any) -> str:
    budgets = list(next(iter(cells.values())))
    head = [corner, *(f"{float(one):.0%}" for one in budgets)]
    return table(head, [[str(n), *(show(rows[one]) for one in budgets)] for n, rows in cells.items()]).rstrip()


def _spent(note: str) -> str:
    found = NOTE.search(note)
    assert found is not None
    return f"{found[1]}, {found[2]}"


def _rows(rows: list[dict[str, Any]]) -> str:
    cells = [
        (row["what"], f"{number(row['median'])} {row['unit']}", f"{number(row['low'])} to {number(row['high'])}")
        for row in rows
    ]
    return table(("", "median", "minimum to maximum"), cells).rstrip()
