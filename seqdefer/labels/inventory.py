"""The contents of a label store: labellings, shards without a manifest, partial files. Listed, verified, removed.

Other files in the same folder are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from seqdefer.errors import CheckpointError, OptionError, unknown
from seqdefer.labels.manifest import Manifest, read_manifest
from seqdefer.storage.shards import SUFFIX, DamagedShardError, Store, is_name


@dataclass(frozen=True)
class StoredLabelling:
    """A finished labelling. Shards that were lost since are made again when they are needed."""

    manifest: Manifest
    missing: tuple[str, ...]  # shards
    made: str  # when the manifest was written, UTC


@dataclass(frozen=True)
class Inventory:
    """Everything that labelling left in a store."""

    labellings: tuple[StoredLabelling, ...]
    orphans: tuple[str, ...]  # shards of no labelling: it is unfinished, or its manifest is damaged
    partial_files: tuple[Path, ...]  # left by a writer that was killed
    damaged: dict[Path, str]  # manifests, and what is wrong with them
    orphan_bytes: int

    def find(self, names: Iterable[str]) -> list[Manifest]:
        """Return the labellings of these names or unambiguous prefixes of names."""
        known = {one.manifest.name: one.manifest for one in self.labellings}
        chosen = []
        for name in names:
            matches = [whole for whole in known if whole.startswith(name)]
            if not matches:
                raise unknown("labelling", name, known)
            if len(matches) > 1:
                raise OptionError(f"{name!r} matches several names: {', '.join(sorted(matches))}; give more letters")
            chosen.append(known[matches[0]])
        return chosen


def find_store(folder: Path) -> Store:
    """Open the label store in a folder, which may be that of a run or a fitted model."""
    if not folder.is_dir():
        raise OptionError(f"no folder {folder}; give the folder of --labels, of a run or of a fitted model")
    inside = [path for path in (folder / "labels", folder / "work" / "labels") if path.is_dir()]
    return Store(inside[0] if inside else folder)


def take_inventory(store: Store) -> Inventory:
    """List the contents of a store."""
    labellings, damaged = [], {}
    for path in sorted(path for path in store.folder.glob("*.json") if is_name(path.stem)):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            damaged[path] = str(error)
            continue
        missing = tuple(shard.name for shard in manifest.shards if not store.path(shard.name).is_file())
        made = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M")
        labellings.append(StoredLabelling(manifest, missing, made))
    used = {shard.name for one in labellings for shard in one.manifest.shards}
    orphans = tuple(name for name in store.names() if name not in used)
    size = sum(store.path(name).stat().st_size for name in orphans)
    return Inventory(tuple(labellings), orphans, _partial_files(store), damaged, size)


def _partial_files(store: Store) -> tuple[Path, ...]:
    """Return the temporary files of `storage.files.write_aside`."""
    found = [path for end in (SUFFIX, ".json") for path in store.folder.glob(f".*{end}.*")]
    return tuple(sorted(path for path in found if is_name(path.name[1:].split(".")[0])))


def verify(store: Store) -> dict[Path, str]:
    """Read every byte; return the files that are damaged or missing, and why."""
    fresh, found = Store(store.folder), take_inventory(store)  # a fresh store has no digests cached
    digests, problems = dict[str, str](), dict(found.damaged)
    for name in fresh.names():
        try:
            digests[name] = fresh.open(name).digest
        except DamagedShardError as error:
            problems[fresh.path(name)] = str(error)
    for one in found.labellings:
        for shard in one.manifest.shards:
            path = fresh.path(shard.name)
            if shard.name in one.missing:
                problems[path] = f"{path} is missing: labelling {one.manifest.name} lists it"
            elif digests.get(shard.name, shard.digest) != shard.digest:
                problems[path] = f"{path} is damaged: labelling {one.manifest.name} lists another digest"
    return problems


def remove_labellings(store: Store, names: Iterable[str]) -> list[Path]:
    """Remove manifests and their shards, except shards that another labelling lists."""
    found = take_inventory(store)
    chosen = found.find(names)
    removed = {manifest.name for manifest in chosen}
    others = [one.manifest for one in found.labellings if one.manifest.name not in removed]
    shared = {shard.name for manifest in others for shard in manifest.shards}
    shards = {shard.name for manifest in chosen for shard in manifest.shards} - shared
    # Manifests go first: one that exists lists shards that exist.
    manifests = [store.folder / f"{name}.json" for name in sorted(removed)]
    return _remove([*manifests, *(store.path(name) for name in sorted(shards))])


def remove_damaged(store: Store) -> list[Path]:
    """Remove what `verify` reports."""
    return _remove(verify(store))


def remove_unfinished(store: Store) -> list[Path]:
    """Remove orphans and partial files. Do not call it while something labels into this store."""
    found = take_inventory(store)
    return _remove([*found.partial_files, *(store.path(name) for name in found.orphans)])


def remove_all(store: Store) -> list[Path]:
    """Remove all manifests, shards and partial files."""
    found = take_inventory(store)
    manifests = [store.folder / f"{one.manifest.name}.json" for one in found.labellings]
    return _remove([*manifests, *found.damaged, *found.partial_files, *map(store.path, store.names())])


def _remove(paths: Iterable[Path]) -> list[Path]:
    existing = [path for path in paths if path.is_file()]
    for path in existing:
        path.unlink()
    return existing
