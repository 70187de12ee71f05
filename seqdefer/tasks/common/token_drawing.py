"""Draw sequences of tokens as HTML: each token in the colour of its author, its score on hover.

    rollout = TokenDrawing(("K", "AE", "T"), (False, True, False), (-2.1, 0.4, -3.0), "budget 10 %", "33 % wrong")
    draw_tokens([TokenExample("cat", "K AE T", (rollout,))], separator=" ")

The expert's tokens are also underlined, so that authors can be told apart without colour.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seqdefer.errors import ContractError
from seqdefer.interfaces import Task
from seqdefer.report.markup import NBSP, Markup, element, escape, number
from seqdefer.types import Examples, Rollout

_PREDICTOR, _EXPERT, _RULE, _INK, _PAPER = "#0062bd", "#c2500a", "#dfe4ea", "#1c2430", "#ffffff"


@dataclass(frozen=True)
class TokenDrawing:
    """A sequence with its authors and scores."""

    tokens: Sequence[str]
    by_expert: Sequence[bool]
    scores: Sequence[float]  # of deferring each token
    heading: str = ""  # such as the budget
    caption: str = ""  # such as the loss

    def __post_init__(self) -> None:
        n = len(self.tokens)
        for name, values in {"by_expert": self.by_expert, "scores": self.scores}.items():
            if len(values) != n:
                raise ContractError(f"{name} has {len(values)} entries; {n} tokens need {n}")


@dataclass(frozen=True)
class TokenExample:
    """An input, the sequences written for it, and its reference. `sound` is a FLAC file to play with it."""

    source: str
    reference: str
    drawings: Sequence[TokenDrawing]
    sound: bytes = b""


# Names begin with `tokens` to leave the rest of the page alone. The page's own colours take precedence.
STYLE = f"""
.tokens {{
  --tokens-predictor: var(--token-0, {_PREDICTOR}); --tokens-expert: var(--once-0, {_EXPERT});
  --tokens-rule: var(--rule, {_RULE}); --tokens-ink: var(--ink, {_INK}); --tokens-paper: var(--paper, {_PAPER});
  overflow-x: clip;
}}
.tokens-legend {{
  display: flex; flex-wrap: wrap; gap: 6px 24px; margin: 16px 0 0; padding: 0; list-style: none; font-size: 14px;
}}
.tokens-example {{ margin: 24px 0 0; break-inside: avoid; }}
.tokens-source {{ margin: 0 0 6px; font-size: 15px; overflow-wrap: anywhere; }}
.tokens-sound {{ display: block; width: 100%; max-width: 420px; height: 36px; margin: 0 0 8px; }}
.tokens-row {{
  display: grid; grid-template-columns: 7em minmax(0, 1fr) auto; gap: 4px 16px; align-items: baseline;
  padding: 5px 0; border-top: 1px solid var(--tokens-rule);
}}
.tokens-heading, .tokens-caption {{ font-size: 13.5px; color: var(--soft, inherit); }}
.tokens-caption {{ text-align: right; }}
.tokens-text {{ font-size: 16px; line-height: 1.6; white-space: pre-wrap; overflow-wrap: anywhere; }}
.tokens-predictor, .tokens-expert {{ position: relative; }}
.tokens-predictor {{ color: var(--tokens-predictor); }}
.tokens-expert {{
  color: var(--tokens-expert); font-weight: 600; text-decoration: underline; text-underline-offset: 3px;
}}
.tokens-row .tokens-predictor:hover, .tokens-row .tokens-expert:hover {{ background: var(--tokens-rule); }}
.tokens-score {{
  display: none; position: absolute; left: 0; bottom: 100%; z-index: 1; padding: 2px 7px; border-radius: 4px;
  background: var(--tokens-ink); color: var(--tokens-paper); font-size: 12.5px; font-weight: 400; line-height: 1.4;
  white-space: nowrap; pointer-events: none;
}}
:hover > .tokens-score {{ display: block; }}
@media screen and (max-width: 640px) {{
  .tokens-row {{ grid-template-columns: minmax(0, 1fr) auto; }}
  .tokens-row .tokens-text {{ grid-column: 1 / -1; grid-row: 2; }}
}}
@media print {{ .tokens-text {{ font-size: 10pt; }} .tokens-sound {{ display: none; }} }}
"""


def drawings_of(
    task: Task,
    examples: Examples,
    rollouts: Mapping[float, Rollout],
    pieces: Callable[[list[Any]], Sequence[str]],
    quality: Callable[[float], str],
) -> list[tuple[TokenDrawing, ...]]:
    """Return what was written for each example at each budget. `pieces` shows tokens, `quality` a loss."""
    columns = []
    for budget, rollout in rollouts.items():
        losses = task.sequence_loss(examples.to(rollout.sequences.tokens.device), rollout.sequences).tolist()
        columns.append([_drawing(rollout, row, budget, pieces, quality(loss)) for row, loss in enumerate(losses)])
    return list(zip(*columns, strict=True))


def _drawing(
    rollout: Rollout, row: int, budget: float, pieces: Callable[[list[Any]], Sequence[str]], quality: str
) -> TokenDrawing:
    n = int(rollout.sequences.lengths[row])
    tokens, authors, scores = (
        part[row, :n].tolist() for part in (rollout.sequences.tokens, rollout.by_expert, rollout.scores)
    )
    caption = f"{quality}, {sum(authors)} of {n} by the expert"
    return TokenDrawing(pieces(tokens), authors, scores, f"budget {number(100 * budget, 0)}{NBSP}%", caption)


def draw_tokens(examples: Sequence[TokenExample], *, separator: str = "", legend: Sequence[str] = ()) -> Markup:
    """Return a legend, then for each example its input, its sequences and its reference.

    `separator` joins tokens that have no spaces of their own. `legend` adds entries to the legend.
    """
    if not examples:
        return Markup()
    drawn = [_draw_example(example, separator) for example in examples]
    return element("div", element("style", Markup(STYLE)), _legend(legend), *drawn, class_="tokens")


def _legend(more: Sequence[str]) -> Markup:
    entries = {"predictor": "the predictor’s tokens", "expert": "the expert’s tokens"}
    items = [element("li", element("span", text, class_=f"tokens-{author}")) for author, text in entries.items()]
    notes = [element("li", text) for text in ("point at a token for its score", *more)]
    return element("ul", *items, *notes, class_="tokens-legend")


def _draw_example(example: TokenExample, separator: str) -> Markup:
    rows = [_row(drawing.heading, _draw_sequence(drawing, separator), drawing.caption) for drawing in example.drawings]
    source = element("p", element("b", example.source), class_="tokens-source")
    reference = _row("reference", example.reference, "")
    return element("div", source, _player(example.sound), *rows, reference, class_="tokens-example")


def _player(sound: bytes) -> Markup:
    """Return a player of a FLAC file that is part of the page."""
    if not sound:
        return Markup()
    address = f"data:audio/flac;base64,{base64.b64encode(sound).decode()}"
    return element("audio", class_="tokens-sound", controls=True, src=address)


def _row(heading: str, text: str, caption: str) -> Markup:
    return element(
        "div",
        element("span", heading, class_="tokens-heading"),
        element("span", text, class_="tokens-text"),
        element("span", caption, class_="tokens-caption"),
        class_="tokens-row",
    )


def _draw_sequence(drawing: TokenDrawing, separator: str) -> Markup:
    drawn = [_token(*parts) for parts in zip(drawing.tokens, drawing.by_expert, drawing.scores, strict=True)]
    return Markup(escape(separator).join(drawn))


def _token(text: str, by_expert: bool, score: float) -> Markup:
    author = "expert" if by_expert else "predictor"
    hint = element("span", f"{author}, score {number(score, 2)}", class_="tokens-score")
    return element("span", text, hint, class_=f"tokens-{author}")
