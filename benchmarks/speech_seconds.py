"""Seconds per clip of a speech pair by budget, against either model alone.

    python -m benchmarks.speech_seconds models/tiny models/small corpus/manifest.jsonl --out seconds.json

Every clip is encoded in every run: nothing is kept. Budgets are spent by uncertainty, at the threshold that a search on
these clips finds. `generate` is that of Transformers; the others are this package's engine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import race
from benchmarks.speculation import Streamed
from benchmarks.text import Decoding
from seqdefer import __version__
from seqdefer.engine.pace import Pace
from seqdefer.environment import choose_device, machine
from seqdefer.storage.files import write_json
from seqdefer.tasks.speech.features import SpeechFacts
from seqdefer.tasks.speech.models import TASK, load_speech_model
from seqdefer.tasks.speech.sources import read_speech
from seqdefer.tasks.speech.waveforms import stack_waveforms, to_samples
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.types import Examples, SequenceSpec

BUDGETS = (0.0, 0.1, 0.2, 1.0)
LANGUAGE = "en"
CLIPS_PER_ROW = 4  # at most: so many times the clips that run at once


def load(predictor: str, expert: str, device: torch.device) -> TextPair:
    """Return a pair that keeps no encoder states and shows facts to rejectors."""
    small, large = (
        load_speech_model(
            source, language=LANGUAGE, device=device, dtype="float32", cache_bytes=0, states=None, is_watched=is_watched
        )
        for source, is_watched in ((predictor, True), (expert, False))
    )
    return TextPair.of(small, large, "facts", SpeechFacts(small.tokenizer, small.n_tokens))


def ways_of(decoding: Decoding) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Return what is timed by name, and the share of tokens that each budget spends."""
    streamed, pair, shares = Streamed(decoding, Pace()), decoding.pair, dict[str, float]()
    ways: dict[str, Callable[[], Any]] = {
        "predictor, generate": lambda: _generate(pair.predictor.model, decoding),
        "expert, generate": lambda: _generate(pair.expert.model, decoding),
        "expert": decoding.expert,
    }
    for budget in BUDGETS:
        threshold = np.inf if budget == 0 else streamed.threshold(budget)
        name = f"budget {budget:g}"
        shares[name] = float(streamed.write(threshold).share)
        ways[name] = partial(streamed.write, threshold)
    return ways, shares


def _generate(model: TextModel, decoding: Decoding) -> None:
    for inputs in decoding.examples.inputs.split(decoding.batch):
        features = model.network.features(inputs)  # type: ignore[attr-defined]
        model.model.generate(features, language=LANGUAGE, task=TASK, max_new_tokens=decoding.spec.length)


def measure(decoding: Decoding, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Return seconds per clip of each way, one number per repeat, and what budgets spend."""
    ways, shares = ways_of(decoding)
    waiting = {name: _finished(way, device) for name, way in ways.items()}
    for way in waiting.values():  # graphs are recorded in the first runs
        way()
    seconds: Mapping[str, Any] = race(waiting, repeats, 0.0, lambda _: None)
    n = len(decoding.examples)
    return [
        {"at_once": decoding.batch, "clips": n, "way": name, "seconds": (taken / n).tolist(), "share": shares.get(name)}
        for name, taken in seconds.items()
    ]


def _finished(way: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return the way until the GPU has finished it."""

    def finished() -> None:
        way()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return finished


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictor", help="the small model: a folder, or a name on the Hub")
    parser.add_argument("expert", help="the large model")
    parser.add_argument("clips", help="a manifest, or the folder of one")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto: a GPU if there is one (auto)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8], metavar="N", help="clips at once (1 8)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, after one to warm up (3)")
    parser.add_argument("--length", type=int, default=64, help="maximum number of tokens to write (64)")
    parser.add_argument("--out", type=Path, default=Path("seconds.json"), help="the file to write (seconds.json)")
    options = parser.parse_args(arguments)
    device = choose_device(options.device)
    pair, corpus = load(options.predictor, options.expert, device), read_speech(options.clips)
    made: dict[str, Any] = {"version": __version__, "machine": machine(device), "threads": torch.get_num_threads()}
    made |= {"predictor": pair.predictor.name, "expert": pair.expert.name, "data": corpus.describe(), "rows": []}
    for at_once in options.at_once:
        clips = corpus.clips[: CLIPS_PER_ROW * at_once]
        inputs = stack_waveforms([to_samples(one.read()) for one in clips])
        examples = Examples(inputs, torch.zeros(len(clips), 1, dtype=torch.long), torch.arange(len(clips))).to(device)
        decoding = Decoding(pair, examples, SequenceSpec(options.length, pair.predictor.end), at_once)
        made["rows"] += measure(decoding, options.repeats, device)
        write_json(options.out, made)  # what is done stays if the rest is stopped
        print(f"{at_once} at once: done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
