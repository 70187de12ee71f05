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

PAIRING_FILE = "deferral.json"
DIGESTS = "digests"  # a field of deferral.json: SHA-256 by name of file
BUNDLE = "bundle:"  # before the name of a folder within that of the model
ROLES = ("predictor", "expert")
REJECTOR_FOLDER, WORK_FOLDER = "rejector", "work"
Record = TypeVar("Record")


@dataclass(frozen=True)
class Pairing:
    """What deferral.json says: the task whose code loads the pair and reads inputs, its options, and who they are."""

    task: str
    options: Mapping[str, Any]
    predictor: str  # fingerprint
    expert: str  # fingerprint, "" where it has none
    recipe: str = ""  # how its rejector was made, "" where that is not known
    data: str = ""  # what it was fitted on, in words
    request: str = ""  # fingerprint of what its fit was asked for, "" where that is not known


@dataclass(frozen=True)
class LearnedFrom:
    """The names of all inputs of training and validation: see `seqdefer.labels.labelled.all_names`."""

    inputs: tuple[str, ...]
    rejector: str  # as in Calibration


# Records of a model, by its attribute; each is in a file of that name. All have the rejector that they belong to.
RECORDS: dict[str, Any] = {
    "calibration": Calibration,
    "curve": LossCurve,
    "learned_from": LearnedFrom,
    "quality": QualityPromise,
    "timing": Timing,
}


def read_pairing(folder: Path) -> Pairing:
    """Read deferral.json."""
    if not (folder / PAIRING_FILE).is_file():
        is_begun = (folder / WORK_FOLDER).is_dir()
        action = "the same seqdefer fit resumes it" if is_begun else "make one: seqdefer fit TASK"
        fault = f"it has no {PAIRING_FILE}" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"no deferring model in {folder}: {fault}; {action}")
    return _read(Pairing, folder / PAIRING_FILE, "fit it again: seqdefer fit TASK")


def require_replaceable(folder: Path, request: str) -> None:
    """Raise where a folder holds a model that was fitted another way. The same fit may run again."""
    if not (folder / PAIRING_FILE).is_file():
        return
    found = read_pairing(folder)
    if found.request != request:
        held = ", ".join(part for part in (found.recipe and f"recipe {found.recipe}", found.data) if part)
        raise OptionError(
            f"{folder} holds a model that was fitted another way{f' ({held})' if held else ''}; choose another folder "
            "with --out (folder= in Python), or replace it: --replace (replace=True)"
        )


def write_pairing(folder: Path, pairing: Pairing) -> None:
    """Write deferral.json, with digests of the records that are there."""
    pairing = dataclasses.replace(pairing, options=_bundled(pairing.options, folder))
    write_json(folder / PAIRING_FILE, {**to_plain(pairing), DIGESTS: _digests(folder)})


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests of the records that are there, but the times, which no two machines share."""
    paths = [record_path(folder, name) for name in RECORDS if name != "timing"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}


def record_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def write_records(folder: Path, records: Mapping[str, Any]) -> None:
    """Write records, those that are not None, and note it in deferral.json, if there is one."""
    for name, record in records.items():
        if record is not None:
            write_json(record_path(folder, name), to_plain(record))
    if (folder / PAIRING_FILE).is_file():
        write_json(folder / PAIRING_FILE, {**read_json(folder / PAIRING_FILE), DIGESTS: _digests(folder)})


def read_record_of(rejector: SavedRejector, folder: Path, name: str) -> Any:
    """Read a record; None where there is none. That of another rejector is refused, and one that was changed."""
    path, action = record_path(folder, name), "fit again, or remove the file"
    if name == "calibration":
        action = f"measure it again: seqdefer calibrate {folder} --data FILE"
    if not path.is_file():
        return None
    found = _read(RECORDS[name], path, action)
    if isinstance(found, Calibration) and len(found.settings) != len(BUDGETS):
        raise CheckpointError(f"{path} has {len(found.settings)} settings, not {len(BUDGETS)}; {action}")
    if found.rejector != rejector.fingerprint:
        raise CheckpointError(f"{path} belongs to another rejector; {action}")
    found_digests = _digests(folder)
    digests = read_json(folder / PAIRING_FILE).get(DIGESTS, found_digests)  # folders of earlier versions have none
    if not isinstance(digests, dict) or digests.get(path.name) != found_digests.get(path.name):
        reason = f"its digest is not the one in {PAIRING_FILE}; it was edited, or writing it was interrupted"
        raise CheckpointError(f"{path} is not what was written: {reason}; {action}")
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
    for role in ROLES:
        named = str(pairing.options.get(role) or "")
        if os.path.isabs(named) and not os.path.exists(named):
            raise OptionError(
                f"{folder} was fitted with the {role} {named}, which is not there; say where it is: --{role} of "
                f"seqdefer generate and serve, {role}= in Python"
            )
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
