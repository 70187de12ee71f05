"""The speech task: sound in, words out, by two Whisper models of one vocabulary.

The sequence loss is the word error rate of each clip after Whisper's normalisation of both texts, or the character
error rate; tables show its mean over clips. The token loss is in `seqdefer.tasks.speech.alignment`.

Where clips are read by a program and not by people, the unit of the loss says so, and every table and figure with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from seqdefer.errors import DataError, InputError, OptionError
from seqdefer.hyperparameters import ATTENTION, Settings, published_lstm, published_perceptron
from seqdefer.interfaces import Served, SplitName, Task, TaskEntry
from seqdefer.progress import Meter
from seqdefer.recipes import Recipe, published
from seqdefer.report.markup import NBSP, number
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.common.edit_distance import character_error_rates, word_error_rates
from seqdefer.tasks.common.token_drawing import TokenExample, draw_tokens, drawings_of
from seqdefer.tasks.speech.alignment import Alignments
from seqdefer.tasks.speech.audio import in_seconds, to_flac
from seqdefer.tasks.speech.codec import SpeechCodec
from seqdefer.tasks.speech.data import Clip, split_clips
from seqdefer.tasks.speech.features import SpeechFacts
from seqdefer.tasks.speech.models import load_speech_model
from seqdefer.tasks.speech.network import SpeechNetwork
from seqdefer.tasks.speech.normalization import WITHOUT_SPACES, normalizer
from seqdefer.tasks.speech.options import SpeechOptions
from seqdefer.tasks.speech.sources import read_speech
from seqdefer.tasks.speech.waveforms import stack_waveforms, to_samples, to_waveform
from seqdefer.tasks.text.codec import END_SIGN
from seqdefer.tasks.text.hub import is_hub_reachable
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.pairs import TextExpert, TextPair, TextPredictor
from seqdefer.tasks.text.passes import PADDING
from seqdefer.types import Examples, Rollout, Sequences, SequenceSpec

PARTS: tuple[SplitName, ...] = ("train", "validation", "test")
STATES_FOLDER = "encoder-states"
KEPT_TEXTS = 2**16  # of tokens as text, and of texts normalised: sweeps and trees come back to them
CACHE_BYTES = {"cpu": 2**30, "cuda": 2**33}  # of encoder states in memory, per model
# Keys and values of a clip take 18 MB with whisper-tiny and 110 MB with whisper-small. Rows of one clip share them, so
# that labelling, which follows many rows of each clip, is limited by clips in memory and by rows in a pass.
CLIPS_AT_ONCE = {"cpu": 16, "cuda": 512}
ROWS_AT_ONCE = {"cpu": 128, "cuda": 1024}
BATCH_BYTES = {"cpu": 2**30, "cuda": 2**34}  # of keys and values of both models
WITHOUT_HUB = (
    "without the Hub, make a corpus with: python -m seqdefer.tasks.speech.synthetic SENTENCES CORPUS, and a pair with: "
    "python -m seqdefer.tasks.speech.checkpoints MODELS tiny small; then give --train CORPUS --predictor MODELS/tiny "
    "--expert MODELS/small"
)


class SpeechTask(Task):
    """Clips of three splits, to be written down by a pair. `is_synthetic`: a program reads some of them."""

    name = "speech"
    more_test_data = "give more clips (--test, --test-clips)"
    predictor: TextPredictor
    expert: TextExpert
    codec: SpeechCodec

    def __init__(
        self,
        options: SpeechOptions,
        pair: TextPair,
        parts: Mapping[SplitName, Sequence[Clip]],
        *,
        source: str = "",
        is_synthetic: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.options, self.source = options, source
        self.predictor, self.expert = pair.predictor, pair.expert
        self.codec = SpeechCodec(pair, options.language)
        self.spec = SequenceSpec(options.length, pair.predictor.end)
        kind = {"words": "word", "characters": "character"}[options.error_rate]
        self.loss_unit = f"{kind} error rate, %{', synthetic speech' if is_synthetic else ''}"
        self.is_synthetic = is_synthetic
        # An example's id is its index here. The test comes first, so that its labels stay when train grows.
        self.clips = [one for part in reversed(PARTS) for one in parts[part]]
        spellings = getattr(pair.expert.model.tokenizer, "english_spelling_normalizer", None)
        self.normalize = lru_cache(KEPT_TEXTS)(normalizer(options.language, spellings))
        self._text = lru_cache(KEPT_TEXTS)(self.codec.text)
        self.references = [self.normalize(one.text) for one in self.clips]
        unit = "characters" if options.language in WITHOUT_SPACES else options.error_rate  # as normalised
        self.token_rule = f"unavoidable edits in {unit}"
        self.alignments = Alignments([one.text for one in self.clips], unit)
        self.parts: dict[SplitName, Examples] = {}
        first = 0
        for part in reversed(PARTS):
            self.parts[part] = self._examples(parts[part], first, progress)
            first += len(parts[part])

    def _examples(self, clips: Sequence[Clip], first: int, progress: Callable[[int], None]) -> Examples:
        if not clips:  # a fit reports on nothing
            empty = torch.empty(0, 0, dtype=torch.long)
            return Examples(empty.to(torch.int16), empty, torch.arange(0))
        rows = []
        for one in clips:
            if one.duration > self.codec.max_seconds:
                heard = f"{one.audio} lasts {in_seconds(one.duration)}; the models hear {self.codec.max_seconds:g} s"
                raise DataError(f"{heard}: cut it into clips")
            rows.append(to_samples(one.read()))
            progress(1)
        end = [] if self.spec.end is None else [self.spec.end]
        ids = self.codec.tokenizer([f" {one.text}" for one in clips], add_special_tokens=False, verbose=False)
        targets = [torch.tensor([*row, *end], dtype=torch.long) for row in ids["input_ids"]]
        padded = pad_sequence(targets, batch_first=True, padding_value=PADDING)
        return Examples(stack_waveforms(rows), padded, torch.arange(first, first + len(rows)))

    def split(self, name: SplitName) -> Examples:
        return self.parts[name]

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        """Return error rates. Sweeps and hand-offs repeat texts, so each distinct one is scored once."""
        ids, texts, copies = self._distinct(examples, sequences)
        rates = word_error_rates if self.options.error_rate == "words" else character_error_rates
        written, wanted = [self.normalize(text) for text in texts], [self.references[at] for at in ids]
        return rates(written, wanted).to(sequences.tokens.device)[copies]

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        longer = torch.nn.functional.pad(prefixes.tokens, (0, 1)).scatter(1, prefixes.lengths[:, None], tokens[:, None])
        after = self._edits(examples, Sequences(longer, prefixes.lengths + 1), self.alignments.unavoidable)
        before = self._edits(examples, prefixes, self.alignments.unavoidable)
        ends = self.spec.is_end(tokens).nonzero().squeeze(1)
        after[ends] = self._edits(examples.select(ends), prefixes.select(ends), self.alignments.whole)
        return (after - before).float()

    def _edits(
        self, examples: Examples, sequences: Sequences, count: Callable[[Sequence[str], Sequence[int]], Tensor]
    ) -> Tensor:
        ids, texts, copies = self._distinct(examples, sequences)
        return count(texts, ids).to(sequences.tokens.device)[copies]

    def _distinct(self, examples: Examples, sequences: Sequences) -> tuple[list[int], list[str], Tensor]:
        """Return ids and texts of different rows, and where each row is among them."""
        tokens = sequences.tokens.masked_fill(~sequences.mask(), PADDING)
        keys = torch.cat([examples.ids[:, None].to(tokens), tokens], 1)
        distinct, copies = keys.unique(dim=0, return_inverse=True)
        rows = distinct.tolist()
        texts = [self._text(tuple(token for token in row[1:] if token != PADDING)) for row in rows]
        return [row[0] for row in rows], texts, copies

    def loss_key(self, examples: Examples) -> str:
        ids = examples.ids.tolist()
        return fingerprint(*(text for at in ids for text in (self.clips[at].text, self.references[at])))

    def describe(self) -> dict[str, str]:
        end = 0 if self.spec.end is None else 1
        sizes = [int(size) for part in self.parts.values() for size in (part.targets != PADDING).sum(1)]
        cut = sum(size - end > self.options.length for size in sizes)
        more = f", {cut} with texts of more than {self.options.length} tokens" if cut else ""
        return {
            "data": f"{self.source}{more}",
            "speech": "synthetic: read by a program, not by people" if self.is_synthetic else "recorded",
            "clips": ", ".join(f"{name} {len(self.parts[name])}" for name in PARTS),
            "predictor": f"{self.predictor.name} ({self.predictor.fingerprint})",
            "expert": f"{self.expert.name} ({self.expert.fingerprint})",
        }

    def draw(self, examples: Examples, rollouts: Mapping[float, Rollout]) -> str:
        pieces, kind = self.codec.pieces, ", synthetic" if self.is_synthetic else ""
        drawings = drawings_of(self, examples, rollouts, pieces, lambda rate: f"{number(rate, 0)}{NBSP}% wrong")
        drawn = []
        for row, drawing in enumerate(drawings):
            clip, sound = self.clips[int(examples.ids[row])], to_flac(to_waveform(examples.inputs[row]))
            title = f"{clip.audio.name}, {clip.duration:.1f} s{kind}"
            drawn.append(TokenExample(title, clip.text, drawing, sound))
        return draw_tokens(drawn, legend=[f"{END_SIGN} the end of a text"])


# -- preparing -----------------------------------------------------------------------------------------------------


def prepare(options: SpeechOptions, folder: Path, device: torch.device, meter: Meter) -> SpeechTask:
    """Read and split the clips and load the models."""
    usual = SpeechOptions()
    if options.train != usual.train and options.test == usual.test:  # report on the user's own clips
        options = replace(options, test=None)
    with _naming_what_to_do():
        how: dict[str, Any] = {"normalize": normalizer(options.language), "meter": meter}
        train = read_speech(options.train, split="train", **how)
        test = None if options.test is None else read_speech(options.test, split="test", **how)
        counts: dict[SplitName, int] = {
            "train": options.train_clips,
            "validation": options.validation_clips,
            "test": options.test_clips,
        }
        splits = split_clips(train, test, counts, options.seed)
        pair = _load(options, device, meter, folder / STATES_FOLDER if options.keep_states else None)
    with meter.stage("read the clips", sum(len(part) for part in splits.parts.values())) as advance:
        return SpeechTask(
            options,
            pair,
            splits.parts,
            source=splits.source,
            is_synthetic=train.synthetic or (test is not None and test.synthetic),
            progress=advance,
        )


def serve(options: SpeechOptions, folder: Path, device: torch.device, meter: Meter) -> Served:
    """Load the pair alone, to serve users' clips."""
    with _naming_what_to_do():
        pair = _load(options, device, meter, None)
    codec = SpeechCodec(pair, options.language)
    return Served(pair.predictor, pair.expert, SequenceSpec(options.length, pair.predictor.end), codec)


@contextmanager
def _naming_what_to_do() -> Iterator[None]:
    """Name the commands that make a corpus and a pair where the Hub is out of reach."""
    try:
        yield
    except InputError as error:
        if "no network" not in str(error) or is_hub_reachable():
            raise
        raise type(error)(f"{error}; {WITHOUT_HUB}") from error


def _load(options: SpeechOptions, device: torch.device, meter: Meter, states: Path | None) -> TextPair:
    facts_are_shown = options.shown != "states"
    with meter.stage("load the models", 2) as advance:
        models = []
        for role in ("predictor", "expert"):
            models.append(
                load_speech_model(
                    getattr(options, role),
                    language=options.language,
                    device=device,
                    dtype=options.dtype,
                    cache_bytes=_memory(CACHE_BYTES, device),
                    states=states,
                    is_watched=facts_are_shown and role == "predictor",
                )
            )
            advance(1)
    small, large = models
    facts = SpeechFacts(small.tokenizer, small.n_tokens, options.fact_names()) if facts_are_shown else None
    pair = TextPair.of(small, large, options.shown, facts)
    at_once = _clips_at_once(pair.models, device)
    for writer in (pair.predictor, pair.expert):
        _check_length(writer.model, options.length)
        writer.max_examples = at_once  # trees hold states of both for the same clips
        writer.batch_size = ROWS_AT_ONCE.get(device.type, at_once)
    return pair


def _check_length(model: TextModel, length: int) -> None:
    network = model.network
    assert isinstance(network, SpeechNetwork)
    most = network.limit() - network.base
    if length > most:
        raise OptionError(f"--length is {length}; {model.name} writes at most {most} tokens")


def _clips_at_once(models: Sequence[TextModel], device: torch.device) -> int:
    per_clip = sum(_source_bytes(model.model) for model in models)
    return max(1, min(CLIPS_AT_ONCE.get(device.type, 8), _memory(BATCH_BYTES, device) // per_clip))


def _source_bytes(model: Any) -> int:
    """Return the bytes of keys and values that a decoder attends to in a clip."""
    config = model.config
    return int(2 * config.decoder_layers * config.max_source_positions * config.d_model * model.dtype.itemsize)


def _memory(limits: Mapping[str, int], device: torch.device) -> int:
    """Return so many bytes, at most an eighth of a GPU's free memory."""
    limit = limits.get(device.type, 0)
    return limit if device.type != "cuda" else min(limit, torch.cuda.mem_get_info(device)[0] // 8)


# By token, plain facts and a perceptron (ours); the paper's LSTM on states is a choice.
BY_FACTS = Settings(
    learning_rate=2e-3, patience=10, architecture="mlp", layers=2, units=64, dropout=0.2, epochs=100,
    weight_decay=0.1, samples=1000,
)  # fmt: skip
RECIPES = {
    "ours": Recipe(token=BY_FACTS, once=ATTENTION, cost=ATTENTION, trees="branched", rollouts=4),
    "published": published(
        token=published_lstm(layers=3, units=128, samples=1000, learning_rate=1e-3),
        once=published_perceptron(samples=1000),
        options={"shown": "states"},
        hand_offs=4,
    ),
}

ENTRY = TaskEntry(
    name="speech",
    summary="write down what is said; the expert is a larger model of the same family",
    presets={
        "quick": SpeechOptions(train_clips=120, validation_clips=30, test_clips=100),
        "paper": SpeechOptions(),
    },
    prepare=prepare,
    recipes=RECIPES,
    quick_instances=20,
    serve=serve,
)
