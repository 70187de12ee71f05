"""The benchmark of decoding with a pair of Hugging Face models: interleaved for a budget, against either model alone.

All ways write about the same documents. In float32 their tokens are compared first: never deferring must be the
predictor's own `generate`, always deferring the expert's, token for token. In half precision batches of different
shapes round too differently for that, and the share of equal tokens is told instead.

What interleaving costs is held against a bound: the predictor alone, one encoding of the documents by the expert, and
of the expert's time the share of tokens that it writes. A second row takes that share of its decoding only, which
leaves out that keys and values of the documents are made once, and tokens read, however few are deferred. Where
documents are long and what is written is short, encoding is most of the expert's time, and predictor and encoding
together may well take longer than the expert alone.

Without `--pair` two T5s are made on the spot. Their weights are random, which changes what is written, not what it
costs, with three things seen to: the end token is never the likeliest, so that every sequence has the full length; the
expert has the predictor's layers and adds some that say little, so that the two agree about as often as real pairs do,
on which assisted generation lives; and documents differ in length as news does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Row, Seconds, require_same
from benchmarks.weather import SEED, Bench
from seqdefer.budgets.policies import Threshold
from seqdefer.engine.interleaved import HandOff, draft, roll_out
from seqdefer.environment import choose_device, machine
from seqdefer.errors import DataError, MissingExtraError
from seqdefer.interfaces import Policy
from seqdefer.labels.branches import branch_out
from seqdefer.rejectors.confidence import Confidence
from seqdefer.tasks.text.codec import encode
from seqdefer.tasks.text.data import read_corpus
from seqdefer.tasks.text.encoder_cache import EncoderCache
from seqdefer.tasks.text.models import TextModel, text_model, transformers
from seqdefer.tasks.text.pairs import TextPair, load_pair
from seqdefer.tasks.text.passes import PADDING, pad_left
from seqdefer.types import Examples, Rollout, Sequences, SequenceSpec

BUDGET = 0.2
NEAR = 0.005  # a share so close to the budget will do; the closest one of so many trials, if none is
TRIALS = 5
PROMPT = "summarize: "
REMEMBERED = 2**31  # bytes of encoder states, while the threshold is looked for


@dataclass(frozen=True)
class Sizes:
    """How much is decoded, and how large the pair is that is made where none is given."""

    n_documents: Mapping[int, int]  # for each batch size: how many of the documents, the first ones
    n_asked: Mapping[int, int]  # for each number of clients of a server: documents that they ask about
    longest: int = 448  # tokens of a document
    length: int = 20  # tokens that are written
    n_labelled: int = 4  # documents whose hand-offs are all written
    n_layers: tuple[int, int] = (2, 8)  # of predictor and expert: so many in the encoder, so many in the decoder
    more_layers: tuple[int, ...] = (8, 24)  # of other predictors, beside a rejector
    width: int = 512
    n_heads: int = 6
    n_words: int = 32128


DEFAULT = Sizes(n_documents={1: 2, 8: 8, 32: 32}, n_asked={1: 8, 8: 16, 32: 32})
QUICK = Sizes(
    n_documents={1: 1, 4: 4}, n_asked={1: 2, 4: 4}, n_labelled=2, longest=128, more_layers=(), width=256, n_words=8064
)


@dataclass(frozen=True)
class Choice:
    """What the options of the command line say. No pair: one is made; no documents: random ones."""

    pair: tuple[str, str] | None = None
    documents: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    sizes: Sizes = DEFAULT


# -- the pair and the documents ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoding:
    """Documents, a pair, and the ways to write about all of them, `batch` at a time. Ways return tokens (n, L)."""

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
        return self.over(lambda some: self._roll(policy, some).sequences.tokens)

    def _roll(self, policy: Policy[Any], some: Examples) -> Rollout:
        return roll_out(self.pair.predictor, self.pair.expert, some, policy, self.spec)

    def predictor(self) -> Tensor:
        def way(some: Examples) -> Tensor:
            keep_all = HandOff(torch.full((len(some),), self.spec.length))
            return roll_out(self.pair.predictor, None, some, keep_all, self.spec).sequences.tokens

        return self.over(way)

    def expert(self) -> Tensor:
        def way(some: Examples) -> Tensor:
            blank = torch.zeros(len(some), self.spec.length, dtype=torch.long, device=self.pair.expert.device)
            written = self.pair.expert.complete(some, Sequences(blank, blank[:, 0]), self.spec)
            return torch.where(written.mask(), written.tokens, 0)

        return self.over(way)

    def encoding(self) -> Tensor:
        """What the expert's encoder makes of the documents; without an encoder, what it makes of prompts. (n,)"""
        expert = self.pair.expert
        if not expert.model.is_encoder_decoder:
            return self.over(lambda some: expert.next(expert.start(some), torch.arange(len(some)))[0])
        encoder = expert.model.model.get_encoder()

        def encode(inputs: Tensor) -> Tensor:
            states: Tensor = encoder(inputs.clamp(min=0), (inputs != PADDING).long()).last_hidden_state
            return states

        return self.over(lambda some: EncoderCache().get(some.inputs, encode)[:, 0, 0])

    def generate(self, model: TextModel, **options: Any) -> Tensor:
        return self.over(lambda some: generate(model, some.inputs, self.spec, **options))

    def assisted(self) -> Tensor:
        """Transformers assists one document at a time, and no more."""
        one_by_one, assistant = replace(self, batch=1), self.pair.predictor.model.model
        return one_by_one.generate(self.pair.expert.model, assistant_model=assistant)

    def share(self, threshold: float) -> float:
        return self._roll(Threshold(Confidence("uncertainty"), threshold), self.examples).share

    def uncertainty(self) -> Tensor:
        """Of every token that the predictor writes alone. (tokens,)"""
        drafted = draft(self.pair.predictor, self.examples, self.spec)
        return drafted.uncertainty[drafted.sequences.mask()]

    def agreement(self, by_expert: Tensor) -> float:
        """How often the predictor writes what the expert did, after what the expert wrote before: tokens (n, L)."""
        state, _ = self.pair.predictor.start(self.examples.inputs)
        same, n = 0, 0
        for column in by_expert.unbind(1):
            stands = column != 0
            same += int((self.pair.predictor.propose(state).tokens == column)[stands].sum())
            n += int(stands.sum())
            state = self.pair.predictor.append(state, column)
        return same / n


def generate(model: TextModel, inputs: Tensor, spec: SequenceSpec, **options: Any) -> Tensor:
    """What transformers writes greedily, padded as its tokenizers pad. (n, L), 0 past the end"""
    given = (inputs != PADDING).sum(1)
    inputs = inputs[:, : int(given.max())]
    if not model.is_encoder_decoder:
        inputs = pad_left(inputs)
    options |= {"attention_mask": (inputs != PADDING).long(), "max_new_tokens": spec.length, "do_sample": False}
    written = model.model.generate(input_ids=inputs.clamp(min=0), **options)
    written = written[:, 1 if model.is_encoder_decoder else inputs.shape[1] :]
    return _up_to_end(torch.nn.functional.pad(written, (0, spec.length - written.shape[1])), model, spec)


def _up_to_end(tokens: Tensor, model: TextModel, spec: SequenceSpec) -> Tensor:
    """Every end token becomes that of the pair, and 0 what stands after it."""
    is_end = torch.isin(tokens, torch.tensor(model.ends, dtype=tokens.dtype, device=tokens.device))
    tokens = tokens.masked_fill(is_end, 0 if spec.end is None else spec.end)
    return tokens.masked_fill((is_end.cumsum(1) - is_end.long()) > 0, 0)


def made_pair(sizes: Sizes, device: torch.device, dtype: str) -> TextPair:
    """Two T5s with random weights; see above for what they have in common."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        predictor, expert = (_made_model(sizes, n_layers) for n_layers in sizes.n_layers)
    expert.load_state_dict(predictor.state_dict(), strict=False)
    for name, weight in expert.named_parameters():
        is_added = ".block." in name and int(name.split(".")[2]) >= sizes.n_layers[0]
        if is_added and name.endswith((".o.weight", ".wo.weight")):
            weight.data *= 0.15
    words = _MadeWords(sizes.n_words)
    small, large = (text_model(model.to(device, getattr(torch, dtype)), words) for model in (predictor, expert))
    return TextPair.of(small, large)


def _made_model(sizes: Sizes, n_layers: int) -> Any:
    config = transformers().T5Config(
        vocab_size=sizes.n_words, d_model=sizes.width, d_ff=2 * sizes.width, num_heads=sizes.n_heads, d_kv=64,
        num_layers=n_layers, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers().T5ForConditionalGeneration(config)
    head = torch.randn(sizes.n_words, sizes.width)
    head[config.eos_token_id] = 0  # others are above 0, so that this one is never the likeliest
    model.lm_head.weight = torch.nn.Parameter(head)  # of its own, as in FLAN-T5
    model.config.tie_word_embeddings = False
    return model


class _MadeWords:
    """As much of a tokenizer as a pair needs that is given ids."""

    eos_token_id = 1

    def __init__(self, n_words: int) -> None:
        self.n_words = n_words

    def __len__(self) -> int:
        return self.n_words

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self.n_words)}


def made_documents(n: int, sizes: Sizes) -> Tensor:
    """Random ids. Lengths like those of news: half of the documents are cut at the longest. (n, S)"""
    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(sizes.longest // 5, 9 * sizes.longest // 5, (n, 1), generator=generator)
    ids = torch.randint(3, sizes.n_words, (n, sizes.longest), generator=generator)
    return ids.masked_fill(torch.arange(sizes.longest) >= lengths, PADDING)


def read_documents(source: str, model: TextModel, n: int, sizes: Sizes) -> Tensor:
    corpus = read_corpus(source, split="test")
    if len(corpus) < n:
        raise DataError(f"{corpus.name} holds {len(corpus)} documents; the benchmark needs {n}")
    longest = min(sizes.longest, model.max_input_tokens(sizes.length) or sizes.longest)
    return encode(model.tokenizer, [one.document for one in corpus.documents[:n]], PROMPT, longest)[0]


def decoding_of(choice: Choice) -> Decoding:
    sizes, device = choice.sizes, choose_device(choice.device)
    with quiet():
        if choice.pair is None:
            pair = made_pair(sizes, device, choice.dtype)
        else:
            pair = load_pair(*choice.pair, device=device, dtype=choice.dtype)
    n, model = max(sizes.n_documents.values()), pair.predictor.model
    if choice.documents is None:
        inputs = made_documents(n, replace(sizes, n_words=min(pair.predictor.n_tokens, pair.expert.n_tokens)))
    else:
        inputs = read_documents(choice.documents, model, n, sizes)
    examples = Examples(inputs, inputs[:, :0], torch.arange(n)).to(device)
    return Decoding(pair, examples, SequenceSpec(sizes.length, pair.predictor.end), n)


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers logs advice on its own calls."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# -- the benchmark -------------------------------------------------------------------------------------------------


def text(bench: Bench, choice: Choice) -> list[Row]:
    try:
        transformers()
    except MissingExtraError as missing:
        if choice.pair is not None:
            raise
        bench.tell(f"left out: {missing}")
        return []
    bench.tell("making a pair" if choice.pair is None else "loading the pair")
    whole, rows = decoding_of(choice), []
    with quiet(), torch.no_grad():
        for batch, n in choice.sizes.n_documents.items():
            some = replace(whole, examples=whole.examples.select(torch.arange(n)), batch=batch)
            rows += _rows(bench, some, is_exact=choice.dtype == "float32")
        few = whole.examples.select(torch.arange(min(choice.sizes.n_labelled, len(whole.examples))))
        rows.append(_hand_offs(bench, replace(whole, examples=few), is_exact=choice.dtype == "float32"))
    return rows


def _hand_offs(bench: Bench, some: Decoding, *, is_exact: bool) -> Row:
    """All hand-offs of the documents, branching, against one run of the expert for each."""
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

    bench.tell("hand-offs: comparing")
    pair = (counted("ours", together).cpu(), counted("theirs", one_by_one).cpu())
    same = require_same("tokens of all hand-offs", pair, rounding=0.0 if is_exact else 1.0)
    seconds = bench.race(ours=together, theirs=one_by_one)
    runs, n = branch_out(expert, some.examples, drafts, kept, some.spec)[1], int(drafts.lengths.sum())
    note = (
        f"{runs:,} completions written instead of {n:,}; {passes['ours']:,} passes of the expert, over the branches of "
        f"{expert.examples_at_once} documents each, instead of {passes['theirs']:,} over all documents"
    )
    what = f"all hand-offs of {len(drafts)} documents, one run of the expert for each"
    return Row.faster("text", what, seconds["ours"], seconds["theirs"], same, note)


def _rows(bench: Bench, some: Decoding, *, is_exact: bool) -> list[Row]:
    bench.tell(f"batches of {some.batch}: a threshold for {BUDGET:.0%}")
    threshold, share = threshold_for_budget(some)
    bench.tell(f"batches of {some.batch}: comparing")
    same, expected = compare(some, is_exact=is_exact)
    policy, expert = Threshold(Confidence("uncertainty"), threshold), some.pair.expert.model
    assisted: list[Tensor] = []  # what it wrote is looked at when it is timed: it is the slowest way
    seconds = bench.race(
        interleaved=lambda: some.roll(policy),
        generate=lambda: some.generate(expert),
        expert=some.expert,
        predictor=some.predictor,
        encoding=some.encoding,
        assisted=lambda: assisted.append(some.assisted()),
    )
    agreement = f"the predictor agrees with {some.agreement(expected):.0%} of the expert's tokens"
    ours, n = seconds["interleaved"], len(some.examples)
    encoding, decoding = seconds["encoding"], seconds["expert"] - seconds["encoding"]
    bounds = [seconds["predictor"] + encoding + share * part for part in (seconds["expert"], decoding)]
    batches = f"batches of {some.batch}"
    alone = "document by document, its only way" if some.batch > 1 else "its only way"

    def times(what: str, bound: Seconds, note: str = "") -> Row:
        parts = {"ours": ours.tolist(), "theirs": bound.tolist()}
        return Row.of("text", what, "times its cost", ours / bound, same=same, note=note, seconds=parts)

    def against(what: str, way: str, same: str = same, note: str = "") -> Row:
        return Row.faster("text", what, ours, seconds[way], same, note)

    return [
        against(f"{batches}: the expert's generate ({n} documents, {share:.1%} deferred)", "generate", note=agreement),
        against(f"{batches}: the expert alone, by our engine", "expert"),
        against(f"{batches}: the predictor alone, by our engine", "predictor"),
        against(f"{batches}: assisted generation ({alone})", "assisted", same_if_assisted(assisted[-1], expected)),
        times(
            f"{batches}: THE BOUND, predictor + one encoding by the expert + {share:.1%} of the expert's time",
            bounds[0],
            _parts(seconds, n),
        ),
        times(f"{batches}: the same with {share:.1%} of the expert's decoding only", bounds[1]),
    ]


def _parts(seconds: Mapping[str, np.ndarray], n: int) -> str:
    names = ("interleaved", "predictor", "encoding", "expert")
    return "ms a document: " + ", ".join(f"{name} {1000 * np.median(seconds[name]) / n:.3g}" for name in names)


def threshold_for_budget(some: Decoding) -> tuple[float, float]:
    """The uncertainty from which deferring spends the budget on these very documents, and the share it does spend.

    It is near the quantile of the draft's uncertainties that leaves so many above; a deferral changes what follows."""
    pair = some.pair
    # Documents are read again in every trial: a second pair around the same weights remembers what the encoders made.
    remembering = TextPair.of(_remembering(pair.predictor.model), _remembering(pair.expert.model))
    trial = replace(some, pair=remembering)
    met, level, tried = trial.uncertainty(), 1 - BUDGET, []
    for _ in range(TRIALS):
        threshold = float(met.quantile(level))
        share = trial.share(threshold)
        tried.append((abs(share - BUDGET), threshold, share))
        if abs(share - BUDGET) <= NEAR:
            break
        level = min(max(level + share - BUDGET, 0.0), 1.0)
    return min(tried)[1:]


def _remembering(model: TextModel) -> TextModel:
    return text_model(model.model, model.tokenizer, model.name, cache_bytes=REMEMBERED)


def compare(some: Decoding, *, is_exact: bool) -> tuple[str, Tensor]:
    """Both ends of the loop and the expert alone against `generate`; and what the expert generates (n, L)."""
    never, always = (Threshold(Confidence("uncertainty"), at) for at in (torch.inf, -torch.inf))
    expected = some.generate(some.pair.expert.model)
    ours = torch.cat([some.roll(never), some.roll(always), some.expert()])
    theirs = torch.cat([some.generate(some.pair.predictor.model), expected, expected])
    what, rounding = "tokens of either model alone", 0.0 if is_exact else 1.0
    return require_same(what, (ours.cpu(), theirs.cpu()), rounding=rounding), expected


def same_if_assisted(assisted: Tensor, expected: Tensor) -> str:
    """Transformers answers for these: told, not required."""
    return require_same("tokens of the expert", (assisted.cpu(), expected.cpu()), rounding=1.0)


def provenance(choice: Choice) -> dict[str, Any]:
    """What the rows of this benchmark depend on besides the sizes."""
    device = choose_device(choice.device)
    return {
        "pair": "made" if choice.pair is None else [_name(one) for one in choice.pair],
        "documents": "random" if choice.documents is None else _name(choice.documents),
        "device": machine(device)["device"],
        "dtype": choice.dtype,
        "transformers": transformers().__version__,
    }


def _name(source: str) -> str:
    """Of a file or folder the last part: where it lies on this machine is nobody's business."""
    return Path(source).name if Path(source).exists() else source


OURS: Mapping[str, str] = {"text": f"interleaved decoding, {BUDGET:.0%} of tokens by the expert, greedy"}
