"""Statistics of both models' distributions at a position: what rules that read first decide by.

With q the predictor's distribution, p the expert's and v the predictor's token: max q, max p, q(v), p(v), the entropy
of p, and the total variation distance, the sum of max(0, p - q) over the vocabulary.

>>> log_q, log_p = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.2, 0.7, 0.1]]).log()
>>> found = compare_distributions(log_q, log_p, torch.tensor([[0, 1]]))
>>> [round(float(value), 2) for value in (found.max_q, found.max_p, found.p_v, found.distance, found.differ)]
[0.5, 0.7, 0.2, 0.4, 1.0]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import ContractError, OptionError
from seqdefer.interfaces import NextTokenExpert, Predictor, Served, Task
from seqdefer.types import PairStatistics


def compare_distributions(log_q: Tensor, log_p: Tensor, tokens: Tensor) -> PairStatistics:
    """Compare log probabilities (B, V) of predictor and expert; `tokens` (B, 2) are what they name."""
    if log_q.shape != log_p.shape:
        raise ContractError(
            f"log_probs of the predictor have shape {tuple(log_q.shape)}, those of the expert {tuple(log_p.shape)}; "
            "give both over one vocabulary"
        )
    q, p = log_q.double().exp(), log_p.double().exp()  # single precision is too coarse for sums over large vocabularies
    proposed = tokens[:, :1].long()
    statistics = PairStatistics(
        max_q=q.amax(1),
        max_p=p.amax(1),
        q_v=q.gather(1, proposed).squeeze(1),
        p_v=p.gather(1, proposed).squeeze(1),
        entropy_p=torch.special.entr(p).sum(1),
        distance=(p - q).clamp(min=0).sum(1),
        differ=(tokens[:, 0] != tokens[:, 1]).double(),
    )
    return PairStatistics.of(statistics.stack().float())


def can_read_first(pair: Task | Served) -> bool:
    """Tell whether both models give log probabilities. A remote expert may not."""
    expert = pair.expert if isinstance(pair.expert, NextTokenExpert) else None
    return expert is not None and None not in (pair.predictor.with_log_probs(), expert.with_log_probs())


def models_with_log_probs(task: Task) -> tuple[Predictor[Any], NextTokenExpert[Any]]:
    """Return the models of a task with `log_probs` at work; raise OptionError where one cannot."""
    predictor = task.predictor.with_log_probs()
    expert = task.expert.with_log_probs() if isinstance(task.expert, NextTokenExpert) else None
    if predictor is None or expert is None:
        who = "predictor" if predictor is None else "expert"
        raise OptionError(
            f"the {who} of task {task.name!r} gives no probabilities of its tokens, so nothing can read them before it "
            "decides; choose methods that decide before the expert reads, such as TokenwiseModel"
        )
    return predictor, expert
