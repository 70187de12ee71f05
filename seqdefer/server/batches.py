"""Requests whose inputs are written together, each at its own threshold.

A request joins the running batch between two turns, gets what is settled after each, and leaves when its sequences end
or its client does. Rows are independent, so every request gets the tokens that it would get alone.

A turn that asks a remote expert is left where it is until the answer is there.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import torch

from seqdefer.budgets.caps import UNLIMITED, Allowance, allowances
from seqdefer.engine.pace import Turn
from seqdefer.interfaces import Codec, TokenRejector
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.generation import input_tokens
from seqdefer.server.breaker import ExpertUnavailable
from seqdefer.server.expert_calls import ExpertAccess, ExpertCall
from seqdefer.server.fallback import Fallback, FallbackCompletions, FallbackRows, reason_of
from seqdefer.server.log_probs import RowLogProbs
from seqdefer.server.tickets import InputsRead, Ticket, TicketRow
from seqdefer.types import Examples

log = logging.getLogger("seqdefer.server")
_encoding = threading.Lock()  # the event loop encodes too, and neither warnings nor tokenizers are made for threads


def encode_inputs(codec: Codec, inputs: Sequence[Any]) -> InputsRead:
    """Encode the inputs of one request, turning warnings into remarks. Raises InputError."""
    with _encoding:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            joined = codec.encode(inputs)
        tokens = input_tokens(codec, inputs, joined)
    return InputsRead(joined, tokens, sorted({str(warning.message) for warning in caught}))


def _join(codec: Codec, tickets: Sequence[Ticket]) -> Examples:
    if len(tickets) == 1 and tickets[0].inputs is not None:
        return tickets[0].inputs.examples
    with _encoding, warnings.catch_warnings():  # each request has its remarks already
        warnings.simplefilter("ignore")
        return codec.encode([one for ticket in tickets for one in ticket.request.inputs])


class RunningBatch:
    """Requests at work.

    The constructor runs no model: `advance` does all the work. Where the expert is remote, a batch that has asked it
    `is_waiting`, and takes no further requests until it `is_due`."""

    def __init__(self, model: DeferringModel, calls: ExpertAccess) -> None:
        self.model, self.calls = model, calls
        self.tickets: list[Ticket] = []
        self.refused: list[tuple[Ticket, Exception]] = []  # requests that broke the models, not answered yet
        self._joining: list[Ticket] = []
        self._turning: Generator[Any, Any, None] | None = None  # a turn that is not over
        self._question: Any = None
        self.call: ExpertCall[Any] | None = None  # its question, put to the expert
        served, n_tokens = model.served, model.served.predictor.vocabulary_size
        self.guard: Fallback
        if isinstance(model.rejector, TokenRejector):
            self.guard = FallbackRows(served.expert, calls, n_tokens)
            self.plan = model.plan(expert_rows=self.guard)
        else:
            self.guard = FallbackCompletions(served.expert, calls, served.spec, n_tokens)
            self.plan = model.plan()

    def __len__(self) -> int:
        """The sequences at work or about to be."""
        return len(self.plan.rows) + sum(len(ticket.request.inputs) for ticket in self._joining)

    def join(self, tickets: Sequence[Ticket]) -> None:
        """Let requests take part from the next turn on."""
        self.tickets += tickets
        self._joining += tickets

    @property
    def is_active(self) -> bool:
        """Whether a request still needs tokens."""
        return any(ticket.is_active for ticket in self.tickets)

    @property
    def is_waiting(self) -> bool:
        """Whether the expert has not answered."""
        return self.call is not None and not self.call.is_over

    @property
    def is_due(self) -> bool:
        """Whether there is something to do."""
        return not (self.is_waiting and self.is_active)

    def advance(self) -> Turn | None:
        """Take one turn, or as much of it as possible without waiting, and deliver it. Return what it took, if it is
        over. Raises what the predictor raises."""
        if self._turning is None:
            self._leave()
            joining, self._joining = [ticket for ticket in self._joining if not ticket.is_cancelled], []
            if joining:
                self._admit(joining)
            self._turning = self.plan.turning() if self.plan.rows else None
        if self._turning is not None and self._go_on(self._turning):
            self._turning = None
            self._end_turn()
            self._leave()
            return self.plan.last_turn
        return None

    def _go_on(self, turning: Generator[Any, Any, None]) -> bool:
        """Go on with a turn; return whether it is over."""
        answer = None
        while True:
            if self.call is not None:
                if not self.call.is_over:
                    return False
                answer = self.guard.receive(self._question, self.call)
                self._question = self.call = None
            try:
                self._question = turning.send(answer)
            except StopIteration:
                return True
            self.call = self.guard.ask(self._question)

    def _end_turn(self) -> None:
        self._note_failure()
        made_at = time.perf_counter()
        for ticket in list(self.tickets):
            try:
                if not ticket.is_cancelled:
                    ticket.deliver_new(self.model.served, made_at)
            except Exception as error:
                self._fail(ticket, error)

    def close(self) -> None:
        """Free the caches of both models, and cancel a call of the expert."""
        if self.call is not None:
            self.calls.abandon(self.call)
        self.tickets, self._joining, self._turning, self.call = [], [], None, None

    def _admit(self, tickets: Sequence[Ticket]) -> None:
        """Let the models read the inputs of requests that join; one that breaks them fails alone."""
        try:
            self._admit_together(tickets)
        except Exception as error:
            if len(tickets) == 1:
                self._fail(tickets[0], error)
                return
            for ticket in tickets:
                self._admit([ticket])

    def _admit_together(self, tickets: Sequence[Ticket]) -> None:
        requests = [ticket.request for ticket in tickets for _ in ticket.request.inputs]
        settings = torch.tensor([request.threshold for request in requests], dtype=torch.float64)
        may_defer = torch.tensor([request.may_defer for request in requests])
        examples = _join(self.model.served.codec, tickets)
        new = iter(self.plan.admit(examples, settings, may_defer, self._allowed(tickets)))
        for ticket in tickets:
            ticket.rows = [TicketRow(ticket.request, index, next(new), seen) for index, seen in enumerate(ticket.seen)]
        for place, row in enumerate(row for ticket in tickets for row in ticket.rows):
            if row.request.n_likeliest is not None:
                example = examples.select(torch.tensor([place]))
                row.log_probs = RowLogProbs(self.model.served, example, row.request.n_likeliest)

    def _allowed(self, tickets: Sequence[Ticket]) -> list[Allowance] | None:
        """Return what the caps of requests allow for each sequence; None if none has any."""
        if not any(ticket.request.caps for ticket in tickets):
            return None
        found = list[Allowance]()
        for ticket in tickets:
            assert ticket.inputs is not None
            tokens = ticket.inputs.input_tokens
            found += allowances(ticket.request.caps, tokens, self.model.prices) or [UNLIMITED] * len(tokens)
        return found

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        self.tickets.remove(ticket)
        self.refused.append((ticket, error))

    def _leave(self) -> None:
        """Let requests leave that need nothing more, and their sequences with them."""
        self.tickets = [ticket for ticket in self.tickets if ticket.is_active]
        needed = {row.plan_row for ticket in self.tickets for row in ticket.rows if not row.is_finished}
        unneeded = [row for row in self.plan.rows if row not in needed]
        if unneeded:
            self.plan.drop(unneeded)

    def _note_failure(self) -> None:
        """Mark the rows that the expert failed in this turn, and log their requests."""
        failure, lost = self.guard.take_failure(), list[str | None]()
        if failure is None:
            return
        for ticket in self.tickets:
            # Of hand-offs, those that were not asked for are not over.
            all_fail = isinstance(self.guard, FallbackRows)
            rows = [row for row in ticket.rows if not row.is_finished and (all_fail or row.plan_row.is_over)]
            for row in rows:
                row.lost = reason_of(failure)
            lost += [ticket.request_id] * bool(rows)
        level = logging.DEBUG if isinstance(failure, ExpertUnavailable) else logging.WARNING
        fields = {"request_ids": lost}
        log.log(level, "the expert failed, the predictor finished: %r", failure, extra={"fields": fields})
