"""Load checkpoints from the Hub or a folder as `TextModel`s: safetensors only, no remote code, one-line errors.

A source that is a folder or looks like a path is a folder; anything else is a name on the Hub, NAME or NAME@REVISION.
Without a network, checkpoints load from the Hub's cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from seqdefer.errors import CheckpointError, InputError, OptionError, require_known
from seqdefer.tasks.text.hub import cached_commit, is_hub_reachable
from seqdefer.tasks.text.models import TextModel, text_model, transformers

REVISION_SIGN = "@"  # between the name of a repository on the Hub and a branch, tag or commit
DTYPES = ("float32", "bfloat16", "float16")
CHECKPOINT_FILES = "config.json, model.safetensors, and tokenizer.json with tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")  # one of them, at least
Family = Callable[[Any, Any, str], Any]  # the package, a configuration and a name -> an auto class
CONVERSION = "if you trust it, load it with transformers and save it again with save_pretrained"


def load_text_model(
    source: str | Path, *, device: torch.device | str = "cpu", dtype: str = "float32", cache_bytes: int = 0
) -> TextModel:
    """Load the model and tokenizer of `source`, a name on the Hub or a folder. `cache_bytes`: see `text_model`."""
    found = load_checkpoint(source, text_family, device=device, dtype=dtype)
    return text_model(found.model, found.tokenizer, found.name, cache_bytes=cache_bytes)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A model of transformers and what came with it."""

    name: str  # as the user gave it, with the revision where it is from the Hub
    model: Any
    tokenizer: Any
    options: Mapping[str, Any]  # with which more of it can be loaded by `from_pretrained`
    place: str  # the folder or the name on the Hub


def load_checkpoint(source: str | Path, family: Family, *, device: torch.device | str, dtype: str) -> LoadedCheckpoint:
    """Load the model and tokenizer of `source`. `family` returns the auto class that loads the model, or refuses it."""
    require_known("dtype", dtype, DTYPES)
    library, name = transformers(), str(source)
    is_local = is_folder(name)
    if is_local:
        _check_folder(Path(name).expanduser())
    place, _, revision = (str(Path(name).expanduser()), "", "") if is_local else name.partition(REVISION_SIGN)
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": is_local or not is_hub_reachable()}
    options |= {"revision": revision} if revision else {}
    with quiet_transformers(), _one_line(name, is_local):
        config = library.AutoConfig.from_pretrained(place, **options)
        kind = family(library, config, name)
        tokenizer = library.AutoTokenizer.from_pretrained(place, **options)
        model, report = kind.from_pretrained(
            place, config=config, use_safetensors=True, dtype=getattr(torch, dtype), output_loading_info=True, **options
        )
    _check_report(report, name)
    commit = "" if is_local else cached_commit(place, revision)
    return LoadedCheckpoint(
        f"{place}{REVISION_SIGN}{commit}" if commit else name, model.to(device), tokenizer, options, place
    )


def is_folder(name: str) -> bool:
    """Tell whether the name of a model is that of a folder, not of a repository on the Hub."""
    return Path(name).expanduser().is_dir() or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise OptionError(f"no folder {folder}; give one that holds {CHECKPOINT_FILES}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no config.json; a checkpoint is a folder with {CHECKPOINT_FILES}")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.ckpt") for path in folder.glob(pattern))
        if pickled:
            raise CheckpointError(f"{folder} has only pickled weights ({pickled[0]}), which can run code; {CONVERSION}")
        raise CheckpointError(f"{folder} holds no weights; a checkpoint is a folder with {CHECKPOINT_FILES}")
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):  # some would be made up
        raise CheckpointError(f"{folder} holds no tokenizer; save it there, too: tokenizer.save_pretrained(...)")


def text_family(library: Any, config: Any, name: str) -> Any:
    """Return the auto class that loads the checkpoint as a model that writes sequences."""
    auto = library.models.auto.modeling_auto
    is_pair = bool(config.is_encoder_decoder)
    classes = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if is_pair else auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = [*(config.architectures or ()), ""][0]
    # A bare model (facebook/bart-base is a BartModel) can write if it ties its output layer to its embeddings.
    writes = found in classes.values() or (config.model_type in classes and (not found or found == _bare(auto, config)))
    if not writes:
        what = found or f"model of type {config.model_type!r}"
        raise CheckpointError(f"{name} is a {what}, which does not write sequences; choose one like T5, BART or GPT-2")
    return library.AutoModelForSeq2SeqLM if is_pair else library.AutoModelForCausalLM


def _bare(auto: Any, config: Any) -> str:
    name = auto.MODEL_MAPPING_NAMES.get(config.model_type, "")
    return name if isinstance(name, str) else name[0]


def _check_report(report: Any, name: str) -> None:
    """Reject checkpoints with missing weights, which transformers would initialise at random."""
    for key in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(each) for each in report[key])
        if keys:
            what = "missing" if key == "missing_keys" else "of another shape"
            raise CheckpointError(f"{name}: {len(keys)} of its weights are {what}, the first is {keys[0]}")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars and logs of transformers and its requests to convert pickled weights."""
    log = transformers().utils.logging
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
    """Turn the multi-line errors of transformers into one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, json.JSONDecodeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        if is_folder:
            raise CheckpointError(f"cannot read the checkpoint {name}: {reason}") from error
        if not is_hub_reachable() or "connect" in reason or "offline" in reason:
            raise OptionError(
                f"{name} is not a folder and not in the Hub's cache, and there is no network; "
                f"give a folder with {CHECKPOINT_FILES}"
            ) from error
        if "safetensors" in reason:
            raise CheckpointError(f"{name} has only pickled weights, no safetensors; {CONVERSION}") from error
        raise CheckpointError(
            f"cannot load {name} from the Hub: {reason}; or give a folder with {CHECKPOINT_FILES}"
        ) from error
