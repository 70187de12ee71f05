"""The codec of users' inputs and outputs: lists of [x, y] in, the order in which to visit them out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import InputError
from seqdefer.interfaces import Codec
from seqdefer.tasks.tsp.data import normalise
from seqdefer.tasks.tsp.tours import tour_lengths
from seqdefer.types import Examples


class TourCodec(Codec):
    """Inputs are lists of [x, y], or JSON of them; outputs are lists of indices into them."""

    field, kind = "cities", "tour"
    hint = "[[0.1, 0.9], [0.4, 0.3], ...]"
    about = "reads cities and writes a short tour through all of them"

    def __init__(self, n_cities: int) -> None:
        self.n_cities = self.size = n_cities

    def schema(self) -> dict[str, Any]:
        city = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
        n = {"minItems": self.n_cities, "maxItems": self.n_cities}
        return {"type": "array", "items": city, **n, "uniqueItems": True}

    def facts(self, one: Any, output: Any) -> dict[str, float]:
        """Return the tour's length, unless it overflows."""
        length = float(tour_lengths(_read(one)[None], torch.tensor([output])))
        return {"length": length} if math.isfinite(length) else {}

    def encode(self, inputs: Sequence[Any]) -> Examples:
        rows = [self._cities(one, f"input {place + 1} of {len(inputs)}") for place, one in enumerate(inputs)]
        cities = normalise(torch.stack(rows))  # predictors are trained on zero mean and unit variance
        tours = torch.arange(self.n_cities).expand(len(rows), -1)  # placeholder targets
        return Examples(cities, tours, torch.arange(len(rows)))

    def _cities(self, one: Any, where: str) -> Tensor:
        """Parse one input. float64 (N, 2)"""
        try:
            cities = _read(one)
        except (ValueError, TypeError, RuntimeError, RecursionError, OverflowError) as error:
            raise InputError(f"{where} is not a list of cities; give [[x, y], ...]") from error
        if cities.shape != (self.n_cities, 2):
            raise InputError(f"{where} has the shape {tuple(cities.shape)}; give {self.n_cities} cities: [[x, y], ...]")
        if not bool(cities.isfinite().all()) or len(normalise(cities).unique(dim=0)) < self.n_cities:
            raise InputError(f"{where} has cities that are not finite or not distinct; give each city once")
        return cities

    def decode(self, tokens: Sequence[Any]) -> list[int]:
        return [int(token) for token in tokens]


def _read(one: Any) -> Tensor:
    return torch.as_tensor(json.loads(one) if isinstance(one, str) else one, dtype=torch.float64)
