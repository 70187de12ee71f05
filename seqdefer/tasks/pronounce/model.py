"""The networks of the pronunciation task: a GRU with attention over letters, its training, and the pair built on it.

Letters are read in both directions; a GRU cell writes each phoneme from the last one and from what it attends to among
the letters (Bahdanau et al.). The predictor and the expert are two sizes of this network.

The rows of the expert read lazily: the letters of a word at its first call, and the tokens written since the last call
at others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from seqdefer.interfaces import NextTokenExpert, Predictor
from seqdefer.progress import Meter
from seqdefer.rows import Chunk, ExpertRows
from seqdefer.storage.files import fingerprint
from seqdefer.storage.made_once import load_network, network_made_once
from seqdefer.tasks.pronounce.data import END, LETTERS, SYMBOLS
from seqdefer.types import BatchRecord, Examples, Proposal

BEGIN = len(SYMBOLS)  # the token before the first phoneme
SORTED_BATCHES = 32  # batches among which words are sorted by length


@dataclass(frozen=True)
class PronouncerOptions:
    """Size and training of one network."""

    hidden: int
    embedding: int
    epochs: int
    seed: int = 0
    learning_rate: float = 4e-3
    batch_size: int = 256
    dropout: float = 0.0
    weight_decay: float = 0.01
    clip_norm: float = 1.0


@dataclass(frozen=True)
class EncodedLetters(BatchRecord):
    """The encoder's states of the letters of n words."""

    states: Tensor  # (n, T, H)
    is_padding: Tensor  # bool (n, T)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the words of all parts, padded to one length."""
        width, pad = max(part.states.shape[1] for part in parts), nn.functional.pad
        missing = [width - part.states.shape[1] for part in parts]
        states = [pad(part.states, (0, 0, 0, n)) for part, n in zip(parts, missing, strict=True)]
        padding = [pad(part.is_padding, (0, n), value=True) for part, n in zip(parts, missing, strict=True)]
        return cls(torch.cat(states), torch.cat(padding))


class Pronouncer(nn.Module):
    """GRU with attention: letters in, phonemes out, one by one."""

    def __init__(self, hidden: int, embedding: int, dropout: float = 0.0) -> None:
        super().__init__()
        half = hidden // 2
        self.letters = nn.Embedding(len(LETTERS), embedding)
        self.forwards = nn.GRU(embedding, half, batch_first=True)
        self.backwards = nn.GRU(embedding, hidden - half, batch_first=True)
        self.begin = nn.Linear(hidden, hidden)
        self.symbols = nn.Embedding(len(SYMBOLS) + 1, embedding)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.cell = nn.GRUCell(embedding + hidden, hidden)
        self.narrow = nn.Linear(2 * hidden, embedding)
        self.head = nn.Linear(embedding, len(SYMBOLS))
        self.dropout = nn.Dropout(dropout)

    def encode(self, letters: Tensor) -> tuple[EncodedLetters, Tensor]:
        """Read letters (B, T); return their states and the cell's first state (B, H). Padding has no effect."""
        places = torch.arange(letters.shape[1], device=letters.device)
        lengths = (letters > 0).sum(1)
        mirrored = (lengths[:, None] - 1 - places).clamp(min=0)[..., None]  # (B, T, 1): each word reversed
        embedded = self.dropout(self.letters(letters))
        onwards, _ = self.forwards(embedded)
        back, _ = self.backwards(embedded.gather(1, mirrored.expand_as(embedded)))
        rows, last = torch.arange(len(letters), device=letters.device), lengths - 1
        summary = torch.cat([onwards[rows, last], back[rows, last]], 1)
        back = back.gather(1, mirrored.expand_as(back))
        states = self.dropout(torch.cat([onwards, back], 2))
        return EncodedLetters(states, places >= lengths[:, None]), torch.tanh(self.begin(summary))

    def read(self, encoded: EncodedLetters, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cell's state after `tokens` (B,), and what it attended to (B, H) before."""
        found = torch.einsum("bh,bth->bt", self.query(hidden), encoded.states) / math.sqrt(hidden.shape[1])
        weights = found.masked_fill(encoded.is_padding, -torch.inf).softmax(1)
        attended = torch.einsum("bt,bth->bh", weights, encoded.states)
        embedded = self.dropout(self.symbols(tokens))
        return self.cell(torch.cat([embedded, attended], 1), hidden), attended

    def logits(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return logits of the next phoneme. (..., H), (..., H) -> (..., V)"""
        logits: Tensor = self.head(self.dropout(torch.tanh(self.narrow(torch.cat([hidden, attended], -1)))))
        return logits

    def forward(self, letters: Tensor, targets: Tensor) -> Tensor:
        """Return logits (B, L, V) with teacher forcing."""
        encoded, hidden = self.encode(letters)
        tokens = torch.full((len(letters),), BEGIN, device=letters.device)
        passed = []
        for column in targets.unbind(1):
            hidden, attended = self.read(encoded, hidden, tokens)
            passed.append((hidden, attended))
            tokens = column
        states, attention = (torch.stack(parts, 1) for parts in zip(*passed, strict=True))
        return self.logits(states, attention)


# -- training ------------------------------------------------------------------------------------------------------


def train_pronouncer(
    letters: Tensor,
    targets: Tensor,
    options: PronouncerOptions,
    device: torch.device,
    progress: Callable[[int], None] = lambda _: None,
) -> Pronouncer:
    """Fit by cross entropy, teacher forcing and a one-cycle learning rate. letters (n, T), targets (n, L)"""
    torch.manual_seed(options.seed)
    model = Pronouncer(options.hidden, options.embedding, options.dropout).to(device)
    letters, targets = letters.to(device), targets.to(device)
    lengths = (targets != END).sum(1) + 1  # the end token is learned too
    order = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    steps = options.epochs * math.ceil(len(letters) / options.batch_size)
    # The two phases of the schedule need at least three steps.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, total_steps=max(steps, 3), pct_start=0.2
    )
    for _ in range(options.epochs):
        for rows in _batches(letters, lengths, options.batch_size, order):
            width, length = int((letters[rows] > 0).sum(1).max()), int(lengths[rows].max())
            truth = targets[rows, :length]
            is_there = torch.arange(length, device=device) < lengths[rows, None]
            logits = model(letters[rows, :width], truth)
            loss = nn.functional.cross_entropy(logits[is_there], truth[is_there])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
            optimizer.step()
            schedule.step()
        progress(1)
    return model.eval()


def _batches(letters: Tensor, lengths: Tensor, size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Yield all rows in random batches of words of similar length, to save work on padding."""
    keys = (lengths * (letters.shape[1] + 1) + (letters > 0).sum(1)).cpu()
    shuffled = torch.randperm(len(letters), generator=order)
    sorted_parts = [part[keys[part].argsort(stable=True)] for part in shuffled.split(size * SORTED_BATCHES)]
    batches = [rows for part in sorted_parts for rows in part.split(size)]
    for place in torch.randperm(len(batches), generator=order).tolist():
        yield batches[place].to(letters.device)


def name_of(role: str, words: tuple[Tensor, Tensor], options: PronouncerOptions) -> str:
    """Return the name of a network's folder: its role and a fingerprint of what made it."""
    return f"{role}-{fingerprint(asdict(options), *words)}"


def load_or_train(
    folder: Path,
    role: str,
    words: tuple[Tensor, Tensor],
    options: PronouncerOptions,
    device: torch.device,
    meter: Meter,
) -> Pronouncer:
    """Return the network in `folder`, or train one and save it there. `words`: letters (n, T) and targets (n, L)."""

    def train() -> Pronouncer:
        with meter.stage(f"train the {role}", options.epochs) as advance:
            return train_pronouncer(*words, options, device, advance)

    return network_made_once(folder, asdict(options), lambda: _build(options), train).to(device)


def load_pronouncer(folder: Path, options: PronouncerOptions, device: torch.device) -> Pronouncer:
    """Return the network in `folder`, which was trained with these options."""
    return load_network(_build(options), folder, asdict(options)).to(device)


def _build(options: PronouncerOptions) -> Pronouncer:
    return Pronouncer(options.hidden, options.embedding, options.dropout)


# -- the predictor -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """The cell's state after the last token. `words` maps rows to words: branches of a word share its letters."""

    encoded: EncodedLetters  # of n words
    words: Tensor  # int64 (B,)
    last: Tensor  # int64 (B,)
    hidden: Tensor  # (B, H)
    attended: Tensor  # (B, H)

    def select(self, rows: Tensor) -> _State:
        return _State(self.encoded, self.words[rows], self.last[rows], self.hidden[rows], self.attended[rows])

    def append(self, model: Pronouncer, tokens: Tensor) -> _State:
        read = model.read(self.encoded.select(self.words), self.hidden, tokens)
        return _State(self.encoded, self.words, tokens, *read)


def _begin(model: Pronouncer, letters: Tensor) -> tuple[_State, Tensor]:
    """Return the state before the first phoneme, and the summary of the letters (B, H)."""
    encoded, hidden = model.encode(letters)
    begin, words = torch.full((len(letters),), BEGIN, device=letters.device), torch.arange(len(letters))
    return _State(encoded, words.to(letters.device), begin, *model.read(encoded, hidden, begin)), hidden


class PronouncePredictor(Predictor[_State]):
    """A frozen Pronouncer. The context is its summary of the letters. Features are the cell's state, what it attended
    to, log probabilities of all symbols, and embeddings of the last and the proposed symbol."""

    runs_past_end = True
    vocabulary_size = len(SYMBOLS)

    def __init__(self, model: Pronouncer) -> None:
        self.model = model.eval().requires_grad_(False)
        self.device = model.head.weight.device
        self.fingerprint = self.writer = fingerprint(*model.state_dict().values())

    def start(self, inputs: Tensor) -> tuple[_State, Tensor]:
        return _begin(self.model, inputs)

    def propose(self, state: _State) -> Proposal:
        log_probs = self.log_probs(state)
        tokens = log_probs.argmax(1)
        uncertainty = -log_probs.gather(1, tokens[:, None]).squeeze(1)
        entropy = -(log_probs.exp() * log_probs).sum(1)
        symbols = [self.model.symbols(state.last), self.model.symbols(tokens)]
        features = torch.cat([state.hidden, state.attended, log_probs, *symbols], 1)
        return Proposal(tokens, features, uncertainty, entropy)

    def with_log_probs(self) -> PronouncePredictor:
        return self

    def log_probs(self, state: _State) -> Tensor:
        return self.model.logits(state.hidden, state.attended).log_softmax(1)

    def append(self, state: _State, tokens: Tensor) -> _State:
        return state.append(self.model, tokens)

    def join(self, states: Sequence[_State]) -> _State:
        encoded = EncodedLetters.join([state.encoded.select(state.words) for state in states])
        last, hidden, attended = (
            torch.cat([getattr(state, name) for state in states]) for name in ("last", "hidden", "attended")
        )
        return _State(encoded, torch.arange(len(last), device=last.device), last, hidden, attended)


# -- the expert ----------------------------------------------------------------------------------------------------


class PronounceExpert(NextTokenExpert[_State]):
    """A frozen Pronouncer that names the likeliest phoneme. Its rows read tokens only when asked."""

    def __init__(self, model: Pronouncer) -> None:
        self.model = model.eval().requires_grad_(False)
        self.fingerprint = fingerprint(*model.state_dict().values())

    def start(self, examples: Examples) -> _State:
        return _begin(self.model, examples.inputs)[0]

    def next(self, state: _State, rows: Tensor) -> tuple[Tensor, _State]:
        return self.model.logits(state.hidden[rows], state.attended[rows]).argmax(1), state

    def with_log_probs(self) -> PronounceExpert:
        return self

    def log_probs(self, state: _State, rows: Tensor) -> Tensor:
        return self.model.logits(state.hidden[rows], state.attended[rows]).log_softmax(1)

    def append(self, state: _State, tokens: Tensor) -> _State:
        return state.append(self.model, tokens)

    def rows(self) -> PronounceExpertRows:
        return PronounceExpertRows(self.model)


@dataclass
class _ExpertRow:
    """A word, and the cell after each token of the last chunk."""

    letters: Tensor  # int64 (T,)
    encoded: EncodedLetters | None = None  # of this word alone, once it asks
    passed: tuple[Tensor, Tensor] | None = None  # (1 + t, H) each: state and attention, those before the chunk first


class PronounceExpertRows(ExpertRows):
    """Rows of the expert, each at its own position. Letters are read when a row first asks."""

    def __init__(self, model: Pronouncer) -> None:
        self.model = model
        self.rows: list[_ExpertRow] = []

    def admit(self, examples: Examples) -> None:
        self.rows += [_ExpertRow(line[line != 0]) for line in examples.inputs]

    def read(self, chunks: Sequence[Chunk]) -> list[list[Any]]:
        rows = [self.rows[chunk.row] for chunk in chunks]
        begin = [row.passed is None for row in rows]  # the token before the first one is read too
        self._read_letters([row for row in rows if row.encoded is None])
        lines = [[BEGIN] * is_new + list(chunk.tokens) for chunk, is_new in zip(chunks, begin, strict=True)]
        encoded = EncodedLetters.join([row.encoded for row in rows if row.encoded is not None])
        hidden, attended = (torch.stack([row.passed[at][-1] for row in rows if row.passed]) for at in (0, 1))
        passed = [(hidden, attended)]
        for column in range(max(map(len, lines))):
            here = torch.tensor([place for place, line in enumerate(lines) if len(line) > column], device=hidden.device)
            tokens = torch.tensor([line[column] for line in lines if len(line) > column], device=hidden.device)
            read = self.model.read(encoded.select(here), hidden[here], tokens)
            hidden, attended = (old.index_copy(0, here, new) for old, new in zip((hidden, attended), read, strict=True))
            passed.append((hidden, attended))
        states, attention = (torch.stack(parts, 1) for parts in zip(*passed, strict=True))  # (R, 1 + t, H)
        self.tokens_read += sum(map(len, lines))
        for place, (row, line) in enumerate(zip(rows, lines, strict=True)):
            row.passed = states[place, : len(line) + 1], attention[place, : len(line) + 1]
        where = [
            (place, is_new + at)
            for place, (chunk, is_new) in enumerate(zip(chunks, begin, strict=True))
            for at in chunk.asked
        ]
        index, columns = torch.tensor(where, device=hidden.device).unbind(1)
        named = iter(self.model.logits(states[index, columns], attention[index, columns]).argmax(1).tolist())
        return [[next(named) for _ in chunk.asked] for chunk in chunks]

    def _read_letters(self, rows: Sequence[_ExpertRow]) -> None:
        if not rows:
            return
        letters = nn.utils.rnn.pad_sequence([row.letters for row in rows], batch_first=True)
        encoded, first = self.model.encode(letters)
        for place, row in enumerate(rows):
            only = torch.tensor([place], device=letters.device)
            row.encoded = encoded.select(only)
            row.passed = first[only], torch.zeros_like(first[only])

    def go_back(self, steps: Sequence[int]) -> None:
        for row, n in zip(self.rows, steps, strict=True):
            if n and row.passed is not None:
                states, attention = row.passed
                row.passed = states[:-n], attention[:-n]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
