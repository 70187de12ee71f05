"""What a report shows of examples: drawings and text alone, nothing that could act or fetch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_report import HOSTILE, Walk

from seqdefer.evaluation.results import Results
from seqdefer.report.html import render_report
from seqdefer.report.markup import Markup, element
from seqdefer.report.panels import is_harmless, panels_of
from seqdefer.tasks.common.token_drawing import TokenExample, draw_tokens
from seqdefer.tasks.tsp.drawing import TourDrawing, draw_gallery


def test_markup_escapes_children_and_attributes() -> None:
    assert element("b", "<i>", title='"') == '<b title="&quot;">&lt;i&gt;</b>'
    assert element("b", Markup("<i></i>"), hidden=True, id=None, tabindex=0) == '<b hidden="" tabindex="0"><i></i></b>'


def gallery() -> str:
    """Draw tours with titles that try to break out of the page."""
    generator = torch.Generator().manual_seed(0)
    drawings = []
    for kept in (0, 3, 8):
        cities, order = torch.rand(8, 2, generator=generator), torch.randperm(8, generator=generator)
        authors, own = torch.arange(8) >= kept, torch.arange(8)
        drawings.append(TourDrawing(cities, order, authors, own, 12.5, kept / 8, title=HOSTILE if kept else "plain"))
    return str(draw_gallery(drawings))


GALLERY = gallery()
HARMLESS = {
    "the gallery of tours": GALLERY,
    "nothing": "",
    "words": "a &lt; b &amp; c > d — ±",
    "what markup writes": str(element("p", "a", element("br"), element("mark", "<b>", class_="expert"), hidden=True)),
    "a table": '<table><tbody><tr><th scope="row">a</th><td colspan="2">1</td></tr></tbody></table>',
    "a drawing in a drawing": '<svg viewBox="0 0 1 1"><g><svg><title>a</title><path d="M0 0"></path></svg></g></svg>',
    "a style for the page": "<style>.a > b { color: red }</style><p>a</p>",
    "sound": str(draw_tokens([TokenExample("a", "b", [], b"fLaC, or so")])),
}


@pytest.mark.parametrize("html", HARMLESS.values(), ids=HARMLESS)
def test_drawings_and_text_are_harmless(html: str) -> None:
    assert is_harmless(html)
    Walk(html)


SOUND = '<audio class="a" controls="" src="data:audio/flac;base64,AAAA"></audio>'
HOSTILE_TAGS = (
    "script iframe object embed base meta link form input button select textarea template noscript noembed xmp "
    "plaintext listing frameset frame img image video audio source picture a area map canvas dialog details math "
    "marquee body html head nobr font foreignObject use animate animateTransform animateMotion set handler x-custom "
    "filter feImage mask pattern linearGradient marker symbol defs view switch metadata"
)
HOSTILE_ATTRIBUTES = (
    "onclick onload ONCLICK onClick onbegin on onfocus href xlink:href src srcset action formaction background data id "
    "name ping poster manifest style- xml:base data-series tabindex autofocus contenteditable accesskey popover slot "
    "is begin attributeName values to from http-equiv content srcdoc target download usemap"
)
HOSTILE_HTML = {
    **{f"<{tag}>": f"<p>a</p><{tag}>a</{tag}>" for tag in HOSTILE_TAGS.split()},
    **{f"<{tag}> in a drawing": f"<svg><{tag}>a</{tag}></svg>" for tag in HOSTILE_TAGS.split()},
    **{f"{name}=": f'<p {name}="alert(1)">a</p>' for name in HOSTILE_ATTRIBUTES.split()},
    **{f"{name}= in a drawing": f'<svg {name}="alert(1)"></svg>' for name in HOSTILE_ATTRIBUTES.split()},
    "a script in capitals": "<SCRIPT>alert(1)</SCRIPT>",
    "a link to a script": '<a href="javascript:alert(1)">a</a>',
    "a link in a drawing": '<svg><a xlink:href="javascript:alert(1)"><text>a</text></a></svg>',
    "a style in a drawing": "<svg><style>a{}</style></svg>",
    "a comment": "<!-- a -->",
    "a comment that ends early": "<!--><script>alert(1)</script>-->",
    "a comment that ends oddly": "<!-- --!><script>alert(1)</script> -->",
    "a doctype": "<!doctype html>",
    "a processing instruction": "<?xml version='1.0'?>",
    "character data": "<svg><![CDATA[<script>alert(1)</script>]]></svg>",
    "character data outside of drawings": "<![CDATA[x><script>alert(1)</script>]]>",
    "a drawing that stays open": "<svg><g></g>",
    "a paragraph that stays open": "<p>a",
    "an end that closes nothing": "</div></section><p>a</p>",
    "ends in the wrong order": "<div><p></div></p>",
    "an end with attributes": '<p></p onclick="a">',
    "half a tag": "<p>a</p><scr",
    "half an attribute": '<p class="',
    "a lone bracket": "a < b",
    "no quotes": "<p class=a>a</p>",
    "single quotes": "<p class='a'>a</p>",
    "no value": "<p hidden>a</p>",
    "a slash for a space": '<p/onclick="alert(1)">a</p>',
    "a line end for a space": '<p\nonclick="alert(1)">a</p>',
    "a form feed for a space": '<p\x0conclick="alert(1)">a</p>',
    "no space between attributes": '<p class="a"onclick="alert(1)">a</p>',
    "a null in a name": '<p on\x00click="alert(1)">a</p>',
    "a tag that closes itself": "<div/><p>a</p>",
    # Python's parser reads these in one way and browsers in another.
    "two equals signs": '<p class=="><script>alert(1)</script>">a</p>',
    "a title that browsers read to its end": '<title><b class="</title><script>alert(1)</script>"></b></title>',
    "a title in a title": '<svg><title><title><b class="</title><script>alert(1)</script>"></b></title></title></svg>',
    "a title after text has left the drawing": (
        '<svg><p></p><title><b class="</title><script>alert(1)</script>"></b></title></svg>'
    ),
    "a style that is in a drawing after all": (
        '<svg><desc><div></svg></div></desc><style><img src="x" onerror="alert(1)"></style>'
    ),
    "a style in the words of a drawing": "<svg><desc><style>a</style></desc></svg>",
    "tags in a style": "<style><script>alert(1)</script></style>",
    "sound from elsewhere": SOUND.replace("data:audio/flac;base64,", "http://localhost/"),
    "sound of another type": SOUND.replace("audio/flac", "text/html"),
    "sound that starts by itself": SOUND.replace("<audio ", '<audio autoplay="" '),
    "sound with more in it": SOUND.replace("></audio>", "><p>a</p></audio>"),
    "sound with a handler": SOUND.replace("></audio>", ' onplay="alert(1)"></audio>'),
    "sound in a drawing": f"<svg>{SOUND}</svg>",
    "a style that ends early": "<style></style ><script>alert(1)</script></style>",
    "a drawing in the words of a drawing": "<svg><title><svg></svg></title></svg>",
    "text in a drawing": "<svg><g><div>a</div></g></svg>",
    "shapes outside of a drawing": '<path d="M0 0"></path>',
    "brackets in an attribute": '<p class="<script>">a</p>',
}  # fmt: skip


def test_sound_as_such_is_harmless() -> None:
    """The hostile kinds differ from it in one place each."""
    assert is_harmless(f"<p>{SOUND}</p>")


@pytest.mark.parametrize("html", HOSTILE_HTML.values(), ids=HOSTILE_HTML)
def test_other_markup_is_not_harmless(html: str) -> None:
    """Alone, and after a harmless fragment."""
    assert not is_harmless(html)
    assert not is_harmless(GALLERY + html)


def test_the_policy_of_the_page_forbids_fetching(page: str) -> None:
    """CSS has too many ways to write an address, so the policy tells the browser to fetch nothing."""
    assert is_harmless('<p style="background:url(http://localhost/a.png)">a</p><style>@import "a.css";</style>')
    policies = [tag["content"] for name, tag in Walk(page).tags if tag.get("http-equiv") == "Content-Security-Policy"]
    allowed = dict(part.strip().split(" ", 1) for part in str(policies[0]).split(";"))
    assert allowed.pop("default-src") == "'none'"
    assert allowed == {
        "style-src": "'unsafe-inline'",
        "script-src": "'unsafe-inline'",
        "img-src": "data:",
        "media-src": "data:",
    }
    assert page.index("Content-Security-Policy") < page.index("<style") < page.index("<body")


def test_panels_of_a_folder(tmp_path: Path, results: Results) -> None:
    assert panels_of(tmp_path) == []
    pictures = tmp_path / "examples.html"
    pictures.write_text(GALLERY, encoding="utf-8")
    (panel,) = panels_of(tmp_path)
    assert panel.html == GALLERY
    assert Walk(render_report(results, panels=[panel])).tags.count(("figure", {})) == 3
    for hostile in (GALLERY + "<script>alert(1)</script>", GALLERY[:-1], ""):
        pictures.write_text(hostile, encoding="utf-8")
        assert panels_of(tmp_path) == []
    pictures.write_bytes(b"<p>\xff\xfe</p>")  # not UTF-8: once a traceback
    assert [panel.html for panel in panels_of(tmp_path)] == ["<p>\ufffd\ufffd</p>"]
