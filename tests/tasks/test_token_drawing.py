"""Drawings of tokens show authors and scores and escape hostile texts."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from seqdefer.errors import ContractError
from seqdefer.report.panels import is_harmless
from seqdefer.tasks.common.token_drawing import STYLE, TokenDrawing, TokenExample, draw_tokens

HOSTILE = "<script>alert(1)</script>\"'&</span></style>\x00\ud800"


def an_example(*tokens: str, **changes: Any) -> TokenExample:
    n = len(tokens)
    drawing = TokenDrawing(
        tokens, [place % 2 == 1 for place in range(n)], [place - 1.0 for place in range(n)], "b", "c"
    )
    return TokenExample(**{"source": "in", "reference": "out", "drawings": [drawing], **changes})


def texts(page: str, name: str) -> list[str]:
    """Return the texts of all elements of a class, without their scores."""
    found = [part for part in ElementTree.fromstring(page).iter() if part.get("class") == name]
    return ["".join([part.text or "", *(child.tail or "" for child in part)]) for part in found]


def test_tokens_have_authors() -> None:
    page = draw_tokens([an_example("K", "AE", "T")], separator=" ")
    assert is_harmless(page)
    assert texts(page, "tokens-predictor") == ["the predictor’s tokens", "K", "T"]
    assert texts(page, "tokens-expert") == ["the expert’s tokens", "AE"]
    assert texts(page, "tokens-score") == ["predictor, score −1.00", "expert, score 0.00", "predictor, score 1.00"]
    assert texts(page, "tokens-text") == ["  ", "out"]  # the separators, and the reference
    assert texts(page, "tokens-heading") == ["b", "reference"]
    assert texts(page, "tokens-caption") == ["c", ""]


def test_tokens_with_their_own_spaces() -> None:
    page = draw_tokens([an_example("The", " cat", "s")])
    assert texts(page, "tokens-text") == ["", "out"]
    assert texts(page, "tokens-predictor")[1:] == ["The", "s"]


@pytest.mark.parametrize("separator", ["", " ", HOSTILE])
def test_hostile_texts_are_escaped(separator: str) -> None:
    drawing = TokenDrawing([HOSTILE, HOSTILE], [True, False], [float("nan"), float("inf")], HOSTILE, HOSTILE)
    page = draw_tokens([TokenExample(HOSTILE, HOSTILE, [drawing])], separator=separator, legend=[HOSTILE])
    assert is_harmless(page)
    assert "<script" not in page
    assert "\x00" not in page
    assert texts(page, "tokens-expert")[1].startswith("<script>alert(1)</script>")
    assert "<" not in STYLE
    assert "url(" not in STYLE


def test_nothing_to_draw() -> None:
    assert draw_tokens([]) == ""
    assert is_harmless(draw_tokens([an_example()]))


def test_authors_and_scores_must_match_the_tokens() -> None:
    with pytest.raises(ContractError, match="by_expert has 1 entries; 2 tokens need 2"):
        TokenDrawing(["a", "b"], [True], [0.0, 0.0])
    with pytest.raises(ContractError, match="scores has 3 entries"):
        TokenDrawing(["a", "b"], [True, False], [0.0] * 3)
