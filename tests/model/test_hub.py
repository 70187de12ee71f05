"""Models that travel through a Hub: a stand-in on this machine, which HF_ENDPOINT names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seqdefer import DeferringModel
from seqdefer.errors import CheckpointError, OptionError
from seqdefer.model import deferring_model
from seqdefer.model.folders import Pairing, hide_paths, write_pairing
from seqdefer.model.hub import local_folder, upload

pytest.importorskip("transformers", reason="needs the extra 'text'")

from hub_server import hub_server
from tiny_models import random_documents, tiny, tokenizer, write_lines

TOKEN = "hf_of_the_test"
README = Path(__file__).parents[2] / "README.md"
PREPARE = """
import json, sys
from pathlib import Path
from huggingface_hub import HfApi
from seqdefer import SeqdeferError

for name in ("small", "base"):
    HfApi().create_repo(f"google/flan-t5-{name}")
    HfApi().upload_folder(repo_id=f"google/flan-t5-{name}", folder_path=name)
"""
JUDGE = """
named = model
bundle = DeferringModel.from_pretrained("models/mine")
bundle.push_to_hub("me/bundled", bundle=True)
bundled = DeferringModel.from_pretrained("me/bundled")
texts = json.loads(Path("texts.json").read_text())

def error(use):
    try:
        use()
    except SeqdeferError as found:
        return str(found)

print(json.dumps({
    "outputs": [one.generate(texts).outputs for one in (bundle, named, bundled)],
    "options": [one.pairing.options for one in (bundle, named)],
    "repr": repr(named),
    "missing": error(lambda: DeferringModel.from_pretrained("me/nobody")),
    "refused": error(lambda: model.push_to_hub("me/other", token="hf_wrong")),
}))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    for name, (n_layers, seed) in {"small": (1, 1), "base": (2, 6)}.items():
        tiny("t5", n_layers, seed).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    write_lines(folder / "my.jsonl", random_documents(30))
    (folder / "texts.json").write_text(json.dumps([one.document for one in random_documents(6, seed=9)]))
    return folder


def test_readmes_lines_go_up_and_come_down(place: Path) -> None:
    """The eight lines of README as they stand there, in a process that knows the stand-in by HF_ENDPOINT."""
    (lines,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    with hub_server(TOKEN) as (address, state):
        environment = {
            **os.environ, "PYTHONPATH": str(README.parent),
            "HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HOME": str(place / "cache"),
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", PREPARE + lines + JUDGE]
        done = subprocess.run(
            command, env=environment, cwd=place, capture_output=True, text=True, check=False, timeout=300
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    original, named, bundled = found["outputs"]
    assert original == named == bundled
    # The pair is named by repository and commit, in Python and in the folder.
    (commit,) = state.commits["google/flan-t5-small"]
    for options in found["options"]:
        assert options["predictor"] == f"google/flan-t5-small@{commit}"
    assert f"google/flan-t5-small@{commit}" in found["repr"]
    assert "cannot download me/nobody" in found["missing"]
    assert "cannot upload me/other" in found["refused"]
    (files,) = state.commits["me/mine"].values()
    assert {"README.md", "app.py", "curve.svg", "deferral.json", "rejector/config.json"} <= set(files)
    assert not [name for name in files if name.startswith(("work/", "predictor/"))]
    assert b"base_model:\n- google/flan-t5-small\n- google/flan-t5-base\n" in files["README.md"]
    for repository in ("me/mine", "me/bundled"):
        (uploaded,) = state.commits[repository].values()
        assert not [name for name, content in uploaded.items() if str(place).encode() in content]
    (files,) = state.commits["me/bundled"].values()
    assert {"predictor/model.safetensors", "expert/tokenizer.json"} <= set(files)
    assert json.loads(files["deferral.json"])["options"]["expert"] == "bundle:expert"


def test_an_endpoint_of_someone_else_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"predictor": "tiny/small", "expert": "https://elsewhere.example/v1", "expert_model": "m"}
    write_pairing(tmp_path, Pairing("text", options, "p", "e"))
    monkeypatch.setattr(deferring_model, "local_folder", lambda *_, **__: tmp_path)
    with pytest.raises(OptionError, match=r"would send your inputs to .*elsewhere\.example.*--expert on the command"):
        DeferringModel.from_pretrained("someone/model")


def test_a_task_of_a_file_does_not_go_up(tmp_path: Path) -> None:
    """Others do not have the file, and need not know where it lies."""
    write_pairing(tmp_path, Pairing(str(tmp_path / "mine.py"), {}, "p", "e"))
    with pytest.raises(OptionError, match="which others do not have; install it as a package"):
        hide_paths(tmp_path)


def test_what_is_a_folder_and_what_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert local_folder("models/mine") == Path("models/mine")  # a folder that is missing, not a repository
    assert local_folder("./me/mine") == Path("me/mine")
    with pytest.raises(OptionError, match="revision 'v1' is for models on the Hub"):
        local_folder("models", revision="v1")
    with pytest.raises(OptionError, match="the repository is 'mine'; write OWNER/NAME"):
        upload(tmp_path, "mine", private=None, token=None, message="")
    with pytest.raises(OptionError, match="not fitted yet"):
        DeferringModel().save_pretrained(tmp_path / "x")


@pytest.mark.parametrize("name", ["own/na--me", "x/y.git", "own/" + "n" * 200])
def test_names_that_the_hub_does_not_have_are_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"cannot download {name}: .*; give a folder with a deferral.json"):
        local_folder(name)
    with pytest.raises(CheckpointError, match=f"cannot upload {name}: .*; check the name and the token"):
        upload(tmp_path, name, private=None, token="hf_x", message="")


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "nonsense"])
def test_a_hub_that_does_not_answer_is_one_line(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(CheckpointError, match=r"cannot upload me/mine: .*; check the name and the token"):
        upload(tmp_path, "me/mine", private=None, token="hf_x", message="")


def test_damaged_records_of_others_are_one_line(tmp_path: Path) -> None:
    """Whatever someone else wrote into deferral.json."""
    for options in ({"expert": ["https://x"]}, {"metric": 5}):
        write_pairing(tmp_path, Pairing("text", options, "p", "e"))
        with pytest.raises(CheckpointError, match="the options of task 'text' are not those of this version"):
            DeferringModel.from_pretrained(tmp_path)
