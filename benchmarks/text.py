"""Benchmark of a pair of Hugging Face models: both ends equal `generate`, and all hand-offs are labelled together.

In float32 the tokens of either model alone, by our engine, must equal its own `generate`, token for token. In half
precision, batches of different shapes round too differently for that, and the share of equal tokens is reported
instead. How fast a budget is decoded is measured by the benchmark `speculation`, which shares the pair.

Without `--pair` the benchmark uses two T5s with random weights, which changes the output but not its cost. They differ
from plain random models in three ways. The end token is never the likeliest, so every sequence has the full length. The
expert has the predictor's layers plus some of small effect, so the two agree about as often as real pairs do, which
speculation depends on. And documents vary in length as news articles do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Row, require_same
from benchmarks.weather import SEED, Bench, Benchmarks
from seqdefer.budgets.policies import Threshold
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import roll_out
from seqdefer.environment import choose_device, machine
from seqdefer.errors import DataError
from seqdefer.interfaces import Policy
from seqdefer.labels.branches import branch_out
from seqdefer.rejectors.confidence import Confidence
from seqdefer.tasks.text.codec import encode
from seqdefer.tasks.text.data import read_corpus
from seqdefer.tasks.text.models import TextModel, text_model, transformers
from seqdefer.tasks.text.pairs import TextPair, load_pair
from seqdefer.tasks.text.passes import PADDING, pad_left
from seqdefer.types import Examples, Sequences, SequenceSpec

BUDGET = 0.2
NEAR = 0.005  # stop the search for a threshold at a share this close to the budget
TRIALS = 5  # then take the closest
PROMPT = "summarize: "


@dataclass(frozen=True)
class Sizes:
    """How much is decoded, and the size of the synthetic pair."""

    n_documents: Mapping[int, int]  # number of documents for each batch size
    n_asked: Mapping[int, int]  # number of documents for each number of clients
    longest: int = 448  # tokens of a document
    length: int = 20  # tokens of an output
    n_labelled: int = 4  # documents for the comparison of hand-offs
    n_layers: tuple[int, int] = (2, 8)  # of predictor and expert, in the encoder and in the decoder
    width: int = 512
    n_heads: int = 6
    n_words: int = 32128
    is_quick: bool = False


DEFAULT = Sizes(n_documents={1: 2, 8: 8, 32: 32}, n_asked={1: 8, 8: 16, 32: 32, 64: 64})
QUICK = Sizes(
    n_documents={1: 1, 4: 4},
    n_asked={1: 2, 4: 4},
    n_labelled=2,
    longest=128,
    width=256,
    n_words=8064,
    is_quick=True,
)


@dataclass(frozen=True)
class Choice:
    """Options of the command line. Without a pair it is synthetic, without documents they are random."""

    pair: tuple[str, str] | None = None
    documents: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    sizes: Sizes = DEFAULT
    at_once: tuple[int, ...] = ()  # numbers of documents that run at once, in `speculation`; empty: all


# -- the pair and the documents ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoding:
    """Documents, a pair, and ways to write about all of them in batches. Ways return tokens (n, L)."""

    pair: TextPair
    examples: Examples
    spec: SequenceSpec
    batch: int

    def over(self, way: Callable[[Examples], Tensor]) -> Tensor:
        parts = [way(self.examples.select(rows)) for rows in torch.arange(len(self.examples)).split(self.batch)]
        if parts[0].device.type == "cuda":
            torch.cuda.synchronize()
        return torch.cat(parts)

    def roll(self, policy: Policy[Any]) -> Tensor:
        def way(some: Examples) -> Tensor:
            return roll_out(self.pair.predictor, self.pair.expert, some, policy, self.spec).sequences.tokens

        return self.over(way)

    def expert(self) -> Tensor:
        def way(some: Examples) -> Tensor:
            blank = torch.zeros(len(some), self.spec.length, dtype=torch.long, device=self.pair.expert.device)
            written = self.pair.expert.complete(some, Sequences(blank, blank[:, 0]), self.spec)
            return torch.where(written.mask(), written.tokens, 0)

        return self.over(way)

    def generate(self, model: TextModel, **options: Any) -> Tensor:
        return self.over(lambda some: generate(model, some.inputs, self.spec, **options))

    def assisted(self) -> Tensor:
        """Return assisted generation, which in Transformers takes one document at a time."""
        one_by_one, assistant = replace(self, batch=1), self.pair.predictor.model.model
        return one_by_one.generate(self.pair.expert.model, assistant_model=assistant)


def generate(model: TextModel, inputs: Tensor, spec: SequenceSpec, **options: Any) -> Tensor:
    """Return the greedy output of Transformers with its own padding. (n, L), 0 past the end"""
    given = (inputs != PADDING).sum(1)
    inputs = inputs[:, : int(given.max())]
    if not model.is_encoder_decoder:
        inputs = pad_left(inputs)
    options |= {"attention_mask": (inputs != PADDING).long(), "max_new_tokens": spec.length, "do_sample": False}
    written = model.model.generate(input_ids=inputs.clamp(min=0), **options)
    written = written[:, 1 if model.is_encoder_decoder else inputs.shape[1] :]
    return _up_to_end(torch.nn.functional.pad(written, (0, spec.length - written.shape[1])), model, spec)


def _up_to_end(tokens: Tensor, model: TextModel, spec: SequenceSpec) -> Tensor:
    """Replace every end token by that of the pair, and everything after it by 0."""
    is_end = torch.isin(tokens, torch.tensor(model.ends, dtype=tokens.dtype, device=tokens.device))
    tokens = tokens.masked_fill(is_end, 0 if spec.end is None else spec.end)
    return tokens.masked_fill((is_end.cumsum(1) - is_end.long()) > 0, 0)


def random_pair(sizes: Sizes, device: torch.device, dtype: str) -> TextPair:
    """Make two T5s with random weights, as described above."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        predictor, expert = (_random_model(sizes, n_layers) for n_layers in sizes.n_layers)
    expert.load_state_dict(predictor.state_dict(), strict=False)
    for name, weight in expert.named_parameters():
        is_added = ".block." in name and int(name.split(".")[2]) >= sizes.n_layers[0]
        if is_added and name.endswith((".o.weight", ".wo.weight")):
            weight.data *= 0.15
    tokenizer = IdTokenizer(sizes.n_words, end=1)
    small, large = (text_model(model.to(device, getattr(torch, dtype)), tokenizer) for model in (predictor, expert))
    return TextPair.of(small, large)


def _random_model(sizes: Sizes, n_layers: int) -> Any:
    config = transformers().T5Config(
        vocab_size=sizes.n_words, d_model=sizes.width, d_ff=2 * sizes.width, num_heads=sizes.n_heads, d_kv=64,
        num_layers=n_layers, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers().T5ForConditionalGeneration(config)
    head = torch.randn(sizes.n_words, sizes.width)
    head[config.eos_token_id] = 0  # others reach above 0, so the end is never the likeliest
    model.lm_head.weight = torch.nn.Parameter(head)  # not tied, as in FLAN-T5
    model.config.tie_word_embeddings = False
    return model


class IdTokenizer:
    """A tokenizer for inputs of ids."""

    def __init__(self, n_words: int, end: int | None) -> None:
        self.n_words, self.eos_token_id = n_words, end

    def __len__(self) -> int:
        return self.n_words

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self.n_words)}


def random_documents(n: int, sizes: Sizes) -> Tensor:
    """Return random ids with the lengths of news: half of the documents are truncated at the longest. (n, S)"""
    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(sizes.longest // 5, 9 * sizes.longest // 5, (n, 1), generator=generator)
    ids = torch.randint(3, sizes.n_words, (n, sizes.longest), generator=generator)
    return ids.masked_fill(torch.arange(sizes.longest) >= lengths, PADDING)


def read_documents(source: str, model: TextModel, n: int, sizes: Sizes) -> Tensor:
    """Read the first `n` documents of a file."""
    corpus = read_corpus(source, split="test")
    if len(corpus) < n:
        raise DataError(
            f"{corpus.name} has {len(corpus)} documents, the benchmark needs {n}; use a larger file or --quick"
        )
    longest = min(sizes.longest, model.max_input_tokens(sizes.length) or sizes.longest)
    return encode(model.tokenizer, [one.document for one in corpus.documents[:n]], PROMPT, longest)[0]


def decoding_of(choice: Choice) -> Decoding:
    """Load or make the pair and the documents."""
    sizes, device = choice.sizes, choose_device(choice.device)
    with quiet():
        if choice.pair is None:
            pair = random_pair(sizes, device, choice.dtype)
        else:
            pair = load_pair(*choice.pair, device=device, dtype=choice.dtype)
    n, model = max(sizes.n_documents.values()), pair.predictor.model
    if choice.documents is None:
        inputs = random_documents(n, replace(sizes, n_words=min(pair.predictor.n_tokens, pair.expert.n_tokens)))
    else:
        inputs = read_documents(choice.documents, model, n, sizes)
    examples = Examples(inputs, inputs[:, :0], torch.arange(n)).to(device)
    return Decoding(pair, examples, SequenceSpec(sizes.length, pair.predictor.end), n)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the advice that Transformers logs about its own calls."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# -- the benchmark -------------------------------------------------------------------------------------------------


def text(bench: Bench, choice: Choice) -> list[Row]:
    """Compare both ends with `generate`, and branching with one run per hand-off."""
    transformers()
    bench.log("preparing a pair" if choice.pair is None else "loading the pair")
    whole, is_exact = decoding_of(choice), choice.dtype == "float32"
    with quiet(), torch.no_grad():
        bench.log("both ends: comparing")
        ends = compare(replace(whole, batch=min(8, len(whole.examples))), is_exact=is_exact)
        few = whole.examples.select(torch.arange(min(choice.sizes.n_labelled, len(whole.examples))))
        return [_hand_offs(bench, replace(whole, examples=few), ends, is_exact=is_exact)]


def _hand_offs(bench: Bench, some: Decoding, ends: str, *, is_exact: bool) -> Row:
    """Compare all hand-offs by branching with one run of the expert for each. `ends`: how both ends compare."""
    expert, drafts = some.pair.expert, draft(some.pair.predictor, some.examples, some.spec).sequences
    kept = torch.arange(some.spec.length, device=drafts.tokens.device)
    passes = {"ours": 0, "theirs": 0}

    def counted(name: str, way: Callable[[], Tensor]) -> Tensor:
        def count(*_: Any) -> None:
            passes[name] += 1

        handle = expert.model.model.register_forward_pre_hook(count)
        try:
            return way()
        finally:
            handle.remove()

    def together() -> Tensor:
        completed, _ = branch_out(expert, some.examples, drafts, kept, some.spec)
        return torch.where(completed.mask(), completed.tokens, 0)

    def one_by_one() -> Tensor:
        runs = [
            expert.complete(some.examples, drafts.truncate(torch.full_like(drafts.lengths, k)), some.spec)
            for k in kept.tolist()
        ]
        return torch.stack([torch.where(run.mask(), run.tokens, 0) for run in runs], 1).flatten(0, 1)

    bench.log("hand-offs: comparing")
    pair = (counted("ours", together).cpu(), counted("theirs", one_by_one).cpu())
    same = f"{require_same('tokens of all hand-offs', pair, rounding=0.0 if is_exact else 1.0)}; {ends}"
    seconds = bench.race(ours=together, theirs=one_by_one)
    runs, n = branch_out(expert, some.examples, drafts, kept, some.spec)[1], int(drafts.lengths.sum())
    note = (
        f"{runs:,} completions written instead of {n:,}; {passes['ours']:,} passes of the expert, over the branches of "
        f"{expert.examples_at_once} documents each, instead of {passes['theirs']:,} over all documents"
    )
    what = f"all hand-offs of {len(drafts)} documents, one run of the expert for each"
    return Row.faster("text", what, seconds["ours"], seconds["theirs"], same, note)


def search_threshold(scores: Tensor, share_at: Callable[[float], float]) -> tuple[float, float]:
    """Return the quantile of the scores whose share is nearest to the budget, and that share."""
    level, tried = 1 - BUDGET, []
    for _ in range(TRIALS):
        threshold = float(scores.quantile(level))
        share = share_at(threshold)
        tried.append((abs(share - BUDGET), threshold, share))
        if abs(share - BUDGET) <= NEAR:
            break
        level = min(max(level + share - BUDGET, 0.0), 1.0)
    return min(tried)[1:]


def compare(some: Decoding, *, is_exact: bool) -> str:
    """Compare both ends of the loop and the expert alone with `generate`."""
    never, always = (Threshold(Confidence("uncertainty"), at) for at in (torch.inf, -torch.inf))
    small, large = (some.generate(model) for model in some.pair.models)
    ours, theirs = torch.cat([some.roll(never), some.roll(always), some.expert()]), torch.cat([small, large, large])
    return require_same("tokens of either model alone", (ours.cpu(), theirs.cpu()), rounding=0.0 if is_exact else 1.0)


def provenance(choice: Choice) -> dict[str, Any]:
    """Return what the rows of this benchmark depend on, besides the sizes."""
    device = choose_device(choice.device)
    return {
        "pair": "made" if choice.pair is None else [_name(one) for one in choice.pair],
        "documents": "random" if choice.documents is None else _name(choice.documents),
        "device": machine(device)["device"],
        "dtype": choice.dtype,
        "transformers": transformers().__version__,
    }


def _name(source: str) -> str:
    """Return the last part of a path: results do not contain paths of this machine."""
    return Path(source).name if Path(source).exists() else source


BENCHMARKS: Benchmarks = {"text": (text, "all hand-offs of documents, labelled together")}
