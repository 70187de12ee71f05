"""The look that all charts and tables share: blocks of methods, colours, dashes, decimals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from seqdefer.evaluation.results import REFERENCE_PREFIXES, Block

# One text for terminal, reports, tables and docs/concepts/curves.md.
HEADROOM = (
    "Headroom: what an expert that costs nothing would improve (OptimalFree, the paper's Optimal). Above 100 %, "
    "mixtures of both models are better than the expert alone."
)
BLOCKS: Mapping[Block, str] = {  # in the order of the paper's table; the last is drawn on top
    "reference": "Reference",
    "whole": "Whole sequence",
    "once": "One-time",
    "token": "Token-level",
}

# One hue per granularity. Within a hue, lightness and dashes distinguish methods, also for colour-blind readers. The
# first shade belongs to the best method of its block.
LIGHT: Mapping[Block, tuple[str, ...]] = {
    "token": ("#0062bd", "#3f97d6", "#0a2f66"),
    "once": ("#c2500a", "#d18417", "#7a2e0e"),
    "whole": ("#0b8a68", "#5aa05f", "#0d4f3f"),
    "reference": ("#6b7280",),
}
DARK: Mapping[Block, tuple[str, ...]] = {
    "token": ("#6cb4ff", "#a9d4ff", "#3d86d6"),
    "once": ("#ff9a52", "#ffc892", "#d96a1d"),
    "whole": ("#3fcf9f", "#a2e8ca", "#2a9b76"),
    "reference": ("#9aa4b2",),
}
DASHES = ("", "7 4", "2 3", "9 3 2 3")
REFERENCE_DASHES = ("6 4", "2 3", "9 3 2 3", "4 2")
INK, SOFT, RULE = "#1f2733", "#5b6675", "#e3e7ec"


def block_of(name: str, granularity: Block) -> Block:
    """Return the block that shows a method. Coins and oracles are references, whatever their granularity."""
    return "reference" if name.startswith(REFERENCE_PREFIXES) else granularity


def group_by_block(methods: Iterable[tuple[str, Block]]) -> dict[Block, list[str]]:
    """Return the names of (name, granularity) pairs by block: names in their order, blocks in that of BLOCKS."""
    blocks: dict[Block, dict[str, None]] = {block: {} for block in BLOCKS}
    for name, granularity in methods:
        blocks[block_of(name, granularity)][name] = None
    return {block: list(names) for block, names in blocks.items() if names}


def decimals_for(values: Iterable[float]) -> int:
    """Return the decimals that show four digits of the largest value, between 2 and 6."""
    largest = max(map(abs, values), default=0) or 1
    return min(max(3 - math.floor(math.log10(largest)), 2), 6)
