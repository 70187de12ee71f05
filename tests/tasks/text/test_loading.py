"""Checkpoints load from folders and the Hub; bad ones fail with one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import getproxies_environment

import pytest
import torch

from seqdefer.errors import CheckpointError, MissingExtraError, OptionError

pytest.importorskip("transformers", reason="needs the extra 'text'")

from text_runs import unknown_host
from tiny_models import documents, generated, tiny, tiny_text_model
from tiny_models import tokenizer as tiny_tokenizer

from seqdefer.tasks.text.codec import encode
from seqdefer.tasks.text.hub import is_hub_reachable
from seqdefer.tasks.text.loading import load_text_model
from seqdefer.tasks.text.models import DroppedRuleWarning, check_vocabulary, text_model
from seqdefer.tasks.text.pairs import TextPair, TextPredictor, load_pair
from seqdefer.tasks.text.passes import PADDING

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 8


# -- decoding rules of a checkpoint ---------------------------------------------------------------------------------


def test_rules_beyond_greedy_decoding_are_dropped_with_a_warning() -> None:
    network = tiny("bart", 1, 1)
    network.generation_config.update(num_beams=4, no_repeat_ngram_size=3, min_length=5, forced_eos_token_id=1)
    with pytest.warns(DroppedRuleWarning, match="decoded greedily; dropped: num_beams=4, min_length=5, no_repeat"):
        model = text_model(network, tiny_tokenizer(), "made-up/bart")
    inputs = documents(8).inputs
    assert generated(model, inputs, LENGTH) == generated(tiny_text_model("bart", 1, 1), inputs, LENGTH)


def test_a_decoder_without_a_start_token() -> None:
    network = tiny("t5", 1, 1)
    network.config.decoder_start_token_id = network.generation_config.decoder_start_token_id = None
    with pytest.raises(CheckpointError, match="set decoder_start_token_id"):
        text_model(network, tiny_tokenizer(), "made-up/t5")


def test_a_larger_vocabulary_is_truncated() -> None:
    """Models of one family pad their vocabularies to different sizes."""
    wide = tiny("llama", 1, 1)
    wide.resize_token_embeddings(64, mean_resizing=False)
    with torch.no_grad():
        wide.get_output_embeddings().weight[60:] = 50.0
    pair = TextPair.of(text_model(wide, tiny_tokenizer()), tiny_text_model("llama", 2, 6))
    state, _ = pair.predictor.start(documents(8).inputs)
    assert int(pair.predictor.propose(state).tokens.max()) < 60


# -- bad input ------------------------------------------------------------------------------------------------------


def test_the_error_names_the_first_difference_of_two_vocabularies() -> None:
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="</s>")
    check_vocabulary(tiny_tokenizer(), other)
    other.add_tokens(["extra"])
    with pytest.raises(OptionError, match=r"id 60 is nothing for the predictor and 'extra' for the expert \(60 and 61"):
        check_vocabulary(tiny_tokenizer(), other)


def save(folder: Path, family: str = "t5", **options: Any) -> Path:
    tiny(family, 1, 1).save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["t5", "t5-tied", "bart", "gpt2", "llama"])
def test_a_folder_is_loaded(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load_text_model(save(tmp_path / family, family))
    capfd.readouterr()
    model = load_text_model(tmp_path / family)
    assert capfd.readouterr() == ("", "")  # transformers would draw bars and log
    inputs, _ = encode(model.tokenizer, ["w5 w6 w7 w8", "w9"], "", max_tokens=3)
    assert inputs.tolist() == [[5, 6, 7], [9, PADDING, PADDING]]
    same = tiny_text_model(family, 1, 1)
    assert generated(model, inputs, LENGTH) == generated(same, inputs, LENGTH)
    assert TextPredictor(model).fingerprint == TextPredictor(same).fingerprint
    assert TextPredictor(model).fingerprint != TextPredictor(tiny_text_model(family, 1, 2)).fingerprint


def test_half_precision(tmp_path: Path) -> None:
    pair = load_pair(save(tmp_path / "a"), save(tmp_path / "b"), dtype="bfloat16")
    state, context = pair.predictor.start(documents(4).inputs)
    proposal = pair.predictor.append(state, torch.tensor([5, 6, 7, 8]))
    assert context.dtype == pair.predictor.propose(proposal).features.dtype == torch.float32
    assert pair.predictor.model.model.dtype == torch.bfloat16
    with pytest.raises(OptionError, match="unknown dtype 'int4'; available: bfloat16, float16, float32"):
        load_text_model(tmp_path / "a", dtype="int4")


def test_a_missing_folder() -> None:
    with pytest.raises(OptionError, match=r"no folder nowhere; give one that holds config.json, model.safetensors"):
        load_text_model("./nowhere")


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config.json"):
        load_text_model(tmp_path)


def test_a_pickled_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"only pickled weights \(pytorch_model.bin\), which can run code; if you trust"
    ):
        load_text_model(folder)


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        load_text_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        load_text_model(folder)


def test_a_checkpoint_with_missing_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights.pop("decoder.final_layer_norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 of its weights are missing, the first is decoder.final_layer_norm"):
        load_text_model(folder)


def test_a_model_that_does_not_write(tmp_path: Path) -> None:
    import transformers as hf

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.BertConfig(vocab_size=60, **sizes)
    for kind, name in ((hf.BertForMaskedLM, "BertForMaskedLM"), (hf.BertForSequenceClassification, "BertForSequence")):
        folder = tmp_path / name
        kind(config).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        with pytest.raises(CheckpointError, match=f"is a {name}.*, which does not write sequences; choose one like T5"):
            load_text_model(folder)
    hf.BertModel(config).save_pretrained(tmp_path / "bare")
    tiny_tokenizer().save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"of its weights are missing"):
        load_text_model(tmp_path / "bare")


@pytest.mark.parametrize(("variable", "is_reachable"), [("no_proxy", False), ("https_proxy", True)])
def test_behind_a_proxy_the_hub_is_reachable(
    variable: str, is_reachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """no_proxy was once taken for a proxy, and the Hub's client retried for half a minute."""
    monkeypatch.setattr("socket.getaddrinfo", unknown_host)
    monkeypatch.setattr("seqdefer.tasks.text.hub.getproxies", getproxies_environment)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, "localhost")
    assert is_hub_reachable() is is_reachable


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'seqdefer\[text\]'"):
        load_text_model("google-t5/t5-small")


def test_importing_the_task_does_not_import_transformers() -> None:
    code = "import sys, seqdefer.tasks.text.pairs; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
