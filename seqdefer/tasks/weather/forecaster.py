"""The weather predictor: an LSTM encoder-decoder with dropout, its training, and its `Predictor` interface.

Uncertainty is the Monte Carlo dropout variance (Gal and Ghahramani) over T decoder passes. Each pass has its own
dropout masks, fixed and shared by all examples, so proposals are deterministic and a batch equals its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from seqdefer.interfaces import Predictor
from seqdefer.progress import NO_PROGRESS, Meter, Progress
from seqdefer.storage.files import fingerprint
from seqdefer.storage.made_once import network_made_once
from seqdefer.types import BatchRecord, Examples, Proposal

N_OBSERVED = 12  # temperatures in an input; time of day and time of year follow


@dataclass(frozen=True)
class ForecasterOptions:
    """Size and training of the network."""

    hidden: int = 32
    epochs: int = 30
    seed: int = 0
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    batch_size: int = 256
    dropout: float = 0.2


class Forecaster(nn.Module):
    """LSTM encoder-decoder over standardised temperatures."""

    mean: Tensor
    scale: Tensor

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.hidden, self.rate = hidden, dropout
        self.encoder = nn.LSTM(1, hidden, batch_first=True)
        self.decoder = nn.LSTMCell(1, hidden)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, 1)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def standardise(self, celsius: Tensor) -> Tensor:
        return (celsius - self.mean) / self.scale

    def encode(self, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Read standardised temperatures (B, 12); return hidden and memory (B, H)."""
        _, (hidden, memory) = self.encoder(observed[..., None])
        return hidden[0], memory[0]

    def forward(self, observed: Tensor, targets: Tensor) -> Tensor:
        """Forecast with teacher forcing, all standardised. (B, 12), (B, L) -> (B, L)"""
        hidden, memory = self.encode(observed)
        hidden = self.dropout(hidden)
        last, forecasts = observed[:, -1], []
        for column in range(targets.shape[1]):
            hidden, memory = self.decoder(last[:, None], (hidden, memory))
            forecasts.append(self.head(self.dropout(hidden)).squeeze(1))
            last = targets[:, column]
        return torch.stack(forecasts, 1)


def train_forecaster(
    examples: Examples,
    options: ForecasterOptions,
    device: torch.device,
    progress: Progress = NO_PROGRESS,
) -> Forecaster:
    """Fit by least squares, teacher forcing and a one-cycle learning rate. Mean and scale come from `examples`."""
    torch.manual_seed(options.seed)
    model = Forecaster(options.hidden, options.dropout)
    observed, targets = examples.inputs[:, :N_OBSERVED], examples.targets
    model.mean.copy_(observed.mean())
    model.scale.copy_(observed.std().clamp(min=1e-3))
    model.to(device)
    observed, targets = model.standardise(observed.to(device)), model.standardise(targets.to(device))
    order = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    steps = options.epochs * math.ceil(len(examples) / options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=steps)
    for _ in range(options.epochs):
        for rows in torch.randperm(len(examples), generator=order).split(options.batch_size):
            loss = nn.functional.mse_loss(model(observed[rows], targets[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        progress(1)
    return model.eval()


def load_or_train(
    folder: Path, examples: Examples, options: ForecasterOptions, device: torch.device, meter: Meter
) -> Forecaster:
    """Return the forecaster in `folder`, or train one and save it there."""

    def train() -> Forecaster:
        with meter.stage("train the predictor", options.epochs) as advance:
            return train_forecaster(examples, options, device, advance)

    build = partial(Forecaster, options.hidden, options.dropout)
    return network_made_once(folder, asdict(options), build, train).to(device)


@dataclass(frozen=True)
class _State(BatchRecord):
    """The decoder's state after the last token."""

    hidden: Tensor  # (B, 1 + T, H): the pass without dropout, then the Monte Carlo passes
    memory: Tensor  # (B, 1 + T, H)
    forecasts: Tensor  # (B, 1 + T) of the next token, standardised
    last: Tensor  # (B,) the last token, standardised
    surprise: Tensor  # (B,) the last token minus the proposal for its position


class WeatherPredictor(Predictor[_State]):
    """A frozen Forecaster. `facts` adds features of the window to the context, and of the prefix to the features."""

    runs_past_end = True

    def __init__(self, model: Forecaster, passes: int, facts: bool, seed: int = 0) -> None:
        self.model, self.facts = model.eval().requires_grad_(False), facts
        self.device = model.head.weight.device
        self.fingerprint = fingerprint(*model.state_dict().values(), passes, facts, seed)
        self.writer = fingerprint(*model.state_dict().values())
        generator = torch.Generator().manual_seed(seed)
        kept = 1.0 - model.rate
        masks = torch.bernoulli(torch.full((2, passes, model.hidden), kept), generator=generator) / kept
        plain = torch.ones(2, 1, model.hidden)
        # Row 0 is the pass without dropout, so that one product computes all passes.
        self.encoder_mask, self.decoder_mask = torch.cat([plain, masks], 1).to(self.device)

    def start(self, inputs: Tensor) -> tuple[_State, Tensor]:
        observed = self.model.standardise(inputs[:, :N_OBSERVED])
        hidden, memory = self.model.encode(observed)
        context = torch.cat([hidden, memory], 1)
        if self.facts:
            context = torch.cat([context, window_facts(inputs)], 1)
        all_hidden = hidden[:, None] * self.encoder_mask
        last = observed[:, -1]
        memory = memory[:, None].expand_as(all_hidden)
        return self._read(all_hidden, memory, last, torch.zeros_like(last)), context

    def _read(self, hidden: Tensor, memory: Tensor, last: Tensor, surprise: Tensor) -> _State:
        """Run the decoder over the last token, in all passes at once."""
        n, passes, size = hidden.shape
        token = last[:, None].expand(n, passes).reshape(-1, 1)
        hidden, memory = self.model.decoder(token, (hidden.reshape(-1, size), memory.reshape(-1, size)))
        hidden, memory = hidden.view(n, passes, size), memory.view(n, passes, size)
        forecasts = self.model.head(hidden * self.decoder_mask).squeeze(2)  # (B, 1 + T)
        return _State(hidden, memory, forecasts, last, surprise)

    def propose(self, state: _State) -> Proposal:
        scale = self.model.scale
        features = state.hidden[:, 0]
        if self.facts:
            surprise, step = state.surprise * scale, (state.forecasts[:, 0] - state.last) * scale
            prefix = torch.stack([surprise, step, surprise.abs(), step.abs()], 1)
            features = torch.cat([features, prefix], 1)
        celsius = state.forecasts[:, 0] * scale + self.model.mean
        return Proposal(celsius, features, state.forecasts[:, 1:].var(1) * scale**2)

    def append(self, state: _State, tokens: Tensor) -> _State:
        last = self.model.standardise(tokens)
        return self._read(state.hidden, state.memory, last, last - state.forecasts[:, 0])

    def join(self, states: Sequence[_State]) -> _State:
        return _State.join(states)


def window_facts(inputs: Tensor) -> Tensor:
    """Return features of the window: differences, size, curvature, spread, level, time of day and year. (B, 58)"""
    observed, day, year = inputs[:, :N_OBSERVED], inputs[:, N_OBSERVED], inputs[:, N_OBSERVED + 1]
    steps, turns = observed.diff(dim=1), observed.diff(n=2, dim=1)
    sizes = [steps.abs().mean(1), steps.abs().amax(1), turns.abs().mean(1)]
    spreads = [observed.std(1), steps.std(1), steps[:, -3:].std(1), observed.mean(1), observed[:, -1]]
    angles = [2 * math.pi * day, 4 * math.pi * day, 2 * math.pi * year]
    single = [size.clamp(min=1e-3).log() for size in sizes] + spreads
    single += [wave(angle) for angle in angles for wave in (torch.sin, torch.cos)]
    return torch.cat([steps, steps.abs(), turns, observed - observed[:, -1:], torch.stack(single, 1)], 1)
