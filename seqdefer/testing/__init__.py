"""Fakes to test with, and checks that tell the author of a task, an expert, a policy or a loss whether it is right.

    ToyTask, FunctionPredictor, FunctionExpert                            tiny, exact, instant
    check_task, check_predictor, check_expert, check_policy, check_loss   None, or a ContractError

A check stops at the first rule that is broken; its message is one line: what, the value, what to do. No check can see
whether the predictor was trained on the examples of a split: that is the author's to see to.

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
