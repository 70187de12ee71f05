"""A real pair of T5 models writes what `generate` writes, is labelled as by plain completions, and is explored as the
engine meets it."""

from __future__ import annotations

import gzip
import json
import runpy
from pathlib import Path

import pytest
import torch

from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff, interleave, roll_out
from seqdefer.labels.exploration import explore_trees
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.labels.nodes import END
from seqdefer.labels.trees import DecisionTrees
from seqdefer.types import Examples

pytest.importorskip("transformers", reason="needs the extra 'text'")

from text_runs import package_scores
from tiny_models import LENGTH, Decided, PairTask, generated, random_pattern, rows_of, slow, task_of, written

from seqdefer.tasks.text.codec import TruncationWarning, encode
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.pairs import TextPair, load_pair
from seqdefer.tasks.text.task import TextTask

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoints(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of predictor and expert."""
    script = shared_dir / "models" / "unpack.py"
    if not script.is_file():
        pytest.skip("needs the pair in shared/models")
    folder = tmp_path_factory.mktemp("pair")
    unpack = runpy.run_path(str(script))["unpack"]
    for name in ("predictor", "expert"):
        unpack(script.parent / "xsum-t5" / name, folder / name)
    return folder / "predictor", folder / "expert"


@pytest.fixture(scope="module")
def real_pair(checkpoints: tuple[Path, Path]) -> TextPair:
    return load_pair(*checkpoints)


@pytest.fixture(scope="module")
def two(shared_dir: Path, real_pair: TextPair) -> Examples:
    with gzip.open(shared_dir / "data" / "xsum" / "xsum_test.jsonl.gz", "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line, _ in zip(lines, range(2), strict=False)]
    texts = [each["document"] for each in found]
    inputs, _ = encode(real_pair.predictor.model.tokenizer, texts, "summarize: ", max_tokens=64)
    return Examples(inputs, inputs[:, :8], torch.arange(len(found)))


def test_the_real_pair_writes_what_generate_writes(real_pair: TextPair, two: Examples) -> None:
    n, length = len(two), 20
    drafts = generated(real_pair.predictor.model, two.inputs, length)
    assert written(real_pair, two, HandOff(torch.full((n,), length)), length) == drafts
    expected = generated(real_pair.expert.model, two.inputs, length)
    assert written(real_pair, two, Decided(torch.ones(n, length, dtype=torch.bool)), length) == expected
    assert drafts != expected
    prefixes = torch.tensor([row[:4] for row in drafts])
    handed = generated(real_pair.expert.model, two.inputs, length, prefixes)
    assert written(real_pair, two, HandOff(torch.full((n,), 4)), length) == handed


def test_the_real_pair_in_turn(real_pair: TextPair, two: Examples) -> None:
    pattern = random_pattern(2)
    together = written(real_pair, two, Decided(pattern))
    assert together == [slow(real_pair, one, row) for one, row in zip(two.inputs, pattern.tolist(), strict=True)]
    task = PairTask(real_pair, two, LENGTH)
    drafted = draft(real_pair.predictor, two, task.spec)
    short, calls = hand_off_table(task, two, drafted)
    assert torch.equal(short.loss, hand_off_table(task, two, drafted, shortcut=False)[0].loss)
    assert calls.saved > 0


# -- the real pair in a task ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def news(shared_dir: Path, checkpoints: tuple[Path, Path]) -> TextTask:
    """Six short documents for the real pair, two in each part."""
    from seqdefer.tasks.text.data import read_corpus

    pair = load_pair(*checkpoints, cache_bytes=2**26, shown="both")
    documents = read_corpus(shared_dir / "data" / "xsum" / "xsum_test.jsonl.gz").documents[:6]
    with pytest.warns(TruncationWarning):
        return task_of(pair, documents, prefix="summarize: ", input_tokens=64, length=20)


def everyone(task: TextTask) -> Examples:
    parts = [task.split(name) for name in ("train", "validation", "test")]
    return Examples(*(torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "targets", "ids")))


def test_the_real_pair_alone_is_generate(news: TextTask) -> None:
    examples = everyone(news)
    for kept, writer in ((20, news.predictor), (0, news.expert)):
        model: TextModel = writer.model
        rollout = roll_out(news.predictor, news.expert, examples, HandOff(torch.full((6,), kept)), news.spec)
        assert rows_of(rollout.sequences) == generated(model, examples.inputs, 20)
        texts = [model.tokenizer.decode(row, skip_special_tokens=True) for row in rows_of(rollout.sequences)]
        expected = package_scores(texts, [news.documents[place].summary for place in examples.ids.tolist()])
        torch.testing.assert_close(
            news.sequence_loss(examples, rollout.sequences), torch.tensor(expected), rtol=0, atol=1e-4
        )


def test_explored_trees_of_the_real_pair_hold_what_the_engine_meets(news: TextTask) -> None:
    examples = news.split("test")
    trees = explore_trees(news, examples, 3)
    for leaf in (trees.nodes.children[: trees.nodes.size] == END).any(1).nonzero().squeeze(1).tolist()[::2]:
        row, path = int(trees.nodes.example[leaf]), path_to(trees, leaf)
        pattern = torch.zeros(1, 20, dtype=torch.bool)
        pattern[0, : len(path)] = torch.tensor([defer for _, defer in path])
        one = examples.select(torch.tensor([row]))
        steps = interleave(news.predictor, news.expert, one, Decided(pattern), news.spec)
        for (node, defer), step in zip(path, steps, strict=False):
            kept = trees.proposal(torch.tensor([node]))
            assert torch.equal(step.proposal.tokens, kept.tokens)
            torch.testing.assert_close(step.proposal.features, kept.features, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(step.proposal.uncertainty, kept.uncertainty, rtol=1e-3, atol=1e-3)
            assert int(step.tokens) == int(trees.nodes.tokens[node, int(defer)])


def path_to(trees: DecisionTrees, leaf: int) -> list[tuple[int, bool]]:
    """The nodes from the root to `leaf`, and the decisions taken there; at the leaf, the one that ends it."""
    children, path = trees.nodes.children, [(leaf, bool(trees.nodes.children[leaf, 0] != END))]
    node = leaf
    while (parent := int(trees.nodes.parent[node])) >= 0:
        path.append((parent, bool(children[parent, 0] != node)))
        node = parent
    return path[::-1]
