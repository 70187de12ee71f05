"""The compiled core of `search`: Or-opt and 2-opt with perturbation on a ring of cities, and an exact tail.

Import it through `search`, because it imports numba. The functions do not check their arguments, and use plain loops
because numpy's functions would double the compile time.

The kept prefix counts as one edge between its two ends, so the problem shrinks as the prefix grows. Node 0 of the ring
is the last kept city, node 1 the first; the other nodes are the remaining cities. The edge between 0 and 1 has a length
so negative that no improving move removes it. With at most one city kept, the ring is free and its nodes are all
cities. Two arrays represent a ring: `order`, the node at each place, and `place`, the place of each node. Distances are
computed on demand, which is faster than a table.

Results depend only on the coordinates, the draft, `kept` and the seed.
"""

# mypy: disable-error-code=no-any-return
# Return values of compiled functions have no static type.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]

N_NEAR = 8  # candidate neighbours of a city
MAX_SEGMENT = 3  # cities in an Or-opt move
MAX_KICK = 12  # cities in each of the three segments that a perturbation exchanges
COLD_FACTOR = 3  # multiplies the effort of a search without a tour to start from
TOLERANCE = 1e-10  # smallest improvement as a share of the extent, far above rounding errors


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile to code that releases the GIL, cached on disk if possible."""
    try:
        return njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no writable cache folder
        return njit(nogil=True, error_model="numpy")(function)


@compiled
def _distance(points: Floats, a: int, b: int) -> float:
    dx = points[a, 0] - points[b, 0]
    dy = points[a, 1] - points[b, 1]
    return np.sqrt(dx * dx + dy * dy)


@compiled
def _edge(points: Floats, fixed: float, a: int, b: int) -> float:
    """Return the distance of two nodes of a ring; between 0 and 1 it is `fixed`, if that is negative."""
    if (a | b) == 1 and fixed < 0.0:
        return fixed
    return _distance(points, a, b)


@compiled
def _lap(place: int, m: int) -> int:
    """Wrap a place that is at most one lap off."""
    if place >= m:
        return place - m
    return place + m if place < 0 else place


@compiled
def _put(order: Ints, place: Ints, i: int, node: int) -> None:
    i = _lap(i, len(order))
    order[i] = node
    place[node] = i


# ---------------------------------------------------------------- random numbers


@compiled
def _random_state(seed: int, kept: int) -> Words:
    """Seed a generator by two steps of splitmix64, which decorrelate neighbouring seeds and prefixes."""
    x = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(kept + 1) * np.uint64(0xD1B54A32D192ED03)
    for _ in range(2):
        x += np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    state = np.empty(1, np.uint64)
    state[0] = x | np.uint64(1)
    return state


@compiled
def _random(state: Words, bound: int) -> np.int64:
    """Draw a number below `bound` (xorshift64*)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(33)) % bound


# ---------------------------------------------------------------- local search


@compiled
def _push(queue: Ints, waiting: Ints, node: int) -> None:
    """Append a node to the ring buffer `queue`, which starts at queue[m] and has waiting[m] nodes."""
    m = len(queue) - 1
    if not waiting[node]:
        queue[_lap(queue[m] + waiting[m], m)] = node
        waiting[node] = 1
        waiting[m] += 1


@compiled
def _pop(queue: Ints, waiting: Ints) -> int:
    m = len(queue) - 1
    node = queue[queue[m]]
    queue[m] = _lap(queue[m] + 1, m)
    waiting[node] = 0
    waiting[m] -= 1
    return node


@compiled
def _reverse(order: Ints, place: Ints, first: int, last: int) -> None:
    """Reverse the places first..last, or all others, which gives the same ring: whichever are fewer."""
    m = len(order)
    n = last - first + 1
    if n <= 0:
        n += m
    if 2 * n > m:
        first, last, n = last + 1, first - 1, m - n
    for _ in range(n // 2):
        first = _lap(first, m)
        last = _lap(last, m)
        a = order[first]
        b = order[last]
        order[first] = b
        place[b] = first
        order[last] = a
        place[a] = last
        first += 1
        last -= 1


@compiled
def _move_segment(order: Ints, place: Ints, first: int, n: int, target: int, is_reversed: bool) -> None:
    """Move the n nodes from the place `first` to between the places `target` and `target` + 1."""
    m = len(order)
    segment = (order[first], order[_lap(first + 1, m)], order[_lap(first + 2, m)])
    ahead = _lap(target - first - n + 1, m)
    behind = m - n - ahead
    begin = target + 1
    if ahead <= behind:
        begin -= n
        for i in range(ahead):
            _put(order, place, first + i, order[_lap(_lap(first + n, m) + i, m)])
    else:
        for i in range(behind):
            _put(order, place, first + n - 1 - i, order[_lap(first - 1 - i, m)])
    for i in range(n):
        _put(order, place, begin + i, segment[n - 1 - i if is_reversed else i])


@compiled
def _find_move(
    points: Floats, fixed: float, near: Ints, tolerance: float, order: Ints, place: Ints, a: int
) -> tuple[float, int, int, int, int]:
    """Return the first improving move that joins `a` to a near city c: (gain, n, way, c, r), with gain 0 if none does.

    n = 0: 2-opt. The edges a-r and c-d, both in direction `way`, become a-c and r-d.
    n > 0: Or-opt. The n nodes from `a` in direction `way` move between the neighbours c and r, `a` beside c."""
    m = len(order)
    for way in (1, -1):
        b = order[_lap(place[a] + way, m)]
        length = _edge(points, fixed, a, b)
        for i in range(near.shape[1]):
            c = near[a, i]
            partial = length - _edge(points, fixed, a, c)
            if partial <= tolerance:
                break
            d = order[_lap(place[c] + way, m)]
            gain = partial + _edge(points, fixed, c, d) - _edge(points, fixed, b, d)
            if gain > tolerance:
                return gain, 0, way, c, b
            for side in (1, -1):
                r = order[_lap(place[c] + side, m)]
                joined = partial + _edge(points, fixed, c, r)
                s = a  # the segment's other end
                for n in range(1, min(MAX_SEGMENT, m - 3) + 1):
                    if s in (c, r):
                        break
                    after = order[_lap(place[s] - way, m)]
                    gain = joined + _edge(points, fixed, s, after)
                    gain -= _edge(points, fixed, s, r) + _edge(points, fixed, b, after)
                    if gain > tolerance:
                        return gain, n, -way, c, r
                    s = after
    return 0.0, 0, 0, a, a


@compiled
def _make_move(order: Ints, place: Ints, queue: Ints, waiting: Ints, a: int, n: int, way: int, c: int, r: int) -> None:
    """Apply a move of `_find_move`, and queue every city with a new neighbour."""
    m = len(order)
    if n == 0:
        d = order[_lap(place[c] + way, m)]
        for node in (a, r, c, d):
            _push(queue, waiting, node)
        if way == 1:
            _reverse(order, place, place[r], place[c])
        else:
            _reverse(order, place, place[a], place[d])
        return
    first = place[a] if way == 1 else _lap(place[a] - n + 1, m)
    last = place[a] if way == -1 else _lap(place[a] + n - 1, m)
    for node in (order[first], order[last], c, r, order[_lap(first - 1, m)], order[_lap(last + 1, m)]):
        _push(queue, waiting, node)
    c_first = order[_lap(place[c] + 1, m)] == r
    _move_segment(order, place, first, n, place[c] if c_first else place[r], c_first != (way == 1))


@compiled
def _descend(
    points: Floats, fixed: float, near: Ints, tolerance: float, order: Ints, place: Ints, queue: Ints, waiting: Ints
) -> float:
    """Improve until the queue is empty. Return the total gain."""
    total = 0.0
    while waiting[len(order)]:
        a = _pop(queue, waiting)
        gain, n, way, c, r = _find_move(points, fixed, near, tolerance, order, place, a)
        while gain > 0.0:
            total += gain
            _make_move(order, place, queue, waiting, a, n, way, c, r)
            gain, n, way, c, r = _find_move(points, fixed, near, tolerance, order, place, a)
    return total


@compiled
def _kick(
    points: Floats, fixed: float, order: Ints, place: Ints, queue: Ints, waiting: Ints, random: Words, nodes: Ints
) -> float:
    """Apply a double bridge to three short adjacent segments (B C D becomes D C B). Return the added length, or
    infinity if it would remove the fixed edge and is not applied."""
    m = len(order)
    longest = min(MAX_KICK, (m - 1) // 3)
    start = _random(random, m)
    end_b = 1 + _random(random, longest)
    end_c = end_b + 1 + _random(random, longest)
    end_d = end_c + 1 + _random(random, longest)
    for i in range(end_d + 2):
        nodes[i] = order[(start + i) % m]
    added = _edge(points, fixed, nodes[end_b], nodes[end_d + 1])
    for i in (0, end_b, end_c, end_d):
        length = _edge(points, fixed, nodes[i], nodes[i + 1])
        if length < 0.0:
            return np.inf
        added -= length
    for i in (0, end_b, end_c, end_d):
        _push(queue, waiting, nodes[i])
        _push(queue, waiting, nodes[i + 1])
    i = start
    last = nodes[0]
    for first, end in ((end_c + 1, end_d), (end_b + 1, end_c), (1, end_b)):
        added += _edge(points, fixed, last, nodes[first])
        last = nodes[end]
        for j in range(first, end + 1):
            i += 1
            _put(order, place, i, nodes[j])
    return added


@compiled
def _copy(source: Ints, target: Ints) -> None:
    for i in range(len(source)):
        target[i] = source[i]


@compiled
def _search(
    points: Floats,
    fixed: float,
    near: Ints,
    tolerance: float,
    order: Ints,
    place: Ints,
    n_kicks: int,
    random: Words,
    stop: Flags,
) -> None:
    """Descend, then repeatedly kick and descend, undoing what makes the ring longer."""
    m = len(order)
    queue = np.zeros(m + 1, np.int64)
    waiting = np.zeros(m + 1, np.int64)
    nodes = np.empty(3 * MAX_KICK + 2, np.int64)
    best_order = np.empty(m, np.int64)
    best_place = np.empty(m, np.int64)
    for i in range(m):
        _push(queue, waiting, order[i])
    added = 0.0
    for i in range(n_kicks + 1):
        if added < np.inf:
            added -= _descend(points, fixed, near, tolerance, order, place, queue, waiting)
            if added <= tolerance:
                _copy(order, best_order)
                _copy(place, best_place)
            else:
                _copy(best_order, order)
                _copy(best_place, place)
        if i == n_kicks or (i % 64 == 0 and stop[0]):
            break
        added = _kick(points, fixed, order, place, queue, waiting, random, nodes)


# ---------------------------------------------------------------- one prefix


@compiled
def _near(points: Floats, fixed: float) -> Ints:
    """Return the nearest nodes of every node, nearest first, without the other end of the fixed edge. (m, <= N_NEAR)

    Insertion into a short sorted list is faster than sorting all."""
    m = len(points)
    n_near = min(N_NEAR, m - 2)
    near = np.empty((m, n_near), np.int64)
    lengths = np.empty(n_near)
    for a in range(m):
        found = 0
        for b in range(m):
            length = _edge(points, fixed, a, b)
            if b == a or length < 0.0 or (found == n_near and length >= lengths[n_near - 1]):
                continue
            i = min(found, n_near - 1)
            found = i + 1
            while i > 0 and lengths[i - 1] > length:
                lengths[i] = lengths[i - 1]
                near[a, i] = near[a, i - 1]
                i -= 1
            lengths[i] = length
            near[a, i] = b
    return near


@compiled
def _extent(points: Floats) -> float:
    """Return the longer side of the bounding box; 1 if all points coincide."""
    extent = 0.0
    for axis in range(2):
        low = high = points[0, axis]
        for i in range(len(points)):
            low = min(low, points[i, axis])
            high = max(high, points[i, axis])
        extent = max(extent, high - low)
    return extent if extent > 0.0 else 1.0


@compiled
def _go_to_nearest(points: Floats, is_free: bool, order: Ints) -> None:
    """Order nodes by nearest neighbour from node 0; the other end of the fixed edge comes last."""
    m = len(order)
    n_open = m if is_free else m - 1
    for i in range(m):
        order[i] = i
    order[1], order[m - 1] = order[m - 1], order[1]
    for i in range(1, n_open):
        best = i
        for j in range(i + 1, n_open):
            if _distance(points, order[i - 1], order[j]) < _distance(points, order[i - 1], order[best]):
                best = j
        order[i], order[best] = order[best], order[i]


@compiled
def _list_nodes(draft: Ints, kept: int, nodes: Ints, node_of: Ints) -> None:
    """Write the city of each node, and the node of each city, -1 within the prefix."""
    for city in range(len(draft)):
        node_of[city] = 0
    n = 0
    if kept >= 2:
        nodes[0] = draft[kept - 1]
        nodes[1] = draft[0]
        n = 2
        for i in range(kept):
            node_of[draft[i]] = -1
    for city in range(len(draft)):
        if node_of[city] == 0:
            node_of[city] = n
            nodes[n] = city
            n += 1


@compiled
def _search_tour(
    cities: Floats, draft: Ints, kept: int, previous: Ints, effort: int, seed: int, stop: Flags, tour: Ints
) -> None:
    """Complete the first `kept` cities of the draft by search and write the tour. The search starts from `previous`,
    the tour of a shorter prefix, if there is one."""
    n_cities = len(cities)
    is_free = kept <= 1
    m = n_cities if is_free else n_cities - kept + 2
    nodes = np.empty(m, np.int64)
    node_of = np.empty(n_cities, np.int64)
    _list_nodes(draft, kept, nodes, node_of)
    points = np.empty((m, 2))
    for i in range(m):
        points[i, 0] = cities[nodes[i], 0]
        points[i, 1] = cities[nodes[i], 1]
    extent = _extent(points)
    fixed = 0.0 if is_free else -64.0 * extent
    order = np.empty(m, np.int64)
    place = np.empty(m, np.int64)
    n_kicks = effort * (n_cities - max(kept, 1))
    if len(previous) and not is_free:
        order[0] = 0
        order[m - 1] = 1
        i = 1
        for j in range(n_cities):
            if node_of[previous[j]] >= 0:
                order[i] = node_of[previous[j]]
                i += 1
    else:
        _go_to_nearest(points, is_free, order)
        n_kicks *= COLD_FACTOR
    for i in range(m):
        place[order[i]] = i
    random = _random_state(seed, kept)
    _search(points, fixed, _near(points, fixed), TOLERANCE * extent, order, place, n_kicks, random, stop)
    # The kept cities, then the ring from the last of them, away from the first.
    i = place[0]
    way = -1 if order[_lap(i + 1, m)] == 1 else 1
    n_fixed = 0 if is_free else kept
    for j in range(n_cities):
        if j < n_fixed:
            tour[j] = draft[j]
        else:
            i = _lap(i + way, m)
            tour[j] = nodes[order[i]]


@compiled
def _tail_table(cities: Floats, draft: Ints, base: int) -> Floats:
    """Return Held and Karp's table: [S, j] is the shortest path from city j of the tail through S to the start."""
    n = len(draft) - base
    table = np.empty((1 << n, n))
    between = np.empty((n, n))
    for i in range(n):
        table[0, i] = _distance(cities, draft[base + i], draft[0])
        for j in range(n):
            between[i, j] = _distance(cities, draft[base + i], draft[base + j])
    for visited in range(1, 1 << n):
        for i in range(n):
            if visited >> i & 1:
                continue
            best = np.inf
            for j in range(n):
                if visited >> j & 1:
                    best = min(best, between[i, j] + table[visited ^ (1 << j), j])
            table[visited, i] = best
    return table


@compiled
def _exact_tour(cities: Floats, draft: Ints, kept: int, base: int, table: Floats, tour: Ints) -> None:
    """Read the shortest completion of the first `kept` >= `base` cities off the table."""
    n = len(draft) - base
    for i in range(kept):
        tour[i] = draft[i]
    remains = (1 << n) - (1 << (kept - base))
    for i in range(kept, len(draft)):
        best = np.inf
        chosen = 0
        for j in range(n):
            if remains >> j & 1:
                length = _distance(cities, tour[i - 1], draft[base + j]) + table[remains ^ (1 << j), j]
                if length < best:
                    best = length
                    chosen = j
        tour[i] = draft[base + chosen]
        remains ^= 1 << chosen


# ---------------------------------------------------------------- all prefixes of a draft


@compiled
def _turn(tour: Ints, first: int, second: int, turned: Ints) -> None:
    """Write the closed tour from the city `first`, towards `second` if that is its neighbour."""
    n = len(tour)
    start = 0
    while tour[start] != first:
        start += 1
    way = -1 if tour[_lap(start - 1, n)] == second else 1
    for i in range(n):
        turned[i] = tour[_lap(start + way * i, n)]


@compiled
def _begins_with(tour: Ints, draft: Ints, kept: int) -> bool:
    for i in range(kept):  # noqa: SIM110 (numba compiles no generators within `all`)
        if tour[i] != draft[i]:
            return False
    return True


@compiled
def _length(cities: Floats, tour: Ints) -> float:
    total = _distance(cities, tour[len(tour) - 1], tour[0])
    for i in range(1, len(tour)):
        total += _distance(cities, tour[i - 1], tour[i])
    return total


@compiled
def _share(cities: Floats, draft: Ints, kept: Ints, tours: Ints) -> None:
    """Replace tours by shorter ones of longer prefixes, or by the draft, which also complete the shorter prefixes."""
    best = draft
    for j in range(len(kept) - 1, -1, -1):
        length = _length(cities, tours[j])
        if length <= _length(cities, best) * (1.0 + TOLERANCE):
            best = tours[j]
        else:
            _copy(best, tours[j])
            best = tours[j]


@compiled
def hand_offs(
    cities: Floats, draft: Ints, kept: Ints, effort: int, seed: int, n_exact: int, stop: Flags, tours: Ints
) -> int:
    """Complete the first kept[j] cities of the draft for every j, and write `tours` (J, N).

    Return how many needed a search. With at most `n_exact` remaining cities, the result is exact."""
    n_cities = len(draft)
    table = np.empty((0, 0))
    base = 0
    previous = draft[:0]
    runs = 0
    for j in range(len(kept)):
        if stop[0]:
            break
        n_fixed = max(kept[j], 1)
        tour = tours[j]
        agrees = False
        if j:
            if kept[j - 1] <= 1:  # a free tour has any start and direction
                _turn(previous, draft[0], draft[1], tour)
            else:
                _copy(previous, tour)
            agrees = _begins_with(tour, draft, kept[j])
        if agrees:
            pass
        elif n_cities - n_fixed <= 1:
            _copy(draft, tour)
        elif n_cities - n_fixed <= n_exact:
            if not len(table):
                base = n_fixed
                table = _tail_table(cities, draft, base)
            _exact_tour(cities, draft, n_fixed, base, table, tour)
            runs += 1
        else:
            _search_tour(cities, draft, kept[j], previous, effort, seed, stop, tour)
            runs += 1
        previous = tour
    if not stop[0]:
        _share(cities, draft, kept, tours)
        _tidy(draft, kept, tours)
    return runs


@compiled
def _tidy(draft: Ints, kept: Ints, tours: Ints) -> None:
    """Direct free tours towards the smaller neighbour of their first city, which is 0 if nothing is kept."""
    turned = np.empty(len(draft), np.int64)
    for j in range(min(len(kept), 2)):
        if kept[j] <= 1:
            first = draft[0] if kept[j] else 0
            _turn(tours[j], first, -1, turned)
            _turn(turned, first, min(turned[1], turned[len(draft) - 1]), tours[j])
