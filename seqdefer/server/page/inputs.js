// The input: a text, or cities on a map with their coordinates.

import { byId, make } from "./dom.js";
import { Field, randomCities } from "./tour.js";

const DEFAULT_CITIES = 20; // for models that accept any number
const ROWS = { text: 8, tokens: 2 }; // of the box: for texts, and for short inputs such as a word
const SHOWN_LETTERS = 40; // of an example on its button

export class TextInput {
  onChange = () => {};

  constructor(model) {
    this.text = byId("text");
    this.text.rows = ROWS[model.kind] ?? ROWS.text;
    this.text.placeholder = model.hint && `For example: ${model.hint}`;
    byId("text-note").textContent = "Press Ctrl+Enter to run.";
    byId("examples").hidden = model.examples.length === 0;
    byId("examples").replaceChildren("Try: ", ...model.examples.map((one) => this.#button(String(one))));
    this.text.addEventListener("input", () => this.onChange());
    byId("clear").addEventListener("click", () => {
      this.restore("");
      this.text.focus();
      this.onChange();
    });
  }

  #button(text) {
    const short = text.length > SHOWN_LETTERS ? `${text.slice(0, SHOWN_LETTERS)}…` : text;
    const button = make("button", { type: "button", className: "small", textContent: short, title: text });
    button.addEventListener("click", () => {
      this.restore(text);
      this.onChange();
    });
    return button;
  }

  get value() {
    return this.text.value;
  }

  get problem() {
    return this.text.value.trim() ? "" : "The input is empty. Type or paste one.";
  }

  restore(text) {
    this.text.value = text;
  }

  // The token list shows everything: there is no map to draw on.
  drawRun() {}

  point() {}
}

export class TourInput {
  onChange = () => {};

  constructor(model) {
    Object.assign(this, { size: model.size, error: "" });
    this.text = byId("text");
    this.text.rows = 3;
    this.text.placeholder = model.hint;
    byId("text-label").textContent = "Coordinates as JSON";
    byId("text-label").classList.remove("hidden");
    byId("board").classList.add("with-map");
    for (const id of ["field", "field-help", "random"]) byId(id).hidden = false;
    this.field = new Field(byId("field"), model.size, () => this.#write());
    byId("random").addEventListener("click", () => this.#set(randomCities(this.size ?? DEFAULT_CITIES)));
    byId("clear").addEventListener("click", () => this.#set([]));
    this.text.addEventListener("input", () => this.#read());
    this.#set(randomCities(this.size ?? DEFAULT_CITIES));
  }

  get value() {
    return this.field.cities;
  }

  get problem() {
    if (this.error) return this.error;
    const n = this.field.cities.length;
    if (this.size === null || n === this.size) return "";
    return `There are ${n} cities, but this model needs ${this.size}: ${n < this.size ? "click to add one" : "double-click to remove one"}.`;
  }

  #set(cities) {
    this.field.set(cities);
    this.#write();
  }

  #write() {
    this.error = "";
    this.text.value = JSON.stringify(this.field.cities);
    this.#update();
  }

  #read() {
    const cities = parseCities(this.text.value);
    this.error = cities ? "" : "The coordinates cannot be read. Give [[x, y], ...] with numbers only.";
    if (cities) this.field.set(cities);
    this.#update();
  }

  #update() {
    const n = this.field.cities.length;
    byId("text-note").textContent = this.error || (this.size === null ? `${n} cities` : `${n} of ${this.size} cities`);
    this.onChange();
  }

  restore(cities) {
    this.#set(cities);
  }

  // The cities may have been edited while the models were writing.
  drawRun(run) {
    if (run.input === this.value) this.field.showTour(run.tokens);
  }

  point(token) {
    this.field.point(token);
  }
}

function parseCities(text) {
  try {
    const cities = JSON.parse(text || "[]");
    const isCity = (city) => Array.isArray(city) && city.length === 2 && city.every(Number.isFinite);
    return Array.isArray(cities) && cities.every(isCity) ? cities : null;
  } catch {
    return null;
  }
}
