"""A tiny text pair whose expert is behind an endpoint: vLLM's protocol spoken by the same model, or a scripted one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra 'text'")

import httpx
from servers import COMPLETIONS, LENGTH, documents, with_parts, with_random_rejector
from tiny_models import tiny_text_model

from seqdefer.model.deferring_model import DeferringModel
from seqdefer.remote.client import Endpoint, EndpointClient
from seqdefer.tasks.text.pairs import MixedPair, TextPair
from seqdefer.tasks.text.remote import PROMPT
from seqdefer.tasks.text.task import TextOptions, codec_of


@cache
def local_model() -> DeferringModel:
    """The pair with both models here: the oracle. Shared: do not change it."""
    pair = TextPair.of(tiny_text_model("gpt2", 1, 1), tiny_text_model("gpt2", 2, 6))
    return with_random_rejector(pair, codec_of(TextOptions(length=LENGTH, input_tokens=16), pair), documents(24))


def remote_model(url: str, **patience: Any) -> DeferringModel:
    """The same pair with its expert at `url`."""
    predictor = local_model().served.predictor.model  # type: ignore[attr-defined]
    client = EndpointClient(Endpoint(url, "toy", **patience))
    return with_parts(local_model(), expert=MixedPair.of_remote(predictor, client, prompt=PROMPT, by_token=True).expert)


async def post_all(address: str, prompts: Sequence[str], budget: float, seconds: float = 120.0) -> list[Any]:
    """Send all requests at once; return responses, and exceptions of those that got none."""
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(timeout=seconds, limits=limits) as http:
        bodies = [{"model": f"toy@{budget}", "prompt": one} for one in prompts]
        posts = (http.post(address + COMPLETIONS, json=body) for body in bodies)
        return await asyncio.gather(*posts, return_exceptions=True)
