"""The roles: Predictor, Expert, Task, Rejector (by token or by draft), Policy. What each must do, with shapes.

State is passed in and out, never kept: a batch can branch, be cut and be joined again. B rows stand in a batch;
dtypes and the padding rule are in `seqdefer.types`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor

from seqdefer.errors import ContractError, InputError
from seqdefer.progress import Meter
from seqdefer.recipes import RECIPES, Recipe
from seqdefer.renames import names_moved
from seqdefer.rows import ExpertRows, PredictorRows
from seqdefer.types import Draft, Examples, Proposal, Rollout, Sequences, SequenceSpec

State = TypeVar("State")
SplitName = Literal["train", "validation", "test"]
EXPECTED_BRANCHES = 4  # rows that an example is expected to grow into when it branches
CHEAP_TREE_NODES = 2**12  # nodes of a decision tree that small models make in no time: all those of 12 tokens
if not TYPE_CHECKING:
    __getattr__ = names_moved(__name__)


class Stateful(ABC, Generic[State]):
    """Base of roles whose state has a row for each row of a batch."""

    def select(self, state: State, rows: Tensor) -> State:
        """Return the state of `rows` (int64 indices, repeats allowed), in that order. Override it unless the state is a
        tensor, or a record with such a method (`seqdefer.types.BatchRecord`)."""
        known: Any = state
        if isinstance(known, Tensor):
            return cast(State, known[rows])
        if not hasattr(known, "select"):
            raise ContractError(
                f"the state of {type(self).__name__}, a {type(known).__name__}, has no select; make it a tensor or a "
                f"seqdefer.types.BatchRecord, or write {type(self).__name__}.select(state, rows)"
            )
        return cast(State, known.select(rows))

    def join(self, states: Sequence[State]) -> State:
        """Return one state with the rows of all, in order; they may stand at different positions. Without it, such rows
        run one batch after the other."""
        raise NotImplementedError


class StatefulModel(Stateful[State]):
    """Base of predictors and experts whose state has read the tokens so far."""

    @abstractmethod
    def append(self, state: State, tokens: Tensor) -> State:
        """Return the state after `tokens` (B,), which either author may have written."""

    def extend(self, state: State, tokens: Tensor) -> State:
        """Return the state after several tokens (B, T), equal to appending them one by one. Override it where a model
        reads many tokens in one pass."""
        for column in tokens.unbind(1):
            state = self.append(state, column)
        return state


class Predictor(StatefulModel[State]):
    """Frozen autoregressive model that proposes every token.

    `fingerprint` names the weights and what is shown to rejectors: a rejector fitted for one predictor refuses another.
    `writer` names only what the tokens depend on; "" where it is not known. `batch_size` examples run at once when
    drafts and trees are made. Decision trees of at most `max_tree_nodes` nodes per example are enumerated: lower it for
    a model whose steps are expensive. `vocabulary_size`: tokens are numbers below it, from 0 on; None where there is no
    vocabulary. A server takes no others from an expert. `runs_past_end`: a row may be asked for more tokens than its
    sequence has, which are dropped; set it where nothing breaks, so that rows at different positions run further ahead
    together.
    """

    fingerprint: str
    runs_past_end: bool = False
    vocabulary_size: int | None = None
    writer: str = ""
    device: torch.device = torch.device("cpu")
    batch_size: int = 4096
    max_tree_nodes: int = CHEAP_TREE_NODES

    @property
    def rows_at_once(self) -> int:
        """Rows of trees that run at once: more than `batch_size` where rows of one example share most of its memory."""
        return self.batch_size

    @abstractmethod
    def start(self, inputs: Tensor) -> tuple[State, Tensor]:
        """Read the inputs (B, ...). Return the state before the first token, and the context (B, C): what a rejector
        may know before any token is written (encoder states, plain facts of the input)."""

    @abstractmethod
    def propose(self, state: State) -> Proposal:
        """Propose the next token of every row, from the state alone. Asking twice gives the same answer."""

    def rows(self) -> PredictorRows | None:
        """Return rows that stand at their own positions, where the model has a faster way than states; else None."""
        return None

    def with_log_probs(self) -> Predictor[State] | None:
        """Return this predictor with `log_probs` at work, which may take memory; None where there is no vocabulary or
        the probabilities are not known. Its tokens are the same."""
        return None

    def log_probs(self, state: State) -> Tensor:
        """Return the log probabilities of all tokens of the vocabulary at the next position, (B, V). -inf is allowed.
        Call it on what `with_log_probs` returned, and with its states."""
        raise NotImplementedError(f"{type(self).__name__} gives no log probabilities")


class Expert(ABC):
    """Stronger and more expensive writer. The least it can do is to complete a prefix (a solver, a person).

    `deterministic`: the same prefix always gets the same completion, and a completion that begins with some token
    is also the completion of the prefix with that token added. `reads_prefix = False`: what it writes at a position
    does not depend on what was written before (someone who reads a thermometer). Labelling then skips the calls whose
    answers follow from earlier ones. `fingerprint` names everything its answers depend on besides the examples; labels
    of an expert without one are not stored. `waits`: it runs elsewhere, and this machine is idle meanwhile. `unproven`
    counts its answers so far that a time limit cut short: better ones may exist, and manifests and reports say so.
    `max_tree_nodes`: as for a predictor.
    """

    deterministic: bool = True
    reads_prefix: bool = True
    waits: bool = False
    fingerprint: str = ""
    batch_size: int = 4096  # examples to label at once; labels are stored batch by batch
    unproven: int = 0
    max_tree_nodes: int = CHEAP_TREE_NODES

    @abstractmethod
    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        """Return the whole sequences that begin with `prefixes`. A prefix that has ended comes back unchanged."""

    def submit(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Future[Sequences] | None:
        """Start `complete` without waiting for its result, where the expert is called over a network; None: it cannot,
        and a server then calls `complete` of an expert that `waits` in one of a few threads. Cancelling the result
        cancels the calls."""
        return None


class DraftExpert(Expert):
    """Expert that completes many prefixes of one draft faster than one after the other: a solver that starts from
    the solution of the last prefix, and for which a completion of a longer prefix completes the shorter ones too."""

    @abstractmethod
    def hand_offs(
        self, examples: Examples, drafts: Sequences, kept: Tensor, spec: SequenceSpec
    ) -> tuple[Sequences, int]:
        """Complete the first `kept` (int64 (J,), rising) tokens of every draft: n x J rows, those of a draft together,
        and the number of expert runs. As good as `complete` for each."""


class NextTokenExpert(Expert, StatefulModel[State]):
    """Expert that can also name the next token; `complete` then comes for free.

    `append` receives every token, `next` only the rows that ask: an expert with a cache can leave tokens unread until
    a row asks, and then read them in one pass. `pays_by_call`: a call costs about the same however many tokens it reads
    (an endpoint), and its states are cheap; decision trees then ask as late as they can.
    """

    pays_by_call: bool = False

    @property
    def n_calls(self) -> int:
        """Count the calls so far, where the expert pays by the call."""
        return 0

    @property
    def examples_at_once(self) -> int:
        """Examples to run together where each branches into several rows (hand-offs, trees)."""
        return max(1, self.batch_size // EXPECTED_BRANCHES)

    @abstractmethod
    def start(self, examples: Examples) -> State:
        """Return the state before the first token. Cheap: do the work when a row first asks."""

    @abstractmethod
    def next(self, state: State, rows: Tensor) -> tuple[Tensor, State]:
        """Name the next token of `rows` (int64 indices (R,)), as (R,); return it with the state and its caches."""

    def rows(self) -> ExpertRows | None:
        """Return rows that stand at their own positions, where the expert has a faster way than states; else None."""
        return None

    def read(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Let all rows read a chunk (B, T), T possibly 0. Return the tokens that the expert names before the first and
        after each of its tokens, (B, T + 1), and the state after all of them. Override it where many tokens are read in
        one pass or call."""
        every, named = torch.arange(len(tokens), device=tokens.device), []
        for column in tokens.unbind(1):
            answer, state = self.next(state, every)
            named.append(answer)
            state = self.append(state, column)
        answer, state = self.next(state, every)
        return torch.stack([*named, answer], 1), state

    def write_ahead(self, state: State, length: int) -> State:
        """Return the same state for a caller that will mostly follow the expert: a call that names a token may write on
        up to `length` tokens, to answer later questions. Override it where that saves calls."""
        return state

    def with_log_probs(self) -> NextTokenExpert[State] | None:
        """Return this expert with `log_probs` at work, which may take memory; None where it cannot give them. Its
        tokens are the same."""
        return None

    def log_probs(self, state: State, rows: Tensor) -> Tensor:
        """Return the log probabilities of all tokens of the vocabulary at the next position of `rows`, (R, V), from the
        state that `next` returned for these rows. Call it on what `with_log_probs` returned, and with its states."""
        raise NotImplementedError(f"{type(self).__name__} gives no log probabilities")

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        state = self.start(examples)
        tokens = prefixes.tokens.clone()  # (B, L)
        ended = spec.is_over(prefixes)
        lengths = prefixes.lengths.clone()
        for position in range(spec.length):
            writing = ~ended & (position >= prefixes.lengths)
            rows = writing.nonzero().squeeze(1)
            if len(rows):
                written, state = self.next(state, rows)
                tokens[rows, position] = written.to(tokens.dtype)
                lengths[rows] = position + 1
                ended[rows] = spec.is_end(written) | (position + 1 >= spec.length)
            if bool(ended.all()):
                break
            state = self.append(state, tokens[:, position])
        return Sequences(tokens, lengths)


class Task(ABC):
    """Data, the pair and the losses of one problem. It knows nothing of deferral."""

    name: str
    spec: SequenceSpec
    loss_unit: str  # of sequence_loss, as tables and axes print it
    max_loss: float | None = None  # that sequence_loss can have; None where it has no limit
    token_rule: str = ""  # tells apart the ways in which a task may count token losses
    has_published_figures: bool = False  # whether the paper prints figures for this task with these options
    more_test_data: str = "give more test data"  # what a user can do where the test split is too small
    predictor: Predictor[Any]
    expert: Expert
    codec: Codec | None = None  # where users may bring inputs of their own
    options: Any = None  # those of `TaskEntry.prepare`, with what it left to the data or to the Hub filled in

    @abstractmethod
    def split(self, name: SplitName) -> Examples:
        """Return examples that the predictor was not trained on: to fit rejectors, to choose with, to report on."""

    @abstractmethod
    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        """Return what the report measures: the loss of whole sequences, >= 0. (B,)"""

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        """Return l: the loss of `tokens` (B,) after `prefixes`, at positions `prefixes.lengths`, >= 0. (B,)"""
        raise NotImplementedError(f"task {self.name!r} defines no token loss, so it has no token-level deferral")

    def token_cost(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        """Return c: the cost of the expert writing `tokens`; its own loss unless a task overrides it. (B,)

        Where l and c are both 0, a surrogate has nothing to learn; `fit_token` then adds a small price."""
        return self.token_loss(examples, prefixes, tokens)

    def loss_key(self, examples: Examples) -> str:
        """Return what the losses of these examples depend on that neither the examples nor `loss_unit` and
        `token_rule` show. Stored labels are found by it."""
        return ""

    def describe(self) -> dict[str, str]:
        """Return fingerprints of data and models, for the provenance."""
        return {}

    def draw(self, examples: Examples, rollouts: Mapping[float, Rollout]) -> str:
        """Draw a few examples at rising budgets, the authors of their tokens told apart: HTML for the report, made
        with `seqdefer.report.markup`, which escapes. Empty by default."""
        return ""


class Policy(Stateful[State]):
    """Turns scores into decisions, one position at a time. The state goes in and out, as in the models.

    `final`: a row that is deferred once stays with the expert to its end (whole and one-time deferral); the engine then
    asks the expert to complete it in one call.
    """

    final: ClassVar[bool] = False

    @abstractmethod
    def start(self, context: Tensor) -> State:
        """Return the state before the first token, from the context (B, C)."""

    @abstractmethod
    def decide(self, state: State, position: int | Tensor, proposal: Proposal) -> tuple[Tensor, Tensor, State]:
        """Return scores (B,), whether to defer (bool (B,)), and the state for the next position. `position` is one for
        all rows, or int64 (B,)."""

    def is_fixed(self, state: State) -> bool:
        """Tell whether `decide` returns this state as it is: several positions can then be decided at once."""
        return False


class TokenRejector(Stateful[State]):
    """Scores every position as it comes: the higher, the better it is to defer this token. It never decides.

    It may look at the context, the position and the predictor's proposals along the prefix, and at nothing else: its
    score at a prefix is a function of that prefix, so equal prefixes get equal scores. `reads_first`: it also needs
    `Proposal.pair`, for which the expert reads the position before anything is decided.
    """

    reads_first: bool = False
    has_memory: bool = True  # False: `score` returns the state that it was given

    @abstractmethod
    def start(self, context: Tensor) -> State:
        """Return the state before the first token, from the context (B, C)."""

    @abstractmethod
    def score(self, state: State, position: int | Tensor, proposal: Proposal) -> tuple[Tensor, State]:
        """Return scores (B,) of deferring at `position` (one for all rows, or int64 (B,)), and the next state."""


class DraftRejector(ABC):
    """Scores a whole draft of the predictor at once.

    A one-time rejector scores the hand-offs in `hand_offs` (tokens kept, rising, no deferral last), and `rule` names
    how the scores become a choice (`seqdefer.budgets.hand_off_rules`). Without `hand_offs` it defers whole sequences.
    """

    hand_offs: tuple[int, ...] = ()
    rule: str = "largest"

    @abstractmethod
    def score(self, draft: Draft) -> Tensor:
        """Return (n,), the higher, the better it is to defer the sequence (whole); or (n, J), a score of each allowed
        hand-off (one-time)."""


class Codec(ABC):
    """Translates users' inputs into what the models read, and sequences into what users want."""

    field: str = "input"  # of a JSON line: the key of an input, unless users name another
    kind: str = "tokens"  # what an output is to those who show it: "text", "tour", or just tokens
    size: int | None = None  # items that an input must have
    hint: str = ""  # an example of an input, shown where one is asked for
    about: str = ""  # what is read and what is written, as a clause: "reads a word and writes its phonemes"
    examples: tuple[Any, ...] = ()  # inputs for people to try
    reads_bytes: bool = False  # whether an input may also be the content of a file, as bytes
    knows_roles: bool = False  # whether `chat` tells the model which role wrote which message
    columns_per_token: int = 1  # columns of an encoded input that count as one token of it
    sample_rate: int | None = None  # columns per second, if inputs are sound
    max_seconds: float | None = None  # of sound, at most
    language: str | None = None  # of the output, if it is always the same: "en"

    @abstractmethod
    def encode(self, inputs: Sequence[Any]) -> Examples:
        """Encode inputs. Their targets are unknown: those of the result carry no meaning. Raises InputError for an
        input that cannot be encoded."""

    @abstractmethod
    def decode(self, tokens: Sequence[Any]) -> Any:
        """Return what a sequence stands for: a text, a tour."""

    def text(self, tokens: Sequence[Any]) -> str:
        """Return a sequence, whole or so far, as readable text. More tokens add to it; at most its last letter
        changes."""
        return " ".join(str(token) for token in tokens)

    def local_input(self, text: str, folder: Path) -> Any:
        """Return the input that an argument of a command, or a line of a file in `folder`, stands for. Override it
        where inputs are files: only the user of this machine may name one, never a request."""
        return text

    def words(self, examples: Examples) -> list[str] | None:
        """Return encoded inputs as words, single spaces between them, to tell whether two are the same but for white
        space. Override it where inputs are texts."""
        return None

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of one input, for the server's OpenAPI description; {} accepts anything."""
        return {}

    def ids_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of an input given as token ids; None where ids are not read."""
        return None

    def from_ids(self, ids: Sequence[int]) -> Any:
        """Return the input that token ids stand for. Override it and `ids_schema` where models read token ids."""
        raise InputError(f"this model does not read token ids; give {self.hint or 'an input'!r}")

    def facts(self, one: Any, output: Any) -> dict[str, float]:
        """Return numbers about an output in the units of its input: a tour's length."""
        return {}

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Any:
        """Make one input of chat messages (`role` and `content` each). Without roles: all contents, blank lines
        between."""
        return "\n\n".join(message["content"] for message in messages)

    def added(self, tokens: Sequence[Any], shown: str, *, is_last: bool) -> str:
        """Return what the last of `tokens` adds to the text shown before it, to stream. A letter may take several
        tokens: until it is whole it is held back, unless nothing follows."""
        text = self.text(tokens)
        return text[len(shown) :] if is_last or not text.endswith("\ufffd") else ""

    def pieces(self, tokens: Sequence[Any]) -> list[str]:
        """Return what each token adds; joined, the pieces are the text. Half a letter waits for its other half."""
        whole, start, pieces = self.text(tokens), 0, []
        for n in range(1, len(tokens) + 1):
            end = max(start, len(commonprefix([self.text(tokens[:n]), whole])))  # noqa: RUF071, letters are meant
            pieces.append(whole[start:end])
            start = end
        return pieces


@dataclass(frozen=True)
class Served:
    """A pair at work on users' own inputs. `authors` are the names of token authors: 0 the predictor, 1 the expert."""

    predictor: Predictor[Any]
    expert: Expert
    spec: SequenceSpec
    codec: Codec
    authors: tuple[str, ...] = ("predictor", "expert")


@dataclass(frozen=True)
class TaskEntry:
    """How a task introduces itself (entry point group `seqdefer.tasks`).

    `presets` maps a preset's name to an instance of the task's own frozen dataclass of options; `quick` and `paper` are
    expected. The fields become command-line options (`metadata={"help": ...}`). Options that keep data to report on
    have a method `without_test()` for `seqdefer fit`, which reports on nothing: the same options, all data for
    learning. It is not called where a fit promises something: a guarantee rests on the test split.
    `prepare(options, folder, device, meter)` returns the task ready to use; what takes long (training a predictor)
    shows a stage on the meter, is stored in `folder` and found again there.
    `recipes` say how its rejectors are made, by name: `ours` and `published`. `quick_instances` test instances per seed
    are enough for the preset `quick`. `training` is set where the predictor can be trained by a command of its own.
    `serve(options, folder, device, meter)` returns the pair without any data, for users' own inputs; `folder` is the
    one that `prepare` had for `seqdefer fit`, wherever it is now. None where there is nothing to serve.
    `bind(objects)` takes objects in the place of options (loaded models, data in memory, a metric), by the names of the
    options. It returns the entry that uses them, and the options that stand for them in files.
    The class of options may also have `usual_options`, names of those that `--help` lists (`--help-all` lists all),
    `test_options`, those that `without_test()` makes useless, and `choices`, the values of an option by its name.
    `file` is set where the entry was read from a file: `seqdefer run ./my_task.py`.
    """

    name: str
    summary: str
    presets: Mapping[str, Any]
    prepare: Callable[[Any, Path, torch.device, Meter], Task]
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: RECIPES)
    quick_instances: int = 100
    training: PredictorTraining | None = None
    serve: Callable[[Any, Path, torch.device, Meter], Served] | None = None
    bind: Callable[[Mapping[str, Any]], tuple[TaskEntry, Mapping[str, Any]]] | None = None
    file: str = ""
    hyperparameters: InitVar[Any] = None  # of the first version

    def __post_init__(self, hyperparameters: Any) -> None:
        if hyperparameters is not None:
            raise ContractError(
                f"TaskEntry(hyperparameters={hyperparameters!r}) of task {self.name!r} is now recipes={{'ours': "
                "seqdefer.recipes.Recipe(...)}; leave it out for the defaults"
            )


@dataclass(frozen=True)
class PredictorTraining:
    """`seqdefer train-predictor TASK`: the fields of `options`, a frozen dataclass, become options of the command.

    `train(options, folder, device, meter)` leaves the predictor in `folder`, resumes from what is there, and returns
    what the user should know about it, as text by heading."""

    options: Any
    train: Callable[[Any, Path, torch.device, Meter], Mapping[str, str]]
