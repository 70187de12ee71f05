// The deferral curve or, if the losses are unknown, the share that each budget spends. Drag the point, or use the arrow
// keys, to set the budget.

import { draw, number, percent, short } from "./dom.js";

const MARGIN = { left: 52, right: 14, top: 14, bottom: 44 };
const STEPS = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };

export class CurveView {
  constructor(container, model, onMove) {
    Object.assign(this, { container, model, onMove, budget: 0, setting: model.settings[0] });
    this.hasLosses = model.curve !== null;
    this.range = this.hasLosses ? rangeOf(model.curve.points.map((point) => point.loss)) : [0, 1];
    new ResizeObserver(() => this.#drawAll()).observe(container);
  }

  get title() {
    return this.hasLosses ? "Deferral curve" : "Share spent at each budget";
  }

  get note() {
    if (!this.hasLosses) return "Share of tokens written by the expert, by budget; the band contains 95 % of resamples.";
    return `Loss (${this.model.curve.unit}) by share of tokens written by the expert, over ${this.model.curve.inputs} inputs. Lower is better.`;
  }

  // `setting` is what decides: that of the budget, or of a promised quality, which lies between budgets.
  moveTo(budget, setting) {
    Object.assign(this, { budget, setting });
    this.#placePoint();
  }

  #drawAll() {
    this.width = Math.max(220, this.container.clientWidth);
    this.height = Math.round(Math.min(300, Math.max(190, this.width * 0.62)));
    const size = { width: this.width, height: this.height, viewBox: `0 0 ${this.width} ${this.height}` };
    this.picture = draw("svg", size, ...this.#axes(), ...this.#lines());
    this.mark = draw("line", { class: "mark", y1: MARGIN.top, y2: this.height - MARGIN.bottom });
    this.point = draw("circle", { class: "point", r: 8, role: "slider", tabindex: 0, "aria-label": "Budget on the curve" });
    this.point.setAttribute("aria-valuemin", 0);
    this.point.setAttribute("aria-valuemax", 100);
    this.label = draw("text", { class: "value" });
    this.picture.append(this.mark, this.point, this.label);
    this.#listen();
    const hadFocus = this.container.contains(document.activeElement);
    this.container.replaceChildren(this.picture);
    if (hadFocus) this.point.focus();
    this.#placePoint();
  }

  #listen() {
    const follow = (event) => {
      const x = event.clientX - this.picture.getBoundingClientRect().left;
      this.onMove(this.#nearestBudget((x - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right)));
    };
    this.picture.addEventListener("pointerdown", (event) => {
      this.picture.setPointerCapture(event.pointerId);
      follow(event);
    });
    this.picture.addEventListener("pointermove", (event) => event.buttons && follow(event));
    this.point.addEventListener("keydown", (event) => {
      const ends = { Home: -100, End: 100 };
      const step = STEPS[event.key] ?? ends[event.key];
      if (step === undefined) return;
      event.preventDefault();
      this.onMove(Math.max(0, Math.min(100, Math.round(100 * this.budget) + step)) / 100);
    });
  }

  // The x axis of a loss curve shows shares spent, not budgets.
  #nearestBudget(across) {
    const share = Math.max(0, Math.min(1, across));
    if (!this.hasLosses) return Math.round(100 * share) / 100;
    const distance = (setting) => Math.abs(setting.share - share);
    return this.model.settings.reduce((best, one) => (distance(one) < distance(best) ? one : best)).budget;
  }

  #placePoint() {
    if (!this.picture) return;
    const { setting } = this;
    const across = this.hasLosses ? setting.share : setting.budget;
    const value = this.hasLosses ? lossAt(this.model.curve.points, setting.share) : setting.share;
    const [x, y] = [this.#x(across), this.#y(value)];
    this.mark.setAttribute("x1", x);
    this.mark.setAttribute("x2", x);
    this.point.setAttribute("cx", x);
    this.point.setAttribute("cy", y);
    const isRight = across > 0.6;
    this.label.setAttribute("text-anchor", isRight ? "end" : "start");
    this.label.setAttribute("x", x + (isRight ? -14 : 14));
    this.label.setAttribute("y", Math.max(MARGIN.top + 12, y - 12));
    this.label.textContent = this.hasLosses ? number(value, 2) : percent(value);
    this.point.setAttribute("aria-valuenow", Math.round(100 * this.budget));
    const loss = this.hasLosses ? `, loss ${number(value, 2)}` : "";
    this.point.setAttribute("aria-valuetext", `budget ${percent(this.budget, 0)}, ${percent(setting.share)} spent${loss}`);
  }

  #x(share) {
    return MARGIN.left + share * (this.width - MARGIN.left - MARGIN.right);
  }

  #y(value) {
    const [low, high] = this.range;
    return this.height - MARGIN.bottom - ((value - low) / (high - low)) * (this.height - MARGIN.top - MARGIN.bottom);
  }

  #path(points) {
    return points.map(([x, y], place) => `${place ? "L" : "M"}${this.#x(x).toFixed(1)} ${this.#y(y).toFixed(1)}`).join("");
  }

  #lines() {
    if (this.hasLosses) {
      const points = this.model.curve.points.map((point) => [point.share, point.loss]);
      const ends = [points[0], points[points.length - 1]];
      return [draw("path", { class: "reference", d: this.#path(ends) }), draw("path", { class: "line", d: this.#path(points) })];
    }
    const { settings } = this.model;
    const side = (name) => settings.map((one) => [one.budget, one[name]]);
    return [
      draw("path", { class: "band", d: `${this.#path([...side("low"), ...side("high").reverse()])}Z` }),
      draw("path", { class: "reference", d: this.#path([[0, 0], [1, 1]]) }),
      draw("path", { class: "line", d: this.#path(side("share")) }),
    ];
  }

  #axes() {
    const [left, right] = [MARGIN.left, this.width - MARGIN.right];
    const bottom = this.height - MARGIN.bottom;
    const across = [0, 0.25, 0.5, 0.75, 1].map((share) =>
      draw("text", { x: this.#x(share), y: bottom + 19, "text-anchor": "middle" }, `${100 * share}`));
    const up = ticksOf(...this.range).flatMap((value) => [
      draw("line", { class: "rule", x1: left, x2: right, y1: this.#y(value), y2: this.#y(value) }),
      draw("text", { x: left - 8, y: this.#y(value) + 4, "text-anchor": "end" }, this.hasLosses ? short(value) : `${Math.round(100 * value)}`),
    ]);
    const title = this.hasLosses ? "% of tokens by the expert" : "budget, %";
    const name = draw("text", { class: "name", x: (left + right) / 2, y: this.height - 6, "text-anchor": "middle" }, title);
    return [...up, ...across, name];
  }
}

function lossAt(points, share) {
  const next = points.findIndex((point) => point.share >= share);
  if (next === -1) return points[points.length - 1].loss;
  const [before, after] = [points[Math.max(0, next - 1)], points[next]];
  const width = after.share - before.share;
  return width > 0 ? before.loss + ((share - before.share) / width) * (after.loss - before.loss) : after.loss;
}

function rangeOf(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = 0.08 * (high - low || Math.abs(high) || 1);
  return [low - room, high + room];
}

function ticksOf(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, place) => (first + place) * step);
}
