"""A pair that writes within budgets, caps and prices: the part of a `DeferringModel` that is used.

    model.generate(inputs, budget=0.2, cap=Cap(tokens=20))
    for token in model.stream("one input", budget=0.2):
        print(token.text, end="")

Which threshold a budget stands for is known from the calibration (`model.calibrated_pair`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from seqdefer.budgets.calibration import BUDGETS
from seqdefer.budgets.capped import Schedule
from seqdefer.budgets.caps import Allowance, Cap, allowances
from seqdefer.budgets.prices import Bill, Prices, check_money, require_prices
from seqdefer.budgets.rules import Setting, check_threshold, realised_shares
from seqdefer.errors import OptionError, require_one
from seqdefer.methods.plans import BATCH_SIZE, Plan, PlanResult
from seqdefer.model.calibrated_pair import DEFAULT_BUDGET, CalibratedPair
from seqdefer.model.generation import Decisions, Generation, StreamedToken, input_tokens
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.types import Examples, Rollout, Sequences

CHECKED_BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)


class WritingPair(CalibratedPair):
    """A calibrated pair at work. With `prices`, it counts money."""

    prices: Prices | None = None

    # -- writing ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Sequence[Any],
        budget: float | None = None,
        *,
        threshold: float | None = None,
        budget_money: float | None = None,
        cap: Cap | Sequence[Cap] = (),
        batch_size: int = BATCH_SIZE,
    ) -> Generation:
        """Write sequences for all inputs, the expert about `budget` of their tokens (0.2); or by a `threshold`; or for
        about `budget_money` a sequence, with prices. A `cap` is never exceeded: see `seqdefer.budgets.caps`."""
        require_one(budget=budget, threshold=threshold, budget_money=budget_money)
        examples = self._encode(inputs)
        if budget_money is not None:
            budget = self.budget_for_money(budget_money, input_tokens(self.served.codec, inputs, examples))
        allowed = self._allowances(cap, inputs, examples)
        result = self._run(examples, self._threshold(budget, threshold), batch_size, allowed=allowed)
        rollout, capped = result.rollout, None if allowed is None else result.capped.tolist()
        bills = None if self.prices is None else self._bills(rollout, inputs, examples)
        return Generation(
            self._outputs(rollout.sequences), rollout, self.served.authors, self.served.codec, capped, bills
        )

    def decide(
        self,
        inputs: Sequence[Any],
        budget: float | None = None,
        *,
        threshold: float | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> Decisions:
        """Return where the rejector would defer, without running the expert."""
        require_one(budget=budget, threshold=threshold)
        examples = self._encode(inputs)
        result = self._run(examples, self._threshold(budget, threshold), batch_size, may_defer=False)
        alone = result.rollout
        return Decisions(self._outputs(alone.sequences), alone.sequences, alone.scores, result.wanted)

    def stream(
        self,
        one: Any,
        budget: float | None = None,
        *,
        threshold: float | None = None,
        budget_money: float | None = None,
        cap: Cap | Sequence[Cap] = (),
    ) -> Iterator[StreamedToken]:
        """Yield the tokens of one sequence as they are written. Their texts together are the output."""
        require_one(budget=budget, threshold=threshold, budget_money=budget_money)
        examples = self._encode([one])
        if budget_money is not None:
            budget = self.budget_for_money(budget_money, input_tokens(self.served.codec, [one], examples))
        allowed = self._allowances(cap, [one], examples)
        return self._stream(examples, self._threshold(budget, threshold), allowed)

    def _stream(
        self, examples: Examples, threshold: float, allowed: Sequence[Allowance] | None
    ) -> Iterator[StreamedToken]:
        served, plan, n_shown, shown = self.served, self.plan(), 0, ""
        (row,) = plan.admit(examples, torch.tensor([threshold], dtype=torch.float64), None, allowed)
        while plan.rows:
            plan.turn()
            if row.written.error is not None:
                raise row.written.error
            tokens = row.written.tokens
            for position in range(n_shown, len(tokens)):
                is_last = row.is_over and position + 1 == len(tokens)
                added = served.codec.added(tokens[: position + 1], shown, is_last=is_last)
                shown += added
                author = served.authors[row.written.authors[position]]
                score = row.written.scores[position]
                yield StreamedToken(position, tokens[position], added, author, score, row.is_capped(position))
            n_shown = len(tokens)

    def plan(self, **options: Any) -> Plan:
        """Return a plan of this pair, without rows; options as in `seqdefer.methods.plans`."""
        return self.deferral.plan(self.served, schedule=self._schedule, **options)

    def _run(self, examples: Examples, threshold: float, batch_size: int, **options: Any) -> PlanResult:
        if batch_size < 1:
            raise OptionError(f"batch size {batch_size}; it must be at least 1")
        settings = torch.full((len(examples),), threshold, dtype=torch.float64)
        how = {"at_once": batch_size, "schedule": self._schedule, **options}
        return self.deferral.write(self.served, examples, settings, **how)

    @property
    def _schedule(self) -> Schedule | None:
        return None if self.calibration is None else self.calibration.schedule(self.served.spec.length)

    def _threshold(self, budget: float | None, threshold: float | None) -> float:
        if threshold is None:
            return self.setting(DEFAULT_BUDGET if budget is None else budget).threshold
        return check_threshold(threshold)

    def _outputs(self, sequences: Sequences) -> list[Any]:
        rows = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
        return [self.served.codec.decode(tokens[:length]) for tokens, length in rows]

    def check(
        self, inputs: Sequence[Any], budgets: Sequence[float] = CHECKED_BUDGETS, *, progress: Progress = NO_PROGRESS
    ) -> tuple[Setting, ...]:
        """Return what budgets spend on other inputs than those of the calibration: settings, with the shares seen
        here."""
        settings, deferred, written = [self.setting(budget) for budget in budgets], [], []
        for setting in settings:
            rollout = self.generate(inputs, threshold=setting.threshold).rollout
            deferred.append(rollout.deferred.numpy())
            written.append(rollout.sequences.lengths.numpy())
            progress(1)
        shares = realised_shares(np.stack(deferred).astype(float), np.stack(written).astype(float))
        seen = zip(budgets, settings, *shares, strict=True)
        return tuple(Setting(budget, one.threshold, *map(float, found)) for budget, one, *found in seen)

    # -- caps and money --------------------------------------------------------------------------------------------

    def use_prices(self, prices: Prices) -> None:
        """Count money by these prices from now on. Hours are counted by measured times where the prices name none."""
        length = None if self.calibration is None else self.calibration.mean_length
        if self.timing is None or length is None:
            self.prices = prices.with_times(None, None)
        else:
            self.prices = prices.with_times(self.timing.predictor / length, self.timing.expert / length)

    def expected_money(self, tokens: int, share: float) -> float:
        """Return about what a sequence costs whose input has so many tokens, if the expert writes a share of it."""
        prices = require_prices(self.prices)
        length = None if self.calibration is None else self.calibration.mean_length
        if length is None:
            raise OptionError(
                "a budget in money needs the usual length of sequences, which this model's calibration does not have; "
                "make it again: seqdefer calibrate DIR --data FILE"
            )
        return prices.expected(tokens, length, share, by_token=self.is_token_level)

    def budget_for_money(self, money: float, tokens: Sequence[int]) -> float:
        """Return the largest budget whose setting is expected to cost at most `money` a sequence, for inputs of so
        many tokens."""
        check_money(money)
        mean = round(sum(tokens) / len(tokens))
        alone = self.expected_money(mean, 0.0)
        if alone > money:
            assert self.prices is not None
            raise OptionError(
                f"a budget of {money:g} {self.prices.currency} is too small: the predictor alone costs about "
                f"{alone:.3g} a sequence"
            )
        assert self.calibration is not None
        costs = [self.expected_money(mean, one.share) for one in self.calibration.settings]
        return max(budget for budget, cost in zip(BUDGETS, costs, strict=True) if budget == 0 or cost <= money)

    def _allowances(
        self, cap: Cap | Sequence[Cap], inputs: Sequence[Any], examples: Examples
    ) -> list[Allowance] | None:
        caps = [cap] if isinstance(cap, Cap) else list(cap) if isinstance(cap, Sequence) else [cap]
        for one in caps:
            if not isinstance(one, Cap):
                raise OptionError(f"cap is {one!r:.60}; give a Cap, such as Cap(tokens=20)")
        if self.is_token_level and self.calibration is None and any(one.policy == "rising" for one in caps):
            raise OptionError(
                "a rising cap needs budgets that were measured; do that: seqdefer calibrate DIR --data FILE, or choose "
                "the policy cut-off (--cap-policy)"
            )
        has_money = any(one.money is not None for one in caps)
        tokens = input_tokens(self.served.codec, inputs, examples) if has_money else [0] * len(inputs)
        return allowances(caps, tokens, self.prices)

    def _bills(self, rollout: Rollout, inputs: Sequence[Any], examples: Examples) -> list[Bill]:
        assert self.prices is not None
        tokens = input_tokens(self.served.codec, inputs, examples)
        rows = zip(tokens, rollout.authors.tolist(), rollout.sequences.lengths.tolist(), strict=True)
        return [self.prices.bill(n, authors[:length], by_token=self.is_token_level) for n, authors, length in rows]
