// Sound as the input: a file, or a recording from the microphone.
//
// The server reads WAV and FLAC. Recordings and other files become WAV here: one channel, 16 bits, 16,000 Hz.

import { byId, plural } from "./dom.js";

const RATE = 16000;
const TICK = 100; // milliseconds between two updates of the time

export class SoundInput {
  onChange = () => {};
  onRecorded = () => {};
  onTrouble = () => {};
  value = null; // { name, number, file, url }

  constructor({ audio }) {
    Object.assign(this, { maxSeconds: audio.max_seconds, recording: null, isStarting: false, n: 0 });
    for (const id of ["text", "text-label", "text-note"]) byId(id).hidden = true;
    byId("sound").hidden = false;
    byId("record").addEventListener("click", () => (this.recording ? this.recording.stop() : this.#record()));
    byId("file").addEventListener("change", (event) => this.#choose(event.target.files[0]));
    byId("clear").addEventListener("click", () => this.#set(null));
    this.#set(null);
  }

  get problem() {
    if (this.recording || this.isStarting) return "The recording is not finished. Stop it first.";
    return this.value ? "" : "There is no sound yet. Record some, or choose a file.";
  }

  restore(value) {
    this.#set(value);
  }

  drawRun() {}

  point() {}

  async #choose(file) {
    if (!file) return;
    this.#add(file.name, (await isReadByServer(file)) ? file : await asWav(file, Infinity).catch(() => file));
    byId("file").value = ""; // choosing the same file again is a change, too
  }

  #add(name, file) {
    this.n += 1;
    this.#set({ name, number: this.n, file, url: URL.createObjectURL(file) });
  }

  #set(value) {
    const player = byId("player");
    this.value = value;
    player.hidden = !value;
    if (value) player.src = value.url;
    else player.removeAttribute("src");
    this.#note(value ? value.name : `Nothing recorded or chosen yet. A clip may last ${plural(this.maxSeconds, "second")}.`);
    this.onChange();
  }

  #note(text) {
    byId("sound-note").textContent = text;
  }

  async #record() {
    if (this.isStarting) return;
    this.onTrouble("");
    this.isStarting = true;
    try {
      if (!navigator.mediaDevices) throw new Error("browsers allow it at https addresses and at localhost only");
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      this.recording = new Recording(stream, this.maxSeconds, (seconds) => this.#note(`Recording: ${seconds.toFixed(1)} of ${this.maxSeconds} s`));
    } catch (error) {
      this.onTrouble(`The microphone cannot be used: ${error.message}. Choose a file instead.`);
      return;
    } finally {
      this.isStarting = false;
    }
    this.#showState("Stop recording", true);
    try {
      const file = await asWav(await this.recording.whole, this.maxSeconds);
      this.recording = null;
      this.#add(`recording-${this.n + 1}.wav`, file);
      this.onRecorded();
    } catch (error) {
      this.#set(this.value);
      this.onTrouble(`The recording cannot be read: ${error.message}. Record it again.`);
    } finally {
      this.recording = null;
      this.#showState("Record", false);
    }
  }

  #showState(text, isOn) {
    byId("record").textContent = text;
    byId("record").classList.toggle("on", isOn);
  }
}

class Recording {
  constructor(stream, maxSeconds, onTime) {
    const parts = [];
    const started = performance.now();
    this.recorder = new MediaRecorder(stream);
    this.whole = new Promise((resolve, reject) => {
      this.recorder.ondataavailable = (event) => parts.push(event.data);
      this.recorder.onerror = (event) => reject(event.error ?? new Error("the browser stopped it"));
      this.recorder.onstop = () => resolve(new Blob(parts, { type: this.recorder.mimeType }));
    }).finally(() => {
      clearInterval(this.timer);
      for (const track of stream.getTracks()) track.stop(); // the browser's sign for the microphone goes off
    });
    this.timer = setInterval(() => {
      const seconds = (performance.now() - started) / 1000;
      onTime(Math.min(seconds, maxSeconds));
      if (seconds >= maxSeconds) this.stop();
    }, TICK);
    this.recorder.start();
  }

  stop() {
    if (this.recorder.state !== "inactive") this.recorder.stop();
  }
}

async function isReadByServer(file) {
  const start = new TextDecoder("latin1").decode(await file.slice(0, 4).arrayBuffer());
  return ["RIFF", "RIFX", "RF64", "fLaC"].includes(start);
}

// Decode what the browser can decode, and return at most so many seconds of it as a WAV file.
async function asWav(blob, maxSeconds) {
  const decoder = new OfflineAudioContext(1, 1, RATE); // decodes to its own rate
  const sound = await decoder.decodeAudioData(await blob.arrayBuffer());
  const channels = Array.from({ length: sound.numberOfChannels }, (_, number) => sound.getChannelData(number));
  const n = Math.min(sound.length, Math.floor(maxSeconds * RATE));
  const samples = new Int16Array(n);
  for (let place = 0; place < n; place += 1) {
    const mean = channels.reduce((sum, channel) => sum + channel[place], 0) / channels.length;
    samples[place] = Math.max(-32768, Math.min(32767, Math.round(32768 * mean)));
  }
  return new Blob([wavHeader(n), samples], { type: "audio/wav" }); // all computers with browsers are little-endian
}

function wavHeader(n) {
  const header = new DataView(new ArrayBuffer(44));
  const write = (place, text) => [...text].forEach((letter, more) => header.setUint8(place + more, letter.charCodeAt(0)));
  write(0, "RIFF");
  header.setUint32(4, 36 + 2 * n, true);
  write(8, "WAVEfmt ");
  header.setUint32(16, 16, true);
  header.setUint16(20, 1, true); // integers
  header.setUint16(22, 1, true); // one channel
  header.setUint32(24, RATE, true);
  header.setUint32(28, 2 * RATE, true);
  header.setUint16(32, 2, true); // bytes per sample
  header.setUint16(34, 16, true); // bits per sample
  write(36, "data");
  header.setUint32(40, 2 * n, true);
  return header;
}
