"""Results that are made once: found again, refused for another config, never half written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from seqdefer.errors import CheckpointError
from seqdefer.storage.made_once import network_made_once, tensors_made_once


def train(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(2, 3)


def test_a_network_is_trained_once(tmp_path: Path) -> None:
    first = network_made_once(tmp_path, {"size": 3}, train, train)
    found = network_made_once(tmp_path, {"size": 3}, lambda: train(1), lambda: pytest.fail("trained again"))
    assert torch.equal(found.weight, first.weight)
    assert not found.training
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(CheckpointError, match="does not belong to these options; remove"):
        network_made_once(tmp_path, {"size": 4}, train, train)


def test_damaged_tensors_are_made_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> dict[str, torch.Tensor]:
        calls.append(1)
        return {"tours": torch.arange(4)}

    path = tmp_path / "abc.safetensors"
    steps: list[Callable[[], object]] = [lambda: None, lambda: None, lambda: path.write_bytes(b"damaged")]
    for step in steps:
        step()
        assert tensors_made_once(path, make)["tours"].tolist() == [0, 1, 2, 3]
    assert len(calls) == 2
