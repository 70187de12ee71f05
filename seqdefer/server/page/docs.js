// The reference of the API, drawn from the server's OpenAPI description. It loads nothing from other hosts.

import { specification, useKey } from "./api.js";
import { byId, make } from "./dom.js";

const nameOf = (reference) => reference.split("/").pop();
const link = (name) => make("a", { href: `#${name}` }, name);

// Return nodes that say what a schema accepts.
function typeOf(schema) {
  if (schema.$ref) return [link(nameOf(schema.$ref))];
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.flatMap((one, place) => (place ? [" or ", ...typeOf(one)] : typeOf(one)));
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((one) => JSON.stringify(one)).join(", ")];
  if (schema.type === "array") return ["list of ", ...typeOf(schema.items ?? {}), boundsOf(schema)];
  return [schema.type ?? "any", boundsOf(schema)];
}

const BOUNDS = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<", minLength: "length ≥", minItems: "items ≥", maxItems: "items ≤", pattern: "like" };

function boundsOf(schema) {
  const found = Object.entries(BOUNDS).filter(([key]) => key in schema).map(([key, words]) => `${words} ${schema[key]}`);
  return found.length ? ` (${found.join(", ")})` : "";
}

function table(headings, rows) {
  const head = make("tr", {}, ...headings.map((one) => make("th", { scope: "col" }, one)));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, ...[cell].flat()))));
  return make("div", { className: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function fields(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, one]) => [name, typeOf(one), required.has(name) ? "required" : "", one.description ?? ""]);
  return table(["field", "type", "", ""], rows);
}

function content(media) {
  return Object.entries(media ?? {}).flatMap(([type, { schema, itemSchema }]) => {
    const shape = schema ?? itemSchema ?? {};
    return [make("p", {}, `${type}: `, ...typeOf(shape)), ...(shape.properties ? [fields(shape)] : [])];
  });
}

function route(path, method, operation) {
  const responses = Object.entries(operation.responses).map(([status, one]) => {
    const types = Object.entries(one.content ?? {}).flatMap(([type, { schema }]) => [type, schema ? ": " : " ", ...(schema ? typeOf(schema) : [])]);
    return [status, one.description ?? "", types];
  });
  const title = make("summary", {}, make("code", {}, `${method.toUpperCase()} ${path}`), operation.security ? " (needs the key)" : "");
  const body = operation.requestBody ? [make("h2", {}, "Request"), ...content(operation.requestBody.content)] : [];
  return make("details", { className: "card" }, title, make("p", {}, operation.description ?? ""), ...body, make("h2", {}, "Responses"), table(["status", "meaning", "content"], responses));
}

function show({ info, paths, components }) {
  byId("name").textContent = info.version;
  const routes = Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, one]) => route(path, method, one)));
  byId("routes").replaceChildren(...routes);
  const schemas = Object.entries(components?.schemas ?? {}).map(([name, schema]) =>
    make("details", { className: "card", id: name }, make("summary", {}, name), make("p", {}, schema.description ?? ""), fields(schema)));
  byId("schemas").replaceChildren(...schemas);
  openLinked();
}

// A link to a type opens it.
function openLinked() {
  const target = location.hash && byId(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) {
    target.open = true;
    target.scrollIntoView();
  }
}

async function load(key) {
  const form = byId("key-form");
  const trouble = byId("trouble");
  try {
    if (key !== undefined) useKey(key);
    show(await specification());
    form.hidden = trouble.hidden = true;
  } catch (error) {
    form.hidden = error.status !== 401;
    trouble.hidden = error.status === 401 && key === undefined;
    trouble.textContent = error.message;
  }
}

addEventListener("hashchange", openLinked);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  load(byId("key").value.trim());
});
load();
