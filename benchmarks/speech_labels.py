"""Seconds to label a clip: rows of a clip attend to it together, or each to a copy of its own.

    python -m benchmarks.speech_labels models/tiny models/small fit --out labels.json

Encoders are not counted, as they run once for each clip. The labels of both ways are compared first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.measure import race, require_same
from seqdefer import __version__
from seqdefer.engine.drafts import draft
from seqdefer.environment import choose_device, machine
from seqdefer.interfaces import Task
from seqdefer.labels.exploration import explore_trees
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.progress import Silent
from seqdefer.registry import load_task
from seqdefer.storage.files import write_json

ROLLOUTS = 4  # of our recipe
ROWS_WITH_COPIES = 8  # copies of more rows take longer than passes over fewer


def hand_offs(task: Task) -> Any:
    """Return losses of all hand-offs."""
    examples = task.split("train")
    return hand_off_table(task, examples, draft(task.predictor, examples, task.spec))[0].loss.cpu()


def decisions(task: Task) -> Any:
    """Return losses at all nodes of branched trees, sorted: both ways number their nodes differently."""
    nodes = explore_trees(task, task.split("train"), ROLLOUTS, branched=True).nodes
    return torch.cat([nodes.example[:, None], nodes.position[:, None], nodes.tokens, nodes.losses], 1).unique(dim=0)


LABELS = {"hand-offs": hand_offs, "decisions": decisions}


def way(task: Task, kind: str, *, together: bool) -> Any:
    """Label by one of the ways."""
    writers: Any = (task.predictor, task.expert)
    before = [writer.rows_at_once for writer in writers]
    for writer, n_rows in zip(writers, before, strict=True):
        writer.model.network.attends_by_document = together
        writer.batch_size = n_rows if together else ROWS_WITH_COPIES
    try:
        return LABELS[kind](task)
    finally:
        for writer, n_rows in zip(writers, before, strict=True):
            writer.batch_size = n_rows


@torch.no_grad()
def measure(task: Task, repeats: int) -> list[dict[str, Any]]:
    """Return seconds per clip of each kind of labels by both ways, one number per repeat."""
    rows, n = [], len(task.split("train"))
    for kind in LABELS:
        ways = {name: partial(way, task, kind, together=name == "together") for name in ("together", "copies")}
        same = require_same(kind, (ways["together"](), ways["copies"]()))
        seconds = race(ways, repeats, 0.0, lambda _: None)
        rows.append({"labels": kind, "same": same, **{name: (taken / n).tolist() for name, taken in seconds.items()}})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictor", help="the small model: a folder, or a name on the Hub")
    parser.add_argument("expert", help="the large model")
    parser.add_argument("clips", help="a manifest, or the folder of one")
    parser.add_argument("--n-clips", type=int, default=16, help="clips to label (16)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto: a GPU if there is one (auto)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, after one to compare (3)")
    parser.add_argument("--length", type=int, default=64, help="maximum number of tokens to write (64)")
    parser.add_argument("--out", type=Path, default=Path("labels.json"), help="the file to write (labels.json)")
    options = parser.parse_args(arguments)
    device, entry = choose_device(options.device), load_task("speech")
    chosen = replace(
        entry.presets["paper"], predictor=options.predictor, expert=options.expert, train=options.clips, test=None,
        train_clips=options.n_clips, validation_clips=1, test_clips=1, length=options.length,
    )  # fmt: skip
    with TemporaryDirectory() as folder:  # of encoder states
        task = entry.prepare(chosen, Path(folder), device, Silent())
        rows = measure(task, options.repeats)
    made = {"version": __version__, "machine": machine(device), "threads": torch.get_num_threads(), "rows": rows}
    write_json(options.out, {**made, **task.describe()})
    for row in rows:
        ratios = [copies / together for copies, together in zip(row["copies"], row["together"], strict=True)]
        gain = f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as with copies"
        print(f"{row['labels']}: {min(row['together']):.3g} s a clip, {gain}")


if __name__ == "__main__":
    main()
