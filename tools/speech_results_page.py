"""docs/speech-results.md, from `seqdefer reproduce` for two pairs of models, and two benchmarks of speech."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page_parts import machine_of, read_results, table
from results_page import task_origins, verdict_summary

from seqdefer.paper.records import Contrast, Line, load_judgements, load_origins, load_study
from seqdefer.paper.render.files import markdown_of
from seqdefer.paper.render.tables import layout_studies

PAIRS: Mapping[str, str] = {"small": "whisper-tiny with whisper-small", "base": "whisper-tiny with whisper-base"}
HEAD = """\
# Speech: results

<!-- no-test below: needs Whisper checkpoints, and hours or a GPU -->

Synthetic speech: flite reads summaries of XSum, with white noise at 30, 20 and 13 dB
([how to make the clips and the models](speech.md#the-full-size)). The models are OpenAI's with weights rounded to 8
bits, computed in float32. Rejectors are fitted on 799 clips and stopped by 199 others; five runs of 100 test clips, of
other sentences. All runs share the clips that rejectors are fitted on, and the voices and noise levels are the same in
both. Error rates are means over clips. Intervals: 1,000 paired resamples of runs and clips; another draw moves their
ends by about 0.1.

*Whole*: the expert writes the clip. *One-time*: it writes everything from some token on. *Token-level*: it names single
tokens ([concepts](concepts/curves.md)). Chow, Score and Entropy are thresholds on the predictor's uncertainty; Model
and Cost are learned.

Labels were made and rejectors fitted on an H200. The oracles of three runs with whisper-base were searched on two CPU
cores, which its table of origins therefore names. Seconds there are sums over processes that ran at once.

Our recipe. The published recipe has not been measured: its token-level training calls both models at every step, and
five fits at once on an H200 had not ended after three minutes, when they were stopped.
"""
SHARES = (0, 5, 10, 20, 33, 50, 100)  # in % of the tokens that are asked for at most
METHODS = ("TokenwiseModel", "TokenwiseScore", "OneTimeCost", "ChowMean", "Random")
SECONDS = """\
## Seconds per clip, on a CPU

Encoders included; budgets are spent by uncertainty, at the threshold that a search on these clips finds. *generate* is
that of Transformers, the rest is our engine; medians of {n} rounds.

{rows}
`python -m benchmarks.speech_seconds {pair} test`; {machine}, {threads} threads, nothing else at work.
([With whisper-small](speech.md#results), on a GPU, too.)
"""
FACTS = """\
## What the rejector sees, and what it is worth

TokenwiseModel with whisper-base as the expert, fitted again without some of its inputs, on the same labels: % over
Random, mean (standard deviation) of {n} runs, and the mean difference to all inputs, with the standard deviation of
single differences. Runs differ in test clips and initial weights.

{rows}
`python -m benchmarks.speech_facts models/tiny models/base fit test --folder runs/base/speech --shown facts
--thresholds 40 --part 1/5`, then `2/5`, with `--variants` for these rows: the first {n} seeds. With fewer thresholds
than above, areas differ a little.
{machine}.
"""


def speech_results_page(folder: Path) -> str:
    pairs = [_pair(folder / name, name, words) for name, words in PAIRS.items() if (folder / name).is_dir()]
    more = {"facts.json": _facts, "seconds.json": _seconds}
    parts = [make(read_results(folder / name)) for name, make in more.items() if (folder / name).is_file()]
    return "\n".join([HEAD, *pairs, *parts])


def _pair(folder: Path, name: str, words: str) -> str:
    table1 = load_study(folder / "ours" / "table1.json")
    [(task, origin)] = load_origins(folder / "ours" / "origins.json").tasks.items()
    parts = [
        f"## {words}\n\n![Deferral curves](results/speech/{name}/figure-curves.svg)\n",
        _error_rates(load_study(folder / "ours" / "figure-curves.json").lines),
        markdown_of(layout_studies([table1])),
        verdict_summary(load_judgements(folder / "verdicts.json")),
        "",
        _differences(table1.contrasts),
        task_origins(task, origin),
    ]
    return "\n".join(parts)


def _error_rates(lines: Sequence[Line]) -> str:
    named = {line.method: line for line in lines}
    rows = [(name, *(f"{named[name].mean[share]:.1f}" for share in SHARES)) for name in METHODS]
    words = "Mean word error rate of a clip, in per cent, by the share of the tokens that the expert writes:\n\n"
    return words + table(("", *(f"{share} %" for share in SHARES)), rows)


def _differences(contrasts: Sequence[Contrast]) -> str:
    shown = [one for one in contrasts if one.first == "TokenwiseModel"]
    rows = [(one.second, f"{one.difference:+.2f}", f"[{one.low:.2f}, {one.high:.2f}]") for one in shown]
    return "TokenwiseModel against the others, in points of the % over Random:\n\n" + table(
        ("", "difference", "95 % interval, paired"), rows
    )


def _facts(written: Mapping[str, Any]) -> str:
    gains: Mapping[str, list[float]] = written["gains"]
    every = gains["all facts"]
    rows = []
    for name, found in gains.items():
        differences = [one - other for one, other in zip(found, every, strict=False)]
        against = "" if found is every else _spread(differences, "+")
        rows.append((name, _spread(found), against))
    rows_of_page = table(("", "% over Random", "difference"), rows)
    return FACTS.format(n=len(every), rows=rows_of_page, machine=machine_of(written))


def _seconds(written: Mapping[str, Any]) -> str:
    ways = list(dict.fromkeys(row["way"] for row in written["rows"]))
    medians = {(row["at_once"], row["way"]): statistics.median(row["seconds"]) for row in written["rows"]}
    clips = {row["at_once"]: row["clips"] for row in written["rows"]}
    rows = [(f"{one} at once, {n} clips", *(f"{medians[one, way]:.2f}" for way in ways)) for one, n in clips.items()]
    pair = f"{written['predictor']} {written['expert']}"
    n, threads = len(written["rows"][0]["seconds"]), written["threads"]
    return SECONDS.format(n=n, rows=table(("", *ways), rows), pair=pair, machine=machine_of(written), threads=threads)


def _spread(values: Sequence[float], sign: str = "") -> str:
    return f"{statistics.mean(values):{sign}.2f} ({statistics.stdev(values):.2f})"
