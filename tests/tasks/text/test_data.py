"""Documents with references are read from files and datasets, filtered and split without leaks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdefer.errors import DataError, InputError, MissingExtraError, OptionError
from seqdefer.interfaces import SplitName
from seqdefer.tasks.text.data import (
    Corpus,
    Document,
    Fields,
    filter_by_words,
    make_splits,
    read_corpus,
)
from seqdefer.tasks.text.hub import parse_dataset_name

pytestmark = pytest.mark.usefixtures("one_thread")

GOOD = '{"document": "Rain fell.", "summary": "It rained."}\n'
COUNTS = {"train": 6, "validation": 2, "test": 3}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def documents(n: int, start: int = 0) -> list[Document]:
    return [Document(str(number), f"document {number}", f"summary {number}") for number in range(start, start + n)]


def texts(part: Sequence[Document]) -> list[str]:
    return [one.document for one in part]


# --- files -----------------------------------------------------------------------------------------------------------


def test_ids_are_texts_numbers_or_absent(tmp_path: Path) -> None:
    rows = [{"id": value, "document": f"d{value}", "summary": "s"} for value in ("x", 7, None)]
    corpus = read_corpus(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert [one.id for one in corpus.documents] == ["x", "7", "3"]


def test_fields_can_be_renamed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"article": "d", "highlights": "s", "key": "k"}')
    fields = Fields(document="article", summary="highlights", id="key")
    assert read_corpus(path, fields=fields).documents == [Document("k", "d", "s")]
    with pytest.raises(DataError, match=r"a.jsonl, line 1: there is no 'document'; the fields are: 'article', 'high"):
        read_corpus(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'document': 1}", r"not JSON \(Expecting property name .*, column 2\)"),
        ('{"document": "d", "summary": "s"', "not JSON"),
        ('{"document": "d", "summary": "s"} {}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"a": ' + "1" * 5000 + "}", "not JSON"),
        ('"text"', "a text, not a JSON object; write one object a line, not '\"text\"'"),
        ("17", "a number, not a JSON object"),
        ("null", "null, not a JSON object"),
        ('{"document": "d"}', "there is no 'summary'; the fields are: 'document'"),
        ("{}", "there is no 'document'; the fields are: none"),
        ('{"document": 5, "summary": "s"}', "'document' is a number, not a text"),
        ('{"document": "d", "summary": null}', "'summary' is null, not a text"),
        ('{"document": ["d"], "summary": "s"}', "'document' is a list, not a text"),
        ('{"document": " \\n", "summary": "s"}', "'document' is empty"),
        ('{"document": "d", "summary": ""}', "'summary' is empty"),
        ('{"document": "\\ud800", "summary": "s"}', r"'document' holds \\ud800, which is not a character"),
        ('{"id": 1.5, "document": "d", "summary": "s"}', "the id is a number; it must be"),
        ('{"id": true, "document": "d", "summary": "s"}', "the id is true or false"),
        (b'{"document": "caf\xe9", "summary": "s"}', r"not UTF-8 \(byte 0xe9\)"),
    ],
)
def test_bad_line_is_named(line: str | bytes, message: str, tmp_path: Path) -> None:
    content = (GOOD + "\n").encode() + (line.encode() if isinstance(line, str) else line) + b"\n"
    path = write(tmp_path / "news.jsonl", content)
    with pytest.raises(DataError, match=f"^news.jsonl, line 3: {message}") as raised:
        read_corpus(path)
    assert len(str(raised.value)) < 300


def test_files_that_are_not_jsonl(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.jsonl is empty; .* fields 'document' and 'summary'"):
        read_corpus(write(tmp_path / "a.jsonl", "\n"))
    with pytest.raises(DataError, match="zip archive: unpack it"):
        read_corpus(write(tmp_path / "a.zip", b"PK\x03\x04..."))
    with pytest.raises(DataError, match=r"not JSON \(.*; write one object a line, not "):
        read_corpus(write(tmp_path / "a.json", f"[{GOOD}]"))
    with pytest.raises(DataError, match=r"not UTF-8.*save the file as UTF-8"):
        read_corpus(write(tmp_path / "a.jsonl", GOOD.encode("utf-16")))


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.jsonl.gz", "a\0b"])
def test_missing_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*: .*; give a JSONL file"):
        read_corpus(tmp_path / name)


def test_a_folder_or_no_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Is a directory"):
        read_corpus(tmp_path)
    with pytest.raises(DataError, match="name of the data is empty"):
        read_corpus("")


@given(content=st.binary(max_size=60) | st.text(alphabet='{}[]":,\\ud8document summary\n', max_size=60))
def test_any_content_is_read_or_an_input_error(content: str | bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    raw = content.encode() if isinstance(content, str) else content
    with suppress(InputError):
        read_corpus(write(tmp_path_factory.getbasetemp() / "any.jsonl", raw))


def test_repeated_documents_are_dropped_and_counted(tmp_path: Path) -> None:
    other = '{"document": " Rain\\tfell. ", "summary": "Wet."}\n{"document": "Sun.", "summary": "It rained."}\n'
    corpus = read_corpus(write(tmp_path / "a.jsonl", GOOD + other + GOOD))
    assert [(one.document, one.summary) for one in corpus.documents] == [
        ("Rain fell.", "It rained."),
        ("Sun.", "It rained."),
    ]
    assert corpus.repeated == 2
    assert corpus.describe() == f"2 documents of a.jsonl ({corpus.fingerprint}), left out: 2 repeated"


def test_the_fingerprint_names_documents_and_summaries() -> None:
    one, same, other = (
        Corpus(name, [Document(id, "d", summary)]).fingerprint
        for name, id, summary in (("a", "1", "s"), ("b", "2", "s"), ("a", "1", "t"))
    )
    assert one == same != other


# --- words -----------------------------------------------------------------------------------------------------------


def test_filter_by_words() -> None:
    corpus = Corpus(
        "c", [Document("1", "d", "one two three"), Document("2", "e", "one\n two"), Document("3", "f", "1")]
    )
    short = filter_by_words(corpus, 2)
    assert [one.id for one in short.documents] == ["2", "3"]
    assert short.describe().endswith("left out: 1 with a summary of more than 2 words")
    shorter = filter_by_words(short, 1)
    assert [one.id for one in shorter.documents] == ["3"]
    assert shorter.wordy == 2
    with pytest.raises(OptionError, match="at least 1"):
        filter_by_words(corpus, 0)
    with pytest.raises(DataError, match="c has no summary of at most 1 word"):
        filter_by_words(Corpus("c", corpus.documents[:1]), 1)


# --- datasets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("xsum", ("xsum", None, "train")),
        ("xsum/test", ("xsum", None, "test")),
        ("EdinburghNLP/xsum", ("EdinburghNLP/xsum", None, "train")),
        ("EdinburghNLP/xsum/validation", ("EdinburghNLP/xsum", None, "validation")),
        ("EdinburghNLP/xsum/odd", ("EdinburghNLP/xsum", None, "odd")),
        ("cnn_dailymail:3.0.0", ("cnn_dailymail", "3.0.0", "train")),
        ("abisee/cnn_dailymail:3.0.0/test", ("abisee/cnn_dailymail", "3.0.0", "test")),
        ("some:config/train[:100]", ("some", "config", "train[:100]")),
    ],
)
def test_names_of_datasets(name: str, parsed: tuple[str, str | None, str]) -> None:
    assert parse_dataset_name(name) == parsed


@pytest.mark.parametrize("name", ["xsum:", ":3.0.0", "xsum:/test", "a/b/", "xsum:3/", "/"])
def test_bad_names_of_datasets(name: str) -> None:
    with pytest.raises(OptionError, match="write NAME, NAME:CONFIG"):
        parse_dataset_name(name)


class Rows(list[dict[str, Any]]):
    """A stand-in for `datasets.Dataset`."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0]) if self else []

    def select_columns(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        return ({column: row[column] for column in columns} for row in self)


def use_datasets(monkeypatch: pytest.MonkeyPatch, answer: Rows | Exception, version: str = "4.1.0") -> list[Any]:
    """Replace the package `datasets` and pretend there is a network. Return the list of its calls."""
    asked: list[Any] = []
    monkeypatch.setattr("seqdefer.tasks.text.hub.is_hub_reachable", lambda: True)

    def load_dataset(*names: Any, **options: Any) -> Rows:
        asked.append((names, options))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, __version__=version))
    return asked


def test_a_dataset_is_read_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"id": "a", "document": "d", "summary": "s", "url": 1},
        {"id": "b", "document": "", "summary": "s", "url": 2},
        {"id": "c", "document": "e", "summary": None, "url": 3},
        {"id": "d", "document": "f", "summary": "s", "url": 4},
        {"id": "e", "document": "d", "summary": "t", "url": 5},
    ]
    asked = use_datasets(monkeypatch, Rows(rows))
    corpus = read_corpus("owner/news:small", split="test")
    assert asked == [(("owner/news", "small"), {"split": "test"})]  # without arguments that would run its code
    assert corpus.documents == [Document("a", "d", "s"), Document("d", "f", "s")]
    assert corpus.describe() == (
        f"2 documents of owner/news:small/test ({corpus.fingerprint}), left out: 2 empty, 1 repeated"
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"document": "d", "text": "s"}], "the columns are: 'document', 'text'; choose others with --document-field"),
        ([{"document": "d", "summary": 5}], "news/train, row 0: 'summary' is a number, not a text"),
        ([{"document": " ", "summary": "s"}], "news/train has no document with a summary"),
    ],
)
def test_bad_rows_of_a_dataset(rows: list[dict[str, Any]], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_datasets(monkeypatch, Rows(rows))
    with pytest.raises(DataError, match=message):
        read_corpus("news")


def test_a_failed_download_names_the_files_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    use_datasets(monkeypatch, ConnectionError("Couldn't reach 'news'\non the Hub"))
    with pytest.raises(DataError, match=r"cannot load the dataset news/train: Couldn't reach 'news' on the Hub; give "
                       r"files instead: JSONL, .* fields 'article' and 'summary'"):  # fmt: skip
        read_corpus("news", fields=Fields(document="article"))


def test_the_package_is_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    use_datasets(monkeypatch, Rows(), version="3.6.0")
    with pytest.raises(MissingExtraError, match=r"'datasets' is 3.6.0; 4 or newer.*pip install 'seqdefer\[text\]'"):
        read_corpus("news")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"'news/train' needs .*pip install 'seqdefer\[text\]'; or give files"):
        read_corpus("news")


# --- splits ----------------------------------------------------------------------------------------------------------


def test_one_file_is_dealt_into_three_parts() -> None:
    corpus = Corpus("c", documents(20))
    splits = make_splits(corpus, None, COUNTS, seed=0)
    assert {name: len(part) for name, part in splits.parts.items()} == COUNTS
    assert len({one.id for part in splits.parts.values() for one in part}) == sum(COUNTS.values())
    assert splits.source == f"20 documents of c ({corpus.fingerprint}); dealt by seed 0"
    assert make_splits(corpus, None, COUNTS, seed=1).parts != splits.parts


def test_the_deal_never_changes() -> None:
    """Labels and results are identified by the seed, so no release may change the parts."""
    splits = make_splits(Corpus("c", documents(20)), None, COUNTS, seed=0)
    assert {name: " ".join(one.id for one in part) for name, part in splits.parts.items()} == {
        "train": "1 19 3 13 4 7",
        "validation": "2 5",
        "test": "14 17 8",
    }


def test_the_deal_ignores_the_order_of_documents() -> None:
    one = make_splits(Corpus("c", documents(20)), None, COUNTS, seed=0)
    other = make_splits(Corpus("c", documents(20)[::-1]), None, COUNTS, seed=0)
    assert one.parts == other.parts


@pytest.mark.parametrize("test", [None, Corpus("t", documents(30, start=100))])
def test_more_training_documents_leave_the_other_parts_unchanged(test: Corpus | None) -> None:
    corpus = Corpus("c", documents(40))
    few = make_splits(corpus, test, COUNTS, seed=3).parts
    many = make_splits(corpus, test, {**COUNTS, "train": 20}, seed=3).parts
    assert (few["test"], few["validation"]) == (many["test"], many["validation"])
    assert few["train"] == many["train"][:6]


def test_a_separate_test_keeps_its_order() -> None:
    test = Corpus("t", documents(9, start=100))
    every = make_splits(Corpus("c", documents(20)), test, {**COUNTS, "test": 9}, seed=0).parts["test"]
    assert every == test.documents
    some = make_splits(Corpus("c", documents(20)), test, COUNTS, seed=0).parts["test"]
    assert len(some) == 3
    assert some == [one for one in test.documents if one in some]


def test_documents_of_the_test_are_not_trained_on() -> None:
    train, test = Corpus("c", documents(10)), Corpus("t", documents(3, start=7))
    splits = make_splits(train, test, COUNTS, seed=0)
    assert not set(texts(splits.parts["test"])) & {*texts(splits.parts["train"]), *texts(splits.parts["validation"])}
    assert "3 left out because the test has them" in splits.source
    assert "(8 asked for, 7 at hand); test: 3 documents of t" in splits.source
    with pytest.raises(DataError, match="all 3 documents of t are also in t; give other documents"):
        make_splits(test, test, COUNTS, seed=0)


@pytest.mark.parametrize("n", range(3, 12))
@pytest.mark.parametrize("counts", [COUNTS, {"train": 800, "validation": 1, "test": 1}, {**COUNTS, "test": 10**6}])
def test_too_few_documents_are_divided_in_proportion(n: int, counts: dict[Any, int]) -> None:
    splits = make_splits(Corpus("c", documents(n)), None, counts, seed=0)
    sizes = {name: len(part) for name, part in splits.parts.items()}
    assert sum(sizes.values()) == n
    assert min(sizes.values()) >= 1
    total = sum(counts.values())
    assert all(abs(sizes[name] - n * count / total) < 2 for name, count in counts.items())


@pytest.mark.parametrize("n", [2, 9, 60])
def test_without_a_test_every_document_is_learned_from(n: int) -> None:
    """One of 60 documents used to be kept for a test that nothing reported on."""
    counts: dict[SplitName, int] = {"train": 80, "validation": 20, "test": 0}
    parts = make_splits(Corpus("c", documents(n)), None, counts, seed=0).parts
    assert not parts["test"]
    assert len(parts["train"]) + len(parts["validation"]) == n


def test_bad_splits() -> None:
    with pytest.raises(DataError, match="c leaves 2 documents; at least 3 are needed; give more with --train"):
        make_splits(Corpus("c", documents(2)), None, COUNTS, seed=0)
    with pytest.raises(DataError, match="c leaves 1 document; at least 2"):
        make_splits(Corpus("c", documents(2)), Corpus("t", documents(1)), COUNTS, seed=0)
    with pytest.raises(OptionError, match="--test-documents is -1; it must be at least 0"):
        make_splits(Corpus("c", documents(9)), None, {**COUNTS, "test": -1}, seed=0)
    with pytest.raises(OptionError, match="--validation-documents is 0; it must be at least 1"):
        make_splits(Corpus("c", documents(9)), None, {**COUNTS, "validation": 0}, seed=0)
    with pytest.raises(OptionError, match="--seed is -1"):
        make_splits(Corpus("c", documents(9)), None, COUNTS, seed=-1)


def test_the_real_data(shared_dir: Path) -> None:
    """XSum: ids are null, no document is in both files, few summaries are short."""
    train, test = (read_corpus(shared_dir / "data" / "xsum" / f"xsum_{name}.jsonl.gz") for name in ("rejector", "test"))
    assert (len(train), len(test), train.repeated, test.repeated) == (1000, 600, 0, 0)
    assert train.documents[0].id == "1"
    assert (len(filter_by_words(train, 14)), len(filter_by_words(train, 20))) == (86, 483)
    splits = make_splits(train, test, {"train": 800, "validation": 200, "test": 600}, seed=0)
    assert [len(part) for part in splits.parts.values()] == [800, 200, 600]
    assert splits.parts["test"] == test.documents
    assert "left out" not in splits.source
