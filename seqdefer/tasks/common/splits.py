"""Splits of documents or clips without overlap: train, validation and test, dealt from one source or from two.

An item is placed by a hash of its content and the seed, so the deal does not depend on the order of a file. A larger
part begins with the smaller one, and test and validation stay the same when train grows.

    deal_splits(ItemPool("news.jsonl", documents, "900 documents of news.jsonl"), None, {"train": 800, ...}, seed=0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from seqdefer.errors import DataError, OptionError
from seqdefer.interfaces import SplitName

# Parts are dealt in this order, so that the test stays the same when training grows.
_DEAL_ORDER: Sequence[SplitName] = ("test", "validation", "train")


class Digestible(Protocol):
    """An item that a hash stands for."""

    def digest(self, seed: str = "") -> bytes:
        """Return a hash of what must not be in two parts; a seed makes it a random number."""


Item = TypeVar("Item", bound=Digestible)


@dataclass(frozen=True)
class ItemPool(Generic[Item]):
    """Different items of one source."""

    name: str
    items: Sequence[Item]
    description: str  # for the provenance
    noun: str = "document"  # what an item is called, in messages and options

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class DealtSplits(Generic[Item]):
    """Three parts that share no item."""

    parts: Mapping[SplitName, Sequence[Item]]
    source: str  # a description for the provenance


def count_nouns(n: int, noun: str) -> str:
    """Return `1 clip`, `2 clips`."""
    return f"1 {noun}" if n == 1 else f"{n} {noun}s"


def deal_splits(
    train: ItemPool[Item], test: ItemPool[Item] | None, counts: Mapping[SplitName, int], seed: int
) -> DealtSplits[Item]:
    """Deal items into parts of at most `counts`.

    train alone      all three parts are dealt from it
    train and test   train and validation are dealt from the first, without items of the second; the test is the
                     second, or a sample of it, in its order

    Too few items are divided in the proportions of `counts`. The test may have none, where nothing is reported on.
    """
    for name, count in counts.items():
        least = 0 if name == "test" else 1
        if count < least:
            raise OptionError(f"--{name}-{train.noun}s is {count}; it must be at least {least}")
    if seed < 0:
        raise OptionError(f"--seed is {seed}; it must be at least 0")
    if test is None:
        source = f"{train.description}; dealt by seed {seed}{_shortage(train, counts)}"
        return DealtSplits(_deal(train, counts, seed), source)
    return _splits_of_two(train, test, counts, seed)


def _splits_of_two(
    train: ItemPool[Item], test: ItemPool[Item], counts: Mapping[SplitName, int], seed: int
) -> DealtSplits[Item]:
    tested = {one.digest() for one in test.items}
    left = replace(train, items=[one for one in train.items if one.digest() not in tested])
    shared = len(train) - len(left)
    if not len(left):
        raise DataError(
            f"all {count_nouns(len(train), train.noun)} of {train.name} are also in {test.name}; give other"
            f" {train.noun}s with --train, or leave --test out to deal one file into three parts"
        )
    fitted: dict[SplitName, int] = {name: counts[name] for name in ("train", "validation")}
    parts = _deal(left, fitted, seed)
    parts["test"] = _sample(test.items, counts["test"], seed)
    dropped = f", {shared} left out because the test has them" if shared else ""
    dealt = f"train and validation: {train.description}{dropped}, dealt by seed {seed}{_shortage(left, fitted)}"
    return DealtSplits(parts, f"{dealt}; test: {test.description}{_shortage(test, {'test': counts['test']})}")


def _shortage(pool: ItemPool[Item], counts: Mapping[SplitName, int]) -> str:
    asked = sum(counts.values())
    return f" ({asked} asked for, {len(pool)} at hand)" if len(pool) < asked else ""


def _deal(pool: ItemPool[Item], counts: Mapping[SplitName, int], seed: int) -> dict[SplitName, Sequence[Item]]:
    if len(pool) < (least := sum(count > 0 for count in counts.values())):
        raise DataError(
            f"{pool.name} leaves {count_nouns(len(pool), pool.noun)}; at least {least} are needed; give more"
            " with --train"
        )
    order = _order(pool.items, seed)
    sizes = counts if sum(counts.values()) <= len(pool) else _divide_in_turn(len(pool), counts)
    parts: dict[SplitName, Sequence[Item]] = {}
    start = 0
    for name in (name for name in _DEAL_ORDER if name in counts):
        parts[name] = [pool.items[row] for row in order[start : start + sizes[name]]]
        start += sizes[name]
    return {name: parts[name] for name in counts}


def _order(items: Sequence[Digestible], seed: int) -> list[int]:
    """Return the rows in random order, sorted by a hash of the item and the seed."""
    numbers = [one.digest(str(seed)) for one in items]
    return sorted(range(len(items)), key=numbers.__getitem__)


def _sample(items: Sequence[Item], n: int, seed: int) -> Sequence[Item]:
    """Return at most `n` random items, in their order."""
    return [items[row] for row in sorted(_order(items, seed)[:n])]


def _divide_in_turn(n: int, counts: Mapping[SplitName, int]) -> dict[SplitName, int]:
    """Divide `n` in the proportions of `counts`, at least one each unless none are asked for: each takes its share of
    what is left."""
    names = [name for name in _DEAL_ORDER if counts.get(name)]
    sizes: dict[SplitName, int] = dict.fromkeys(counts, 0)
    for place, name in enumerate(names):
        later = names[place + 1 :]
        share = n * counts[name] // (counts[name] + sum(counts[other] for other in later))
        sizes[name] = max(1, min(share, n - len(later)))
        n -= sizes[name]
    return sizes
