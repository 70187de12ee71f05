"""What a generation counts, by hand."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_pair import Toy, numbers

from seqdefer.model.generation import Generation
from seqdefer.types import Rollout, Sequences


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5))
@settings(max_examples=50)
def test_counts_by_hand(authors: list[list[bool]]) -> None:
    n, lengths = len(authors), torch.tensor([len(row) for row in authors])
    by_expert = torch.tensor([[*row, *[False] * (6 - len(row))] for row in authors])
    tokens = torch.zeros(n, 6, dtype=torch.long)
    written = Generation(["x"] * n, Rollout(Sequences(tokens, lengths), by_expert, torch.zeros(n, 6)))
    assert written.expert_tokens == [sum(row) for row in authors]
    assert written.predictor_tokens == [len(row) - sum(row) for row in authors]
    assert written.sources == [["expert" if one else "predictor" for one in row] for row in authors]
    assert written.switches == [sum(row[i] != row[i - 1] for i in range(1, len(row))) for row in authors]
    assert written.cost() == [float(sum(row)) for row in authors]
    assert written.cost(10.0, 0.5) == [10.0 * sum(row) + 0.5 * len(row) for row in authors]
    assert written.share == pytest.approx(sum(map(sum, authors)) / sum(map(len, authors)))


def test_plain_values_of_a_sequence() -> None:
    model = Toy.of(length=6).model("TokenwiseModel")
    written = model.generate(numbers(40), threshold=0.0)
    rows = list(written.rows(model.served.codec))
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    for place, row in enumerate(rows):
        assert row["output"] == "".join(token["text"] for token in row["tokens"]) == written.outputs[place]
        assert [token["source"] for token in row["tokens"]] == written.sources[place]
        assert row["expert_tokens"] + row["predictor_tokens"] == len(row["tokens"])
