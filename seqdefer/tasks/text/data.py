"""Documents with a reference each: read from JSON lines or a `datasets` name, filtered, split without leaks.

    corpus = filter_by_words(read_corpus("news.jsonl.gz"), max_words=14)
    splits = make_splits(corpus, None, {"train": 800, "validation": 200, "test": 500}, seed=0)
    splits.parts["test"][0].document, splits.parts["test"][0].summary

A file holds one JSON object a line, plain or gzip; errors are DataErrors that name the file and the line. Repeated
documents are dropped, and no document is in two parts. `describe` counts what was dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from seqdefer.errors import DataError, OptionError
from seqdefer.interfaces import SplitName
from seqdefer.storage.files import fingerprint
from seqdefer.storage.user_files import (
    check_filled,
    check_id,
    check_text,
    get_field,
    join_quoted,
    looks_like_file,
    parse_record,
    quote,
    read_lines,
)
from seqdefer.tasks.common.splits import DealtSplits, ItemPool, count_nouns, deal_splits
from seqdefer.tasks.text.hub import load_dataset, parse_dataset_name

CHOOSE_FIELDS = "choose others with --document-field and --summary-field (document_field and summary_field in Python)"


@dataclass(frozen=True)
class Fields:
    """Names of the fields of a record; `id` is optional."""

    document: str = "document"
    summary: str = "summary"
    id: str = "id"


@dataclass(frozen=True)
class Document:
    """A text and its reference summary."""

    id: str  # from the data, else the line number
    document: str
    summary: str

    @classmethod
    def of_record(cls, record: Mapping[str, Any], fields: Fields, number: int, place: str) -> Document:
        """Return the document of a record; `place` names it in errors."""
        values = {field: get_field(record, field, place, CHOOSE_FIELDS) for field in (fields.document, fields.summary)}
        document, summary = (check_filled(value, field, place) for field, value in values.items())
        return cls(check_id(record.get(fields.id), number, place), document, summary)

    def digest(self, seed: str = "") -> bytes:
        """Return a hash of the text, ignoring white space; a seed makes it a random number."""
        text = " ".join(self.document.split())
        return blake2b(text.encode(), key=seed.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Corpus:
    """Distinct documents of one source, with counts of what was dropped."""

    name: str
    documents: Sequence[Document]
    empty: int = 0  # rows of a dataset without a document or a summary
    repeated: int = 0  # documents seen before
    wordy: int = 0  # summaries of more than `max_words` words
    max_words: int | None = None

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of the documents and summaries, in order."""
        return fingerprint(*(text.encode() for one in self.documents for text in (one.document, one.summary)))

    def describe(self) -> str:
        """Return a description for the provenance."""
        left_out = {
            "empty": self.empty,
            "repeated": self.repeated,
            f"with a summary of more than {self.max_words} words": self.wordy,
        }
        counted = ", ".join(f"{count} {what}" for what, count in left_out.items() if count)
        documents = count_nouns(len(self), "document")
        return f"{documents} of {self.name} ({self.fingerprint}){counted and f', left out: {counted}'}"


DocumentSplits = DealtSplits[Document]


def read_corpus(source: Path | str, *, fields: Fields | None = None, split: str = "train") -> Corpus:
    """Read a JSONL file, plain or gzip, or a dataset of the package `datasets`: NAME[:CONFIG][/SPLIT].

    A source is a file if it exists or looks like one (news.jsonl, ./news). `split` applies to a dataset without one.
    """
    if not str(source):
        raise DataError("the name of the data is empty; give a JSONL file, plain or gzip")
    fields = fields or Fields()
    path = Path(source)
    if looks_like_file(path):
        return corpus_of(path.name, _file_documents(path, fields))
    return _dataset_corpus(str(source), fields, split)


def corpus_of(name: str, documents: Iterable[Document]) -> Corpus:
    """Return a corpus without repeated documents."""
    different: dict[bytes, Document] = {}
    repeated = 0
    for one in documents:
        repeated += different.setdefault(one.digest(), one) is not one
    return Corpus(name, list(different.values()), repeated=repeated)


def filter_by_words(corpus: Corpus, max_words: int) -> Corpus:
    """Keep the documents whose summary has at most `max_words` words, separated by white space."""
    if max_words < 1:
        raise OptionError(f"--max-words is {max_words}; it must be at least 1")
    kept = [one for one in corpus.documents if len(one.summary.split()) <= max_words]
    if not kept:
        raise DataError(f"{corpus.name} has no summary of at most {max_words} words; allow more with --max-words")
    return replace(corpus, documents=kept, wordy=corpus.wordy + len(corpus) - len(kept), max_words=max_words)


# --- files -----------------------------------------------------------------------------------------------------------


def _file_documents(path: Path, fields: Fields) -> Iterator[Document]:
    kind = f"a JSONL file: one object a line {_expected_fields(fields)}"
    for number, line in read_lines(path, kind=kind):
        place = f"{path.name}, line {number}"
        yield Document.of_record(parse_record(line, place), fields, number, place)


def _expected_fields(fields: Fields) -> str:
    return f"with the fields {quote(fields.document)} and {quote(fields.summary)}"


# --- the package `datasets` ------------------------------------------------------------------------------------------


def _dataset_corpus(source: str, fields: Fields, split: str) -> Corpus:
    wanted = parse_dataset_name(source, split)
    label = wanted.label
    instead = f"give files instead: JSONL, plain or gzip, one object a line {_expected_fields(fields)}"
    rows = load_dataset(wanted, instead, extra="text")
    missing = [field for field in (fields.document, fields.summary) if field not in rows.column_names]
    if missing:
        raise DataError(
            f"{label} has no {join_quoted(missing)}; the columns are: {join_quoted(rows.column_names)}; {CHOOSE_FIELDS}"
        )
    documents = list(_dataset_documents(rows, fields, label))
    if not documents:
        raise DataError(f"{label} has no document with a summary; {CHOOSE_FIELDS}")
    corpus = corpus_of(label, documents)
    return replace(corpus, empty=len(rows) - len(documents))


def _dataset_documents(rows: Any, fields: Fields, label: str) -> Iterator[Document]:
    """Yield rows with a document and a summary. Skip empty ones: users cannot repair a dataset of the Hub."""
    wanted = (fields.document, fields.summary)
    columns = [field for field in (*wanted, fields.id) if field in rows.column_names]
    for number, row in enumerate(rows.select_columns(columns)):
        place = f"{label}, row {number}"
        document, summary = ("" if row[field] is None else check_text(row[field], field, place) for field in wanted)
        if document.strip() and summary.strip():
            yield Document(check_id(row.get(fields.id), number, place), document, summary)


# --- splits ----------------------------------------------------------------------------------------------------------


def make_splits(train: Corpus, test: Corpus | None, counts: Mapping[SplitName, int], seed: int) -> DocumentSplits:
    """Deal documents into parts of at most `counts`, from one corpus or from two; see `deal_splits`."""
    return deal_splits(_pool(train), None if test is None else _pool(test), counts, seed)


def _pool(corpus: Corpus) -> ItemPool[Document]:
    return ItemPool(corpus.name, corpus.documents, corpus.describe())
