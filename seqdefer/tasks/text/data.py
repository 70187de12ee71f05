"""Documents with a reference each: read from JSON lines or a `datasets` name, filtered, split without leaks.

    corpus = filter_by_words(read_corpus("news.jsonl.gz"), max_words=14)
    splits = make_splits(corpus, None, {"train": 800, "validation": 200, "test": 500}, seed=0)
    splits.parts["test"][0].document, splits.parts["test"][0].summary

A file holds one JSON object a line, plain or gzip; errors are DataErrors that name the file and the line. Repeated
documents are dropped, and no document is in two parts. `describe` counts what was dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

from seqdefer.errors import DataError, MissingExtraError, OptionError, missing_extra
from seqdefer.interfaces import SplitName
from seqdefer.storage.files import fingerprint
from seqdefer.storage.user_files import get_field, join_quoted, json_kind, parse_record, quote, read_lines
from seqdefer.tasks.text.hub import offline_if_unreachable

_MIN_DATASETS_VERSION = 4  # older versions run Python code of datasets

# Parts are dealt in this order, so that the test stays the same when training grows.
_DEAL_ORDER: Sequence[SplitName] = ("test", "validation", "train")
_COMMON_SPLITS = ("train", "validation", "test")
_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".gz", ".zip", ".txt", ".csv")


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
        return f"{count_documents(len(self))} of {self.name} ({self.fingerprint}){counted and f', left out: {counted}'}"


@dataclass(frozen=True)
class DocumentSplits:
    """Three parts that share no document."""

    parts: Mapping[SplitName, Sequence[Document]]
    source: str  # a description for the provenance


def read_corpus(source: Path | str, *, fields: Fields | None = None, split: str = "train") -> Corpus:
    """Read a JSONL file, plain or gzip, or a dataset of the package `datasets`: NAME[:CONFIG][/SPLIT].

    A source is a file if it exists or looks like one (news.jsonl, ./news). `split` applies to a dataset without one.
    """
    if not str(source):
        raise DataError("the name of the data is empty; give a JSONL file, plain or gzip")
    fields = fields or Fields()
    path = Path(source)
    if _is_file_name(path):
        return _without_repeats(path.name, _file_documents(path, fields))
    return _dataset_corpus(str(source), fields, split)


def _is_file_name(path: Path) -> bool:
    # os.path.exists: unlike Path.exists, it does not raise on bad paths, which fail when they are opened
    looks_like_file = path.is_absolute() or str(path).startswith((".", "~")) or path.suffix.lower() in _FILE_SUFFIXES
    return looks_like_file or "\0" in str(path) or os.path.exists(path)


def _without_repeats(name: str, documents: Iterable[Document]) -> Corpus:
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


def count_documents(n: int) -> str:
    return "1 document" if n == 1 else f"{n} documents"


# --- files -----------------------------------------------------------------------------------------------------------


def _file_documents(path: Path, fields: Fields) -> Iterator[Document]:
    kind = f"a JSONL file: one object a line {_expected_fields(fields)}"
    for number, line in read_lines(path, kind=kind):
        place = f"{path.name}, line {number}"
        record = parse_record(line, place)
        document, summary = (_text(record, field, place) for field in (fields.document, fields.summary))
        for field, text in ((fields.document, document), (fields.summary, summary)):
            if not text.strip():
                raise DataError(f"{place}: {quote(field)} is empty; fill it in, or remove the line")
        yield Document(_id(record.get(fields.id), number, place), document, summary)


def _text(record: Mapping[str, Any], field: str, place: str) -> str:
    text = get_field(record, field, place, "choose others with --document-field and --summary-field")
    if not isinstance(text, str):
        raise DataError(f"{place}: {quote(field)} is {json_kind(text)}, not a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        bad = f"\\u{ord(text[error.start]):04x}"
        raise DataError(f"{place}: {quote(field)} holds {bad}, which is not a character; remove it") from error
    return text


def _id(value: object, number: int, place: str) -> str:
    if value is None:
        return str(number)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{place}: the id is {json_kind(value)}; it must be a text or a whole number")
    return str(value)


def _expected_fields(fields: Fields) -> str:
    return f"with the fields {quote(fields.document)} and {quote(fields.summary)}"


# --- the package `datasets` ------------------------------------------------------------------------------------------


def parse_dataset_name(name: str, split: str = "train") -> tuple[str, str | None, str]:
    """Split NAME[:CONFIG][/SPLIT] into name, config and split. NAME may be OWNER/NAME: in A/B without a config, B is a
    split only if it is a common one (xsum/test, but EdinburghNLP/xsum)."""
    head, colon, tail = name.partition(":")
    if colon:
        config, slash, named = tail.partition("/")
    else:
        config, (*owner, last) = "", head.split("/")
        slash = "/" if len(owner) == 2 or (len(owner) == 1 and last in _COMMON_SPLITS) else ""
        head, named = ("/".join(owner), last) if slash else (head, "")
    if not head.strip("/") or (colon and not config) or (slash and not named):
        raise OptionError(f"cannot read the dataset {quote(name)}; write NAME, NAME:CONFIG, NAME/SPLIT or both")
    return head, config or None, named or split


def _dataset_corpus(source: str, fields: Fields, split: str) -> Corpus:
    name, config, split = parse_dataset_name(source, split)
    label = f"{name}{f':{config}' if config else ''}/{split}"
    rows = _load_dataset(label, (name, config, split), fields)
    missing = [field for field in (fields.document, fields.summary) if field not in rows.column_names]
    if missing:
        raise DataError(f"{label} has no {join_quoted(missing)}; the columns are: {join_quoted(rows.column_names)}")
    documents = list(_dataset_documents(rows, fields, label))
    if not documents:
        raise DataError(f"{label} has no document with a summary")
    corpus = _without_repeats(label, documents)
    return replace(corpus, empty=len(rows) - len(documents))


def _load_dataset(label: str, wanted: tuple[str, str | None, str], fields: Fields) -> Any:
    instead = f"give files instead: JSONL, plain or gzip, one object a line {_expected_fields(fields)}"
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        missing = missing_extra("datasets", "text", f"the dataset {label!r}")
        raise MissingExtraError(f"{missing}; or {instead}") from error
    if int(datasets.__version__.split(".")[0]) < _MIN_DATASETS_VERSION:
        raise MissingExtraError(
            f"the package 'datasets' is {datasets.__version__}; {_MIN_DATASETS_VERSION} or newer is needed, which does"
            f" not run code of datasets; update it with: pip install 'seqdefer[text]'; or {instead}"
        )
    name, config, split = wanted
    try:
        with offline_if_unreachable() as is_offline:
            return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # a bad name, no network, a full disk: these errors share no base class
        reason = " ".join(str(error).split()) or type(error).__name__
        if is_offline and isinstance(error, ConnectionError):
            reason = "it is not in the Hub's cache, and there is no network"
        raise DataError(f"cannot load the dataset {label}: {reason}; {instead}") from error


def _dataset_documents(rows: Any, fields: Fields, label: str) -> Iterator[Document]:
    """Yield rows with a document and a summary. Skip empty ones: users cannot repair a dataset of the Hub."""
    wanted = (fields.document, fields.summary)
    columns = [field for field in (*wanted, fields.id) if field in rows.column_names]
    for number, row in enumerate(rows.select_columns(columns)):
        place = f"{label}, row {number}"
        document, summary = ("" if row[field] is None else _text(row, field, place) for field in wanted)
        if document.strip() and summary.strip():
            yield Document(_id(row.get(fields.id), number, place), document, summary)


# --- splits ----------------------------------------------------------------------------------------------------------


def make_splits(train: Corpus, test: Corpus | None, counts: Mapping[SplitName, int], seed: int) -> DocumentSplits:
    """Deal documents into parts of at most `counts`.

    train alone      all three parts are dealt from it
    train and test   train and validation are dealt from the first, without documents of the second; the test is the
                     second, or a sample of it, in its order

    The deal depends on the documents and the seed, not on the order of the file. A larger part begins with the smaller
    one, and test and validation stay the same when train grows. Too few documents are divided in the proportions of
    `counts`.
    """
    for name, count in counts.items():
        if count < 1:
            raise OptionError(f"--{name}-documents is {count}; it must be at least 1")
    if seed < 0:
        raise OptionError(f"--seed is {seed}; it must be at least 0")
    if test is None:
        source = f"{train.describe()}; dealt by seed {seed}{_shortage(train, counts)}"
        return DocumentSplits(_deal(train, counts, seed), source)
    return _splits_of_two(train, test, counts, seed)


def _splits_of_two(train: Corpus, test: Corpus, counts: Mapping[SplitName, int], seed: int) -> DocumentSplits:
    tested = {one.digest() for one in test.documents}
    left = replace(train, documents=[one for one in train.documents if one.digest() not in tested])
    shared = len(train) - len(left)
    if not len(left):
        raise DataError(
            f"all {count_documents(len(train))} of {train.name} are also in {test.name}; give other documents with"
            " --train, or leave --test out to deal one file into three parts"
        )
    fitted: dict[SplitName, int] = {name: counts[name] for name in ("train", "validation")}
    parts = _deal(left, fitted, seed)
    parts["test"] = _sample(test.documents, counts["test"], seed)
    dropped = f", {shared} left out because the test has them" if shared else ""
    dealt = f"train and validation: {train.describe()}{dropped}, dealt by seed {seed}{_shortage(left, fitted)}"
    return DocumentSplits(parts, f"{dealt}; test: {test.describe()}{_shortage(test, {'test': counts['test']})}")


def _shortage(corpus: Corpus, counts: Mapping[SplitName, int]) -> str:
    asked = sum(counts.values())
    return f" ({asked} asked for, {len(corpus)} at hand)" if len(corpus) < asked else ""


def _deal(corpus: Corpus, counts: Mapping[SplitName, int], seed: int) -> dict[SplitName, Sequence[Document]]:
    if len(corpus) < len(counts):
        raise DataError(
            f"{corpus.name} leaves {count_documents(len(corpus))}; at least {len(counts)} are needed, one for each of"
            f" {', '.join(counts)}"
        )
    order = _order(corpus.documents, seed)
    sizes = counts if sum(counts.values()) <= len(corpus) else _divide_in_turn(len(corpus), counts)
    parts: dict[SplitName, Sequence[Document]] = {}
    start = 0
    for name in (name for name in _DEAL_ORDER if name in counts):
        parts[name] = [corpus.documents[row] for row in order[start : start + sizes[name]]]
        start += sizes[name]
    return {name: parts[name] for name in counts}


def _order(documents: Sequence[Document], seed: int) -> list[int]:
    """Return the rows in random order, sorted by a hash of the document and the seed."""
    numbers = [one.digest(str(seed)) for one in documents]
    return sorted(range(len(documents)), key=numbers.__getitem__)


def _sample(documents: Sequence[Document], n: int, seed: int) -> Sequence[Document]:
    """Return at most `n` random documents, in their order."""
    return [documents[row] for row in sorted(_order(documents, seed)[:n])]


def _divide_in_turn(n: int, counts: Mapping[SplitName, int]) -> dict[SplitName, int]:
    """Divide `n` in the proportions of `counts`, at least one each: each takes its share of what is left."""
    names = [name for name in _DEAL_ORDER if name in counts]
    sizes: dict[SplitName, int] = {}
    for place, name in enumerate(names):
        later = names[place + 1 :]
        share = n * counts[name] // (counts[name] + sum(counts[other] for other in later))
        sizes[name] = max(1, min(share, n - len(later)))
        n -= sizes[name]
    return sizes
