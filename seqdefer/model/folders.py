"""The folder of a fitted model: which pair it belongs to, and the records beside its rejector.

deferral.json      the task, its options, the fingerprints of the pair, digests of budgets and curve; written last
rejector/          the checkpoint
calibration.json   a setting for every budget
curve.json         what the budgets bought on validation data; only where `seqdefer fit` made the folder
timing.json        what the budgets took on the machine that measured them
quality.json       the setting that a fit promised a quality for, where it was asked to
learned_from.json  names of the inputs that the rejector was fitted on: no guarantee may rest on these
README.md, app.py  the model card, and a demo for a Space of the Hugging Face Hub
predictor/ expert/ the pair, where it was bundled
work/              labels, and the models of tasks that train their own
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from seqdefer.budgets.calibration import BUDGETS, Calibration, LossCurve
from seqdefer.budgets.quality import QualityPromise
from seqdefer.environment import choose_device
from seqdefer.errors import CheckpointError, InputError, OptionError
from seqdefer.interfaces import Served, TaskEntry
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
BUNDLE = "bundle:"  # before the name of a folder within that of the model
ROLES = ("predictor", "expert")
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
    data: str = ""  # what it was fitted on, in words


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
        fault = f"it has no {PAIRING_FILE}" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"no deferring model in {folder}: {fault}; {action}")
    return _read(Pairing, folder / PAIRING_FILE, "fit it again: seqdefer fit TASK")


def write_pairing(folder: Path, pairing: Pairing) -> None:
    """Write deferral.json, with digests of the records that are there."""
    pairing = dataclasses.replace(pairing, options=_bundled(pairing.options, folder))
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
    digests = manifest.get(DIGESTS, {path.name: _digest(path)})
    if path.name in DIGESTED_FILES and (not isinstance(digests, dict) or digests.get(path.name) != _digest(path)):
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


def require_own_endpoint(pairing: Pairing, expert: Any) -> None:
    """Raise where someone else's model would send inputs to an address that the user did not name."""
    named = str(pairing.options.get("expert") or "")
    if "://" in named and expert is None:
        raise OptionError(
            f"this model would send your inputs to the expert at {named:.200}; if you want that, name it: expert= in "
            "Python, --expert on the command line"
        )


def task_of(pairing: Pairing, folder: Path, *, is_downloaded: bool = False) -> TaskEntry:
    """Return the task of a pairing. Code that came with the folder is refused, and any file that a download names: a
    task of a file is one that its user wrote or put somewhere else."""
    path = Path(pairing.task)
    is_inside = not path.is_absolute() or folder.resolve() in path.resolve().parents
    if pairing.task.endswith(FILE_SUFFIX) and (is_inside or is_downloaded):
        reason = "a downloaded model" if is_downloaded else "part of the model"
        raise CheckpointError(
            f"{folder / PAIRING_FILE} names the code {pairing.task!r:.200}, which is {reason}; code is not run from "
            "there: move the file elsewhere and fit again, or install the task as a package"
        )
    return load_task(pairing.task)


def load_served(entry: TaskEntry, pairing: Pairing, folder: Path, device: str, meter: Meter) -> Served:
    """Load the pair that a pairing names, and refuse another than the one that `folder` was fitted with."""
    if entry.serve is None:
        raise OptionError(f"task {pairing.task!r} has no pair to serve")
    kind = type(next(iter(entry.presets.values())))
    try:
        options = kind(**pairing.options)
    except (TypeError, AttributeError) as error:  # an unknown name, or a value of another type
        reason = f"the options of task {pairing.task!r} are not those of this version: {error}"
        raise CheckpointError(f"{folder / PAIRING_FILE}: {reason}; fit it again") from error
    served = entry.serve(options, folder / WORK_FOLDER, choose_device(device), meter)
    for role in ROLES:
        found, wanted = getattr(served, role).fingerprint, getattr(pairing, role)
        if found != wanted:
            raise CheckpointError(
                f"{folder} was fitted with {role} {wanted}, and what it names is now {found}; put that {role} back, or "
                f"fit again, or say where it is: --{role} of seqdefer generate and serve, {role}= in Python"
            )
    return served


@runtime_checkable
class Bundled(Protocol):
    """A predictor or an expert that can be part of a folder."""

    def save_pretrained(self, folder: Path) -> None:
        """Write all that the task loads it from."""


def bundle_pair(folder: Path, pairing: Pairing, served: Served) -> Pairing:
    """Write the models of a pair into the folder; return the pairing that names them there. An expert that runs
    elsewhere stays where it is."""
    options = dict(pairing.options)
    inside = {role: str(folder.resolve() / role) for role in ROLES if role in options}
    for role, place in inside.items():
        model = getattr(served, role)
        if isinstance(model, Bundled):
            if options[role] != place:  # it was loaded from there, and must not be written while it is read
                model.save_pretrained(Path(place))
            options[role] = place
    if all(options[role] != place for role, place in inside.items()):
        raise OptionError(f"the pair of task {pairing.task!r} cannot be bundled; leave bundle out")
    return dataclasses.replace(pairing, options=options)


def _bundled(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return options that name what lies in the folder itself without its path: the folder may move."""
    inside = {str(folder.resolve() / role): BUNDLE + role for role in ROLES}
    return {name: inside.get(str(value), value) for name, value in options.items()}


def hide_paths(folder: Path) -> None:
    """Leave of files and folders of this machine only their names, in a folder for others. Raise where its task is a
    file, which they do not have."""
    pairing = read_pairing(folder)
    if pairing.task.endswith(FILE_SUFFIX):
        raise OptionError(
            f"the task of this model is the file {pairing.task}, which others do not have; install it as a package "
            "and fit again by its name"
        )
    options = {
        name: Path(value).name if isinstance(value, str) and os.path.isabs(value) else value
        for name, value in pairing.options.items()
    }
    write_pairing(folder, dataclasses.replace(pairing, options=options))


def unbundled(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return options with the folders of bundled models, wherever the model is now."""
    return {name: str(folder.resolve() / name) if value == BUNDLE + name else value for name, value in options.items()}


def pairing_of(task: str, options: Any, served: Served, recipe: str = "", data: str = "") -> Pairing:
    """Describe a pair. Files and folders get absolute paths: the model may be used from elsewhere."""
    plain = dataclasses.asdict(options)
    for field in dataclasses.fields(options):
        if field.metadata.get("is_path"):
            plain[field.name] = absolute(plain[field.name])
    return Pairing(task, plain, served.predictor.fingerprint, served.expert.fingerprint, recipe, data)


def absolute(value: str | None) -> str | None:
    """Return the absolute path of what exists, also after a prefix (NAME:FOLDER); a name on a hub stays as it is."""
    if not value or os.path.exists(value):  # Path.exists fails where a name is too long
        return str(Path(value).resolve()) if value else value
    kind, _, path = value.partition(":")
    if not path or path.startswith("//") or not os.path.exists(path):
        return value
    return f"{kind}:{Path(path).resolve()}"
