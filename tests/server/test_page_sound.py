"""The page of a model that takes audio, in a real browser with a file for a microphone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import Browser
from browsers import chromium as start_chromium
from servers import IGNORE_BUDGETS, RunningServer, speech_model, until

pytest.importorskip("transformers", reason="needs the extra 'speech'")
pytest.importorskip("soundfile", reason="needs the extra 'speech'")

import soundfile
from tiny_whisper import clips

from seqdefer.server.batches import RunningBatch
from seqdefer.tasks.speech.audio import read_clip
from seqdefer.tasks.speech.waveforms import to_waveform

pytestmark = [pytest.mark.browser, IGNORE_BUDGETS]
NOTE = "document.getElementById('sound-note').textContent"
# In the page, which is in time on a busy machine too: it clicks at the first note of 0.4 seconds or more.
STOP_RECORDING = f"""void new MutationObserver((_, watching) => {{
  if (!(parseFloat({NOTE}.slice("Recording: ".length)) >= 0.4)) return;
  watching.disconnect();
  window.labelAtStop = document.getElementById("record").textContent;
  document.getElementById("record").click();
}}).observe(document.getElementById("sound-note"), {{ childList: true }})"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with clips in several formats, and a longer one to record."""
    folder = tmp_path_factory.mktemp("clips")
    samples = to_waveform(clips(2, seed=9).inputs[0])
    for name, options in {
        "clip.wav": {},
        "clip.flac": {},
        "it's a clip.wav": {},
        "clip.ogg": {"subtype": "VORBIS"},
    }.items():
        soundfile.write(folder / name, samples * 0.5, 16_000, **options)
    soundfile.write(folder / "silence.wav", samples * 0, 16_000)
    (folder / "letter.txt").write_text("no sound at all")
    soundfile.write(folder / "microphone.wav", [*samples, *samples, *samples, *samples], 16_000)
    return folder


@pytest.fixture(scope="module")
def chromium(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_chromium(tmp_path_factory.mktemp("profile"), microphone=place / "microphone.wav") as driver:
        yield Browser(driver)


@pytest.fixture
def uploads(speech_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the server is asked to write down."""
    found: list[bytes] = []
    submit = speech_server.scheduler.submit

    def noted(request: Any) -> Any:
        found.extend(request.inputs)
        return submit(request)

    monkeypatch.setattr(speech_server.scheduler, "submit", noted)
    return found


def choose(browser: Browser, path: Path) -> None:
    browser.find("#file").send_keys(str(path))
    browser.wait(f"{NOTE} === {path.name!r}" if "'" not in path.name else f'{NOTE} === "{path.name}"')


@pytest.mark.parametrize(("name", "percent"), [("clip.wav", 0), ("clip.flac", 50), ("clip.wav", 100)])
def test_files_are_written_down(
    speech_server: RunningServer, browser: Browser, place: Path, name: str, percent: int
) -> None:
    written = speech_model().generate([place / name], percent / 100)
    browser.open(speech_server)
    assert not browser.find("#text").is_displayed()
    choose(browser, place / name)
    browser.wait("document.getElementById('player').duration === 1")  # the browser can play it
    browser.slide(percent)
    browser.run()
    assert browser.text("#tokens") == written.outputs[0]
    assert browser.authors == written.sources[0]
    n, by_expert = len(written.sources[0]), written.expert_tokens[0]
    assert browser.text("#status").startswith(f"Done: the expert wrote {by_expert} of {n} tokens")
    assert browser.text("#runs").startswith(f"for {name}")


@pytest.mark.parametrize("is_stopped", [True, False])
def test_recording_is_written_down_at_once(
    speech_server: RunningServer, browser: Browser, uploads: list[bytes], is_stopped: bool
) -> None:
    """It ends by a click, or after as many seconds as the model hears."""
    browser.open(speech_server)
    browser.slide(50)
    if is_stopped:
        browser.js(STOP_RECORDING)
    browser.find("#record").click()
    browser.wait("document.getElementById('tokens').children.length > 0")
    assert browser.js("window.labelAtStop") == ("Stop recording" if is_stopped else None)
    browser.wait_until_done()
    (heard,) = uploads
    samples = read_clip(heard)
    assert heard[:4] == b"RIFF"
    assert 0.2 * 16_000 < len(samples) <= 16_000
    assert samples.std() > 0.01
    written = speech_model().generate([heard], 0.5)
    assert browser.text("#tokens") == written.outputs[0]
    assert browser.authors == written.sources[0]
    assert browser.text("#sound-note") == "recording-1.wav"
    assert browser.text("#record") == "Record"


def test_other_formats_become_wav(
    speech_server: RunningServer, browser: Browser, place: Path, uploads: list[bytes]
) -> None:
    browser.open(speech_server)
    choose(browser, place / "clip.ogg")
    browser.run()
    (heard,) = uploads
    expected, _ = soundfile.read(place / "clip.ogg", dtype="float32")
    assert heard[:4] == b"RIFF"
    assert len(read_clip(heard)) == len(expected) == 16_000
    assert abs(read_clip(heard) - expected).max() < 1e-3


def test_words_appear_as_they_settle(
    speech_server: RunningServer, browser: Browser, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, turns, gate = RunningBatch.advance, list[int](), threading.Event()

    def slowed(batch: RunningBatch) -> None:
        turns.append(len(batch.tickets))
        assert len(turns) < 3 or gate.wait(60)
        advance(batch)

    monkeypatch.setattr(RunningBatch, "advance", slowed)
    browser.open(speech_server)
    choose(browser, place / "clip.wav")
    browser.slide(50)
    browser.find("#run").click()
    browser.wait("document.querySelectorAll('#tokens .token').length > 0")
    until(lambda: len(turns) == 3)
    shown = browser.text("#tokens")
    assert browser.text("#status") == ""
    gate.set()
    browser.wait_until_done()
    written = speech_model().generate([place / "clip.wav"], 0.5)
    assert browser.text("#tokens") == written.outputs[0]
    assert written.outputs[0].startswith(shown)
    assert shown != written.outputs[0]


@pytest.mark.parametrize(("name", "message"), [("letter.txt", "not a WAV or FLAC file"), ("silence.wav", "is silent")])
def test_bad_files_get_the_server_s_message(
    speech_server: RunningServer, browser: Browser, place: Path, name: str, message: str
) -> None:
    browser.open(speech_server)
    choose(browser, place / name)
    browser.run()
    assert message in browser.text("#trouble")
    choose(browser, place / "clip.wav")
    browser.run()
    assert browser.text("#trouble") == ""
    assert all("status of 4" in line or "media" in line.lower() for line in browser.log())  # the browser's own notes


def test_trouble_with_the_microphone_is_shown(speech_server: RunningServer, browser: Browser) -> None:
    browser.open(speech_server)
    browser.run()
    assert browser.text("#trouble") == "There is no sound yet. Record some, or choose a file."
    browser.js("void (navigator.mediaDevices.getUserMedia = () => Promise.reject(new Error('Permission denied')))")
    browser.find("#record").click()
    browser.wait("document.getElementById('trouble').textContent.includes('Permission denied')")
    assert "Choose a file instead." in browser.text("#trouble")
    assert browser.text("#record") == "Record"


def test_runs_are_shown_again_with_their_clip(speech_server: RunningServer, browser: Browser, place: Path) -> None:
    browser.open(speech_server)
    for name in ("clip.wav", "clip.flac"):
        choose(browser, place / name)
        browser.run()
    assert len(browser.runs) == 2
    browser.driver.find_elements("css selector", ".lines button")[1].click()
    assert browser.text("#sound-note") == "clip.wav"
    browser.find("#clear").click()
    assert browser.text("#sound-note").startswith("Nothing recorded or chosen yet")


def test_snippets_run(speech_server: RunningServer, browser: Browser, place: Path) -> None:
    browser.open(speech_server)
    assert 'file=@"clip.wav"' in browser.text("#as-curl")
    choose(browser, place / "it's a clip.wav")
    browser.slide(30)
    written = speech_model().generate([place / "it's a clip.wav"], 0.3)
    code = browser.text("#as-python")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=place)
    assert ran.stdout.splitlines()[0] == written.outputs[0]
    command = browser.text("#as-curl").replace("curl ", "curl --silent --show-error ")
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=place)
    assert f'"text":"{written.outputs[0]}"' in ran.stdout


def test_page_fits_a_phone(speech_server: RunningServer, browser: Browser, place: Path) -> None:
    browser.use_phone()
    browser.open(speech_server)
    choose(browser, place / "clip.wav")
    browser.run(button="#sweep")
    assert not browser.is_wider_than_phone
