"""Whole files of inputs: `seqdefer generate DIR --data in.jsonl --out out.jsonl`.

    written = write_file(model, Path("in.jsonl"), Path("out.jsonl"), threshold=0.3)

Inputs are read and written batch by batch. Until all are written, they are in OUT.part, and OUT.part.json says how they
were made; what was stopped, even by kill -9, resumes at the first batch that is not whole. The batches are then those
of a fresh start, and so is the file; scores are left out, because their last digits depend on how many rows happened
to stand together. An input that cannot be encoded gets a row with its error instead of an output.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from seqdefer.budgets.caps import Cap
from seqdefer.errors import CheckpointError, InputError, OptionError
from seqdefer.methods.plans import BATCH_SIZE
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.progress import Meter, Silent
from seqdefer.storage.files import read_json, writable_folder, write_json
from seqdefer.storage.user_files import parse_input, read_lines

KIND = "JSONL or one input a line"


@dataclass(frozen=True)
class FileCounts:
    """What became of a file: inputs in all, those found written already, and those that could not be encoded."""

    inputs: int
    found: int
    failed: int


def write_file(
    model: DeferringModel,
    data: Path,
    out: Path,
    *,
    threshold: float,
    field: str | None = None,
    batch_size: int = BATCH_SIZE,
    caps: Sequence[Cap] = (),
    meter: Meter | None = None,
) -> FileCounts:
    """Write a JSON line for every input of a file, in its order: its line number, and the row of `Generation.rows`
    without scores."""
    check_request(data, out, batch_size, caps)
    field = field or model.served.codec.field
    made_by = {
        "rejector": model.rejector.fingerprint, "predictor": model.served.predictor.fingerprint,
        "expert": model.served.expert.fingerprint, "threshold": repr(threshold), "field": field,
        "batch_size": batch_size, "data": _digest(data), "caps": [asdict(cap) for cap in caps],
        "prices": None if model.prices is None else asdict(model.prices),
    }  # fmt: skip
    n = sum(1 for _ in read_lines(data, kind=KIND))
    with _unfinished(out, made_by) as file, (meter or Silent()).stage("generate", n) as advance:
        found, failed = _keep_batches(file, batch_size, n)
        lines = islice(read_lines(data, kind=KIND), found, None)
        advance(found)
        while batch := list(islice(lines, batch_size)):
            rows = list(_rows(model, batch, data, field, threshold=threshold, cap=caps))
            file.write("".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())
            failed += sum("error" in row for row in rows)
            advance(len(batch))
    return FileCounts(n, found, failed)


def check_request(data: Path, out: Path, batch_size: int, caps: Sequence[Cap]) -> None:
    """Raise what is wrong with the arguments of `write_file`, which need no model."""
    if batch_size < 1:
        raise OptionError(f"--batch-size is {batch_size}; it must be at least 1")
    if any(cap.per == "request" for cap in caps):
        raise OptionError("--cap-per request does not go with --data: a file is not one request; cap each sequence")
    next(read_lines(data, kind=KIND))  # raises where the file cannot be read
    if out.exists():
        raise OptionError(f"{out} exists already; remove it, or choose another file with --out")


def _rows(
    model: DeferringModel, batch: list[tuple[int, str]], data: Path, field: str, **how: Any
) -> Iterator[dict[str, Any]]:
    """Yield the row of every line of a batch; those that can be encoded are written together."""
    codec, inputs, rows = model.served.codec, dict[int, Any](), dict[int, dict[str, Any]]()
    for number, line in batch:
        try:
            inputs[number] = codec.local_input(parse_input(line, data, number, field), data.parent)
        except InputError as error:
            rows[number] = {"error": str(error)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again when these inputs are written
        try:
            codec.encode(list(inputs.values()))
        except InputError:  # one at least: find which
            for number, one in list(inputs.items()):
                if (message := _fault(model, one)) is not None:
                    del inputs[number]
                    rows[number] = {"error": message}
    if inputs:
        written = model.generate(list(inputs.values()), **how, batch_size=len(inputs))
        rows |= zip(inputs, map(_without_scores, written.rows(codec)), strict=True)
    yield from ({"line": number, **rows[number]} for number, _ in batch)


def _without_scores(row: dict[str, Any]) -> dict[str, Any]:
    tokens = [{name: value for name, value in token.items() if name != "score"} for token in row["tokens"]]
    return {**row, "tokens": tokens}


def _fault(model: DeferringModel, one: Any) -> str | None:
    try:
        model.served.codec.encode([one])
    except InputError as error:
        return str(error)
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _how(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


@contextmanager
def _unfinished(out: Path, made_by: dict[str, Any]) -> Iterator[BinaryIO]:
    """Open the unfinished file, which becomes `out` in the end. After an error, one without rows is removed."""
    with writable_folder(out.parent):
        part = _open_part(out, made_by)
        with part.open("rb+") as file:
            _lock(file, part)
            try:
                yield file
            except BaseException:
                if not part.stat().st_size:
                    part.unlink()
                    _how(part).unlink()
                raise
        os.replace(part, out)
        _how(part).unlink()


def _lock(file: BinaryIO, part: Path) -> None:
    """Refuse a file that another process is writing; a process that is killed holds no lock."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise OptionError(
            f"{part} is being written by another process; wait for it, or choose another --out"
        ) from error


def _open_part(out: Path, made_by: dict[str, Any]) -> Path:
    """Return the path of the unfinished file; refuse one that other options or inputs have begun."""
    part = out.with_name(f"{out.name}.part")
    if part.exists():
        try:
            found = read_json(_how(part))
        except CheckpointError:  # stopped between the two, or damaged
            found = None
        if found != made_by:
            raise OptionError(
                f"{part} was begun with another model, budget, batch size or file of inputs; remove it, or choose "
                "another file with --out"
            )
        return part
    write_json(_how(part), made_by)
    part.touch()
    return part


def _keep_batches(file: BinaryIO, batch_size: int, n: int) -> tuple[int, int]:
    """Cut an unfinished file after its last whole batch. Return the number of its rows, and of those that failed."""
    ends, failed, place = [0], [0], 0
    for line in file:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # half a line, or what a power failure left
            break
        if not isinstance(row, dict) or not line.endswith(b"\n"):
            break
        place += len(line)
        ends.append(place)
        failed.append(failed[-1] + ("error" in row))
    rows = len(ends) - 1
    kept = rows if rows == n else rows - rows % batch_size
    file.truncate(ends[kept])
    file.seek(ends[kept])
    return kept, failed[kept]
