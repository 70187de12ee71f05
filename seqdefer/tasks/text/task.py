"""Text tasks: documents in, short texts out, by any pair of Hugging Face models; `xsum` is the paper's summarization.

The token loss is 1 if the reference does not contain the token, whoever writes it; every reference contains the end.
In the paper, a repeated token is right if the reference contains it at all (`paper`). Like ROUGE, the default
(`clipped`) counts it at most as often as the reference does, so repetition earns no credit.
The sequence loss is 100 x (1 - ROUGE-1), on words as in the package rouge-score or on token ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from seqdefer.errors import OptionError
from seqdefer.hyperparameters import ATTENTION, Settings, published_lstm, published_perceptron
from seqdefer.interfaces import Expert, Served, SplitName, Task, TaskEntry
from seqdefer.progress import Meter
from seqdefer.recipes import Recipe, published
from seqdefer.registry import EXPERTS, find_plugins
from seqdefer.remote.client import EndpointClient, is_url, require_extra
from seqdefer.report.markup import NBSP, number
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.common.token_drawing import TokenDrawing, TokenExample, draw_tokens
from seqdefer.tasks.text.codec import END_SIGN, TextCodec
from seqdefer.tasks.text.data import Document, Fields, filter_by_words, make_splits, read_corpus
from seqdefer.tasks.text.loading import load_text_model
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.options import TextOptions
from seqdefer.tasks.text.pairs import MixedPair, TextPair, TextPredictor, load_pair
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.remote import ExpertCallsWarning
from seqdefer.tasks.text.rouge import References, in_reference, rouge1_of_ids
from seqdefer.types import Examples, Rollout, Sequences, SequenceSpec

PARTS: tuple[SplitName, ...] = ("train", "validation", "test")
MAX_DRAWN_LETTERS = 300  # of a document in the report
# Bytes of cached encoder states per model: labelling reads the same documents again and again.
ENCODER_CACHE_BYTES = {"cpu": 2**30, "cuda": 2**33}
GPU_MEMORY_SHARE = 8  # the cache takes at most 1/8 of a GPU's free memory


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
    ) -> None:
        self.name, self.options, self.source = name, options, source
        self.predictor, self.expert = pair.predictor, pair.expert
        self.token_rule = options.token_loss
        self.has_published_figures = options.length == 20  # areas under curves of other lengths do not compare
        self.max_loss = 100.0
        self.loss_unit = f"100 x (1 - ROUGE-1{' on token ids' if options.rouge == 'ids' else ''})"
        self.spec = SequenceSpec(options.length, pair.predictor.end)
        self.tokenizer = pair.predictor.model.tokenizer
        # An example's id is its index here. The test comes first, so that its labels stay when train grows.
        self.documents = [one for part in reversed(PARTS) for one in parts[part]]
        self.references = References([one.summary for one in self.documents])
        self.codec = codec_of(options, pair)
        self.parts: dict[SplitName, Examples] = {}
        first = 0
        inputs, targets = self._encode(pair)
        for part in reversed(PARTS):
            ids = torch.arange(first, first + len(parts[part]))
            self.parts[part] = Examples(inputs[ids], targets[ids], ids)
            first += len(ids)

    def _encode(self, pair: TextPair | MixedPair) -> tuple[Tensor, Tensor]:
        """Return inputs (n, S) and references (n, R), padded with PADDING."""
        texts = [one.document for one in self.documents]
        inputs, self.n_truncated = self.codec.read(texts, stacklevel=5)
        end = [] if self.spec.end is None else [self.spec.end]
        # A decoder-only model continues a prompt, so its first word begins with a space.
        space = "" if pair.predictor.model.is_encoder_decoder else " "
        ids = self.tokenizer([space + one.summary for one in self.documents], add_special_tokens=False, verbose=False)
        targets = [torch.tensor([*row, *end], dtype=torch.long) for row in ids["input_ids"]]
        return inputs, pad_sequence(targets, batch_first=True, padding_value=PADDING)

    def split(self, name: SplitName) -> Examples:
        return self.parts[name]

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        if self.options.rouge == "ids":
            references = Sequences(examples.targets, (examples.targets != PADDING).sum(1))
            special = [] if self.spec.end is None else [self.spec.end]
            scores = rouge1_of_ids(sequences, references, special)
        else:
            scores = self._rouge_of_words(examples, sequences)
        return 100 * (1 - scores).float()

    def _rouge_of_words(self, examples: Examples, sequences: Sequences) -> Tensor:
        """Return ROUGE-1 on words. Sweeps and hand-offs repeat texts, so each distinct one is scored once."""
        keys = torch.cat([examples.ids[:, None].to(sequences.tokens), _masked_tokens(sequences)], 1)
        distinct, copies = keys.unique(dim=0, return_inverse=True)
        rows = distinct.tolist()
        texts = self.tokenizer.batch_decode(
            [[token for token in row[1:] if token != PADDING] for row in rows], skip_special_tokens=True
        )
        scores = self.references.score(texts, [row[0] for row in rows])
        return scores.to(sequences.tokens.device)[copies]

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        if self.options.token_loss == "paper":
            return (~in_reference(tokens, examples.targets)).float()
        wanted = (examples.targets == tokens[:, None]).sum(1)
        return (wanted <= (_masked_tokens(prefixes) == tokens[:, None]).sum(1)).float()

    def loss_key(self, examples: Examples) -> str:
        if self.options.rouge == "ids":
            return ""
        return fingerprint(*(self.documents[place].summary for place in examples.ids.tolist()))

    def describe(self) -> dict[str, str]:
        cut = f", {self.n_truncated} cut at {self.codec.max_tokens} tokens" if self.n_truncated else ""
        return {
            "data": f"{self.source}{cut}",
            "documents": ", ".join(f"{name} {len(self.parts[name])}" for name in PARTS),
            "predictor": f"{self.predictor.name} ({self.predictor.fingerprint})",
            "expert": f"{getattr(self.expert, 'name', self.options.expert)} ({self.expert.fingerprint})",
        }

    def draw(self, examples: Examples, rollouts: Mapping[float, Rollout]) -> str:
        losses = {
            budget: self.sequence_loss(examples.to(rollout.sequences.tokens.device), rollout.sequences).tolist()
            for budget, rollout in rollouts.items()
        }
        drawn = []
        for row, place in enumerate(examples.ids.tolist()):
            drawings = [
                self._drawing(rollout, row, budget, losses[budget][row]) for budget, rollout in rollouts.items()
            ]
            drawn.append(
                TokenExample(_shorten(self.documents[place].document), self.documents[place].summary, drawings)
            )
        return draw_tokens(drawn, legend=[f"{END_SIGN} the end of a text"])

    def _drawing(self, rollout: Rollout, row: int, budget: float, loss: float) -> TokenDrawing:
        n = int(rollout.sequences.lengths[row])
        pieces = self.codec.pieces(rollout.sequences.tokens[row, :n].tolist())
        authors, scores = rollout.by_expert[row, :n].tolist(), rollout.scores[row, :n].tolist()
        caption = f"ROUGE-1 {number(100 - loss, 0)}, {sum(authors)} of {n} by the expert"
        return TokenDrawing(pieces, authors, scores, f"budget {number(100 * budget, 0)}{NBSP}%", caption)


def _masked_tokens(sequences: Sequences) -> Tensor:
    """Return tokens (B, L) with PADDING after the end."""
    return sequences.tokens.masked_fill(~sequences.mask(), PADDING)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_DRAWN_LETTERS else f"{text[: MAX_DRAWN_LETTERS - 1]}…"


# -- preparing -----------------------------------------------------------------------------------------------------


def prepare(name: str, options: TextOptions, device: torch.device, meter: Meter) -> TextTask:
    """Read and split the documents and load the models."""
    _require(options, "predictor", "expert", "train")
    with meter.stage("read the documents", 1) as advance:
        fields = Fields(options.document_field, options.summary_field)
        train = read_corpus(options.train, fields=fields, split="train")
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
    _warn_about_calls(options, splits.parts)
    return TextTask(name, options, _load(options, device, meter), splits.parts, splits.source)


def _warn_about_calls(options: TextOptions, parts: Mapping[SplitName, Sequence[Document]]) -> None:
    if not is_url(options.expert):
        return
    n_documents = len(parts["train"]) + len(parts["validation"])
    what = f"{options.length} hand-offs of {n_documents:,} documents"
    if options.expert_by_token:
        what += "; rollouts, for TokenwiseModel, have as many tokens each, and a call each unless read in chunks"
    warnings.warn(
        f"labelling may call {options.expert} {n_documents * options.length:,} times ({what}), and seqdefer run labels "
        "the test documents, too; answers are stored; lower --train-documents and --validation-documents to make fewer "
        "calls",
        ExpertCallsWarning,
        stacklevel=3,
    )


def _require(options: TextOptions, *names: str) -> None:
    for name in names:
        if not getattr(options, name):
            raise OptionError(f"--{name} is missing; give {'a model' if name != 'train' else 'documents'}")


def codec_of(options: TextOptions, pair: TextPair | MixedPair) -> TextCodec:
    return TextCodec(
        pair,
        prefix=options.prefix,
        suffix=options.suffix,
        length=options.length,
        input_tokens=options.input_tokens,
        field=options.document_field,
    )


def serve(options: TextOptions, folder: Path, device: torch.device, meter: Meter) -> Served:
    """Load the pair alone, to serve users' texts."""
    _require(options, "predictor", "expert")
    pair = _load(options, device, meter)
    spec = SequenceSpec(options.length, pair.predictor.end)
    return Served(pair.predictor, pair.expert, spec, codec_of(options, pair))


def _load(options: TextOptions, device: torch.device, meter: Meter) -> TextPair | MixedPair:
    plugin = find_plugins(EXPERTS).get(f"text.{options.expert}")
    if is_url(options.expert):
        require_extra()
    with meter.stage("load the models", 1) as advance:
        how: dict[str, Any] = {"device": device, "dtype": options.dtype, "cache_bytes": _encoder_cache_bytes(device)}
        pair: TextPair | MixedPair
        if is_url(options.expert):
            pair = _remote_pair(load_text_model(options.predictor, **how), options)
        elif plugin is not None:
            predictor = TextPredictor(load_text_model(options.predictor, **how), shown=options.shown)
            expert: Expert = plugin.load()(options, predictor, device)
            pair = MixedPair(predictor, expert)
        else:
            pair = load_pair(options.predictor, options.expert, shown=options.shown, **how)
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


def _prepare_text(options: TextOptions, folder: Path, device: torch.device, meter: Meter) -> TextTask:
    return prepare("text", options, device, meter)


def _small(options: TextOptions) -> TextOptions:
    return replace(options, train_documents=120, validation_documents=30, test_documents=100)


# FLAN-T5 was trained on XSum among other tasks, has safetensors weights and one vocabulary for all sizes.
_XSUM = TextOptions(
    predictor="google/flan-t5-small",
    expert="google/flan-t5-base",
    train="EdinburghNLP/xsum/train",
    test="EdinburghNLP/xsum/test",
    prefix="summarize: ",
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
)
