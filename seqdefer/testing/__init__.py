"""Fakes for tests, and contract checks for authors of tasks, predictors, experts, policies and losses.

    ToyTask, FunctionPredictor, FunctionExpert                            tiny, exact, instant
    check_task, check_predictor, check_expert, check_policy, check_loss   return None, or raise ContractError

A check stops at the first broken rule; its one-line message says what happened, the value, and what to do. No check can
see whether the predictor was trained on the examples of a split: that is up to the author.

>>> check_task(ToyTask())
"""

from seqdefer.testing.experts import check_expert
from seqdefer.testing.fakes import FunctionExpert, FunctionPredictor, ToyTask
from seqdefer.testing.losses import check_loss
from seqdefer.testing.policies import check_policy
from seqdefer.testing.predictors import check_predictor
from seqdefer.testing.tasks import check_task

__all__ = [
    "FunctionExpert",
    "FunctionPredictor",
    "ToyTask",
    "check_expert",
    "check_loss",
    "check_policy",
    "check_predictor",
    "check_task",
]
