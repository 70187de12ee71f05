"""Results that take long to make: made once, written to disk, and found again by what made them.

A trained network is a folder with `model.safetensors` and `config.json`. The config is written last, so a folder that
has one is complete. Single files of tensors are named by a fingerprint; with a digest they are shards
(`storage/shards.py`).

    network = network_made_once(folder, asdict(options), build=lambda: Network(8), train=lambda: train(...))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from seqdefer.errors import CheckpointError
from seqdefer.storage.files import read_json, read_tensors, read_weights, write_json, write_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

Network = TypeVar("Network", bound="nn.Module")
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_network(network: nn.Module | None, folder: Path, config: Mapping[str, Any]) -> None:
    """Write the weights, if any, then `config`. A save that is interrupted leaves no config, hence no checkpoint."""
    (folder / CONFIG).unlink(missing_ok=True)
    if network is not None:
        write_tensors(folder / WEIGHTS, network.state_dict())
    write_json(folder / CONFIG, dict(config))


def load_network(network: Network, folder: Path, config: Mapping[str, Any]) -> Network:
    """Read the weights in `folder` into `network`. Raise CheckpointError if they were saved with another config."""
    if read_json(folder / CONFIG) != config:
        raise CheckpointError(f"{folder / CONFIG} does not belong to these options; remove {folder} and run again")
    read_weights(network, folder / WEIGHTS)
    return network.eval()


def network_made_once(
    folder: Path, config: Mapping[str, Any], build: Callable[[], Network], train: Callable[[], Network]
) -> Network:
    """Return the network in `folder`, read into what `build` returns; if there is none, train and save one."""
    if (folder / CONFIG).is_file():
        return load_network(build(), folder, config)
    network = train()
    save_network(network, folder, config)
    return network


def tensors_made_once(path: Path, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Return the tensors in `path`, a file named by a fingerprint. If it is missing or damaged, make and write them."""
    if path.is_file():
        with suppress(CheckpointError):
            return read_tensors(path)
    made = make()
    write_tensors(path, made)
    return made
