"""Requirements that the checks share. Each raises a one-line ContractError when it does not hold."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from seqdefer.errors import ContractError
from seqdefer.types import Sequences

NEW_STATE = "states are values: return a new one and leave the old one unchanged"
EVERY_PART = "select every part of the state, in the given order, repeats included"
ONE_BY_ONE = "compute each row from itself alone"


def type_name(thing: object) -> str:
    return type(thing).__name__


def fail(what: str, remedy: str) -> NoReturn:
    raise ContractError(f"{what}; {remedy}")


def require(holds: bool | Tensor, what: str, remedy: str) -> None:
    if not bool(holds):
        fail(what, remedy)


def require_tuple(value: object, size: int, who: str, parts: str) -> None:
    is_tuple = isinstance(value, tuple) and len(value) == size
    require(is_tuple, f"{who} returned a {type_name(value)}", f"return {parts}")


def require_text(text: object, what: str) -> None:
    require(isinstance(text, str) and bool(text), f"{what} is {text!r}", "use a string that is not empty")


def require_tensor(value: object, what: str, kind: str, *shape: int | None) -> Tensor:
    """Require a finite tensor of a kind ('float', 'int64', 'bool' or 'token': float or int64) and shape (None: any)."""
    if not isinstance(value, Tensor):
        fail(f"{what} is a {type_name(value)}", "use a tensor")
    fits = value.ndim == len(shape) and all(want in (None, got) for got, want in zip(value.shape, shape, strict=True))
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    require(fits, f"{what} has shape {tuple(value.shape)}", f"use ({wanted})")
    found = "float" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
    kinds = ("float", "int64") if kind == "token" else (kind,)
    require(found in kinds, f"{what} has dtype {found}", f"use {' or '.join(kinds)}")
    is_bad = ~value.isfinite()
    require(~is_bad.any(), f"{what} holds {value[is_bad][:1].tolist()}", "use finite numbers")
    return value


def require_loss(value: object, what: str, n: int) -> Tensor:
    loss = require_tensor(value, what, "float", n)
    require((loss >= 0).all(), f"{what} is {float(loss.min()):.6g}", "it must be 0 or more")
    return loss


def require_log_probs(value: object, what: str, n: int) -> None:
    """Require log probabilities (n, V) of V tokens, -inf allowed."""
    require(isinstance(value, Tensor) and value.ndim == 2, f"{what} is not of shape ({n}, V)", "use a tensor (n, V)")
    assert isinstance(value, Tensor)
    probabilities = require_tensor(value.exp(), f"{what}, exponentiated,", "float", n, None)
    totals = probabilities.double().sum(1)
    is_one = torch.isclose(totals, torch.ones_like(totals), atol=1e-3)
    require(is_one.all(), f"{what}: probabilities of a row sum to {float(totals[0]):.6g}", "return a log_softmax")


def require_same(got: Tensor, expected: Tensor, what: str, remedy: str) -> None:
    """Require equal integers; floats may differ by the order of summation."""
    require(got.shape == expected.shape, f"{what}: shape {tuple(got.shape)} is not {tuple(expected.shape)}", remedy)
    expected = expected.to(got)
    is_same = torch.isclose(got, expected, rtol=1e-4, atol=1e-5) if got.is_floating_point() else got == expected
    if not bool(is_same.all()):
        place = tuple((~is_same).nonzero()[0].tolist())
        fail(f"{what}: {got[place].item()} is not {expected[place].item()}", remedy)


def require_same_sequences(got: Sequences, expected: Sequences, what: str, remedy: str) -> None:
    require_same(got.lengths, expected.lengths, f"{what}: length", remedy)
    mask = expected.mask()
    require_same(got.tokens[mask], expected.tokens[mask], f"{what}: token", remedy)


def shuffled(rows: Tensor) -> Tensor:
    """Return indices into `rows` in reverse, the first one twice, as a batch that branches selects. (B + 1,)"""
    indices = torch.arange(len(rows), device=rows.device)
    return torch.cat([indices.flip(0), indices[:1]])


def indices_of(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)


def cuts(length: int) -> list[int]:
    """Return prefix lengths to check: all of 0..length, or five of them for long sequences."""
    return list(range(length + 1)) if length <= 8 else [0, 1, length // 2, length - 1, length]
