"""Decision trees: what both writers would write after every mixture of their tokens, remembered.

Token-level rejectors are trained and judged on prefixes that predictor and expert wrote together. Each such prefix is a
node: the predictor's proposal, the expert's token, their losses, and one child per decision. Nodes are made once, by
`enumerate_trees` (all of them; for short sequences) or on first visit (lazily; for long ones), and where both writers
name the same token the two decisions share one child. After that neither model is asked again: training epochs,
rejectors, seeds and threshold sweeps are look-ups, and give exactly what the loop in `seqdefer.engine` would.

Growing lazily, a node's children need both models to stand at its prefix. Whoever goes through trees level by level
says which examples it is working on (`working_on`, `parts`): their inputs are then read once, and children go on from
where the models stood when the node was made. Otherwise inputs and prefixes are read anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import ContractError, OptionError
from seqdefer.interfaces import NextTokenExpert, Predictor, Task
from seqdefer.labels.hand_offs import Calls
from seqdefer.progress import Progress
from seqdefer.types import Examples, Proposal, Sequences

END, UNKNOWN = -1, -2  # children that are no nodes: the sequence is over; nobody has asked yet
MAX_ENUMERATED_LENGTH = 12  # 2^12 nodes an example; longer sequences grow lazily

# Of lazily grown trees; measured with two T5 models on a CPU.
NODES_A_LEVEL = 4  # that a sweep visits for the first time, of one example
KEPT = 2  # batches of nodes at which the models are kept standing
WORTH_A_PASS = 1 / 4  # of a batch: so many go on from where the models stand; fewer are replayed, together with others


@dataclass
class _Nodes:
    """One row a node; capacity doubles, `size` rows are in use."""

    size: int
    example: Tensor  # int64 (N,)
    position: Tensor  # int64 (N,) tokens before this node
    parent: Tensor  # int64 (N,) -1 for roots
    tokens: Tensor  # (N, 2) predictor's, expert's
    losses: Tensor  # (N, 2) l and c
    children: Tensor  # int64 (N, 2) after keeping, after deferring
    features: Tensor  # (N, F)
    uncertainty: Tensor  # (N,)
    entropy: Tensor  # (N,), or (N, 0) where there is none

    def extend(self, other: _Nodes) -> None:
        needed = self.size + other.size
        if needed > len(self.example):
            capacity = max(needed, 2 * len(self.example))
            for column in self.columns():
                old = getattr(self, column)
                grown = torch.empty(capacity, *old.shape[1:], dtype=old.dtype, device=old.device)
                grown[: self.size] = old[: self.size]
                setattr(self, column, grown)
        for column in self.columns():
            getattr(self, column)[self.size : needed] = getattr(other, column)[: other.size]
        self.size = needed

    @classmethod
    def columns(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name != "size"]

    def used(self) -> dict[str, Tensor]:
        """The columns without their spare capacity."""
        return {name: getattr(self, name)[: self.size] for name in self.columns()}

    def moved(self, by: int, examples: int) -> dict[str, Tensor]:
        """The columns as they are behind `by` other nodes, of examples that stand behind `examples` others."""
        columns = self.used()
        for name in ("parent", "children"):
            columns[name] = torch.where(columns[name] >= 0, columns[name] + by, columns[name])
        return {**columns, "example": columns["example"] + examples}


@dataclass(frozen=True)
class _Standing:
    """Both models after the prefixes of R nodes (or at the beginning of R examples)."""

    ids: Tensor  # int64 (R,) nodes or examples, rising
    state: Any
    expert_state: Any


@dataclass
class _Desk:
    """The models at the examples that are being worked on."""

    examples: Tensor  # int64 (E,) rising
    beginning: _Standing | None = None  # of all examples, when it is first needed
    standing: list[_Standing] = field(default_factory=list)  # the latest last

    def keep(self, made: _Standing, most: int) -> None:
        """`most` nodes in all; the oldest go first."""
        self.standing.append(made)
        while sum(len(one.ids) for one in self.standing) > most:
            self.standing.pop(0)


class DecisionTrees:
    """One tree an example, in one table of nodes. Nodes are int64 ids; END (-1) stands for a sequence that is over."""

    def __init__(
        self,
        task: Task,
        examples: Examples,
        *,
        grown: Mapping[str, Tensor] | None = None,
        progress: Progress = lambda _: None,
    ) -> None:
        """`grown`: what `tensors` gave of trees of the same examples, instead of asking the models."""
        if not isinstance(task.expert, NextTokenExpert):
            raise ContractError(
                f"decision trees need an expert that names next tokens; that of task {task.name!r} only completes"
            )
        self.task, self.device = task, task.predictor.device  # the nodes live where the predictor does
        self.examples = examples.to(self.device)
        self.expert: NextTokenExpert[Any] = task.expert
        self.predictor: Predictor[Any] = task.predictor
        self.calls, self.is_complete, self.is_closed = Calls(), False, False
        self._nodes: _Nodes | None = None
        self._desk: _Desk | None = None
        self.roots = torch.arange(0, device=self.device)
        if grown is not None:
            parts = {name: column.to(self.device) for name, column in grown.items()}
            self.roots, self.context = parts.pop("roots"), parts.pop("context")
            self._nodes = _Nodes(size=len(parts["example"]), **parts)
            return
        contexts = []
        for rows in torch.arange(len(examples), device=self.device).split(self.predictor.batch_size):
            contexts.append(self._plant(rows))
            progress(len(rows))
        self.context = torch.cat(contexts)  # (n, C)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def nodes(self) -> _Nodes:
        assert self._nodes is not None
        return self._nodes

    def tensors(self) -> dict[str, Tensor]:
        """All that the trees hold, to be kept and grown on."""
        return {**self.nodes.used(), "roots": self.roots, "context": self.context}

    @staticmethod
    def columns() -> set[str]:
        """The names of what `tensors` gives."""
        return {*_Nodes.columns(), "roots", "context"}

    def close(self) -> None:
        """No more growth: who decides for a child that is not there gets the other one. The trees move to the CPU,
        because training goes through them in steps that are too small for a GPU."""
        if bool((self.nodes.used()["children"] == UNKNOWN).all(1).any()):
            raise OptionError("trees that stop amid a sequence cannot be closed: grow them, or use explore_trees")
        self.is_closed, self.device = True, torch.device("cpu")
        self._nodes = _Nodes(self.nodes.size, **{name: column.cpu() for name, column in self.nodes.used().items()})
        self.examples, self.roots, self.context = self.examples.to("cpu"), self.roots.cpu(), self.context.cpu()

    def require_open(self) -> None:
        """For all who tell what decisions lead to: in closed trees some lead where others were meant to."""
        if self.is_closed:
            raise OptionError(
                "these trees are closed: they serve training, and cannot tell what a threshold spends or a decision is "
                "worth; use DecisionTrees(task, examples)"
            )

    # -- reading ---------------------------------------------------------------------------------------------------

    def proposal(self, nodes: Tensor) -> Proposal:
        """What the predictor proposes at `nodes` (B,)."""
        table = self.nodes
        entropy = None if table.entropy.ndim > 1 else table.entropy[nodes]
        return Proposal(table.tokens[nodes, 0], table.features[nodes], table.uncertainty[nodes], entropy)

    def losses(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """l of keeping and c of deferring at `nodes`. (B,), (B,)"""
        both = self.nodes.losses[nodes]
        return both[:, 0], both[:, 1]

    def children(self, nodes: Tensor, defer: Tensor) -> Tensor:
        """The nodes after deciding at `nodes` (B,), grown if need be; END where the sequence is then over."""
        choice = defer.long()
        found = self.nodes.children[nodes, choice]
        missing = found == UNKNOWN
        if not (self.is_complete or self.is_closed):  # what a complete tree saves was counted when it was made
            self.calls = self.calls + Calls(0, int((found >= 0).sum()))
        if self.is_closed:
            return torch.where(missing, self.nodes.children[nodes, 1 - choice], found)
        if bool(missing.any()):
            agree = self.nodes.tokens[nodes, 0] == self.nodes.tokens[nodes, 1]
            only = choice.masked_fill(agree, 0)  # one child for both decisions, also when both are asked for at once
            pairs = torch.unique(nodes[missing] * 2 + only[missing])
            self._grow(pairs // 2, pairs % 2)
            found = self.nodes.children[nodes, choice]
        return found

    def typical_nodes(self, most: int = 100_000) -> Tensor:
        """Nodes to take statistics from: of trees that do not grow all (evenly thinned), else those that predictor
        alone and expert alone pass, so that it does not matter what has been grown before."""
        if not (self.is_complete or self.is_closed):
            return torch.cat([self._path(defer=False), self._path(defer=True)])[:most]
        return torch.arange(0, self.nodes.size, max(1, self.nodes.size // most), device=self.device)

    def _path(self, *, defer: bool) -> Tensor:
        """All nodes that one writer alone passes, level by level."""
        passed = []
        for part in self.parts(torch.arange(len(self), device=self.device)):
            nodes = self.roots[part]
            while len(nodes):
                passed.append(nodes)
                following = self.children(nodes, torch.full_like(nodes, int(defer), dtype=torch.bool))
                nodes = following[following != END]
        path = torch.cat(passed)
        return path[self.nodes.position[path].argsort(stable=True)]

    def sequences(self, nodes: Tensor, defer: Tensor) -> Sequences:
        """The sequences that end with deciding `defer` (B,) at `nodes` (B,)."""
        table, spec = self.nodes, self.task.spec
        tokens = torch.zeros(len(nodes), spec.length, dtype=table.tokens.dtype, device=self.device)
        rows = torch.arange(len(nodes), device=self.device)
        lengths = table.position[nodes] + 1
        tokens[rows, lengths - 1] = table.tokens[nodes, defer.long()]
        child, node = nodes, table.parent[nodes]
        while bool((node >= 0).any()):
            live = node >= 0
            at, under = node[live], child[live]
            # Where both children are one node the writers agree, so either column is right.
            choice = (table.children[at, 1] == under) & (table.children[at, 0] != under)
            tokens[rows[live], table.position[at]] = table.tokens[at, choice.long()]
            child, node = torch.where(live, node, child), torch.where(live, table.parent[node.clamp(min=0)], node)
        return Sequences(tokens, lengths)

    def outcomes(self, nodes: Tensor, defer: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and length of the sequences that end with deciding `defer` (B,) at `nodes` (B,); equal ones are measured
        once. (B,), (B,)"""
        leaves, back = torch.unique(nodes * 2 + defer.long(), return_inverse=True)
        sequences = self.sequences(leaves // 2, (leaves % 2).bool())
        examples = self.examples.select(self.nodes.example[leaves // 2])
        return self.task.sequence_loss(examples, sequences)[back], sequences.lengths[back]

    # -- growing ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _plant(self, rows: Tensor) -> Tensor:
        """Makes the roots of `rows`; returns their context."""
        batch = self.examples.select(rows)
        state, context = self.predictor.start(batch.inputs)
        blank = rows[:, None][:, :0]  # int64 (B, 0)
        made, _ = self._ask(state, self.expert.start(batch), rows, blank, torch.full_like(rows, END))
        self.roots = torch.cat([self.roots, made])
        return context

    @torch.no_grad()
    def _ask(
        self, state: Any, expert_state: Any, example: Tensor, prefix: Tensor, parent: Tensor
    ) -> tuple[Tensor, Any]:
        """Makes the nodes where both models stand, after `prefix` (B, T). Returns their ids and the expert's state."""
        spec, position = self.task.spec, torch.full_like(example, prefix.shape[1])
        proposal = self.predictor.propose(state)
        asked, copies = self._rows_to_ask(example, position)
        named, expert_state = self.expert.next(expert_state, asked)
        tokens = torch.stack([proposal.tokens, named[copies].to(proposal.tokens.dtype)], 1)  # (B, 2)
        batch = self.examples.select(example)
        kept, deferred = tokens.unbind(1)
        before = Sequences(prefix, position)
        losses = [self.task.token_loss(batch, before, kept), self.task.token_cost(batch, before, deferred)]
        ends = spec.is_end(tokens) | (position[:, None] + 1 >= spec.length)
        n = len(example)
        entropy = torch.zeros(n, 0, device=self.device) if proposal.entropy is None else proposal.entropy
        new = _Nodes(
            n, example, position, parent, tokens, torch.stack(losses, 1), torch.where(ends, END, UNKNOWN),
            proposal.features, proposal.uncertainty, entropy,
        )  # fmt: skip
        first = 0 if self._nodes is None else self._nodes.size
        if self._nodes is None:
            self._nodes = new
        else:
            self._nodes.extend(new)
        self.calls = self.calls + Calls(len(asked), n - len(asked))
        return torch.arange(first, first + n, device=self.device), expert_state

    def _rows_to_ask(self, example: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Rows to ask the expert about, and for each row which answer is its own."""
        if self.expert.reads_prefix or not self.expert.deterministic:
            everyone = torch.arange(len(example), device=self.device)
            return everyone, everyone
        keys = example * self.task.spec.length + position
        unique, copies = torch.unique(keys, return_inverse=True)
        asked = torch.empty_like(unique)
        asked[copies] = torch.arange(len(example), device=self.device)
        return asked, copies

    @contextmanager
    def working_on(self, rows: Tensor) -> Iterator[None]:
        """Inside, the models are kept at the examples `rows` and at the nodes made last: much faster growth, for the
        memory that their states take. For those who go on from the nodes that they were just given."""
        before = self._desk
        self._desk = None if self.is_complete else _Desk(torch.unique(rows.to(self.device)))
        try:
            yield
        finally:
            self._desk = before

    def parts(self, rows: Tensor, *, nodes: int = NODES_A_LEVEL) -> Iterator[Tensor]:
        """Places in `rows`, so many at a time that a level of the caller's search, about `nodes` an example, is a
        batch; each part is being worked on while the caller has it. Complete trees need no models and are one part."""
        places = torch.arange(len(rows), device=self.device)
        for part in (places,) if self.is_complete else places.split(self._batches(1 / nodes)):
            with self.working_on(rows[part]):
                yield part

    def _batches(self, n: float) -> int:
        return max(1, int(n * self.predictor.batch_size))

    def _grow(self, nodes: Tensor, choice: Tensor) -> None:
        """Makes the children of `nodes` for `choice`."""
        for position in torch.unique(self.nodes.position[nodes]).tolist():
            here = (self.nodes.position[nodes] == position).nonzero().squeeze(1)
            for standing, group in self._by_standing(nodes[here]):
                for part in here[group].split(self.predictor.batch_size):
                    self._grow_level(standing, nodes[part], choice[part], int(position))

    def _by_standing(self, nodes: Tensor) -> list[tuple[_Standing | None, Tensor]]:
        """Where the models stand at which of `nodes` (places among them); None for those that must be replayed."""
        groups: list[tuple[_Standing | None, Tensor]] = []
        left = torch.ones_like(nodes, dtype=torch.bool)
        for standing in reversed(self._desk.standing if self._desk is not None else []):
            found = torch.isin(nodes, standing.ids) & left
            if bool(found.any()) and int(found.sum()) >= min(self._batches(WORTH_A_PASS), int(left.sum())):
                groups.append((standing, found.nonzero().squeeze(1)))
                left &= ~found
        return [*groups, (None, left.nonzero().squeeze(1))] if bool(left.any()) else groups

    @torch.no_grad()
    def _grow_level(self, standing: _Standing | None, nodes: Tensor, choice: Tensor, position: int) -> None:
        example = self.nodes.example[nodes]
        prefix = self.sequences(nodes, choice.bool()).tokens[:, : position + 1]
        if standing is None:
            standing, ids, unread = self._begun(example), example, prefix
        else:
            ids, unread = nodes, prefix[:, -1:]
        copies = torch.searchsorted(standing.ids, ids)
        state = self.predictor.extend(self.predictor.select(standing.state, copies), unread)
        expert_state = self.expert.extend(self.expert.select(standing.expert_state, copies), unread)
        made, expert_state = self._ask(state, expert_state, example, prefix, nodes)
        self._link(nodes, choice, made)
        if self._desk is not None:
            self._desk.keep(_Standing(made, state, expert_state), self._batches(KEPT))

    def _begun(self, example: Tensor) -> _Standing:
        """The models at the beginning of these examples: each input is read once for all its prefixes."""
        desk = self._desk
        if desk is None or len(desk.examples) > self._batches(KEPT) or not torch.isin(example, desk.examples).all():
            return self._begin(torch.unique(example))
        if desk.beginning is None:
            begun = self._begin(desk.examples)
            desk.beginning = self._begin_expert(begun) if self.expert.reads_prefix else begun
        return desk.beginning

    def _begin(self, examples: Tensor) -> _Standing:
        batch = self.examples.select(examples)
        return _Standing(examples, self.predictor.start(batch.inputs)[0], self.expert.start(batch))

    def _begin_expert(self, begun: _Standing) -> _Standing:
        """Experts are lazy: one that was asked has read its input, and shares what it read with all its copies."""
        _, expert_state = self.expert.next(begun.expert_state, torch.arange(len(begun.ids), device=self.device))
        self.calls = self.calls + Calls(len(begun.ids), 0)
        return _Standing(begun.ids, begun.state, expert_state)

    def _link(self, nodes: Tensor, choice: Tensor, made: Tensor) -> None:
        table = self.nodes
        table.children[nodes, choice] = made
        agree = table.tokens[nodes, 0] == table.tokens[nodes, 1]
        table.children[nodes[agree], 1 - choice[agree]] = made[agree]


def join_trees(parts: Sequence[DecisionTrees], task: Task, examples: Examples) -> DecisionTrees:
    """The trees of all parts, whose examples stand in `examples` one after the other."""
    nodes, roots, n_nodes, n_examples = [], [], 0, 0
    for part in parts:
        nodes.append(part.nodes.moved(n_nodes, n_examples))
        roots.append(part.roots + n_nodes)
        n_nodes, n_examples = n_nodes + part.nodes.size, n_examples + len(part)
    grown = {name: torch.cat([one[name] for one in nodes]) for name in nodes[0]}
    grown |= {"roots": torch.cat(roots), "context": torch.cat([part.context for part in parts])}
    joined = DecisionTrees(task, examples, grown=grown)
    joined.calls = sum((part.calls for part in parts), start=Calls())
    return joined


@torch.no_grad()
def enumerate_trees(
    task: Task, examples: Examples, *, batch_size: int | None = None, progress: Progress = lambda _: None
) -> DecisionTrees:
    """Trees with all their nodes, made level by level from live states: no prefix is ever replayed.

    By default batches fit a processor's cache, or fill a GPU; they are smaller where the expert asks for it."""
    if task.spec.length > MAX_ENUMERATED_LENGTH:
        raise OptionError(
            f"cannot enumerate 2^{task.spec.length} decisions an example; sequences longer than "
            f"{MAX_ENUMERATED_LENGTH} tokens grow lazily: use DecisionTrees(task, examples)"
        )
    trees = DecisionTrees(task, examples)
    batch_size = batch_size or min(128 if trees.device.type == "cpu" else 8192, trees.expert.examples_at_once)
    for rows in torch.arange(len(examples), device=trees.device).split(batch_size):
        _enumerate_batch(trees, rows)
        progress(len(rows))
    trees.is_complete = True
    return trees


def _enumerate_batch(trees: DecisionTrees, rows: Tensor) -> None:
    batch = trees.examples.select(rows)
    state, _ = trees.predictor.start(batch.inputs)
    expert_state = trees.expert.start(batch)
    nodes = trees.roots[rows]
    prefix = trees.nodes.tokens[nodes][:, :0]  # (B, 0) of the tokens' dtype
    paths = torch.ones_like(rows)  # decisions that lead to each node: what the naive way would ask
    for _ in range(trees.task.spec.length - 1):
        table = trees.nodes
        is_open = table.children[nodes] == UNKNOWN  # (B, 2)
        agree = table.tokens[nodes, 0] == table.tokens[nodes, 1]
        is_open[:, 1] &= ~agree
        branch, choice = is_open.nonzero(as_tuple=True)
        if len(branch) == 0:
            return
        tokens = table.tokens[nodes[branch], choice]
        state = trees.predictor.append(trees.predictor.select(state, branch), tokens)
        expert_state = trees.expert.append(trees.expert.select(expert_state, branch), tokens)
        parents = nodes[branch]
        example = table.example[parents]
        prefix = torch.cat([prefix[branch], tokens[:, None]], 1)
        made, expert_state = trees._ask(state, expert_state, example, prefix, parents)
        trees._link(parents, choice, made)
        paths = paths[branch] * torch.where(agree[branch], 2, 1)
        trees.calls = trees.calls + Calls(0, int(paths.sum()) - len(made))
        nodes = made
