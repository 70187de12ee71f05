"""Decision trees: what predictor and expert would write after every mixture of their tokens, cached.

Token-level rejectors are trained and evaluated on prefixes that both models wrote together. Each such prefix is a
node: the predictor's proposal, the expert's token, their losses, and one child per decision. Nodes are made once: all
by `seqdefer.labels.enumeration`, where they are few, else on first visit. Where both models name the same token, the
two decisions share one child. After that neither model is called again: training epochs, rejectors, seeds and
threshold sweeps are look-ups that give exactly what the loop in `seqdefer.engine` would.

To grow a node's children lazily, both models must have read its prefix. A caller that walks trees level by level names
its current examples (`working_on`, `parts`): their inputs are then read once, and children continue from cached model
states. Otherwise inputs and prefixes are read again.

An expert that pays by the call (`NextTokenExpert.pays_by_call`) is asked late: a node's expert token stays open until a
decision or a loss needs it. A call about the last of several tokens that the predictor wrote then answers for all.

With `reads_first`, nodes also hold the `PairStatistics` of both models' distributions, for rules that let the expert
read a position before they decide.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import ContractError, OptionError
from seqdefer.interfaces import NextTokenExpert, Predictor, Task
from seqdefer.labels.hand_offs import Calls
from seqdefer.labels.model_states import ModelStates, StateCache, group_by_states
from seqdefer.labels.nodes import END, UNKNOWN, NodeTable
from seqdefer.labels.pair_statistics import compare_distributions, models_with_log_probs
from seqdefer.labels.regrets import regrets
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.types import Examples, PairStatistics, Proposal, Sequences

TYPICAL_NODES = 100_000  # that statistics are taken from, about
# For lazily grown trees; measured with two T5 models on a CPU.
NODES_PER_LEVEL = 4  # new nodes per example at each level of a sweep
CACHED_BATCHES = 2  # batches of nodes whose model states are cached
MIN_BATCH_SHARE = 1 / 4  # of a batch: fewer nodes are replayed together with others instead of continued from the cache


class DecisionTrees:
    """One tree per example, in one table of nodes. Nodes are int64 ids; END (-1) stands for a sequence that is over."""

    def __init__(
        self,
        task: Task,
        examples: Examples,
        *,
        grown: Mapping[str, Tensor] | None = None,
        reads_first: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        """`grown`: the `tensors()` of trees of the same examples, to use instead of calling the models. They have
        pair statistics if they were made with `reads_first`."""
        if not isinstance(task.expert, NextTokenExpert):
            raise ContractError(
                f"decision trees need an expert that names next tokens; the expert of task {task.name!r} only completes"
            )
        self.task, self.device = task, task.predictor.device  # the nodes live where the predictor does
        self.examples = examples.to(self.device)
        self.expert: NextTokenExpert[Any] = task.expert
        self.predictor: Predictor[Any] = task.predictor
        self.calls, self.is_complete, self.is_closed = Calls(), False, False
        self._regrets: Tensor | None = None  # (N, 2) of branched trees
        self._nodes: NodeTable | None = None
        self._cache: StateCache | None = None
        self._late_start: Any = None  # the state of an expert that is asked late, before any token
        self.roots = torch.arange(0, device=self.device)
        stored = None if grown is None else grown.get("statistics")
        self.reads_first = reads_first if grown is None else stored is not None and stored.shape[1] > 0
        if self.reads_first:
            self.predictor, self.expert = models_with_log_probs(task)
        if grown is not None:
            parts = {name: column.to(self.device) for name, column in grown.items()}
            self.roots, self.context = parts.pop("roots"), parts.pop("context")
            n = len(parts["example"])
            parts.setdefault("statistics", torch.zeros(n, 0, device=self.device))
            self._nodes = NodeTable(size=n, **parts)
            return
        contexts = []
        for rows in torch.arange(len(examples), device=self.device).split(self.predictor.batch_size):
            contexts.append(self._plant(rows))
            progress(len(rows))
        self.context = torch.cat(contexts)  # (n, C)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def nodes(self) -> NodeTable:
        assert self._nodes is not None
        return self._nodes

    def tensors(self) -> dict[str, Tensor]:
        """Return everything the trees hold, to store and to grow further."""
        self.ask_late()
        columns = {**self.nodes.used(), "roots": self.roots, "context": self.context}
        if not self.reads_first:
            del columns["statistics"]
        return columns

    def reopened(self, rows: Tensor) -> DecisionTrees:
        """Return trees of the examples `rows` that hold what these do, complete or open to growth."""
        rows, table = rows.to(self.device), self.nodes.used()
        place = torch.full((len(self),), END, device=self.device)
        place[rows] = torch.arange(len(rows), device=self.device)
        kept = (place[table["example"]] >= 0).nonzero().squeeze(1)
        # Renumber nodes; END and UNKNOWN, which count from the end, stay what they are.
        number = torch.full((self.nodes.size + 2,), UNKNOWN, device=self.device)
        number[kept], number[END] = torch.arange(len(kept), device=self.device), END
        grown = {name: column[kept] for name, column in table.items()}
        grown |= {name: number[grown[name]] for name in ("parent", "children")}
        grown |= {"example": place[grown["example"]], "roots": number[self.roots[rows]], "context": self.context[rows]}
        trees = DecisionTrees(self.task, self.examples.select(rows), grown=grown)
        trees.is_complete = self.is_complete
        return trees

    @property
    def is_branched(self) -> bool:
        """Whether `losses` are regrets up to the end of the sequence."""
        return self._regrets is not None

    def close(self, *, branched: bool = False) -> None:
        """Stop growth: a decision whose child is missing leads to the other child. The trees move to the CPU, because
        training walks them in steps too small for a GPU."""
        self.ask_late()
        if bool((self.nodes.used()["children"] == UNKNOWN).all(1).any()):
            raise OptionError("cannot close trees that stop in mid-sequence; grow them, or use explore_trees")
        self.is_closed, self.device = True, torch.device("cpu")
        self._nodes = NodeTable(self.nodes.size, **{name: column.cpu() for name, column in self.nodes.used().items()})
        self.examples, self.roots, self.context = self.examples.to("cpu"), self.roots.cpu(), self.context.cpu()
        if branched:
            self._regrets = regrets(self.nodes)

    def branched(self) -> DecisionTrees:
        """Return these trees, which must be complete, with regrets as losses."""
        assert self.is_complete
        trees = copy.copy(self)
        trees._regrets = regrets(self.nodes)
        return trees

    def require_open(self) -> None:
        """Raise if the trees are closed: a decision in a closed tree may lead where another decision should."""
        if self.is_closed:
            raise OptionError(
                "these trees are closed: they are for training and cannot measure what a threshold spends or what a "
                "decision is worth; use DecisionTrees(task, examples)"
            )

    # -- reading ---------------------------------------------------------------------------------------------------

    def proposal(self, nodes: Tensor) -> Proposal:
        """Return the predictor's proposals at `nodes` (B,), with the pair's statistics where the trees have them."""
        table = self.nodes
        entropy = None if table.entropy.ndim > 1 else table.entropy[nodes]
        pair = PairStatistics.of(table.statistics[nodes]) if self.reads_first else None
        return Proposal(table.tokens[nodes, 0], table.features[nodes], table.uncertainty[nodes], entropy, pair=pair)

    def losses(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return l of keeping and c of deferring at `nodes`; in branched trees, regrets. (B,), (B,)"""
        self.ask_late(nodes)
        both = (self.nodes.losses if self._regrets is None else self._regrets)[nodes]
        return both[:, 0], both[:, 1]

    def children(self, nodes: Tensor, defer: Tensor) -> Tensor:
        """Return the nodes after deciding at `nodes` (B,), grown if missing; END where the sequence is over."""
        choice = defer.long()
        self.ask_late(nodes[defer.bool()])
        found = self.nodes.children[nodes, choice]
        missing = found == UNKNOWN
        if not (self.is_complete or self.is_closed):  # a complete tree counted its savings when it was made
            self.calls = self.calls + Calls(0, int((found >= 0).sum()))
        if self.is_closed:
            return torch.where(missing, self.nodes.children[nodes, 1 - choice], found)
        if bool(missing.any()):
            # One child for both decisions where the models agree, even if both are requested at once.
            only = choice.masked_fill(self._agree(nodes), 0)
            pairs = torch.unique(nodes[missing] * 2 + only[missing])
            self._grow(pairs // 2, pairs % 2)
            found = self.nodes.children[nodes, choice]
        return found

    def differ(self, nodes: Tensor) -> Tensor:
        """Tell whether both models name different tokens at `nodes`: elsewhere a decision changes nothing. bool (B,)"""
        self.ask_late(nodes)
        return ~self._agree(nodes)

    def _agree(self, nodes: Tensor) -> Tensor:
        """Tell whether both models are known to name the same token at `nodes`. bool (B,)"""
        tokens = self.nodes.tokens[nodes]
        return (tokens[:, 0] == tokens[:, 1]) & ~self._is_unasked(nodes)

    def leads_elsewhere(self, nodes: Tensor, defer: Tensor) -> Tensor:
        """Tell where `children` would lead to the child of the other decision: closed trees lack some. bool (B,)"""
        return (self.nodes.children[nodes, defer.long()] == UNKNOWN) & self.is_closed

    def typical_nodes(self) -> Tensor:
        """Return nodes to take statistics from, independent of what has been grown before: all nodes of complete and
        closed trees, evenly thinned, else the paths of predictor alone and expert alone."""
        if not (self.is_complete or self.is_closed):
            return torch.cat([self._path(defer=False), self._path(defer=True)])[:TYPICAL_NODES]
        return torch.arange(0, self.nodes.size, max(1, self.nodes.size // TYPICAL_NODES), device=self.device)

    def _path(self, *, defer: bool) -> Tensor:
        """Return all nodes that one model alone visits, level by level."""
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
        """Return the sequences that end with deciding `defer` (B,) at `nodes` (B,)."""
        table, length = self.nodes, self.task.spec.length
        lengths = table.position[nodes] + 1
        tokens = torch.zeros(len(nodes), length + 1, dtype=table.tokens.dtype, device=self.device)
        rows, at, choice = torch.arange(len(nodes), device=self.device), nodes, defer.long()
        for _ in range(int(lengths.max()) if len(nodes) else 0):  # from the last token to the first
            is_token = at >= 0
            place = torch.where(is_token, table.position[at], length)  # shorter sequences write past the end
            tokens[rows, place] = table.tokens[at, choice]
            parent = torch.where(is_token, table.parent[at], END)
            # Where both children are one node the models agree, so either column is right.
            choice, at = (table.children[parent, 1] == at).long(), parent
        tokens = tokens[:, :length]
        return Sequences(tokens, lengths)

    def outcomes(self, nodes: Tensor, defer: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and length of the sequences that end with deciding `defer` (B,) at `nodes` (B,). (B,), (B,)"""
        self.ask_late(nodes[defer.bool()])
        leaves, back = torch.unique(nodes * 2 + defer.long(), return_inverse=True)
        sequences = self.sequences(leaves // 2, (leaves % 2).bool())
        examples = self.examples.select(self.nodes.example[leaves // 2])
        return self.task.sequence_loss(examples, sequences)[back], sequences.lengths[back]

    # -- growing ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _plant(self, rows: Tensor) -> Tensor:
        """Make the roots of `rows`; return their context."""
        batch = self.examples.select(rows)
        state, context = self.predictor.start(batch.inputs)
        blank = rows[:, None][:, :0]  # int64 (B, 0)
        made, _ = self.ask(state, self.expert.start(batch), rows, blank, torch.full_like(rows, END))
        self.roots = torch.cat([self.roots, made])
        return context

    @torch.no_grad()
    def ask(self, state: Any, expert_state: Any, example: Tensor, prefix: Tensor, parent: Tensor) -> tuple[Tensor, Any]:
        """Make the nodes after `prefix` (B, T), which both models have read; return ids and the expert's state."""
        spec, position = self.task.spec, torch.full_like(example, prefix.shape[1])
        proposal = self.predictor.propose(state)
        batch, before, n = self.examples.select(example), Sequences(prefix, position), len(example)
        loss = self.task.token_loss(batch, before, proposal.tokens)
        if self.expert.pays_by_call:
            named, cost, calls = proposal.tokens, torch.full_like(loss, torch.nan), Calls()
        else:
            asked, copies = self._rows_to_ask(example, position)
            answers, expert_state = self.expert.next(expert_state, asked)
            named = answers[copies].to(proposal.tokens.dtype)
            cost, calls = self.task.token_cost(batch, before, named), Calls(len(asked), n - len(asked))
        tokens, losses = torch.stack([proposal.tokens, named], 1), [loss, cost]  # (B, 2)
        ends = spec.is_end(tokens)
        ends[:, 1] &= not self.expert.pays_by_call  # its token is open
        ends |= position[:, None] + 1 >= spec.length
        entropy = torch.zeros(n, 0, device=self.device) if proposal.entropy is None else proposal.entropy
        statistics = torch.zeros(n, 0, device=self.device)
        if self.reads_first:
            log_q, log_p = self.predictor.log_probs(state), self.expert.log_probs(expert_state, asked)[copies]
            statistics = compare_distributions(log_q, log_p, tokens).stack()
        new = NodeTable(
            n, example, position, parent, tokens, torch.stack(losses, 1), torch.where(ends, END, UNKNOWN),
            proposal.features, proposal.uncertainty, entropy, statistics,
        )  # fmt: skip
        first = 0
        if self._nodes is None:
            self._nodes = new
        else:
            first = self._nodes.size
            self._nodes.extend(new)
        self.calls = self.calls + calls
        return torch.arange(first, first + n, device=self.device), expert_state

    def ask_late(self, nodes: Tensor | None = None) -> None:
        """Ask an expert that pays by the call about those of `nodes` (default: all) where it has not been asked, the
        longest prefixes first: their answers may hold those of shorter ones. Other experts were asked about every node
        when it was made."""
        if not self.expert.pays_by_call or self.is_closed or self.is_complete:
            return
        nodes = torch.arange(self.nodes.size, device=self.device) if nodes is None else nodes
        unasked = torch.unique(nodes[self._is_unasked(nodes)])
        position = self.nodes.position[unasked]
        for each in torch.unique(position).flip(0).tolist():
            self._ask_late(unasked[position == each], each)

    def _is_unasked(self, nodes: Tensor) -> Tensor:
        """Find `nodes` whose expert token is open. bool (B,)"""
        return self.nodes.losses[nodes, 1].isnan() & self.expert.pays_by_call

    @torch.no_grad()
    def _ask_late(self, nodes: Tensor, position: int) -> None:
        """Fill in the expert's token, its cost and the child after it, at `nodes` of one position."""
        table, spec, example = self.nodes, self.task.spec, self.nodes.example[nodes]
        prefix = self.sequences(nodes, torch.zeros_like(nodes)).tokens[:, :position]
        if self._late_start is None:
            self._late_start = self.expert.write_ahead(self.expert.start(self.examples), spec.length)
        before, every = self.expert.n_calls, torch.arange(len(nodes), device=self.device)
        state = self.expert.extend(self.expert.select(self._late_start, example), prefix)
        named = self.expert.next(state, every)[0].to(table.tokens)
        made = self.expert.n_calls - before
        self.calls = self.calls + Calls(made, max(0, len(nodes) - made))
        table.tokens[nodes, 1] = named
        prefixes = Sequences(prefix, torch.full_like(nodes, position))
        table.losses[nodes, 1] = self.task.token_cost(self.examples.select(example), prefixes, named).to(table.losses)
        is_last = spec.is_end(named) | (position + 1 >= spec.length)
        after = torch.where(self._agree(nodes), table.children[nodes, 0], table.children[nodes, 1])
        table.children[nodes, 1] = after.masked_fill(is_last, END)

    def _rows_to_ask(self, example: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows to ask the expert about, and for each row the index of its answer."""
        if self.expert.reads_prefix or not self.expert.deterministic:
            every_row = torch.arange(len(example), device=self.device)
            return every_row, every_row
        keys = example * self.task.spec.length + position
        unique, copies = torch.unique(keys, return_inverse=True)
        asked = torch.empty_like(unique)
        asked[copies] = torch.arange(len(example), device=self.device)
        return asked, copies

    @contextmanager
    def working_on(self, rows: Tensor) -> Iterator[None]:
        """Cache the model states of the examples `rows` and of the nodes made last: growth from these nodes is much
        faster, at the cost of memory."""
        before = self._cache
        self._cache = None if self.is_complete else StateCache(torch.unique(rows.to(self.device)))
        try:
            yield
        finally:
            self._cache = before

    def parts(self, rows: Tensor, *, nodes: int = NODES_PER_LEVEL) -> Iterator[Tensor]:
        """Yield indices into `rows`, each part inside `working_on`: so many that one level of the caller's search,
        about `nodes` per example, is a batch. Complete and closed trees need no models and are one part."""
        places = torch.arange(len(rows), device=self.device)
        size = min(self._batches(1 / nodes), self.predictor.batch_size)
        for part in (places,) if self.is_complete or self.is_closed else places.split(size):
            with self.working_on(rows[part]):
                yield part

    def _batches(self, n: float) -> int:
        """Return the number of rows in `n` batches."""
        return max(1, int(n * self.predictor.rows_at_once))

    def _grow(self, nodes: Tensor, choice: Tensor) -> None:
        """Make the children of `nodes` for `choice`."""
        recent = [] if self._cache is None else self._cache.recent
        for position in torch.unique(self.nodes.position[nodes]).tolist():
            here = (self.nodes.position[nodes] == position).nonzero().squeeze(1)
            for states, group in group_by_states(nodes[here], recent, self._batches(MIN_BATCH_SHARE)):
                for part in here[group].split(self.predictor.rows_at_once):
                    self._grow_level(states, nodes[part], choice[part], int(position))

    @torch.no_grad()
    def _grow_level(self, states: ModelStates | None, nodes: Tensor, choice: Tensor, position: int) -> None:
        example = self.nodes.example[nodes]
        prefix = self.sequences(nodes, choice.bool()).tokens[:, : position + 1]
        if states is None:
            states, ids, unread = self._start_states(example), example, prefix
        else:
            ids, unread = nodes, prefix[:, -1:]
        copies = torch.searchsorted(states.ids, ids)
        state = self.predictor.extend(self.predictor.select(states.state, copies), unread)
        expert_state = self.expert.extend(self.expert.select(states.expert_state, copies), unread)
        made, expert_state = self.ask(state, expert_state, example, prefix, nodes)
        self.link(nodes, choice, made)
        if self._cache is not None:
            self._cache.keep(ModelStates(made, state, expert_state), self._batches(CACHED_BATCHES))

    def _start_states(self, example: Tensor) -> ModelStates:
        """Return the models at the start of these examples: each input is read once for all its prefixes."""
        cache, capacity = self._cache, self._batches(CACHED_BATCHES)
        if cache is None or len(cache.examples) > capacity or not torch.isin(example, cache.examples).all():
            return self._read_inputs(torch.unique(example))
        if cache.start is None:
            cache.start = self._read_inputs(cache.examples)
            # A lazy expert reads its inputs now: all copies of its state share them.
            if self.expert.reads_prefix and not self.expert.pays_by_call:
                n = len(cache.examples)
                _, state = self.expert.next(cache.start.expert_state, torch.arange(n, device=self.device))
                cache.start = replace(cache.start, expert_state=state)
                self.calls = self.calls + Calls(n, 0)
        return cache.start

    def _read_inputs(self, examples: Tensor) -> ModelStates:
        batch = self.examples.select(examples)
        return ModelStates(examples, self.predictor.start(batch.inputs)[0], self.expert.start(batch))

    def link(self, nodes: Tensor, choice: Tensor, made: Tensor) -> None:
        """Make the nodes `made` the children of `nodes` for `choice`, and for both decisions where the models agree."""
        table = self.nodes
        table.children[nodes, choice] = made
        agree = self._agree(nodes)
        table.children[nodes[agree], 1 - choice[agree]] = made[agree]


def join_trees(parts: Sequence[DecisionTrees], task: Task, examples: Examples) -> DecisionTrees:
    """Return one object with the trees of all parts, whose examples are consecutive rows of `examples`."""
    nodes, roots, n_nodes, n_examples = [], [], 0, 0
    for part in parts:
        part.ask_late()
        nodes.append(part.nodes.shifted(n_nodes, n_examples))
        roots.append(part.roots + n_nodes)
        n_nodes, n_examples = n_nodes + part.nodes.size, n_examples + len(part)
    grown = {name: torch.cat([one[name] for one in nodes]) for name in nodes[0]}
    grown |= {"roots": torch.cat(roots), "context": torch.cat([part.context for part in parts])}
    joined = DecisionTrees(task, examples, grown=grown)
    joined.calls = sum((part.calls for part in parts), start=Calls())
    return joined
