"""Texts become token ids within the limit, and token ids become the pieces of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from seqdefer.errors import OptionError

pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import pair_of, random_documents, task_of
from tiny_models import tokenizer as tiny_tokenizer

from seqdefer.tasks.text import codec
from seqdefer.tasks.text.codec import END_SIGN, encode
from seqdefer.tasks.text.data import read_corpus
from seqdefer.tasks.text.passes import PADDING

pytestmark = pytest.mark.usefixtures("one_thread")


class ByLetter:
    """A tokenizer with a token per letter; 1 ends every row."""

    def __init__(self) -> None:
        self.n_texts = 0

    def __call__(
        self, texts: list[str], *, verbose: bool, truncation: bool = False, max_length: int = 0
    ) -> dict[str, list[list[int]]]:
        assert not verbose
        self.n_texts += len(texts)
        rows = [[ord(letter) for letter in text] for text in texts]
        return {"input_ids": [[*(row[: max_length - 1] if truncation else row), 1] for row in rows]}


def test_encode_pads_truncates_and_counts() -> None:
    tokenizer = ByLetter()
    ids, n_truncated = encode(tokenizer, ["ab", "abcde", "abc"], "> ", max_tokens=6)
    rows = ["> ab", "> abc", "> abc"]
    wanted = [[*map(ord, row), 1, *[PADDING] * (5 - len(row))] for row in rows]
    assert ids.dtype == torch.long
    assert ids.tolist() == wanted
    assert n_truncated == 1
    assert tokenizer.n_texts == 6  # the prefix, all texts, and again the texts at the limit
    assert [part.tolist() if isinstance(part, torch.Tensor) else part for part in encode(tokenizer, [], "", 5)] == [
        [],
        0,
    ]


@pytest.mark.parametrize("text", ["word " * 9000, "x" * 50_000, " " * 50_000 + "the end " * 9, "a b" * 2])
def test_only_the_beginning_of_a_long_text_is_tokenized(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the tokenizer drops spaces and the beginning has too few tokens."""

    class ByWord(ByLetter):
        n_letters = 0

        def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
            self.n_letters += sum(map(len, texts))
            return super().__call__(["".join(text.split()) for text in texts], **options)

    quick, slow = ByWord(), ByWord()
    found, n_truncated = encode(quick, [text], "", max_tokens=12)
    monkeypatch.setattr(codec, "LETTERS_PER_TOKEN", 10**9)
    wanted, n_wanted = encode(slow, [text], "", max_tokens=12)
    assert torch.equal(found, wanted)
    assert n_truncated == n_wanted
    if not text.startswith(" ") and len(text) > 100:
        assert quick.n_letters < 1000 < slow.n_letters


def test_no_room_for_a_document() -> None:
    with pytest.raises(OptionError, match="an input of 3 tokens leaves no room for a document"):
        encode(ByLetter(), ["abc"], "> ", max_tokens=3)
    assert encode(ByLetter(), ["abc"], "> ", max_tokens=4)[0].tolist() == [[ord(">"), ord(" "), ord("a"), 1]]


def test_encode_with_a_real_tokenizer(shared_dir: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(shared_dir / "models" / "xsum-t5")
    corpus = read_corpus(shared_dir / "data" / "xsum" / "xsum_test.jsonl.gz")
    some = [one.document for one in corpus.documents[:40]]
    ids, n_truncated = encode(tokenizer, some, "summarize: ", max_tokens=448)
    whole = [tokenizer("summarize: " + text)["input_ids"] for text in some]
    assert n_truncated == sum(len(row) > 448 for row in whole)
    assert 0 < n_truncated < 40
    for found, row in zip(ids, whole, strict=True):
        wanted = row if len(row) <= 448 else [*row[:447], tokenizer.eos_token_id]
        assert found[found != PADDING].tolist() == wanted
        assert (found[len(wanted) :] == PADDING).all()


def test_a_suffix_follows_the_truncated_document() -> None:
    reader = tiny_tokenizer()
    ids, n_truncated = encode(reader, ["w5 w6", "w5 w6 w7 w8 w9", "w5 w6 w7"], "w3 ", 6, suffix=" w10 w11")
    assert ids.tolist() == [[3, 5, 6, 10, 11, PADDING], [3, 5, 6, 7, 10, 11], [3, 5, 6, 7, 10, 11]]
    assert n_truncated == 1


class Ending:
    """A tokenizer of numbers that adds an end token, like T5's."""

    eos_token_id = 1

    def __call__(
        self, texts: list[str], *, verbose: bool, add_special_tokens: bool = True, **cut: Any
    ) -> dict[str, list[list[int]]]:
        end = [1] if add_special_tokens else []
        most = cut["max_length"] - len(end) if cut else None
        return {"input_ids": [[*[int(word) for word in text.split()][:most], *end] for text in texts]}


def test_a_suffix_precedes_the_end_token() -> None:
    ids, n_truncated = encode(Ending(), ["5 6", "5 6 7 8"], "3 ", 6, suffix="9")
    assert ids.tolist() == [[3, 5, 6, 9, 1, PADDING], [3, 5, 6, 7, 9, 1]]
    assert n_truncated == 1
    with pytest.raises(
        OptionError, match="an input of 3 tokens leaves no room for a document beside prefix and suffix; allow"
    ):
        encode(Ending(), ["5"], "3 ", 3, suffix="9")


class DroppingLetters(Ending):
    """A tokenizer that adds no end token and drops letters."""

    def __call__(self, texts: list[str], **how: Any) -> dict[str, list[list[int]]]:
        digits = ["".join(letter for letter in text if letter.isdigit() or letter == " ") for text in texts]
        return super().__call__(digits, **{**how, "add_special_tokens": False})


def test_a_suffix_after_a_text_without_tokens() -> None:
    """It was an IndexError."""
    assert encode(DroppingLetters(), ["abc"], "", 4, suffix="9")[0].tolist() == [[9]]


class Halves:
    """A tokenizer with letters of two tokens, like bytes, and marks that remove the space before them."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool, **_: bool) -> str:
        assert skip_special_tokens
        text, rest = "", list(tokens)
        while rest:
            one = rest.pop(0)
            if one == 20:
                text += "€" if rest[:1] == [21] else "\ufffd"
                rest = rest[1:] if rest[:1] == [21] else rest
            else:
                text += {1: "", 2: "", 3: " do", 4: " n", 5: "'t"}.get(one, "\ufffd")
        return text.replace(" n't", "n't")


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        ([3, 20, 21, 3, 1], [" do", "", "€", " do", END_SIGN]),  # was "\ufffd" and ""
        ([3, 4, 5], [" do", "", "n't"]),  # was " do", " n", "t"
        ([3, 2, 3], [" do", "", " do"]),
        ([3, 20], [" do", "\ufffd"]),
        ([1], [END_SIGN]),
        ([2, 2], ["", ""]),
    ],
)
def test_pieces_add_up_to_the_text(tokens: list[int], pieces: list[str]) -> None:
    task = task_of(pair_of("t5"), random_documents(3))
    task.codec.tokenizer = Halves()
    assert task.codec.pieces(tokens) == pieces
    assert "".join(pieces).replace(END_SIGN, "") == Halves().decode(tokens, skip_special_tokens=True)
