"""The parameters inside an int8 ONNX file of a Hugging Face model, as float32 arrays by their names.

ONNX Runtime's dynamic quantisation stores a weight W as three initializers, NAME_quantized, NAME_scale and
NAME_zero_point, with W = (quantized - zero_point) x scale. Names of most parameters survive the export. The weights of
linear layers do not: they are transposed and called onnx::MatMul_123, but the node that multiplies by one is named
after its module, /layers.0/fc1/MatMul_quant. Merging the two branches of a decoder adds _merged_0 to names.

    read_parameters(Path("encoder_model_quantized.onnx"))["layers.0.fc1.weight"]  # float32 (out, in)
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqdefer.errors import CheckpointError, MissingExtraError

Arrays = dict[str, NDArray[Any]]

_PARAMETER = re.compile(r"(?P<name>[a-z0-9_]+(\.[a-z0-9_]+)*\.(weight|bias))(_merged_\d+)?")
_MODULE = re.compile(r"/?(?P<path>.+)/MatMul(_\d+)?_quant")


def read_parameters(path: Path) -> dict[str, NDArray[np.float32]]:
    """Return the parameters in an ONNX file, dequantised, by the names they had in PyTorch."""
    onnx = _onnx()
    try:
        graph = onnx.load(str(path)).graph
    except Exception as error:  # protobuf's DecodeError, OSError: no common base class
        raise CheckpointError(f"cannot read {path}: {error}; fetch it again") from error
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    return {**_named(stored), **_multiplied(graph, stored)}


def _onnx() -> Any:
    try:
        import_module("onnx.numpy_helper")
        return import_module("onnx")
    except ImportError as error:
        python = shlex.quote(sys.executable or "python")
        raise MissingExtraError(
            f"reading ONNX files needs the package 'onnx'; install it with: {python} -m pip install onnx"
        ) from error


def _named(stored: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """Return parameters that kept their names."""
    found: dict[str, NDArray[np.float32]] = {}
    for name, values in stored.items():
        base = name.removesuffix("_quantized")
        match = _PARAMETER.fullmatch(base)
        if match is not None:
            is_quantized = base != name
            found[match["name"]] = _dequantize(base, stored, axis=0) if is_quantized else values.astype(np.float32)
    return found


def _multiplied(graph: Any, stored: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """Return weights of linear layers, which are named by the nodes that multiply by them."""
    found: dict[str, NDArray[np.float32]] = {}
    for node in _nodes(graph):
        module = _MODULE.fullmatch(node.name)
        if node.op_type != "MatMulInteger" or module is None or node.input[1] not in stored:
            continue  # the product of two activations
        weight = _dequantize(node.input[1].removesuffix("_quantized"), stored, axis=1)
        found[f"{module['path'].replace('/', '.')}.weight"] = np.ascontiguousarray(weight.T)
    return found


def _nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of the branches in it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _dequantize(name: str, stored: Mapping[str, NDArray[Any]], axis: int) -> NDArray[np.float32]:
    """Return (quantized - zero point) x scale; both may be one number, or one for each channel along `axis`."""
    values = stored[f"{name}_quantized"]
    shape = [-1 if place == axis else 1 for place in range(values.ndim)]
    try:
        zero, scale = (stored[f"{name}_{part}"].astype(np.float32).reshape(shape) for part in ("zero_point", "scale"))
    except KeyError as error:
        raise CheckpointError(f"the weight {name} has no {error}; fetch the file again") from error
    weight: NDArray[np.float32] = (values.astype(np.float32) - zero) * scale
    return weight
