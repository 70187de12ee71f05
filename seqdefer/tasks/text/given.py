"""What users give as objects instead of names: loaded models with their tokenizer, data in memory, a metric.

    given = Given(predictor=small, expert=large, tokenizer=tokenizer, train=[("a document", "its summary"), ...])

`names` are the options that stand for them in files. Data is a `datasets.Dataset`, a pandas DataFrame, or an iterable
of rows: dictionaries, or pairs of a text and its reference. Neither package is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from seqdefer.errors import DataError, OptionError
from seqdefer.tasks.common.metrics import Metric
from seqdefer.tasks.text.data import Corpus, Document, Fields, corpus_of
from seqdefer.tasks.text.hub import cached_commit
from seqdefer.tasks.text.loading import REVISION_SIGN, is_folder, load_text_model
from seqdefer.tasks.text.models import TextModel, text_model, transformers

IN_MEMORY = "data in memory"
FUNCTION = "function:"  # before the name of a metric that is not one of ours


@dataclass(frozen=True)
class Given:
    """Objects in the place of options; None where the options name what is meant."""

    predictor: Any = None
    expert: Any = None
    tokenizer: Any = None  # of loaded models
    train: Any = None
    metric: Metric | None = None

    @classmethod
    def of(cls, objects: Mapping[str, Any]) -> Given:
        """Return objects by the names of options; a function becomes a metric."""
        known = {field.name for field in fields(cls)}
        for name in objects.keys() - known:
            what = f"{name} is {objects[name]!r:.60}, of type {type(objects[name]).__name__}"
            raise OptionError(f"{what}; give a text or a number: objects can be {', '.join(sorted(known))}")
        for role in ("predictor", "expert"):
            model = objects.get(role)
            if model is not None and not hasattr(model, "get_output_embeddings"):
                raise OptionError(
                    f"the {role} is a {type(model).__name__}, not a loaded model; give a model of transformers, the "
                    "name of one on the Hub, or a folder"
                )
        metric = objects.get("metric")
        if metric is not None and not isinstance(metric, Metric):
            objects = {**objects, "metric": Metric(metric)}
        given = cls(**objects)
        if given.tokenizer is not None and given.predictor is None and given.expert is None:
            raise OptionError(
                "a tokenizer was given, but both models are names, which come with their own; leave it out"
            )
        return given

    def names(self) -> dict[str, str]:
        """Return the options that stand for the objects in files."""
        found = {
            role: name_of(getattr(self, role)) for role in ("predictor", "expert") if getattr(self, role) is not None
        }
        if self.train is not None:
            found["train"] = IN_MEMORY
        if self.metric is not None:
            found["metric"] = FUNCTION + self.metric.title
        return found

    def corpus(self, document_fields: Fields) -> Corpus:
        """Return the data in memory."""
        return corpus_of(IN_MEMORY, list(_documents(self.train, document_fields)))

    def text_model(self, role: str, source: str, *, device: torch.device, dtype: str, cache_bytes: int) -> TextModel:
        """Return the model of a role, loaded by its name where it was not given."""
        model = getattr(self, role)
        if model is None:
            return load_text_model(source, device=device, dtype=dtype, cache_bytes=cache_bytes)
        tokenizer = self.tokenizer
        if tokenizer is None:
            tokenizer = _tokenizer_of(model, role)
        return text_model(model, tokenizer, name_of(model) or type(model).__name__, cache_bytes=cache_bytes)


def name_of(model: Any) -> str:
    """Return the folder or the name on the Hub, with its revision, that a model was loaded from; "" where none is."""
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    commit = cached_commit(name) if name and not is_folder(name) else ""
    return f"{name}{REVISION_SIGN}{commit}" if commit else name


def _tokenizer_of(model: Any, role: str) -> Any:
    name, _, revision = name_of(model).partition(REVISION_SIGN)
    if not name:
        raise OptionError(f"the {role} is a loaded {type(model).__name__} without a name; give its tokenizer, too")
    return transformers().AutoTokenizer.from_pretrained(name, **({"revision": revision} if revision else {}))


# -- data in memory ------------------------------------------------------------------------------------------------


def _documents(data: Any, document_fields: Fields) -> Iterator[Document]:
    for number, row in enumerate(_rows(data), 1):
        yield Document.of_record(_record(row, number, document_fields), document_fields, number, f"row {number}")


def _rows(data: Any) -> Iterable[Any]:
    if isinstance(data, Mapping):  # a DatasetDict, or columns
        names = ", ".join(str(name) for name in list(data)[:10])
        raise DataError(f"the data is a {type(data).__name__} of {names}; give one of its parts, such as data['train']")
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # a DataFrame
        rows: Iterable[Any] = data.to_dict("records")
        return rows
    if isinstance(data, str | bytes | Path) or not isinstance(data, Iterable):
        raise DataError(
            f"cannot read data of type {type(data).__name__}; give a datasets.Dataset, a DataFrame, a JSONL file, or a "
            "list of pairs (text, reference) or of dictionaries"
        )
    return data


def _record(row: Any, number: int, document_fields: Fields) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    if isinstance(row, list | tuple) and len(row) == 2:
        return {document_fields.document: row[0], document_fields.summary: row[1]}
    raise DataError(f"row {number} is {row!r:.60}; give a dictionary, or a pair (text, reference)")
