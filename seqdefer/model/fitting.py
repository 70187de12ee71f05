"""`seqdefer fit`: from a task and data to a folder that `DeferringModel.from_pretrained` opens.

`DeferringModel.fit` does the same for models and data in Python. Labels and the fitted rejector are stored in
`FOLDER/work`: what was stopped resumes, and the folder is complete when deferral.json is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seqdefer.evaluation.settings import ExperimentSettings, choose_settings
from seqdefer.interfaces import TaskEntry
from seqdefer.model.deferring_model import DeferringModel


def fit_model(
    entry: TaskEntry, options: Any, settings: ExperimentSettings | None, folder: Path, **how: Any
) -> DeferringModel:
    """Fit, calibrate and save; see `DeferringModel.fit_task`. Without settings, those of the command line."""
    settings = choose_settings(entry, {})[1] if settings is None else settings
    return DeferringModel().fit_task(entry, options, settings, folder, **how)
