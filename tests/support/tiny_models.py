"""Tiny random Hugging Face models with a tokenizer of 60 words, documents and tasks for them, and slow oracles of what
they write."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqdefer.engine.interleaved import roll_out
from seqdefer.interfaces import Policy, SplitName, Task
from seqdefer.tasks.text.data import Document
from seqdefer.tasks.text.models import TextModel, text_model
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.task import TextOptions, TextTask
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec

N_WORDS = 60
LENGTH = 8  # tokens to write
ENCODER_DECODERS = ("t5", "t5-tied", "mt5", "bart", "pegasus")
DECODERS = ("gpt2", "llama", "qwen2", "qwen3")
FAMILIES = ENCODER_DECODERS + DECODERS
SOME_FAMILIES = ("t5", "bart", "gpt2", "llama")  # one of each kind of position
SEEDS = {"pegasus": (13, 10)}  # the default seeds give sequences of one length


@cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, N_WORDS)}}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def tiny(family: str, n_layers: int, seed: int) -> Any:
    """Return a model whose greedy sequences differ from input to input and often end early."""
    import transformers as hf

    common: dict[str, Any] = {"vocab_size": N_WORDS, "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": n_layers, "decoder_start_token_id": 0}
    bart = {
        "tie_word_embeddings": True, "d_model": 16, "max_position_embeddings": 40,
        "encoder_layers": n_layers, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_layers": n_layers, "decoder_attention_heads": 2, "decoder_ffn_dim": 32,
    }  # fmt: skip
    llama = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": n_layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    gpt2 = {"n_embd": 16, "n_layer": n_layers, "n_head": 2, "n_positions": 64, "bos_token_id": 1}
    match family:
        case "t5":
            model = _untied(hf.T5ForConditionalGeneration(hf.T5Config(**common, **t5)))
        case "t5-tied":  # scales the input of the output layer
            model = hf.T5ForConditionalGeneration(hf.T5Config(**{**common, "tie_word_embeddings": True}, **t5))
        case "mt5":
            model = hf.MT5ForConditionalGeneration(hf.MT5Config(**common, **t5))
        case "bart":  # starts with the end token and forces the first token
            rules = {"decoder_start_token_id": 1, "forced_eos_token_id": None}
            model = hf.BartForConditionalGeneration(hf.BartConfig(**{**common, **bart, **rules}))
            model.generation_config.forced_bos_token_id = 5
        case "pegasus":
            rules = {"decoder_start_token_id": 0, "forced_eos_token_id": None}
            model = hf.PegasusForConditionalGeneration(hf.PegasusConfig(**{**common, **bart, **rules}))
        case "gpt2":  # pads with its end token
            model = hf.GPT2LMHeadModel(hf.GPT2Config(**{**common, "pad_token_id": None}, **gpt2))
        case "llama":  # has three end tokens
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**common, "eos_token_id": [1, 7, 8]}, **llama))
        case "qwen2":
            model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**common, **llama))
        case "qwen3":  # norms queries and keys
            model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**common, **llama, head_dim=8))
        case _:
            raise AssertionError(family)
    return lively(model, seed)


def _untied(model: Any) -> Any:
    """Untie the output layer, as in FLAN-T5; recent releases of T5Config always tie it."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return model


def lively(model: Any, seed: int) -> Any:
    """Draw larger weights, so that the output depends on the input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                scale = 1.0 if any(part in name for part in ("shared", "embed", "wte", "wpe")) else 0.35
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        head = model.get_output_embeddings().weight
        head[1] *= 2  # the end token is proposed more often than others
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias += torch.randn(model.final_logits_bias.shape, generator=generator)
            model.final_logits_bias[:, 1] += 4
    return model.eval()


@cache
def tiny_pair(family: str) -> TextPair:
    """Return a cached pair. Shared: do not modify."""
    small, large = SEEDS.get(family, (1, 6))
    return TextPair.of(tiny_text_model(family, 1, small), tiny_text_model(family, 2, large))


def tiny_text_model(family: str, n_layers: int, seed: int, *, cache_bytes: int = 0) -> TextModel:
    return text_model(tiny(family, n_layers, seed), tokenizer(), family, cache_bytes=cache_bytes)


def documents(n: int, longest: int = 12, seed: int = 0) -> Examples:
    """Return documents of random words and different lengths."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(3, N_WORDS, (n, longest), generator=generator)
    lengths = torch.randint(1, longest + 1, (n, 1), generator=generator)
    inputs = inputs.masked_fill(torch.arange(longest) >= lengths, PADDING)
    targets = torch.randint(3, N_WORDS, (n, 8), generator=generator)
    return Examples(inputs, targets, torch.arange(n))


def generated(model: TextModel, inputs: Tensor, length: int, prefixes: Tensor | None = None) -> list[list[int]]:
    """Return what `generate` of transformers writes, prefixes (B, T) included: at most `length` tokens, up to the end.

    Every end token counts as the first."""
    n = len(inputs)
    prefixes = torch.zeros(n, 0, dtype=torch.long) if prefixes is None else prefixes
    options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "max_new_tokens": length - prefixes.shape[1]}
    if model.is_encoder_decoder:
        start = torch.full((n, 1), model.model.generation_config.decoder_start_token_id)
        given = {
            "input_ids": inputs.clamp(min=0),
            "attention_mask": (inputs != PADDING).long(),
            "decoder_input_ids": torch.cat([start, prefixes], 1),
        }
        written = model.model.generate(**given, **options)[:, 1:]
    else:
        rows = [row[row != PADDING] for row in inputs]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
        given = {
            "input_ids": torch.cat([padded, prefixes], 1),
            "attention_mask": torch.cat([mask, prefixes * 0 + 1], 1),
        }
        written = model.model.generate(**given, **options)[:, padded.shape[1] :]
    return [_up_to_end(row, model.ends) for row in written.tolist()]


def _up_to_end(row: list[int], ends: tuple[int, ...]) -> list[int]:
    for place, token in enumerate(row):
        if token in ends:
            return [*row[:place], ends[0]]
    return row


# -- pairs and what they write -------------------------------------------------------------------------------------


class Decided(Policy[Tensor]):
    """A policy that defers the tokens in `pattern` (n, L)."""

    def __init__(self, pattern: Tensor) -> None:
        self.pattern = pattern

    def start(self, context: Tensor) -> Tensor:
        return self.pattern

    def decide(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Tensor, Tensor, Tensor]:
        return state[:, position].float(), state[:, position], state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]


class PairTask(Task):
    """A pair with losses: tokens that are not in the target."""

    name, loss_unit = "pair", "share of tokens"

    def __init__(self, pair: TextPair, examples: Examples, length: int) -> None:
        self.predictor, self.expert, self.examples = pair.predictor, pair.expert, examples
        self.spec = SequenceSpec(length, pair.predictor.end)

    def split(self, name: SplitName) -> Examples:
        third = {"train": 0, "validation": 1, "test": 2}[name]
        return self.examples.select(torch.arange(third, len(self.examples), 3))

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        wrong = (sequences.tokens[:, :, None] != examples.targets[:, None, :]).all(2) & sequences.mask()
        return wrong.sum(1) / sequences.lengths

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return (examples.targets != tokens[:, None]).all(1).float()


def spec_of(pair: TextPair, length: int = LENGTH) -> SequenceSpec:
    return SequenceSpec(length, pair.predictor.end)


def rows_of(sequences: Sequences) -> list[list[int]]:
    both = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
    return [tokens[:length] for tokens, length in both]


def written(pair: TextPair, examples: Examples, policy: Policy[Any], length: int = LENGTH) -> list[list[int]]:
    return rows_of(roll_out(pair.predictor, pair.expert, examples, policy, spec_of(pair, length)).sequences)


def random_pattern(n: int, length: int = LENGTH, seed: int = 0, share: float = 0.4) -> Tensor:
    return torch.rand(n, length, generator=torch.Generator().manual_seed(seed)) < share


@torch.no_grad()
def full_pass(model: TextModel, one: Tensor, prefix: list[int]) -> tuple[Tensor, Tensor]:
    """Return logits (V,) and the input of the output layer (H,) after a prefix: one row, no cache, no padding."""
    inputs, after = one[one != PADDING][None], torch.tensor([prefix], dtype=torch.long)
    options = {"use_cache": False, "output_hidden_states": True}
    if not model.is_encoder_decoder:
        output = model.model(input_ids=torch.cat([inputs, after], 1), **options)
        return output.logits[0, -1], output.hidden_states[-1][0, -1]
    start = torch.tensor([[model.model.generation_config.decoder_start_token_id]])
    output = model.model(input_ids=inputs, decoder_input_ids=torch.cat([start, after], 1), **options)
    scale = model.model.config.hidden_size**-0.5 if model.name == "t5-tied" else 1.0
    return output.logits[0, -1], output.decoder_hidden_states[-1][0, -1] * scale


def slow(pair: TextPair, one: Tensor, decisions: list[bool]) -> list[int]:
    """Run the interleaved loop for one row without a cache."""
    tokens: list[int] = []
    for defer in decisions:
        model = (pair.expert if defer else pair.predictor).model
        token = int(full_pass(model, one, tokens)[0].argmax())
        if not tokens and model.first_token is not None:
            token = model.first_token
        tokens.append(model.ends[0] if token in model.ends else token)
        if tokens[-1] == pair.predictor.end:
            break
    return tokens


# -- documents and tasks -------------------------------------------------------------------------------------------


def words(generator: random.Random, most: int) -> str:
    return " ".join(f"w{generator.randrange(3, 60)}" for _ in range(generator.randint(1, most)))


def random_documents(n: int, seed: int = 0) -> list[Document]:
    generator = random.Random(seed)
    return [Document(str(number), words(generator, 12), words(generator, 8)) for number in range(n)]


def write_lines(path: Path, documents: Sequence[Document]) -> Path:
    lines = [json.dumps({"document": one.document, "summary": one.summary}) for one in documents]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def pair_of(family: str, shown: str = "facts") -> TextPair:
    return TextPair.of(tiny_pair(family).predictor.model, tiny_pair(family).expert.model, shown)


def task_of(pair: TextPair, documents: Sequence[Document], **options: Any) -> TextTask:
    """Return a task with a third of the documents in each split."""
    thirds = {"train": documents[::3], "validation": documents[1::3], "test": documents[2::3]}
    return TextTask("text", TextOptions(**{"rouge": "words", **options}), pair, thirds)  # type: ignore[arg-type]
