// An editable map of cities, and the tours on it.

import { draw } from "./dom.js";

const SIZE = 400;
const EDGE = 16;

// Fit the map to the cities: north up, the same scale in both directions.
function viewOf(cities) {
  const [xs, ys] = [0, 1].map((axis) => cities.map((city) => city[axis]));
  const [west, south] = cities.length ? [Math.min(...xs), Math.min(...ys)] : [0, 0];
  const span = cities.length ? Math.max(Math.max(...xs) - west, Math.max(...ys) - south) || 1 : 1;
  return { west, south, factor: (SIZE - 2 * EDGE) / span };
}

const placeIn = (view, [x, y]) => [EDGE + (x - view.west) * view.factor, SIZE - EDGE - (y - view.south) * view.factor];
const cityAt = (view, [x, y]) => [view.west + (x - EDGE) / view.factor, view.south + (SIZE - EDGE - y) / view.factor];

// An edge has the author of the city it leads to; the closing edge has the last author.
function edgesOf(points, tokens, isWhole) {
  const order = isWhole ? [...tokens, { ...tokens[0], author: tokens[tokens.length - 1].author }] : tokens;
  return order.slice(1).flatMap((token, place) => {
    const [from, to] = [points[order[place].token], points[token.token]];
    return from && to ? [draw("line", { class: `edge ${token.author}`, x1: from[0], y1: from[1], x2: to[0], y2: to[1] })] : [];
  });
}

function tourParts(view, cities, tokens) {
  const points = cities.map((city) => placeIn(view, city));
  const isWhole = tokens.length > 1 && tokens.length === cities.length;
  const authors = Object.fromEntries(tokens.map((token) => [token.token, token.author]));
  const dots = points.map(([cx, cy], index) => draw("circle", { class: `city ${authors[index] ?? ""}`, cx, cy, r: 5, "data-city": index }));
  const start = tokens.length && points[tokens[0].token];
  const ring = start ? [draw("circle", { class: "start", cx: start[0], cy: start[1], r: 10 })] : [];
  return [...edgesOf(points, tokens, isWhole), ...ring, ...dots];
}

export function smallTour(cities, tokens) {
  const label = `Tour of ${cities.length} cities, ${tokens.filter((token) => token.author === "expert").length} by the expert`;
  const parts = tourParts(viewOf(cities), cities, tokens);
  return draw("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, class: "small tour", role: "img", "aria-label": label }, ...parts);
}

export function randomCities(n) {
  return Array.from({ length: n }, () => [Math.random(), Math.random()].map((value) => Number(value.toFixed(4))));
}

export class Field {
  // At most `maxCities`, or any number if null; `onChange` is called at every edit.
  constructor(container, maxCities, onChange) {
    Object.assign(this, { maxCities, onChange, cities: [], tokens: [], pressed: null });
    this.picture = draw("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, class: "tour", role: "img", "aria-label": "Cities and tour" });
    this.picture.addEventListener("pointerdown", (event) => this.#press(event));
    this.picture.addEventListener("pointermove", (event) => this.#drag(event));
    this.picture.addEventListener("click", (event) => this.#add(event));
    this.picture.addEventListener("dblclick", (event) => this.#remove(event));
    container.replaceChildren(this.picture);
    this.set([]);
  }

  set(cities) {
    this.cities = cities;
    this.view = viewOf(cities);
    this.showTour([]);
  }

  showTour(tokens) {
    this.tokens = tokens;
    this.picture.replaceChildren(...tourParts(this.view, this.cities, tokens));
  }

  point(token) {
    for (const dot of this.picture.querySelectorAll(".city")) {
      dot.classList.toggle("pointed", token !== null && dot.dataset.city === String(token.token));
    }
  }

  #at(event) {
    const box = this.picture.getBoundingClientRect();
    const along = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const inside = along.map((share) => SIZE * Math.max(0.01, Math.min(0.99, share)));
    const digits = Math.max(0, Math.ceil(Math.log10(this.view.factor)) + 1); // no finer than is visible
    return cityAt(this.view, inside).map((value) => Number(value.toFixed(Math.min(12, digits))));
  }

  #edit(cities) {
    this.cities = cities;
    this.showTour([]);
    this.onChange();
  }

  #press(event) {
    const { city } = event.target.dataset;
    this.pressed = city === undefined ? null : Number(city);
    if (this.pressed !== null) this.picture.setPointerCapture(event.pointerId);
  }

  #drag(event) {
    if (this.pressed !== null && event.buttons) {
      this.#edit(this.cities.map((city, index) => (index === this.pressed ? this.#at(event) : city)));
    }
  }

  // A click also ends a drag, which adds no city; a scrolling finger sends none.
  #add(event) {
    const isFull = this.maxCities !== null && this.cities.length >= this.maxCities;
    if (this.pressed === null && !isFull) this.#edit([...this.cities, this.#at(event)]);
  }

  #remove(event) {
    const [x, y] = placeIn(this.view, this.#at(event));
    const near = this.cities.findIndex((city) => {
      const [cx, cy] = placeIn(this.view, city);
      return Math.hypot(cx - x, cy - y) < 9;
    });
    if (near !== -1) this.#edit(this.cities.filter((_, index) => index !== near));
  }
}
