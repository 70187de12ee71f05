"""The options of the traveling salesman task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from seqdefer.tasks.common.options import option
from seqdefer.tasks.tsp.exact import TIME_LIMIT
from seqdefer.tasks.tsp.search import EFFORT


@dataclass(frozen=True)
class TSPOptions:
    """Options of the task; the fields are command-line options."""

    usual_options: ClassVar = ("data", "cities", "expert", "predictor", "train", "test")
    test_options: ClassVar = ("test",)
    data: str | None = option(
        None,
        "cities to use instead of Gaussian ones: a TSPLIB .tsp file or a folder of them, or a CSV of coordinates",
        is_path=True,
    )
    cities: int = option(50, "cities of an instance")
    expert: str = option(
        "gurobi", "solver that completes tours: gurobi or highs (exact), search (nearly exact, much faster)"
    )
    predictor: str | None = option(
        None, "folder of a pointer network, or PLUGIN:FOLDER, such as rl4co:FOLDER (the shipped network)", is_path=True
    )
    facts: bool = option(
        True, "features: the decoder's state and facts of the partial tour, instead of the paper's node embeddings"
    )
    train: int = option(2400, "instances to fit rejectors on")
    validation: int = option(400, "instances to stop and choose with")
    test: int = option(500, "instances to report on")
    effort: int | None = option(None, f"perturbations a city for --expert search ({EFFORT})")
    time_limit: float | None = option(
        None, f"seconds after which an exact expert returns its best tour ({TIME_LIMIT:g})"
    )
    seed: int = option(0, "seed of the instances")

    def without_test(self) -> TSPOptions:
        return replace(self, test=1)  # the minimum: test instances cost solving
