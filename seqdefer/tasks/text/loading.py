"""Checkpoints from the Hub or from a folder, as `TextModel`s: safetensors alone, no code of theirs, one line an error.

A source that is a folder, or is written like a path, is one; anything else is a name on the Hub. Without a network
the Hub's cache still serves what it holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from seqdefer.errors import CheckpointError, InputError, OptionError, unknown
from seqdefer.tasks.text.hub import is_hub_known
from seqdefer.tasks.text.models import TextModel, text_model, transformers

DTYPES = ("float32", "bfloat16", "float16")
FILES = "config.json, model.safetensors, and tokenizer.json with tokenizer_config.json"
CONVERT = "load it with transformers where you trust it, and save it again with save_pretrained"


def load_text_model(
    source: str | Path, *, device: torch.device | str = "cpu", dtype: str = "float32", remember: int = 0
) -> TextModel:
    """The model and tokenizer of `source`, a name on the Hub or a folder. `remember`: see `text_model`."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    library, name = transformers(), str(source)
    is_folder = _is_folder(name)
    if is_folder:
        _check_folder(Path(name).expanduser())
    place = str(Path(name).expanduser()) if is_folder else name
    options = {"trust_remote_code": False, "local_files_only": is_folder or not is_hub_known()}
    with _quiet(library), _one_line(name, is_folder):
        config = library.AutoConfig.from_pretrained(place, **options)
        family = _family(library, config, name)
        tokenizer = library.AutoTokenizer.from_pretrained(place, **options)
        model, report = family.from_pretrained(
            place, config=config, use_safetensors=True, dtype=getattr(torch, dtype), output_loading_info=True, **options
        )
    _check_report(report, name)
    return text_model(model.to(device), tokenizer, name, remember=remember)


def _is_folder(name: str) -> bool:
    return Path(name).expanduser().is_dir() or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise OptionError(f"no folder {folder}; give one that holds {FILES}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no config.json; a checkpoint is a folder with {FILES}")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.ckpt") for path in folder.glob(pattern))
        if pickled:
            raise CheckpointError(f"{folder} holds only pickled weights ({pickled[0]}), which can run code; {CONVERT}")
        raise CheckpointError(f"{folder} holds no weights; a checkpoint is a folder with {FILES}")


def _family(library: Any, config: Any, name: str) -> Any:
    """The class that loads such a checkpoint as one that writes sequences."""
    auto = import_auto(library)
    is_pair = bool(config.is_encoder_decoder)
    classes = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if is_pair else auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = [*(config.architectures or ()), ""][0]
    # A bare model (facebook/bart-base says BartModel) still writes if its output layer is that of its embeddings.
    writes = found in classes.values() or (config.model_type in classes and (not found or found == _bare(auto, config)))
    if not writes:
        what = found or f"model of type {config.model_type!r}"
        raise CheckpointError(f"{name} is a {what}, which does not write sequences; take one like T5, BART or GPT-2")
    return library.AutoModelForSeq2SeqLM if is_pair else library.AutoModelForCausalLM


def import_auto(library: Any) -> Any:
    return library.models.auto.modeling_auto


def _bare(auto: Any, config: Any) -> str:
    name = auto.MODEL_MAPPING_NAMES.get(config.model_type, "")
    return name if isinstance(name, str) else name[0]


def _check_report(report: Any, name: str) -> None:
    """Weights that the checkpoint lacks would be random numbers."""
    for key in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(each) for each in report[key])
        if keys:
            what = "lacks" if key == "missing_keys" else "has in another shape"
            raise CheckpointError(f"{name} {what} {len(keys)} of the weights that writing needs, {keys[0]} first")


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """transformers draws bars and logs much of what it loads; a bot of the Hub converts pickles when asked to load."""
    log = library.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    bot = os.environ.get("DISABLE_SAFETENSORS_CONVERSION")
    log.set_verbosity_error()
    log.disable_progress_bar()
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
        os.environ.pop("DISABLE_SAFETENSORS_CONVERSION")
        if bot is not None:
            os.environ["DISABLE_SAFETENSORS_CONVERSION"] = bot


@contextmanager
def _one_line(name: str, is_folder: bool) -> Iterator[None]:
    """transformers explains failures in paragraphs."""
    from safetensors import SafetensorError

    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, json.JSONDecodeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        if is_folder:
            raise CheckpointError(f"cannot read the checkpoint {name}: {reason}") from error
        if not is_hub_known() or "connect" in reason or "offline" in reason:
            raise OptionError(
                f"{name} is no folder here and not in the cache of the Hub, and there is no network; "
                f"give a folder with {FILES} instead"
            ) from error
        if "safetensors" in reason:
            raise CheckpointError(f"{name} has no weights as safetensors, only pickled ones; {CONVERT}") from error
        raise CheckpointError(f"cannot load {name} from the Hub: {reason}; or give a folder with {FILES}") from error
