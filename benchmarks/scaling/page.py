"""Render the tables of docs/scaling.md: measurements of `measure` next to predictions of `label_cost`.

    python -m benchmarks.scaling.page

Only the text between the markers of a block is replaced; tests/benchmarks/test_scaling.py fails if it is stale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scaling.label_cost import (
    Corpus,
    Cost,
    CostModel,
    Stage,
    branch_counts,
    branching_work,
    enumerated_nodes,
    even_hand_offs,
    explored_nodes,
    label_cost,
    readable_bytes,
)
from benchmarks.scaling.roofline import DEVICES, IDEAL, LLAMA_7B, LLAMA_70B, Efficiency, Model, step_of
from seqdefer.storage.files import read_json, write_text

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
RESULTS = PAGE.parent / "results" / "scaling.json"
BLOCK = re.compile(r"(?P<begin><!-- begin (?P<name>[a-z-]+) -->\n).*?(?P<end><!-- end (?P=name) -->)", re.DOTALL)

MILLION = Corpus(documents=10**6, input_tokens=510, length=20, disagreement=0.52)
H200 = DEVICES["H200"]
CONSTANT_ROWS = Efficiency(launch=0.8e-3, cache_moves=3)  # plain passes, without gathering rows


def rendered(text: str, found: Any = None) -> str:
    """Return the page with its blocks filled in."""
    found = read_json(RESULTS) if found is None else found
    return BLOCK.sub(lambda block: f"{block['begin']}{BLOCKS[block['name']](found)}\n{block['end']}", text)


def table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def error(predicted: float, measured: float) -> str:
    """Return the relative error of a prediction in per cent."""
    return f"{100 * (predicted / measured - 1):+.1f} %"


def seconds(value: dict[str, float], scale: float = 1.0) -> str:
    """Return the median with minimum and maximum, in a readable unit."""
    units = {"s": 1.0, "ms": 1e3, "µs": 1e6}
    unit = next((unit for unit, factor in units.items() if value["median"] * scale * factor >= 1), "µs")
    median, low, high = (f"{value[name] * scale * units[unit]:.3g}" for name in ("median", "low", "high"))
    return f"{median} {unit} ({low} to {high})"


def hours(n: float) -> str:
    """Return a number of hours to three digits."""
    return f"{n:,.0f}" if n >= 100 else f"{n:.3g}"


def machine_line(machine: Any) -> str:
    """Return a sentence that names the machine."""
    return f"Measured on: {machine['device']}, Python {machine['python']}, PyTorch {machine['torch']}."


# -- measured ------------------------------------------------------------------------------------------------------


def tasks(found: Any) -> str:
    """Return the time and size of one label of each task."""
    rows = []
    for one in [*found["tasks"], found["pair"]["task"]]:
        n_hand_offs = one["length"]
        rows.append([
            one["name"], one["length"], seconds(one["hand_offs"]), seconds(one["hand_offs"], 1 / n_hand_offs),
            f"{one['runs']:.1f} of {one['naive_runs']:.1f}", f"{one['nodes']:.1f}", seconds(one["trees"]),
            seconds(one["trees"], 1 / one["nodes"]), readable_bytes(one["hand_off_bytes"]),
            readable_bytes(one["tree_bytes"]),
        ])  # fmt: skip
    for one in found["tours"]:
        if one["cities"] != 35:
            cities, solved = one["cities"], one["solved"]
            rows.append([
                f"tsp, {one['expert']}", cities, seconds(one["seconds"]), seconds(one["seconds"], 1 / cities),
                f"{solved * cities:.1f} of {cities}", "", "", "", "", "",
            ])  # fmt: skip
    heading = (
        "task", "L", "draft and all hand-offs", "one hand-off", "expert runs", "nodes", "tree", "one node",
        "bytes: hand-offs", "bytes: tree",
    )  # fmt: skip
    return f"{table(heading, rows)}\n\n{machine_line(found['machine'])}"


def hand_offs(found: Any) -> str:
    """Return the tokens that the expert writes as L and d change."""
    rows = []
    for one in sorted(found["sweeps"]["hand_offs"], key=lambda one: (one["share"] != 0.5, one["length"], one["share"])):
        length, share = one["length"], one["disagreement"]
        predicted = length + branch_counts(length, share, range(length))[1]
        rows.append(
            [length, f"{share:.3f}", f"{predicted:.1f}", f"{one['written']:.1f}", error(predicted, one["written"])]
        )
    return table(("L", "d", "predicted", "counted", "error"), rows)


def sets(found: Any) -> str:
    """Return the tokens that smaller sets of hand-offs need."""
    swept = next(one for one in found["sweeps"]["hand_offs"] if (one["length"], one["share"]) == (20, 0.5))
    rows = []
    for made, real in zip(swept["by_hand_offs"], found["pair"]["hand_offs"]["by_hand_offs"], strict=True):
        cells: list[object] = [made["hand_offs"]]
        for one, whole in ((made, swept), (real, found["pair"]["hand_offs"])):
            _, predicted = branch_counts(20, whole["disagreement"], even_hand_offs(20, one["hand_offs"]))
            cells += [f"{predicted:.1f}", f"{one['tokens']:.1f}", error(predicted, one["tokens"])]
        rows.append(cells)
    heading = ("hand-offs", "synthetic pair: predicted", "counted", "error", "T5 pair: predicted", "counted", "error")
    return table(heading, rows)


def trees(found: Any) -> str:
    """Return the nodes of explored trees."""
    rows = []
    for one in sorted(found["sweeps"]["trees"], key=lambda one: (one["share"], one["length"], one["rollouts"])):
        predicted = explored_nodes(one["length"], one["disagreement"], one["rollouts"])
        rows.append([
            one["length"], f"{one['disagreement']:.3f}", one["rollouts"], f"{predicted:.1f}", f"{one['nodes']:.1f}",
            error(predicted, one["nodes"]),
        ])  # fmt: skip
    return table(("L", "d", "rollouts", "nodes, predicted", "counted", "error"), rows)


def pair(found: Any) -> str:
    """Return the expert tokens of a real pair."""
    one = found["pair"]
    count, read = one["hand_offs"], one["input_tokens"]
    written = 20 + branch_counts(20, count["disagreement"], range(20))[1]
    rows: list[list[object]] = [
        ["hand-offs: tokens read", f"{read:.0f}", f"{count['read']:.0f}", error(read, count["read"])],
        ["hand-offs: tokens written", f"{written:.1f}", f"{count['written']:.1f}", error(written, count["written"])],
    ]
    for tree in one["trees"]:
        nodes = explored_nodes(20, tree["disagreement"], tree["rollouts"])
        name = f"trees of {tree['rollouts']} rollouts"
        rows += [
            [f"{name}: tokens read", f"{2 * read:.0f}", f"{tree['read']:.0f}", error(2 * read, tree["read"])],
            [f"{name}: tokens written", f"{nodes:.1f}", f"{tree['written']:.1f}", error(nodes, tree["written"])],
        ]
    spoken = next(task for task in found["tasks"] if task["name"] == "pronounce")
    length = round(spoken["naive_runs"])
    nodes = enumerated_nodes(length, spoken["disagreement"])
    name = f"pronounce, enumerated: nodes (L = {length})"
    rows.append([name, f"{nodes:.1f}", f"{spoken['nodes']:.1f}", error(nodes, spoken["nodes"])])
    return table(("an example", "predicted", "counted", "error"), rows)


def fit(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return a and b of a + b x size, by least squares of the relative errors."""
    unit = max(sizes)
    terms = np.stack([np.ones(len(sizes)), np.array(sizes) / unit], 1) / np.array(values)[:, None]
    fixed, each = np.linalg.lstsq(terms, np.ones(len(values)))[0]
    return float(fixed), float(each) / unit


def sizes(found: Any) -> str:
    """Return the seconds of a pass on a CPU as the model grows."""
    measured = found["sizes"]
    numbers = [one["parameters"] for one in measured]
    columns = {}
    for what in ("read", "step"):
        fixed, each = fit(numbers, [one[what]["median"] for one in measured])
        columns[what] = [fixed + each * number for number in numbers]
    rows = []
    for one, reading, step in zip(measured, columns["read"], columns["step"], strict=True):
        cells: list[object] = [f"{one['parameters'] / 1e6:.1f} M"]
        for what, predicted in (("read", reading), ("step", step)):
            cells += [f"{1e3 * predicted:.3g} ms", seconds(one[what]), error(predicted, one[what]["median"])]
        rows.append(cells)
    n = measured[0]["rows"] * measured[0]["input_tokens"]
    fitted = (f"reading {n} tokens: fit", "measured", "error", "a step of 8 rows: fit", "measured", "error")
    return table(("parameters", *fitted), rows)


def _model_of(one: Any) -> Model:
    return Model(one["parameters"], one["layers"], one["width"], one["width"] // one["heads"] * one["cache_heads"])


def gpu(found: Any) -> str:
    """Return the passes on a GPU, from which the defaults of `Efficiency` were chosen."""
    rows = []
    for one in found["gpu"]["models"]:
        model = _model_of(one)
        for passes in one["passes"]:
            n, width = passes["rows"], passes["input_tokens"]
            operations = model.operations(n * width, width / 2)
            step = step_of(n, width + 4, model, H200, CONSTANT_ROWS)
            copies = passes["peak"] / (n * (width + 8) * model.cache_bytes)
            rows.append([
                one["name"], n, seconds(passes["read"]), f"{operations / passes['read']['median'] / H200.flops:.2f}",
                seconds(passes["step"]), f"{1e3 * step.seconds:.3g} ms, {step.bound}", f"{copies:.2f}",
            ])  # fmt: skip
    heading = (
        "model", "rows", "reading 512 tokens per row", "share of the peak", "a step", "predicted, bound by",
        "peak memory, in caches",
    )  # fmt: skip
    return f"{table(heading, rows)}\n\n{machine_line(found['gpu']['machine'])}"


def gpu_hand_offs(found: Any) -> str:
    """Return the seconds for all hand-offs on a GPU."""
    rows = []
    for one in found["gpu"]["models"]:
        for run in one["hand_offs"]:
            predicted = _stage_of(run, _model_of(one))
            total = predicted.read_seconds + predicted.write_seconds
            rows.append([
                one["name"], run["documents"], f"{run['disagreement']:.2f}", f"{total:.2f} s", seconds(run["seconds"]),
                error(total, run["seconds"]["median"]),
            ])  # fmt: skip
    return table(("model", "documents per batch", "d", "all hand-offs: predicted", "measured", "error"), rows)


def _stage_of(run: Any, model: Model) -> Stage:
    corpus = Corpus(run["documents"], run["input_tokens"], run["length"], run["disagreement"])
    work = branching_work(corpus, range(run["length"]))
    rows = math.ceil(run["documents"] * work.rows)
    return CostModel(corpus, H200, Efficiency(), rows).stage("hand-offs", work, model)


def tours(found: Any) -> str:
    """Return the cost of labels by solvers, as the number of cities grows."""
    rows = []
    for name in ("search", "gurobi"):
        some = [one for one in found["tours"] if one["expert"] == name]
        growth = math.log(some[-1]["seconds"]["median"] / some[0]["seconds"]["median"])
        power = growth / math.log(some[-1]["cities"] / some[0]["cities"])
        for one in some:
            rows.append([
                name, one["cities"], seconds(one["seconds"]), seconds(one["seconds"], 1 / one["cities"]),
                f"{100 * one['solved']:.0f} %", f"{1e6 * one['seconds']['median'] / 3600:.2g}",
                f"cities^{power:.2f}" if one is some[-1] else "",
            ])  # fmt: skip
    heading = (
        "expert", "cities", "all hand-offs of an instance", "one hand-off", "hand-offs solved",
        "a million instances, core-hours", "growth, 20 to 50",
    )  # fmt: skip
    return table(heading, rows)


# -- calculated ----------------------------------------------------------------------------------------------------


def _cost(corpus: Corpus = MILLION, *, expert: Model = LLAMA_70B, device: str = "H200", **options: Any) -> Cost:
    return label_cost(corpus, LLAMA_7B, expert, DEVICES[device], **options)


def million(_: Any) -> str:
    """Return the cost of a million documents with a 7B and a 70B model."""
    return f"```text\n{_cost()}\n```"


def variants(_: Any) -> str:
    """Return the same cost with one assumption changed."""
    four, eight = replace(LLAMA_70B, devices=4), replace(LLAMA_70B, devices=8)
    few = replace(MILLION, documents=1000)
    costs = {
        "as above": _cost(),
        "at most 32 rows": _cost(rows=32),
        "at most 128 rows": _cost(rows=128),
        "5 hand-offs": _cost(hand_offs=5),
        "disagreement 0.2": _cost(replace(MILLION, disagreement=0.2)),
        "disagreement 0.5": _cost(replace(MILLION, disagreement=0.5)),
        "disagreement 0.8": _cost(replace(MILLION, disagreement=0.8)),
        "4 rollouts": _cost(rollouts=4),
        "2 rollouts": _cost(rollouts=2),
        "inputs truncated at 256 tokens": _cost(replace(MILLION, input_tokens=256)),
        "rejectors see the predictor's states (F = C = 4,096)": _cost(replace(MILLION, features=4096, context=4096)),
        "1,000 documents": _cost(few),
        "A100, the expert on 4": _cost(expert=four, device="A100"),
        "H100, the expert on 4": _cost(expert=four, device="H100"),
        "L40S, the expert on 8": _cost(expert=eight, device="L40S"),
        "the bound: an engine that wastes nothing": _cost(efficiency=IDEAL),
    }
    rows = []
    for name, cost in costs.items():
        drafts, table_, *trees_ = (stage.device_hours for stage in cost.stages)
        rows.append([
            name, hours(drafts), hours(table_), hours(sum(trees_)), f"**{hours(cost.device_hours)}**",
            hours(cost.naive.device_hours), hours(cost.epoch_hours), readable_bytes(cost.bytes),
        ])  # fmt: skip
    heading = ("", "drafts", "hand-offs", "trees", "labels", "one run per hand-off", "epoch without labels", "on disk")
    return table(heading, rows)


BLOCKS: dict[str, Callable[[Any], str]] = {
    "tasks": tasks,
    "hand-offs": hand_offs,
    "sets": sets,
    "trees": trees,
    "pair": pair,
    "sizes": sizes,
    "gpu": gpu,
    "gpu-hand-offs": gpu_hand_offs,
    "tours": tours,
    "million": million,
    "variants": variants,
}

if __name__ == "__main__":
    write_text(PAGE, rendered(PAGE.read_text(encoding="utf-8")))
