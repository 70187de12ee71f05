"""Pairs of Whisper models write exactly what `generate` writes, for every pattern of deferral."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff
from seqdefer.errors import CheckpointError, DataError, OptionError
from seqdefer.testing import check_expert, check_predictor

pytest.importorskip("transformers", reason="needs the extra 'speech'")

from tiny_models import Decided, random_pattern, rows_of, spec_of, tiny, tokenizer, written
from tiny_whisper import (
    END,
    ENGLISH,
    GERMAN,
    LENGTH,
    NO_TIMES,
    START,
    SUPPRESSED,
    SUPPRESSED_FIRST,
    TRANSCRIBE,
    clips,
    generated,
    tiny_speech_model,
    tiny_speech_pair,
    tiny_whisper,
)

from seqdefer.tasks.speech.models import load_speech_model, prompt_of, speech_model
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.pairs import TextPair

pytestmark = pytest.mark.usefixtures("one_thread")


# -- the same tokens as generate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", ["states", "facts", "both"])
def test_never_deferring_is_the_predictors_generate(shown: str) -> None:
    pair, examples = tiny_speech_pair(shown), clips(24)
    never = written(pair, examples, Decided(torch.zeros(24, LENGTH, dtype=torch.bool)))
    assert never == generated(pair.predictor.model, examples.inputs, LENGTH)
    assert len({len(row) for row in never}) > 1, "some end early"
    assert len({tuple(row) for row in never}) > 12, "texts follow clips"
    assert rows_of(draft(pair.predictor, examples, spec_of(pair)).sequences) == never


def test_always_deferring_is_the_experts_generate() -> None:
    pair, examples = tiny_speech_pair(), clips(24)
    expected = generated(pair.expert.model, examples.inputs, LENGTH)
    assert written(pair, examples, Decided(torch.ones(24, LENGTH, dtype=torch.bool))) == expected
    assert written(pair, examples, HandOff(torch.zeros(24, dtype=torch.long))) == expected
    assert len({len(row) for row in expected}) > 1, "some end early"


def test_suppressed_tokens_would_have_been_written() -> None:
    """Otherwise the tests above could not tell whether they are suppressed."""
    model = tiny_whisper(1, 0)
    special = [token for token in SUPPRESSED if token >= START]
    model.generation_config.suppress_tokens, model.generation_config.begin_suppress_tokens = special, None
    free = speech_model(model, tiny_speech_model(1, 0).tokenizer, language="en")
    rows = written(TextPair.of(free, free), clips(24), Decided(torch.zeros(24, LENGTH, dtype=torch.bool)))
    assert {row[0] for row in rows} & set(SUPPRESSED_FIRST)
    assert {token for row in rows for token in row} & set(SUPPRESSED)


def test_another_language_is_generates() -> None:
    model, examples = tiny_speech_model(2, 1, language="de"), clips(24)
    pair = TextPair.of(model, model)
    german = written(pair, examples, Decided(torch.zeros(24, LENGTH, dtype=torch.bool)))
    assert german == generated(model, examples.inputs, LENGTH, "de")
    assert german != generated(model, examples.inputs, LENGTH, "en")


def test_a_model_of_english_alone_has_a_shorter_prompt() -> None:
    model, examples = tiny_whisper(2, 1), clips(12)
    for name in ("lang_to_id", "task_to_id"):
        delattr(model.generation_config, name)
    model.generation_config.is_multilingual = False
    english = speech_model(model, tiny_speech_model(1, 0).tokenizer, language="en")
    assert english.network.prompt == (START, NO_TIMES)
    rows = written(TextPair.of(english, english), examples, Decided(torch.zeros(12, LENGTH, dtype=torch.bool)))
    assert rows == generated(english, examples.inputs, LENGTH, None)
    with pytest.raises(OptionError, match="English only, and --language is 'de'"):
        prompt_of(model.generation_config, "de", "tiny.en")


def test_prompts_name_language_and_task() -> None:
    rules = tiny_whisper(1, 0).generation_config
    assert prompt_of(rules, "en", "tiny") == (START, ENGLISH, TRANSCRIBE, NO_TIMES)
    assert prompt_of(rules, "de", "tiny") == (START, GERMAN, TRANSCRIBE, NO_TIMES)
    with pytest.raises(OptionError, match="--language is 'xx'; tiny knows de, en"):
        prompt_of(rules, "xx", "tiny")


@pytest.mark.parametrize("name", ["is_multilingual", "lang_to_id"])
def test_a_generation_config_that_names_no_languages_is_refused(name: str) -> None:
    """Regression: a model without `generation_config.json` passed for one of English alone, and wrote its prompt."""
    rules = tiny_whisper(1, 0).generation_config
    delattr(rules, name)
    with pytest.raises(CheckpointError, match=r"mine does not name its languages .* generation_config\.json"):
        prompt_of(rules, "en", "mine")


@torch.no_grad()
def slow(pair: TextPair, one: torch.Tensor, decisions: list[bool]) -> list[int]:
    """Run the interleaved loop for one clip, without a cache and with rules of its own."""
    tokens: list[int] = []
    for defer in decisions:
        model: TextModel = (pair.expert if defer else pair.predictor).model
        network: Any = model.network
        ids = torch.tensor([[START, ENGLISH, TRANSCRIBE, NO_TIMES, *tokens]])
        logits = model.model(input_features=network.features(one[None]), decoder_input_ids=ids, use_cache=False).logits
        forbidden = SUPPRESSED if tokens else (*SUPPRESSED, *SUPPRESSED_FIRST)
        logits[0, -1, list(forbidden)] = -torch.inf
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] == END:
            break
    return tokens


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("reads_along", [False, True])
def test_interleaved_rows_equal_full_passes_without_a_cache(
    share: float, reads_along: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, examples = tiny_speech_pair(), clips(12)
    monkeypatch.setattr(pair.expert, "reads_along", reads_along)
    pattern = random_pattern(12, share=share)
    together = written(pair, examples, Decided(pattern))
    assert together == [slow(pair, one, row) for one, row in zip(examples.inputs, pattern.tolist(), strict=True)]


# -- the contract ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", ["states", "both"])
def test_contracts(shown: str) -> None:
    pair, examples = tiny_speech_pair(shown), clips(3)
    spec = spec_of(pair, 5)
    check_predictor(pair.predictor, examples.inputs, spec)
    drafts = draft(pair.predictor, examples, spec).sequences
    check_expert(pair.expert, examples, spec, drafts=drafts)
    completed = pair.expert.complete(examples, drafts.truncate(torch.zeros_like(drafts.lengths)), spec)
    check_predictor(pair.predictor, examples.inputs, spec, paths=completed)


def test_log_probs_leave_out_what_is_suppressed() -> None:
    predictor = tiny_speech_pair().predictor.with_log_probs()
    state, _ = predictor.start(clips(3).inputs)
    first = predictor.log_probs(state)
    later = predictor.log_probs(predictor.append(state, predictor.propose(state).tokens))
    assert torch.isinf(first[:, [*SUPPRESSED, *SUPPRESSED_FIRST]]).all()
    assert torch.isinf(later[:, list(SUPPRESSED)]).all()
    assert torch.isfinite(later[:, list(SUPPRESSED_FIRST)]).all()
    for log_probs in (first, later):
        torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(3))


def test_the_context_is_the_mean_state_of_the_clip_without_the_silence_after_it() -> None:
    predictor, inputs = tiny_speech_pair().predictor, clips(4).inputs
    network: Any = predictor.model.network
    _, context = predictor.start(inputs)
    for row, one in enumerate(inputs):
        with torch.no_grad():
            states = predictor.model.model.get_encoder()(network.features(one[None])).last_hidden_state[0]
        n = -(-int((one != network.padding).sum()) // 320)
        torch.testing.assert_close(context[row], states[:n].mean(0), rtol=1e-4, atol=1e-4)


def test_fingerprints_cover_language_and_suppressed_tokens() -> None:
    model = tiny_whisper(1, 0)
    before = speech_model(model, tokenizer(), language="en").fingerprint()
    assert speech_model(model, tokenizer(), language="en").fingerprint() == before
    assert speech_model(model, tokenizer(), language="de").fingerprint() != before
    model.generation_config.suppress_tokens = [3]
    assert speech_model(model, tokenizer(), language="en").fingerprint() != before


# -- refusals -------------------------------------------------------------------------------------------------------


def test_clips_beyond_the_window_are_refused() -> None:
    predictor = tiny_speech_pair().predictor
    with pytest.raises(DataError, match=r"a clip has 1\.5 s; the model hears 1 s"):
        predictor.start(torch.ones(2, 24_000, dtype=torch.int16))
    with pytest.raises(DataError, match="give waveforms as int16"):
        predictor.start(torch.ones(2, 100, dtype=torch.long))
    with pytest.raises(DataError, match="input 1 of 2 is empty"):
        predictor.start(torch.tensor([[1, 2], [-(2**15), -(2**15)]], dtype=torch.int16))


def test_a_text_model_is_refused(tmp_path: Any) -> None:
    tiny("t5", 1, 0).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="is a T5ForConditionalGeneration, which does not listen to speech"):
        load_speech_model(tmp_path, language="en")
