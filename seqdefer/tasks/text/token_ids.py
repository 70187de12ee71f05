"""Token ids exchanged with a completions endpoint, in the form of vLLM.

The prompt is a list of ids. With `prompt_logprobs` 1 the response names the model's likeliest token at every position
of the prompt, and with `return_token_ids` the ids of what it wrote after it. So one call tells the model's tokens after
every prefix of a text. Entry i of `prompt_logprobs` is about the token at index i, given those before it:

    [null, {"312": {"logprob": -3.1, "rank": 42, "decoded_token": " the"}, "11": {"logprob": -0.2, "rank": 1, ...}}]

Ids mean the same on both sides only if the tokenizers are equal, which `find_obstacle` checks with one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seqdefer.remote.client import EndpointClient, EndpointCompletion, EndpointError, EndpointRequest

PROBED_IDS, LAST_IDS = 96, 8  # of the vocabulary, compared before ids are trusted
NOT_UNDERSTOOD = (400, 422)  # statuses of servers that do not take ids, or not these
REPLACEMENT = "\ufffd"  # decodes a part of a letter

Tokens = tuple[int, ...]
Place = tuple[Tokens, Tokens]  # a document, and the tokens written so far
Answers = dict[Place, int]  # the token that an expert names there


@dataclass(frozen=True)
class NamedTokens:
    """The server's likeliest tokens along a prompt."""

    within: Tokens  # at the positions 1 to n - 1 of a prompt of n ids; empty if they were not requested
    after: Tokens  # what it wrote after the prompt


def ids_request(prompt: Sequence[int], max_tokens: int, *, within: bool) -> EndpointRequest:
    """Return a request to continue ids, and to name the likeliest tokens within them. The repetition penalty that a
    server may have as a default is switched off: what it writes would not be the likeliest token."""
    options = {"return_token_ids": True, "repetition_penalty": 1.0, **({"prompt_logprobs": 1} if within else {})}
    return EndpointRequest(list(prompt), max_tokens, options)


def parse_ids(request: EndpointRequest, answer: EndpointCompletion) -> NamedTokens:
    """Read the answer to `ids_request`. Raises ValueError with the reason if it does not hold what was requested."""
    after = answer.choice.get("token_ids")
    if not isinstance(after, list) or not all(isinstance(token, int) for token in after):
        raise ValueError("its responses have no token_ids")
    entries = _entries(request, answer) if "prompt_logprobs" in request.options else []
    return NamedTokens(tuple(_likeliest(entry) for entry in entries), tuple(after))


def _entries(request: EndpointRequest, answer: EndpointCompletion) -> list[Any]:
    """Return the entries of all ids of a prompt but the first, which has none."""
    entries = answer.choice.get("prompt_logprobs")
    if not isinstance(entries, list):
        raise ValueError("its responses have no prompt_logprobs")
    if len(entries) != len(request.prompt):
        raise ValueError(f"it returned prompt_logprobs of {len(entries)} tokens for a prompt of {len(request.prompt)}")
    return entries[1:]


def _likeliest(entry: Any) -> int:
    ranked = entry.items() if isinstance(entry, Mapping) else ()
    for token, about in ranked:
        if isinstance(about, Mapping) and about.get("rank") == 1 and token.isdecimal():
            return int(token)
    raise ValueError(f"it returned prompt_logprobs without a token of rank 1: {entry!r:.80}")


async def find_obstacle(client: EndpointClient, tokenizer: Any) -> str:
    """Return why ids cannot be exchanged with this server, or "" if they can. Makes one call."""
    ids = _probed_ids(tokenizer)
    request = ids_request([ids[0], *ids], 1, within=True)
    try:
        (answer,) = await client.complete([request])
        parse_ids(request, answer)
        entries = _entries(request, answer)
    except EndpointError as error:
        if error.status not in NOT_UNDERSTOOD:
            raise
        return f"it refused a prompt of token ids (status {error.status}, {error.reason})"
    except ValueError as error:
        return str(error)
    for token, entry in zip(ids, entries, strict=True):
        own, theirs = _word(tokenizer, token), entry.get(str(token), {}).get("decoded_token")
        if not isinstance(theirs, str):
            return "its prompt_logprobs have no decoded_token, so vocabularies cannot be compared"
        if own.strip() != theirs.strip():  # some tokenizers drop the spaces of a single token
            return f"it has another vocabulary: token {token} is {theirs!r:.40}, the predictor's is {own!r:.40}"
    return ""


def _probed_ids(tokenizer: Any) -> list[int]:
    """Return ids from all over the vocabulary, and the last, which are often special or added. Parts of letters and
    spaces are left out: servers show them in different ways."""
    every = range(len(tokenizer))
    chosen = {*every[:: max(1, len(every) // PROBED_IDS)], *every[-LAST_IDS:]}
    return [token for token in sorted(chosen) if _is_comparable(_word(tokenizer, token))]


def _is_comparable(word: str) -> bool:
    return bool(word.strip()) and REPLACEMENT not in word


def _word(tokenizer: Any, token: int) -> str:
    word: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    return word
