"""The job of `seqdefer run`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from seqdefer.environment import choose_device
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.results import Results, save_results
from seqdefer.evaluation.settings import ExperimentSettings, recipe_changes
from seqdefer.interfaces import TaskEntry
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.label_store import open_labels
from seqdefer.progress import Clock, Meter, Silent
from seqdefer.report.figure import write_card
from seqdefer.report.html import write_report
from seqdefer.report.panels import EXAMPLES_FILE, panels_of
from seqdefer.storage.files import write_text


def run_task(
    entry: TaskEntry,
    options: Any,
    settings: ExperimentSettings,
    folder: Path,
    *,
    preset: str = "custom",
    command: str = "",
    device: str = "auto",
    meter: Meter | None = None,
    labelling: ExecutorSettings | None = None,
    timing: bool = True,
) -> Results:
    """Prepare the task, run the experiment, and write results.json and report.html into `folder`."""
    clock = Clock(meter or Silent())
    task = entry.prepare(options, folder, choose_device(device), clock)
    labels = open_labels(labelling or ExecutorSettings(), entry, options, task, folder, device)
    experiment = Experiment(task, settings, folder, clock, labels=labels)
    results = experiment.run(preset=preset, command=command, timing=timing)
    results = replace(results, recipe_changes=recipe_changes(entry, options, settings))
    save_results(results, folder)
    (folder / EXAMPLES_FILE).unlink(missing_ok=True)  # drawings of an earlier run
    if experiment.drawn:
        write_text(folder / EXAMPLES_FILE, experiment.drawn)
    write_report(results, folder / "report.html", panels=panels_of(folder), card=write_card(results, folder))
    return results
