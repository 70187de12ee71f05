// Requests to the server. Addresses are relative, so that the page also works behind a proxy with a prefix.

import { recall, remember } from "./dom.js";

export const API = new URL("v1", document.baseURI).href;

export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Headers carry nothing else: fetch would fail as if the server could not be reached.
const isValidKey = (text) => /^[\x21-\x7e]+$/.test(text);

const savedKey = recall("sessionStorage", "key") ?? "";
let key = isValidKey(savedKey) ? savedKey : "";

export const hasKey = () => key !== "";

// The key is saved once the server has accepted it.
export function useKey(newKey) {
  if (!isValidKey(newKey)) throw new RequestError("This is not a valid API key: use ASCII letters, digits and punctuation, without spaces.", 401);
  key = newKey;
}

async function request(path, options = {}) {
  // A form gets its type, which names the boundary between its parts, from the browser.
  const headers = options.body instanceof FormData ? {} : { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(`${API}/${path}`, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(`The server cannot be reached at ${API}. Is it running?`, 0);
  }
  if (!response.ok) throw new RequestError(await errorMessage(response), response.status);
  return response;
}

async function errorMessage(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server responded with ${response.status}: ${text.slice(0, 200)}`;
  }
}

export async function describe() {
  const response = await request("deferral");
  if (key) remember("sessionStorage", "key", key);
  try {
    return await response.json();
  } catch {
    throw new RequestError(`The server at ${API} is not a seqdefer server.`, 0);
  }
}

export async function specification() {
  const response = await request("../openapi.json");
  if (key) remember("sessionStorage", "key", key);
  return response.json();
}

// A budget of null is that of requests that name none.
export const requestBody = (model, input, budget) => ({ model, input, ...(budget === null ? {} : { deferral: { budget } }) });

export const isSound = (input) => input?.file instanceof Blob;

function formOf(model, { file, name }, budget) {
  const form = new FormData();
  const chosen = budget === null ? {} : { "deferral[budget]": budget };
  for (const [field, value] of Object.entries({ model, ...chosen, stream: true })) form.append(field, value);
  form.append("file", file, name);
  return form;
}

// The same event as deferral/complete would send.
const fromTranscription = ({ type, delta, usage, deferral }) =>
  type === "transcript.text.delta" ? { ...deferral, text: delta } : { usage, deferral };

// Yield one event per token; the last has `usage`. Aborting the signal also ends the work on the server.
export async function* complete(model, input, budget, signal) {
  const [path, body] = isSound(input)
    ? ["audio/transcriptions", formOf(model, input, budget)]
    : ["deferral/complete", JSON.stringify({ ...requestBody(model, input, budget), stream: true })];
  const response = await request(path, { method: "POST", body, signal });
  let isComplete = false;
  for await (const data of readEvents(response.body)) {
    isComplete = data === "[DONE]";
    if (isComplete) continue; // read to the end: else the server sees a client that disconnected
    const event = JSON.parse(data);
    if (event.error) throw new RequestError(event.error.message, response.status);
    yield isSound(input) ? fromTranscription(event) : event;
  }
  if (!isComplete) throw new RequestError("The connection closed before the output was complete. Run it again.", 0);
}

async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (buffer + decoder.decode(value, { stream: true })).split("\n\n");
      buffer = parts.pop();
      // Everything else is a comment that keeps the connection alive.
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice("data: ".length);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The connection broke before the output was complete. Run it again.", 0);
  } finally {
    reader.cancel().catch(() => {}); // there is nothing to cancel at the end, or after an error
  }
}
