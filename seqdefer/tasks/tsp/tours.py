"""Tours: permutations of the cities, closed from the last to the first."""

from __future__ import annotations

from torch import Tensor


def tour_lengths(cities: Tensor, tours: Tensor) -> Tensor:
    """Return lengths of closed tours (B, N) through cities (B, N, 2), summed in float64. (B,)"""
    ordered = cities.double().gather(1, tours[..., None].expand(-1, -1, 2))
    lengths: Tensor = (ordered - ordered.roll(-1, 1)).norm(dim=2).sum(1)
    return lengths


def percent_over(cities: Tensor, tours: Tensor, reference: Tensor) -> Tensor:
    """Return how many per cent longer `tours` are than `reference` (B, N), at least 0. float32 (B,)

    The reference is the best known tour; rounding or a lucky heuristic may undercut it slightly."""
    best = tour_lengths(cities, reference)
    return (100 * (tour_lengths(cities, tours) / best - 1)).clamp(min=0).float()


def distances(cities: Tensor) -> Tensor:
    """Return distances (B, N, N) of cities (B, N, 2), from differences, which keep the digits of near cities."""
    table: Tensor = (cities[:, :, None] - cities[:, None, :]).norm(dim=3)
    return table
