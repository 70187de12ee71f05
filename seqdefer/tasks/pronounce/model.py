"""The networks that read words aloud: a GRU that looks back at the letters, its training, and its faces.

A letter is read in both directions; a phoneme is written by a GRU cell that has seen the last phoneme and what its
attention found among the letters (Bahdanau et al.). The predictor and the expert are two sizes of it.

The expert leaves tokens unread until a row asks: it reads the letters at a row's first call, and what was written since
the last one at every other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from seqdefer.errors import CheckpointError
from seqdefer.interfaces import NextTokenExpert, Predictor
from seqdefer.progress import Meter
from seqdefer.storage.files import fingerprint, read_json, read_weights, write_json, write_tensors
from seqdefer.tasks.pronounce.data import END, LETTERS, SYMBOLS
from seqdefer.types import Examples, Proposal

BEGIN = len(SYMBOLS)  # what the cell reads before the first phoneme
SORTED_AT_ONCE = 32  # batches within which words of one length go together
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class SpeakerOptions:
    """Sizes and training of one network."""

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
class Memory:
    """The letters of words as the network has read them."""

    states: Tensor  # (n, T, H)
    is_padding: Tensor  # bool (n, T)

    def select(self, rows: Tensor) -> Memory:
        return Memory(self.states[rows], self.is_padding[rows])


class Speaker(nn.Module):
    """Letters in, phonemes out, one by one."""

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

    def encode(self, letters: Tensor) -> tuple[Memory, Tensor]:
        """(B, T) -> what attention looks at, and the cell's first state (B, H). Padding changes nothing."""
        places = torch.arange(letters.shape[1], device=letters.device)
        lengths = (letters > 0).sum(1)
        mirrored = (lengths[:, None] - 1 - places).clamp(min=0)[..., None]  # (B, T, 1): each word from its end
        embedded = self.dropout(self.letters(letters))
        onwards, _ = self.forwards(embedded)
        back, _ = self.backwards(embedded.gather(1, mirrored.expand_as(embedded)))
        rows, last = torch.arange(len(letters), device=letters.device), lengths - 1
        summary = torch.cat([onwards[rows, last], back[rows, last]], 1)
        back = back.gather(1, mirrored.expand_as(back))
        states = self.dropout(torch.cat([onwards, back], 2))
        return Memory(states, places >= lengths[:, None]), torch.tanh(self.begin(summary))

    def read(self, memory: Memory, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The cell after `tokens` (B,), and what attention found (B, H) just before."""
        found = torch.einsum("bh,bth->bt", self.query(hidden), memory.states) / math.sqrt(hidden.shape[1])
        weights = found.masked_fill(memory.is_padding, -torch.inf).softmax(1)
        attended = torch.einsum("bt,bth->bh", weights, memory.states)
        embedded = self.dropout(self.symbols(tokens))
        return self.cell(torch.cat([embedded, attended], 1), hidden), attended

    def logits(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Of the next phoneme. (..., H), (..., H) -> (..., V)"""
        logits: Tensor = self.head(self.dropout(torch.tanh(self.narrow(torch.cat([hidden, attended], -1)))))
        return logits

    def forward(self, letters: Tensor, targets: Tensor) -> Tensor:
        """Logits (B, L, V) with the truth fed back."""
        memory, hidden = self.encode(letters)
        tokens = torch.full((len(letters),), BEGIN, device=letters.device)
        passed = []
        for column in targets.unbind(1):
            hidden, attended = self.read(memory, hidden, tokens)
            passed.append((hidden, attended))
            tokens = column
        states, attention = (torch.stack(parts, 1) for parts in zip(*passed, strict=True))
        return self.logits(states, attention)


# -- training ------------------------------------------------------------------------------------------------------


def train_speaker(
    letters: Tensor,
    targets: Tensor,
    options: SpeakerOptions,
    device: torch.device,
    progress: Callable[[int], None] = lambda _: None,
) -> Speaker:
    """Cross entropy with teacher forcing and a one-cycle learning rate. letters (n, T), targets (n, L)"""
    torch.manual_seed(options.seed)
    model = Speaker(options.hidden, options.embedding, options.dropout).to(device)
    letters, targets = letters.to(device), targets.to(device)
    lengths = (targets != END).sum(1) + 1  # the end is learned as well
    order = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    steps = options.epochs * math.ceil(len(letters) / options.batch_size)
    # Three steps are the fewest that its two phases can be made of.
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
    """All rows in random batches of words of about one length, so that little is computed for padding."""
    keys = (lengths * (letters.shape[1] + 1) + (letters > 0).sum(1)).cpu()
    shuffled = torch.randperm(len(letters), generator=order)
    sorted_parts = [part[keys[part].argsort(stable=True)] for part in shuffled.split(size * SORTED_AT_ONCE)]
    batches = [rows for part in sorted_parts for rows in part.split(size)]
    for place in torch.randperm(len(batches), generator=order).tolist():
        yield batches[place].to(letters.device)


def name_of(who: str, words: tuple[Tensor, Tensor], options: SpeakerOptions) -> str:
    """What made a network, as the name of its folder."""
    return f"{who}-{fingerprint(asdict(options), *words)}"


def load_or_train(
    home: Path,
    who: str,
    words: tuple[Tensor, Tensor],
    options: SpeakerOptions,
    device: torch.device,
    meter: Meter,
) -> Speaker:
    """The network kept in `home`, or a new one, kept there. `words` are letters (n, T) and targets (n, L)."""
    if (home / CONFIG).is_file():
        return load_speaker(home, options, device)
    with meter.stage(f"train the {who}", options.epochs) as advance:
        model = train_speaker(*words, options, device, advance)
    write_tensors(home / WEIGHTS, model.state_dict())
    write_json(home / CONFIG, asdict(options))
    return model


def load_speaker(home: Path, options: SpeakerOptions, device: torch.device) -> Speaker:
    """The network in `home`, which was trained by these options."""
    manifest = home / CONFIG
    if read_json(manifest) != asdict(options):
        raise CheckpointError(f"{manifest} does not belong to these options; remove {home} and run again")
    model = Speaker(options.hidden, options.embedding, options.dropout)
    read_weights(model, home / WEIGHTS)
    return model.to(device).eval()


# -- the predictor -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """The cell after the last token. `words` says whose letters each row looks at: branches of a word share them."""

    memory: Memory  # of n words
    words: Tensor  # int64 (B,)
    last: Tensor  # int64 (B,)
    hidden: Tensor  # (B, H)
    attended: Tensor  # (B, H)

    def select(self, rows: Tensor) -> _State:
        return _State(self.memory, self.words[rows], self.last[rows], self.hidden[rows], self.attended[rows])


class SpeakingPredictor(Predictor[_State]):
    """A frozen Speaker. Context: its summary of the letters. Features: the cell's state, what it attended to, its log
    probabilities of all symbols, the last symbol and the one it proposes."""

    def __init__(self, model: Speaker) -> None:
        self.model = model.eval().requires_grad_(False)
        self.device = model.head.weight.device
        self.fingerprint = fingerprint(*model.state_dict().values())

    def start(self, inputs: Tensor) -> tuple[_State, Tensor]:
        memory, hidden = self.model.encode(inputs)
        begin = torch.full((len(inputs),), BEGIN, device=inputs.device)
        words = torch.arange(len(inputs), device=inputs.device)
        return _State(memory, words, begin, *self.model.read(memory, hidden, begin)), hidden

    def propose(self, state: _State) -> Proposal:
        log_probs = self.model.logits(state.hidden, state.attended).log_softmax(1)
        tokens = log_probs.argmax(1)
        uncertainty = -log_probs.gather(1, tokens[:, None]).squeeze(1)
        entropy = -(log_probs.exp() * log_probs).sum(1)
        symbols = [self.model.symbols(state.last), self.model.symbols(tokens)]
        features = torch.cat([state.hidden, state.attended, log_probs, *symbols], 1)
        return Proposal(tokens, features, uncertainty, entropy)

    def append(self, state: _State, tokens: Tensor) -> _State:
        read = self.model.read(state.memory.select(state.words), state.hidden, tokens)
        return _State(state.memory, state.words, tokens, *read)

    def select(self, state: _State, rows: Tensor) -> _State:
        return state.select(rows)


# -- the expert ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Letters:
    """Words, and the letters of those about which the expert was asked."""

    inputs: Tensor  # int64 (n, T)
    is_read: Tensor  # bool (n,)
    memory: Memory  # of n words, blank where nobody asked
    first: Tensor  # (n, H) the cell before any token, likewise


@dataclass(frozen=True)
class _Unread:
    """What the expert has read of each row, and what waits."""

    letters: _Letters
    words: Tensor  # int64 (B,) whose letters each row looks at
    tokens: Tensor  # int64 (B, 1 + t) BEGIN and all that was written
    n_read: Tensor  # int64 (B,) how many of them the cell has read
    hidden: Tensor  # (B, H)
    attended: Tensor  # (B, H)


class SpeakingExpert(NextTokenExpert[_Unread]):
    """A frozen Speaker that names the likeliest phoneme, and reads what was written only when it is asked."""

    def __init__(self, model: Speaker) -> None:
        self.model = model.eval().requires_grad_(False)
        self.fingerprint = fingerprint(*model.state_dict().values())

    def start(self, examples: Examples) -> _Unread:
        n, device = len(examples), examples.inputs.device
        blank = torch.zeros(n, self.model.cell.hidden_size, device=device)
        states = blank[:, None].expand(-1, examples.inputs.shape[1], -1)
        is_read = torch.zeros(n, dtype=torch.bool, device=device)
        letters = _Letters(examples.inputs, is_read, Memory(states, examples.inputs == 0), blank)
        begin = torch.full((n, 1), BEGIN, device=device)
        return _Unread(letters, torch.arange(n, device=device), begin, torch.zeros(n, dtype=torch.long, device=device),
                       blank, blank)  # fmt: skip

    def next(self, state: _Unread, rows: Tensor) -> tuple[Tensor, _Unread]:
        state = replace(state, letters=self._read_letters(state.letters, state.words[rows]))
        state = self._catch_up(state, rows)
        return self.model.logits(state.hidden[rows], state.attended[rows]).argmax(1), state

    def append(self, state: _Unread, tokens: Tensor) -> _Unread:
        return self.extend(state, tokens[:, None])

    def extend(self, state: _Unread, tokens: Tensor) -> _Unread:
        return replace(state, tokens=torch.cat([state.tokens, tokens], 1))

    def select(self, state: _Unread, rows: Tensor) -> _Unread:
        return _Unread(state.letters, state.words[rows], state.tokens[rows], state.n_read[rows], state.hidden[rows],
                       state.attended[rows])  # fmt: skip

    def _read_letters(self, letters: _Letters, asked: Tensor) -> _Letters:
        new = torch.unique(asked[~letters.is_read[asked]])
        if not len(new):
            return letters
        memory, first = self.model.encode(letters.inputs[new])
        return replace(
            letters,
            is_read=letters.is_read.index_fill(0, new, True),
            memory=replace(letters.memory, states=letters.memory.states.index_copy(0, new, memory.states)),
            first=letters.first.index_copy(0, new, first),
        )

    def _catch_up(self, state: _Unread, rows: Tensor) -> _Unread:
        """Reads the tokens of `rows` that were left unread."""
        words, n_read = state.words[rows], state.n_read[rows]
        hidden = torch.where(n_read[:, None] == 0, state.letters.first[words], state.hidden[rows])
        attended, written = state.attended[rows], state.tokens.shape[1]
        for place in range(int(n_read.min()), written):
            behind = (n_read <= place).nonzero().squeeze(1)
            memory = state.letters.memory.select(words[behind])
            read = self.model.read(memory, hidden[behind], state.tokens[rows[behind], place])
            hidden, attended = (
                old.index_copy(0, behind, new) for old, new in zip((hidden, attended), read, strict=True)
            )
        everyone = {"hidden": hidden, "attended": attended, "n_read": torch.full_like(n_read, written)}
        kept = {name: getattr(state, name).index_copy(0, rows, values) for name, values in everyone.items()}
        return replace(state, **kept)
