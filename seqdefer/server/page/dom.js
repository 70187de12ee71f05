// DOM helpers and number formats. Text from users and servers enters the page as text, never as HTML.

export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}\u00a0%`;

export function number(value, digits = 3) {
  return value.toFixed(digits).replace("-", "−");
}

// Four significant digits, whatever the scale.
export const short = (value) => String(Number(value.toPrecision(4))).replaceAll("-", "−");

export const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;

// Browsers may forbid storage; the page then works without it.
export function remember(storage, name, value) {
  try {
    window[storage].setItem(`seqdefer.${name}`, value);
  } catch {}
}

export function recall(storage, name) {
  try {
    return window[storage].getItem(`seqdefer.${name}`);
  } catch {
    return null;
  }
}
