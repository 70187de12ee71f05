"""The page at `/`, where people try a pair: a few files of the package, served as they are.

They hold no secret, so no key is asked for; what they fetch from /v1 does want one. Addresses in them are relative, so
they also work behind a proxy that adds a prefix.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # keep it, but ask each time: a new version must not meet old scripts
}


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def add_page(app: FastAPI) -> None:
    files = _read_files()

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return _answer(request, files[INDEX])

    @app.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def part(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, f"the page has no file {name!r:.100}; there are {', '.join(sorted(files))}")
        return _answer(request, files[name])


def _read_files() -> dict[str, _File]:
    found = {}
    for path in resources.files("seqdefer.server").joinpath("page").iterdir():
        media_type = TYPES.get(f".{path.name.rpartition('.')[2]}")
        if media_type is not None:  # editors leave others
            content = path.read_bytes()
            found[path.name] = _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


def _answer(request: Request, file: _File) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    known = {one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")}
    if known & {file.etag, "*"}:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
