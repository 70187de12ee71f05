"""What a store holds: its labellings, shards that no manifest names, what was left half written. Listed, verified,
removed; files of others in the same folder are not touched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from seqdefer.errors import CheckpointError, OptionError, unknown
from seqdefer.labels.manifest import Manifest, path_of, read_manifest
from seqdefer.storage.shards import SUFFIX, DamagedShardError, Store, is_name


@dataclass(frozen=True)
class Labelling:
    """A labelling that was finished. What has been lost of it since is made again by whoever needs it."""

    manifest: Manifest
    missing: tuple[str, ...]  # shards
    made: str  # when the manifest was written, UTC


@dataclass(frozen=True)
class Contents:
    labellings: tuple[Labelling, ...]
    loose: tuple[str, ...]  # shards of no labelling: it was not finished, or its manifest is damaged
    halves: tuple[Path, ...]  # what was being written when its writer was killed
    damaged: dict[Path, str]  # manifests, and what is wrong with them
    loose_size: int  # bytes of the loose shards

    def named(self, names: Iterable[str]) -> list[Manifest]:
        """The labellings of these names, or the beginnings of names that leave no doubt."""
        found = {one.manifest.name: one.manifest for one in self.labellings}
        chosen = []
        for name in names:
            fitting = [whole for whole in found if whole.startswith(name)]
            if not fitting:
                raise unknown("labelling", name, found)
            if len(fitting) > 1:
                raise OptionError(f"{name!r} begins several names: {', '.join(sorted(fitting))}; give more of it")
            chosen.append(found[fitting[0]])
        return chosen


def store_in(folder: Path) -> Store:
    """The store at a folder, or that of a run's or a fitted model's folder."""
    if not folder.is_dir():
        raise OptionError(f"no folder {folder}; give the one that --labels named, or the folder of a run or a model")
    inside = [path for path in (folder / "labels", folder / "work" / "labels") if path.is_dir()]
    return Store(inside[0] if inside else folder)


def contents(store: Store) -> Contents:
    labellings, damaged = [], {}
    for path in sorted(path for path in store.folder.glob("*.json") if is_name(path.stem)):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            damaged[path] = str(error)
            continue
        missing = tuple(shard.name for shard in manifest.shards if not store.path(shard.name).is_file())
        made = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M")
        labellings.append(Labelling(manifest, missing, made))
    kept = {shard.name for one in labellings for shard in one.manifest.shards}
    loose = tuple(name for name in store.names() if name not in kept)
    size = sum(store.path(name).stat().st_size for name in loose)
    return Contents(tuple(labellings), loose, _halves(store), damaged, size)


def _halves(store: Store) -> tuple[Path, ...]:
    """As `store.write_aside` calls them."""
    found = [path for end in (SUFFIX, ".json") for path in store.folder.glob(f".*{end}.*")]
    return tuple(sorted(path for path in found if is_name(path.name[1:].split(".")[0])))


def verify(store: Store) -> dict[Path, str]:
    """Reads every byte. What is damaged or missing, and how."""
    held, found = Store(store.folder), contents(store)  # a store anew: nothing was checked before
    digests, wrong = dict[str, str](), dict(found.damaged)
    for name in held.names():
        try:
            digests[name] = held.open(name).digest
        except DamagedShardError as error:
            wrong[held.path(name)] = str(error)
    for one in found.labellings:
        for shard in one.manifest.shards:
            path = held.path(shard.name)
            if shard.name in one.missing:
                wrong[path] = f"{path} is missing: labelling {one.manifest.name} names it"
            elif digests.get(shard.name, shard.digest) != shard.digest:
                wrong[path] = f"{path} is damaged: labelling {one.manifest.name} names other bytes"
    return wrong


def remove_labellings(store: Store, names: Iterable[str]) -> list[Path]:
    """Manifests and their shards, but for those that another labelling names."""
    found = contents(store)
    chosen = found.named(names)
    going = {manifest.name for manifest in chosen}
    others = [one.manifest for one in found.labellings if one.manifest.name not in going]
    kept = {shard.name for manifest in others for shard in manifest.shards}
    shards = {shard.name for manifest in chosen for shard in manifest.shards} - kept
    paths = [
        path_of(store.folder, name) for name in sorted(going)
    ]  # first: what they name is whole as long as they are
    return _removed([*paths, *(store.path(name) for name in sorted(shards))])


def remove_damaged(store: Store) -> list[Path]:
    return _removed(verify(store))


def remove_unfinished(store: Store) -> list[Path]:
    """Not while something labels into this store."""
    found = contents(store)
    return _removed([*found.halves, *(store.path(name) for name in found.loose)])


def remove_all(store: Store) -> list[Path]:
    found = contents(store)
    manifests = [path_of(store.folder, one.manifest.name) for one in found.labellings]
    return _removed([*manifests, *found.damaged, *found.halves, *map(store.path, store.names())])


def _removed(paths: Iterable[Path]) -> list[Path]:
    there = [path for path in paths if path.is_file()]
    for path in there:
        path.unlink()
    return there
