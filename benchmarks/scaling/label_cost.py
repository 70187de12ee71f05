"""What labels cost, before they are made: tokens, GPU-hours and bytes of a corpus and a pair, from a few numbers.

A calculation, not a measurement: it says how the cost follows from its inputs, and docs/scaling.md holds it against
runs that were counted. Nothing here needs PyTorch. Per document of S input tokens and L written ones, where predictor
and expert disagree at a share d of all positions:

    drafts              the predictor reads S and writes L
    hand-offs           the expert reads S, goes along L, and writes `branch_tokens`: with all hand-offs d L (L - 1) / 2
      (naively)         for each hand-off it reads S and what was kept, and writes the rest
    explored trees      both models read S and write one token for each of `explored_nodes`
    enumerated trees    both write one token for each of `enumerated_nodes`, at most 2^L - 1
    an epoch            of training that asks the models instead of labels: both read S and write L

What a token takes on which device is in `benchmarks.scaling.roofline`.

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
    Engine,
    Model,
    check_share,
    read_seconds,
    require_above_zero,
    require_not_below_zero,
    rows_that_fit,
    step_of,
)
from seqdefer.errors import OptionError

ROWS = 512  # that a model works on at once, where they fit; the package's own choice on a GPU
MOST_ROLLOUTS, MOST_LENGTH = 10_000, 4096
INPUT_READS = 2  # of explored trees: for their roots, and to go on from there
INTEGER, NUMBER = 8, 4  # bytes: int64 and float32


def _check_length(length: int) -> None:
    if not 1 <= length <= MOST_LENGTH:
        raise OptionError(f"outputs of {length} tokens; there can be 1 to {MOST_LENGTH}")


# -- inputs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """What is to be labelled.

    documents     how many
    input_tokens  S, the mean number of tokens of an input
    length        L, tokens of an output
    disagreement  d, the share of positions at which the expert would go on otherwise than the draft does; of labels
                  that were made: (expert calls made - documents) / (calls of the naive way - documents)
    features      F, numbers a step that rejectors see: 12 facts of a text, or the width of the predictor's states
    context       C, numbers an input that they see
    """

    documents: int
    input_tokens: float
    length: int
    disagreement: float
    features: int = 12
    context: int = 1

    def __post_init__(self) -> None:
        require_above_zero(self, "documents", "length")
        require_not_below_zero(self, "input_tokens", "features", "context")
        check_share("disagreement", self.disagreement)
        _check_length(self.length)


# -- counting ------------------------------------------------------------------------------------------------------


def even_hand_offs(length: int, n: int) -> tuple[int, ...]:
    """`n` of the hand-offs 0..L-1, evenly spread, the first one included."""
    _check_length(length)
    if not 1 <= n <= length:
        raise OptionError(f"{n} hand-offs of {length} tokens; there can be 1 to {length}")
    return tuple(index * length // n for index in range(n))


def _chosen_hand_offs(length: int, hand_offs: int | Sequence[int] | None) -> tuple[int, ...]:
    if hand_offs is None:
        return tuple(range(length))
    return even_hand_offs(length, hand_offs) if isinstance(hand_offs, int) else _checked_hand_offs(length, hand_offs)


def _checked_hand_offs(length: int, hand_offs: Sequence[int]) -> tuple[int, ...]:
    _check_length(length)
    chosen = tuple(hand_offs)
    is_rising = all(one < other for one, other in pairwise(chosen))
    if not chosen or not is_rising or chosen[0] < 0 or chosen[-1] >= length:
        raise OptionError(f"hand-offs {list(chosen)}: they must rise, from 0 or more to {length - 1} or less")
    return chosen


def branch_counts(length: int, disagreement: float, hand_offs: Sequence[int]) -> tuple[float, float]:
    """The mean number of branches that a draft's hand-offs need, and of the tokens that the expert writes in them.

    A hand-off is the branch at the first disagreement from there on; a branch that no hand-off leads to is not needed.
    Its first token is known from going along with the draft, and is not counted."""
    check_share("disagreement", disagreement)
    chosen = _checked_hand_offs(length, hand_offs)
    branches = tokens = 0.0
    for first, following in zip(chosen, [*chosen[1:], length], strict=True):
        agreed = 1.0  # the chance that there was no disagreement since `first`
        for position in range(first, following):
            branches += agreed * disagreement
            tokens += agreed * disagreement * (length - 1 - position)
            agreed *= 1 - disagreement
    return branches, tokens


def enumerated_nodes(length: int, disagreement: float) -> float:
    """The mean number of prefixes that predictor and expert can write together: sum over t < L of (1 + d)^t."""
    _check_length(length)
    check_share("disagreement", disagreement)
    return math.fsum((1 + disagreement) ** position for position in range(length))


@cache
def explored_nodes(length: int, disagreement: float, rollouts: int) -> float:
    """The mean number of distinct prefixes that `rollouts` rollouts pass, the r-th of which defers with probability
    q_r = r / (R - 1) at each position (`seqdefer.labels.exploration`).

    Before position t stand m disagreements with probability C(t, m) d^m (1 - d)^(t - m), and a prefix is a choice of
    writers at these m. One with s tokens of the expert is passed by rollout r with probability q_r^s (1 - q_r)^(m - s):

        nodes = sum over t < L, m <= t, s <= m of C(t, m) d^m (1 - d)^(t - m) C(m, s)
                (1 - prod over r of (1 - q_r^s (1 - q_r)^(m - s)))
    """
    _check_length(length)
    check_share("disagreement", disagreement)
    if not 2 <= rollouts <= MOST_ROLLOUTS:
        raise OptionError(f"{rollouts} rollouts an example; there can be 2 to {MOST_ROLLOUTS}")
    passed = [_prefixes_passed(m, rollouts) for m in range(length)]  # by the number of disagreements before
    nodes = 0.0
    for position in range(length):
        nodes += math.fsum(
            math.comb(position, m) * disagreement**m * (1 - disagreement) ** (position - m) * passed[m]
            for m in range(position + 1)
        )
    return nodes


def _prefixes_passed(m: int, rollouts: int) -> float:
    """Of the 2^m ways to decide at m disagreements, how many some rollout takes."""
    total = 0.0
    for s in range(m + 1):
        missed = 0.0  # the logarithm of the chance that no rollout takes this way
        for rollout in range(rollouts):
            defers = rollout / (rollouts - 1)
            taken = defers**s * (1 - defers) ** (m - s)
            missed = -math.inf if taken >= 1 else missed + math.log1p(-taken)
        total += math.comb(m, s) * -math.expm1(missed)
    return total


@dataclass(frozen=True)
class Work:
    """What a model does for one document.

    read       tokens in passes over many at once
    written    tokens in passes over one a row
    steps      passes that write, one after the other
    rows       rows that a document has in the last of them
    """

    read: float
    written: float
    steps: float
    rows: float


def draft_work(corpus: Corpus) -> Work:
    """Also of both models in an epoch that asks them anew."""
    return Work(corpus.input_tokens, corpus.length, corpus.length, 1)


def branching_work(corpus: Corpus, hand_offs: Sequence[int]) -> Work:
    branches, tokens = branch_counts(corpus.length, corpus.disagreement, hand_offs)
    return Work(corpus.input_tokens, corpus.length + tokens, corpus.length, 1 + branches)


def naive_work(corpus: Corpus, hand_offs: Sequence[int]) -> Work:
    """One run a hand-off, all of a document beside each other. The pass that reads names the first token."""
    chosen = _checked_hand_offs(corpus.length, hand_offs)
    read = sum(corpus.input_tokens + kept for kept in chosen)
    written = sum(corpus.length - kept for kept in chosen)
    return Work(read, written, corpus.length - chosen[0], len(chosen))


def exploring_work(corpus: Corpus, rollouts: int) -> Work:
    nodes = explored_nodes(corpus.length, corpus.disagreement, rollouts)
    last = nodes - (explored_nodes(corpus.length - 1, corpus.disagreement, rollouts) if corpus.length > 1 else 0)
    return Work(INPUT_READS * corpus.input_tokens, nodes, corpus.length, last)


# -- bytes ---------------------------------------------------------------------------------------------------------


def hand_off_bytes(corpus: Corpus) -> float:
    """Of a document's draft with what rejectors see, and of its table, in a shard. The table has all L + 1 columns."""
    length = corpus.length
    drafted = NUMBER * corpus.context + INTEGER * (length + 1) + length * NUMBER * (corpus.features + 2)
    return drafted + (length + 1) * (NUMBER + INTEGER)


def node_bytes(features: int) -> int:
    """Of a node in a shard: example, position, parent, two tokens and two children; two losses, the features,
    uncertainty and entropy."""
    return 7 * INTEGER + NUMBER * (4 + features)


def tree_bytes(corpus: Corpus, nodes: float) -> float:
    return nodes * node_bytes(corpus.features) + INTEGER + NUMBER * corpus.context


# -- seconds -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What one stage costs, all documents together."""

    name: str
    tokens_read: float
    tokens_written: float
    rows: int  # at once, at most
    read_seconds: float
    write_seconds: float
    bound: str  # what writing waits for: operations, memory or launches
    devices: int

    @property
    def device_hours(self) -> float:
        return (self.read_seconds + self.write_seconds) * self.devices / 3600


@dataclass(frozen=True)
class Plan:
    """Where and how a corpus is worked on."""

    corpus: Corpus
    device: Device
    engine: Engine
    rows: int

    def stage(self, name: str, work: Work, model: Model) -> Stage:
        """As many rows as were asked for, or as fit: in the last step, where a document has all its rows."""
        corpus, device, engine = self.corpus, self.device, self.engine
        rows = min(self.rows, rows_that_fit(model, device, engine, corpus.input_tokens + corpus.length))
        at_once = max(1.0, rows / work.rows)  # documents
        attended = corpus.input_tokens + corpus.length / 2
        step = step_of(at_once * work.written / work.steps, attended, model, device, engine)
        reading = read_seconds(work.read, corpus.input_tokens / 2, model, device, engine)
        return Stage(
            name=name,
            tokens_read=work.read * corpus.documents,
            tokens_written=work.written * corpus.documents,
            rows=rows,
            read_seconds=corpus.documents * reading,
            write_seconds=corpus.documents / at_once * work.steps * step.seconds,
            bound=step.bound,
            devices=model.devices,
        )


@dataclass(frozen=True)
class Cost:
    """What it costs to label a corpus, and what it would cost otherwise."""

    corpus: Corpus
    device: Device
    hand_offs: tuple[int, ...]
    rollouts: int
    branches: float  # a document
    nodes: float  # a document
    stages: tuple[Stage, ...]  # drafts, hand-offs, and trees by each model
    naive: Stage  # hand-offs with one run each, instead
    epoch: tuple[Stage, ...]  # both models in one epoch of training that asks them instead of labels
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

    def table(self) -> str:
        """For people to read, in columns."""
        corpus, chosen = self.corpus, f"{len(self.hand_offs)} hand-offs, {self.rollouts} rollouts"
        instead = [("instead: one run a hand-off", self.naive)]
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

    def __str__(self) -> str:
        return self.table()


def label_cost(
    corpus: Corpus,
    predictor: Model,
    expert: Model,
    device: Device,
    *,
    hand_offs: int | Sequence[int] | None = None,
    rollouts: int = 8,
    rows: int = ROWS,
    engine: Engine | None = None,
) -> Cost:
    """Drafts, hand-off tables and explored trees of a corpus.

    `hand_offs`: how many, evenly spread, or which; all by default. `rows` are worked on at once, or as many as fit.
    `engine`: how well the device is used; by default as the package's own passes do."""
    if rows < 1:
        raise OptionError(f"{rows} rows at once; give 1 or more")
    chosen = _chosen_hand_offs(corpus.length, hand_offs)
    drafting, exploring = draft_work(corpus), exploring_work(corpus, rollouts)
    cost = Plan(corpus, device, engine or Engine(), rows).stage

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
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def _readable_count(n: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.3g}"


def _line(name: str, stage: Stage) -> str:
    read, written = _readable_count(stage.tokens_read), _readable_count(stage.tokens_written)
    return f"{name:34}{read:>10}{written:>10}{stage.rows:>6}  {stage.bound:10}{stage.device_hours:>10,.1f}"
