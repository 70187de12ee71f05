"""Users' files: plain or gzip by content, limits while unpacking, lines with their numbers."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from seqdefer.errors import DataError, FormatError, OptionError
from seqdefer.storage import user_files
from seqdefer.storage.user_files import SizeLimit, join_quoted, parse_inputs, quote, read_bytes, read_lines, read_rows


def limit(max_mib: int) -> SizeLimit:
    return SizeLimit("own", max_mib, "give less")


def lines_of(path: Path) -> list[tuple[int, str]]:
    return list(read_lines(path, kind="words"))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("name", ["own.txt", "own.txt.gz"])
def test_gzip_is_known_by_its_content(pack: Callable[[bytes], bytes], name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(pack(b"\xef\xbb\xbfone\r\n\n \n two"))
    assert read_bytes(path, limit(1)) == b"\xef\xbb\xbfone\r\n\n \n two"
    assert lines_of(path) == [(1, "one"), (4, "two")]


def test_tables_are_refused_with_a_way_to_convert_them(tmp_path: Path) -> None:
    """`not JSON`, a CSV file was answered, or each of its lines was taken for an input. The line for pandas did not run
    for a file in another folder, and what it made was refused where the name still told of the table."""
    for name, reader in (("own.csv", "read_csv"), ("own.CSV.gz", "read_csv"), ("own.parquet", "read_parquet")):
        (tmp_path / name).write_text("document,summary\na,b\n")
        with pytest.raises(FormatError) as raised:
            lines_of(tmp_path / name)
        assert str(raised.value) == (
            f"{name} is a table, which is not read; give words, plain or gzip: "
            f"pandas.{reader}('{tmp_path / name}').to_json("
            "'FILE.jsonl', orient='records', lines=True) converts it, and fit in Python takes the DataFrame itself"
        )
    (tmp_path / "own.csv.jsonl").write_text("{}")
    assert lines_of(tmp_path / "own.csv.jsonl") == [(1, "{}")]


def test_inputs_are_lines_or_a_field_of_json(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('\n{"a": 1}\n\n{"b": 2}\n')
    assert parse_inputs(islice(lines_of(path), 1), path, "a") == [1]
    assert parse_inputs(lines_of(path), tmp_path / "own.txt", "a") == ['{"a": 1}', '{"b": 2}']
    with pytest.raises(DataError, match=r"own.jsonl, line 4: there is no 'a'; the fields are: 'b'; .* --field"):
        parse_inputs(lines_of(path), path, "a")


def bomb(content: bytes, n_gib: int, path: Path) -> Path:
    """Write gzip members that unpack to `n_gib` GiB; a gzip file may have any number of members."""
    packed = gzip.compress(content * (2**26 // len(content)))
    path.write_bytes(packed * (16 * n_gib))
    assert path.stat().st_size < 7 * 2**20
    return path


def test_a_bomb_ends_at_the_limit(tmp_path: Path) -> None:
    """It once took all memory: the whole file was unpacked before anything was checked."""
    path = bomb(b"x", 6, tmp_path / "own.gz")
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"own is larger than 8 MiB; give less, .* SEQDEFER_MAX_DATA_MIB=N"):
            read_bytes(path, limit(8))
        with pytest.raises(DataError, match=r"own.gz, line 1, is larger than 16 MiB; .* SEQDEFER_MAX_LINE_MIB=N"):
            lines_of(path)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def test_a_file_may_have_the_size_of_the_limit(tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(b"x" * 2**20)
    assert len(read_bytes(tmp_path / "own", limit(1))) == 2**20
    (tmp_path / "own").write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(DataError, match=r"own is larger than 1 MiB"):
        read_bytes(tmp_path / "own", limit(1))


def test_lines_are_limited_together_and_read_as_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bomb(b"x" * 1023 + b"\n", 1, tmp_path / "own.gz")
    with pytest.raises(DataError, match=r"^own.gz is larger than 1 MiB; give fewer lines"):
        list(read_lines(path, kind="words", max_mib=1))
    monkeypatch.setattr(user_files, "MAX_TEXT_MIB", 2)
    with pytest.raises(DataError, match=r"^own.gz is larger than 2 MiB; give fewer lines"):
        lines_of(path)
    assert len(list(islice(read_lines(path, kind="words"), 1000))) == 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n", "own is empty; give words, plain or gzip"),
        (b"PK\x03\x04", "own is a zip archive: unpack it"),
        (gzip.compress(b"PK\x03\x04", mtime=0), "own is a zip archive: unpack it"),
        (b"good\n caf\xe9", "own, line 2: not UTF-8 .byte 0xe9.; save the file as UTF-8"),
        (b"\x1f\x8bnot gzip", "cannot read .*own: .*; give words, plain or gzip"),
        (gzip.compress(b"line\n" * 9, mtime=0)[:-9], "cannot read .*own after line 9: Compressed file ended"),
        (None, "cannot read .*own: No such file"),
    ],
)
def test_what_cannot_be_read(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "own").write_bytes(content)
    with pytest.raises(DataError, match=message):
        lines_of(tmp_path / "own")


def test_names_in_messages_are_short_and_on_one_line() -> None:
    assert quote("a\n\x1b[31m") == r"'a\n\x1b[31m'"
    assert quote("x" * 1000) == f"'{'x' * 39}…'"
    assert join_quoted([]) == "none"
    assert join_quoted("abcdefghijkl").endswith("'j' and 2 more")


def test_the_environment_sets_other_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").write_bytes(b"x" * 2**20 + b"\n" + b"y" * (2**20 - 1))
    with pytest.raises(DataError, match=r"own is larger than 1 MiB; .* SEQDEFER_MAX_DATA_MIB=N"):
        read_bytes(tmp_path / "own", limit(1))
    monkeypatch.setenv("SEQDEFER_MAX_DATA_MIB", "2")
    assert len(read_bytes(tmp_path / "own", limit(1))) == 2 * 2**20
    assert [number for number, _ in read_lines(tmp_path / "own", kind="words", max_mib=1)] == [1, 2]
    monkeypatch.setenv("SEQDEFER_MAX_LINE_MIB", "1")
    with pytest.raises(DataError, match=r"own, line 1, is larger than 1 MiB; .* SEQDEFER_MAX_LINE_MIB=N"):
        lines_of(tmp_path / "own")
    for wrong in ("0", "-1", "much"):
        monkeypatch.setenv("SEQDEFER_MAX_DATA_MIB", wrong)
        with pytest.raises(OptionError, match=f"SEQDEFER_MAX_DATA_MIB is '{wrong}'; it must be a number of MiB"):
            limit(1)


def test_a_limit_counts_files_that_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(gzip.compress(b"x" * 2**19))
    together = limit(1)
    for _ in range(2):
        read_bytes(tmp_path / "own", together)
    with pytest.raises(DataError, match="own is larger than 1 MiB"):
        read_bytes(tmp_path / "own", together)


def test_rows_keep_their_ends_and_may_be_latin_1(tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n\xe9\n\nd")
    assert list(read_rows(tmp_path / "own", limit(1))) == ["a\r\n", "b\r", "c\n", "é\n", "\n", "d"]
