// What the page asks the server: who it is, and to write. Addresses are relative, so a proxy may add a prefix.

import { recall, remember } from "./dom.js";

export const API = new URL("v1", document.baseURI).href;

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let key = recall("sessionStorage", "key") ?? "";

export const hasKey = () => key !== "";

export function useKey(given) {
  key = given;
  remember("sessionStorage", "key", given);
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
      for (const part of parts) yield part.replace(/^data: /, "");
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The connection broke before the answer was whole. Run it again.", 0);
  } finally {
    reader.cancel().catch(() => {}); // nothing to cancel at the end, nor where the connection broke
  }
}
