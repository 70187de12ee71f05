// The current request as a curl command and as Python code.

import { API, requestBody, hasKey } from "./api.js";

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function asCurl(model, input, budget) {
  const lines = [`curl ${API}/deferral/complete`, "-H 'content-type: application/json'"];
  if (hasKey()) lines.push('-H "authorization: Bearer $SEQDEFER_API_KEY"');
  lines.push(`-d ${shellQuoted(JSON.stringify(requestBody(model, input, budget)))}`);
  return lines.join(" \\\n  ");
}

export function asPython(model, input, budget) {
  return typeof input === "string" ? withOpenAI(model, input, budget) : withHttpx(model, input, budget);
}

// A JSON string is also a valid Python string.
function withOpenAI(model, input, budget) {
  const key = hasKey() ? 'os.environ["SEQDEFER_API_KEY"]' : '"none"';
  return `${hasKey() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(API)}, api_key=${key})
response = client.completions.create(
    model=${JSON.stringify(`${model}@${budget.toFixed(2)}`)},
    prompt=${JSON.stringify(input)},
)
print(response.choices[0].text)
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
