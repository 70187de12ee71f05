"""Benchmark of the rejector: what it costs to score every token and never defer, against the predictor alone.

Both run in the engine that serves. The rejector is not fitted: this changes its decisions, not its cost.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Row, require_same
from benchmarks.speculation import decoder_only, sizes_on
from benchmarks.text import Choice, Decoding, decoding_of, quiet
from benchmarks.weather import Bench, Benchmarks
from seqdefer.budgets.policies import Threshold
from seqdefer.engine.drafts import draft
from seqdefer.engine.pace import Pace
from seqdefer.engine.speculative import run_all, speculative_loop
from seqdefer.environment import choose_device
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.checkpoints import token_networks
from seqdefer.rejectors.token import TokenNetwork
from seqdefer.tasks.text.models import transformers
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.tasks.text.rows import complete_rows
from seqdefer.tasks.text.task import RECIPES
from seqdefer.types import Sequences

BATCHES = (1, 8, 32)


def rejector(bench: Bench, choice: Choice) -> list[Row]:
    """Measure the rejector with the pair, and with a decoder-only predictor."""
    transformers()
    with quiet(), torch.no_grad():
        return _rows(bench, "the predictor", decoding_of(choice)) + _rows(
            bench, "a decoder-only predictor", _decoder_only(choice)
        )


def _decoder_only(choice: Choice) -> Decoding:
    device = choose_device(choice.device)
    sizes = sizes_on(device, is_quick=choice.sizes.is_quick)
    most = max(choice.sizes.n_documents.values())
    return decoder_only(replace(sizes, expert=sizes.predictor, streamed={most: most}), device, choice.dtype)


def _rows(bench: Bench, name: str, plain: Decoding) -> list[Row]:
    batches = sorted({min(batch, len(plain.examples)) for batch in BATCHES})
    return [_row(bench, name, replace(plain, examples=plain.examples.select(torch.arange(n)))) for n in batches]


def _row(bench: Bench, name: str, plain: Decoding) -> Row:
    """Return the cost of a rejector that never defers, relative to the predictor without one."""
    n, some = len(plain.examples), with_facts(plain)
    bench.log(f"{name}, batches of {n}")
    never, pace = Threshold(unfitted_rejector(some), torch.inf), Pace()

    def scored() -> Tensor:
        loop = speculative_loop(some.pair.predictor, some.pair.expert, never, some.spec, pace)
        return run_all(loop, some.examples).sequences.tokens

    def alone() -> Tensor:
        blank = torch.zeros(n, plain.spec.length, dtype=torch.long, device=plain.examples.ids.device)
        rows = plain.pair.predictor.rows_of.rows()
        return complete_rows(rows, plain.examples.inputs, Sequences(blank, blank[:, 0]), plain.spec).tokens

    same = require_same("tokens of the predictor", (scored().cpu(), alone().cpu()))
    seconds = bench.race(ours=scored, theirs=alone)
    added = 1e6 * float(np.median(seconds["ours"] - seconds["theirs"])) / (n * some.spec.length)
    parts = {"ours": seconds["ours"].tolist(), "theirs": seconds["theirs"].tolist()}
    ratio, note = seconds["ours"] / seconds["theirs"], f"{added:.0f} microseconds a token"
    what = f"{name} without it, batches of {n}"
    return Row.of("rejector", what, "times its cost", ratio, same=same, note=note, seconds=parts)


def with_facts(plain: Decoding) -> Decoding:
    """Return the same pair with rejector inputs."""
    return replace(plain, pair=TextPair.of(plain.pair.predictor.model, plain.pair.expert.model, "facts"))


def unfitted_rejector(some: Decoding) -> TokenNetwork:
    """Return a rejector of the default recipe with random weights."""
    settings = RECIPES["ours"].token
    seen = draft(some.pair.predictor, some.examples.select(torch.arange(1)), some.spec)
    torch.manual_seed(0)
    sizes = Sizes(
        seen.context.shape[1], seen.features.shape[-1], some.spec.length, seen.entropy is not None, settings.layers,
        settings.units, settings.dropout,
    )  # fmt: skip
    network = token_networks()[settings.architecture](sizes, some.pair.predictor.fingerprint)
    return network.to(some.pair.predictor.device).eval()


BENCHMARKS: Benchmarks = {"rejector": (rejector, "a rejector that scores every token and never defers (budget 0)")}
