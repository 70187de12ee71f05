"""Rows at their own positions say what whole passes say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from interpreted import interpreted_kernels
from thresholds import between, interleaved
from tiny_models import (
    FAMILIES,
    LENGTH,
    N_WORDS,
    SOME_FAMILIES,
    documents,
    lively,
    tiny_pair,
    tiny_text_model,
    tokenizer,
)

from seqdefer.budgets.caps import Allowance
from seqdefer.budgets.policies import Threshold
from seqdefer.engine.interleaved import roll_out
from seqdefer.engine.pace import FixedPace, Pace, Turn
from seqdefer.engine.speculative import run_all, speculative_loop
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.confidence import Confidence
from seqdefer.rejectors.token import LSTMRejector, MLPRejector
from seqdefer.rows import Chunk
from seqdefer.tasks.text import rows as rows_of_text
from seqdefer.tasks.text.fused import Fused
from seqdefer.tasks.text.model_rows import ModelRows
from seqdefer.tasks.text.models import text_model
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.row_passes import RowPasses
from seqdefer.tasks.text.rows import complete_rows
from seqdefer.types import Proposal, Rollout, Sequences, SequenceSpec

pytest.importorskip("transformers", reason="needs the extra 'text'")

CLOSE = 2e-4  # of numbers up to 10, in single precision; machines differ in how they round


@pytest.mark.parametrize("way", ["padded", "packed", "padded and rounded", "packed and rounded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_say_what_whole_passes_say(family: str, way: str) -> None:
    """Rows begin late, read chunks of their own lengths, step together, go back, leave and come, in any order."""
    network, random = tiny_text_model(family, 2, seed=0).network, torch.Generator().manual_seed(0)
    passes = RowPasses(network, lambda hidden, logits, _: Proposal(logits.argmax(1), hidden, logits))
    rows, known = ModelRows(passes), list[tuple[list[int], list[int]]]()
    if "packed" in way and not passes.is_packed:
        pytest.skip("this family has no packed passes")
    if way == "packed and rounded":
        interpreted_kernels()
        network.fused = Fused(network.model, with_kernels=True)
    passes.is_packed, passes.is_rounded = "packed" in way, "rounded" in way
    n_turns, leaving = (5, (1, 3)) if way == "packed and rounded" else (8, (2, 5))  # interpreted kernels are slow

    def draw(least: int, most: int) -> list[int]:
        n = int(torch.randint(least, most + 1, (), generator=random))
        return torch.randint(5, 40, (n,), generator=random).tolist()

    def check(row: int, n: int, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        given, tokens = known[row]
        run = network.prefill(torch.tensor([given]), torch.tensor([tokens[:n]], dtype=torch.long).view(1, n))
        assert torch.allclose(run.logits[0], logits, atol=CLOSE)
        assert torch.allclose(run.hidden[0], hidden, atol=CLOSE)

    def inputs(n: int) -> torch.Tensor:
        drawn = [torch.tensor(draw(3, 8)) for _ in range(n)]
        known.extend((line.tolist(), []) for line in drawn)
        return torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True, padding_value=PADDING)

    def admit(n: int) -> None:
        first = len(known)
        said, context = rows.admit(inputs(n))
        for place, row in enumerate(range(first, first + n)):
            check(row, 0, said.features[place], said.uncertainty[place])
            run = network.prefill(torch.tensor([known[row][0]]), torch.zeros(1, 0, dtype=torch.long))
            assert torch.allclose(run.context[0], context[place], atol=CLOSE)

    admit(3)
    rows.add(inputs(2))
    for turn in range(n_turns):
        chunks = []
        for row in torch.randperm(len(known), generator=random)[: 1 + turn % len(known)].tolist():
            tokens, is_new = draw(1, 4), rows.places[row] is None
            asked = [place for place in range(0 if is_new else 1, len(tokens) + 1) if place % 2 == turn % 2]
            chunks.append(Chunk(row, tokens, asked or [len(tokens)]))
        said, place = rows.read(chunks), 0
        for chunk in chunks:
            before = len(known[chunk.row][1])
            known[chunk.row][1].extend(chunk.tokens)
            for n in chunk.asked:
                check(chunk.row, before + n, said.features[place], said.uncertainty[place])
                place += 1
        assert place == len(said.tokens)
        last = {chunk.row: len(chunk.tokens) for chunk in chunks}
        steps = [min(last.get(row, 0), len(draw(0, 2))) for row in range(len(known))]
        rows.go_back(steps)
        for (_, written), n in zip(known, steps, strict=True):
            del written[len(written) - n :]
        if turn in leaving:
            kept = torch.randperm(len(known), generator=random)[:-1].tolist()
            rows.keep(kept)
            known[:] = [known[row] for row in kept]
            admit(2)
    begun = [row for row in range(len(known)) if rows.places[row] is not None]
    rows.keep(begun)
    known[:] = [known[row] for row in begun]
    tokens = torch.randint(5, 40, (len(known),), generator=random)
    said = rows.step(tokens)
    for row, token in enumerate(tokens.tolist()):
        known[row][1].append(token)
        check(row, len(known[row][1]), said.features[row], said.uncertainty[row])


@pytest.mark.parametrize("is_packed", [False, True])
def test_rows_on_a_gpu_may_run_past_the_positions_of_a_model(is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and output fill GPT-2's table of positions; rows that are ahead step on until the others end, too."""
    import transformers as hf

    if is_packed:
        interpreted_kernels()
    texts = []
    for n_layers, seed in ((1, 1), (2, 6)):
        config = hf.GPT2Config(
            vocab_size=N_WORDS, eos_token_id=1, bos_token_id=1, n_embd=16, n_layer=n_layers, n_head=2, n_positions=20
        )
        texts.append(text_model(lively(hf.GPT2LMHeadModel(config), seed), tokenizer()))
        texts[-1].network.fused = Fused(texts[-1].model, with_kernels=is_packed)
    pair, examples, spec = TextPair.of(*texts), documents(4, 12), SequenceSpec(8, None)
    examples.inputs.clamp_(min=3)  # all have 12 tokens
    made = RowPasses.__init__

    def make(self: RowPasses, *given: Any) -> None:
        made(self, *given)
        self.is_rounded, self.is_packed = True, is_packed

    for threshold in (-9e9, 0.5, 9e9):
        policy = Threshold(Confidence(), threshold)
        expected = roll_out(pair.predictor, pair.expert, examples, policy, spec)
        with monkeypatch.context() as patched:
            patched.setattr(RowPasses, "__init__", make)
            found = run_all(speculative_loop(pair.predictor, pair.expert, policy, spec, FixedPace(6)), examples, 3)
        assert torch.equal(found.sequences.tokens, expected.sequences.tokens)


@cache
def written(family: str) -> dict[float, Rollout]:
    pair = tiny_pair(family)
    return interleaved(pair.predictor, pair.expert, documents(7), SequenceSpec(LENGTH, pair.predictor.end))


OTHER_FAMILIES = [family for family in FAMILIES if family not in SOME_FAMILIES]
SPECULATIONS = [*product(SOME_FAMILIES, (1, 3, 8, None), (2, 7)), *product(OTHER_FAMILIES, (3, None), (2,))]


@pytest.mark.parametrize(("family", "ahead", "at_once"), SPECULATIONS)
def test_speculation_writes_what_the_interleaved_loop_writes(family: str, ahead: int | None, at_once: int) -> None:
    pair, examples = tiny_pair(family), documents(7)
    spec = SequenceSpec(LENGTH, pair.predictor.end)
    for threshold, expected in written(family).items():
        loop = speculative_loop(
            pair.predictor,
            pair.expert,
            Threshold(Confidence(), threshold),
            spec,
            Pace() if ahead is None else FixedPace(ahead, foresees=ahead == 3),
        )
        found = run_all(loop, examples, at_once)
        assert torch.equal(found.sequences.tokens, expected.sequences.tokens)
        assert torch.equal(found.authors, expected.authors)
        assert torch.allclose(found.scores, expected.scores, atol=1e-4)
        assert (loop.work.expert_passes == 0) == (threshold == 9e9)


def rejector(kind: str, pair: TextPair) -> Any:
    """Return a rejector of a pair: plain confidence, or a network with random weights."""
    if kind == "confidence":
        return Confidence()
    state, context = pair.predictor.start(documents(3).inputs)
    features = pair.predictor.propose(state).features.shape[1]
    sizes = Sizes(context.shape[1], features, LENGTH, has_entropy=True, layers=1, units=8, dropout=0.0)
    torch.manual_seed(1)
    return {"lstm": LSTMRejector, "mlp": MLPRejector}[kind](sizes, pair.predictor.fingerprint).eval()


@pytest.mark.parametrize("ahead", [1, 3, 8])
@pytest.mark.parametrize("is_capped", [False, True])
@pytest.mark.parametrize("kind", ["confidence", "mlp", "lstm"])
@pytest.mark.parametrize("shown", ["states", "facts"])
def test_late_decisions_are_those_of_the_interleaved_loop(
    shown: str, kind: str, is_capped: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU all steps of a turn are decided together, or one after the other where the policy has a memory."""
    monkeypatch.setattr(rows_of_text, "MAX_SHOWN_BYTES", 300)  # of 7 documents: two positions at once
    plain, examples = tiny_pair("t5"), documents(7)
    pair = TextPair.of(plain.predictor.model, plain.expert.model, shown)
    spec, network = SequenceSpec(LENGTH, pair.predictor.end), rejector(kind, pair)
    scores = roll_out(pair.predictor, pair.expert, examples, Threshold(network, 9e9), spec).scores
    threshold = between(scores, 0.5)
    policy = Threshold(network, threshold, [Allowance(tokens=2)] * len(examples) if is_capped else None)
    expected = roll_out(pair.predictor, pair.expert, examples, policy, spec)
    loop = speculative_loop(pair.predictor, pair.expert, policy, spec, FixedPace(ahead, foresees=ahead == 3))
    loop.decides_late = True
    found = run_all(loop, examples)
    assert torch.equal(found.sequences.tokens, expected.sequences.tokens)
    assert torch.equal(found.authors, expected.authors)
    assert torch.allclose(found.scores, expected.scores, atol=1e-4)
    assert 0 < int(expected.authors.sum()) < int(expected.sequences.lengths.sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_complete_what_the_expert_completes(family: str) -> None:
    expert, examples = tiny_pair(family).expert, documents(6)
    spec = SequenceSpec(LENGTH, expert.end)
    blank = Sequences(torch.zeros(6, LENGTH, dtype=torch.long), torch.zeros(6, dtype=torch.long))
    whole = expert.complete(examples, blank, spec)
    kept = torch.minimum(torch.tensor([0, 1, 2, 0, 3, 1]), whole.lengths - 1)
    rows = expert.rows_of.rows()
    found = complete_rows(rows, examples.inputs, whole.truncate(kept), spec)
    assert torch.equal(found.lengths, whole.lengths)
    assert torch.equal(found.tokens * found.mask(), whole.tokens * whole.mask())


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_turns_count_the_inputs_that_the_expert_reads(family: str) -> None:
    pair, examples, turns = tiny_pair(family), documents(5), list[Turn]()

    class Noted(Pace):
        def note(self, turn: Turn) -> None:
            turns.append(turn)

    spec = SequenceSpec(LENGTH, pair.predictor.end)
    loop = speculative_loop(pair.predictor, pair.expert, Threshold(Confidence(), -9e9), spec, Noted())
    run_all(loop, examples, at_once=2)
    assert sum(turn.inputs_read for turn in turns) == int((examples.inputs != PADDING).sum())
    assert sum(turn.inputs_read > 0 for turn in turns) < len(turns)


@pytest.mark.parametrize("family", ["t5", "bart", "llama"])
def test_threads_share_a_pair(family: str) -> None:
    """Passes change the models while they run; threads must not see each other's changes."""
    pair, examples = tiny_pair(family), documents(8)
    spec, policy = SequenceSpec(LENGTH, pair.predictor.end), Threshold(Confidence(), 1.0)

    def write(number: int) -> torch.Tensor:
        some = examples.select(torch.arange(number, number + 3))
        written = [
            run_all(speculative_loop(pair.predictor, pair.expert, policy, spec, FixedPace(2)), some) for _ in range(4)
        ]
        return torch.stack([one.sequences.tokens for one in written])

    expected = [write(number) for number in range(5)]
    with ThreadPoolExecutor(5) as pool:
        for found, alone in zip(pool.map(write, range(5)), expected, strict=True):
            assert torch.equal(found, alone)
