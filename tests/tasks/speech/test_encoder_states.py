"""Encoder states are made once, and come back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from seqdefer.tasks.speech.encoder_states import ClipStates, UnstoredStatesWarning
from seqdefer.tasks.speech.waveforms import stack_waveforms


def encode(inputs: Tensor) -> Tensor:
    """Return states (R, 3, 2) that tell the clips apart."""
    assert len(inputs)
    return inputs.sum(1)[:, None, None] + torch.arange(6).view(3, 2) / 7


CLIPS = stack_waveforms([torch.tensor([1, 2, 3], dtype=torch.int16), torch.tensor([7], dtype=torch.int16)])
OTHER = stack_waveforms([torch.tensor([9, 9], dtype=torch.int16)])


@pytest.mark.parametrize("n_bytes", [0, 24, 2**20])
@pytest.mark.parametrize("on_disk", [False, True])
def test_states_are_the_encoders(n_bytes: int, on_disk: bool, tmp_path: Path) -> None:
    cache = ClipStates(n_bytes, tmp_path if on_disk else None)
    for _ in range(2):
        for clips in (CLIPS, OTHER, torch.cat([CLIPS, CLIPS[:1]])):
            assert torch.equal(cache.get(clips, encode), torch.cat([encode(row[None]) for row in clips]))


def test_a_disk_remembers_all_clips(tmp_path: Path) -> None:
    cache = ClipStates(24, tmp_path / "model")  # memory for one clip
    for _ in range(3):
        cache.get(CLIPS, encode)
        cache.get(OTHER, encode)
    assert cache.n_encoded == 3
    again = ClipStates(0, tmp_path / "model")
    assert torch.equal(again.get(CLIPS, encode), encode(CLIPS))
    assert again.n_encoded == 0
    assert ClipStates(0, tmp_path / "other").get(CLIPS, encode).shape == (2, 3, 2)


def test_padding_does_not_change_a_clip() -> None:
    cache = ClipStates(2**20)
    cache.get(CLIPS, encode)
    cache.get(CLIPS[1:, :1], encode)
    assert cache.n_encoded == 2


def test_damaged_states_are_made_again(tmp_path: Path) -> None:
    ClipStates(0, tmp_path).get(OTHER, encode)
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"nothing")
    cache = ClipStates(0, tmp_path)
    assert torch.equal(cache.get(OTHER, encode), encode(OTHER))
    assert cache.n_encoded == 1
    assert path.stat().st_size > 7


def test_without_a_disk_work_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ClipStates(0, tmp_path / "file" / "folder")
    with pytest.warns(UnstoredStatesWarning, match="cannot store encoder states in .*; clips will be encoded again"):
        assert torch.equal(cache.get(OTHER, encode), encode(OTHER))
    assert torch.equal(cache.get(OTHER, encode), encode(OTHER)), "without a second warning"
