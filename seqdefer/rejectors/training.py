"""Fitting rejectors: one straight loop with early stopping, and what each granularity minimises in it.

The loop always ends with the weights of its best validation epoch. Validation decides when to stop and nothing else;
test data never comes here. `PRESETS` is the paper's hyperparameter table, by its column names; what follows it is ours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seqdefer.errors import OptionError, unknown
from seqdefer.labels.trees import END, DecisionTrees
from seqdefer.rejectors.losses import (
    Phi,
    Psi,
    get_phi,
    get_psi,
    is_ended,
    one_time_surrogate,
    query_costs,
    token_surrogate,
)
from seqdefer.rejectors.networks import (
    DRAFT_NETWORKS,
    NETWORKS,
    TOKEN_NETWORKS,
    DraftNetwork,
    Sizes,
    TokenNetwork,
    draft_inputs,
    step_inputs,
)
from seqdefer.types import Draft, HandOffTable

LEAST_BATCH = 16
COINS = 4  # fixed paths of each validation example, where trees are closed

Strategy = Literal["free", "teacher", "scheduled", "explore"]
STRATEGIES: tuple[Strategy, ...] = ("free", "teacher", "scheduled", "explore")


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of one fit. The defaults of what the paper leaves open are ours (batch_size)."""

    learning_rate: float
    patience: int
    architecture: str
    layers: int
    units: int
    dropout: float
    epochs: int
    weight_decay: float
    samples: int  # training examples the paper used
    delta: float = 1e-4
    clip_norm: float = 1.0
    batch_size: int = 256
    least_steps: int = 16  # little data is cut into smaller batches, or an epoch would hardly move the weights

    def __post_init__(self) -> None:
        if self.architecture not in NETWORKS:
            raise unknown("architecture", self.architecture, NETWORKS)
        positive = {"learning_rate": self.learning_rate, "epochs": self.epochs, "batch_size": self.batch_size,
                    "layers": self.layers, "units": self.units, "patience": self.patience,
                    "least_steps": self.least_steps}  # fmt: skip
        for name, value in positive.items():
            if not value > 0:
                raise OptionError(f"{name} is {value}; it must be above 0")
        if not 0 <= self.dropout < 1:
            raise OptionError(f"dropout is {self.dropout}; it must be at least 0 and below 1")


PRESETS: dict[str, Settings] = {
    "tsp-once": Settings(5e-4, 20, "draft_mlp", 1, 8, 0.2, 200, 0.005, 2400),
    "xsum-token": Settings(1e-3, 7, "lstm", 3, 128, 0.4, 100, 0.001, 800),
    "xsum-once": Settings(5e-4, 20, "draft_mlp", 1, 8, 0.2, 200, 0.005, 2400),
    "mwp-token": Settings(5e-4, 7, "lstm", 2, 64, 0.4, 100, 0.001, 70080),
    "mwp-once": Settings(5e-4, 20, "draft_mlp", 1, 8, 0.2, 200, 0.005, 70080),
}
# Ours, for what the paper has not: attention over the steps of a draft, and the estimates of OneTimeCost.
TRANSFORMER = Settings(1e-3, 8, "draft_transformer", 2, 64, 0.1, 40, 0.1, 2400, least_steps=32)
BY_TOKEN = Settings(1e-3, 7, "mlp", 2, 64, 0.4, 100, 0.001, 12_000)
BY_FACTS = Settings(2e-3, 10, "mlp", 2, 64, 0.2, 100, 0.1, 800)
PERCEPTRON = Settings(1e-3, 8, "draft_mlp", 2, 64, 0.2, 60, 0.01, 2400, least_steps=32)


@dataclass
class History:
    """What happened in a fit. Epochs count from 0; `best` is the one whose weights were kept."""

    training: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    best: int = 0
    batch_size: int = 0


def fit(
    network: nn.Module,
    n_examples: int,
    batch_loss: Callable[[Tensor], Tensor],
    validation_loss: Callable[[], Tensor],
    settings: Settings,
    *,
    seed: int,
    before_epoch: Callable[[int], None] = lambda _: None,
    progress: Callable[[int], None] = lambda _: None,
) -> History:
    """Minimises `batch_loss(rows)`; stops when `validation_loss()` has not improved by delta for `patience` epochs."""
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    batch_size = min(settings.batch_size, max(LEAST_BATCH, n_examples // settings.least_steps))
    history, best_weights = History(batch_size=batch_size), copy.deepcopy(network.state_dict())
    lowest, waited = math.inf, 0
    for epoch in range(settings.epochs):
        before_epoch(epoch)
        network.train()
        total = 0.0
        for rows in torch.randperm(n_examples, generator=order).split(batch_size):
            loss = batch_loss(rows)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), settings.clip_norm)
            optimizer.step()
            total += loss.item() * len(rows)
        network.eval()
        with torch.no_grad():
            reached = validation_loss().item()
        history.training.append(total / n_examples)
        history.validation.append(reached)
        progress(1)
        if reached < lowest - settings.delta:
            lowest, waited, history.best = reached, 0, epoch
            best_weights = copy.deepcopy(network.state_dict())
        else:
            waited += 1
        if waited >= settings.patience:
            break
    if lowest == math.inf:
        raise OptionError(
            f"the validation loss was {reached} after the last of {epoch + 1} epochs and never a finite number; "
            "lower the learning rate, or look for labels that are not finite"
        )
    network.load_state_dict(best_weights)
    network.eval()
    return history


# -- token level ---------------------------------------------------------------------------------------------------


def teacher_probability(epoch: int, *, warm_up: int = 5, decay: float = 0.95, floor: float = 0.5) -> float:
    """Scheduled sampling: 1 for the warm-up epochs, then 0.95 of the last each epoch, not below 0.5."""
    return max(floor, decay ** max(0, epoch - warm_up + 1))


class Steering:
    """Which way a training rollout goes on from a scored position. Decisions steer; they carry no gradient.

    free: as the rejector says (defer when its score >= 0). teacher: as hindsight says (defer when l >= c). scheduled: a
    coin per token between the two. explore: as the rejector says at a threshold drawn per sequence from its own recent
    scores, so that the prefixes of every budget are seen, not only those of threshold 0.
    """

    def __init__(self, strategy: Strategy, seed: int) -> None:
        if strategy not in STRATEGIES:
            raise unknown("training strategy", strategy, STRATEGIES)
        self.strategy = strategy
        self.generator = torch.Generator().manual_seed(seed)
        self.teacher = 1.0 if strategy == "teacher" else 0.0
        self.recent: list[Tensor] = []
        self.pool = torch.zeros(1)

    def before_epoch(self, epoch: int) -> None:
        if self.strategy == "scheduled":
            self.teacher = teacher_probability(epoch)
        if self.recent:
            self.pool = torch.cat(self.recent)
            self.recent = []

    def thresholds(self, n: int) -> Tensor:
        """One a sequence. (n,)"""
        if self.strategy != "explore":
            return torch.zeros(n)
        return self.pool[torch.randint(len(self.pool), (n,), generator=self.generator)]

    def decide(self, scores: Tensor, thresholds: Tensor, loss: Tensor, cost: Tensor) -> Tensor:
        defer = scores >= thresholds
        if self.strategy == "explore":
            self.recent.append(scores[::8].cpu())
        if self.teacher > 0:
            coin = torch.rand(len(scores), generator=self.generator).to(scores.device) < self.teacher
            defer = torch.where(coin, loss >= cost, defer)
        return defer


class Coins(Steering):
    """Whatever the rejector says, the same decisions each time, from hardly ever deferring to nearly always. Where
    trees are closed, the risk on these paths tells epochs apart; on the rejector's own, the paths change with it."""

    def __init__(self, seed: int) -> None:
        super().__init__("free", seed)
        self.seed = seed

    def thresholds(self, n: int) -> Tensor:
        """The share that each sequence defers."""
        self.generator.manual_seed(self.seed)
        return (torch.randperm(n, generator=self.generator) + 0.5) / n

    def decide(self, scores: Tensor, thresholds: Tensor, loss: Tensor, cost: Tensor) -> Tensor:
        return torch.rand(len(scores), generator=self.generator).to(scores.device) < thresholds


def default_price(trees: DecisionTrees) -> float:
    """5 % of the predictor's mean token loss where more than one prefix in a hundred has l = c = 0: a surrogate is flat
    there, and its score arbitrary (the paper's theorems ask for c_j >= c-bar > 0). 0 elsewhere."""
    loss, cost = trees.losses(trees.typical_nodes())
    is_flat = (loss + cost) == 0
    return 0.05 * float(loss.mean()) if float(is_flat.float().mean()) > 0.01 else 0.0


def token_risk(
    rejector: TokenNetwork, trees: DecisionTrees, rows: Tensor, phi: Phi, steering: Steering, price: float = 0.0
) -> Tensor:
    """Mean surrogate loss of one rollout through the trees of `rows`."""
    rows = rows.to(trees.device)
    nodes, state = trees.roots[rows], rejector.start(trees.context[rows])
    thresholds = steering.thresholds(len(rows)).to(trees.device)
    columns: list[list[Tensor]] = [[], [], [], []]  # scores, losses, costs, mask
    with trees.working_on(rows):
        for position in range(trees.task.spec.length):
            live, at = nodes != END, nodes.clamp(min=0)
            score, state = rejector.score(state, position, trees.proposal(at))
            loss, cost = trees.losses(at)
            cost = cost + price
            for column, value in zip(columns, (score, loss, cost, live), strict=True):
                column.append(value)
            defer = steering.decide(score.detach()[live], thresholds[live], loss[live], cost[live])
            nodes = torch.full_like(nodes, END)
            nodes[live] = trees.children(at[live], defer)
            if not bool((nodes != END).any()):
                break
    scores, losses, costs, mask = (torch.stack(column, 1) for column in columns)
    return token_surrogate(scores, losses, costs, mask, phi)


def fit_token(
    train: DecisionTrees,
    validation: DecisionTrees,
    settings: Settings,
    *,
    seed: int,
    phi: str = "logistic",
    strategy: Strategy = "free",
    price: float | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[TokenNetwork, History]:
    """TokenwiseModel: minimises the token surrogate over rollouts that `strategy` steers; validation steers itself, or
    goes fixed ways where trees are closed.

    `price` is added to the cost of every expert token; None lets `default_price` choose."""
    price = default_price(train) if price is None else price
    torch.manual_seed(seed)
    proposal = train.proposal(train.roots)
    sizes = _sizes(train.context, proposal.features, proposal.entropy, train.task.spec.length, settings)
    if settings.architecture not in TOKEN_NETWORKS:
        raise unknown("token-level architecture", settings.architecture, TOKEN_NETWORKS)
    network: TokenNetwork = TOKEN_NETWORKS[settings.architecture](
        sizes, train.predictor.fingerprint, {"phi": phi, "strategy": strategy, "price": price}
    )
    seen = train.proposal(train.typical_nodes())
    network.to(train.device).standardise(train.context, step_inputs(seen.features, seen.uncertainty, seen.entropy))
    loss_of, steering = get_phi(phi), Steering(strategy, seed)
    judge, everyone = Steering("free", seed), torch.arange(len(validation))
    if validation.is_closed:
        judge, everyone = Coins(seed), everyone.repeat(COINS)
    history = fit(
        network,
        len(train),
        lambda rows: token_risk(network, train, rows, loss_of, steering, price),
        lambda: token_risk(network, validation, everyone, loss_of, judge, price),
        settings,
        seed=seed,
        before_epoch=steering.before_epoch,
        progress=progress,
    )
    return network, history


# -- whole drafts --------------------------------------------------------------------------------------------------


Labelled = tuple[Draft, HandOffTable]  # drafts, and what handing them off would have cost


def fit_once(
    train: Labelled,
    validation: Labelled,
    grid: Tensor,
    settings: Settings,
    *,
    alpha: float,
    fingerprint: str,
    seed: int,
    psi: str = "cross_entropy",
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[DraftNetwork, History]:
    """OneTimeModel: minimises the one-time surrogate over the hand-offs in `grid`; alpha is alpha_1 of the paper."""
    loss_of: Psi = get_psi(psi)

    def total(drafted: Draft, table: HandOffTable) -> Tensor:
        length = table.loss.shape[1] - 1
        totals = (table.loss + query_costs(table.deferred, alpha, length))[:, grid]
        # Weight 0 for hand-offs past a draft's end: they are no deferral again, which has its weight already.
        return torch.where(is_ended(grid, drafted.sequences.lengths), totals.amax(1, keepdim=True), totals)

    notes = {"grid": grid.tolist(), "alpha": alpha, "psi": psi}
    sizes = _draft_sizes(train[0], settings, hand_offs=tuple(grid.tolist()))
    torch.manual_seed(seed)
    network = _draft_network(sizes, settings, fingerprint, notes)

    def surrogate(scores: Tensor, totals: Tensor) -> Tensor:
        return one_time_surrogate(scores, totals, loss_of)

    labels = total(*train), total(*validation)
    return network, _fit_draft(network, train[0], validation[0], labels, surrogate, settings, seed, device, progress)


def fit_cost(
    train: Labelled,
    validation: Labelled,
    grid: Tensor,
    settings: Settings,
    *,
    fingerprint: str,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[DraftNetwork, History]:
    """OneTimeCost: estimates the loss of every hand-off in `grid` by least squares. What a token is worth is not known
    here; the policy (`choose_by_cost`) brings the price."""
    sizes = _draft_sizes(train[0], settings, hand_offs=tuple(grid.tolist()), rule="cost")
    torch.manual_seed(seed)
    network = _draft_network(sizes, settings, fingerprint, {"grid": grid.tolist()})
    losses = train[1].loss[:, grid].float()
    network.standardise_losses(losses)
    unit = losses.std(0).mean().clamp(min=1e-6) if len(losses) > 1 else torch.ones(())

    def squares(scores: Tensor, losses: Tensor) -> Tensor:
        # Hand-offs past a draft's end score -inf and count for nothing; a score that is no number must not.
        error = torch.where(scores == -torch.inf, 0.0, (scores + losses) / unit.to(scores))
        return error.square().mean()

    labels = losses, validation[1].loss[:, grid].float()
    return network, _fit_draft(network, train[0], validation[0], labels, squares, settings, seed, device, progress)


def fit_whole(
    train: Labelled,
    validation: Labelled,
    settings: Settings,
    *,
    fingerprint: str,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[DraftNetwork, History]:
    """WholeModelEmbed: learns whether the expert is more accurate than the predictor on the whole sequence."""

    def expert_wins(table: HandOffTable) -> Tensor:
        return (table.loss[:, :1] < table.loss[:, -1:]).float()

    torch.manual_seed(seed)
    network = _draft_network(_draft_sizes(train[0], settings), settings, fingerprint, {})
    loss_of = nn.functional.binary_cross_entropy_with_logits
    labels = expert_wins(train[1]), expert_wins(validation[1])
    return network, _fit_draft(network, train[0], validation[0], labels, loss_of, settings, seed, device, progress)


def _draft_network(sizes: Sizes, settings: Settings, fingerprint: str, notes: dict[str, Any]) -> DraftNetwork:
    if settings.architecture not in DRAFT_NETWORKS:
        raise unknown("architecture by draft", settings.architecture, DRAFT_NETWORKS)
    return DRAFT_NETWORKS[settings.architecture](sizes, fingerprint, notes)


def _fit_draft(
    network: DraftNetwork,
    train: Draft,
    validation: Draft,
    labels: tuple[Tensor, Tensor],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    settings: Settings,
    seed: int,
    device: torch.device | str,
    progress: Callable[[int], None],
) -> History:
    """Fits on `device`; the network comes back to the CPU, where drafts are kept."""
    context, steps, mask = draft_inputs(train)
    network.standardise(context, steps[mask])
    network.to(device)
    inputs, judged = ([part.to(device) for part in draft_inputs(draft)] for draft in (train, validation))
    wanted, judged_labels = (part.to(device) for part in labels)

    def batch_loss(rows: Tensor) -> Tensor:
        rows = rows.to(device)
        return loss_of(network(*(part[rows] for part in inputs)), wanted[rows])

    def validation_loss() -> Tensor:
        scores = [network(*(part[rows] for part in judged)) for rows in torch.arange(len(validation)).split(1024)]
        return loss_of(torch.cat(scores), judged_labels)

    history = fit(network, len(train), batch_loss, validation_loss, settings, seed=seed, progress=progress)
    network.cpu()
    return history


def _draft_sizes(draft: Draft, settings: Settings, **kind: Any) -> Sizes:
    return _sizes(draft.context, draft.features, draft.entropy, draft.features.shape[1], settings, **kind)


def _sizes(
    context: Tensor, features: Tensor, entropy: Tensor | None, length: int, settings: Settings, **kind: Any
) -> Sizes:
    return Sizes(
        context=context.shape[1],
        features=features.shape[-1],
        length=length,
        has_entropy=entropy is not None,
        layers=settings.layers,
        units=settings.units,
        dropout=settings.dropout,
        **kind,
    )
