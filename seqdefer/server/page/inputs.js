// Where the input comes from: a text, or cities on a field with their coordinates beside it.

import { byId } from "./dom.js";
import { Field, randomCities } from "./tour.js";

const SOME = 20; // cities, where any number will do

export class TextInput {
  onchange = () => {};

  constructor(model) {
    this.text = byId("text");
    this.text.placeholder = model.hint;
    byId("text-note").textContent = "Ctrl+Enter runs it.";
    this.text.addEventListener("input", () => this.onchange());
    byId("clear").addEventListener("click", () => {
      this.restore("");
      this.text.focus();
      this.onchange();
    });
  }

  get value() {
    return this.text.value;
  }

  get problem() {
    return this.text.value.trim() ? "" : "There is no input yet. Type or paste one.";
  }

  restore(text) {
    this.text.value = text;
  }

  // The tokens say it all: there is nothing to draw, and nothing to point at.
  drawRun() {}

  point() {}
}

export class TourInput {
  onchange = () => {};

  constructor(model) {
    Object.assign(this, { size: model.size, wrong: "" });
    this.text = byId("text");
    this.text.rows = 3;
    this.text.placeholder = model.hint;
    byId("text-label").textContent = "Coordinates as JSON";
    byId("text-label").classList.remove("hidden");
    byId("board").classList.add("with-map");
    for (const id of ["field", "field-help", "random"]) byId(id).hidden = false;
    this.field = new Field(byId("field"), model.size, () => this.#write());
    byId("random").addEventListener("click", () => this.#set(randomCities(this.size ?? SOME)));
    byId("clear").addEventListener("click", () => this.#set([]));
    this.text.addEventListener("input", () => this.#read());
    this.#set(randomCities(this.size ?? SOME));
  }

  get value() {
    return this.field.cities;
  }

  get problem() {
    if (this.wrong) return this.wrong;
    const n = this.field.cities.length;
    if (this.size === null || n === this.size) return "";
    return `There are ${n} cities, and this model wants ${this.size}: ${n < this.size ? "click to add" : "double-click to remove"}.`;
  }

  #set(cities) {
    this.field.set(cities);
    this.#write();
  }

  #write() {
    this.wrong = "";
    this.text.value = JSON.stringify(this.field.cities);
    this.#say();
  }

  #read() {
    const cities = citiesIn(this.text.value);
    this.wrong = cities ? "" : "These coordinates cannot be read. Give [[x, y], ...], numbers only.";
    if (cities) this.field.set(cities);
    this.#say();
  }

  #say() {
    const n = this.field.cities.length;
    byId("text-note").textContent = this.wrong || (this.size === null ? `${n} cities` : `${n} of ${this.size} cities`);
    this.onchange();
  }

  restore(cities) {
    this.#set(cities);
  }

  // Whoever edits while the models write has other cities by now.
  drawRun(run) {
    if (run.input === this.value) this.field.showTour(run.tokens);
  }

  point(token) {
    this.field.point(token);
  }
}

function citiesIn(text) {
  try {
    const cities = JSON.parse(text || "[]");
    const isCity = (city) => Array.isArray(city) && city.length === 2 && city.every(Number.isFinite);
    return Array.isArray(cities) && cities.every(isCity) ? cities : null;
  } catch {
    return null;
  }
}
