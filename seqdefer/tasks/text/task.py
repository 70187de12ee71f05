"""Documents in, short texts out: any pair of Hugging Face models, any JSONL; `xsum` is the paper's summarization.

A token costs 1 if it is not one of its reference's tokens, whoever writes it (the end of a sequence is in every
reference). The paper counts every token that the reference has; ROUGE counts it as often as the reference has it, so
that who repeats himself wins nothing, and the token loss here does so too unless told otherwise.
The sequence loss is 100 x (1 - ROUGE-1): on words, as the package rouge-score counts them, or on token ids, which is
what the token loss sees.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from seqdefer.errors import OptionError, unknown
from seqdefer.interfaces import Served, SplitName, Task, TaskEntry
from seqdefer.progress import Meter
from seqdefer.remote.client import Endpoint, EndpointClient, check_url, is_url, require_extra
from seqdefer.report.markup import NBSP, number
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.common.options import check_ranges, option
from seqdefer.tasks.common.token_drawing import TokenDrawing, TokenExample, draw_tokens
from seqdefer.tasks.text.codec import END_SIGN, TextCodec
from seqdefer.tasks.text.data import Document, Fields, filter_by_words, make_splits, read_corpus
from seqdefer.tasks.text.loading import DTYPES, load_text_model
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.pairs import SHOWN, RemotePair, TextExpert, TextPair, TextPredictor, load_pair
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.remote import PROMPT, ExpertCallsWarning, RemoteExpert, RemoteTokenExpert, check_prompt
from seqdefer.tasks.text.rouge import References, in_reference, rouge1_of_ids
from seqdefer.types import Examples, Rollout, Sequences, SequenceSpec

ROUGE = ("words", "ids")
TOKEN_LOSSES = ("clipped", "paper")
PARTS: tuple[SplitName, ...] = ("train", "validation", "test")
SHOWN_LETTERS = 300  # of a document in the report
# Bytes of encoder states to keep, of each model: labelling comes back to the same documents again and again.
REMEMBERED = {"cpu": 2**30, "cuda": 2**33}
SHARE_TO_REMEMBER = 8  # one part in so many of a GPU's free memory, at most: the rest is for models and batches
RANGES = {
    "length": (1, 4096),
    "input_tokens": (1, 10**6),
    "train_documents": (1, 10**9),
    "validation_documents": (1, 10**9),
    "test_documents": (1, 10**9),
    "seed": (0, 2**63 - 1),
    "expert_seconds": (0, 3600),
    "expert_retries": (0, 100),
    "expert_at_once": (1, 256),
}


@dataclass(frozen=True)
class TextOptions:
    """What can be chosen about the task; the fields are its command-line options."""

    predictor: str = option("", "the small model: a name on the Hugging Face Hub, or a folder", is_path=True)
    expert: str = option(
        "",
        "the large model, of the same vocabulary: a name on the Hub, or a folder; or any model behind https://HOST/v1",
        is_path=True,
    )
    train: str = option(
        "", "documents to fit rejectors on: JSONL, plain or gzip, or a dataset's NAME[:CONFIG][/SPLIT]", is_path=True
    )
    test: str | None = option(
        None, "documents to report on, likewise; without it a part of --train is kept for that", is_path=True
    )
    document_field: str = option("document", "what the text to read is called in the data")
    summary_field: str = option("summary", "what the text that is wanted is called in the data")
    prefix: str = option("", "what the models expect before a document")
    suffix: str = option("", "what they expect after it, such as 'TL;DR:' for decoder-only models")
    length: int = option(20, "tokens to write, at most")
    input_tokens: int = option(448, "tokens of a document to read, at most")
    max_words: int | None = option(None, "leave out documents whose summary has more words")
    shown: str = option(
        "facts", "what rejectors see: facts of token and document, states of the predictor as in the paper, or both"
    )
    token_loss: str = option(
        "clipped", "a token is right if the reference has it: as often as it is written (clipped), or at all (paper)"
    )
    rouge: str = option("ids", "what ROUGE-1 counts: words, or ids of tokens")
    dtype: str = option("float32", "numbers of both models: float32, or bfloat16 or float16 on a GPU that is short")
    train_documents: int = option(2400, "documents to fit rejectors on, at most")
    validation_documents: int = option(600, "documents to stop and choose with, at most")
    test_documents: int = option(1000, "documents to report on, at most")
    seed: int = option(0, "seed of the split")
    expert_model: str = option("", "of an expert behind https://HOST/v1, the name of the model there")
    expert_prompt: str = option(PROMPT, "likewise, what it is sent; {input} is prefix, document and suffix")
    expert_seconds: float = option(30.0, "likewise, how long one try of a call may take")
    expert_retries: int = option(4, "likewise, further tries of a call, where it makes sense")
    expert_at_once: int = option(8, "likewise, calls under way together")
    expert_by_token: bool = option(False, "likewise, call it for every token, to fit TokenwiseModel")

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        if self.rouge not in ROUGE:
            raise unknown("way to count ROUGE", self.rouge, ROUGE)
        if self.shown not in SHOWN:
            raise unknown("choice of what rejectors see", self.shown, SHOWN)
        if self.token_loss not in TOKEN_LOSSES:
            raise unknown("token loss", self.token_loss, TOKEN_LOSSES)
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        check_prompt(self.expert_prompt)
        if is_url(self.expert):
            self.endpoint()
        elif self.expert_model or self.expert_by_token:
            raise OptionError(
                f"--expert-model and --expert-by-token need --expert https://HOST/v1; it is {self.expert!r:.80}"
            )

    def without_test(self) -> TextOptions:
        return replace(self, test=None, test_documents=1)  # the fewest there can be

    def endpoint(self) -> Endpoint:
        """Where the expert is, if it is elsewhere."""
        check_url(self.expert)
        if not self.expert_model:
            raise OptionError(f"--expert-model is missing: name the model at {self.expert:.80}")
        return Endpoint(self.expert, self.expert_model, self.expert_seconds, self.expert_retries, self.expert_at_once)


class TextTask(Task):
    predictor: TextPredictor
    expert: TextExpert | RemoteExpert | RemoteTokenExpert
    codec: TextCodec

    def __init__(
        self,
        name: str,
        options: TextOptions,
        pair: TextPair | RemotePair,
        parts: Mapping[SplitName, Sequence[Document]],
        source: str = "",
    ) -> None:
        self.name, self.options, self.source = name, options, source
        self.predictor, self.expert = pair.predictor, pair.expert
        self.token_rule = options.token_loss
        self.is_papers = options.length == 20  # areas of other lengths are other areas
        self.loss_unit = f"100 x (1 - ROUGE-1{' on token ids' if options.rouge == 'ids' else ''})"
        self.spec = SequenceSpec(options.length, pair.predictor.end)
        self.tokenizer = pair.predictor.model.tokenizer
        # An example's id is its place here. The test comes first: its labels stay when more is asked for training.
        self.documents = [one for part in reversed(PARTS) for one in parts[part]]
        self.references = References([one.summary for one in self.documents])
        self.codec = codec_of(options, pair)
        self.longest = self.codec.longest
        self.parts: dict[SplitName, Examples] = {}
        first = 0
        inputs, targets = self._encode(pair)
        for part in reversed(PARTS):
            ids = torch.arange(first, first + len(parts[part]))
            self.parts[part] = Examples(inputs[ids], targets[ids], ids)
            first += len(ids)

    def _encode(self, pair: TextPair | RemotePair) -> tuple[Tensor, Tensor]:
        """Inputs (n, S) and references (n, R), rows ending with PADDING where they are shorter."""
        texts = [one.document for one in self.documents]
        inputs, self.n_cut = self.codec.read(texts, stacklevel=5)
        end = [] if self.spec.end is None else [self.spec.end]
        # A decoder-only model goes on after a prompt: its first word has a space before it.
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
        """Sweeps and hand-offs come to the same texts again and again: each is decoded and counted once."""
        keys = torch.cat([examples.ids[:, None].to(sequences.tokens), _blanked(sequences)], 1)
        different, copies = keys.unique(dim=0, return_inverse=True)
        rows = different.tolist()
        texts = self.tokenizer.batch_decode(
            [[token for token in row[1:] if token != PADDING] for row in rows], skip_special_tokens=True
        )
        scores = self.references.score(texts, [row[0] for row in rows])
        return scores.to(sequences.tokens.device)[copies]

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        if self.options.token_loss == "paper":
            return (~in_reference(tokens, examples.targets)).float()
        wanted = (examples.targets == tokens[:, None]).sum(1)
        return (wanted <= (_blanked(prefixes) == tokens[:, None]).sum(1)).float()

    def loss_key(self, examples: Examples) -> str:
        if self.options.rouge == "ids":
            return ""
        return fingerprint(*(self.documents[place].summary for place in examples.ids.tolist()))

    def describe(self) -> dict[str, str]:
        cut = f", {self.n_cut} cut at {self.longest} tokens" if self.n_cut else ""
        return {
            "data": f"{self.source}{cut}",
            "documents": ", ".join(f"{name} {len(self.parts[name])}" for name in PARTS),
            "predictor": f"{self.predictor.name} ({self.predictor.fingerprint})",
            "expert": f"{self.expert.name} ({self.expert.fingerprint})",
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
                TokenExample(_shortened(self.documents[place].document), self.documents[place].summary, drawings)
            )
        return draw_tokens(drawn, legend=[f"{END_SIGN} the end of a text"])

    def _drawing(self, rollout: Rollout, row: int, budget: float, loss: float) -> TokenDrawing:
        n = int(rollout.sequences.lengths[row])
        pieces = self.codec.pieces(rollout.sequences.tokens[row, :n].tolist())
        authors, scores = rollout.by_expert[row, :n].tolist(), rollout.scores[row, :n].tolist()
        caption = f"ROUGE-1 {number(100 - loss, 0)}, {sum(authors)} of {n} by the expert"
        return TokenDrawing(pieces, authors, scores, f"budget {number(100 * budget, 0)}{NBSP}%", caption)


def _blanked(sequences: Sequences) -> Tensor:
    """Tokens with PADDING past the end. (B, L)"""
    return sequences.tokens.masked_fill(~sequences.mask(), PADDING)


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_LETTERS else f"{text[: SHOWN_LETTERS - 1]}…"


# -- preparing -----------------------------------------------------------------------------------------------------


def prepare(name: str, options: TextOptions, device: torch.device, meter: Meter) -> TextTask:
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
    _tell_calls(options, splits.parts)
    return TextTask(name, options, _load(options, device, meter), splits.parts, splits.source)


def _tell_calls(options: TextOptions, parts: Mapping[SplitName, Sequence[Document]]) -> None:
    """Before any is made."""
    if not is_url(options.expert):
        return
    n_documents = len(parts["train"]) + len(parts["validation"])
    warnings.warn(
        f"labelling may call {options.expert} {n_documents * options.length:,} times ({options.length} hand-offs of "
        f"{n_documents:,} documents), and seqdefer run labels what it reports on, too; answers are kept, and fewer "
        "documents take fewer calls: --train-documents, --validation-documents",
        ExpertCallsWarning,
        stacklevel=3,
    )


def _require(options: TextOptions, *names: str) -> None:
    for name in names:
        if not getattr(options, name):
            raise OptionError(f"--{name} is missing: name {'a model' if name != 'train' else 'the documents'}")


def codec_of(options: TextOptions, pair: TextPair | RemotePair) -> TextCodec:
    return TextCodec(
        pair,
        prefix=options.prefix,
        suffix=options.suffix,
        length=options.length,
        input_tokens=options.input_tokens,
        field=options.document_field,
    )


def serve(options: TextOptions, folder: Path, device: torch.device, meter: Meter) -> Served:
    """The pair alone, for texts of users' own."""
    _require(options, "predictor", "expert")
    pair = _load(options, device, meter)
    spec = SequenceSpec(options.length, pair.predictor.end)
    return Served(pair.predictor, pair.expert, spec, codec_of(options, pair))


def _load(options: TextOptions, device: torch.device, meter: Meter) -> TextPair | RemotePair:
    if is_url(options.expert):
        require_extra()
    with meter.stage("load the models", 1) as advance:
        how: dict[str, Any] = {"device": device, "dtype": options.dtype, "remember": _remembered(device)}
        pair: TextPair | RemotePair
        if is_url(options.expert):
            pair = _remote_pair(load_text_model(options.predictor, **how), options)
        else:
            pair = load_pair(options.predictor, options.expert, shown=options.shown, **how)
        advance(1)
    return pair


def _remote_pair(predictor: TextModel, options: TextOptions) -> RemotePair:
    if options.expert_by_token:
        warnings.warn(
            f"{options.expert} is called for every token that it writes: up to {options.length} times a sequence, "
            "where one-time deferral takes one call",
            ExpertCallsWarning,
            stacklevel=4,
        )
    client = EndpointClient(options.endpoint())
    return RemotePair.of(
        predictor, client, prompt=options.expert_prompt, by_token=options.expert_by_token, shown=options.shown
    )


def _remembered(device: torch.device) -> int:
    most = REMEMBERED.get(device.type, 0)
    return most if device.type != "cuda" else min(most, torch.cuda.mem_get_info(device)[0] // SHARE_TO_REMEMBER)


def _prepare_xsum(options: TextOptions, folder: Path, device: torch.device, meter: Meter) -> TextTask:
    if options.train != _XSUM.train and options.test == _XSUM.test:  # documents of one's own are reported on, too
        options = replace(options, test=None)
    return prepare("xsum", options, device, meter)


def _prepare_text(options: TextOptions, folder: Path, device: torch.device, meter: Meter) -> TextTask:
    return prepare("text", options, device, meter)


def _small(options: TextOptions) -> TextOptions:
    return replace(options, train_documents=120, validation_documents=30, test_documents=100)


# FLAN-T5 has seen XSum among its tasks, is safe to load and shares one vocabulary over all sizes.
_XSUM = TextOptions(
    predictor="google/flan-t5-small",
    expert="google/flan-t5-base",
    train="EdinburghNLP/xsum/train",
    test="EdinburghNLP/xsum/test",
    prefix="summarize: ",
)

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
    hyperparameters="xsum",
    quick_instances=20,
    serve=serve,
)

TEXT = TaskEntry(
    name="text",
    summary="any two Hugging Face models that share a vocabulary, or one and an endpoint, on documents of your own",
    presets={"quick": _small(TextOptions()), "paper": TextOptions()},
    prepare=_prepare_text,
    hyperparameters="xsum",
    quick_instances=20,
    serve=serve,
)
