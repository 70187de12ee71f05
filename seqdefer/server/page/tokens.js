// Tokens with their authors: as a text with details on hover and by arrow keys, and as a table.

import { make, number } from "./dom.js";

const HELP = "Hover over a token, or use the arrow keys, to see its score. A higher score favours the expert.";
const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };

const scoreOf = (token) => (token.score === null ? "no score" : `score ${number(token.score)}`);
const nameOf = (token) => token.text.trim() || "(no visible text)";

// Plain spans without details. The space before a word is not coloured; a lone space is.
export function spansOf(tokens) {
  return tokens.map((token) => {
    const [, space, word] = token.text.match(/^(\s*(?=\S))?(.*)$/su);
    return make("span", { className: `token ${token.author}` }, space ?? "", make("span", { className: "word", textContent: word }));
  });
}

export class TokenList {
  constructor({ list, readout, rows, onPoint }) {
    Object.assign(this, { list, readout, rows, onPoint });
    list.addEventListener("pointerover", (event) => this.#show(this.#placeOf(event.target)));
    list.addEventListener("pointerleave", () => this.#show(this.#placeOf(document.activeElement)));
    list.addEventListener("focusin", (event) => this.#enter(this.#placeOf(event.target)));
    list.addEventListener("focusout", () => this.#show(-1));
    list.addEventListener("keydown", (event) => this.#move(event));
  }

  show(tokens) {
    this.tokens = [];
    this.list.replaceChildren();
    this.rows.replaceChildren();
    this.list.removeAttribute("role"); // an empty listbox is invalid
    this.readout.textContent = HELP;
    this.list.hidden = this.readout.hidden = false;
    for (const token of tokens) this.add(token);
  }

  add(token) {
    const [span] = spansOf([token]);
    span.setAttribute("role", "option");
    span.setAttribute("aria-selected", "false");
    span.setAttribute("aria-label", `${nameOf(token)}, ${token.author}, ${scoreOf(token)}`);
    span.tabIndex = this.tokens.length ? -1 : 0;
    this.tokens.push(token);
    this.list.append(span);
    this.list.setAttribute("role", "listbox");
    this.list.setAttribute("aria-label", "Tokens");
    this.list.setAttribute("aria-orientation", "horizontal");
    this.rows.append(rowOf(token));
  }

  #placeOf(element) {
    return [...this.list.children].indexOf(element.closest(".token"));
  }

  #enter(place) {
    [...this.list.children].forEach((span, index) => {
      span.tabIndex = index === place ? 0 : -1;
      span.setAttribute("aria-selected", String(index === place));
    });
    this.#show(place);
  }

  #move(event) {
    const step = STEPS[event.key];
    if (step === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const place = this.#placeOf(document.activeElement) + step;
    this.list.children[Math.max(0, Math.min(this.tokens.length - 1, place))].focus();
  }

  #show(place) {
    const token = this.tokens?.[place];
    this.onPoint(token ?? null);
    if (!token) {
      this.readout.textContent = HELP;
      return;
    }
    const decision = token.defer ? "the rejector deferred" : "the rejector did not defer";
    const details = ` · written by the ${token.author} · ${scoreOf(token)} · ${decision}`;
    const shown = make("bdi", { textContent: nameOf(token) });
    this.readout.replaceChildren(`Token ${token.position + 1}: `, make("strong", {}, shown), details);
  }
}

function rowOf(token) {
  const score = token.score === null ? "none" : number(token.score);
  const cells = [token.position + 1, token.text, token.author, score, token.defer ? "yes" : "no"];
  return make("tr", { className: token.author }, ...cells.map((cell) => make("td", { textContent: cell, dir: "auto" })));
}
