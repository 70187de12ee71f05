"""Roofline model of a transformer on an accelerator: a pass takes the longest of computing, moving and launching.

A token costs 2 N operations (N parameters) and 4 x layers x width for every token that it attends to. Reading many
tokens at once is bound by operations. A decoding step, one token per row, also moves bytes: all weights once, shared by
its rows, and the caches of every row. Weights and caches must fit into memory, which limits the rows.

>>> seconds = read_seconds(500, attended=250, model=LLAMA_7B, device=DEVICES["H200"], efficiency=IDEAL)
>>> f"{1000 * seconds:.1f} ms"
'6.9 ms'
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from seqdefer.errors import OptionError

USABLE_MEMORY = 0.9  # share of a device's memory; the framework needs the rest


def check_share(name: str, share: float) -> None:
    """Raise unless a share is between 0 and 1."""
    if not 0 <= share <= 1:
        raise OptionError(f"{name} is {share}; a share must be between 0 and 1")


def require_above_zero(record: object, *names: str) -> None:
    """Raise unless the named fields are finite and above 0."""
    for name in names:
        if not 0 < getattr(record, name) < math.inf:
            raise OptionError(f"{type(record).__name__}: {name} is {getattr(record, name)}; it must be above 0")


def require_not_below_zero(record: object, *names: str) -> None:
    """Raise unless the named fields are finite and not below 0."""
    for name in names:
        if not 0 <= getattr(record, name) < math.inf:
            raise OptionError(f"{type(record).__name__}: {name} is {getattr(record, name)}; it must be 0 or more")


@dataclass(frozen=True)
class Model:
    """The shape of a transformer.

    parameters        N
    layers, width     number and width of the layers
    cache_width       heads of keys and values x their size; equal to `width` without grouped-query attention
    bytes_per_number  size of a weight or cache entry: 2 for bfloat16
    devices           number of devices that share the weights; their peaks and memories add up
    """

    parameters: float
    layers: int
    width: int
    cache_width: int
    bytes_per_number: float = 2
    devices: int = 1

    def __post_init__(self) -> None:
        require_above_zero(self, *(field.name for field in fields(self)))

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_number

    @property
    def cache_bytes(self) -> float:
        """Bytes of the keys and values of one token, in all layers."""
        return 2 * self.layers * self.cache_width * self.bytes_per_number

    def operations(self, tokens: float, attended: float) -> float:
        """Return the operations for `tokens` tokens that each attend to `attended` tokens."""
        return tokens * (2 * self.parameters + 4 * self.layers * self.width * attended)


@dataclass(frozen=True)
class Device:
    """An accelerator, as in its data sheet.

    flops      dense operations per second, in the precision of the models
    bandwidth  bytes per second
    memory     bytes
    """

    name: str
    flops: float
    bandwidth: float
    memory: float

    def __post_init__(self) -> None:
        require_above_zero(self, "flops", "bandwidth", "memory")


@dataclass(frozen=True)
class Efficiency:
    """How well passes use a device.

    The defaults fit this package's own labelling on one H200, with Llamas of 1 to 13 billion parameters
    (docs/scaling.md). `IDEAL` wastes nothing: no inference engine can be better.

    reading       share of the peak operations that reading reaches
    writing       share of the peak bandwidth that writing reaches
    launch        minimum seconds per layer of a step, however little it computes
    cache_moves   how often a step moves each cache: gather and append (one read and one write each), attention
    cache_copies  copies of each cache in memory: the start of its branches, before a step, and after it
    """

    reading: float = 0.47
    writing: float = 0.55
    launch: float = 2e-3
    cache_moves: float = 5
    cache_copies: float = 3

    def __post_init__(self) -> None:
        require_above_zero(self, "reading", "writing", "cache_moves", "cache_copies")
        require_not_below_zero(self, "launch")
        check_share("reading", self.reading)
        check_share("writing", self.writing)


IDEAL = Efficiency(reading=1, writing=1, launch=0, cache_moves=1, cache_copies=1)

# From the vendor's data sheets: bfloat16 tensor cores without sparsity; SXM modules, except the L40S.
DEVICES = {
    device.name: device
    for device in (
        Device("A100", flops=312e12, bandwidth=2.039e12, memory=80e9),
        Device("H100", flops=989e12, bandwidth=3.35e12, memory=80e9),
        Device("H200", flops=989e12, bandwidth=4.8e12, memory=141e9),
        Device("L40S", flops=362e12, bandwidth=0.864e12, memory=48e9),
    )
}
# The shapes of Llama 2, which share a vocabulary. The larger model needs two devices of 141 GB or four of 80 GB.
LLAMA_7B = Model(6.74e9, layers=32, width=4096, cache_width=4096)
LLAMA_70B = Model(69.0e9, layers=80, width=8192, cache_width=1024, devices=2)


def rows_that_fit(model: Model, device: Device, efficiency: Efficiency, tokens: float) -> int:
    """Return the number of rows of `tokens` tokens whose caches fit into memory together with the weights."""
    usable, row = USABLE_MEMORY * device.memory, efficiency.cache_copies * model.cache_bytes * tokens
    rows = int((usable * model.devices - model.weight_bytes) / row)
    if rows < 1:
        raise OptionError(
            f"{model.parameters:.3g} parameters of {model.bytes_per_number:g} bytes and the cache of {tokens:.0f} "
            f"tokens do not fit into {model.devices} x {device.name} of {device.memory / 1e9:.0f} GB; "
            f"set devices={math.ceil((model.weight_bytes + row) / usable)} or more, or choose a larger device"
        )
    return rows


def read_seconds(tokens: float, attended: float, model: Model, device: Device, efficiency: Efficiency) -> float:
    """Return the seconds to read `tokens` tokens, each of which attends to `attended` tokens on average."""
    return model.operations(tokens, attended) / (device.flops * efficiency.reading * model.devices)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one decoding step by resource; the step takes the longest of them."""

    operations: float
    memory: float
    launches: float

    @property
    def seconds(self) -> float:
        return max(self.operations, self.memory, self.launches)

    @property
    def bound(self) -> str:
        return max(fields(self), key=lambda field: getattr(self, field.name)).name


def step_of(rows: float, attended: float, model: Model, device: Device, efficiency: Efficiency) -> StepTime:
    """Return the time of a step of `rows` rows, each of which attends to `attended` tokens."""
    moved = model.weight_bytes + rows * attended * model.cache_bytes * efficiency.cache_moves
    return StepTime(
        operations=read_seconds(rows, attended, model, device, efficiency),
        memory=moved / (device.bandwidth * efficiency.writing * model.devices),
        launches=model.layers * efficiency.launch,
    )
