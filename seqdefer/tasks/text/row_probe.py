"""Whether rows of a Hugging Face model can stand at their own positions.

Row passes give each row its positions and its mask. A model may ignore them: it takes no positions (Bloom, MPT), masks
by itself (GPT-Neo), or keeps more in its cache than keys and values. It would then write other tokens without an error.

Three tiny passes of two rows, which begin, read on, go back and step, are compared with what the model says about each
row alone. What they are too short to see is read in the configuration: windows, and rotations that depend on the
longest row of a batch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from seqdefer.rows import Chunk
from seqdefer.tasks.text.fused import Fused
from seqdefer.tasks.text.model_rows import ModelRows
from seqdefer.tasks.text.passes import DecoderOnly, Network
from seqdefer.tasks.text.row_passes import RowPasses
from seqdefer.types import Proposal

logger = logging.getLogger(__name__)

EXACT, HALF = 1e-3, 0.05  # allowed differences in single and half precision; see `probe`
WINDOWS = ("sliding_window", "window_size", "attention_window", "attention_chunk_size", "local_radius")
COUPLED_ROTATIONS = ("dynamic", "longrope")


def rows_stand_apart(network: Network, name: str) -> bool:
    """Tell whether rows of a model can stand at their own positions; log why not."""
    why = _why_not(network)
    if why:
        logger.info("rows of %s cannot stand at their own positions, so batches run one by one: %s", name, why)
    return not why


def _why_not(network: Network) -> str:
    """Return an empty string where nothing stands against it."""
    if isinstance(network, DecoderOnly) and not network.takes_positions:
        return "it takes no positions"
    why = _configured(network.model.config.get_text_config(decoder=True), network.limit())
    if why:
        return why
    why = _tried(network)
    if why and network.fused.has_kernels:
        network.fused = Fused(network.model, with_kernels=False)
        with_kernels, why = why, _tried(network)
        if not why:
            logger.info("%s runs without kernels of our own: %s", type(network.model).__name__, with_kernels)
    return why


def _tried(network: Network) -> str:
    try:
        gap = probe(network)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model does with masks and caches that it does not expect
        return f"a pass over them fails: {error!r}"
    allowed = HALF if network.model.dtype.itemsize < 4 else EXACT
    return "" if gap <= allowed else f"its logits differ by {gap:.2g} of their spread from those of each row alone"


def _configured(config: Any, limit: int | None) -> str:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds - {"sliding_attention", "chunked_attention"}:
        return f"it has layers of other kinds: {', '.join(sorted(kinds))}"
    windows = {name: getattr(config, name, None) for name in WINDOWS}
    if not getattr(config, "use_sliding_window", True):
        del windows["sliding_window"]
    for name, window in windows.items():
        if window and not (isinstance(window, int) and limit is not None and window >= limit):
            return f"it sees a window: {name} is {window}"
    rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for one in (rotation, *rotation.values()):  # some models have one for each kind of layer
        kind = one.get("rope_type", one.get("type")) if isinstance(one, dict) else None
        if kind in COUPLED_ROTATIONS:
            return f"the longest row changes the positions of all: rope_type is {kind}"
    return ""


@torch.no_grad()
def probe(network: Network) -> float:
    """Return the largest difference of logits, as a root mean square, between rows at their own positions and each row
    alone, relative to the standard deviation of the logits."""
    network, inputs = network.for_trial()
    ids = iter(_ids(network))
    tokens, wrong = ([[next(ids) for _ in range(n)] for n in sizes] for sizes in ((4, 2), (0, 2)))
    rows = ModelRows(RowPasses(network, lambda hidden, logits, _: Proposal(logits.argmax(1), hidden, logits)))
    said = [rows.admit(network.stack_inputs(inputs))[0]]
    said.append(rows.read([Chunk(0, tokens[0][:3], [1, 2, 3]), Chunk(1, [tokens[1][0], *wrong[1]], [1])]))
    rows.go_back([0, len(wrong[1])])
    said.append(rows.step(torch.tensor([line[-1] for line in tokens], device=network.device)))
    places = [(0, 0), (1, 0), (0, 1), (0, 2), (0, 3), (1, 1), (0, 4), (1, 2)]  # row, tokens that it has read
    alone = [_alone(network, *both) for both in zip(inputs, tokens, strict=True)]
    expected = torch.stack([alone[row][n] for row, n in places])  # (M, V)
    gaps = (Proposal.join(said).uncertainty.float() - expected).square().mean(1).sqrt() / expected.std(1)
    return float(gaps.nan_to_num(torch.inf).max())


def _alone(network: Network, inputs: Any, tokens: list[int]) -> Tensor:
    """Return the logits (T + 1, V) before the first of T tokens and after each."""
    given, read = network.stack_inputs([inputs]), torch.tensor([tokens], device=network.device)
    return network.prefill(given, read, says_all=True).logits[0].float()


def _ids(network: Network) -> list[int]:
    """Return different tokens from the middle of the vocabulary: special ones are at its ends."""
    n = network.n_tokens
    return [(n // 4 + place * max(n // 64, 1)) % n for place in range(7, 16)]
