"""Documents with a reference each: read from JSON lines or a `datasets` name, filtered, split without leaks, encoded.

    corpus = filter_by_words(read_corpus("news.jsonl.gz"), max_words=14)
    splits = make_splits(corpus, None, {"train": 800, "validation": 200, "test": 500}, seed=0)
    splits.parts["test"][0].document, splits.parts["test"][0].summary
    ids, n_cut = encode(tokenizer, [one.document for one in splits.parts["test"]], "summarize: ", max_tokens=448)

A file holds one JSON object a line, plain or gzip; whatever is wrong with it is a DataError that names file and line.
Of equal documents the first is kept, and none is in two parts. What was left out is counted, and said in `describe`.
Nothing here knows of models, apart from the tokenizer that `encode` is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from seqdefer.errors import DataError, MissingExtraError, OptionError, missing_extra
from seqdefer.interfaces import SplitName
from seqdefer.storage.files import fingerprint
from seqdefer.storage.user_files import get_field, join_quoted, json_kind, parse_record, quote, read_lines
from seqdefer.tasks.text.hub import cache_alone_if_unknown
from seqdefer.tasks.text.passes import PADDING

LETTERS, MARGIN = 16, 64  # of a token, more than most have; tokens that the end of a text may change
_OLDEST_DATASETS = 4  # the versions before run Python code that a dataset brings along

# The parts in the order in which they are dealt: the test stays the same when more is asked for training.
_DEALT: Sequence[SplitName] = ("test", "validation", "train")
_USUAL_SPLITS = ("train", "validation", "test")
_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".gz", ".zip", ".txt", ".csv")  # of files that may not be there


@dataclass(frozen=True)
class Fields:
    """What the parts of a record are called; `id` may be absent."""

    document: str = "document"
    summary: str = "summary"
    id: str = "id"


@dataclass(frozen=True)
class Document:
    """A text, and the one that is wanted for it."""

    id: str  # as the data has it, else the number of its line
    document: str
    summary: str

    def digest(self, seed: str = "") -> bytes:
        """Tells documents apart by their text alone, whatever the spaces; with a seed, a random number of each."""
        text = " ".join(self.document.split())
        return blake2b(text.encode(), key=seed.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Corpus:
    """Different documents from one place, and what was left out to make them so."""

    name: str
    documents: Sequence[Document]
    empty: int = 0  # rows of a dataset without a document or a summary
    repeated: int = 0  # documents that had been seen
    wordy: int = 0  # summaries with more than `max_words`
    max_words: int | None = None

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def fingerprint(self) -> str:
        """Of the documents and summaries that are left, in their order."""
        return fingerprint(*(text.encode() for one in self.documents for text in (one.document, one.summary)))

    def describe(self) -> str:
        """In words, for the provenance."""
        left_out = {
            "empty": self.empty,
            "repeated": self.repeated,
            f"with a summary of more than {self.max_words} words": self.wordy,
        }
        counted = ", ".join(f"{count} {what}" for what, count in left_out.items() if count)
        return f"{count_documents(len(self))} of {self.name} ({self.fingerprint}){counted and f', left out: {counted}'}"


@dataclass(frozen=True)
class Splits:
    """Three parts that share no document."""

    parts: Mapping[SplitName, Sequence[Document]]
    source: str  # where they come from and what was left out, in words, for the provenance


def read_corpus(source: Path | str, *, fields: Fields | None = None, split: str = "train") -> Corpus:
    """The documents of a JSONL file, plain or gzip, or of a dataset: NAME[:CONFIG][/SPLIT] for the package `datasets`.

    A name is that of a file if there is one, or if it looks like one (news.jsonl, ./news). `split` is the one of a
    dataset that names none. `fields` are the usual ones unless told otherwise.
    """
    if not str(source):
        raise DataError("the name of the data is empty: give a JSONL file, plain or gzip")
    fields = fields or Fields()
    path = Path(source)
    if _is_file_name(path):
        return _without_repeats(path.name, _file_documents(path, fields))
    return _dataset_corpus(str(source), fields, split)


def _is_file_name(path: Path) -> bool:
    # os.path.exists: a path that cannot be looked at is reported when it is opened
    looks_so = path.is_absolute() or str(path).startswith((".", "~")) or path.suffix.lower() in _FILE_SUFFIXES
    return looks_so or "\0" in str(path) or os.path.exists(path)


def _without_repeats(name: str, documents: Iterable[Document]) -> Corpus:
    different: dict[bytes, Document] = {}
    repeated = 0
    for one in documents:
        repeated += different.setdefault(one.digest(), one) is not one
    return Corpus(name, list(different.values()), repeated=repeated)


def filter_by_words(corpus: Corpus, max_words: int) -> Corpus:
    """The documents whose summary has at most `max_words` words, as spaces part them."""
    if max_words < 1:
        raise OptionError(f"summaries of at most {max_words} words were asked for; it must be at least 1")
    kept = [one for one in corpus.documents if len(one.summary.split()) <= max_words]
    if not kept:
        raise DataError(f"{corpus.name} has no summary of at most {max_words} words: allow more")
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
    """NAME[:CONFIG][/SPLIT] -> name, config, split. A NAME may be OWNER/NAME: of two words without a config, the
    second is a split only if it is a usual one (xsum/test, but EdinburghNLP/xsum)."""
    head, colon, tail = name.partition(":")
    if colon:
        config, slash, named = tail.partition("/")
    else:
        config, (*owner, last) = "", head.split("/")
        slash = "/" if len(owner) == 2 or (len(owner) == 1 and last in _USUAL_SPLITS) else ""
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
        raise DataError(f"{label} holds no document with a summary")
    corpus = _without_repeats(label, documents)
    return replace(corpus, empty=len(rows) - len(documents))


def _load_dataset(label: str, wanted: tuple[str, str | None, str], fields: Fields) -> Any:
    instead = f"give files instead: JSONL, plain or gzip, one object a line {_expected_fields(fields)}"
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        missing = missing_extra("datasets", "text", f"the dataset {label!r}")
        raise MissingExtraError(f"{missing}; or {instead}") from error
    if int(datasets.__version__.split(".")[0]) < _OLDEST_DATASETS:
        raise MissingExtraError(
            f"the package 'datasets' is {datasets.__version__}, {_OLDEST_DATASETS} or newer is needed, which runs no"
            f" code of a dataset; update it with: pip install 'seqdefer[text]'; or {instead}"
        )
    name, config, split = wanted
    try:
        with cache_alone_if_unknown() as is_cut_off:
            return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # no network, no such name, config or split, a full disk: they have no common root
        reason = " ".join(str(error).split()) or type(error).__name__
        if is_cut_off and isinstance(error, ConnectionError):
            reason = "it is not in the cache of the Hub, and there is no network"
        raise DataError(f"cannot load the dataset {label}: {reason}; {instead}") from error


def _dataset_documents(rows: Any, fields: Fields, label: str) -> Iterator[Document]:
    """Those with a text and a summary: nobody can repair a row of the Hub, so an empty one is left out."""
    wanted = (fields.document, fields.summary)
    columns = [field for field in (*wanted, fields.id) if field in rows.column_names]
    for number, row in enumerate(rows.select_columns(columns)):
        place = f"{label}, row {number}"
        document, summary = ("" if row[field] is None else _text(row, field, place) for field in wanted)
        if document.strip() and summary.strip():
            yield Document(_id(row.get(fields.id), number, place), document, summary)


# --- splits ----------------------------------------------------------------------------------------------------------


def make_splits(train: Corpus, test: Corpus | None, counts: Mapping[SplitName, int], seed: int) -> Splits:
    """Parts of at most `counts` documents.

    train alone      all three parts are dealt from it
    train and test   training and validation are dealt from the first, less what the test has too; the test is the
                     second, in its order, or as many of it as asked for

    Dealing depends on the documents and the seed, not on their order: a larger part begins with the smaller, and the
    test and the validation stay the same when more is asked for training. Where there are too few documents, they are
    shared out in the proportions of `counts`.
    """
    for name, count in counts.items():
        if count < 1:
            raise OptionError(f"{count_documents(count)} asked for the part {name!r}; it must be at least 1")
    if seed < 0:
        raise OptionError(f"the seed is {seed}; it must be at least 0")
    if test is None:
        return Splits(_deal(train, counts, seed), f"{train.describe()}; dealt by seed {seed}{_fewer(train, counts)}")
    return _splits_of_two(train, test, counts, seed)


def _splits_of_two(train: Corpus, test: Corpus, counts: Mapping[SplitName, int], seed: int) -> Splits:
    tested = {one.digest() for one in test.documents}
    left = replace(train, documents=[one for one in train.documents if one.digest() not in tested])
    shared = len(train) - len(left)
    if not len(left):
        raise DataError(
            f"all {count_documents(len(train))} of {train.name} are in {test.name} too: give other documents to train"
            " on, or this file alone, to be dealt into training, validation and test"
        )
    fitted: dict[SplitName, int] = {name: counts[name] for name in ("train", "validation")}
    parts = _deal(left, fitted, seed)
    parts["test"] = _chosen(test.documents, counts["test"], seed)
    dropped = f", {shared} left out because the test has them" if shared else ""
    dealt = f"train and validation: {train.describe()}{dropped}, dealt by seed {seed}{_fewer(left, fitted)}"
    return Splits(parts, f"{dealt}; test: {test.describe()}{_fewer(test, {'test': counts['test']})}")


def _fewer(corpus: Corpus, counts: Mapping[SplitName, int]) -> str:
    asked = sum(counts.values())
    return f" ({asked} asked for, {len(corpus)} at hand)" if len(corpus) < asked else ""


def _deal(corpus: Corpus, counts: Mapping[SplitName, int], seed: int) -> dict[SplitName, Sequence[Document]]:
    if len(corpus) < len(counts):
        raise DataError(
            f"{corpus.name} leaves {count_documents(len(corpus))}, at least {len(counts)} are needed, one for each of"
            f" {', '.join(counts)}: give more"
        )
    order = _order(corpus.documents, seed)
    sizes = counts if sum(counts.values()) <= len(corpus) else _divide_in_turn(len(corpus), counts)
    parts: dict[SplitName, Sequence[Document]] = {}
    start = 0
    for name in (name for name in _DEALT if name in counts):
        parts[name] = [corpus.documents[row] for row in order[start : start + sizes[name]]]
        start += sizes[name]
    return {name: parts[name] for name in counts}


def _order(documents: Sequence[Document], seed: int) -> list[int]:
    """Rows at random: by a number that each document has from the seed."""
    numbers = [one.digest(str(seed)) for one in documents]
    return sorted(range(len(documents)), key=numbers.__getitem__)


def _chosen(documents: Sequence[Document], n: int, seed: int) -> Sequence[Document]:
    """At most `n` of them, at random, in the order in which they stand."""
    return [documents[row] for row in sorted(_order(documents, seed)[:n])]


def _divide_in_turn(n: int, counts: Mapping[SplitName, int]) -> dict[SplitName, int]:
    """Divide `n` in the proportions of `counts`, at least one each: each takes its share of what is left."""
    names = [name for name in _DEALT if name in counts]
    sizes: dict[SplitName, int] = {}
    for place, name in enumerate(names):
        later = names[place + 1 :]
        share = n * counts[name] // (counts[name] + sum(counts[other] for other in later))
        sizes[name] = max(1, min(share, n - len(later)))
        n -= sizes[name]
    return sizes


# --- encoding --------------------------------------------------------------------------------------------------------


def encode(
    tokenizer: Callable[..., Any], texts: Sequence[str], prefix: str, max_tokens: int, *, suffix: str = ""
) -> tuple[Tensor, int]:
    """Ids of `prefix` + text as the tokenizer makes them (its end token, if it adds one, is kept), cut at `max_tokens`
    and followed by PADDING where a row is shorter; and how many texts were cut. int64 (n, S)

    The ids of `suffix` follow what is left of a text, before the tokenizer's end token.
    `tokenizer` is one of transformers, or whatever can be called alike.
    """
    after = _ids(tokenizer, [suffix], add_special_tokens=False)[0] if suffix else []
    longest = max_tokens - len(after)
    if longest < len(_ids(tokenizer, [prefix])[0]) + 1:
        besides = "" if not prefix + suffix else " beside prefix and suffix"
        raise OptionError(f"a document is cut at {max_tokens} tokens, which leaves nothing of it{besides}; allow more")
    if not texts:
        return torch.empty(0, 0, dtype=torch.long), 0
    whole = [_beginning(tokenizer, prefix + text, longest) for text in texts]
    rows = _ids(tokenizer, whole, truncation=True, max_length=longest)
    full = [text for text, row in zip(whole, rows, strict=True) if len(row) == longest]
    n_cut = sum(len(row) > longest for row in _ids(tokenizer, full))
    if after:
        end: Any = getattr(tokenizer, "eos_token_id", None)
        rows = [[*row[:-1], *after, end] if row[-1:] == [end] else [*row, *after] for row in rows]
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=PADDING), n_cut


def _beginning(tokenizer: Callable[..., Any], text: str, longest: int) -> str:
    """As much of a text as its first `longest` tokens depend on: a book would take seconds, and hardly any of it is
    read. Where a beginning makes too few tokens (spaces may count for nothing), all of it."""
    size = LETTERS * longest
    if len(text) <= 2 * size:
        return text
    return text[:size] if len(_ids(tokenizer, [text[:size]])[0]) > longest + MARGIN else text


def _ids(tokenizer: Callable[..., Any], texts: Sequence[str], **options: Any) -> Sequence[Sequence[int]]:
    # verbose: we say ourselves that a text is too long
    found: Sequence[Sequence[int]] = tokenizer(texts, verbose=False, **options)["input_ids"] if texts else []
    return found
