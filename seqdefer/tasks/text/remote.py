"""Remote experts behind a completions endpoint: document and tokens so far go out as one prompt, a text comes back.

A remote model has its own tokenizer. Its text is split into the predictor's tokens such that the text continues as
written and the tokens so far stay as they are. `RemoteExpert` completes a sequence in one call. It is not
deterministic: a server may answer a prompt in two ways. `seqdefer.tasks.text.remote_tokens` has the expert that names
next tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.interfaces import DraftExpert
from seqdefer.remote.client import EndpointClient, EndpointCompletion, EndpointRequest
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.token_ids import REPLACEMENT, Tokens
from seqdefer.types import Examples, Sequences, SequenceSpec

INPUT, WRITTEN = "{input}", "{written}"
PROMPT = INPUT + WRITTEN
DOCUMENTS_PER_BATCH = 4  # labelling stores answers batch by batch: an interruption loses at most one batch
CONTEXT_TOKENS = 16  # tokens before a new text that may change how it is split
ANCHORS = (".", "a", "\n")  # texts to split a new one after: some tokenizers begin every text with a space


class ExpertCallsWarning(UserWarning):
    """An endpoint will be called often, and calls may cost money."""


def check_prompt(template: str) -> None:
    if INPUT not in template or not template.endswith(WRITTEN) or template.count(WRITTEN) > 1:
        raise OptionError(
            f"--expert-prompt is {template!r:.80}; it must contain {INPUT} and end with {WRITTEN}, which is continued"
        )


@dataclass(frozen=True)
class PromptAdapter:
    """The translation from the predictor's tokens to a prompt, and from a completion back to tokens."""

    model: TextModel  # the predictor's
    end: int
    template: str = PROMPT

    def prompt(self, inputs: Tokens, written: Tokens) -> str:
        given = self._text(inputs)
        head, tail = self.head(inputs), self._text(written)
        if self.model.is_encoder_decoder:  # its output is a separate text
            is_apart = not head or not tail or head[-1].isspace() or tail[0].isspace()
            tail = tail if is_apart else f" {tail}"
        else:  # many tokenizers drop the leading space of a separate text
            whole = self._text(inputs + written)
            tail = whole[len(given) :] if whole.startswith(given) else tail
        return head + tail.rstrip(REPLACEMENT)

    def head(self, inputs: Tokens) -> str:
        """Return the prompt before anything is written."""
        return self.template.removesuffix(WRITTEN).replace(INPUT, self._text(inputs))

    def ids(self, inputs: Tokens, written: Tokens) -> Tokens:
        """Return the prompt as token ids, for a model with the predictor's vocabulary: what the predictor reads, unless
        the template adds a text of its own."""
        if self.template == PROMPT:
            return inputs + written
        return (*self.model.tokenizer(self.head(inputs), verbose=False)["input_ids"], *written)

    def tokens(self, inputs: Tokens, written: Tokens, answer: EndpointCompletion) -> list[int]:
        """Return the tokens that the answer adds, without the end token."""
        text = answer.text if answer.is_finished else answer.text.rstrip(REPLACEMENT)
        if self.model.is_encoder_decoder and not self._text(written):  # a separate text begins without a space
            text = text.lstrip()
        context = list(written if self.model.is_encoder_decoder else inputs + written)[-CONTEXT_TOKENS:]
        ids = self._split(context, text) if text else []
        return ids[: ids.index(self.end)] if self.end in ids else ids

    def _split(self, context: list[int], text: str) -> list[int]:
        """Return the first split that decodes to `text` after `context`, else one that does except for spaces (which
        some tokenizers change), else any."""
        expected, similar = self._text(context) + text, list[list[int]]()
        for ids in self._splits(context, text):
            found = self._text(context + ids)
            if found == expected:
                return ids
            if found.split() == expected.split():
                similar.append(ids)
        return similar[0] if similar else self._ids(text)

    def _splits(self, context: list[int], text: str) -> Iterator[list[int]]:
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


class RemoteExpert(DraftExpert):
    """A remote expert for whole and one-time deferral. A completion is one call; calls run concurrently."""

    deterministic = False
    waits = True
    batch_size = DOCUMENTS_PER_BATCH

    def __init__(self, adapter: PromptAdapter, client: EndpointClient) -> None:
        self.adapter, self.client = adapter, client
        endpoint = client.endpoint
        self.name = f"{endpoint.model} at {endpoint.url}"
        self.fingerprint = fingerprint("remote", endpoint.address, endpoint.model, adapter.template, adapter.end)

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        return self.client.run(self.completed(examples, prefixes, spec))

    def submit(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Future[Sequences]:
        return self.client.submit(self.completed(examples, prefixes, spec))

    async def completed(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        """Complete each sequence with one call for as many tokens as may follow; truncate the text to that many."""
        rows, inputs = unpad_sequences(prefixes), unpad_inputs(examples.inputs)
        is_over = spec.is_over(prefixes).tolist()
        places = [place for place in range(len(rows)) if not is_over[place]]
        prompts = [self.adapter.prompt(inputs[place], rows[place]) for place in places]
        lefts = [spec.length - len(rows[place]) for place in places]
        answers = await self.client.complete([EndpointRequest(*ask) for ask in zip(prompts, lefts, strict=True)])
        for place, answer in zip(places, answers, strict=True):
            written = self._with_first_token(rows[place])
            new = self.adapter.tokens(inputs[place], written, answer)
            rows[place] = (*written, *new, self.adapter.end)[: spec.length]
        return pad_sequences(rows, prefixes)

    def _with_first_token(self, written: Tokens) -> Tokens:
        first = self.adapter.model.first_token
        return written if written or first is None else (first,)

    def hand_offs(
        self, examples: Examples, drafts: Sequences, kept: Tensor, spec: SequenceSpec
    ) -> tuple[Sequences, int]:
        """Make one call for each hand-off of a draft that has not ended, all concurrently."""
        each = torch.arange(len(drafts), device=kept.device).repeat_interleave(len(kept))
        prefixes = drafts.select(each).truncate(kept.repeat(len(drafts)))
        calls = int((~spec.is_over(prefixes)).sum())
        return self.complete(examples.select(each), prefixes, spec), calls


def unpad_sequences(sequences: Sequences) -> list[Tokens]:
    pairs = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
    return [tuple(tokens[:length]) for tokens, length in pairs]


def unpad_inputs(inputs: Tensor) -> list[Tokens]:
    return [tuple(token for token in row if token != PADDING) for row in inputs.tolist()]


def pad_sequences(rows: Sequence[Tokens], like: Sequences) -> Sequences:
    """Return sequences in the shape and dtypes of `like`."""
    tokens, lengths = torch.zeros_like(like.tokens), torch.tensor([len(row) for row in rows])
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    return Sequences(tokens, lengths.to(like.lengths))
