"""A small completions server around a Hugging Face model that speaks vLLM's protocol: prompts as texts or token ids,
`prompt_logprobs`, `return_token_ids`. Its answers are those of a plain forward pass, one request at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from tiny_models import random_documents, write_lines
from torch import Tensor

from seqdefer.tasks.text.models import TextModel

FIELDS = frozenset({"prompt_logprobs", "return_token_ids", "decoded_token", "ids"})


class VllmLike(ThreadingHTTPServer):
    """Serves `model` on a free port. `knows` are the parts of the protocol that it supports; a field that it does not
    know is ignored, and ids that it does not take are refused. `asked` holds the bodies of all requests."""

    daemon_threads = True

    def __init__(self, model: TextModel, knows: frozenset[str] = FIELDS) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.knows, self.asked = model, knows, list[dict[str, Any]]()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def refusal(self, body: dict[str, Any]) -> str:
        """Return why a request is refused, as vLLM words it; "" otherwise."""
        if isinstance(body["prompt"], str):
            return ""
        if "ids" not in self.knows:
            return "prompt must be a string"
        unknown = [token for token in body["prompt"] if token >= len(self.model.tokenizer)]
        return f"Token id {unknown[0]} is out of vocabulary" if unknown else ""

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt: Any = body["prompt"]
        ids = list(self.model.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
        new = self._continue(ids, body["max_tokens"])
        is_finished = bool(new) and new[-1] in self.model.ends
        choice: dict[str, Any] = {
            "index": 0,
            "text": self.model.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            "finish_reason": "stop" if is_finished else "length",
        }
        if body.get("return_token_ids") and "return_token_ids" in self.knows:
            choice |= {"token_ids": new, "prompt_token_ids": ids}
        if "prompt_logprobs" in self.knows:
            choice["prompt_logprobs"] = self._prompt_logprobs(ids) if body.get("prompt_logprobs") else None
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}

    def _logits(self, ids: Sequence[int]) -> Tensor:
        logits: Tensor = self.model.model(input_ids=torch.tensor([ids])).logits[0]  # (n, V)
        return logits

    def _continue(self, ids: list[int], n: int) -> list[int]:
        new: list[int] = []
        while len(new) < n and not (new and new[-1] in self.model.ends):
            new.append(int(self._logits(ids + new)[-1].argmax()))
        return new

    def _prompt_logprobs(self, ids: list[int]) -> list[Any]:
        """Return for each token but the first what it is, and the likeliest token in its place."""
        entries: list[Any] = [None]
        for logits, token in zip(self._logits(ids)[:-1], ids[1:], strict=True):
            best = int(logits.argmax())
            entry = {str(token): self._about(logits, token, int((logits >= logits[token]).sum()))}
            entries.append(entry | {str(best): self._about(logits, best, 1)})
        return entries

    def _about(self, logits: Tensor, token: int, rank: int) -> dict[str, Any]:
        about = {"logprob": float(logits.log_softmax(0)[token]), "rank": rank}
        word = self.model.tokenizer.decode([token])
        return about | ({"decoded_token": word} if "decoded_token" in self.knows else {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: VllmLike

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.asked.append(body)
            refusal = self.server.refusal(body)
            answer = {"error": {"message": refusal}} if refusal else self.server.complete(body)
        content = json.dumps(answer).encode()
        self.send_response(400 if refusal else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def forty_documents(folder: Path, url: str) -> list[str]:
    """Return the command that fits a rejector by token on 40 documents, with the predictor in `folder`."""
    write_lines(folder / "train.jsonl", random_documents(45))  # some are empty
    return [
        "fit", "text", "--predictor", str(folder / "predictor"), "--expert", url, "--expert-model", "toy",
        "--train", str(folder / "train.jsonl"), "--suffix", " w7", "--length", "8", "--train-documents", "30",
        "--validation-documents", "10", "--expert-by-token", "--device", "cpu", "--quiet", "--out",
        str(folder / "model"),
    ]  # fmt: skip


@contextmanager
def vllm_like(model: TextModel, knows: frozenset[str] = FIELDS) -> Iterator[VllmLike]:
    server = VllmLike(model, knows)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
