"""Experts at an endpoint: they are sent the document and what is written so far as one text, and send back a text.

Their tokens are their own. What comes back is cut into the predictor's tokens such that the text goes on as the expert
wrote it, and the tokens that stand already stay. `RemoteExpert` completes a sequence in one call; `RemoteTokenExpert`
is called for every token. Nobody promises that such an expert says the same thing twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.interfaces import DraftExpert, NextTokenExpert
from seqdefer.remote.client import EndpointClient, EndpointCompletion, EndpointRequest
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.passes import PADDING
from seqdefer.types import Examples, Sequences, SequenceSpec

INPUT, WRITTEN = "{input}", "{written}"
PROMPT = INPUT + WRITTEN
DOCUMENTS = 4  # labelled together: when labelling is stopped, no more answers than theirs are lost
CONTEXT = 16  # tokens before a new text that may have a say in how it is cut
ANCHORS = (".", "a", "\n")  # texts to cut a new one behind: some tokenizers begin every text with a space
LETTER = 4  # tokens that a letter may take
HALF = "\ufffd"  # what half a letter is shown as

Tokens = tuple[int, ...]


class ExpertCallsWarning(UserWarning):
    """An endpoint is going to be called often, and calls may cost money."""


def check_prompt(template: str) -> None:
    if INPUT not in template or not template.endswith(WRITTEN) or template.count(WRITTEN) > 1:
        raise OptionError(
            f"the expert's prompt is {template!r:.80}; it must hold {INPUT} and end with {WRITTEN}, where it goes on"
        )


@dataclass(frozen=True)
class Script:
    """From the predictor's tokens to a prompt, and from the text that comes back to tokens."""

    model: TextModel  # the predictor's
    end: int
    template: str = PROMPT

    def prompt(self, inputs: Tokens, written: Tokens) -> str:
        given = self._text(inputs)
        head, tail = self.template.removesuffix(WRITTEN).replace(INPUT, given), self._text(written)
        if self.model.is_encoder_decoder:  # what it writes is a text by itself
            is_apart = not head or not tail or head[-1].isspace() or tail[0].isspace()
            tail = tail if is_apart else f" {tail}"
        else:  # many tokenizers drop the space that a text by itself begins with
            whole = self._text(inputs + written)
            tail = whole[len(given) :] if whole.startswith(given) else tail
        return head + tail.rstrip(HALF)

    def tokens(self, inputs: Tokens, written: Tokens, answer: EndpointCompletion) -> list[int]:
        """What the answer adds, up to the end, which is not counted."""
        text = answer.text if answer.is_finished else answer.text.rstrip(HALF)
        if self.model.is_encoder_decoder and not self._text(written):  # a text by itself begins without a space
            text = text.lstrip()
        context = list(written if self.model.is_encoder_decoder else inputs + written)[-CONTEXT:]
        ids = self._cut(context, text) if text else []
        return ids[: ids.index(self.end)] if self.end in ids else ids

    def _cut(self, context: list[int], text: str) -> list[int]:
        """The first cut that reads as it should; or does so but for spaces, which some tokenizers change; or any."""
        wanted, nearly = self._text(context) + text, list[list[int]]()
        for ids in self._cuts(context, text):
            found = self._text(context + ids)
            if found == wanted:
                return ids
            if found.split() == wanted.split():
                nearly.append(ids)
        return nearly[0] if nearly else self._ids(text)

    def _cuts(self, context: list[int], text: str) -> Iterator[list[int]]:
        for start in range(len(context) + 1):
            before = context[start:]
            ids = self._ids(self._text(before) + text)
            if ids[: len(before)] == before:
                yield ids[len(before) :]
        for anchor in ANCHORS:
            before, ids = self._ids(anchor), self._ids(anchor + text)
            if ids[: len(before)] == before:
                yield ids[len(before) :]

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.model.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


class _Remote(DraftExpert):
    """What both share: a completion is one call, and many are under way together."""

    deterministic = False
    waits = True
    batch_size = DOCUMENTS

    def __init__(self, script: Script, client: EndpointClient) -> None:
        self.script, self.client = script, client
        endpoint = client.endpoint
        self.name = f"{endpoint.model} at {endpoint.url}"
        self.fingerprint = fingerprint("remote", endpoint.address, endpoint.model, script.template, script.end)

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        """The rest of a sequence is asked for in as many tokens as may follow, of the expert's own: its text is cut at
        the last of ours, or ended where it is shorter."""
        rows, inputs = _rows(prefixes), _inputs(examples.inputs)
        is_over = spec.is_over(prefixes).tolist()
        places = [place for place in range(len(rows)) if not is_over[place]]
        prompts = [self.script.prompt(inputs[place], rows[place]) for place in places]
        lefts = [spec.length - len(rows[place]) for place in places]
        answers = self.client.complete_all([EndpointRequest(*ask) for ask in zip(prompts, lefts, strict=True)])
        for place, answer in zip(places, answers, strict=True):
            begun = self._begun(rows[place])
            new = self.script.tokens(inputs[place], begun, answer)
            rows[place] = (*begun, *new, self.script.end)[: spec.length]
        tokens, lengths = torch.zeros_like(prefixes.tokens), torch.tensor([len(row) for row in rows])
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = torch.tensor(row)
        return Sequences(tokens, lengths.to(prefixes.lengths))

    def _begun(self, written: Tokens) -> Tokens:
        """With the token that all sequences of the predictor begin with, where there is one."""
        first = self.script.model.first
        return written if written or first is None else (first,)

    def hand_offs(
        self, examples: Examples, drafts: Sequences, kept: Tensor, spec: SequenceSpec
    ) -> tuple[Sequences, int]:
        """One call for each place where a draft goes on, all of them under way together."""
        each = torch.arange(len(drafts), device=kept.device).repeat_interleave(len(kept))
        prefixes = drafts.select(each).truncate(kept.repeat(len(drafts)))
        calls = int((~spec.is_over(prefixes)).sum())
        return self.complete(examples.select(each), prefixes, spec), calls


class RemoteExpert(_Remote):
    """Completes; for whole and one-time deferral."""


@dataclass(frozen=True)
class Asked:
    """Documents and what is written after them. The `answers` so far are shared by all states of one start: whoever
    comes to the same place again is not told something else."""

    inputs: list[Tokens]
    written: list[Tokens]
    answers: dict[tuple[Tokens, Tokens], int]


class RemoteTokenExpert(_Remote, NextTokenExpert[Asked]):
    """Names next tokens too, one call each."""

    def start(self, examples: Examples) -> Asked:
        inputs = _inputs(examples.inputs)
        return Asked(inputs, [()] * len(inputs), {})

    def next(self, state: Asked, rows: Tensor) -> tuple[Tensor, Asked]:
        places = [(state.inputs[row], state.written[row]) for row in rows.tolist()]
        new = [place for place in dict.fromkeys(places) if place not in state.answers]
        state.answers.update(zip(new, self._named(new), strict=True))
        return torch.tensor([state.answers[place] for place in places], device=rows.device), state

    def append(self, state: Asked, tokens: Tensor) -> Asked:
        written = [(*row, token) for row, token in zip(state.written, tokens.tolist(), strict=True)]
        return replace(state, written=written)

    def select(self, state: Asked, rows: Tensor) -> Asked:
        chosen = rows.tolist()
        return replace(
            state, inputs=[state.inputs[row] for row in chosen], written=[state.written[row] for row in chosen]
        )

    def _named(self, places: Sequence[tuple[Tokens, Tokens]]) -> list[int]:
        """The first of our tokens in one of the expert's. Where that makes none (half a letter, a space that our
        tokenizer does not know), in a few."""
        first, named = self.script.model.first, dict[int, int]()
        if first is not None:
            named = {place: first for place, (_, written) in enumerate(places) if not written}
        for n_tokens in (1, LETTER):
            unnamed = [place for place in range(len(places)) if place not in named]
            asks = [EndpointRequest(self.script.prompt(*places[place]), n_tokens) for place in unnamed]
            for place, answer in zip(unnamed, self.client.complete_all(asks), strict=True):
                tokens = self.script.tokens(*places[place], answer)
                if tokens or answer.is_finished or n_tokens == LETTER:
                    named[place] = tokens[0] if tokens else self.script.end
        return [named[place] for place in range(len(places))]


def _rows(sequences: Sequences) -> list[Tokens]:
    pairs = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
    return [tuple(tokens[:length]) for tokens, length in pairs]


def _inputs(inputs: Tensor) -> list[Tokens]:
    return [tuple(token for token in row if token != PADDING) for row in inputs.tolist()]
