"""Runs of the text task on tiny checkpoints, and the oracles that check them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import random_documents, tiny, write_lines
from tiny_models import tokenizer as tiny_tokenizer

from seqdefer import cli
from seqdefer.tasks.text.data import Document

Capture = pytest.CaptureFixture[str]
LENGTH = 14  # too long to enumerate decision trees
N_TEST, N_TRAIN = 12, 20


def save_place(folder: Path) -> Path:
    """Save checkpoints of tiny pairs and documents for them."""
    for family in ("t5", "gpt2"):
        for name, (n_layers, seed) in {"predictor": (1, 1), "expert": (2, 6)}.items():
            tiny(family, n_layers, seed).save_pretrained(folder / family / name)
            tiny_tokenizer().save_pretrained(folder / family / name)
    documents = random_documents(N_TEST + N_TRAIN)
    write_lines(folder / "test.jsonl", documents[:N_TEST])
    write_lines(folder / "train.jsonl", documents[N_TEST:])
    return folder


def models(place: Path, family: str = "t5") -> list[str]:
    return ["--predictor", str(place / family / "predictor"), "--expert", str(place / family / "expert")]


def command(place: Path, out: Path, *more: str, family: str = "t5") -> list[str]:
    data = ["--train", str(place / "train.jsonl"), "--test", str(place / "test.jsonl"), "--device", "cpu", "--quiet"]
    sizes = ["--seeds", "2", "--instances", str(N_TEST // 2), "--length", str(LENGTH), "--rouge", "words"]
    return ["run", "text", *models(place, family), *data, *sizes, "--no-timing", "--out", str(out), *more]


def finished(place: Path, out: Path, *more: str, family: str = "t5") -> Path:
    with redirect_stdout(StringIO()):
        assert cli.main(command(place, out, *more, family=family)) == 0
    return out


def documents_in(path: Path) -> list[Document]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Document(str(number), row["document"], row["summary"]) for number, row in enumerate(rows)]


def written_by_itself(folder: Path, family: str, documents: Sequence[Document], suffix: str = "") -> list[str]:
    """Return what `generate` of the checkpoint writes, one document at a time."""
    import transformers as hf

    kind = hf.AutoModelForSeq2SeqLM if family == "t5" else hf.AutoModelForCausalLM
    network, reader = kind.from_pretrained(folder).eval(), hf.AutoTokenizer.from_pretrained(folder)
    texts = []
    for one in documents:
        ids = reader(one.document + suffix, return_tensors="pt")["input_ids"]
        ids = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
        texts.append(reader.decode(ids[0, 0 if family == "t5" else -LENGTH :], skip_special_tokens=True))
    return texts


def refused(capsys: Capture, *arguments: str | Path) -> str:
    """Run a command that fails and return its one-line error."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err.removeprefix("seqdefer: ").rstrip("\n")


def package_scores(written: list[str], references: list[str]) -> list[float]:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1"])
    both = zip(references, written, strict=True)
    return [100 * (1 - scorer.score(reference, text)["rouge1"].fmeasure) for reference, text in both]


def id_score(written: list[int], reference: list[int]) -> float:
    one, other = (Counter(token for token in row if token != 1) for row in (written, reference))
    common = (one & other).total()
    return 100.0 * (1 - (2 * common / (one.total() + other.total()) if common else 0))


def unknown_host(*_: Any, **__: Any) -> Any:
    """Fail like a name look-up without a network."""
    raise OSError("Name or service not known")
