"""Fitting token-level rejectors: the token surrogate over rollouts through decision trees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqdefer.errors import look_up, require_known
from seqdefer.hyperparameters import STRATEGIES, Settings, Strategy
from seqdefer.labels.nodes import END
from seqdefer.labels.trees import DecisionTrees
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.rejectors.checkpoints import token_networks
from seqdefer.rejectors.losses import Phi, get_phi, token_surrogate
from seqdefer.rejectors.token import TokenNetwork
from seqdefer.rejectors.training import History, fit, network_sizes

COIN_PATHS = 4  # fixed paths of each validation example, where trees are closed
WARM_UP = 5  # epochs of scheduled sampling before the teacher's share decays


def teacher_probability(epoch: int, *, warm_up: int = WARM_UP, decay: float = 0.95, floor: float = 0.5) -> float:
    """Scheduled sampling: 1 for the warm-up epochs, then 0.95 times the last each epoch, not below 0.5."""
    return max(floor, decay ** max(0, epoch - warm_up + 1))


@dataclass
class Overridden:
    """Counts the decisions of rollouts that went another way than the rejector chose.

    `teacher` are those that hindsight decided against the rejector, `closed` those (the rejector's or the teacher's)
    whose child a closed tree lacks. Where both models name the same token every decision is followed."""

    decisions: int = 0
    teacher: Tensor | int = 0
    closed: Tensor | int = 0

    def count(self, own: Tensor, decided: Tensor, differ: Tensor, leads_elsewhere: Tensor) -> None:
        """Add B decisions: what the rejector chose, what was decided, where that matters, where a child is missing."""
        self.decisions += len(own)
        self.teacher += ((own != decided) & differ).sum()  # a tensor: a GPU need not wait for its counts
        self.closed += leads_elsewhere.sum()

    def shares(self) -> dict[str, float]:
        return {name: int(getattr(self, name)) / max(1, self.decisions) for name in ("teacher", "closed")}


class Steering:
    """Decides how a training rollout continues from a scored position. Decisions carry no gradient.

    free: the rejector decides (defer when its score >= 0). teacher: hindsight decides (defer when l >= c). scheduled: a
    coin per token between the two. explore (ours): the rejector decides at a threshold drawn per sequence from its own
    recent scores, so that training sees the prefixes of every budget, not only those of threshold 0.

    Early stopping begins after the warm-up of scheduled sampling. The paper does not say so, but until then it is
    teacher forcing: an epoch of the warm-up would make the two strategies one, and the paper prints different results.
    """

    def __init__(self, strategy: Strategy, seed: int) -> None:
        require_known("training strategy", strategy, STRATEGIES)
        self.strategy = strategy
        self.generator = torch.Generator().manual_seed(seed)
        self.teacher = 1.0 if strategy == "teacher" else 0.0
        self.warm_up = WARM_UP if strategy == "scheduled" else 0
        self.overridden = Overridden()
        self.recent: list[Tensor] = []
        self.pool = torch.zeros(1)

    def before_epoch(self, epoch: int) -> None:
        if self.strategy == "scheduled":
            self.teacher = teacher_probability(epoch)
        if self.recent:
            self.pool = torch.cat(self.recent)
            self.recent = []

    def thresholds(self, n: int) -> Tensor:
        """Draw one threshold per sequence. (n,)"""
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
    """Makes the same decisions each time, whatever the scores: coins from hardly ever deferring to nearly always. Where
    trees are closed, the risk on these fixed paths compares epochs; on the rejector's own, the paths change with it."""

    def __init__(self, seed: int) -> None:
        super().__init__("free", seed)
        self.seed = seed

    def thresholds(self, n: int) -> Tensor:
        """Return the share that each sequence defers."""
        self.generator.manual_seed(self.seed)
        return (torch.randperm(n, generator=self.generator) + 0.5) / n

    def decide(self, scores: Tensor, thresholds: Tensor, loss: Tensor, cost: Tensor) -> Tensor:
        return torch.rand(len(scores), generator=self.generator).to(scores.device) < thresholds


def default_price(trees: DecisionTrees) -> float:
    """Return 5 % of the predictor's mean token loss where more than one prefix in a hundred has l = c = 0: a surrogate
    is flat there, and its score arbitrary (the paper's theorems ask for c_j >= c-bar > 0). 0 elsewhere.

    Of branched trees it is all of the mean token loss: with a small price the surrogate orders positions by the ratio
    of both regrets, with a large one by their difference, which is what a token of the budget buys."""
    if trees.is_branched:
        return float(trees.nodes.used()["losses"][:, 0].mean())
    loss, cost = trees.losses(trees.typical_nodes())
    is_flat = (loss + cost) == 0
    return 0.05 * float(loss.mean()) if float(is_flat.float().mean()) > 0.01 else 0.0


def token_risk(
    rejector: TokenNetwork, trees: DecisionTrees, rows: Tensor, phi: Phi, steering: Steering, price: float = 0.0
) -> Tensor:
    """Return the mean surrogate loss of one rollout through the trees of `rows`."""
    rows = rows.to(trees.device)
    nodes, state = trees.roots[rows], rejector.start(trees.context[rows])
    thresholds = steering.thresholds(len(rows)).to(trees.device)
    columns: list[list[Tensor]] = [[], [], [], []]  # scores, losses, costs, mask
    with trees.working_on(rows):
        for position in range(trees.task.spec.length):
            live, at = nodes != END, nodes.clamp(min=0)
            score, state = rejector.score(state, position, trees.proposal(at))
            loss, cost = trees.losses(at)
            for column, value in zip(columns, (score, loss, cost + price, live), strict=True):
                column.append(value)
            going = live.nonzero().squeeze(1)
            scored, limits, here = score.detach()[going], thresholds[going], at[going]
            defer = steering.decide(scored, limits, loss[going], cost[going])
            steering.overridden.count(scored >= limits, defer, trees.differ(here), trees.leads_elsewhere(here, defer))
            nodes = torch.full_like(nodes, END).index_copy(0, going, trees.children(here, defer))
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
    reads_first: bool = False,
    progress: Progress = NO_PROGRESS,
) -> tuple[TokenNetwork, History]:
    """Fit TokenwiseModel: minimise the token surrogate over rollouts that `strategy` steers. Validation rollouts follow
    the rejector, whatever the strategy, or fixed paths where trees are closed. Open trees grow where rollouts lead.

    `price` is added to the cost of every expert token; None lets `default_price` choose. With `reads_first`, the
    network also sees the statistics of both models, which the trees must have."""
    price = default_price(train) if price is None else price
    torch.manual_seed(seed)
    proposal = train.proposal(train.roots)
    sizes = network_sizes(
        train.context, proposal.features, proposal.entropy, train.task.spec.length, settings, has_statistics=reads_first
    )
    network_class = look_up("token-level architecture", settings.architecture, token_networks())
    network = network_class(sizes, train.predictor.fingerprint, {"phi": phi, "strategy": strategy, "price": price})
    seen = train.proposal(train.typical_nodes())
    network.to(train.device)
    network.standardise(train.context, network.sizes.step_inputs(seen))
    loss_of, steering = get_phi(phi), Steering(strategy, seed)
    judge, everyone = Steering("free", seed), torch.arange(len(validation), device=validation.device)
    if validation.is_closed:
        judge, everyone = Coins(seed), everyone.repeat(COIN_PATHS)

    def judged() -> Tensor:
        parts = [everyone[part] for part in validation.parts(everyone, nodes=1)]
        risks = [token_risk(network, validation, rows, loss_of, judge, price) * len(rows) for rows in parts]
        return torch.stack(risks).sum() / len(everyone)

    history = fit(
        network,
        len(train),
        lambda rows: token_risk(network, train, rows, loss_of, steering, price),
        judged,
        settings,
        seed=seed,
        before_epoch=steering.before_epoch,
        warm_up=steering.warm_up,
        progress=progress,
    )
    history.overridden = steering.overridden.shares()
    return network, history
