"""Measure the cost of labels for docs/results/scaling.json and docs/scaling.md.

    python -m benchmarks.scaling.measure --pair pair/predictor pair/expert --documents xsum_rejector.jsonl.gz
    python -m benchmarks.scaling.measure --only gpu   # on a machine with a GPU; keeps the other parts

It takes under 6 minutes on two idle cores, with every pass on one thread. Hooks on the models count tokens exactly.
Seconds are medians of three with minimum and maximum. The networks of `pronounce` are trained once and stored in
--folder. A part that cannot be measured here (no pair, no GPU) keeps its old results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.scaling.label_cost import even_hand_offs
from benchmarks.scaling.page import PAGE, RESULTS, rendered
from benchmarks.scaling.synthetic_models import DisagreeingTask, Shape, count_tokens, random_expert
from benchmarks.text import quiet
from seqdefer.engine.drafts import draft
from seqdefer.environment import machine
from seqdefer.interfaces import Task
from seqdefer.labels.branches import branch_out
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.exploration import draw_decisions, grow_along
from seqdefer.labels.jobs import LabelPart, make_jobs, run_job, unpack_calls
from seqdefer.progress import Silent
from seqdefer.storage.files import read_json, write_json, write_text
from seqdefer.storage.shards import pack
from seqdefer.tasks.pronounce.task import ENTRY as PRONOUNCE
from seqdefer.tasks.text.task import XSUM
from seqdefer.tasks.tsp.data import gaussian_instances
from seqdefer.tasks.tsp.experts import TourExpert, make_expert
from seqdefer.tasks.tsp.task import greedy_tours, shipped_pointer
from seqdefer.tasks.weather.task import ENTRY as WEATHER
from seqdefer.types import Examples, Sequences, SequenceSpec

CPU = torch.device("cpu")
REPEATS = 3
PAIR_DOCUMENTS, TIMED_DOCUMENTS, SWEPT_DOCUMENTS = 16, 6, 32
TINY = Shape("tiny", 2, 64, 128, 4, 2, vocabulary=500)
TINY_INPUT = 32
SIZES = [Shape(f"width {width}", 4, width, 4 * width, 8, 8, vocabulary=2000) for width in (128, 256, 512, 1024)]
GPU_RUNS = [  # Llamas of 1.1, 6.7 and 13 billion parameters; rows of the passes; documents of the hand-offs
    (Shape("1.1B", 22, 2048, 5632, 32, 4), (16, 64, 256), (12, 48)),
    (Shape("6.7B", 32, 4096, 11008, 32, 32), (16, 64, 128), (6, 12)),
    (Shape("13B", 40, 5120, 13824, 40, 40), (16, 64), (4, 8)),
]
GPU_INPUT = 512


def log(text: str) -> None:
    """Write a line of progress to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@torch.no_grad()
def timed(way: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return the result of `way` and the seconds of three calls. Call it once before if it needs a warm-up."""
    result, seconds = None, []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        result = way()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return result, {"median": median(seconds), "low": min(seconds), "high": max(seconds)}


def per(n: int, seconds: dict[str, float]) -> dict[str, float]:
    """Divide seconds by a number of examples or steps."""
    return {name: value / n for name, value in seconds.items()}


# -- tokens --------------------------------------------------------------------------------------------------------


def disagreements(drafts: Sequences, completed: Sequences) -> Tensor:
    """Return where the expert's next token differs, bool (n, L). `completed` has all hand-offs."""
    n, length = drafts.tokens.shape
    first = completed.tokens.view(n, length, length).diagonal(dim1=1, dim2=2)  # the expert's next tokens
    return (first != drafts.tokens) & drafts.mask()


def needed_branches(disagrees: Tensor, drafts: Sequences, completed: Sequences, kept: Sequence[int]) -> tuple[int, int]:
    """Return the number of branches that these hand-offs need, and of their tokens after the first."""
    n, length = disagrees.shape
    lengths = completed.lengths.view(n, length)
    branches = {
        (row, int(disagrees[row, one:].nonzero()[0]) + one)
        for row in range(n)
        for one in kept
        if bool(disagrees[row, one:].any())
    }
    return len(branches), sum(int(lengths[row, place]) - place - 1 for row, place in branches)


@torch.no_grad()
def count_hand_offs(task: Task, examples: Examples, model: Any) -> dict[str, Any]:
    """Count the expert's tokens for all hand-offs by branching, and the tokens that each set of hand-offs needs."""
    spec, n = task.spec, len(examples)
    drafted = draft(task.predictor, examples, spec).sequences
    with count_tokens(model) as tokens:
        completed, _ = branch_out(task.expert, examples, drafted, torch.arange(spec.length), spec)
    disagrees = disagreements(drafted, completed)
    by_hand_offs = []
    for number in sorted({min(each, spec.length) for each in (1, 2, 5, 10, spec.length)}):
        branches, written = needed_branches(disagrees, drafted, completed, even_hand_offs(spec.length, number))
        by_hand_offs.append({"hand_offs": number, "branches": branches / n, "tokens": written / n})
    return {
        "documents": n,
        "length": spec.length,
        "mean_length": float(drafted.lengths.float().mean()),
        "disagreement": float(disagrees.sum() / drafted.lengths.sum()),
        "mean_place": float(disagrees.nonzero()[:, 1].float().mean()),
        "read": tokens.read / n,
        "written": tokens.written / n,
        "by_hand_offs": by_hand_offs,
    }


@torch.no_grad()
def count_trees(task: Task, examples: Examples, rollouts: int) -> dict[str, float]:
    trees = grow_along(task, examples, draw_decisions(0, len(examples), rollouts, task.spec.length))
    return {"rollouts": rollouts, "length": task.spec.length, **_node_counts(trees.tensors()["tokens"], len(trees))}


def _node_counts(tokens: Tensor, n: int) -> dict[str, float]:
    """Return nodes per example and the disagreement, from the tokens (N, 2) of both models at every node."""
    return {"nodes": len(tokens) / n, "disagreement": float((tokens[:, 0] != tokens[:, 1]).float().mean())}


def measure_sweeps() -> dict[str, Any]:
    """Vary one parameter at a time, around L = 20, d = 0.5, all hand-offs, 8 rollouts."""
    expert = random_expert(TINY, CPU, torch.float32)
    hand_offs, trees = [], []
    for length, share in [(5, 0.5), (10, 0.5), (40, 0.5), (20, 0.1), (20, 0.2), (20, 0.5), (20, 0.8), (20, 1.0)]:
        log(f"  {length} tokens, disagreement {share}")
        task = DisagreeingTask(expert, share, SWEPT_DOCUMENTS, TINY_INPUT, length)
        hand_offs.append({"share": share, **count_hand_offs(task, task.examples, expert.model.model)})
        many = (2, 4, 8, 16) if (length, share) == (20, 0.5) else (8,)
        trees += [{"share": share, **count_trees(task, task.examples, rollouts)} for rollouts in many]
    return {"input_tokens": TINY_INPUT, "hand_offs": hand_offs, "trees": trees}


def measure_pair(pair: tuple[str, str], documents: str) -> dict[str, Any]:
    """Count and time a real pair on real documents."""
    options = replace(XSUM.presets["quick"], predictor=pair[0], expert=pair[1], train=documents)
    task = XSUM.prepare(options, Path(), CPU, Silent())
    for writer in (task.predictor, task.expert):
        writer.model.encoder_cache.n_bytes = 0  # disable the cache, to count every read
    examples = task.split("train").select(torch.arange(PAIR_DOCUMENTS))
    models = {"predictor": task.predictor.model.model, "expert": task.expert.model.model}
    found: dict[str, Any] = {
        "parameters": {name: sum(weight.numel() for weight in model.parameters()) for name, model in models.items()},
        "input_tokens": float((examples.inputs >= 0).sum(1).float().mean()),
    }
    log("  hand-offs, counted")
    found["hand_offs"] = count_hand_offs(task, examples, models["expert"])
    found["trees"] = []
    for rollouts in (2, 8):
        log(f"  trees of {rollouts} rollouts, counted")
        with count_tokens(models["expert"]) as tokens:
            one = count_trees(task, examples, rollouts)
        found["trees"].append({**one, "read": tokens.read / len(examples), "written": tokens.written / len(examples)})
    log("  timed")
    found["task"] = _timed_task(task, TIMED_DOCUMENTS, rollouts=8)
    return found


# -- seconds -------------------------------------------------------------------------------------------------------


def _timed_task(task: Task, n: int, *, rollouts: int = 0) -> dict[str, Any]:
    """Return seconds and bytes per example: its draft with all hand-offs, and its tree (explored, or enumerated if
    `rollouts` is 0)."""
    rows = torch.arange(n)
    (table,) = make_jobs(task, LabelPart("hand-offs", "train", rows), n)
    (explored,) = make_jobs(task, LabelPart("trees", "train", rows, rollouts), n)
    labels, tabling = timed(lambda: run_job(task, table))
    trees, growing = timed(
        lambda: run_job(task, explored) if rollouts else enumerate_trees(task, _first(task, n)).tensors()
    )
    calls, _ = unpack_calls(labels)
    return {
        "name": task.name, "examples": n, "length": task.spec.length, "rollouts": rollouts,
        "hand_offs": per(n, tabling), "runs": calls.made / n, "naive_runs": (calls.made + calls.saved) / n,
        "trees": per(n, growing), **_node_counts(trees["tokens"], n),
        "features": trees["features"].shape[1], "context": trees["context"].shape[1],
        "hand_off_bytes": len(pack("hand-offs", labels)) / n, "tree_bytes": len(pack("trees", trees)) / n,
    }  # fmt: skip


def measure_tasks(folder: Path) -> list[dict[str, Any]]:
    """Time one label of weather and pronounce."""
    from benchmarks.weather import synthetic_record

    found = []
    with tempfile.TemporaryDirectory() as temporary:
        log("  weather")
        record = write_text(Path(temporary) / "record.csv", synthetic_record(8))
        weather = WEATHER.prepare(
            replace(WEATHER.presets["quick"], data=str(record), epochs=1), Path(temporary), CPU, Silent()
        )
        found.append(_timed_task(weather, 256))
    log("  pronounce (trains two networks if there are none)")
    pronounce = PRONOUNCE.prepare(PRONOUNCE.presets["quick"], folder, CPU, Silent())
    found.append(_timed_task(pronounce, 128))
    return found


def _first(task: Task, n: int) -> Examples:
    return task.split("train").select(torch.arange(n))


def measure_tours() -> list[dict[str, Any]]:
    """Time all hand-offs of an instance, on one thread."""
    found = []
    for name in ("search", "gurobi"):
        for cities, n in ((20, 24), (35, 16), (50, 8)):
            log(f"  {name}, {cities} cities")
            runs, seconds = _timed_tours(make_expert(name, n_threads=1), gaussian_instances(n, cities, 0, "test"))
            solved = runs / (n * cities)
            found.append(
                {"expert": name, "cities": cities, "instances": n, "solved": solved, "seconds": per(n, seconds)}
            )
    return found


def _timed_tours(expert: TourExpert, inputs: Tensor) -> tuple[int, dict[str, float]]:
    n, cities = inputs.shape[:2]
    tours = greedy_tours(shipped_pointer(CPU), inputs, CPU)
    examples, drafts = Examples(inputs, tours, torch.arange(n)), Sequences(tours, torch.full((n,), cities))

    def hand_offs() -> tuple[Sequences, int]:
        return expert.hand_offs(examples, drafts, torch.arange(cities), SequenceSpec(cities))

    hand_offs()  # warm up: load and compile
    (_, runs), seconds = timed(hand_offs)
    return runs, seconds


def measure_sizes() -> list[dict[str, Any]]:
    """Time a read and a step of 8 rows by models of different sizes on the CPU."""
    found = []
    for shape in SIZES:
        log(f"  {shape.parameters / 1e6:.0f} million parameters")
        expert = random_expert(shape, CPU, torch.float32)
        found.append({**asdict(shape), "parameters": shape.parameters, **_passes(expert, 8, 64)})
    return found


@torch.no_grad()
def _passes(expert: Any, rows: int, width: int, steps: int = 4) -> dict[str, Any]:
    """Time reading `rows` inputs of `width` tokens, and a step that writes a token of each."""
    expert.batch_size = rows
    inputs = torch.randint(3, expert.n_tokens, (rows, width), generator=torch.Generator().manual_seed(0))
    examples = Examples(inputs, inputs[:, :0], torch.arange(rows)).to(expert.device)
    everyone = torch.arange(rows, device=expert.device)

    def read() -> tuple[Tensor, Any]:
        return expert.next(expert.start(examples), everyone)

    read()  # warm up
    (named, begun), reading = timed(read)

    def write() -> None:
        state, tokens = begun, named
        for _ in range(steps):
            tokens, state = expert.next(expert.append(state, tokens), everyone)

    return {"rows": rows, "input_tokens": width, "read": reading, "step": per(steps, timed(write)[1])}


def measure_gpu() -> dict[str, Any]:
    """Time passes and hand-offs of large models on a GPU."""
    device = torch.device("cuda")
    found: dict[str, Any] = {"machine": machine(device), "models": []}
    for shape, batches, documents in GPU_RUNS:
        log(f"  {shape.name}")
        expert = random_expert(shape, device, torch.bfloat16)
        one: dict[str, Any] = {**asdict(shape), "parameters": shape.parameters, "passes": [], "hand_offs": []}
        for rows in batches:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            passes = _passes(expert, rows, GPU_INPUT, steps=8)
            one["passes"].append({**passes, "peak": torch.cuda.max_memory_allocated() - before})
        for n in documents:
            one["hand_offs"].append(_branching(expert, n))
        found["models"].append(one)
        del expert
        torch.cuda.empty_cache()
    return found


@torch.no_grad()
def _branching(expert: Any, n: int, share: float = 0.5, length: int = 20) -> dict[str, Any]:
    """Time all hand-offs of `n` documents. In half precision the disagreement is close to `share`."""
    expert.batch_size = 4 * n
    task = DisagreeingTask(expert, share, n, GPU_INPUT, length)
    drafted = draft(task.predictor, task.examples, task.spec).sequences
    drafts = Sequences(drafted.tokens.to(expert.device), drafted.lengths.to(expert.device))
    kept = torch.arange(length, device=expert.device)

    def branch() -> tuple[Sequences, int]:
        return branch_out(expert, task.examples, drafts, kept, task.spec)

    branch()  # warm up: allocate memory
    (completed, _), seconds = timed(branch)
    found = disagreements(drafts, completed)
    return {"documents": n, "input_tokens": GPU_INPUT, "length": length, "seconds": seconds,
            "disagreement": float(found.float().mean())}  # fmt: skip


# -- main -----------------------------------------------------------------------------------------------------------


def parts_of(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return the parts that can be measured here."""
    parts: dict[str, Callable[[], Any]] = {
        "sweeps": measure_sweeps,
        "sizes": measure_sizes,
        "tasks": lambda: measure_tasks(options.folder),
        "tours": measure_tours,
    }
    if options.pair and options.documents:
        parts["pair"] = lambda: measure_pair(tuple(options.pair), options.documents)
    if torch.cuda.is_available():
        parts["gpu"] = measure_gpu
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pair", nargs=2, metavar=("PREDICTOR", "EXPERT"), help="two models that share a vocabulary")
    parser.add_argument("--documents", metavar="FILE", help="JSONL with document and summary, for the pair")
    parser.add_argument("--only", nargs="+", metavar="PART", help="sweeps, sizes, tasks, tours, pair, gpu")
    parser.add_argument("--folder", type=Path, default=Path("runs/scaling"), help="stores the trained networks")
    parser.add_argument("--out", type=Path, default=RESULTS, help="results to read and write")
    options = parser.parse_args()
    parts, found = parts_of(options), read_json(options.out) if options.out.exists() else {}
    missing = sorted(set(options.only or ()) - set(parts))
    if missing:
        parser.error(
            f"cannot measure {', '.join(missing)} here; available: {', '.join(parts)} "
            "(pair needs --pair and --documents; gpu needs a GPU)"
        )
    torch.set_num_threads(1)
    begun = time.perf_counter()
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in options.only or parts:
            log(f"{time.perf_counter() - begun:4.0f} s  {name}")
            found[name] = parts[name]()
            if name != "gpu":
                found["machine"] = machine(CPU)
            write_json(options.out, found)
    if options.out == RESULTS:
        write_text(PAGE, rendered(PAGE.read_text(encoding="utf-8"), found))
    log(f"{time.perf_counter() - begun:4.0f} s  done: {options.out}")


if __name__ == "__main__":
    main()
