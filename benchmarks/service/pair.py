"""A small text pair with random weights, fitted by `seqdefer fit`, and the answers that it must give.

Two GPT-2s with a vocabulary of words, or one and an expert behind an endpoint. The weights are large enough for every
input to get a text of its own, so that answers that are mixed up are noticed.
"""

from __future__ import annotations

import io
import json
import random
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.service.clients import Case
from benchmarks.service.expert import END, MODEL, WORDS
from seqdefer import cli
from seqdefer.engine.interleaved import roll_out
from seqdefer.interfaces import Policy
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.tasks.text.models import transformers
from seqdefer.types import EXPERT, Proposal

LENGTH, INPUT_WORDS = 16, 12
N_DOCUMENTS = 48  # to fit on
WIDTH, LAYERS = 64, {"predictor": 2, "expert": 6}
NAME = "pair"


def make_pair(folder: Path, device: str, expert_url: str = "") -> Path:
    """Make and fit a pair in `folder`; return the folder to serve. The expert is a model, or at `expert_url`."""
    for name in ("predictor",) if expert_url else ("predictor", "expert"):
        transformers().utils.logging.disable_progress_bar()
        _random_model(LAYERS[name], seed=LAYERS[name]).save_pretrained(folder / name)
        _tokenizer().save_pretrained(folder / name)
    lines = [{"document": one, "summary": " ".join(one.split()[:4])} for one in documents(N_DOCUMENTS, seed=1)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    remote = (
        ["--expert-model", MODEL, "--expert-by-token", "--expert-at-once", "32", "--expert-retries", "1"]
        if expert_url
        else []
    )
    command = [
        "fit", "text", "--predictor", str(folder / "predictor"),
        "--expert", expert_url or str(folder / "expert"), *remote, "--train", str(folder / "train.jsonl"),
        "--length", str(LENGTH), "--train-documents", "32", "--validation-documents", "16",
        "--method", "TokenwiseModel", "--device", device, "--quiet", "--out", str(folder / NAME),
    ]  # fmt: skip
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = cli.main(command)
    if status:
        raise RuntimeError(f"the pair was not fitted: {printed.getvalue().strip()[-500:]}")
    return folder / NAME


def documents(n: int, seed: int) -> list[str]:
    """Return texts of random words."""
    chance = random.Random(seed)
    return [" ".join(chance.choice(WORDS[3:]) for _ in range(chance.randint(2, INPUT_WORDS))) for _ in range(n)]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers().PreTrainedTokenizerFast(tokenizer_object=tokens, **special)


def _random_model(n_layers: int, seed: int) -> Any:
    config = transformers().GPT2Config(
        vocab_size=len(WORDS), n_embd=WIDTH, n_layer=n_layers, n_head=4, n_positions=64, bos_token_id=END,
        eos_token_id=END, tie_word_embeddings=False,
    )  # fmt: skip
    model, generator = transformers().GPT2LMHeadModel(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                scale = 1.0 if "wte" in name or "wpe" in name else 0.2
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
        model.get_output_embeddings().weight[END] *= 1.5  # some texts end early
    return model.eval()


# -- answers -------------------------------------------------------------------------------------------------------


class ByAuthors(Policy[Tensor]):
    """Defers the tokens that `authors` (n, L) names as the expert's."""

    def __init__(self, authors: Tensor) -> None:
        self.authors = authors

    def start(self, context: Tensor) -> Tensor:
        return self.authors

    def decide(self, state: Tensor, position: int | Tensor, proposal: Proposal) -> tuple[Tensor, Tensor, Tensor]:
        return state[:, position].float(), state[:, position] == EXPERT, state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]


def cases_of(model: DeferringModel, prompts: Sequence[str], budget: float, *, may_fail: bool = False) -> list[Case]:
    """Return requests with the texts of `generate`; with `may_fail`, also what is written if the expert fails."""
    made = []
    for prompt in prompts:
        written = model.generate([prompt], budget)
        degraded = _degraded_texts(model, prompt, written.rollout.authors[0]) if may_fail else ()
        made.append(Case(prompt, budget, written.outputs[0], degraded))
    return made


def _degraded_texts(model: DeferringModel, prompt: str, authors: Tensor) -> tuple[str, ...]:
    """Return the texts of an expert that fails at one of the places that it is asked about, and never comes back: from
    there on, the predictor writes."""
    failures = [place for place, author in enumerate(authors.tolist()) if author == EXPERT]
    if not failures:
        return ()
    patterns = torch.stack([authors.masked_fill(torch.arange(len(authors)) >= place, 0) for place in failures])
    served = model.served
    examples = served.codec.encode([prompt] * len(failures))
    sequences = roll_out(served.predictor, served.expert, examples, ByAuthors(patterns), served.spec).sequences
    return tuple(dict.fromkeys(served.codec.text(row) for row in _tokens(sequences)))


def _tokens(sequences: Any) -> list[list[int]]:
    both = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
    return [tokens[:length] for tokens, length in both]
