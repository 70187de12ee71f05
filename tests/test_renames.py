"""Modules that moved name their new places."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

import seqdefer
from seqdefer.renames import NEW_NAMES, NEW_PLACES, refuse_old_modules


@pytest.mark.parametrize("old", sorted(NEW_PLACES))
def test_an_old_module_names_its_new_place(old: str) -> None:
    place = re.split(r"[ ,]", NEW_PLACES[old])[0]
    if PathFinder.find_spec(old, seqdefer.__path__) is not None:  # a room today
        with pytest.raises(ImportError, match=re.escape(place)):
            exec(f"from {old} import something")
    else:
        with pytest.raises(ModuleNotFoundError, match=re.escape(f"{old} is now {place}")):
            import_module(old)
    if place.startswith("seqdefer."):
        import_module(place)


@pytest.mark.parametrize("old", sorted(NEW_NAMES))
def test_an_old_name_of_a_module_names_its_new_place(old: str) -> None:
    module, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match=re.escape(f"{old} is now {NEW_NAMES[old]}")):
        exec(f"from {module} import {name}")
    place, _, name = NEW_NAMES[old].rpartition(".")
    assert hasattr(import_module(place), name)


def test_the_changelog_lists_the_old_modules() -> None:
    text = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(seqdefer\.[\w.]+)` \| (.*) \|$", text, re.MULTILINE)
    assert {old: new.replace("`", "") for old, new in rows} == NEW_PLACES


def test_other_names_are_refused_as_python_does() -> None:
    """Modules of a room are imported as usual, and what never was has no new place."""
    exec("from seqdefer.engine import interleaved")
    assert not hasattr(import_module("seqdefer.engine"), "__wrapped__")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'seqdefer\.nowhere'$"):
        import_module("seqdefer.nowhere")


def test_old_modules_are_refused_once() -> None:
    finders = list(sys.meta_path)
    refuse_old_modules()
    assert sys.meta_path == finders
