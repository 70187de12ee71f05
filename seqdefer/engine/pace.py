"""How far the predictor runs ahead of the expert, and how far the expert reads, by what their work takes.

A step of the predictor gains a token of every row without an open question, and one of a row with q open questions with
probability g^q, where g is how often the expert agrees with a guess. The step pays as long as it gains tokens of a row
faster than turns do on average, whatever the number of rows. The time to read tokens is left out of that average: what
stands is read once in any case.

Reading on to a row's next question pays where it saves more of a turn's fixed time than it takes. On a GPU a pass over
many tokens takes hardly longer than one over few, so all are asked; on a CPU mostly the first alone. No step gains a
token past a question that will not be asked.

Times are measured as the work goes on. What is written does not depend on them. Where the expert alone would clearly be
faster, a warning says so, once: it needs a pass over one token of every row for each position.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MEMORY = 0.95  # weight of what was seen before, per turn
MAX_STEPS_AHEAD = 16  # of the predictor, in a turn
PASSES = 10  # of a stretch of turns, which is compared with the expert alone
STRETCHES = 3  # slower ones in a row before that is said: the first passes on a machine are slow
MARGIN = 1.2
LOST_SECONDS = 1.0  # a loss below these is not worth a word


@dataclass
class Turn:
    """What one turn did and took."""

    rows: int = 0
    steps: int = 0  # of the predictor
    step_seconds: float = 0.0  # before the expert is asked
    last_step_seconds: float = 0.0  # of the step that reads what was settled last
    passes: int = 0  # of the expert
    chunks: int = 0  # rows that read
    tokens_read: int = 0
    inputs_read: int = 0  # tokens of inputs among them
    pass_seconds: float = 0.0
    asked: int = 0  # questions whose answer counted
    agreed: int = 0
    proposed: int = 0  # tokens, and those deferred among them
    deferred: int = 0
    written: int = 0
    seconds: float = 0.0

    @property
    def positions(self) -> float:
        """Tokens written of a row, on average."""
        return self.written / self.rows


@dataclass
class Stretch:
    """Turns in a row, and the work of the expert alone that writes as much."""

    passes: int = 0
    written: int = 0
    seconds: float = 0.0
    alone_passes: float = 0.0
    alone_tokens: int = 0

    def add(self, turn: Turn) -> None:
        self.passes += turn.passes
        self.written += turn.written
        self.seconds += turn.seconds
        self.alone_passes += turn.positions
        self.alone_tokens += turn.written + turn.inputs_read


@dataclass
class Slowdown:
    """What the last stretches took, all of them slower than the expert alone."""

    stretches: int = 0
    written: int = 0
    seconds: float = 0.0
    alone_seconds: float = 0.0

    @property
    def is_clear(self) -> bool:
        return self.stretches >= STRETCHES and self.seconds - self.alone_seconds >= LOST_SECONDS

    def __str__(self) -> str:
        ours, alone = (1000 * seconds / self.written for seconds in (self.seconds, self.alone_seconds))
        return (
            f"deferral is slower here than the expert alone: {ours:,.4g} instead of about {alone:,.4g} ms a token; "
            "to save time, lower the budget, write fewer sequences at once, or let the expert write alone"
        )


class Pace:
    """Decides for a loop, and learns from its turns. Loops of one pair share it."""

    def __init__(self) -> None:
        self._seen = dict.fromkeys([*vars(Turn()), "positions"], 0.0)
        self._passes = [0.0] * 5  # weighted sums of 1, n, n^2, t, n t over passes of n tokens that took t seconds
        self.pass_seconds = self.token_seconds = 0.0  # of a pass besides its tokens, and what each token adds
        self._stretch, self.slowdown, self._has_warned = Stretch(), Slowdown(), False

    def note(self, turn: Turn) -> None:
        for name in self._seen:
            self._seen[name] = MEMORY * self._seen[name] + getattr(turn, name)
        if turn.passes:
            n, t = turn.tokens_read, turn.pass_seconds
            sums = zip(self._passes, (1, n, n * n, t, n * t), strict=True)
            self._passes = [MEMORY * old + new for old, new in sums]
            self.pass_seconds, self.token_seconds = self._fit_passes()
        self._stretch.add(turn)
        if self._stretch.passes >= PASSES:
            self._compare(self._stretch)
            self._stretch = Stretch()

    def _compare(self, stretch: Stretch) -> None:
        """Compare a stretch with the expert alone; warn once where the expert is clearly faster."""
        alone = self.pass_seconds * stretch.alone_passes + self.token_seconds * stretch.alone_tokens
        if stretch.seconds <= MARGIN * alone:
            self.slowdown = Slowdown()
            return
        before = self.slowdown
        self.slowdown = Slowdown(
            before.stretches + 1,
            before.written + stretch.written,
            before.seconds + stretch.seconds,
            before.alone_seconds + alone,
        )
        if self.slowdown.is_clear and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", self.slowdown)

    @property
    def agreement(self) -> float:
        """How often the expert's token is the guess."""
        return (self._seen["agreed"] + 1) / (self._seen["asked"] + 2)

    @property
    def share(self) -> float:
        """How many of the proposed tokens are deferred."""
        return (self._seen["deferred"] + 1) / (self._seen["proposed"] + 2)

    def most_steps(self) -> int:
        return MAX_STEPS_AHEAD

    def goes_on(self, useful: float) -> bool:
        """Tell whether one more step of the predictor pays that is expected to gain a token of this share of rows."""
        seen = self._seen
        if not seen["steps"]:
            return False
        fixed_seconds = seen["seconds"] - self.token_seconds * seen["tokens_read"]
        return useful * fixed_seconds >= seen["positions"] * self._step_seconds

    def reads_on(self, questions: Sequence[int], rows: int) -> bool:
        """Tell whether a row should read to the last of its questions, at these steps of a turn, where `rows` rows
        share the pass. Their first is always asked."""
        *others, last = questions
        if not others:
            return True
        gap = last - others[-1]
        return self.agreement ** len(others) * self._turn_seconds / rows >= gap * self.token_seconds

    def looks_on(self, asked: int, gap: int, rows: int) -> bool:
        """Tell whether a row should read `gap` more tokens to know the expert's token after all of its guesses, which
        is of use where that position is deferred."""
        return self.share * self.agreement**asked * self._turn_seconds / rows >= gap * self.token_seconds

    @property
    def _turn_seconds(self) -> float:
        """What the shortest turn takes: a step, and a pass besides its tokens."""
        return self.pass_seconds + self._step_seconds

    @property
    def _step_seconds(self) -> float:
        seen = self._seen
        return (seen["step_seconds"] + seen["last_step_seconds"]) / max(seen["steps"], 1.0)

    def _fit_passes(self) -> tuple[float, float]:
        """Return the line through the times of passes, both numbers at least 0."""
        one, n, n2, t, nt = self._passes
        spread = one * n2 - n * n
        slope = (one * nt - n * t) / spread if spread > 1e-3 * n * n else 0.0
        slope = min(max(slope, 0.0), t / n if n else 0.0)
        return max((t - slope * n) / one, 0.0), slope


class FixedPace(Pace):
    """Runs ahead `ahead` tokens, and asks at the first `asks` deferred positions of each row (None: at all), and with
    `foresees` after all of its guesses."""

    def __init__(self, ahead: int, asks: int | None = None, *, foresees: bool = False) -> None:
        super().__init__()
        self.ahead, self.asks, self.foresees = ahead, asks, foresees

    def most_steps(self) -> int:
        return self.ahead

    def goes_on(self, useful: float) -> bool:
        return True

    def reads_on(self, questions: Sequence[int], rows: int) -> bool:
        return self.asks is None or len(questions) <= self.asks

    def looks_on(self, asked: int, gap: int, rows: int) -> bool:
        return self.foresees
