"""Violated subtour constraints of an integer or fractional solution.

A tour leaves every proper subset S of the cities at least twice: x(delta(S)) >= 2, which with degrees of 2 is
x(E(S)) <= |S| - 1. `violated` finds violated sets, and at least one if there is any: cities joined by an edge of weight
1 are contracted (some most violated set does not separate them, because every degree is 2), and the algorithm of Stoer
and Wagner cuts the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seqdefer.tasks.tsp.completions import Floats

Mask = NDArray[np.bool_]  # (N,) the cities of a set

TOLERANCE = 1e-6  # the solvers' feasibility tolerance


def violated(weights: Floats) -> list[Mask]:
    """Return the violated sets, each as its smaller side. weights: (N, N), symmetric, degrees 2"""
    groups, shrunk, found = _shrink(weights)
    if not found and len(groups) > 1:
        found = _phase_cuts(groups, shrunk)
    return _distinct(found)


def labels_of(n: int, first: list[int], second: list[int]) -> list[int]:
    """Return the connected component of each of `n` nodes, numbered in the order of their first nodes."""
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
    """Contract cities joined by weights of 1, repeatedly. Return the groups (G, N), the weights between them (G, G),
    and the groups that are violated themselves."""
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
    """Return the cuts below 2 of all phases of Stoer and Wagner; a minimum cut is one of them."""
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
    """Order nodes by their weight to the nodes before; return the last two, and the last one's weight."""
    bound, before, last, cut = weights[0].copy(), 0, 0, 0.0
    bound[0] = -np.inf
    for _ in range(len(weights) - 1):
        before, last = last, int(bound.argmax())
        cut = float(bound[last])
        bound += weights[last]
        bound[last] = -np.inf
    return before, last, cut


def _distinct(sets: list[Mask]) -> list[Mask]:
    """Return the smaller side of each set, once: it has fewer inner edges."""
    sides = [~mask if 2 * mask.sum() > len(mask) else mask for mask in sets]
    return list({side.tobytes(): side for side in sides}.values())
