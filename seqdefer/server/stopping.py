"""Stop strings: a text ends before the first of them, and none of it is shown before that is known.

stop = StopText(("END",))
stop.push("one E", is_last=False)      # ("one ", False): the E may begin a stop string
stop.push("ND two", is_last=False)     # ("", True): it did
"""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """The end of a text that is not shown yet. Without stop strings, everything is shown at once."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._pending = tuple(stops), ""

    def push(self, added: str, *, is_last: bool) -> tuple[str, bool]:
        """Add to the text. Return what can be shown, and whether a stop string ended the text."""
        text = self._pending + added
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if places:
            return text[: min(places)], True
        n_held = 0 if is_last else max((_overlap(text, stop) for stop in self._stops), default=0)
        shown, self._pending = text[: len(text) - n_held], text[len(text) - n_held :]
        return shown, False


def _overlap(text: str, stop: str) -> int:
    """Return how many letters at the end of a text begin a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
