"""The folder of a fitted model: which pair it belongs to, and the records beside its rejector.

deferral.json      the task, its options, the fingerprints of the pair, digests of budgets and curve; written last
rejector/          the checkpoint
calibration.json   a setting for every budget
curve.json         what the budgets bought on validation data; only where `seqdefer fit` made the folder
timing.json        what the budgets took on the machine that measured them
quality.json       the setting that a fit promised a quality for, where it was asked to
learned_from.json  names of the inputs that the rejector was fitted on: no guarantee may rest on these
work/              labels, and the models of tasks that train their own
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from seqdefer.budgets.calibration import BUDGETS, Calibration, LossCurve
from seqdefer.budgets.quality import QualityPromise
from seqdefer.environment import choose_device
from seqdefer.errors import CheckpointError, InputError, OptionError
from seqdefer.interfaces import Served
from seqdefer.methods.timing import Timing
from seqdefer.progress import Meter
from seqdefer.registry import FILE_SUFFIX, load_task
from seqdefer.rejectors.base import SavedRejector
from seqdefer.storage.files import read_json, write_json
from seqdefer.storage.records import read_record, to_plain

PAIRING_FILE, CALIBRATION_FILE = "deferral.json", "calibration.json"
CURVE_FILE, TIMING_FILE, INPUTS_FILE = "curve.json", "timing.json", "learned_from.json"
QUALITY_FILE = "quality.json"
DIGESTS = "digests"  # a field of deferral.json: SHA-256 by name; no two machines take the same time
DIGESTED_FILES = (CALIBRATION_FILE, CURVE_FILE, INPUTS_FILE, QUALITY_FILE)
REJECTOR_FOLDER, WORK_FOLDER = "rejector", "work"
Record = TypeVar("Record")
OwnRecord = TypeVar("OwnRecord", LossCurve, Timing, "LearnedFrom", QualityPromise)


@dataclass(frozen=True)
class Pairing:
    """What deferral.json says: the task whose code loads the pair and reads inputs, its options, and who they are."""

    task: str
    options: Mapping[str, Any]
    predictor: str  # fingerprint
    expert: str  # fingerprint, "" where it has none
    recipe: str = ""  # how its rejector was made, "" where that is not known


@dataclass(frozen=True)
class LearnedFrom:
    """The names of all inputs of training and validation: see `seqdefer.labels.labelled.input_names`."""

    inputs: tuple[str, ...]
    rejector: str  # as in Calibration


def read_pairing(folder: Path) -> Pairing:
    """Read deferral.json."""
    if not (folder / PAIRING_FILE).is_file():
        is_begun = (folder / WORK_FOLDER).is_dir()
        action = "the same seqdefer fit resumes it" if is_begun else "make one: seqdefer fit TASK"
        raise CheckpointError(f"no deferring model in {folder}: it has no {PAIRING_FILE}; {action}")
    return _read(Pairing, folder / PAIRING_FILE, "fit it again: seqdefer fit TASK")


def write_pairing(folder: Path, pairing: Pairing) -> None:
    """Write deferral.json, with digests of the records that are there."""
    write_json(folder / PAIRING_FILE, {**to_plain(pairing), DIGESTS: _digests(folder)})


def update_digests(folder: Path) -> None:
    """Note in deferral.json, if there is one, that records were written."""
    if (folder / PAIRING_FILE).is_file():
        write_json(folder / PAIRING_FILE, {**read_json(folder / PAIRING_FILE), DIGESTS: _digests(folder)})


def _digests(folder: Path) -> dict[str, str]:
    return {name: _digest(folder / name) for name in DIGESTED_FILES if (folder / name).is_file()}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check_digest(path: Path, action: str) -> None:
    """Refuse a record that is not the one that was written. Folders of earlier versions have no digests."""
    manifest = read_json(path.parent / PAIRING_FILE)
    if path.name in DIGESTED_FILES and DIGESTS in manifest and manifest[DIGESTS].get(path.name) != _digest(path):
        reason = f"its digest is not the one in {PAIRING_FILE}; it was edited, or writing it was interrupted"
        raise CheckpointError(f"{path} is not what was written: {reason}; {action}")


def read_calibration(folder: Path, rejector: SavedRejector) -> Calibration | None:
    """Read calibration.json; None without one. That of another rejector is refused."""
    path, action = folder / CALIBRATION_FILE, f"measure it again: seqdefer calibrate {folder} --data FILE"
    if not path.is_file():
        return None
    found = _read(Calibration, path, action)
    if len(found.settings) != len(BUDGETS):
        raise CheckpointError(f"{path} has {len(found.settings)} settings, not {len(BUDGETS)}; {action}")
    if found.rejector != rejector.fingerprint:
        raise CheckpointError(f"{path} belongs to another rejector; {action}")
    _check_digest(path, action)
    return found


def read_curve(folder: Path, rejector: SavedRejector) -> LossCurve | None:
    """Read curve.json; None without one. That of another rejector is refused."""
    return _read_own(LossCurve, folder / CURVE_FILE, rejector)


def read_timing(folder: Path, rejector: SavedRejector) -> Timing | None:
    """Read timing.json; None without one. That of another rejector is refused."""
    return _read_own(Timing, folder / TIMING_FILE, rejector)


def read_learned_from(folder: Path, rejector: SavedRejector) -> LearnedFrom | None:
    """Read learned_from.json; None without one. That of another rejector is refused."""
    return _read_own(LearnedFrom, folder / INPUTS_FILE, rejector)


def read_quality(folder: Path, rejector: SavedRejector) -> QualityPromise | None:
    """Read quality.json; None without one. That of another rejector is refused."""
    return _read_own(QualityPromise, folder / QUALITY_FILE, rejector)


def _read_own(kind: type[OwnRecord], path: Path, rejector: SavedRejector) -> OwnRecord | None:
    action = "fit again, or remove the file"
    if not path.is_file():
        return None
    found = _read(kind, path, action)
    if found.rejector != rejector.fingerprint:
        raise CheckpointError(f"{path} belongs to another rejector; {action}")
    _check_digest(path, action)
    return found


def _read(kind: type[Record], path: Path, action: str) -> Record:
    try:
        return read_record(kind, path)
    except InputError as error:
        raise CheckpointError(f"{error}; {action}") from error


def load_served(pairing: Pairing, folder: Path, device: str, meter: Meter) -> Served:
    """Load the pair that `folder` names, and refuse another."""
    _check_task_file(pairing.task, folder)
    entry = load_task(pairing.task)
    if entry.serve is None:
        raise OptionError(f"task {pairing.task!r} has no pair to serve")
    kind = type(next(iter(entry.presets.values())))
    try:
        options = kind(**pairing.options)
    except TypeError as error:
        reason = f"the options of task {pairing.task!r} are not those of this version: {error}"
        raise CheckpointError(f"{folder / PAIRING_FILE}: {reason}; fit it again") from error
    served = entry.serve(options, folder / WORK_FOLDER, choose_device(device), meter)
    for role in ("predictor", "expert"):
        found, wanted = getattr(served, role).fingerprint, getattr(pairing, role)
        if found != wanted:
            raise CheckpointError(
                f"{folder} was fitted with {role} {wanted}, and what it names is now {found}; put that {role} back, or "
                "fit again"
            )
    return served


def _check_task_file(task: str, folder: Path) -> None:
    """Refuse code that came with a folder: a task of a file is one that its user wrote or put somewhere else."""
    path = Path(task)
    if path.suffix == FILE_SUFFIX and (not path.is_absolute() or folder.resolve() in path.resolve().parents):
        raise CheckpointError(
            f"{folder / PAIRING_FILE} names the code {task!r:.200}, which is part of the model; code is not run from "
            "there: move the file elsewhere and fit again, or install the task as a package"
        )


def pairing_of(task: str, options: Any, served: Served, recipe: str = "") -> Pairing:
    """Describe a pair. Files and folders get absolute paths: the model may be used from elsewhere."""
    plain = dataclasses.asdict(options)
    for field in dataclasses.fields(options):
        if field.metadata.get("is_path"):
            plain[field.name] = _absolute(plain[field.name])
    return Pairing(task, plain, served.predictor.fingerprint, served.expert.fingerprint, recipe)


def _absolute(value: str | None) -> str | None:
    """Return the absolute path of what exists, also after a prefix (NAME:FOLDER); a name on a hub stays as it is."""
    if not value or os.path.exists(value):  # Path.exists fails where a name is too long
        return str(Path(value).resolve()) if value else value
    kind, _, path = value.partition(":")
    if not path or path.startswith("//") or not os.path.exists(path):
        return value
    return f"{kind}:{Path(path).resolve()}"
