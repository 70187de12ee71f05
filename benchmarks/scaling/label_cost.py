"""Predict the cost of labels: tokens, GPU-hours and bytes for a corpus and a pair, from a few numbers.

This is a calculation; docs/scaling.md compares it with measurements. It does not need PyTorch. Per document of S input
tokens and L output tokens, if predictor and expert disagree at a share d of all positions:

    drafts              the predictor reads S and writes L
    hand-offs           the expert reads S, follows the draft for L tokens, and writes the branches (`branch_counts`):
                        d L (L - 1) / 2 tokens with all hand-offs
      (naive)           for each hand-off it reads S and the kept tokens, and writes the rest
    explored trees      both models read S and write one token for each of `explored_nodes`
    enumerated trees    both write one token for each of `enumerated_nodes`, at most 2^L - 1
    an epoch            of training that calls the models instead of using labels: both read S and write L

`benchmarks.scaling.roofline` has the time of a token on each device.

>>> from benchmarks.scaling.roofline import DEVICES, LLAMA_7B, LLAMA_70B
>>> corpus = Corpus(documents=1_000_000, input_tokens=510, length=20, disagreement=0.52)
>>> cost = label_cost(corpus, LLAMA_7B, LLAMA_70B, DEVICES["H200"])
>>> round(cost.branches, 1), round(cost.nodes, 1)
(10.4, 105.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from benchmarks.scaling.roofline import (
    Device,
    Efficiency,
    Model,
    check_share,
    read_seconds,
    require_above_zero,
    require_not_below_zero,
    rows_that_fit,
    step_of,
)
from seqdefer.errors import OptionError

DEFAULT_ROWS = 512  # batch size, if it fits; the package's default on a GPU
MAX_ROLLOUTS, MAX_LENGTH = 10_000, 4096
TREE_INPUT_READS = 2  # explored trees read the input for their roots and again to grow
INTEGER_BYTES, FLOAT_BYTES = 8, 4  # int64 and float32


# -- inputs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """The documents to label.

    documents     their number
    input_tokens  S, mean tokens of an input
    length        L, tokens of an output
    disagreement  d, the share of positions at which the expert's next token differs from the draft; from existing
                  labels: (expert calls made - documents) / (calls of the naive way - documents)
    features      F, rejector inputs per step: 12 facts of a text, or the width of the predictor's states
    context       C, rejector inputs per document
    """

    documents: int
    input_tokens: float
    length: int
    disagreement: float
    features: int = 12
    context: int = 1

    def __post_init__(self) -> None:
        require_above_zero(self, "documents")
        require_not_below_zero(self, "input_tokens", "features", "context")
        check_share("disagreement", self.disagreement)
        if not 1 <= self.length <= MAX_LENGTH:
            raise OptionError(f"length is {self.length} tokens; it must be from 1 to {MAX_LENGTH}")


# -- counting ------------------------------------------------------------------------------------------------------


def even_hand_offs(length: int, n: int) -> tuple[int, ...]:
    """Return `n` evenly spaced hand-offs of 0..L-1, the first one included."""
    if not 1 <= n <= length:
        raise OptionError(f"{n} hand-offs of {length} tokens; choose 1 to {length}")
    return tuple(index * length // n for index in range(n))


def _chosen_hand_offs(length: int, hand_offs: int | Sequence[int] | None) -> tuple[int, ...]:
    if hand_offs is None:
        return tuple(range(length))
    if isinstance(hand_offs, int):
        return even_hand_offs(length, hand_offs)
    chosen = tuple(hand_offs)
    is_rising = all(one < other for one, other in pairwise(chosen))
    if not chosen or not is_rising or chosen[0] < 0 or chosen[-1] >= length:
        raise OptionError(f"hand-offs {list(chosen)} must increase, within 0 to {length - 1}")
    return chosen


def branch_counts(length: int, disagreement: float, hand_offs: Sequence[int]) -> tuple[float, float]:
    """Return the mean number of branches that a draft's hand-offs need, and of the expert's tokens in them.

    A hand-off uses the branch at the next disagreement; other branches are not needed. The first token of a branch is
    known from following the draft and is not counted."""
    branches = tokens = 0.0
    for first, following in zip(hand_offs, [*hand_offs[1:], length], strict=True):
        agreed = 1.0  # the probability of no disagreement since `first`
        for position in range(first, following):
            branches += agreed * disagreement
            tokens += agreed * disagreement * (length - 1 - position)
            agreed *= 1 - disagreement
    return branches, tokens


def enumerated_nodes(length: int, disagreement: float) -> float:
    """Return the mean number of prefixes that predictor and expert can write: the sum over t < L of (1 + d)^t."""
    return math.fsum((1 + disagreement) ** position for position in range(length))


@cache
def explored_nodes(length: int, disagreement: float, rollouts: int) -> float:
    """Return the mean number of distinct prefixes that R = `rollouts` rollouts visit.

    Rollout r defers with probability q_r = r / (R - 1) at each position (`seqdefer.labels.exploration`). Before
    position t there are m disagreements with probability C(t, m) d^m (1 - d)^(t - m), and a prefix chooses an author at
    each of them. Rollout r visits a prefix with s expert tokens with probability q_r^s (1 - q_r)^(m - s):

        nodes = sum over t < L, m <= t, s <= m of C(t, m) d^m (1 - d)^(t - m) C(m, s)
                (1 - prod over r of (1 - q_r^s (1 - q_r)^(m - s)))
    """
    if not 2 <= rollouts <= MAX_ROLLOUTS:
        raise OptionError(f"{rollouts} rollouts per example; choose 2 to {MAX_ROLLOUTS}")
    visited = [_visited_prefixes(m, rollouts) for m in range(length)]  # by the number of disagreements before
    nodes = 0.0
    for position in range(length):
        nodes += math.fsum(
            math.comb(position, m) * disagreement**m * (1 - disagreement) ** (position - m) * visited[m]
            for m in range(position + 1)
        )
    return nodes


def _visited_prefixes(m: int, rollouts: int) -> float:
    """Return how many of the 2^m ways to decide at m disagreements are taken by some rollout."""
    total = 0.0
    for s in range(m + 1):
        missed = 0.0  # log probability that no rollout takes this way
        for rollout in range(rollouts):
            defers = rollout / (rollouts - 1)
            taken = defers**s * (1 - defers) ** (m - s)
            missed = -math.inf if taken >= 1 else missed + math.log1p(-taken)
        total += math.comb(m, s) * -math.expm1(missed)
    return total


@dataclass(frozen=True)
class Work:
    """The work of a model for one document.

    read       tokens in passes over many tokens at once
    written    tokens in passes over one token per row
    steps      sequential passes that write
    rows       rows of a document in the last of them
    """

    read: float
    written: float
    steps: float
    rows: float


def draft_work(corpus: Corpus) -> Work:
    """Return the work of a draft, and of each model in an epoch without labels."""
    return Work(corpus.input_tokens, corpus.length, corpus.length, 1)


def branching_work(corpus: Corpus, hand_offs: Sequence[int]) -> Work:
    """Return the expert's work for hand-offs that share branches."""
    branches, tokens = branch_counts(corpus.length, corpus.disagreement, hand_offs)
    return Work(corpus.input_tokens, corpus.length + tokens, corpus.length, 1 + branches)


def naive_work(corpus: Corpus, hand_offs: Sequence[int]) -> Work:
    """Return the expert's work with one run per hand-off, in one batch per document.

    The pass that reads produces the first token."""
    read = sum(corpus.input_tokens + kept for kept in hand_offs)
    written = sum(corpus.length - kept for kept in hand_offs)
    return Work(read, written, corpus.length - hand_offs[0], len(hand_offs))


def exploring_work(corpus: Corpus, rollouts: int) -> Work:
    """Return the work of each model for an explored tree."""
    nodes = explored_nodes(corpus.length, corpus.disagreement, rollouts)
    last = nodes - (explored_nodes(corpus.length - 1, corpus.disagreement, rollouts) if corpus.length > 1 else 0)
    return Work(TREE_INPUT_READS * corpus.input_tokens, nodes, corpus.length, last)


# -- bytes ---------------------------------------------------------------------------------------------------------


def hand_off_bytes(corpus: Corpus) -> float:
    """Return the bytes of a document in a shard: its draft, its rejector inputs, and its table of L + 1 columns."""
    length = corpus.length
    drafted = FLOAT_BYTES * corpus.context + INTEGER_BYTES * (length + 1) + length * FLOAT_BYTES * (corpus.features + 2)
    return drafted + (length + 1) * (FLOAT_BYTES + INTEGER_BYTES)


def node_bytes(features: int) -> int:
    """Return the bytes of a node in a shard.

    Seven integers: example, position, parent, two tokens, two children. Floats: two losses, features, uncertainty,
    entropy."""
    return 7 * INTEGER_BYTES + FLOAT_BYTES * (4 + features)


def tree_bytes(corpus: Corpus, nodes: float) -> float:
    """Return the bytes of a document's tree in a shard."""
    return nodes * node_bytes(corpus.features) + INTEGER_BYTES + FLOAT_BYTES * corpus.context


# -- seconds -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """The cost of one stage, for all documents."""

    name: str
    tokens_read: float
    tokens_written: float
    rows: int  # batch size
    read_seconds: float
    write_seconds: float
    bound: str  # what limits writing: operations, memory or launches
    devices: int

    @property
    def device_hours(self) -> float:
        return (self.read_seconds + self.write_seconds) * self.devices / 3600


@dataclass(frozen=True)
class CostModel:
    """A corpus, the device, and how well the device is used."""

    corpus: Corpus
    device: Device
    efficiency: Efficiency
    rows: int

    def stage(self, name: str, work: Work, model: Model) -> Stage:
        """Return the cost of a stage.

        `rows` limits the last step, in which a document has all its rows."""
        corpus, device, efficiency = self.corpus, self.device, self.efficiency
        rows = min(self.rows, rows_that_fit(model, device, efficiency, corpus.input_tokens + corpus.length))
        batch = max(1.0, rows / work.rows)  # documents
        attended = corpus.input_tokens + corpus.length / 2
        step = step_of(batch * work.written / work.steps, attended, model, device, efficiency)
        reading = read_seconds(work.read, corpus.input_tokens / 2, model, device, efficiency)
        return Stage(
            name=name,
            tokens_read=work.read * corpus.documents,
            tokens_written=work.written * corpus.documents,
            rows=rows,
            read_seconds=corpus.documents * reading,
            write_seconds=corpus.documents / batch * work.steps * step.seconds,
            bound=step.bound,
            devices=model.devices,
        )


@dataclass(frozen=True)
class Cost:
    """The cost of labelling a corpus, and of its alternatives."""

    corpus: Corpus
    device: Device
    hand_offs: tuple[int, ...]
    rollouts: int
    branches: float  # per document
    nodes: float  # per document
    stages: tuple[Stage, ...]  # drafts, hand-offs, and trees by each model
    naive: Stage  # alternative: one run per hand-off
    epoch: tuple[Stage, ...]  # alternative: both models in one training epoch without labels
    hand_off_bytes: float
    tree_bytes: float

    @property
    def device_hours(self) -> float:
        return sum(stage.device_hours for stage in self.stages)

    @property
    def epoch_hours(self) -> float:
        return sum(stage.device_hours for stage in self.epoch)

    @property
    def bytes(self) -> float:
        return self.hand_off_bytes + self.tree_bytes

    def __str__(self) -> str:
        """Return the stages as a table of text."""
        corpus, chosen = self.corpus, f"{len(self.hand_offs)} hand-offs, {self.rollouts} rollouts"
        instead = [("instead: one run per hand-off", self.naive)]
        instead += [(f"instead, an epoch: {stage.name}", stage) for stage in self.epoch]
        return "\n".join(
            [
                f"{corpus.documents:,} documents of {corpus.input_tokens:g} tokens, {corpus.length} written, "
                f"disagreement {corpus.disagreement:g}; {chosen}; {self.device.name}",
                f"{'':34}{'read':>10}{'written':>10}{'rows':>6}  {'bound by':10}{'GPU-hours':>10}",
                *(_line(stage.name, stage) for stage in self.stages),
                f"{'labels':72}{self.device_hours:>10,.1f}",
                *(_line(name, stage) for name, stage in instead),
                f"on disk: hand-offs {readable_bytes(self.hand_off_bytes)}, trees {readable_bytes(self.tree_bytes)}",
            ]
        )


def label_cost(
    corpus: Corpus,
    predictor: Model,
    expert: Model,
    device: Device,
    *,
    hand_offs: int | Sequence[int] | None = None,
    rollouts: int = 8,
    rows: int = DEFAULT_ROWS,
    efficiency: Efficiency | None = None,
) -> Cost:
    """Predict the cost of drafts, hand-off tables and explored trees of a corpus.

    `hand_offs` is a number, evenly spaced, or a list; the default is all. `rows` is the batch size, reduced if it does
    not fit. `efficiency` defaults to that of the package's own passes."""
    if rows < 1:
        raise OptionError(f"rows is {rows}; it must be 1 or more")
    chosen = _chosen_hand_offs(corpus.length, hand_offs)
    drafting, exploring = draft_work(corpus), exploring_work(corpus, rollouts)
    cost = CostModel(corpus, device, efficiency or Efficiency(), rows).stage
    return Cost(
        corpus=corpus,
        device=device,
        hand_offs=chosen,
        rollouts=rollouts,
        branches=branch_counts(corpus.length, corpus.disagreement, chosen)[0],
        nodes=exploring.written,
        stages=(
            cost("drafts (predictor)", drafting, predictor),
            cost("hand-offs (expert)", branching_work(corpus, chosen), expert),
            cost("trees (predictor)", exploring, predictor),
            cost("trees (expert)", exploring, expert),
        ),
        naive=cost("hand-offs (expert)", naive_work(corpus, chosen), expert),
        epoch=(cost("predictor", drafting, predictor), cost("expert", drafting, expert)),
        hand_off_bytes=corpus.documents * hand_off_bytes(corpus),
        tree_bytes=corpus.documents * tree_bytes(corpus, exploring.written),
    )


def readable_bytes(n: float) -> str:
    """Return a number of bytes with a decimal unit."""
    return f"{_readable_count(n)}B" if n >= 1e3 else f"{n:.0f} B"


def _readable_count(n: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.3g}"


def _line(name: str, stage: Stage) -> str:
    read, written = _readable_count(stage.tokens_read), _readable_count(stage.tokens_written)
    return f"{name:34}{read:>10}{written:>10}{stage.rows:>6}  {stage.bound:10}{stage.device_hours:>10,.1f}"
