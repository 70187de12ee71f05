"""Metrics of texts: by name, or any function of a prediction, its reference and the input.

    get_metric("chrf").losses(["a cat sat"], ["the cat sat"], [""])
    Metric(lambda prediction, reference, text: float(prediction == reference))

A loss is what is missing from the best score, in percent: 100 x (1 - score / best). Where lower is better (error
rates), it is 100 x score.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any
from uuid import uuid4

from seqdefer.errors import DataError, OptionError, SeqdeferError, missing_extra, unknown
from seqdefer.tasks.common.edit_distance import character_error_rates, word_error_rates

Score = Callable[[str, str, str], float]  # of a prediction, its reference and the input
MAX_ERROR = 1e12  # of metrics where lower is better: sums of losses stay finite
TOLERANCE = 1e-6  # of scores that exceed the best by rounding


@dataclass(frozen=True)
class Metric:
    """Quality of a text. `score(prediction, reference, input)` lies between 0 and `best`, and higher is better; or,
    with `lower_is_better`, it is an error of 0 or more. `token_loss` names how losses of single tokens follow from it
    (`seqdefer.tasks.text.token_losses`). `key` names all that scores depend on: stored labels are found by it."""

    score: Score
    name: str = ""
    best: float = 1.0
    lower_is_better: bool = False
    token_loss: str = "to_go"
    key: str = field(default_factory=lambda: uuid4().hex)  # what a function depends on is unknown

    def __post_init__(self) -> None:
        if not callable(self.score):
            raise OptionError(f"metric {self.score!r:.60} is not a function (prediction, reference, input) -> float")
        if not _takes_three(self.score):
            raise OptionError(f"metric {self.title!r} does not take three arguments: (prediction, reference, input)")
        if not (isinstance(self.best, int | float) and 0 < self.best < math.inf):
            raise OptionError(f"the best score of metric {self.title!r} is {self.best!r:.40}; it must be above 0")

    @property
    def title(self) -> str:
        return self.name or getattr(self.score, "__name__", type(self.score).__name__)

    @property
    def unit(self) -> str:
        """The unit of its losses."""
        return f"100 x {self.title}" if self.lower_is_better else f"100 x (1 - {self.title})"

    @property
    def max_loss(self) -> float | None:
        """The largest loss, None where there is no limit."""
        return None if self.lower_is_better else 100.0

    def losses(self, predictions: Sequence[str], references: Sequence[str], inputs: Sequence[str]) -> list[float]:
        """Return the loss of each prediction."""
        return [self._loss(*texts) for texts in zip(predictions, references, inputs, strict=True)]

    def _loss(self, prediction: str, reference: str, text: str) -> float:
        score = self._score(prediction, reference, text)
        limit = MAX_ERROR if self.lower_is_better else self.best + TOLERANCE
        if not (math.isfinite(score) and 0 <= score <= limit):
            range_ = "0 or more" if self.lower_is_better else f"between 0 and {self.best:g}"
            raise DataError(
                f"metric {self.title!r} is {score} for the prediction {prediction!r:.60}; it must be {range_}: say "
                "Metric(function, best=...) where more is possible, or lower_is_better=True of an error"
            )
        return 100 * score if self.lower_is_better else 100 * max(0.0, 1 - score / self.best)

    def _score(self, prediction: str, reference: str, text: str) -> float:
        try:
            return float(self.score(prediction, reference, text))
        except SeqdeferError:  # a package that is missing, say
            raise
        except Exception as error:  # whatever the function raises, or returns instead of a number
            raise DataError(
                f"metric {self.title!r} failed on the prediction {prediction!r:.60}: {error!r:.200}; it is called with "
                "(prediction, reference, input) and returns a number"
            ) from error


def _takes_three(function: Score) -> bool:
    """Return whether a function can be called with three arguments; some of C do not tell, and are believed."""
    try:
        inspect.signature(function).bind("", "", "")
    except TypeError:
        return False
    except ValueError:
        pass
    return True


# -- by name -------------------------------------------------------------------------------------------------------


def exact_match(prediction: str, reference: str, text: str) -> float:
    """Return whether two texts are the same, apart from white space."""
    return float(prediction.split() == reference.split())


def cer(prediction: str, reference: str, text: str) -> float:
    """Return the character error rate."""
    return float(character_error_rates([prediction], [reference])) / 100


def wer(prediction: str, reference: str, text: str) -> float:
    """Return the word error rate."""
    return float(word_error_rates([prediction], [reference])) / 100


def rouge2(prediction: str, reference: str, text: str) -> float:
    """Return F of ROUGE-2, as in the package rouge-score."""
    return float(_rouge("rouge2").score(reference, prediction)["rouge2"].fmeasure)


def rouge_l(prediction: str, reference: str, text: str) -> float:
    """Return F of ROUGE-L, as in the package rouge-score."""
    return float(_rouge("rougeL").score(reference, prediction)["rougeL"].fmeasure)


def bleu(prediction: str, reference: str, text: str) -> float:
    """Return BLEU of one sentence, as in the package sacrebleu."""
    return float(_package("sacrebleu", "bleu").sentence_bleu(prediction, [reference]).score) / 100


def chrf(prediction: str, reference: str, text: str) -> float:
    """Return chrF of one sentence, as in the package sacrebleu."""
    return float(_package("sacrebleu", "chrf").sentence_chrf(prediction, [reference]).score) / 100


_BY_NAME: dict[str, tuple[Score, bool, str]] = {  # the function, whether lower is better, the token loss
    "bleu": (bleu, False, "to_go"),
    "cer": (cer, True, "alignment"),
    "chrf": (chrf, False, "to_go"),
    "exact_match": (exact_match, False, "first_error"),
    "rouge2": (rouge2, False, "to_go"),
    "rougeL": (rouge_l, False, "to_go"),
    "wer": (wer, True, "alignment"),
}
METRIC_NAMES = ("rouge1", *_BY_NAME)  # text tasks count ROUGE-1 in batches: seqdefer.tasks.text.rouge


def get_metric(name: str) -> Metric:
    """Return a metric by name, other than ROUGE-1."""
    if name not in _BY_NAME:
        raise unknown("metric", name, METRIC_NAMES)
    score, lower_is_better, token_loss = _BY_NAME[name]
    score("a word", "a word", "")  # a package that is missing is noticed before anything is labelled
    return Metric(score, name, lower_is_better=lower_is_better, token_loss=token_loss, key=name)


@cache
def _rouge(kind: str) -> Any:
    return _package("rouge_score.rouge_scorer", kind).RougeScorer([kind])


def _package(module: str, metric: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".", maxsplit=1)[0].replace("_", "-")
        raise missing_extra(package, "metrics", f"the metric {metric}") from error
