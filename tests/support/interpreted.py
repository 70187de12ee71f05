"""Triton's interpreter, which runs kernels on a CPU."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, by whomever


def interpreted_kernels() -> Any:
    """Return the module of kernels, interpreted; skip where that is not possible."""
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted only where there is no GPU")
    pytest.importorskip("triton", reason="needs triton, which comes with PyTorch for CUDA")
    return import_module("seqdefer.tasks.text.kernels")
