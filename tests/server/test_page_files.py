"""The files of the page: types, headers, caching, no other sites, no HTML from data, contrast of colours."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest
from servers import RunningServer, check_error

from seqdefer.server.app import MEDIA_TYPES, PAGE_HEADERS

PAGE = resources.files("seqdefer.server").joinpath("page")
FILES = sorted(path.name for path in PAGE.iterdir())


@pytest.mark.parametrize("path", ["/", "/docs", *(f"/page/{name}" for name in FILES)])
def test_types_headers_and_caching(server: RunningServer, path: str) -> None:
    response = server.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(MEDIA_TYPES[Path(path).suffix or ".html"])
    assert response.headers.items() >= PAGE_HEADERS.items()
    for etag in (response.headers["etag"], f'"other", W/{response.headers["etag"]}'):
        again = server.get(path, headers={"if-none-match": etag})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == response.headers["etag"]
    assert server.get(path, headers={"if-none-match": '"other"'}).content == response.content
    head = server.http.head(f"{server.address}{path}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(response.content))


@pytest.mark.parametrize("name", ["pgae.js", "../app.py", "..%2fapp.py", "%00"])
def test_other_files_are_not_served(server: RunningServer, name: str) -> None:
    message = check_error(server.get(f"/page/{name}"), 404)["message"]
    if name == "pgae.js":
        assert message == f"the page has no file 'pgae.js'; available: {', '.join(FILES)}"


@pytest.mark.parametrize("name", FILES)
def test_no_other_sites_and_no_html_from_data(name: str) -> None:
    text = PAGE.joinpath(name).read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text)
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


def luminance(colour: str) -> float:
    """Return WCAG's relative luminance."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_colours(scheme: str) -> None:
    text = PAGE.joinpath("page.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", text.split("color-scheme: ")[1 if scheme == "light" else 3]))
    pairs = {
        "paper": ("ink", "soft", "predictor", "expert", "accent"), "ground": ("ink", "soft", "predictor", "expert"),
        "field": ("ink", "soft", "trouble"), "expert-ground": ("expert",), "accent": ("on-accent",),
        "trouble-ground": ("trouble",),
    }  # fmt: skip
    for ground, texts in pairs.items():
        for one in texts:
            dark, light = sorted((luminance(colours[one]), luminance(colours[ground])))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{one} on {ground}"
