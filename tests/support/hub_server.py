"""A stand-in for the Hugging Face Hub on this machine: repositories of models, commits and downloads, in memory.

It speaks as much of the Hub's HTTP API as huggingface_hub needs to create a repository, upload a folder and download a
snapshot. Every file is a regular one: there is no LFS and no Xet storage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Files = dict[str, bytes]
REVISION = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/?]+))?")
TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/?]+)/?(\?.*)?")
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>[^?]+)")
WRITE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<action>preupload|commit)/(?P<revision>[^/?]+)")


@dataclass
class HubState:
    """Commits of repositories: files by name of each."""

    commits: dict[str, dict[str, Files]] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)

    def files(self, repo: str, revision: str | None) -> tuple[str, Files] | None:
        """Return the commit and the files of a revision; main is the last commit."""
        commits = self.commits.get(repo, {})
        name = [*commits, ""][-2] if commits and revision in (None, "main") else revision or ""
        return (name, commits[name]) if name in commits else None

    def commit(self, repo: str, added: Files) -> str:
        before = self.files(repo, None)
        files = {**({} if before is None else before[1]), **added}
        name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault(repo, {})[name] = files
        return name


class _Handler(BaseHTTPRequestHandler):
    state: HubState

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _missing(self, code: str) -> None:
        self._answer(404, {"error": "not found"}, {"X-Error-Code": code})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization", "") not in {f"Bearer {token}" for token in self.state.tokens}:
            self._answer(401, {"error": "a token is needed"})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.state.commits.setdefault(repo, {})
            self._answer(200, {"url": f"http://{self.headers['Host']}/{repo}", "name": repo})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif found := WRITE.match(self.path):
            self._write(found, body)
        else:
            self._missing("")

    def _write(self, found: re.Match[str], body: bytes) -> None:
        if found["action"] == "preupload":
            paths = [one["path"] for one in json.loads(body)["files"]]
            files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            self._answer(200, {"files": files})
            return
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        added = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        commit = self.state.commit(found["repo"], added)
        url = f"http://{self.headers['Host']}/{found['repo']}/commit/{commit}"
        self._answer(200, {"success": True, "commitUrl": url, "commitOid": commit})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if found := FILE.match(self.path):
            self._file(found)
        elif found := TREE.fullmatch(self.path):
            at = self.state.files(found["repo"], found["revision"])
            listed = [] if at is None else [{"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
                                            for path, content in at[1].items()]  # fmt: skip
            self._answer(200, listed)
        elif found := REVISION.fullmatch(self.path.partition("?")[0]):
            at = self.state.files(found["repo"], found["revision"])
            if at is None:
                self._missing("RepoNotFound")
                return
            siblings = [{"rfilename": path} for path in at[1]]
            self._answer(200, {"id": found["repo"], "modelId": found["repo"], "sha": at[0], "siblings": siblings})
        else:
            self._missing("")

    def _file(self, found: re.Match[str]) -> None:
        at = self.state.files(found["repo"], found["revision"])
        content = None if at is None else at[1].get(found["path"])
        if at is None or content is None:
            self._missing("RepoNotFound" if at is None else "EntryNotFound")
            return
        self._answer(200, content, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": at[0]})


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def hub_server(*tokens: str) -> Iterator[tuple[str, HubState]]:
    """Serve an empty Hub on 127.0.0.1; yield its address and what it holds."""
    state = HubState(tokens=set(tokens))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
