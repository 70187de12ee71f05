"""Policies on disk: weights as safetensors, class and constructor arguments as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rl4co.models import zoo
from torch import nn

from seqdefer.errors import CheckpointError, OptionError, unknown
from seqdefer.storage.files import read_json, read_weights
from seqdefer.storage.made_once import CONFIG, WEIGHTS, save_network
from seqdefer_rl4co.predictor import First, RL4COPredictor, Scale, name_of

KIND = "tsp_rl4co"
LOADABLE = ("AttentionModelPolicy", "PointerNetworkPolicy", "SymNCOPolicy")  # classes a config may name
MAX_SIZE = 4096  # a larger size in a config is a damaged file
FIELDS = {"kind": str, "policy": str, "arguments": dict, "scale": str, "first": str}
SAVE = "write one with seqdefer_rl4co.save_policy"


def save_policy(
    policy: Any, folder: Path | str, arguments: Mapping[str, Any] | None = None, *, scale: Scale = "unit",
    first: First = "auto",
) -> RL4COPredictor:  # fmt: skip
    """Write a policy for `load_predictor`. `arguments` are those its constructor was given.

    Arguments that do not rebuild this policy are refused before anything is written. POMO's defaults are
    {"num_encoder_layers": 6, "normalization": "instance", "use_graph_context": False}."""
    predictor = RL4COPredictor(policy, scale=scale, first=first)
    name, given = type(policy).__name__, dict(arguments or {})
    rebuilt = _build(name, given)
    try:
        rebuilt.load_state_dict(predictor.policy.state_dict())
    except RuntimeError as error:  # a message of many lines
        raise OptionError(f"{name}(**{given}) is not this policy: {' '.join(str(error).split())}") from error
    if name_of(rebuilt) != name_of(predictor.policy):
        reason = "heads, clipping, temperature or another setting that the weights do not show differs"
        raise OptionError(f"{name}(**{given}) is not this policy: {reason}; give the arguments of its constructor")
    config = {"kind": KIND, "policy": name, "arguments": given, "scale": predictor.scale, "first": predictor.first}
    save_network(predictor.policy, Path(folder), config)
    return predictor


def load_predictor(folder: Path, device: torch.device | None = None, facts: bool = True) -> RL4COPredictor:
    """Load what `save_policy` wrote. This is the entry point behind `--predictor rl4co:FOLDER`."""
    path = folder / CONFIG
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file: RL4CO's .ckpt files are pickles, which can run any code, and are not read here; if "
            f"you trust it, load it with RL4CO and save its policy: {SAVE}"
        )
    if not path.is_file():
        raise CheckpointError(f"no policy of RL4CO in {folder}: it has no {CONFIG}; {SAVE}")
    config = read_json(path)
    is_valid = isinstance(config, dict) and all(isinstance(config.get(key), kind) for key, kind in FIELDS.items())
    if not is_valid or config["kind"] != KIND:
        raise CheckpointError(f"{path} does not describe a policy of RL4CO; {SAVE}")
    try:
        policy = _build(config["policy"], config["arguments"])
        read_weights(policy, folder / WEIGHTS)
        return RL4COPredictor(policy.to(device or "cpu"), facts, config["scale"], config["first"])
    except OptionError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def _build(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build a policy with random weights from plain data: a file can run nothing but a known constructor."""
    if name not in LOADABLE:
        raise unknown("policy", name, LOADABLE)
    if large := [size for size in arguments.values() if isinstance(size, int) and size > MAX_SIZE]:
        raise OptionError(f"{name}(**{dict(arguments)}): {large[0]} is too large; at most {MAX_SIZE}")
    try:
        json.dumps(arguments, allow_nan=False)
        policy: nn.Module = getattr(zoo, name)(**arguments)
    except Exception as error:  # RL4CO and torch raise anything for sizes that do not fit
        raise OptionError(f"{name}(**{dict(arguments)}) fails: {type(error).__name__}: {error}") from error
    return policy
