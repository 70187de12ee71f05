"""The moving picture of the README: a fitted pair writes one text at three budgets, token by token.

`tools/record_writing.py` records the run, `tools/generate.py` draws it. The picture is an SVG that moves by CSS alone.
Where nothing may or can move, it shows the end of the run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from pictures import FONT

from seqdefer.report.style import DARK, LIGHT

MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
WIDTH, MARGIN = 820, 24
LETTER, LINE = 9.0, 25  # of the monospaced text, which is stretched to fit where a font is wider or narrower
TOP, ROW, CELL = 66, 126, 9
COLUMNS = int((WIDTH - 2 * MARGIN - 24) / LETTER)
TOKEN_SECONDS, PAUSE_SECONDS, HOLD_SECONDS = 0.3, 0.8, 6.0
WHO = {0.0: "the predictor alone", 1.0: "the expert alone"}

COLOURS = {
    "paper": ("#ffffff", "#151b23"),
    "card": ("#f5f7fa", "#1e2631"),
    "ink": ("#1f2733", "#e8edf3"),
    "soft": ("#5b6675", "#a3adba"),
    "predictor": (LIGHT["token"][0], DARK["token"][0]),
    "expert": (LIGHT["once"][0], DARK["once"][0]),
}


def moving_picture(folder: Path) -> str:
    record = json.loads((folder / "writing.json").read_text(encoding="utf-8"))
    clock = Clock(max(len(run["tokens"]) for run in record["budgets"]))
    rows = [part for number, run in enumerate(record["budgets"]) for part in draw_run(TOP + ROW * number, run, clock)]
    height = TOP + ROW * len(record["budgets"]) + 42
    body = [
        f"<title>{escape(title_of(record))}</title>",
        f"<style>{style(clock)}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>',
        *draw_legend(),
        *rows,
        *(text(MARGIN, height - 34 + 18 * place, line, "soft small") for place, line in enumerate(footnote(record))),
    ]
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n' + "\n".join(body) + "\n</svg>\n"


def title_of(record: dict[str, Any]) -> str:
    runs = [f"at a budget of {run['budget']:g}: {run['output']}" for run in record["budgets"]]
    return f"A pair of models writes a summary; {'; '.join(runs)}"


def footnote(record: dict[str, Any]) -> list[str]:
    small, large = (f"{record['pair'][role]['parameters'] / 1e6:.0f} M" for role in ("predictor", "expert"))
    pair, tested = f"two T5 models ({small} and {large} parameters)", record["tested_on"]
    return [
        f"Recorded from {pair} and a rejector fitted on {record['fitted_on']} documents of XSum.",
        f"The article is one where deferral helps; the averages are of {tested} articles that none has seen.",
    ]


# -- time ----------------------------------------------------------------------------------------------------------


class Clock:
    """When tokens appear, and the keyframes of all that does."""

    def __init__(self, n_tokens: int) -> None:
        self.seconds = PAUSE_SECONDS + TOKEN_SECONDS * n_tokens + HOLD_SECONDS
        self.keyframes: dict[str, str] = {}

    def percent(self, position: int) -> str:
        return f"{100 * (PAUSE_SECONDS + TOKEN_SECONDS * position) / self.seconds:.2f}%"

    def name(self, start: int, end: int | None = None) -> str:
        """Return the class of what is there from a token on, to the end or up to another token. -1 is the start."""
        first = "" if start < 0 else f"0%{{opacity:0}}{self.percent(start)}{{opacity:1}}"
        last = "" if end is None else ("0%{opacity:1}" if start < 0 else "") + f"{self.percent(end)}{{opacity:0}}"
        name = f"t{start}" if end is None else f"t{max(start, 0)}-{end}" + "s" * (start < 0)
        self.keyframes[name] = first + last
        return name + (" gone" if end is not None else "")


def style(clock: Clock) -> str:
    light, dark = ("".join(f"--{name}:{pair[mode]};" for name, pair in COLOURS.items()) for mode in (0, 1))
    shown = {name: frames for name, frames in clock.keyframes.items() if frames}
    rules = [
        f"svg{{{light}font:15px {FONT}}}",
        f"@media (prefers-color-scheme:dark){{svg{{{dark}}}}}",
        "text{fill:var(--ink)}.soft{fill:var(--soft)}.small{font-size:13px}.bold{font-weight:600}.right{text-anchor:end}",
        ".paper{fill:var(--paper)}.card{fill:var(--card)}.gone{opacity:0}",
        f".mono{{font:15px {MONO}}}",
        ".predictor{fill:var(--predictor)}.expert{fill:var(--expert)}text.expert.mono{font-weight:700}",
        "rect.ground{fill:var(--expert);fill-opacity:.16}",
        *(f"@keyframes {name}{{{frames}}}" for name, frames in shown.items()),
        *(f".{name}{{animation:{name} {clock.seconds:g}s step-end infinite}}" for name in shown),
        "@media (prefers-reduced-motion:reduce){*{animation:none!important}}",
    ]
    return "\n".join(rules)


# -- parts ---------------------------------------------------------------------------------------------------------


def text(x: float, y: float, words: str, names: str = "", **attributes: str) -> str:
    more = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}" class="{names}"{more}>{escape(words)}</text>'


def draw_legend() -> list[str]:
    entries = [(470, "predictor", "by the predictor"), (640, "expert", "by the expert")]
    return [
        text(MARGIN, 36, "Two models summarise one news article", "bold"),
        *(f'<rect x="{x}" y="25" width="13" height="13" rx="3" class="{who}"/>' for x, who, _ in entries),
        *(text(x + 20, 36, words, "soft") for x, _, words in entries),
    ]


def draw_run(top: float, run: dict[str, Any], clock: Clock) -> list[str]:
    """Draw the text at one budget, the counter of the expert's tokens, and what the budget does on average."""
    tokens, budget = run["tokens"], run["budget"]
    counts = list(accumulate(int(one["source"] == "expert") for one in tokens))
    right = WIDTH - MARGIN
    strip, counter = right - CELL * len(tokens), right - 398
    average = f"on average: {100 * run['mean_share']:.0f} % by the expert, ROUGE-1 {100 - run['mean_loss']:.1f}"
    label = f"budget {budget:g}"
    return [
        text(MARGIN, top + 14, label, "bold"),
        text(MARGIN + 98, top + 14, WHO.get(budget, "the rejector chooses where"), "soft"),
        *_counter(counter, top + 14, counts, clock),
        text(counter + 6, top + 14, f"of {len(tokens)} tokens by the expert", "soft"),
        *(
            f'<rect x="{strip + CELL * place:g}" y="{top + 3:g}" width="{CELL - 1.5}" height="12" rx="2" '
            f'class="{one["source"]} {clock.name(place)}"/>'
            for place, one in enumerate(tokens)
        ),
        f'<rect class="card" x="{MARGIN}" y="{top + 24:g}" width="{WIDTH - 2 * MARGIN}" height="62" rx="6"/>',
        *_written(top + 46, tokens, clock),
        text(right, top + 104, average, "soft small right"),
    ]


def _counter(x: float, y: float, counts: Sequence[int], clock: Clock) -> list[str]:
    """Draw every count of the expert's tokens, each as long as it holds."""
    changes = [(-1, 0)] + [(place, n) for place, n in enumerate(counts) if n != ([0, *counts])[place]]
    ends = [place for place, _ in changes[1:]] + [None]
    return [
        text(x, y, str(n), f"bold right expert {clock.name(place, end)}")
        for (place, n), end in zip(changes, ends, strict=True)
    ]


def _written(top: float, tokens: Sequence[dict[str, Any]], clock: Clock) -> list[str]:
    """Draw each token where it stands: words are not broken, and no line is wider than the picture."""
    parts: list[str] = []
    for place, (column, line) in enumerate(placed([one["text"] for one in tokens])):
        word, source = tokens[place]["text"].strip(), tokens[place]["source"]
        if not word:
            continue
        x, y, wide = MARGIN + 12 + LETTER * column, top + LINE * line, LETTER * len(word)
        when = clock.name(place)
        if source == "expert":
            parts.append(
                f'<rect class="ground {when}" x="{x - 1:g}" y="{y - 15:g}" width="{wide + 2:g}" height="20" rx="3"/>'
            )
        parts.append(text(x, y, word, f"mono {source} {when}", textLength=f"{wide:g}"))
    return parts


def placed(pieces: Sequence[str]) -> list[tuple[int, int]]:
    """Return the column and line at which each piece begins, its leading space left out."""
    places: list[tuple[int, int]] = []
    column = line = 0
    for number, piece in enumerate(pieces):
        begins_word = piece.startswith(" ")
        rest = pieces[number + 1 :]
        n_joined = next((n for n, other in enumerate(rest) if other.startswith(" ")), len(rest))
        word = len(piece.strip()) + sum(len(other) for other in rest[:n_joined])
        if begins_word and column + 1 + word > COLUMNS:
            column, line = 0, line + 1
        elif begins_word and column:
            column += 1
        places.append((column, line))
        column += len(piece.strip())
    return places
