"""Hard caps: does a rising threshold lose less than a plain cut-off, and is a cap ever exceeded under load?

    python -m benchmarks.caps --folder runs/coverage --out docs/results/caps.json
    python -m benchmarks.caps --requests 10000 --out docs/results/caps.json
    python tools/generate.py    # the page docs/guarantees.md

The first command fits the rejectors of `benchmarks.populations` for weather and pronounce by the quick preset, unless
the folder has them. Some inputs of the test split calibrate, and others are written at budgets and caps by both
policies. With `--requests`, concurrent clients send requests with caps of all kinds to a running server instead, and
count answers that exceed theirs. Each command keeps the part of the results that the other made.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.populations import SUBJECTS, fit_subject
from seqdefer import __version__
from seqdefer.budgets.calibration import Calibration, calibrate
from seqdefer.budgets.caps import Cap, CapPolicy, allowances
from seqdefer.budgets.prices import Prices, Rates
from seqdefer.errors import SeqdeferError
from seqdefer.interfaces import Codec, Served, Task
from seqdefer.methods.deferral import DeferralRunner, deferral_of
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.progress import Clock
from seqdefer.progress_bars import show_progress
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.rejectors.confidence import Confidence
from seqdefer.storage.files import read_json, write_json
from seqdefer.testing import ToyTask
from seqdefer.types import Examples

if TYPE_CHECKING:
    import httpx

TASKS = ("weather", "pronounce")
BUDGETS = (0.1, 0.2, 0.3, 0.5, 1.0)
CAPS = (0.1, 0.2, 0.4)  # of the mean length
INPUTS = 400  # that calibrate
WRITTEN = 600
ATTEMPTS = 200  # to send a request
PRICES = Prices(Rates(output=1e5), Rates(input=1e5, cached_input=5e4, output=5e5, call=0.2))  # a token costs about 1
ROUNDING = 1e-6
POLICIES: tuple[CapPolicy, ...] = ("cut-off", "rising")


@dataclass(frozen=True)
class CapRow:
    """What one policy did with a cap at a budget."""

    task: str
    cap: int  # tokens of the expert in a sequence
    budget: float
    policy: CapPolicy
    share: float  # of the tokens, by the expert
    loss: float
    capped: float  # share of the sequences in which the cap kept a token from the expert
    difference: float  # of the loss to that of the cut-off
    error: float  # standard error of this difference


@dataclass(frozen=True)
class Pair:
    """A task with a fitted rejector, and inputs to calibrate and to write."""

    task: Task
    deferral: DeferralRunner
    calibration: Calibration
    examples: Examples

    @classmethod
    def of(cls, task: Task, rejector: Rejector, *, inputs: int, written: int) -> Pair:
        every, deferral = task.split("test"), deferral_of(rejector)
        order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
        some, others = order[:inputs], order[inputs : inputs + written]
        found = calibrate(deferral.spending(task, every.select(some)), inputs=inputs, rejector="")
        return cls(task, deferral, found, every.select(others))

    def losses(self, budget: float, cap: Cap) -> tuple[Tensor, float, float]:
        """Return the loss of each input, the share that was spent, and how often the cap made a difference."""
        threshold = self.calibration.for_budget(budget).threshold
        settings = torch.full((len(self.examples),), threshold, dtype=torch.float64)
        found = self.deferral.write(
            self.task, self.examples, settings, allowed=allowances([cap], [0] * len(self.examples)),
            schedule=self.calibration.schedule(self.task.spec.length),
        )  # fmt: skip
        loss = self.task.sequence_loss(self.examples, found.rollout.sequences).double()
        return loss, found.rollout.share, float((found.capped > 0).double().mean())


def compare(
    name: str, pair: Pair, *, caps: Sequence[float] = CAPS, budgets: Sequence[float] = BUDGETS
) -> Iterator[CapRow]:
    """Yield the rows of one task."""
    length = pair.calibration.mean_length
    assert length is not None
    for tokens in sorted({max(1, round(cap * length)) for cap in caps}):
        for budget in budgets:
            found = {policy: pair.losses(budget, Cap(tokens=tokens, policy=policy)) for policy in POLICIES}
            for policy, (loss, share, capped) in found.items():
                apart = (loss - found["cut-off"][0]).numpy()
                yield CapRow(
                    name, tokens, budget, policy, share, float(loss.mean()), capped, float(apart.mean()),
                    float(apart.std() / np.sqrt(len(apart))),
                )  # fmt: skip


# -- under load ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadResult:
    """How requests with caps ended."""

    requests: int
    sequences: int
    at_once: int
    capped: int  # answers in which a cap made a difference
    exceeded: int  # answers in which one did not hold


def request_with_cap(number: int, name: str) -> dict[str, Any]:
    """Return a request of a kind that depends on its number: its inputs, budget and cap, and whether it streams."""
    chance = np.random.default_rng(number)
    kind = ("tokens", "passes", "money")[number % 3]
    cap = {
        kind: float(chance.uniform(0, 8)) if kind == "money" else int(chance.integers(0, 8)),
        "per": ("sequence", "request")[int(chance.integers(2))],
        "policy": POLICIES[int(chance.integers(2))],
    }
    inputs = [str(int(one)) for one in chance.integers(0, 10**6, int(chance.integers(1, 4)))]
    budget = float(chance.choice([0.2, 0.5, 1.0]))
    return {"model": name, "inputs": inputs, "deferral": {"budget": budget, "cap": cap}}


def is_exceeded(body: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Tell whether the expert did more for an answer than its cap allows: tokens, as many passes, or money."""
    cap = body["deferral"]["cap"]
    authors = [[int(token["author"] == "expert") for token in one["tokens"]] for one in answer["data"]]
    counts: list[float] = [sum(row) for row in authors]
    if "money" in cap:
        counts = [PRICES.bill(1, row, by_token=True).expert for row in authors]
    most = max(counts) if cap["per"] == "sequence" else sum(counts)
    return bool(most > cap.get("tokens", cap.get("passes", cap.get("money", 0.0) + ROUNDING)))


class _Numbers(Codec):
    """Codec for numbers as texts."""

    def encode(self, inputs: Sequence[Any]) -> Examples:
        numbers = torch.tensor([int(one) for one in inputs])
        return Examples(numbers, numbers[:, None], torch.arange(len(numbers)))

    def decode(self, tokens: Sequence[Any]) -> str:
        return self.text(tokens)


def toy_model() -> DeferringModel:
    """Return a calibrated pair that takes no time."""
    task = ToyTask(length=12)
    model = DeferringModel(Served(task.predictor, task.expert, task.spec, _Numbers()), Confidence("uncertainty"))
    model.calibrate([str(number) for number in range(200)])
    model.use_prices(PRICES)
    return model


async def send_all(address: str, name: str, n: int, at_once: int) -> LoadResult:
    """Send n requests, `at_once` at a time."""
    import httpx

    numbers, found = iter(range(n)), list[tuple[int, bool, bool]]()

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            body = request_with_cap(number, name)
            answer = await _answer(client, f"{address}/v1/deferral/complete", body)
            found.append((len(answer["data"]), answer["deferral"]["capped"] > 0, is_exceeded(body, answer)))

    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work(client))
    sequences, capped, exceeded = (sum(column) for column in zip(*found, strict=True))
    return LoadResult(n, sequences, at_once, capped, exceeded)


async def _answer(client: httpx.AsyncClient, address: str, body: dict[str, Any]) -> Any:
    """Send a request until it is answered: queues may be full, and servers close connections that were idle."""
    import httpx

    for _ in range(ATTEMPTS - 1):
        with suppress(httpx.TransportError):
            response = await client.post(address, json=body)
            if response.status_code != 429:
                return response.raise_for_status().json()
        await asyncio.sleep(0.1)
    return (await client.post(address, json=body)).raise_for_status().json()


# -- the command ---------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    try:
        found = _load(chosen) if chosen.requests else _compare(chosen)
    except SeqdeferError as error:
        print(f"caps: {error}", file=sys.stderr)
        return 2
    before = read_json(chosen.out) if chosen.out.exists() else {}
    write_json(chosen.out, {**before, "version": __version__, **found})
    print(f"written: {chosen.out}", file=sys.stderr)
    return 0


def _compare(chosen: argparse.Namespace) -> dict[str, Any]:
    rows, units = list[CapRow](), {}
    for name in TASKS:
        with show_progress(quiet=False) as meter:
            task, rejector = fit_subject(SUBJECTS[name], chosen.folder, Clock(meter))
        pair = Pair.of(task, rejector, inputs=INPUTS, written=WRITTEN)
        rows += compare(name, pair)
        units[name] = {"unit": task.loss_unit, "inputs": len(pair.examples), "length": pair.calibration.mean_length}
    return {"tasks": units, "rows": [asdict(row) for row in rows]}


def _load(chosen: argparse.Namespace) -> dict[str, Any]:
    from seqdefer.server.app import create_app
    from seqdefer.server.http import Limits
    from seqdefer.server.serve import in_background

    limits = Limits()
    with in_background(create_app(toy_model(), "toy", limits=limits), limits) as address:
        result = asyncio.run(send_all(address, "toy", chosen.requests, chosen.at_once))
    print(f"{result.exceeded} of {result.requests} answers exceed their cap", file=sys.stderr)
    return {"load": asdict(result)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.caps", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--folder", type=Path, default=Path("runs/coverage"), metavar="DIR", help="labels and fits")
    parser.add_argument("--out", type=Path, default=Path("caps.json"), metavar="FILE", help="results")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="load a server with so many requests")
    parser.add_argument("--at-once", type=int, default=100, metavar="N", help="clients of --requests (100)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
