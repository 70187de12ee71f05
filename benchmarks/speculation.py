"""Benchmark of speculative deferral: documents stream in, and each budget is compared with either model alone.

The pair is decoder-only with a large gap in cost: random weights in the shapes of a small and a large Qwen2. In both,
the next token follows mostly from the last one, by one rule; noise of their layers makes them differ, and the small one
uncertain, at some positions. `--pair` measures two models of your own.

The tokens are compared with those of the interleaved loop first. Where a row differs, its first difference must be a
tie within rounding; ties are counted. The bound is the predictor alone, and the expert's reading of all tokens before
the last deferred one in chunks that are known beforehand, its inputs included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import ResultsDifferError, Row, Seconds, race, require_same
from benchmarks.text import Choice, Decoding, IdTokenizer, decoding_of, quiet
from benchmarks.weather import SEED, Bench, Benchmarks
from seqdefer.budgets.policies import Threshold
from seqdefer.engine.interleaved import roll_out
from seqdefer.engine.pace import Pace
from seqdefer.engine.rows import rows_of_expert
from seqdefer.engine.speculative import run_all, speculative_loop
from seqdefer.environment import choose_device
from seqdefer.errors import OptionError
from seqdefer.rejectors.confidence import Confidence
from seqdefer.rows import Chunk
from seqdefer.tasks.text.models import text_model, transformers
from seqdefer.tasks.text.pairs import TextExpert, TextPair, TextPredictor
from seqdefer.types import Examples, Rollout, SequenceSpec

BUDGETS = (0.05, 0.1, 0.2, 0.5, 1.0)
TRIALS = 7  # to find the threshold of a budget
REPEATS = 3
COMPARED = 8  # documents; the interleaved loop is slow
TIE = 1e-3  # how far rounding in float32 may move log probabilities and scores, in nats
COMPARED_BUDGETS = (0.2,)  # in half precision, where batches of different shapes round differently


@dataclass(frozen=True)
class Shape:
    """The size of a Qwen2, and how much its layers change what follows from the last token."""

    width: int
    layers: int
    heads: int
    keys: int  # heads of keys and values
    mlp: int
    noise: float


@dataclass(frozen=True)
class Sizes:
    """The decoder-only pair, and how much is written."""

    predictor: Shape
    expert: Shape
    words: int
    prompt: int
    length: int
    streamed: dict[int, int]  # documents by the number that run at once
    budgets: tuple[float, ...] = BUDGETS
    interleaved: float | None = 0.2  # the budget at which the interleaved loop is timed; None: at none
    streamed_pair: dict[int, int] = field(default_factory=lambda: {1: 2, 8: 16, 32: 48})  # documents of a given pair


CPU = Sizes(Shape(192, 4, 4, 4, 512, 31.0), Shape(1024, 18, 16, 16, 2816, 0.5), 8000, 32, 24, {1: 4, 8: 16, 32: 48})
GPU = Sizes(  # 0.5B and 7B; the interleaved loop takes minutes there
    Shape(896, 24, 14, 2, 4864, 3.4), Shape(3584, 28, 28, 4, 18944, 0.5), 151936, 128, 128, {1: 2, 8: 32, 32: 64},
    interleaved=None,
)  # fmt: skip
QUICK = Sizes(
    Shape(32, 2, 2, 2, 64, 60.0), Shape(64, 4, 4, 2, 128, 20.0), 500, 8, 12, {1: 2, 4: 6}, (0.2, 1.0),
    streamed_pair={1: 2, 4: 6},
)  # fmt: skip


def speculation(bench: Bench, choice: Choice) -> list[Row]:
    """Compare budgets with either model alone, with assisted generation and with the bound."""
    transformers()
    device = choose_device(choice.device)
    sizes = sizes_on(device, is_quick=choice.sizes.is_quick)
    is_exact = choice.dtype == "float32"
    with quiet(), torch.no_grad():
        bench.log("preparing a pair" if choice.pair is None else "loading the pair")
        if choice.pair is None:
            sizes = replace(sizes, streamed=_chosen(sizes.streamed, choice))
            return _of_pair(bench, "decoder-only", decoder_only(sizes, device, choice.dtype), sizes, is_exact=is_exact)
        streamed = _chosen(sizes.streamed_pair, choice)
        whole = decoding_of(replace(choice, sizes=replace(choice.sizes, n_documents=streamed)))
        return _of_pair(bench, "pair", whole, replace(sizes, streamed=streamed), is_exact=is_exact)


def sizes_on(device: torch.device, *, is_quick: bool) -> Sizes:
    return QUICK if is_quick else CPU if device.type == "cpu" else GPU


def _chosen(streamed: dict[int, int], choice: Choice) -> dict[int, int]:
    for one in choice.at_once:
        if one not in streamed:
            raise OptionError(f"--at-once is {one}; choose from {', '.join(map(str, streamed))}")
    return {one: n for one, n in streamed.items() if not choice.at_once or one in choice.at_once}


def decoder_only(sizes: Sizes, device: torch.device, dtype: str) -> Decoding:
    """Make a pair that agrees about as often as real ones do."""
    tokenizer, n = IdTokenizer(sizes.words, end=None), max(sizes.streamed.values())
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        following = torch.randperm(sizes.words)
        small, large = (
            text_model(_qwen(shape, sizes, following, device, getattr(torch, dtype)), tokenizer)
            for shape in (sizes.predictor, sizes.expert)
        )
        inputs = torch.randint(0, sizes.words, (n, sizes.prompt))
    pair = TextPair(TextPredictor(small, n_tokens=sizes.words), TextExpert(large, n_tokens=sizes.words))
    examples = Examples(inputs, inputs[:, :0], torch.arange(n)).to(device)
    return Decoding(pair, examples, SequenceSpec(sizes.length, None), n)


def _qwen(shape: Shape, sizes: Sizes, following: Tensor, device: torch.device, dtype: torch.dtype) -> Any:
    config = transformers().Qwen2Config(
        vocab_size=sizes.words, hidden_size=shape.width, num_hidden_layers=shape.layers, intermediate_size=shape.mlp,
        num_attention_heads=shape.heads, num_key_value_heads=shape.keys, tie_word_embeddings=False,
        max_position_embeddings=sizes.prompt + sizes.length, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = transformers().Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    embedded = torch.randn(sizes.words, shape.width)
    model.model.embed_tokens.weight.data.copy_(embedded)
    model.lm_head.weight.data[following.to(device)] = (embedded / shape.width**0.5).to(device, dtype)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= shape.noise
        layer.mlp.down_proj.weight.data *= shape.noise
    return model


@dataclass
class Streamed:
    """Documents that stream in, some at once."""

    decoding: Decoding
    pace: Pace

    def write(self, threshold: float) -> Rollout:
        some = self.decoding
        policy = Threshold(Confidence("uncertainty"), threshold)
        loop = speculative_loop(some.pair.predictor, some.pair.expert, policy, some.spec, self.pace)
        return run_all(loop, some.examples, some.batch)

    def threshold(self, budget: float) -> float:
        """Find the threshold that spends nearest to a budget, by halving the scores in between."""
        if budget >= 1:
            return -np.inf
        scores, tried = self.write(np.inf).scores.flatten().sort().values, list[tuple[float, float]]()
        low, high = 0, len(scores) - 1
        for _ in range(TRIALS):
            middle = (low + high) // 2
            threshold = _above(scores, middle)
            share = self.write(threshold).share
            tried.append((abs(share - budget), threshold))
            low, high = (middle, high) if share > budget else (low, middle)
        return min(tried)[1]

    def read(self, written: Rollout) -> None:
        """Let the expert read what was written, in chunks between deferred positions."""
        some = self.decoding
        for rows in torch.arange(len(some.examples)).split(some.batch):
            expert = rows_of_expert(some.pair.expert)
            expert.admit(some.examples.select(rows.to(some.examples.ids.device)))
            asked = [written.by_expert[row].nonzero().squeeze(1).tolist() for row in rows.tolist()]
            for number in range(max(map(len, asked))):
                expert.read(
                    [
                        _chunk(place, written.sequences.tokens[row], [0, *asked[place]][number], asked[place][number])
                        for place, row in enumerate(rows.tolist())
                        if number < len(asked[place])
                    ]
                )


def _above(scores: Tensor, place: int) -> float:
    """Return a number between two scores: at a score itself, rounding could decide."""
    return float(scores[place] + scores[min(place + 1, len(scores) - 1)]) / 2


def _chunk(place: int, tokens: Tensor, begin: int, end: int) -> Chunk:
    return Chunk(place, tokens[begin:end].tolist(), [end - begin])


def _of_pair(bench: Bench, name: str, whole: Decoding, sizes: Sizes, *, is_exact: bool) -> list[Row]:
    rows = []
    for at_once, n in sizes.streamed.items():
        some = replace(whole, examples=whole.examples.select(torch.arange(n)), batch=at_once)
        rows += _of_batch(bench, f"{name}, {at_once} at once", some, sizes, is_exact=is_exact)
    return rows


def _of_batch(bench: Bench, name: str, some: Decoding, sizes: Sizes, *, is_exact: bool) -> list[Row]:
    streamed, same, notes = Streamed(some, Pace()), dict[float, str](), dict[float, str]()
    others: dict[str, Callable[[], Any]] = {
        "the expert alone": some.expert,
        "generate of the expert": lambda: some.generate(some.pair.expert.model),
        "the predictor alone": lambda: streamed.write(np.inf),
    }
    if some.batch == 1:
        others["assisted generation"] = some.assisted
    ours: dict[str, Callable[[], Any]] = {}
    for budget in sizes.budgets:
        bench.log(f"{name}, budget {budget:g}: comparing")
        threshold = streamed.threshold(budget)
        written = streamed.write(threshold)
        is_compared = is_exact or budget in COMPARED_BUDGETS
        same[budget] = _compare(some, threshold, written, is_exact=is_exact) if is_compared else ""
        notes[budget] = f"spends {written.share:.2f}, the expert agrees at {streamed.pace.agreement:.2f}"
        ours[f"{budget:g}"] = lambda at=threshold: streamed.write(at)
        ours[f"{budget:g}, reading"] = lambda what=written: streamed.read(what)
        if budget == sizes.interleaved:
            others["the interleaved loop"] = lambda at=threshold: some.roll(Threshold(Confidence("uncertainty"), at))
    for way in (*ours.values(), others["the expert alone"]):  # graphs are recorded in the first runs
        way()
    seconds: dict[str, Seconds] = race({**others, **ours}, min(REPEATS, bench.sizes.repeats), 0.0, bench.log)
    rows = []
    for budget in sizes.budgets:
        theirs = {way: seconds[way] for way in others if way != "the interleaved loop" or budget == sizes.interleaved}
        theirs["the bound"] = seconds["the predictor alone"] + seconds[f"{budget:g}, reading"]
        for way, taken in theirs.items():
            what = f"{name}, budget {budget:g}: {way}"
            rows.append(Row.faster("speculation", what, seconds[f"{budget:g}"], taken, same[budget], notes[budget]))
            bench.log(f"{what}: {rows[-1].median:.2f}; {notes[budget]}")
    return rows


def _compare(some: Decoding, threshold: float, written: Rollout, *, is_exact: bool) -> str:
    """Compare the first documents with the interleaved loop. A row may differ from a tie on: what follows depends on
    it."""
    n = min(COMPARED, len(some.examples))
    policy, examples = Threshold(Confidence("uncertainty"), threshold), some.examples.select(torch.arange(n))
    plain = roll_out(some.pair.predictor, some.pair.expert, examples, policy, some.spec)
    ours, theirs = written.sequences.tokens[:n], plain.sequences.tokens.cpu()
    differing = (ours != theirs).any(1).nonzero().squeeze(1).tolist()
    gaps = [_gap(some, threshold, row, written, plain) for row in differing]
    if is_exact and max(gaps, default=0.0) > TIE:
        raise ResultsDifferError(
            f"tokens: a row differs where two choices are {max(gaps):.2g} apart, and rounding explains {TIE:g}; "
            "please report this"
        )
    same = require_same("tokens", (ours, theirs), rounding=1.0)
    return f"{same}; ties: {len(gaps)}, at most {max(gaps):.1g} apart" if gaps else same


def _gap(some: Decoding, threshold: float, row: int, ours: Rollout, plain: Rollout) -> float:
    """Return how far apart two choices are where a row first differs: the log probabilities of both tokens or, where
    authors differ, the score and the threshold."""
    lines = [one.sequences.tokens[row].tolist() for one in (ours, plain)]
    at = next(place for place, both in enumerate(zip(*lines, strict=True)) if len(set(both)) > 1)
    if bool(ours.by_expert[row, at]) != bool(plain.by_expert[row, at]):
        return max(abs(float(one.scores[row, at]) - threshold) for one in (ours, plain))
    writer = some.pair.expert if bool(plain.by_expert[row, at]) else some.pair.predictor
    inputs, prefix = some.examples.inputs[row : row + 1], torch.tensor([lines[0][:at]], dtype=torch.long)
    logits = writer.model.network.prefill(inputs, prefix.to(inputs.device)).logits[0, : writer.n_tokens]
    candidates = [list(writer.model.ends) if line[at] == writer.end else [line[at]] for line in lines]
    one, other = (float(logits.float().log_softmax(0)[tokens].max()) for tokens in candidates)
    return abs(one - other)


BENCHMARKS: Benchmarks = {"speculation": (speculation, "speculative deferral, documents streaming in")}
