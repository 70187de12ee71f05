"""Generated sequences in the terminal."""

from __future__ import annotations

import re

import pytest

from seqdefer.report.terminal import written_lines


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([("P", "predictor"), (" IH", "expert"), (" N", "expert")], "P [IH N]"),
        ([("a", "expert"), (" b", "predictor"), ("\n c", "expert")], "[a] b\n [c]"),
        ([("a", "predictor"), (" ", "expert"), ("b", "predictor")], "a[ ]b"),
        ([("a", "predictor"), ("", "expert")], "a[]"),
    ],
)
def test_a_space_before_a_word_is_not_marked(pieces: list[tuple[str, str]], shown: str) -> None:
    tokens = [{"text": text, "source": source} for text, source in pieces]
    row = {"tokens": tokens, "expert_tokens": 1, "predictor_tokens": 1, "switches": 1}
    assert next(written_lines(row, colours=False)).plain == shown
    coloured = next(written_lines(row, colours=True))
    assert coloured.plain == "".join(text for text, _ in pieces)
    marked = [coloured.plain[span.start : span.end] for span in coloured.spans if span.style]
    assert marked == [words for words in re.findall(r"\[(.*?)\]", shown) if words]
