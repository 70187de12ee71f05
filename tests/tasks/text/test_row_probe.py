"""Models whose rows cannot stand at their own positions are detected, and write the same tokens all the same."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
from thresholds import interleaved
from tiny_models import FAMILIES, LENGTH, N_WORDS, documents, lively, tiny_pair, tiny_text_model, tokenizer

from seqdefer.budgets.policies import Threshold
from seqdefer.engine.pace import FixedPace, Pace
from seqdefer.engine.speculative import run_all, speculative_loop
from seqdefer.rejectors.confidence import Confidence
from seqdefer.tasks.text import pairs
from seqdefer.tasks.text.models import TextModel, text_model
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.tasks.text.row_probe import EXACT, HALF, probe, rows_stand_apart
from seqdefer.types import Rollout, Sequences, SequenceSpec

pytest.importorskip("transformers", reason="needs the extra 'text'")

COMMON = {"vocab_size": N_WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": False}
LLAMA = {
    "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
GPT = {"hidden_size": 16, "num_attention_heads": 4}
BART = {
    "tie_word_embeddings": True, "d_model": 16, "max_position_embeddings": 40, "decoder_start_token_id": 0,
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
}  # fmt: skip
# The name in transformers and what its configuration has besides; then why its rows cannot stand apart, if so.
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("Bloom", {"hidden_size": 16, "n_head": 2}, "takes no positions"),
    "mpt": ("Mpt", {"d_model": 16, "n_heads": 4, "max_seq_len": 64}, "takes no positions"),
    "falcon-alibi": ("Falcon", {**GPT, "alibi": True}, "fails"),
    "falcon": ("Falcon", GPT, ""),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 4}, "sliding_window is 4"),
    "mistral-long": ("Mistral", {**LLAMA, "sliding_window": 16}, "sliding_window is 16"),
    "mistral-longest": ("Mistral", {**LLAMA, "sliding_window": 64}, ""),
    "gpt-neo": ("GPTNeo", {"hidden_size": 16, "num_heads": 2, "window_size": 4}, "window_size is 4"),
    "gemma2": ("Gemma2", {**LLAMA, "head_dim": 4, "sliding_window": 4}, "sliding_window is 4"),
    "qwen2-dynamic": ("Qwen2", {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "is dynamic"),
    "phi": ("Phi", LLAMA, ""),
    "opt": ("OPT", {**GPT, "ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 64}, ""),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4}, ""),
    "m2m100": ("M2M100", BART, "of their spread"),
}


@cache
def other(name: str, n_layers: int, seed: int) -> TextModel:
    import transformers as hf

    kind, options, _ = OTHERS[name]
    layers = {"decoder_layers" if kind == "M2M100" else "num_hidden_layers": n_layers}
    if kind == "GPTNeo":
        layers = {"num_layers": n_layers, "attention_types": [[["local"], n_layers]]}
    config = getattr(hf, f"{kind}Config")(**{**COMMON, **options, **layers})
    model = getattr(hf, f"{kind}For{'ConditionalGeneration' if kind == 'M2M100' else 'CausalLM'}")(config)
    return text_model(lively(model, seed), tokenizer(), name)


@cache
def other_pair(name: str) -> TextPair:
    return TextPair.of(other(name, 1, 1), other(name, 2, 6))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_usual_models_stand_apart(family: str) -> None:
    pair = tiny_pair(family)
    assert pair.predictor.rows() is not None
    assert pair.expert.rows() is not None


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_detected_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "seqdefer")
    expert, why = TextPair.of(other(name, 1, 1), other(name, 2, 6)).expert, OTHERS[name][2]
    for _ in range(2):
        assert (expert.rows() is None) == bool(why)
    assert [record.levelno for record in caplog.records] == [logging.INFO] * bool(why)
    assert why in caplog.text
    assert not why or f"rows of {name} cannot stand" in caplog.text


@cache
def written(name: str) -> dict[float, Rollout]:
    pair = other_pair(name)
    return interleaved(pair.predictor, pair.expert, documents(5), SequenceSpec(LENGTH, pair.predictor.end))


@pytest.mark.parametrize("ahead", [1, 3, None])
@pytest.mark.parametrize("name", OTHERS)
def test_speculation_writes_what_the_interleaved_loop_writes(name: str, ahead: int | None) -> None:
    pair, examples = other_pair(name), documents(5)
    spec = SequenceSpec(LENGTH, pair.predictor.end)
    for threshold, expected in written(name).items():
        policy, pace = Threshold(Confidence(), threshold), Pace() if ahead is None else FixedPace(ahead)
        found = run_all(speculative_loop(pair.predictor, pair.expert, policy, spec, pace), examples, at_once=3)
        assert torch.equal(found.sequences.tokens, expected.sequences.tokens)
        assert torch.equal(found.authors, expected.authors)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, EXACT), (torch.bfloat16, HALF)])
def test_a_model_that_ignores_positions_is_detected(dtype: torch.dtype, allowed: float) -> None:
    """Also one whose configuration and signature say nothing."""
    network = tiny_text_model("llama", 2, seed=0).network
    network.model.to(dtype)
    assert probe(network) < allowed / 10
    assert rows_stand_apart(network, "llama")
    forward = network.model.forward
    network.model.forward = lambda **given: forward(**{**given, "position_ids": None})
    assert probe(network) > 4 * allowed
    assert not rows_stand_apart(network, "llama")


class OnGpu(str):
    """A device that says it is a GPU, and is none."""

    type = "cuda"


@pytest.mark.parametrize("name", ["mistral", "phi"])
def test_completion_on_a_gpu_uses_rows_only_where_they_stand_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expert, examples, calls = TextPair.of(other(name, 1, 1), other(name, 2, 6)).expert, documents(4), list[int]()
    blank, spec = torch.zeros(4, LENGTH, dtype=torch.long), SequenceSpec(LENGTH, expert.end)
    expected = expert.complete(examples, Sequences(blank, blank[:, 0]), spec)
    complete_rows = pairs.complete_rows
    monkeypatch.setattr(pairs, "complete_rows", lambda *given: calls.append(1) or complete_rows(*given))
    expert.device = OnGpu("cpu")  # type: ignore[assignment]
    found = expert.complete(examples, Sequences(blank, blank[:, 0]), spec)
    assert torch.equal(found.tokens * found.mask(), expected.tokens * expected.mask())
    assert len(calls) == (name == "phi")
