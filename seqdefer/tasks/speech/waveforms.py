"""Waveforms as inputs of models: rows of 16-bit samples at 16,000 Hz, padded on the right with NO_SAMPLE.

    inputs = stack_waveforms([to_samples(read_clip(Path("hello.flac")))])  # int16 (n, W)

Features of a clip take 0.96 MB whatever its length, since Whisper pads them to 30 s; samples of 8 s take 0.26 MB. So
features are computed when a clip is encoded. 16 bits are what Whisper was trained on, and nearly all recordings have no
more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from seqdefer.tasks.speech.audio import Samples

NO_SAMPLE = -(2**15)  # pads short rows; the largest negative sample is clipped to -32767
SCALE = 2**15


def to_samples(samples: Samples) -> Tensor:
    """Return samples between -1 and 1 as 16-bit numbers. int16 (n,)"""
    numbers = np.rint(samples.astype(np.float64) * SCALE).clip(NO_SAMPLE + 1, SCALE - 1)
    return torch.from_numpy(numbers.astype(np.int16))


def to_waveform(row: Tensor) -> Samples:
    """Return one row (W,) of inputs as samples between -1 and 1, without padding."""
    given: Samples = row[row != NO_SAMPLE].cpu().numpy().astype(np.float32) / np.float32(SCALE)
    return given


def stack_waveforms(rows: Sequence[Tensor]) -> Tensor:
    """Return rows of samples as inputs. int16 (n, W)"""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=NO_SAMPLE)


def n_samples(inputs: Tensor) -> Tensor:
    """Count the samples of inputs (n, W). int64 (n,)"""
    return (inputs != NO_SAMPLE).sum(1)
