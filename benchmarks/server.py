"""Benchmark of serving: the overhead of the server, and the cost of a budget under load.

The server runs on a socket, as in `seqdefer serve`; clients run in a separate process. Texts are first compared with
those of the bare engine. "Alone" is the same server at a budget of 0 or 1, like a server of one of the two models. The
rejector is not fitted: this changes its decisions, not its cost. Its threshold meets the budget on the same documents.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Row, require_same, seconds_of
from benchmarks.rejector import unfitted_rejector, with_facts
from benchmarks.text import BUDGET, Choice, Decoding, decoding_of, quiet, search_threshold
from benchmarks.weather import Bench, Benchmarks
from seqdefer.budgets.calibration import BUDGETS, Calibration
from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.rules import FINITE_LIMIT, Setting
from seqdefer.engine.interleaved import roll_out
from seqdefer.interfaces import Codec, Served
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.rejectors.token import TokenNetwork
from seqdefer.tasks.text.models import transformers
from seqdefer.tasks.text.passes import PADDING
from seqdefer.types import Examples

MODEL_NAME = "pair"
SINGLE_CLIENT_ROUNDS = 4  # more responses for the percentiles of a single client


class _Ids(Codec):
    """Codec for documents written as ids with spaces: the synthetic pair has no words."""

    def encode(self, inputs: Sequence[Any]) -> Examples:
        rows = [torch.tensor([int(word) for word in one.split()]) for one in inputs]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
        return Examples(ids, ids[:, :1], torch.arange(len(ids)))

    def decode(self, tokens: Sequence[Any]) -> str:
        return self.text(tokens)


@dataclass(frozen=True)
class Serving:
    """A model to serve, the documents that clients send, and the bare engine for comparison."""

    model: DeferringModel
    inputs: list[str]
    decoding: Decoding

    @classmethod
    def of(cls, choice: Choice, n: int) -> Serving:
        whole = with_facts(decoding_of(replace(choice, sizes=replace(choice.sizes, n_documents={n: n}))))
        ids = whole.examples.inputs
        inputs = [" ".join(str(one) for one in row[row != PADDING].tolist()) for row in ids.cpu()]
        served = Served(whole.pair.predictor, whole.pair.expert, whole.spec, _Ids())
        rejector = unfitted_rejector(whole)
        return cls(DeferringModel(served, rejector, _calibration(whole, rejector)), inputs, whole)


def _calibration(some: Decoding, rejector: TokenNetwork) -> Calibration:
    """Return a calibration for the budgets 0, BUDGET and 1."""
    alone = _roll(some, rejector, torch.inf)
    scores = alone.scores[alone.sequences.mask()]
    threshold, share = search_threshold(scores, lambda threshold: _roll(some, rejector, threshold).share)
    between = [Setting(budget, threshold, share, share, share) for budget in BUDGETS[1:-1]]
    ends = Setting(0.0, FINITE_LIMIT, 0.0, 0.0, 0.0), Setting(1.0, -FINITE_LIMIT, 1.0, 1.0, 1.0)
    return Calibration((ends[0], *between, ends[1]), len(some.examples), "")


def _roll(some: Decoding, rejector: TokenNetwork, threshold: float) -> Any:
    return roll_out(some.pair.predictor, some.pair.expert, some.examples, Threshold(rejector, threshold), some.spec)


# -- the benchmark -------------------------------------------------------------------------------------------------


def server(bench: Bench, choice: Choice) -> list[Row]:
    from seqdefer.server.serve import require_extra

    transformers()
    require_extra()
    bench.log("preparing a pair, a rejector and its threshold")
    with quiet(), torch.no_grad():
        loads, rows = choice.sizes.n_asked, list[Row]()
        serving = Serving.of(choice, max(loads.values()))
        with _running(serving.model) as address:
            rows += _overhead_rows(bench, serving, address, min(loads.values()))
            for n_clients, n in loads.items():
                rows += _load_rows(bench, serving, address, n_clients, n)
    return rows


def _running(model: DeferringModel) -> AbstractContextManager[str]:
    """Run a server on a free port; the context is its address."""
    from seqdefer.server.app import create_app
    from seqdefer.server.http import Limits
    from seqdefer.server.serve import in_background

    limits = Limits(request_seconds=600.0)
    return in_background(create_app(model, MODEL_NAME, limits=limits), limits)


def _complete(address: str, budget: float, n_clients: int, inputs: Sequence[str], *options: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.clients", address, f"{MODEL_NAME}@{budget}", str(n_clients), *options]
    lines = "".join(json.dumps(one) + "\n" for one in inputs)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the clients failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _overhead_rows(bench: Bench, serving: Serving, address: str, n: int) -> list[Row]:
    """Measure one client with one request at a time: the reported overhead, and its time against the engine's."""
    model, inputs = serving.model, serving.inputs[:n]
    expected = [model.generate([one], BUDGET).outputs[0] for one in inputs]
    seconds: dict[str, list[float]] = {name: [] for name in ("whole", "bare", "stream", "bare stream")}
    own: list[list[float]] = []
    for turn in range(bench.sizes.repeats):
        bench.log(f"overhead: round {turn + 1} of {bench.sizes.repeats}")
        bare, whole = [], []
        for _ in range(SINGLE_CLIENT_ROUNDS):
            bare.append(seconds_of(lambda: [model.generate([one], BUDGET) for one in inputs]))
            whole.append(_complete(address, BUDGET, 1, inputs))
        seconds["bare stream"].append(seconds_of(lambda: [list(model.stream(one, BUDGET)) for one in inputs]))
        streamed = _complete(address, BUDGET, 1, inputs, "stream")
        same = _same_texts([one["text"] for asked in (*whole, streamed) for one in asked["answers"]], expected)
        own.append([1000 * one["overhead"] for asked in whole for one in asked["answers"]])
        seconds["bare"].append(sum(bare))
        seconds["whole"].append(sum(one["seconds"] for one in whole))
        seconds["stream"].append(streamed["seconds"])
    times = {name: np.array(values) for name, values in seconds.items()}
    added = np.median(times["stream"] - times["bare stream"]) / (n * serving.decoding.spec.length)
    requests = f"{len(own[0])} requests a round"

    def slower(what: str, ours: str, theirs: str, note: str = "") -> Row:
        parts = {"ours": seconds[ours], "theirs": seconds[theirs]}
        return Row.of(
            "server", what, "times its cost", times[ours] / times[theirs], same=same, note=note, seconds=parts
        )

    return [
        Row.of("server", "the server's own time a request, median", "ms", np.median(own, 1), same=same, note=requests),
        Row.of("server", "the same, 99th percentile", "ms", np.percentile(own, 99, 1), same=same, note=requests),
        slower("the bare engine, one client, seen from the client", "whole", "bare"),
        slower("the bare engine's stream, one client", "stream", "bare stream", f"{1e6 * added:.0f} us a token"),
    ]  # fmt: skip


def _same_texts(texts: Sequence[str], expected: Sequence[str]) -> str:
    equal = np.array([text == expected[place % len(expected)] for place, text in enumerate(texts)])
    return require_same("texts", (equal, np.ones_like(equal)))


def _load_rows(bench: Bench, serving: Serving, address: str, n_clients: int, n: int) -> list[Row]:
    inputs = serving.inputs[:n]
    budgets = {"ours": BUDGET, "predictor": 0.0, "expert": 1.0}
    engine = partial(serving.model.generate, inputs, BUDGET, batch_size=n_clients)
    texts = [answer["text"] for answer in _complete(address, BUDGET, n_clients, inputs)["answers"]]
    same = _same_texts(texts, engine().outputs)
    seconds: dict[str, list[float]] = {name: [] for name in (*budgets, "engine")}
    requests, pieces = list[list[float]](), list[list[float]]()
    for turn in range(bench.sizes.repeats):
        bench.log(f"{n_clients} clients: round {turn + 1} of {bench.sizes.repeats}")
        for name, budget in budgets.items():
            seconds[name].append(_complete(address, budget, n_clients, inputs)["seconds"])
        seconds["engine"].append(seconds_of(engine))
        streamed = _complete(address, BUDGET, n_clients, inputs, "stream")["answers"]
        requests.append([1000 * one["seconds"] for one in streamed])
        pieces.append([1000 * gap for one in streamed for gap in one["gaps"][1:]])
    times = {name: np.array(values) for name, values in seconds.items()}
    clients, speed = f"{n_clients} client{'s' * (n_clients > 1)}", n / np.median(times["ours"])

    def against(what: str, way: str, note: str = "") -> Row:
        return Row.faster("server", f"{clients}: {what}", times["ours"], times[way], same, note)

    def waited(what: str, times: list[list[float]]) -> list[Row]:
        return [
            Row.of("server", f"{clients}: {what}, {name}", "ms", [np.percentile(one, percent) for one in times])
            for name, percent in (("median", 50), ("99th percentile", 99))
        ]

    return [
        against("the expert alone (budget 1)", "expert", f"{speed:.3g} documents a second"),
        against("the predictor alone (budget 0)", "predictor"),
        against(f"the bare engine, batches of {n_clients}", "engine"),
        *waited("a streamed request", requests),
        *waited("between two pieces of a stream", pieces),
    ]


BENCHMARKS: Benchmarks = {"server": (server, f"a server over a socket, {BUDGET:.0%} of tokens by the expert")}
