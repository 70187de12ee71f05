"""What a pass of a transformer takes on an accelerator: the longer of what it computes, moves and launches.

A token costs 2 N operations (N parameters) and 4 x layers x width for every token that it attends to. Reading many
tokens at once is bound by operations. A step of writing, one token a row, also moves bytes: all weights once, shared by
its rows, and the caches of every row. The caches must fit into memory beside the weights, which limits the rows.

>>> seconds = read_seconds(500, attended=250, model=LLAMA_7B, device=DEVICES["H200"], engine=BEST)
>>> f"{1000 * seconds:.1f} ms"
'6.9 ms'
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from seqdefer.errors import OptionError

USABLE = 0.9  # of a device's memory; the rest is for what the framework needs


def check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise OptionError(f"{name} is {share}; it is a share, from 0 to 1")


def require_above_zero(record: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(record, name) < math.inf:
            raise OptionError(f"{type(record).__name__}: {name} is {getattr(record, name)}; it must be above 0")


def require_not_below_zero(record: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(record, name) < math.inf:
            raise OptionError(f"{type(record).__name__}: {name} is {getattr(record, name)}; it must be 0 or more")


@dataclass(frozen=True)
class Model:
    """A transformer.

    parameters        N
    layers, width     of the model
    cache_width       heads of keys and values x their size; `width` where every head has its own
    bytes_per_number  of weights and caches: 2 for bfloat16
    devices           that share the weights; their peaks and memories are added up
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
        """Of one token: keys and values of all layers."""
        return 2 * self.layers * self.cache_width * self.bytes_per_number

    def operations(self, tokens: float, attended: float) -> float:
        """Of `tokens` tokens that each attend to `attended` tokens."""
        return tokens * (2 * self.parameters + 4 * self.layers * self.width * attended)


@dataclass(frozen=True)
class Device:
    """An accelerator as its data sheet has it.

    flops      operations a second, dense, in the numbers that the models have
    bandwidth  bytes a second
    memory     bytes
    """

    name: str
    flops: float
    bandwidth: float
    memory: float

    def __post_init__(self) -> None:
        require_above_zero(self, "flops", "bandwidth", "memory")


@dataclass(frozen=True)
class Engine:
    """How well passes use a device. The defaults were chosen to fit this package's own labelling on one H200, with
    Llamas of 1 to 13 billion parameters (docs/scaling.md); `BEST` is what no engine can surpass.

    reading       share of the operations that reading reaches
    writing       share of the bandwidth that writing reaches
    launch        seconds a layer that a step takes at the least, however little it computes
    cache_moves   times that a step moves each cache: gathered and made longer (each read and written), attended to
    cache_copies  of each cache in memory at once: where rows set out from, before a step, and after it
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


BEST = Engine(reading=1, writing=1, launch=0, cache_moves=1, cache_copies=1)

# The vendor's data sheets: bfloat16 tensor cores without sparsity, SXM modules but for the L40S.
DEVICES = {
    device.name: device
    for device in (
        Device("A100", flops=312e12, bandwidth=2.039e12, memory=80e9),
        Device("H100", flops=989e12, bandwidth=3.35e12, memory=80e9),
        Device("H200", flops=989e12, bandwidth=4.8e12, memory=141e9),
        Device("L40S", flops=362e12, bandwidth=0.864e12, memory=48e9),
    )
}
# The shapes of Llama 2, which share a vocabulary. The larger one needs two devices of 141 GB or four of 80.
LLAMA_7B = Model(6.74e9, layers=32, width=4096, cache_width=4096)
LLAMA_70B = Model(69.0e9, layers=80, width=8192, cache_width=1024, devices=2)


def rows_that_fit(model: Model, device: Device, engine: Engine, tokens: float) -> int:
    """Rows of `tokens` tokens each whose caches fit into memory beside the weights."""
    usable, row = USABLE * device.memory, engine.cache_copies * model.cache_bytes * tokens
    rows = int((usable * model.devices - model.weight_bytes) / row)
    if rows < 1:
        raise OptionError(
            f"{model.parameters:.3g} parameters of {model.bytes_per_number:g} bytes and the cache of {tokens:.0f} "
            f"tokens do not fit into {model.devices} x {device.name} of {device.memory / 1e9:.0f} GB; "
            f"give the model devices={math.ceil((model.weight_bytes + row) / usable)} or more, or take a larger device"
        )
    return rows


def read_seconds(tokens: float, attended: float, model: Model, device: Device, engine: Engine) -> float:
    """Of reading `tokens` tokens, each of which attends to `attended` in the mean."""
    return model.operations(tokens, attended) / (device.flops * engine.reading * model.devices)


@dataclass(frozen=True)
class Step:
    """Seconds of one step that writes a token a row, by what bounds it; it takes the longest of them."""

    operations: float
    memory: float
    launches: float

    @property
    def seconds(self) -> float:
        return max(self.operations, self.memory, self.launches)

    @property
    def bound(self) -> str:
        return max(fields(self), key=lambda field: getattr(self, field.name)).name


def step_of(rows: float, attended: float, model: Model, device: Device, engine: Engine) -> Step:
    """A step of `rows` rows, each of which attends to `attended` tokens."""
    moved = model.weight_bytes + rows * attended * model.cache_bytes * engine.cache_moves
    return Step(
        operations=read_seconds(rows, attended, model, device, engine),
        memory=moved / (device.bandwidth * engine.writing * model.devices),
        launches=model.layers * engine.launch,
    )
