// The current request as a curl command and as Python code.

import { API, requestBody, hasKey, isSound } from "./api.js";

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const named = (model, budget) => (budget === null ? model : `${model}@${budget.toFixed(2)}`);
const isUpload = (input) => input === null || isSound(input); // null: nothing is recorded or chosen yet
const fileOf = (input) => input?.name ?? "clip.wav";

export function asCurl(model, input, budget) {
  const [path, ...parts] = isUpload(input)
    ? ["audio/transcriptions", `-F ${shellQuoted(`model=${named(model, budget)}`)}`, `-F ${shellQuoted(`file=@${JSON.stringify(fileOf(input))}`)}`]
    : ["deferral/complete", "-H 'content-type: application/json'", `-d ${shellQuoted(JSON.stringify(requestBody(model, input, budget)))}`];
  const key = hasKey() ? ['-H "authorization: Bearer $SEQDEFER_API_KEY"'] : [];
  return [`curl ${API}/${path}`, ...key, ...parts].join(" \\\n  ");
}

// A JSON string is also a valid Python string.
export function asPython(model, input, budget) {
  const name = JSON.stringify(named(model, budget));
  if (isUpload(input)) return withOpenAI("audio.transcriptions", [`model=${name}`, `file=open(${JSON.stringify(fileOf(input))}, "rb")`], "text");
  if (typeof input === "string") return withOpenAI("completions", [`model=${name}`, `prompt=${JSON.stringify(input)}`], "choices[0].text");
  return withHttpx(model, input, budget);
}

function withOpenAI(what, options, text) {
  const key = hasKey() ? 'os.environ["SEQDEFER_API_KEY"]' : '"none"';
  return `${hasKey() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(API)}, api_key=${key})
response = client.${what}.create(
${options.map((option) => `    ${option},\n`).join("")})
print(response.${text})
print(response.deferral, response.usage)
`;
}

function withHttpx(model, input, budget) {
  const headers = hasKey() ? '\n    headers={"authorization": f"Bearer {os.environ[\'SEQDEFER_API_KEY\']}"},' : "";
  return `${hasKey() ? "import os\n\n" : ""}import httpx

response = httpx.post(
    ${JSON.stringify(`${API}/deferral/complete`)},
    json=${JSON.stringify(requestBody(model, input, budget))},${headers}
    timeout=120,
).json()
print(response["data"][0]["output"], response["data"][0]["facts"])
print(response["deferral"], response["usage"])
`;
}
