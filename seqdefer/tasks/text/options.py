"""Options of the text tasks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from seqdefer.errors import OptionError, require_known, unknown
from seqdefer.remote.client import Endpoint, check_url, is_url
from seqdefer.tasks.common.metrics import METRIC_NAMES
from seqdefer.tasks.common.options import check_ranges, option
from seqdefer.tasks.text.given import FUNCTION
from seqdefer.tasks.text.loading import DTYPES
from seqdefer.tasks.text.pairs import FEATURE_SETS
from seqdefer.tasks.text.remote import PROMPT, check_prompt
from seqdefer.tasks.text.token_losses import TOKEN_LOSSES

ROUGE = ("words", "ids")
RANGES = {
    "length": (1, 4096),
    "input_tokens": (1, 10**6),
    "train_documents": (1, 10**9),
    "validation_documents": (1, 10**9),
    "test_documents": (0, 10**9),
    "seed": (0, 2**63 - 1),
    "expert_seconds": (0, 3600),
    "expert_retries": (0, 100),
    "expert_at_once": (1, 256),
}


@dataclass(frozen=True)
class TextOptions:
    """Options of a text task, which are also its command-line options."""

    usual_options: ClassVar = (
        "predictor", "expert", "train", "test", "document_field", "summary_field", "metric", "prefix", "suffix",
        "length", "input_tokens", "dtype", "train_documents", "test_documents", "expert_model",
    )  # fmt: skip
    test_options: ClassVar = ("test", "test_documents")
    choices: ClassVar = {"rouge": ROUGE, "shown": FEATURE_SETS, "token_loss": TOKEN_LOSSES, "dtype": DTYPES}
    predictor: str = option("", "the small model: a name on the Hugging Face Hub, or a folder", is_path=True)
    expert: str = option(
        "",
        "the large model: a name on the Hub or a folder (same vocabulary), https://HOST/v1 (any), or a plug-in's name",
        is_path=True,
    )
    train: str = option(
        "", "documents to fit rejectors on: JSONL, plain or gzip, or a dataset's NAME[:CONFIG][/SPLIT]", is_path=True
    )
    test: str | None = option(
        None, "documents to report on, in the same form; without it, a part of --train", is_path=True
    )
    document_field: str = option("document", "field of the data that holds the text to read")
    summary_field: str = option("summary", "field of the data that holds the reference")
    prefix: str = option("", "text before each document, such as 'summarize: '")
    suffix: str = option("", "text after each document, such as 'TL;DR:' for decoder-only models")
    length: int | None = option(
        None, "maximum number of tokens to write; without it, as many as 95 % of the references have"
    )
    input_tokens: int = option(448, "maximum number of tokens to read of a document")
    max_words: int | None = option(None, "drop documents whose summary has more words")
    shown: str = option(
        "facts", "what rejectors see: facts about token and document, states of the predictor as in the paper, or both"
    )
    metric: str = option("rouge1", f"quality of a text to learn and report: {', '.join(METRIC_NAMES)}")
    token_loss: str = option(
        "auto",
        "loss of a token: by the metric (auto); not in the reference as often as written (clipped) or at all (paper), "
        "its first_error, edits by alignment, or what it adds if the expert completes (to_go)",
    )
    rouge: str = option("ids", "what rouge1 counts: words or token ids")
    dtype: str = option("float32", "precision of both models: float32, or bfloat16 or float16 to save GPU memory")
    train_documents: int = option(2400, "maximum number of documents to fit rejectors on")
    validation_documents: int = option(600, "maximum number of documents for early stopping and model selection")
    test_documents: int = option(1000, "maximum number of documents to report on")
    seed: int = option(0, "seed of the split")
    expert_model: str = option("", "remote expert: name of the model at https://HOST/v1")
    expert_prompt: str = option(PROMPT, "remote expert: prompt; {input} is prefix, document and suffix")
    expert_seconds: float = option(30.0, "remote expert: timeout of one attempt, in seconds")
    expert_retries: int = option(4, "remote expert: retries of a failed call")
    expert_at_once: int = option(8, "remote expert: concurrent calls")
    expert_by_token: bool = option(
        False, "remote expert: ask for single tokens, to fit TokenwiseModel; vLLM is read in chunks"
    )

    def __post_init__(self) -> None:
        check_ranges(self, {name: range_ for name, range_ in RANGES.items() if getattr(self, name) is not None})
        if self.metric not in METRIC_NAMES and not self.metric.startswith(FUNCTION):
            raise unknown("--metric", self.metric, METRIC_NAMES)
        for name, available in self.choices.items():
            require_known(f"--{name.replace('_', '-')}", getattr(self, name), available)
        check_prompt(self.expert_prompt)
        if is_url(self.expert):
            self.endpoint()
        elif self.expert_model or self.expert_by_token:
            raise OptionError(
                f"--expert-model and --expert-by-token need --expert https://HOST/v1, not {self.expert!r:.80}"
            )

    def without_test(self) -> TextOptions:
        return replace(self, test=None, test_documents=0)

    def endpoint(self) -> Endpoint:
        """Return the endpoint of a remote expert."""
        check_url(self.expert)
        if not self.expert_model:
            raise OptionError(f"--expert-model is missing; give the name of a model at {self.expert:.80}")
        return Endpoint(self.expert, self.expert_model, self.expert_seconds, self.expert_retries, self.expert_at_once)
