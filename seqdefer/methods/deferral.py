"""What a fitted rejector does, by its granularity: sweep labelled data, tell what settings spend, plan a batch.

deferral = deferral_of(rejector)
deferral.sweep(test_data, rows)                        # for a deferral curve
deferral.spending(task, examples)                      # for a calibration
deferral.write(pair, examples, settings)               # for a request
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqdefer.budgets.capped import Schedule
from seqdefer.budgets.caps import Allowance
from seqdefer.budgets.rollback_sweeps import sweep_rollbacks
from seqdefer.budgets.spending import HandOffSpending, Spending, TokenSpending, n_set_aside
from seqdefer.budgets.sweeps import GridSweep, Sweep, hand_off_sweep
from seqdefer.budgets.token_sweeps import TokenSweep, join_sweeps, sweep_thresholds
from seqdefer.engine.drafts import draft
from seqdefer.engine.pace import Pace
from seqdefer.errors import OptionError
from seqdefer.interfaces import DraftRejector, Expert, Predictor, SplitName, Task, TokenRejector
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.labels.labelled import LabelledData
from seqdefer.labels.trees import DecisionTrees
from seqdefer.methods.plans import HandOffPlan, Pair, Plan, PlanResult, TokenPlan, scored_hand_offs, write_all
from seqdefer.progress import Progress
from seqdefer.rejectors.other_rules import RollbackRule
from seqdefer.types import Examples, HandOffTable, Sequences

TREES_AT_ONCE = 32  # inputs whose trees are grown together; progress advances after each batch


class DeferralRunner(ABC):
    """A rejector at work."""

    @abstractmethod
    def sweep(self, data: LabelledData, rows: Tensor) -> Sweep:
        """Return what every setting does to the instances `rows` of labelled data."""

    @abstractmethod
    def spending(
        self,
        task: Task,
        examples: Examples,
        *,
        labelled: LabelledData | None = None,
        trees: DecisionTrees | None = None,
        progress: Progress = lambda _: None,
        set_aside: bool = False,
    ) -> Spending:
        """Tell what every setting does to `examples`. Where they are `labelled`, one-time deferral runs no model, and
        token-level deferral none for the nodes that their trees hold, or `trees` of any other kind. With `set_aside`,
        the settings do not depend on the inputs that are counted, which a guarantee needs: at token level some inputs
        choose the thresholds and are not counted."""

    @abstractmethod
    def plan(self, pair: Pair, **options: Any) -> Plan:
        """Return a plan without rows; options as in `seqdefer.methods.plans`."""

    def write(
        self,
        pair: Pair,
        examples: Examples,
        settings: Tensor,
        *,
        at_once: int | None = None,
        may_defer: bool = True,
        allowed: Sequence[Allowance] | None = None,
        schedule: Schedule | None = None,
    ) -> PlanResult:
        """Write rows at `settings` (n,), `at_once` at a time (default: all), within caps if there are any; those that
        rise need a `schedule`."""
        plan, at_once = self.plan(pair, schedule=schedule), at_once or len(examples)
        return write_all(plan, examples, settings, pair.spec, at_once=at_once, may_defer=may_defer, allowed=allowed)


class TokenDeferral(DeferralRunner):
    """Token-level deferral: decisions change the prefix, so what settings do is found by rollouts."""

    def __init__(self, rejector: TokenRejector[Any]) -> None:
        self.rejector, self.pace = rejector, Pace()

    def sweep(self, data: LabelledData, rows: Tensor) -> Sweep:
        assert data.trees is not None
        swept = sweep_tokens(self.rejector, data.trees, rows).to("cpu")
        return GridSweep(swept.deferred, swept.loss, swept.passes, swept.thresholds)

    @torch.no_grad()
    def spending(
        self,
        task: Task,
        examples: Examples,
        *,
        labelled: LabelledData | None = None,
        trees: DecisionTrees | None = None,
        progress: Progress = lambda _: None,
        set_aside: bool = False,
    ) -> Spending:
        trees = labelled.trees if trees is None and labelled is not None else trees
        # Files are often sorted: inputs from all over one tell which thresholds are worth a rollout.
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
        first = n_set_aside(len(examples)) if set_aside else min(TREES_AT_ONCE, len(order))
        parts = (
            DecisionTrees(task, examples.select(rows), reads_first=self.rejector.reads_first)
            if trees is None
            else trees.reopened(rows)
            for rows in (order[:first], *order[first:].split(TREES_AT_ONCE))
            if len(rows)
        )
        thresholds, parts_swept = None, []
        for part in parts:
            if thresholds is None:
                thresholds = _between(sweep_tokens(self.rejector, part).thresholds)
                if set_aside:
                    progress(len(part))
                    continue
            parts_swept.append(sweep_tokens(self.rejector, part, thresholds=thresholds))
            progress(len(part))
        assert thresholds is not None
        joined = replace(join_sweeps(parts_swept), thresholds=thresholds)
        return TokenSpending(joined.to("cpu"), task.spec.length, has_fixed_settings=set_aside)

    def plan(self, pair: Pair, **options: Any) -> Plan:
        if self.rejector.reads_first:
            raise OptionError(
                "this rejector lets the expert read every position before it decides, which no plan does; it can be "
                "compared with others (seqdefer run), and not generate"
            )
        return TokenPlan(pair, self.rejector, pace=self.pace, **options)


class HandOffDeferral(DeferralRunner):
    """Whole and one-time deferral: everything follows from drafts and the table of their hand-offs."""

    def __init__(self, rejector: DraftRejector) -> None:
        self.rejector = rejector

    def sweep(self, data: LabelledData, rows: Tensor) -> Sweep:
        table = data.table.select(rows)
        return hand_off_sweep(scored_hand_offs(self.rejector, data.draft.select(rows), _length(table)), table)

    @torch.no_grad()
    def spending(
        self,
        task: Task,
        examples: Examples,
        *,
        labelled: LabelledData | None = None,
        trees: DecisionTrees | None = None,
        progress: Progress = lambda _: None,
        set_aside: bool = False,
    ) -> Spending:
        if labelled is not None:
            drafted, table = labelled.draft, labelled.table
        else:
            drafted = draft(task.predictor, examples, task.spec)
            kept = self.rejector.hand_offs or (0,)
            table, _ = hand_off_table(task, examples, drafted, kept=kept, progress=progress)
        return HandOffSpending(scored_hand_offs(self.rejector, drafted, task.spec.length), table)

    def plan(self, pair: Pair, **options: Any) -> Plan:
        return HandOffPlan(pair, self.rejector, **options)


def deferral_of(rejector: TokenRejector[Any] | DraftRejector) -> DeferralRunner:
    """Return what a rejector does, by its granularity."""
    return TokenDeferral(rejector) if isinstance(rejector, TokenRejector) else HandOffDeferral(rejector)


def sweep_tokens(
    rejector: TokenRejector[Any], trees: DecisionTrees, rows: Tensor | None = None, thresholds: Tensor | None = None
) -> TokenSweep:
    """Roll thresholds through trees; a rejector that takes tokens back rolls in its own way."""
    if isinstance(rejector, RollbackRule):
        return sweep_rollbacks(trees, rejector.rho, rows, thresholds)
    return sweep_thresholds(rejector, trees, rows, thresholds)


def _length(table: HandOffTable) -> int:
    return table.loss.shape[1] - 1


def _between(scores: Tensor) -> Tensor:
    """Return thresholds half way between rising scores, falling, with both ends. At a score itself, rounding could
    decide: a batch of another size moves the last digit."""
    finite = scores[scores.isfinite()]
    between = ((finite[:-1] + finite[1:]) / 2).unique().flip(0)
    return torch.cat([between.new_tensor([math.inf]), between, between.new_tensor([-math.inf])])


class UnjudgedTask(Task):
    """A pair with inputs whose references are unknown: all losses are 0."""

    name, loss_unit = "unjudged", ""
    predictor: Predictor[Any]
    expert: Expert

    def __init__(self, pair: Pair) -> None:
        self.predictor, self.expert, self.spec = pair.predictor, pair.expert, pair.spec

    def split(self, name: SplitName) -> Examples:
        raise NotImplementedError("it has no data of its own")

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        return torch.zeros(len(sequences), device=sequences.tokens.device)

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return torch.zeros(len(tokens), device=tokens.device)
