"""Watched cross-attention is the attention that the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'speech'")

from tiny_whisper import clips, tiny_speech_model, tiny_whisper, tokenizer

from seqdefer.tasks.speech.attention import N_NOTED, chosen_heads, summarize
from seqdefer.tasks.speech.models import speech_model

pytestmark = pytest.mark.usefixtures("one_thread")


def expected(model: Any, network: Any, inputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return what written-out attention says at all positions. (R, T, 3)"""
    model.set_attn_implementation("eager")
    ids = torch.cat([torch.tensor(network.prompt).expand(len(inputs), -1), tokens], 1)
    with torch.no_grad():
        output = model(network.features(inputs), decoder_input_ids=ids, output_attentions=True)
    model.set_attn_implementation("sdpa")
    chosen = [output.cross_attentions[layer][:, heads] for layer, heads in network.heads.items()]
    return summarize(torch.cat(chosen, 1).log())


@pytest.mark.parametrize("named", [None, [[0, 1], [1, 0]], [[1, 0], [1, 1], [7, 0]]])
def test_watched_weights_are_those_of_written_out_attention(named: list[list[int]] | None) -> None:
    model, inputs = tiny_whisper(2, 1), clips(3).inputs
    model.generation_config.alignment_heads = named
    network = speech_model(model, tokenizer(), language="en", is_watched=True).network
    tokens = torch.randint(3, 60, (3, 5), generator=torch.Generator().manual_seed(0))
    want = expected(model, network, inputs, tokens)[:, -6:]  # before the first token, after each
    with torch.no_grad():
        every = network.prefill(inputs, tokens, says_all=True)
        torch.testing.assert_close(every.hidden[..., -N_NOTED:], want, rtol=1e-4, atol=1e-4)
        run = network.prefill(inputs, tokens[:, :2])
        torch.testing.assert_close(run.hidden[:, -N_NOTED:], want[:, 2], rtol=1e-4, atol=1e-4)
        run = network.extend(run.cache, tokens[:, 2:])
        torch.testing.assert_close(run.hidden[:, -N_NOTED:], want[:, 5], rtol=1e-4, atol=1e-4)


def test_rows_that_share_a_clip_are_watched_each() -> None:
    network, inputs = tiny_speech_model(2, 1, is_watched=True).network, clips(1).inputs
    tokens = torch.tensor([[3], [4], [6]])
    with torch.no_grad():
        run = network.prefill(inputs, tokens[:1, :0])
        shared = network.extend(run.cache.take(torch.zeros(3, dtype=torch.long), 0), tokens)
        alone = torch.cat([network.extend(run.cache, token[None]).hidden for token in tokens])
    torch.testing.assert_close(shared.hidden, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("says_all", [False, True])
def test_rows_of_several_clips_hear_their_own(says_all: bool) -> None:
    network, inputs = tiny_speech_model(2, 1, is_watched=True).network, clips(3).inputs
    owners, tokens = torch.tensor([2, 0, 2, 1, 2]), torch.tensor([[3, 5], [4, 5], [6, 7], [3, 9], [8, 4]])
    with torch.no_grad():
        cache = network.prefill(inputs, tokens[:3, :0]).cache
        shared = network.extend(cache.take(owners, 0), tokens, says_all=says_all)
        every = [
            network.extend(cache.take(owner[None], 0), token[None], says_all=says_all)
            for owner, token in zip(owners, tokens, strict=True)
        ]
    torch.testing.assert_close(shared.hidden, torch.cat([one.hidden for one in every]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shared.logits, torch.cat([one.logits for one in every]), rtol=1e-4, atol=1e-4)
    assert torch.equal(shared.cache.documents, owners)


def test_heads_are_those_named_of_the_last_layers() -> None:
    model = tiny_whisper(2, 0)
    assert chosen_heads(model, None) == {1: [0, 1]}
    assert chosen_heads(model, [[0, 1], [1, 1], [1, 0]]) == {0: [1], 1: [0, 1]}
    assert chosen_heads(model, [[5, 0], [0, 9]]) == {1: [0, 1]}, "heads that the model does not have"


def test_sharp_and_flat_attention() -> None:
    sharp, flat = torch.full((100,), 1e-9), torch.full((100,), 0.01)
    sharp[30] = 1
    peak, spread, place = summarize(sharp.log().expand(1, 2, 1, 100))[0, 0].tolist()
    assert (peak, spread, place) == pytest.approx((0, 0, 30), abs=1e-4)
    low, wide, middle = summarize(flat.log().expand(1, 2, 1, 100))[0, 0].tolist()
    assert (low, wide, middle) == pytest.approx((-4.60517, 4.60517, 49.5))


def test_heads_that_agree_outweigh_one_that_does_not() -> None:
    weights = torch.full((1, 3, 1, 100), 0.005)
    weights[0, 0, 0, 20] = weights[0, 1, 0, 20] = weights[0, 2, 0, 80] = 0.505
    assert float(summarize(weights.log())[0, 0, 2]) == pytest.approx(20, abs=1)
