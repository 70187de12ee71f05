"""The paper's qualitative claims, judged by the paired intervals of our studies.

A claim rests on contrasts, differences that should be above 0. It holds where all their 95 % intervals are above 0. It
does not hold where one interval, widened by Bonferroni's rule for the number of contrasts, is below 0: without the
rule, one of twenty differences between equals would be below 0 every other time. Otherwise it is undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from seqdefer.methods.registry import all_methods
from seqdefer.paper.plan import ARCHITECTURES, STRATEGIES
from seqdefer.paper.planned_rows import ONE_TIME_CONFIDENCE, TOKEN_CONFIDENCE, ablated_label, size_label
from seqdefer.paper.records import Contrast, Judgement, Row, Study, Verdict

WHOLE = [name for name, one in all_methods().items() if one.granularity == "whole"]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper. `contrasts(study, task)` selects the contrasts behind it, none where it does not apply."""

    name: str
    statement: str
    study: str
    contrasts: Callable[[Study, str], list[Contrast]]
    reason: str  # the likely reason where it does not hold


ONE_RUN = "One run does not show how runs differ; give --seeds 2 or more."
LITTLE_DATA = "Little data decides few claims; give more --seeds and --instances, or --preset paper."


def judge(studies: Iterable[Study]) -> list[Judgement]:
    """Judge every claim on every task and recipe for which the studies have contrasts."""
    known, judgements = list(studies), []
    for claim in CLAIMS:
        its_studies = [study for study in known if study.name == claim.study]
        for task in dict.fromkeys(task for study in its_studies for task in study.tasks):
            for study in its_studies:
                if contrasts := claim.contrasts(study, task):
                    verdict, reason = verdict_of(contrasts), _reason(claim, task, study.recipe)
                    if study.seeds == 1:
                        verdict, reason = "undecided", ONE_RUN
                    elif verdict == "undecided" and study.preset != "paper":
                        reason = LITTLE_DATA  # the other reasons were found at the size of the paper
                    reason = "" if verdict == "holds" else reason
                    judgements.append(
                        Judgement(claim.name, claim.statement, task, study.recipe, verdict, tuple(contrasts), reason)
                    )
    return judgements


def _reason(claim: Claim, task: str, recipe: str) -> str:
    return REASONS.get((claim.name, task, recipe)) or REASONS.get((claim.name, task)) or claim.reason


def verdict_of(contrasts: Sequence[Contrast]) -> Verdict:
    """Return the verdict by the rule above. Contrasts must not be empty."""
    if all(one.low > 0 for one in contrasts):
        return "holds"
    widen = NormalDist().inv_cdf(1 - 0.025 / len(contrasts)) / NormalDist().inv_cdf(0.975)
    is_below = [one.difference + widen * (one.high - one.difference) < 0 for one in contrasts]
    return "does not hold" if any(is_below) else "undecided"


def _find(study: Study, task: str, pairs: Iterable[tuple[str, str]]) -> list[Contrast]:
    """Return the contrasts of these pairs that the study has."""
    known = {(one.first, one.second): one for one in study.contrasts if one.task == task}
    return [known[pair] for pair in pairs if pair in known]


def _pairs(pairs: Sequence[tuple[str, str]]) -> Callable[[Study, str], list[Contrast]]:
    return lambda study, task: _find(study, task, pairs)


def _against(methods: Sequence[str], others: Sequence[str]) -> Callable[[Study, str], list[Contrast]]:
    return _pairs([(method, other) for method in methods for other in others])


def _rows(study: Study, task: str) -> list[Row]:
    return [row for row in study.rows if row.task == task and row.method == "OneTimeModel"]


def _chosen_size(study: Study, task: str) -> list[Contrast]:
    """Compare the smaller size that is best on validation data with all positions."""
    known = {row.varied["hand_offs"]: row.validation for row in _rows(study, task) if row.validation is not None}
    if len(known) < 2:
        return []
    full = max(known)
    best = max((size for size in known if size < full), key=lambda size: known[size])
    return _find(study, task, [(size_label("OneTimeModel", best), size_label("OneTimeModel", full))])


def _at_every_size(study: Study, task: str) -> list[Contrast]:
    pairs = [
        (size_label("OneTimeModel", row.varied["hand_offs"]), size_label(other, row.varied["hand_offs"]))
        for row in _rows(study, task)
        for other in ONE_TIME_CONFIDENCE
    ]
    return _find(study, task, pairs)


def _extremes(study: Study, task: str) -> list[Contrast]:
    """Compare the recipe's alpha_1 with the smallest and the largest, where it lies between them."""
    usual = next((row for row in _rows(study, task) if row.is_default), None)
    found = [one for one in study.contrasts if one.task == task]  # the recipe's against the others, by alpha_1
    if usual is None or not found:
        return []
    rivals = [row for row in _rows(study, task) if row.varied["hand_offs"] == usual.varied["hand_offs"]]
    alphas = [row.varied["alpha"] for row in rivals]
    return [found[0], found[-1]] if min(alphas) < usual.varied["alpha"] < max(alphas) else []


RECURRENT_PAIRS = [(ablated_label("lstm", one), ablated_label("mlp", one)) for one in STRATEGIES]
TEACHER_PAIRS = [(ablated_label(one, "free"), ablated_label(one, "teacher")) for one in ARCHITECTURES]

CLAIMS = (
    Claim(
        "one-time-beats-whole",
        "One-time deferral by a model beats every whole-sequence method.",
        "table1",
        _against(["OneTimeModel"], WHOLE),
        "The gains are small against the spread over test instances, or the predictor errs along the whole sequence, "
        "so that a later hand-off saves little.",
    ),
    Claim(
        "token-beats-whole",
        "Token-level deferral by a model beats every whole-sequence method.",
        "table1",
        _against(["TokenwiseModel"], WHOLE),
        "The gains are small against the spread over test instances.",
    ),
    Claim(
        "token-beats-one-time",
        "Where both apply, token-level deferral beats one-time deferral.",
        "table1",
        _against(["TokenwiseModel"], ["OneTimeModel"]),
        "The expert's first tokens correct the predictor for the rest, and one hand-off does as well.",
    ),
    Claim(
        "model-beats-confidence-whole",
        "For whole sequences, the model beats confidence.",
        "table1",
        _against(["WholeModelEmbed"], [name for name in WHOLE if name != "WholeModelEmbed"]),
        "A model that predicts which of two answers is better learns little from few examples; uncertainty needs none. "
        "The paper's own table agrees.",
    ),
    Claim(
        "model-beats-confidence-one-time",
        "In one-time deferral, the model beats confidence.",
        "table1",
        _against(["OneTimeModel"], ONE_TIME_CONFIDENCE),
        "There are few training examples for many hand-offs.",
    ),
    Claim(
        "model-beats-confidence-token",
        "In token-level deferral, the model beats confidence.",
        "table1",
        _against(["TokenwiseModel"], TOKEN_CONFIDENCE),
        "Uncertainty alone already ranks most of the tokens that the expert would write better.",
    ),
    Claim(
        "token-confidence-beats-whole",
        "Even confidence, token by token, beats every whole-sequence method (the paper: on XSUM).",
        "table1",
        _against(TOKEN_CONFIDENCE, WHOLE),
        "The paper claims it for XSUM only. Where uncertainty is a variance, it does not tell who is right.",
    ),
    Claim(
        "all-positions-is-not-the-best",
        "All positions are not the best set of hand-offs: the best smaller J, by validation data, beats them.",
        "table-handoffs",
        _chosen_size,
        "More positions do no harm where a network learns what hand-offs have in common.",
    ),
    Claim(
        "one-time-beats-confidence-at-every-size",
        "Whatever the size of J, one-time deferral by a model beats confidence.",
        "table-handoffs",
        _at_every_size,
        "With few hand-offs to choose from, all methods come close to whole deferral.",
    ),
    Claim(
        "recurrent-beats-mlp",
        "A recurrent token-level rejector beats a perceptron.",
        "table-ablation",
        _pairs(RECURRENT_PAIRS),
        "Where the inputs already describe the prefix, memory adds little, and more weights overfit.",
    ),
    Claim(
        "teacher-forcing-hurts",
        "Teacher forcing hurts token-level rejectors.",
        "table-ablation",
        _pairs(TEACHER_PAIRS),
        "The strategies differ in how they train (see the shares of overridden decisions), not in what they reach.",
    ),
    Claim(
        "extreme-alpha-hurts",
        "Extreme alpha_1 hurts: the recipe's beats the least and the largest that were tried.",
        "figure-alpha",
        _extremes,
        "Curves come from moving a threshold, which compensates for much of what alpha_1 sets in training.",
    ),
)

# Reasons for one task, or for one task by one recipe.
REASONS: dict[tuple[str, ...], str] = {
    **dict.fromkeys(
        [
            ("one-time-beats-whole", "tsp", "published"),
            ("model-beats-confidence-one-time", "tsp", "published"),
            ("one-time-beats-confidence-at-every-size", "tsp", "published"),
            ("all-positions-is-not-the-best", "tsp", "published"),
            ("extreme-alpha-hurts", "tsp", "published"),
        ],
        "The published alpha_1, read in units of length, is a sixth of the median gain, most ReLU units die on "
        "thousands of inputs, and the examples are few for so many weights: docs/tsp-as-published.md measures each.",
    ),
    **dict.fromkeys(
        [
            ("model-beats-confidence-token", "xsum", "published"),
            ("token-beats-whole", "xsum", "published"),
        ],
        "From the hidden states of few documents the network learns less than uncertainty already tells.",
    ),
    **dict.fromkeys(
        [
            ("token-beats-whole", "weather", "published"),
            ("token-beats-one-time", "weather", "published"),
        ],
        "The predictor's states say little about a window: with facts about it as inputs, the same network and "
        "training gain twice as much (docs/weather.md).",
    ),
    **dict.fromkeys(
        [
            ("all-positions-is-not-the-best", "xsum", "published"),
            ("model-beats-confidence-one-time", "xsum"),
            ("one-time-beats-confidence-at-every-size", "xsum"),
        ],
        "One-time deferral gains next to nothing on these texts, whatever the size of J.",
    ),
    ("token-confidence-beats-whole", "xsum"): "The gains are small against the spread over test instances.",
    ("model-beats-confidence-whole", "tsp"): "The expert's tour is never longer: the label is the same for every tour, "
    "and there is nothing to learn.",
    **dict.fromkeys(
        [("all-positions-is-not-the-best", "tsp", "ours"), ("all-positions-is-not-the-best", "xsum", "ours")],
        "Attention over the steps copes with all positions; the paper's perceptron has a row of weights for each.",
    ),
    ("one-time-beats-whole", "xsum"): "The best place differs from text to text (see OptimalOneTime), and rejectors do "
    "not find it: all one-time and whole methods are close to Random.",
    ("recurrent-beats-mlp", "xsum", "ours"): "The facts of a proposed token already describe the prefix: "
    "memory adds nothing, and its weights cost something.",
    ("extreme-alpha-hurts", "xsum"): "One-time deferral gains little on texts at any alpha_1.",
}
