"""Record how a fitted text pair writes at several budgets, for the moving picture of the README.

    seqdefer fit xsum --predictor pair/predictor --expert pair/expert --train xsum_rejector.jsonl.gz \\
        --train-documents 400 --validation-documents 100 --out models/xsum
    python tools/record_writing.py models/xsum xsum_test.jsonl.gz --document 40271702

Writes docs/results/writing.json: every token of one output with its author and score, and what each budget spends and
loses on average over the documents. Nothing of the documents themselves is in it. The output is picked by hand, and
only the averages show how well it works.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import seqdefer
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.folders import ROLES
from seqdefer.storage.files import write_json
from seqdefer.tasks.text.codec import TruncationWarning
from seqdefer.tasks.text.data import Document, read_corpus
from seqdefer.tasks.text.rouge import References

RECORD = Path(__file__).parents[1] / "docs" / "results" / "writing.json"
BUDGETS = (0.0, 0.2, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record what a pair writes at several budgets.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder written by `seqdefer fit`")
    parser.add_argument("test", metavar="FILE", help="documents with references that the pair has not seen")
    parser.add_argument("--document", required=True, metavar="ID", help="the document to show")
    parser.add_argument("--documents", type=int, default=300, metavar="N", help="average over N (%(default)s)")
    parser.add_argument("--out", type=Path, default=RECORD, metavar="FILE", help="output file (%(default)s)")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore", TruncationWarning)
    model, documents = DeferringModel.from_pretrained(chosen.folder), read_corpus(chosen.test).documents
    runs = [write(model, documents[: chosen.documents], budget) for budget in BUDGETS]
    write_json(chosen.out, record(model, runs, chosen.document))


@dataclass(frozen=True)
class Run:
    """All documents at one budget. `rows` are those of `Generation.rows`, by the names of the documents."""

    budget: float
    rows: dict[str, dict[str, Any]]
    share: float
    losses: dict[str, float]


def write(model: DeferringModel, documents: Sequence[Document], budget: float) -> Run:
    written, names = model.generate([one.document for one in documents], budget=budget), [one.id for one in documents]
    scores = References([one.summary for one in documents]).score(written.outputs)
    losses = dict(zip(names, (100 * (1 - scores)).tolist(), strict=True))
    return Run(budget, dict(zip(names, written.rows(model.served.codec), strict=True)), written.share, losses)


def record(model: DeferringModel, runs: Sequence[Run], document: str) -> dict[str, Any]:
    return {
        "task": model.task,
        "method": model.method,
        "version": seqdefer.__version__,
        "pair": {role: describe(getattr(model.served, role).model.model) for role in ROLES},
        "fitted_on": None if model.learned_from is None else len(model.learned_from.inputs),
        "tested_on": len(runs[0].rows),
        "document": document,
        "budgets": [record_run(run, document) for run in runs],
    }


def describe(network: Any) -> dict[str, int]:
    return {"layers": network.config.num_layers, "parameters": sum(weight.numel() for weight in network.parameters())}


def record_run(run: Run, document: str) -> dict[str, Any]:
    row = run.rows[document]
    tokens = [{"text": one["text"], "source": one["source"], "score": round(one["score"], 4)} for one in row["tokens"]]
    return {
        "budget": run.budget,
        "output": row["output"],
        "tokens": tokens,
        "loss": round(run.losses[document], 2),
        "mean_share": round(run.share, 4),
        "mean_loss": round(sum(run.losses.values()) / len(run.losses), 2),
    }


if __name__ == "__main__":
    main()
