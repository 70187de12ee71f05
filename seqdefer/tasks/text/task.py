"""Text tasks: documents in, short texts out, by any pair of Hugging Face models; `xsum` is the paper's summarization.

The sequence loss is 100 x (1 - ROUGE-1), on words as in the package rouge-score or on token ids, or that of another
metric (`seqdefer.tasks.common.metrics`). Losses of tokens follow from the metric (`seqdefer.tasks.text.token_losses`).
For ROUGE-1, a token loses 1 if the reference does not contain it, for both authors; every reference contains the end.
In the paper, a repeated token is right if the reference contains it at all (`paper`). Like ROUGE, the default
(`clipped`) counts it at most as often as the reference does, so repetition earns no credit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from seqdefer.errors import OptionError
from seqdefer.hyperparameters import ATTENTION, Settings, published_lstm, published_perceptron
from seqdefer.interfaces import Expert, Served, SplitName, Task, TaskEntry
from seqdefer.progress import Meter
from seqdefer.recipes import LearningSettings, Recipe, published
from seqdefer.registry import EXPERTS, find_plugins
from seqdefer.remote.client import EndpointClient, is_url, require_extra
from seqdefer.report.markup import number
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.common.cost_to_go import CostToGo
from seqdefer.tasks.common.metrics import Metric, get_metric
from seqdefer.tasks.common.token_drawing import TokenExample, draw_tokens, drawings_of
from seqdefer.tasks.text.codec import END_SIGN, TextCodec
from seqdefer.tasks.text.data import Document, Fields, filter_by_words, make_splits, read_corpus
from seqdefer.tasks.text.given import FUNCTION, Given
from seqdefer.tasks.text.loading import REVISION_SIGN
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.options import TextOptions
from seqdefer.tasks.text.pairs import MixedPair, TextPair, TextPredictor
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.remote import ExpertCallsWarning
from seqdefer.tasks.text.rouge import References, rouge1_of_ids
from seqdefer.tasks.text.token_losses import BY_REFERENCE, masked_tokens
from seqdefer.types import Examples, Rollout, Sequences, SequenceSpec

PARTS: tuple[SplitName, ...] = ("train", "validation", "test")
TextMeasure = Callable[[Sequence[str], Sequence[int]], Tensor]  # of texts, and of the documents they belong to
NOTHING_GIVEN = Given()
MAX_DRAWN_LETTERS = 300  # of a document in the report
# Bytes of cached encoder states per model: labelling reads the same documents again and again.
ENCODER_CACHE_BYTES = {"cpu": 2**30, "cuda": 2**33}
GPU_MEMORY_SHARE = 8  # the cache takes at most 1/8 of a GPU's free memory
DEFAULT_LENGTH = 20  # tokens, where no data says how many; the paper's
LENGTH_SHARE = 0.95  # of references that a length must hold
ROLLOUTS = LearningSettings.rollouts
MAX_LENGTH = 256  # that data may ask for: labels of longer texts take long, so users ask for them


class PromptWarning(UserWarning):
    """The prompt does not ask for an answer."""


class TextTask(Task):
    """Documents of three splits, to be summarized by a pair."""

    more_test_data = "give more documents (--test, --test-documents)"
    predictor: TextPredictor
    codec: TextCodec

    def __init__(
        self,
        name: str,
        options: TextOptions,
        pair: TextPair | MixedPair,
        parts: Mapping[SplitName, Sequence[Document]],
        source: str = "",
        metric: Metric | None = None,
    ) -> None:
        """`metric`: a function in the place of `options.metric`. Without `options.length`, references decide."""
        self.name, self.source = name, source
        self.predictor, self.expert = pair.predictor, pair.expert
        self.tokenizer = pair.predictor.model.tokenizer
        # An example's id is its index here. The test comes first, so that its labels stay when train grows.
        self.documents = [one for part in reversed(PARTS) for one in parts[part]]
        self.references = References([one.summary for one in self.documents])
        targets = self._encode_references(pair)
        n_test = len(parts["test"])
        self.options = replace(options, length=options.length or length_of(targets[n_test:]))
        self.spec = SequenceSpec(self.options.length or DEFAULT_LENGTH, pair.predictor.end)
        self._measure_by(metric or chosen_metric(options))
        # Areas under curves of other lengths do not compare.
        self.has_published_figures = self.spec.length == DEFAULT_LENGTH and self.metric is None
        self.codec = codec_of(self.options, pair)
        inputs, self.n_truncated = self.codec.read([one.document for one in self.documents], stacklevel=4)
        self.parts: dict[SplitName, Examples] = {}
        first = 0
        for part in reversed(PARTS):
            ids = torch.arange(first, first + len(parts[part]))
            self.parts[part] = Examples(inputs[ids], targets[ids], ids)
            first += len(ids)

    def _measure_by(self, metric: Metric | None) -> None:
        """Set what is reported and learned; None is ROUGE-1."""
        self.metric = metric
        by_metric = "clipped" if metric is None else metric.token_loss
        self.token_rule = by_metric if self.options.token_loss == "auto" else self.options.token_loss
        self.max_loss = 100.0 if metric is None else metric.max_loss
        counted = " on token ids" if self.options.rouge == "ids" else ""
        self.loss_unit = f"100 x (1 - ROUGE-1{counted})" if metric is None else metric.unit
        self.to_go = CostToGo(self.expert, self.spec, self.sequence_loss)

    def _encode_references(self, pair: TextPair | MixedPair) -> Tensor:
        """Return references (n, R), padded with PADDING."""
        end = [] if pair.predictor.end is None else [pair.predictor.end]
        # A decoder-only model continues a prompt, so its first word begins with a space.
        space = "" if pair.predictor.model.is_encoder_decoder else " "
        texts = [space + one.summary.strip() for one in self.documents]
        ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        targets = [torch.tensor([*row, *end], dtype=torch.long) for row in ids["input_ids"]]
        return pad_sequence(targets, batch_first=True, padding_value=PADDING)

    def split(self, name: SplitName) -> Examples:
        return self.parts[name]

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        if self.metric is not None:
            return self._losses_of_texts(examples, sequences, self._metric_losses).float()
        if self.options.rouge == "ids":
            references = Sequences(examples.targets, (examples.targets != PADDING).sum(1))
            special = [] if self.spec.end is None else [self.spec.end]
            scores = rouge1_of_ids(sequences, references, special)
        else:
            scores = self._losses_of_texts(examples, sequences, self.references.score)
        return 100 * (1 - scores).float()

    def _losses_of_texts(self, examples: Examples, sequences: Sequences, measure: TextMeasure) -> Tensor:
        """Measure what sequences say. Sweeps and hand-offs repeat texts, so each distinct one is measured once."""
        keys = torch.cat([examples.ids[:, None].to(sequences.tokens), masked_tokens(sequences)], 1)
        distinct, copies = keys.unique(dim=0, return_inverse=True)
        rows = distinct.tolist()
        # As outputs are decoded; without the space that begins what a decoder-only model writes.
        texts = [self.codec.decode([token for token in row[1:] if token != PADDING]).strip() for row in rows]
        measured = measure(texts, [row[0] for row in rows])
        return measured.to(sequences.tokens.device)[copies]

    def _metric_losses(self, texts: Sequence[str], rows: Sequence[int]) -> Tensor:
        assert self.metric is not None
        documents = [self.documents[row] for row in rows]
        references, inputs = [one.summary.strip() for one in documents], [one.document for one in documents]
        return torch.tensor(self.metric.losses(texts, references, inputs), dtype=torch.float64)

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        if self.token_rule == "to_go":
            return self.to_go.token_losses(examples, prefixes, tokens)
        return BY_REFERENCE[self.token_rule](examples, prefixes, tokens, self.spec)

    def loss_key(self, examples: Examples) -> str:
        documents = [self.documents[place] for place in examples.ids.tolist()]
        if self.metric is not None:
            texts = [text for one in documents for text in (one.document, one.summary)]
            return fingerprint(self.metric.key, self.loss_unit, *texts)
        own = [self.loss_unit] if self.token_rule == "to_go" else []
        return fingerprint(*own, *(one.summary for one in documents)) if own or self.options.rouge != "ids" else ""

    def describe(self) -> dict[str, str]:
        cut = f", {self.n_truncated} cut at {self.codec.max_tokens} tokens" if self.n_truncated else ""
        return {
            "data": f"{self.source}{cut}",
            "documents": ", ".join(f"{name} {len(self.parts[name])}" for name in PARTS),
            "predictor": f"{self.predictor.name} ({self.predictor.fingerprint})",
            "expert": f"{getattr(self.expert, 'name', self.options.expert)} ({self.expert.fingerprint})",
        }

    def draw(self, examples: Examples, rollouts: Mapping[float, Rollout]) -> str:
        documents = [self.documents[place] for place in examples.ids.tolist()]
        drawings = drawings_of(self, examples, rollouts, self.codec.pieces, self._quality)
        drawn = [
            TokenExample(_shorten(one.document), one.summary, row) for one, row in zip(documents, drawings, strict=True)
        ]
        return draw_tokens(drawn, legend=[f"{END_SIGN} the end of a text"])

    def _quality(self, loss: float) -> str:
        title = "ROUGE-1" if self.metric is None else self.metric.title
        return f"{title} {number(loss if self.max_loss is None else 100 - loss, 0)}"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_DRAWN_LETTERS else f"{text[: MAX_DRAWN_LETTERS - 1]}…"


def length_of(references: Tensor) -> int:
    """Return how many tokens hold nearly all references (n, R), MAX_LENGTH at most."""
    if not len(references):
        return DEFAULT_LENGTH
    lengths = (references != PADDING).sum(1).sort().values
    return max(1, min(int(lengths[math.ceil(LENGTH_SHARE * len(lengths)) - 1]), MAX_LENGTH))


def chosen_metric(options: TextOptions) -> Metric | None:
    """Return the metric that the options name, None for ROUGE-1."""
    if options.metric.startswith(FUNCTION):
        raise OptionError(f"--metric {options.metric} is a function of Python; give the function itself")
    return None if options.metric == "rouge1" else get_metric(options.metric)


# -- preparing -----------------------------------------------------------------------------------------------------


def prepare(
    name: str, options: TextOptions, device: torch.device, meter: Meter, given: Given = NOTHING_GIVEN
) -> TextTask:
    """Read and split the documents and load the models."""
    _require(options, "predictor", "expert", "train", given=given)
    if given.metric is None:
        chosen_metric(options)  # what is wrong with it is said before models are loaded
    with meter.stage("read the documents", 1) as advance:
        fields = Fields(options.document_field, options.summary_field)
        is_given = given.train is not None
        train = given.corpus(fields) if is_given else read_corpus(options.train, fields=fields, split="train")
        test = None if options.test is None else read_corpus(options.test, fields=fields, split="test")
        if options.max_words is not None:
            train = filter_by_words(train, options.max_words)
            test = None if test is None else filter_by_words(test, options.max_words)
        counts: dict[SplitName, int] = {
            "train": options.train_documents,
            "validation": options.validation_documents,
            "test": options.test_documents,
        }
        splits = make_splits(train, test, counts, options.seed)
        advance(1)
    pair = _load(options, device, meter, given)
    _warn_about_prompt(options, pair, train.documents)
    task = TextTask(name, _pinned(options, pair), pair, splits.parts, splits.source, given.metric)
    _warn_about_calls(task.options, splits.parts, to_go=task.token_rule == "to_go")
    return task


def _pinned(options: TextOptions, pair: TextPair | MixedPair) -> TextOptions:
    """Name models of the Hub with the revision that was loaded."""
    named = zip(("predictor", "expert"), pair.models, strict=False)
    pinned: dict[str, Any] = {role: model.name for role, model in named if REVISION_SIGN in model.name}
    return replace(options, **pinned)


def _warn_about_prompt(options: TextOptions, pair: TextPair | MixedPair, documents: Sequence[Document]) -> None:
    """Warn where a decoder-only model would write on in the document. Documents that all end alike end the prompt
    themselves."""
    endings = {one.document.rstrip()[-2:] for one in documents}
    if len(endings) > 1 and not (pair.predictor.model.is_encoder_decoder or options.suffix):
        warnings.warn(
            f"{pair.predictor.name} is decoder-only and continues its prompt: without a suffix, it writes on in the "
            "document; give what ends a document and asks for the answer: --suffix ' TL;DR:' (suffix= in Python)",
            PromptWarning,
            stacklevel=3,
        )


def _warn_about_calls(
    options: TextOptions, parts: Mapping[SplitName, Sequence[Document]], *, to_go: bool = False
) -> None:
    """Announce the most calls that labels take. By token, rollouts of a document meet up to 2^d prefixes of d tokens; a
    token loss `to_go` completes both tokens after each."""
    if not is_url(options.expert):
        return
    n_documents, length = sum(map(len, parts.values())), options.length or DEFAULT_LENGTH
    n_calls, what = length, f"{length} hand-offs"
    if options.expert_by_token:
        n_tokens = sum(min(2**place, ROLLOUTS) for place in range(length))
        n_calls += n_tokens * (3 if to_go else 1)
        what += f" and {n_tokens} tokens on {ROLLOUTS} rollouts{', each with 2 completions,' if to_go else ''}"
    what += f" of {n_documents:,} documents{', far fewer if it can be read in chunks' * options.expert_by_token}"
    warnings.warn(
        f"labelling may call {options.expert} {n_documents * n_calls:,} times ({what}); answers are stored; lower "
        f"{' and '.join(f'--{part}-documents' for part in parts if parts[part])} to make fewer calls",
        ExpertCallsWarning,
        stacklevel=3,
    )


def _require(options: TextOptions, *names: str, given: Given) -> None:
    for name in names:
        if not getattr(options, name) and getattr(given, name) is None:
            raise OptionError(f"--{name} is missing; give {'a model' if name != 'train' else 'documents'}")


def codec_of(options: TextOptions, pair: TextPair | MixedPair) -> TextCodec:
    return TextCodec(
        pair,
        prefix=options.prefix,
        suffix=options.suffix,
        length=options.length or DEFAULT_LENGTH,
        input_tokens=options.input_tokens,
        field=options.document_field,
    )


def serve(
    options: TextOptions, folder: Path, device: torch.device, meter: Meter, *, given: Given = NOTHING_GIVEN
) -> Served:
    """Load the pair alone, to serve users' texts."""
    _require(options, "predictor", "expert", given=given)
    pair = _load(options, device, meter, given)
    spec = SequenceSpec(options.length or DEFAULT_LENGTH, pair.predictor.end)
    return Served(pair.predictor, pair.expert, spec, codec_of(options, pair))


def _load(options: TextOptions, device: torch.device, meter: Meter, given: Given) -> TextPair | MixedPair:
    plugin = find_plugins(EXPERTS).get(f"text.{options.expert}")
    if is_url(options.expert):
        require_extra()
    with meter.stage("load the models", 1) as advance:
        how: dict[str, Any] = {"device": device, "dtype": options.dtype, "cache_bytes": _encoder_cache_bytes(device)}
        small = given.text_model("predictor", options.predictor, **how)
        pair: TextPair | MixedPair
        if is_url(options.expert):
            pair = _remote_pair(small, options)
        elif plugin is not None and given.expert is None:
            predictor = TextPredictor(small, shown=options.shown)
            expert: Expert = plugin.load()(options, predictor, device)
            pair = MixedPair(predictor, expert)
        else:
            how["device"] = small.device  # where a loaded model already is
            pair = TextPair.of(small, given.text_model("expert", options.expert, **how), options.shown)
        advance(1)
    return pair


def _remote_pair(predictor: TextModel, options: TextOptions) -> MixedPair:
    client = EndpointClient(options.endpoint())
    return MixedPair.of_remote(
        predictor, client, prompt=options.expert_prompt, by_token=options.expert_by_token, shown=options.shown
    )


def _encoder_cache_bytes(device: torch.device) -> int:
    limit = ENCODER_CACHE_BYTES.get(device.type, 0)
    return limit if device.type != "cuda" else min(limit, torch.cuda.mem_get_info(device)[0] // GPU_MEMORY_SHARE)


def _prepare_xsum(options: TextOptions, folder: Path, device: torch.device, meter: Meter) -> TextTask:
    if options.train != _XSUM.train and options.test == _XSUM.test:  # report on the user's own documents
        options = replace(options, test=None)
    return prepare("xsum", options, device, meter)


def _prepare_text(
    options: TextOptions, folder: Path, device: torch.device, meter: Meter, *, given: Given = NOTHING_GIVEN
) -> TextTask:
    return prepare("text", options, device, meter, given)


def bind(objects: Mapping[str, Any]) -> tuple[TaskEntry, dict[str, str]]:
    """Return the task `text` for objects in the place of options, and the options that stand for them."""
    given = Given.of(objects)
    entry = replace(TEXT, prepare=partial(_prepare_text, given=given), serve=partial(serve, given=given))
    return entry, given.names()


def _small(options: TextOptions) -> TextOptions:
    return replace(options, train_documents=120, validation_documents=30, test_documents=100)


# FLAN-T5 was trained on XSum among other tasks, has safetensors weights and one vocabulary for all sizes.
_XSUM = TextOptions(
    predictor="google/flan-t5-small",
    expert="google/flan-t5-base",
    train="EdinburghNLP/xsum/train",
    test="EdinburghNLP/xsum/test",
    prefix="summarize: ",
    length=DEFAULT_LENGTH,
)

# By token, plain facts and a perceptron (ours); the paper's LSTM on states is a choice.
BY_FACTS = Settings(
    learning_rate=2e-3, patience=10, architecture="mlp", layers=2, units=64, dropout=0.2, epochs=100,
    weight_decay=0.1, samples=800,
)  # fmt: skip
RECIPES = {
    "ours": Recipe(token=BY_FACTS, once=ATTENTION, cost=ATTENTION),
    "published": published(
        token=published_lstm(layers=3, units=128, samples=800, learning_rate=1e-3),
        once=published_perceptron(samples=2400),
        options={"shown": "states", "token_loss": "paper", "rouge": "words"},
        hand_offs=4,
        alpha=100 * 0.01 * 20,  # the paper's cost of a deferred token is 0.01 of 1 - ROUGE; of 20 tokens, ours in %
    ),
}

XSUM = TaskEntry(
    name="xsum",
    summary="summarize news in 20 tokens; the expert is a larger model of the same family",
    presets={
        "quick": _small(_XSUM),
        "paper": _XSUM,
        "paper-token": replace(_XSUM, max_words=14, train_documents=800, validation_documents=200),
        "paper-once": replace(_XSUM, max_words=20),
    },
    prepare=_prepare_xsum,
    recipes=RECIPES,
    quick_instances=20,
    serve=serve,
)

TEXT = TaskEntry(
    name="text",
    summary="any two Hugging Face models that share a vocabulary, or one and an endpoint, on your own documents",
    presets={"quick": _small(TextOptions()), "paper": TextOptions()},
    prepare=_prepare_text,
    recipes=RECIPES,
    quick_instances=20,
    serve=serve,
    bind=bind,
)
