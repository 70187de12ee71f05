"""A fitted rejector at work: give inputs and a budget, get sequences and who wrote each token.

    model = DeferringModel.from_pretrained("models/news")
    written = model.generate(["A long article ..."], budget=0.2)
    print(written.outputs[0], written.sources[0], written.expert_tokens[0])

A folder holds `deferral.json` (which task, which pair, how inputs are read), the rejector, and `calibration.json`
(which threshold spends which budget); `curve.json`, what the budgets bought on validation data, is there where `fit`
made the folder. The pair itself is named there, not copied; another is refused.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from seqdefer.budgets.calibration import BUDGETS, Calibration, LossCurve, Setting, measure, realised
from seqdefer.budgets.policies import Threshold, by_position, choose_kept
from seqdefer.engine.interleaved import complete_drafts, draft, interleave, is_past, roll_out
from seqdefer.environment import choose_device
from seqdefer.errors import CheckpointError, InputError, OptionError
from seqdefer.evaluation.results import read_record, to_plain
from seqdefer.interfaces import Codec, Served, Task
from seqdefer.progress import Meter, Progress, Silent
from seqdefer.registry import load_task
from seqdefer.rejectors.networks import DraftNetwork, TokenNetwork, load_rejector
from seqdefer.storage.files import fingerprint, write_json
from seqdefer.types import Examples, HandOffTable, Rollout, Sequences

FILE, REJECTOR, CALIBRATION, CURVE = "deferral.json", "rejector", "calibration.json", "curve.json"
WORK = "work"  # what `seqdefer fit` prepared: labels, and the models of tasks that train their own
BUDGET = 0.2
CHECKED = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)  # budgets
BATCH = 32
AUTHORS = ("predictor", "expert")
Record = TypeVar("Record")


class BudgetWarning(UserWarning):
    """No threshold of this rejector spends about the budget that was asked for."""


@dataclass(frozen=True)
class Pairing:
    """What `deferral.json` says: the task whose code loads the pair and reads inputs, its options, and who they are."""

    task: str
    options: Mapping[str, Any]
    predictor: str  # fingerprint
    expert: str  # fingerprint, "" where it has none


@dataclass(frozen=True)
class Generation:
    """What was written for n inputs. `scores` are the rejector's: by token, of deferring it; one-time, of handing off
    there, compared with not at all; 0 where nobody asked (past the hand-off, past the end)."""

    outputs: list[Any]  # what the sequences stand for: texts, tours
    rollout: Rollout

    @property
    def sequences(self) -> Sequences:
        return self.rollout.sequences

    @property
    def by_expert(self) -> Tensor:
        """Who wrote each token. bool (n, L)"""
        return self.rollout.by_expert

    @property
    def scores(self) -> Tensor:
        """(n, L)"""
        return self.rollout.scores

    @property
    def sources(self) -> list[list[str]]:
        """Who wrote each token of each sequence: predictor or expert."""
        rows = zip(self.by_expert.tolist(), self._lengths, strict=True)
        return [[AUTHORS[by_expert] for by_expert in row[:length]] for row, length in rows]

    @property
    def expert_tokens(self) -> list[int]:
        return _integers(self.rollout.deferred)

    @property
    def predictor_tokens(self) -> list[int]:
        return _integers(self.sequences.lengths - self.rollout.deferred)

    @property
    def switches(self) -> list[int]:
        """How often the pen changed hands within a sequence."""
        return _integers(self.rollout.switches)

    @property
    def share(self) -> float:
        """Of all tokens, what the expert wrote."""
        return self.rollout.share

    def cost(self, expert_token: float = 1.0, predictor_token: float = 0.0) -> list[float]:
        """By prices of a token. The predictor proposes every token, also where the expert then writes."""
        pairs = zip(self.expert_tokens, self._lengths, strict=True)
        return [expert_token * asked + predictor_token * length for asked, length in pairs]

    def rows(self, codec: Codec) -> Iterator[dict[str, Any]]:
        """Each in plain values: the output, and its tokens with their sources and scores."""
        for place, (length, sources) in enumerate(zip(self._lengths, self.sources, strict=True)):
            tokens = self.sequences.tokens[place, :length].tolist()
            scores = self.scores[place, :length].tolist()
            told = zip(tokens, codec.pieces(tokens), sources, scores, strict=True)
            yield {
                "output": self.outputs[place],
                "tokens": [dict(zip(("token", "text", "source", "score"), one, strict=True)) for one in told],
                "expert_tokens": self.expert_tokens[place],
                "predictor_tokens": self.predictor_tokens[place],
                "switches": self.switches[place],
                "cost": self.cost()[place],
            }

    @property
    def _lengths(self) -> list[int]:
        return _integers(self.sequences.lengths)


@dataclass(frozen=True)
class Decisions:
    """What the predictor writes alone, and where the rejector would defer. By token that is sure up to the first
    deferral of a row: what the expert writes there changes all that follows."""

    outputs: list[Any]
    sequences: Sequences
    scores: Tensor  # (n, L), as in Generation
    defer: Tensor  # bool (n, L)


@dataclass(frozen=True)
class Piece:
    """One token of a stream."""

    position: int
    token: Any
    text: str  # what it adds to what users see; empty while a letter is half written
    source: str
    score: float


def _integers(counts: Tensor) -> list[int]:
    return [int(count) for count in counts]


class DeferringModel:
    """A pair, a rejector and the budgets it was calibrated for."""

    def __init__(
        self,
        served: Served,
        rejector: TokenNetwork | DraftNetwork,
        calibration: Calibration | None = None,
        pairing: Pairing | None = None,
        curve: LossCurve | None = None,
    ) -> None:
        _check(served, rejector)
        self.served, self.rejector, self.calibration, self.pairing = served, rejector, calibration, pairing
        self.curve = curve

    # -- files -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, *, device: str = "auto", meter: Meter | None = None, budgets: bool = True
    ) -> Self:
        """Loads the pair that the folder names, and refuses another. `budgets=False` leaves the calibration unread: it
        is about to be measured again."""
        folder = Path(folder)
        pairing = _read_pairing(folder)
        served = load_served(pairing, folder, device, meter or Silent())
        rejector = load_rejector(folder / REJECTOR, served.predictor)
        calibration = _read_calibration(folder, rejector) if budgets else None
        return cls(served, rejector, calibration, pairing, _read_curve(folder, rejector))

    def save_pretrained(self, folder: Path | str) -> Path:
        """Writes deferral.json last: where it exists, the rest is whole."""
        folder = Path(folder)
        if self.pairing is None:
            raise OptionError("this model was put together by hand and cannot name its pair; give it a Pairing")
        for name in (FILE, CALIBRATION, CURVE):  # or new weights could be left under old names
            (folder / name).unlink(missing_ok=True)
        self.rejector.save_pretrained(folder / REJECTOR)
        self.save_calibration(folder)
        if self.curve is not None:
            write_json(folder / CURVE, to_plain(self.curve))
        write_json(folder / FILE, to_plain(self.pairing))
        return folder

    def save_calibration(self, folder: Path | str) -> None:
        """Budgets alone, into a folder that has the rest."""
        if self.calibration is not None:
            write_json(Path(folder) / CALIBRATION, to_plain(self.calibration))

    # -- budgets ---------------------------------------------------------------------------------------------------

    def calibrate(self, inputs: Sequence[Any], *, progress: Progress = lambda _: None) -> Calibration:
        """Finds out what each threshold spends on inputs like these, and keeps it in mind; `save_calibration` keeps it
        for good."""
        return self.calibrate_on(self._encode(inputs), progress=progress)

    def calibrate_on(
        self,
        examples: Examples,
        *,
        judge: Task | None = None,
        table: HandOffTable | None = None,
        progress: Progress = lambda _: None,
    ) -> Calibration:
        """As `calibrate`, on inputs that are encoded already, and whose hand-offs may be known. Their task, as `judge`,
        knows what the budgets buy, too."""
        name = fingerprint_of(self.rejector)
        measured = measure(
            self.served, self.rejector, examples, rejector_name=name, judge=judge, table=table, progress=progress
        )
        self.calibration, self.curve = measured.calibration, measured.curve or self.curve
        return self.calibration

    def setting(self, budget: float) -> Setting:
        """What decides at a budget, and what that spends; a warning where that is not about the budget."""
        if self.calibration is None:
            raise OptionError(
                "the budgets of this model were not measured; do that with inputs like yours: seqdefer calibrate DIR "
                "--data FILE, or give a threshold"
            )
        found = self.calibration.for_budget(budget)
        if not found.is_near(budget):
            warnings.warn(
                f"a budget of {budget:g} cannot be met: the nearest that this rejector comes is {found.share:.3f}",
                BudgetWarning,
                stacklevel=3,
            )
        return found

    def check(
        self, inputs: Sequence[Any], budgets: Sequence[float] = CHECKED, *, progress: Progress = lambda _: None
    ) -> tuple[Setting, ...]:
        """What budgets spend on inputs that were not calibrated with: their settings, with the shares seen here."""
        settings, deferred, written = [self.setting(budget) for budget in budgets], [], []
        for setting in settings:
            rollout = self.generate(inputs, threshold=setting.threshold).rollout
            deferred.append(rollout.by_expert.sum(1).numpy())
            written.append(rollout.sequences.lengths.numpy())
            progress(1)
        seen = zip(budgets, settings, *realised(np.stack(deferred), np.stack(written)), strict=True)
        return tuple(Setting(budget, one.threshold, *map(float, found)) for budget, one, *found in seen)

    # -- writing ---------------------------------------------------------------------------------------------------

    def generate(
        self, inputs: Sequence[Any], budget: float = BUDGET, *, threshold: float | None = None, batch_size: int = BATCH
    ) -> Generation:
        """Sequences for all inputs, the expert writing about `budget` of their tokens; or by a threshold you name."""
        threshold = self._threshold(budget, threshold)
        rollout = _join([self._write(batch, threshold) for batch in self._batches(inputs, batch_size)])
        return Generation(self._outputs(rollout.sequences), rollout)

    def decide(
        self, inputs: Sequence[Any], budget: float = BUDGET, *, threshold: float | None = None, batch_size: int = BATCH
    ) -> Decisions:
        """Where the rejector would defer, without asking the expert."""
        threshold = self._threshold(budget, threshold)
        parts, wishes = [], []
        for batch in self._batches(inputs, batch_size):
            alone, wish = self._decide(batch, threshold)
            parts.append(alone)
            wishes.append((wish & alone.sequences.mask()).cpu())
        alone = _join(parts)
        return Decisions(self._outputs(alone.sequences), alone.sequences, alone.scores, torch.cat(wishes))

    def stream(self, one: Any, budget: float = BUDGET, *, threshold: float | None = None) -> Iterator[Piece]:
        """The tokens of one sequence as they are written. Their texts together are the output."""
        examples = self._encode([one])
        return self._stream(examples, self._threshold(budget, threshold))

    def _stream(self, examples: Examples, threshold: float) -> Iterator[Piece]:
        served, tokens, shown = self.served, list[Any](), ""
        for position, (token, by_expert, score) in enumerate(self._steps(examples, threshold)):
            tokens.append(token)
            is_last = token == served.spec.end or len(tokens) == served.spec.length
            added = served.codec.added(tokens, shown, is_last=is_last)
            shown += added
            yield Piece(position, token, added, AUTHORS[by_expert], score)

    def _threshold(self, budget: float, threshold: float | None) -> float:
        if threshold is None:
            return self.setting(budget).threshold
        if math.isnan(threshold):
            raise OptionError("threshold is nan; it is a score, or inf to never defer")
        return threshold

    def _encode(self, inputs: Sequence[Any]) -> Examples:
        listed = [] if isinstance(inputs, str) else list(inputs)
        if not listed:
            raise InputError(f"inputs are {inputs!r:.40}; give a list of one input or more")
        return self.served.codec.encode(listed)

    def _batches(self, inputs: Sequence[Any], size: int) -> list[Examples]:
        if size < 1:
            raise OptionError(f"batch size {size}; it must be at least 1")
        examples = self._encode(inputs)
        return [examples.select(rows) for rows in torch.arange(len(examples)).split(size)]

    def _write(self, examples: Examples, threshold: float) -> Rollout:
        served = self.served
        if isinstance(self.rejector, TokenNetwork):
            policy = Threshold(self.rejector, threshold)
            return roll_out(served.predictor, served.expert, examples, policy, served.spec)
        drafts, kept, scores = self._plan(examples, threshold)
        return complete_drafts(served.predictor, served.expert, examples, drafts, kept, scores, served.spec)

    def _decide(self, examples: Examples, threshold: float) -> tuple[Rollout, Tensor]:
        """What the predictor writes alone, and where the rejector would defer (n, L), past the end as well."""
        if isinstance(self.rejector, TokenNetwork):
            alone = self._write(examples, math.inf)
            return alone, alone.scores >= threshold
        drafts, kept, scores = self._plan(examples, threshold)
        served = self.served
        alone = complete_drafts(served.predictor, None, examples, drafts, drafts.lengths, scores, served.spec)
        return alone, is_past(kept, served.spec.length)

    def _steps(self, examples: Examples, threshold: float) -> Iterator[tuple[Any, bool, float]]:
        """Token, whether the expert wrote it, and score, of one sequence, each as soon as it is known."""
        served = self.served
        if isinstance(self.rejector, TokenNetwork):
            policy = Threshold(self.rejector, threshold)
            for step in interleave(served.predictor, served.expert, examples, policy, served.spec):
                yield step.tokens[0].item(), bool(step.by_expert[0]), float(step.scores[0])
            return
        drafts, kept, scores = self._plan(examples, threshold)
        length, pair = served.spec.length, (served.predictor, served.expert)
        alone = complete_drafts(*pair, examples, drafts, drafts.lengths, scores, served.spec)
        yield from _row(alone, 0, int(kept))
        both = complete_drafts(*pair, examples, drafts, kept, scores, served.spec)
        yield from _row(both, int(kept), length)

    def _plan(self, examples: Examples, threshold: float) -> tuple[Sequences, Tensor, Tensor]:
        """What the predictor writes alone, where to hand it off (n,), and the scores (n, L) behind that."""
        assert isinstance(self.rejector, DraftNetwork)
        drafted = draft(self.served.predictor, examples, self.served.spec)
        scores = self.rejector.score(drafted)
        kept = choose_kept(self.rejector, scores, drafted, threshold)
        return drafted.sequences, kept, by_position(scores, self.rejector.sizes.hand_offs)

    def _outputs(self, sequences: Sequences) -> list[Any]:
        rows = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
        return [self.served.codec.decode(tokens[:length]) for tokens, length in rows]


def _check(served: Served, rejector: TokenNetwork | DraftNetwork) -> None:
    if isinstance(rejector, DraftNetwork) and not rejector.sizes.hand_offs:
        raise CheckpointError(
            "this rejector defers whole inputs; take one that defers partially (TokenwiseModel, OneTimeModel, "
            "OneTimeCost)"
        )
    if rejector.predictor != served.predictor.fingerprint:
        raise CheckpointError(
            f"the rejector was fitted for predictor {rejector.predictor}, not for {served.predictor.fingerprint}; load "
            "that predictor, or fit a rejector for this one"
        )
    if rejector.sizes.length != served.spec.length:
        raise CheckpointError(
            f"the rejector was fitted for sequences of {rejector.sizes.length} tokens, not of {served.spec.length}; "
            "fit one for these"
        )


def _join(parts: Sequence[Rollout]) -> Rollout:
    sequences = [part.sequences for part in parts]
    tokens, lengths = torch.cat([one.tokens for one in sequences]), torch.cat([one.lengths for one in sequences])
    by_expert, scores = torch.cat([part.by_expert for part in parts]), torch.cat([part.scores for part in parts])
    return Rollout(Sequences(tokens.cpu(), lengths.cpu()), by_expert.cpu(), scores.cpu())


def _row(rollout: Rollout, start: int, stop: int) -> Iterator[tuple[Any, bool, float]]:
    """Tokens of the only sequence, with their authors and scores."""
    stop = min(stop, int(rollout.sequences.lengths))
    parts = (rollout.sequences.tokens, rollout.by_expert, rollout.scores)
    yield from zip(*(part[0, start:stop].tolist() for part in parts), strict=True)


# -- folders -------------------------------------------------------------------------------------------------------


def _read_pairing(folder: Path) -> Pairing:
    if not (folder / FILE).is_file():
        again = "the same seqdefer fit goes on with it" if (folder / WORK).is_dir() else "make one: seqdefer fit TASK"
        raise CheckpointError(f"no deferring model in {folder}: it has no {FILE}; {again}")
    return _read(Pairing, folder / FILE, "fit it again: seqdefer fit TASK")


def _read_calibration(folder: Path, rejector: TokenNetwork | DraftNetwork) -> Calibration | None:
    """None where there is none; one of other weights is refused."""
    path, mend = folder / CALIBRATION, f"measure it again: seqdefer calibrate {folder} --data FILE"
    if not path.is_file():
        return None
    found = _read(Calibration, path, mend)
    if len(found.settings) != len(BUDGETS):
        raise CheckpointError(f"{path} has {len(found.settings)} settings, not {len(BUDGETS)}; {mend}")
    if found.rejector != fingerprint_of(rejector):
        raise CheckpointError(f"{path} belongs to another rejector; {mend}")
    return found


def _read_curve(folder: Path, rejector: TokenNetwork | DraftNetwork) -> LossCurve | None:
    """As `_read_calibration`."""
    path, mend = folder / CURVE, "fit again, or do without: remove it"
    if not path.is_file():
        return None
    found = _read(LossCurve, path, mend)
    if found.rejector != fingerprint_of(rejector):
        raise CheckpointError(f"{path} belongs to another rejector; {mend}")
    return found


def _read(kind: type[Record], path: Path, mend: str) -> Record:
    try:
        return read_record(kind, path)
    except InputError as error:
        raise CheckpointError(f"{error}; {mend}") from error


def load_served(pairing: Pairing, folder: Path, device: str, meter: Meter) -> Served:
    """The pair that `folder` names, and no other."""
    entry = load_task(pairing.task)
    if entry.serve is None:
        raise OptionError(f"task {pairing.task!r} has no pair to serve")
    kind = type(next(iter(entry.presets.values())))
    try:
        options = kind(**pairing.options)
    except TypeError as error:
        reason = f"the options of task {pairing.task!r} are not those of this version: {error}"
        raise CheckpointError(f"{folder / FILE}: {reason}; fit it again") from error
    served = entry.serve(options, folder / WORK, choose_device(device), meter)
    for role in AUTHORS:
        found, wanted = getattr(served, role).fingerprint, getattr(pairing, role)
        if found != wanted:
            raise CheckpointError(
                f"{folder} was fitted with {role} {wanted}, and what it names is now {found}; put that {role} back, or "
                "fit again"
            )
    return served


def pairing_of(task: str, options: Any, served: Served) -> Pairing:
    """Files and folders by their whole names: the model may be used from elsewhere."""
    plain = dataclasses.asdict(options)
    for field in dataclasses.fields(options):
        if field.metadata.get("is_path"):
            plain[field.name] = _whole_name(plain[field.name])
    return Pairing(task, plain, served.predictor.fingerprint, served.expert.fingerprint)


def _whole_name(value: str | None) -> str | None:
    """Of what is there, also after a word that says what it is (rl4co:FOLDER); a name on a hub stays as it is."""
    if not value or os.path.exists(value):  # Path.exists fails where a name is too long
        return str(Path(value).resolve()) if value else value
    kind, _, path = value.partition(":")
    if not path or path.startswith("//") or not os.path.exists(path):
        return value
    return f"{kind}:{Path(path).resolve()}"


def fingerprint_of(rejector: TokenNetwork | DraftNetwork) -> str:
    """Of its weights: a calibration belongs to them."""
    return fingerprint(*rejector.state_dict().values())
