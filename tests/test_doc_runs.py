"""The shell blocks of the documentation run as they stand there, with tiny models under the names that pages use."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from doc_pages import (
    DOCS,
    PAGES,
    Block,
    goes_with_commands,
    page_name,
    python_blocks,
    run_block,
    shell_blocks,
    write_speller,
)

pytest.importorskip("transformers", reason="needs the extra 'text'")

from forks import ADDRESS, fork_server
from hub_server import hub_server
from labelling_toy import label_toy
from small_runs import TINY
from tiny_models import random_documents, tiny, tokenizer, write_lines

from benchmarks.service.processes import free_port
from seqdefer import DeferringModel, Experiment, cli
from seqdefer.evaluation.results import save_results
from seqdefer.testing import ToyTask

ON_PATH = Path(__file__).parent / "support" / "doc_command.py"
FORKS = ON_PATH.with_name("forks.py")
IMPORTED = (
    "torch._dynamo", "transformers.models.t5.modeling_t5", "transformers.models.auto.tokenization_auto",
    "seqdefer.cli", "seqdefer.tasks.text.task", "seqdefer.model.fitting", "seqdefer.server.app",
)  # fmt: skip
PAIR = {"small": (1, 1), "large": (2, 6)}
FILES = ("news.jsonl", "my.jsonl", "requests.jsonl", "others.jsonl", "fresh.jsonl", "in.jsonl")
TOKEN = "hf_of_the_test"
STOP = f"import sys; sys.path.insert(0, {str(ON_PATH.parent)!r}); from doc_command import stop_server; stop_server()"


COMMAND_PAGES = [page for page in PAGES if shell_blocks(page) or goes_with_commands(page)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """A folder with what the commands name. Nobody may change it."""
    folder = tmp_path_factory.mktemp("place")
    for name, (n_layers, seed) in PAIR.items():
        tiny("t5", n_layers, seed).save_pretrained(folder / "models" / name)
        tokenizer().save_pretrained(folder / "models" / name)
    for number, name in enumerate(FILES):
        write_lines(folder / name, random_documents(40, seed=number))
    (folder / "news.jsonl.gz").write_bytes(gzip.compress((folder / "news.jsonl").read_bytes()))
    (folder / "article.txt").write_text(random_documents(1)[0].document)
    for page, name in {"prices.md": "prices.toml", "settings.md": "serve.toml"}.items():
        (shown,) = re.findall(r"^```toml\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
        (folder / name).write_text(shown)
    with redirect_stdout(StringIO()):  # the key
        assert cli.main(["keys", "add", str(folder / "keys.json"), "bob"]) == 0
    write_speller(folder / "speller.py")
    model = DeferringModel.from_pair(folder / "models" / "small", folder / "models" / "large", device="cpu")
    model.fit(folder / "news.jsonl", folder=folder / "models" / "news", progress=False)
    label_toy(folder / "runs" / "tsp-paper")
    save_results(Experiment(ToyTask(n=60), TINY, folder / "runs" / "weather").run(), folder / "runs" / "weather")
    return folder


@pytest.fixture(scope="module")
def hub(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A stand-in for the Hub that has the pair of README; yields the environment of commands."""
    cache = str(tmp_path_factory.mktemp("cache"))
    with hub_server(TOKEN) as (address, state):
        for name, source in {"google/flan-t5-small": "small", "google/flan-t5-base": "large"}.items():
            state.commit(name, {path.name: path.read_bytes() for path in (place / "models" / source).iterdir()})
        variables = {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": cache}
        environment = {**os.environ, **variables, "PYTHONPATH": str(DOCS.parent), "OMP_NUM_THREADS": "1"}
        with fork_server(IMPORTED, environment) as server:
            yield environment | {ADDRESS: server}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::seqdefer.model.calibrated_pair.BudgetWarning")  # few inputs measure little
@pytest.mark.parametrize("page", COMMAND_PAGES, ids=page_name)
def test_commands_run(
    page: Path, place: Path, hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Blocks run in order, and with them the Python that uses their model or their server."""
    if any("curl " in block.code for block in shell_blocks(page)) and shutil.which("curl") is None:
        pytest.skip("needs curl")
    folder = tmp_path / "here"
    shutil.copytree(place, folder)
    if any("--out models/news" in block.code for block in shell_blocks(page)):  # the page fits it itself
        shutil.rmtree(folder / "models" / "news")
    monkeypatch.chdir(folder)
    port = str(free_port())
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "seqdefer").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{FORKS}" "{ON_PATH}" "$@"\n')
    (commands / "seqdefer").chmod(0o755)
    environment = {**hub, "DOC_SERVER_PORT": port, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for block in sorted([*shell_blocks(page), *python_blocks(page)], key=lambda block: block.line):
            here = replace(block, code=block.code.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
            if block.kind == "sh":
                run_shell(here, environment)
            elif goes_with_commands(page):
                if "openai" in block.code:
                    pytest.importorskip("openai", reason="serving.md has the client of OpenAI")
                run_block(page, here, names)
    finally:
        subprocess.run([sys.executable, "-c", STOP], env=environment, check=True, timeout=150)


def run_shell(block: Block, environment: dict[str, str]) -> None:
    """Run a block. Every command must succeed; those that print say something, and servers answer without an error."""
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, f"line {block.line}: {done.stderr}"
    assert "Traceback" not in done.stderr
    if "curl " in block.code:
        assert '"choices"' in done.stdout, done.stdout
    if re.search(r"^seqdefer (generate|tasks|doctor|keys list)\b(?!.*--out)", block.code, re.MULTILINE):
        assert done.stdout.strip()
