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
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604

if TYPE_CHECKING:  # what type checkers and editors see: `as` marks a name as re-exported
    from seqdefer.errors import CheckpointError as CheckpointError
    from seqdefer.errors import ContractError as ContractError
    from seqdefer.errors import DataError as DataError
    from seqdefer.errors import InputError as InputError
    from seqdefer.errors import MissingExtraError as MissingExtraError
    from seqdefer.errors import OptionError as OptionError
    from seqdefer.errors import SeqdeferError as SeqdeferError
    from seqdefer.interfaces import DraftRejector as DraftRejector
    from seqdefer.interfaces import Expert as Expert
    from seqdefer.interfaces import NextTokenExpert as NextTokenExpert
    from seqdefer.interfaces import Policy as Policy
    from seqdefer.interfaces import Predictor as Predictor
    from seqdefer.interfaces import Task as Task
    from seqdefer.interfaces import TaskEntry as TaskEntry
    from seqdefer.interfaces import TokenRejector as TokenRejector
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
