// What the page asks the server: who it is, and to write. Addresses are relative, so a proxy may add a prefix.

import { recall, remember } from "./dom.js";

export const API = new URL("v1", document.baseURI).href;

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Of other letters no header can be made, and fetch would fail as if there were no server.
const isKey = (text) => /^[\x21-\x7e]+$/.test(text);

const kept = recall("sessionStorage", "key") ?? "";
let key = isKey(kept) ? kept : "";

export const hasKey = () => key !== "";

// It is kept when the server has accepted it.
export function useKey(given) {
  if (!isKey(given)) throw new Refused("This is no API key: one has letters of ASCII, digits and signs, and no spaces.", 401);
  key = given;
}

async function ask(path, options = {}) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(`${API}/${path}`, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(`The server cannot be reached at ${API}. Is it running?`, 0);
  }
  if (!answer.ok) throw new Refused(await reasonOf(answer), answer.status);
  return answer;
}

async function reasonOf(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${answer.status}: ${text.slice(0, 200)}`;
  }
}

export async function describe() {
  const answer = await ask("deferral");
  if (key) remember("sessionStorage", "key", key);
  try {
    return await answer.json();
  } catch {
    throw new Refused(`What answers at ${API} is no server of seqdefer.`, 0);
  }
}

export const bodyOf = (model, input, budget) => ({ model, input, deferral: { budget } });

// One event a token; the last has `usage`. Aborting the signal ends the request, and the server's work with it.
export async function* complete(model, input, budget, signal) {
  const body = JSON.stringify({ ...bodyOf(model, input, budget), stream: true });
  const answer = await ask("deferral/complete", { method: "POST", body, signal });
  let isWhole = false;
  for await (const data of eventsOf(answer.body)) {
    isWhole = data === "[DONE]";
    if (isWhole) continue; // to the very end: a connection that is left early looks like a client that went away
    const event = JSON.parse(data);
    if (event.error) throw new Refused(event.error.message, answer.status);
    yield event;
  }
  if (!isWhole) throw new Refused("The connection ended before the answer did. Run it again.", 0);
}

async function* eventsOf(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let waiting = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (waiting + decoder.decode(value, { stream: true })).split("\n\n");
      waiting = parts.pop();
      // All else is a comment, by which the server says that it is still there.
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice("data: ".length);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The connection broke before the answer was whole. Run it again.", 0);
  } finally {
    reader.cancel().catch(() => {}); // nothing to cancel at the end, nor where the connection broke
  }
}
