"""Sets of cities that a solution, whole or fractional, leaves too few times.

A tour leaves every set S of cities (not none, not all) at least twice: x(delta(S)) >= 2, which with degrees of 2 is
x(E(S)) <= |S| - 1. `violated` finds sets for which a solution breaks this, and finds one whenever there is one: cities
joined by an edge of weight 1 are shrunk to one (some set that is violated most does not part them, as every city has
degree 2), and what is left is cut by the algorithm of Stoer and Wagner.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]  # (N,) the cities of a set

TOLERANCE = 1e-6  # of what solvers call feasible


def violated(weights: Floats) -> list[Mask]:
    """Sets that are left less than twice, each as its smaller side. weights: (N, N), symmetric, degrees 2"""
    groups, shrunk, found = _shrink(weights)
    if not found and len(groups) > 1:
        found = _phase_cuts(groups, shrunk)
    return _distinct(found)


def labels_of(n: int, first: list[int], second: list[int]) -> list[int]:
    """The connected component of each of `n` nodes, numbered in the order of their first nodes."""
    neighbours: list[list[int]] = [[] for _ in range(n)]
    for i, j in zip(first, second, strict=True):
        neighbours[i].append(j)
        neighbours[j].append(i)
    labels, count = [-1] * n, 0
    for root in range(n):
        if labels[root] >= 0:
            continue
        labels[root], stack = count, [root]
        while stack:
            for node in neighbours[stack.pop()]:
                if labels[node] < 0:
                    labels[node] = count
                    stack.append(node)
        count += 1
    return labels


def _shrink(weights: Floats) -> tuple[Mask, Floats, list[Mask]]:
    """Cities joined by weights of 1 become one group, again and again: the groups (G, N), the weights between them
    (G, G), and the groups that are left too few times themselves."""
    groups = np.eye(len(weights), dtype=np.bool_)
    found: list[Mask] = []
    while len(groups) > 1:
        first, second = np.nonzero(weights >= 1 - TOLERANCE)
        if not len(first):
            break
        labels = np.array(labels_of(len(groups), first.tolist(), second.tolist()))
        members = np.arange(labels.max() + 1)[:, None] == labels  # (new groups, groups)
        groups = members @ groups
        weights = members @ weights @ members.T
        np.fill_diagonal(weights, 0.0)
        if len(groups) > 1:
            found += list(groups[weights.sum(1) < 2 - TOLERANCE])
    return groups, weights, found


def _phase_cuts(groups: Mask, weights: Floats) -> list[Mask]:
    """Stoer and Wagner: the cut of every phase that is below 2; a least cut is the cut of some phase."""
    groups, weights, found = groups.copy(), weights.copy(), []
    while len(groups) > 1:
        before, last, cut = _phase(weights)
        if cut < 2 - TOLERANCE:
            found.append(groups[last].copy())
        groups[before] |= groups[last]
        weights[before] += weights[last]
        weights[:, before] += weights[:, last]
        weights[before, before] = 0.0
        left = np.arange(len(groups)) != last
        groups, weights = groups[left], weights[np.ix_(left, left)]
    return found


def _phase(weights: Floats) -> tuple[int, int, float]:
    """Nodes in the order of how tightly they are bound to those before: the last two, and the last one's weight."""
    bound, before, last, cut = weights[0].copy(), 0, 0, 0.0
    bound[0] = -np.inf
    for _ in range(len(weights) - 1):
        before, last = last, int(bound.argmax())
        cut = float(bound[last])
        bound += weights[last]
        bound[last] = -np.inf
    return before, last, cut


def _distinct(sets: list[Mask]) -> list[Mask]:
    """The smaller side of each, once: it has fewer edges inside."""
    sides = [~mask if 2 * mask.sum() > len(mask) else mask for mask in sets]
    return list({side.tobytes(): side for side in sides}.values())
