"""What `DeferringModel.from_pair` was given: a pair and options, as names or as objects, until there is data to fit on.

Names and numbers are options of a task, as on the command line. Objects (loaded models, data in memory, a metric) go
through the task's own `TaskEntry.bind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from seqdefer.errors import OptionError, unknown
from seqdefer.evaluation.settings import ExperimentSettings, choose_settings
from seqdefer.interfaces import TaskEntry
from seqdefer.recipes import DEFAULT_PRESET, LearningSettings
from seqdefer.registry import load_task

PAIR_TASK = "text"  # the task of pairs of Hugging Face models
LEARNING = ("architecture", "draft_architecture", *(field.name for field in fields(LearningSettings)))


@dataclass(frozen=True)
class UnfittedPair:
    """A pair that waits for data, and where to load it."""

    given: Mapping[str, Any]
    device: str = "auto"

    @classmethod
    def of(cls, predictor: Any, expert: Any, tokenizer: Any, options: Mapping[str, Any], device: str) -> UnfittedPair:
        """Check the names of all options, and the values of those that are no objects."""
        if isinstance(tokenizer, str | Path):
            raise OptionError(
                f"tokenizer is {str(tokenizer)!r:.80}; give a loaded one: AutoTokenizer.from_pretrained(...)"
            )
        pair = cls({"predictor": predictor, "expert": expert, "tokenizer": tokenizer, **options}, device)
        pair.chosen({})
        return pair

    @property
    def names(self) -> tuple[str, str]:
        """The predictor and the expert, for people."""
        predictor, expert = (_shown(self.given[role]) for role in ("predictor", "expert"))
        return predictor, expert

    def chosen(
        self, more: Mapping[str, Any], *, preset: str = DEFAULT_PRESET, recipe: str = "ours"
    ) -> tuple[TaskEntry, Any, ExperimentSettings]:
        """Return the task, its options and the settings of a fit: those of the command line, replaced by what was
        given."""
        entry, given = bind(load_task(PAIR_TASK), {**self.given, **more})
        known = {field.name for field in fields(entry.presets[DEFAULT_PRESET])} | set(LEARNING)
        for name in given.keys() - known:
            raise unknown("option", name, known)
        return entry, *choose_settings(entry, given, preset=preset, recipe=recipe)


def bind(entry: TaskEntry, given: Mapping[str, Any]) -> tuple[TaskEntry, dict[str, Any]]:
    """Return the task that uses the objects among `given`, and plain options; what is None is left out."""
    usual, plain = next(iter(entry.presets.values())), dict[str, Any]()
    objects: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Path):
            plain[name] = str(value)
        elif isinstance(value, str) or name in LEARNING or _is_number(value, getattr(usual, name, None)):
            plain[name] = value
        elif value is not None:
            objects[name] = value
    if not objects:
        return entry, plain
    if entry.bind is None:
        raise OptionError(f"task {entry.name!r} takes no objects as {', '.join(objects)}; give names or files")
    entry, names = entry.bind(objects)
    return entry, {**plain, **names}


def _is_number(value: Any, default: Any) -> bool:
    """Whether a value is one for an option that takes numbers; a number in the place of a text is an object."""
    return isinstance(value, int | float) and not isinstance(default, str)


def _shown(model: Any) -> str:
    if isinstance(model, str | Path):
        return str(model)
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)
