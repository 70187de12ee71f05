"""Seconds per clip of a speech pair by budget, against either model alone. Encoding is included, nothing is kept."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speculation import Streamed
from benchmarks.text import Decoding
from seqdefer.engine.pace import Pace
from seqdefer.environment import choose_device, machine
from seqdefer.storage.files import write_json
from seqdefer.tasks.speech.features import SpeechFacts
from seqdefer.tasks.speech.models import load_speech_model
from seqdefer.tasks.speech.sources import read_speech
from seqdefer.tasks.speech.waveforms import stack_waveforms, to_samples
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.types import Examples, SequenceSpec

BUDGETS = (0.0, 0.1, 0.2, 1.0)


def load(predictor: str, expert: str, device: torch.device) -> TextPair:
    small, large = (
        load_speech_model(one, language="en", device=device, dtype="float32", cache_bytes=0, states=None, is_watched=watched)
        for one, watched in ((predictor, True), (expert, False))
    )
    return TextPair.of(small, large, "facts", SpeechFacts(small.tokenizer, small.n_tokens))


def generate(model: Any, inputs: torch.Tensor, batch: int, length: int) -> None:
    for some in inputs.split(batch):
        model.model.generate(
            input_features=model.network.features(some), language="en", task="transcribe", max_new_tokens=length
        )


def seconds(way: Any, n: int, repeats: int, device: torch.device) -> list[float]:
    way()
    taken = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        way()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - begun) / n)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--predictor", required=True)
    parser.add_argument("--expert", required=True)
    parser.add_argument("--clips", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--n", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("seconds.json"))
    chosen = parser.parse_args()
    device = choose_device(chosen.device)
    pair, clips = load(chosen.predictor, chosen.expert, device), read_speech(chosen.clips).clips[: max(chosen.n)]
    inputs = stack_waveforms([to_samples(one.read()) for one in clips])
    made: dict[str, Any] = {"machine": machine(device), "threads": torch.get_num_threads(), "length": chosen.length, "rows": []}
    with torch.no_grad():
        for batch, n in zip(chosen.at_once, chosen.n, strict=True):
            some = inputs[:n]
            examples = Examples(some, torch.zeros(n, 1, dtype=torch.long), torch.arange(n)).to(device)
            decoding = Decoding(pair, examples, SequenceSpec(chosen.length, pair.predictor.end), batch)
            streamed = Streamed(decoding, Pace())
            ways: dict[str, tuple[Any, float | None]] = {
                "expert alone (ours)": (decoding.expert, None),
                "predictor alone (generate)": (lambda b=batch, e=examples: generate(pair.predictor.model, e.inputs, b, chosen.length), None),
                "expert alone (generate)": (lambda b=batch, e=examples: generate(pair.expert.model, e.inputs, b, chosen.length), None),
            }
            for budget in BUDGETS:
                threshold = np.inf if budget == 0 else streamed.threshold(budget)
                share = float(streamed.write(threshold).share)
                ways[f"budget {budget:g}"] = (lambda s=streamed, t=threshold: s.write(t), share)
            for name, (way, share) in ways.items():
                taken = seconds(way, n, chosen.repeats, device)
                row = {"at_once": batch, "clips": n, "what": name, "seconds": taken, "share": share}
                made["rows"].append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
                write_json(chosen.out, made)


if __name__ == "__main__":
    main()
