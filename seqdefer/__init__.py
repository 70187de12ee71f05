"""Partial deferral of sequences: a cheap predictor writes, a learned rejector says where a dearer expert takes over.

The public names are below. Each is imported from its module when it is first asked for, so that `import seqdefer`
stays instant and the command line can print its help without loading PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# A new public name takes a line here, one in the imports below, and one in tests/test_structure.py.
_MODULE_OF = {
    "CheckpointError": "errors",
    "ContractError": "errors",
    "DataError": "errors",
    "InputError": "errors",
    "MissingExtraError": "errors",
    "OptionError": "errors",
    "SeqdeferError": "errors",
    "Draft": "types",
    "Examples": "types",
    "HandOffTable": "types",
    "Proposal": "types",
    "Rollout": "types",
    "SequenceSpec": "types",
    "Sequences": "types",
    "Step": "types",
    "Expert": "interfaces",
    "NextTokenExpert": "interfaces",
    "Policy": "interfaces",
    "Predictor": "interfaces",
    "DraftRejector": "interfaces",
    "TokenRejector": "interfaces",
    "TaskEntry": "interfaces",
    "Task": "interfaces",
    "HandOff": "engine",
    "draft": "engine",
    "interleave": "engine",
    "roll_out": "engine",
    "Calls": "labels",
    "hand_off_table": "labels",
    "DecisionTrees": "trees",
    "enumerate_trees": "trees",
    "get_phi": "losses",
    "get_psi": "losses",
    "one_time_surrogate": "losses",
    "token_surrogate": "losses",
    "DraftMLP": "rejectors",
    "LSTMRejector": "rejectors",
    "MLPRejector": "rejectors",
    "load_rejector": "rejectors",
    "Settings": "training",
    "fit_once": "training",
    "fit_token": "training",
    "fit_whole": "training",
    "Threshold": "policies",
    "sweep_thresholds": "policies",
    "threshold_for": "policies",
    "whole_threshold_for": "policies",
    "once_threshold_for": "policies",
    "ChowMean": "baselines",
    "ChowQuantile": "baselines",
    "ChowSum": "baselines",
    "Confidence": "baselines",
    "Curve": "curves",
    "curve_of": "curves",
    "improvement": "curves",
    "paired_bootstrap": "curves",
    "Results": "results",
    "load_results": "results",
    "write_report": "report",
    "Experiment": "experiment",
    "ExperimentSettings": "settings",
    "load_task": "experiment",
    "run_task": "experiment",
    "DeferringModel": "deferring",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604

if TYPE_CHECKING:  # what type checkers and editors see: `as` marks a name as re-exported
    from seqdefer.baselines import ChowMean as ChowMean
    from seqdefer.baselines import ChowQuantile as ChowQuantile
    from seqdefer.baselines import ChowSum as ChowSum
    from seqdefer.baselines import Confidence as Confidence
    from seqdefer.curves import Curve as Curve
    from seqdefer.curves import curve_of as curve_of
    from seqdefer.curves import improvement as improvement
    from seqdefer.curves import paired_bootstrap as paired_bootstrap
    from seqdefer.deferring import DeferringModel as DeferringModel
    from seqdefer.engine import HandOff as HandOff
    from seqdefer.engine import draft as draft
    from seqdefer.engine import interleave as interleave
    from seqdefer.engine import roll_out as roll_out
    from seqdefer.errors import CheckpointError as CheckpointError
    from seqdefer.errors import ContractError as ContractError
    from seqdefer.errors import DataError as DataError
    from seqdefer.errors import InputError as InputError
    from seqdefer.errors import MissingExtraError as MissingExtraError
    from seqdefer.errors import OptionError as OptionError
    from seqdefer.errors import SeqdeferError as SeqdeferError
    from seqdefer.experiment import Experiment as Experiment
    from seqdefer.experiment import load_task as load_task
    from seqdefer.experiment import run_task as run_task
    from seqdefer.interfaces import DraftRejector as DraftRejector
    from seqdefer.interfaces import Expert as Expert
    from seqdefer.interfaces import NextTokenExpert as NextTokenExpert
    from seqdefer.interfaces import Policy as Policy
    from seqdefer.interfaces import Predictor as Predictor
    from seqdefer.interfaces import Task as Task
    from seqdefer.interfaces import TaskEntry as TaskEntry
    from seqdefer.interfaces import TokenRejector as TokenRejector
    from seqdefer.labels import Calls as Calls
    from seqdefer.labels import hand_off_table as hand_off_table
    from seqdefer.losses import get_phi as get_phi
    from seqdefer.losses import get_psi as get_psi
    from seqdefer.losses import one_time_surrogate as one_time_surrogate
    from seqdefer.losses import token_surrogate as token_surrogate
    from seqdefer.policies import Threshold as Threshold
    from seqdefer.policies import once_threshold_for as once_threshold_for
    from seqdefer.policies import sweep_thresholds as sweep_thresholds
    from seqdefer.policies import threshold_for as threshold_for
    from seqdefer.policies import whole_threshold_for as whole_threshold_for
    from seqdefer.rejectors import DraftMLP as DraftMLP
    from seqdefer.rejectors import LSTMRejector as LSTMRejector
    from seqdefer.rejectors import MLPRejector as MLPRejector
    from seqdefer.rejectors import load_rejector as load_rejector
    from seqdefer.report import write_report as write_report
    from seqdefer.results import Results as Results
    from seqdefer.results import load_results as load_results
    from seqdefer.settings import ExperimentSettings as ExperimentSettings
    from seqdefer.training import Settings as Settings
    from seqdefer.training import fit_once as fit_once
    from seqdefer.training import fit_token as fit_token
    from seqdefer.training import fit_whole as fit_whole
    from seqdefer.trees import DecisionTrees as DecisionTrees
    from seqdefer.trees import enumerate_trees as enumerate_trees
    from seqdefer.types import Draft as Draft
    from seqdefer.types import Examples as Examples
    from seqdefer.types import HandOffTable as HandOffTable
    from seqdefer.types import Proposal as Proposal
    from seqdefer.types import Rollout as Rollout
    from seqdefer.types import Sequences as Sequences
    from seqdefer.types import SequenceSpec as SequenceSpec
    from seqdefer.types import Step as Step
else:  # hidden from type checkers, for which it would make every misspelt name exist

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # the next access does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
