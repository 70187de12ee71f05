"""docs/speech-results.md, from `seqdefer reproduce` for two pairs of models and `python -m benchmarks.speech_facts`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page_parts import read_results, table
from results_page import task_origins, verdict_summary

from seqdefer.paper.records import Contrast, load_judgements, load_origins, load_study
from seqdefer.paper.render.files import markdown_of
from seqdefer.paper.render.tables import layout_studies

PAIRS: Mapping[str, str] = {"small": "whisper-tiny with whisper-small", "base": "whisper-tiny with whisper-base"}
HEAD = """\
# Speech: results

Synthetic speech: flite reads summaries of XSum, with white noise at 30, 20 and 13 dB
([how to make the clips and the models](speech.md#the-full-size)). Rejectors are fitted on 799 clips and stopped by 199
others; five runs of 100 test clips. Our recipe. The published recipe has not been measured: its token-level training
calls both models at every step, and did not end within 4 minutes for five runs on an H200.
"""
FACTS = """\
## What the rejector sees, and what it is worth

TokenwiseModel with whisper-base as the expert, fitted again without some of its inputs, on the same labels: % over
Random, mean (standard deviation) of {n} runs, and the mean difference to all inputs, with the standard deviation of
single differences. Runs differ in test clips and initial weights.

{rows}
`python -m benchmarks.speech_facts models/tiny models/base fit test --shown facts --seeds {n}`; {machine}.
"""


def speech_results_page(folder: Path) -> str:
    pairs = [_pair(folder / name, name, words) for name, words in PAIRS.items() if (folder / name).is_dir()]
    facts = folder / "facts.json"
    return "\n".join([HEAD, *pairs, *([_facts(read_results(facts))] if facts.is_file() else [])])


def _pair(folder: Path, name: str, words: str) -> str:
    table1 = load_study(folder / "ours" / "table1.json")
    [(task, origin)] = load_origins(folder / "ours" / "origins.json").tasks.items()
    parts = [
        f"## {words}\n\n![Deferral curves](results/speech/{name}/figure-curves.svg)\n",
        markdown_of(layout_studies([table1])),
        verdict_summary(load_judgements(folder / "verdicts.json")),
        "",
        _differences(table1.contrasts),
        task_origins(task, origin),
    ]
    return "\n".join(parts)


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
    machine = ", ".join(f"{key} {value}" for key, value in written["machine"].items())
    return FACTS.format(n=len(every), rows=table(("", "% over Random", "difference"), rows), machine=machine)


def _spread(values: Sequence[float], sign: str = "") -> str:
    return f"{statistics.mean(values):{sign}.2f} ({statistics.stdev(values):.2f})"
