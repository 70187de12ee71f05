// What budgets promise and spend. The band is what the expected share of an input stays within, as far as the
// calibration can tell; the line is what the calibration saw; dots are what was served since, which it has not seen.

import { describe } from "./api.js";
import { byId, draw, percent, plural } from "./dom.js";

const [WIDTH, HEIGHT] = [460, 280];
const MARGIN = { left: 44, right: 12, top: 12, bottom: 42 };
const TICKS = [0, 0.25, 0.5, 0.75, 1];

const x = (budget) => MARGIN.left + budget * (WIDTH - MARGIN.left - MARGIN.right);
const y = (share) => HEIGHT - MARGIN.bottom - share * (HEIGHT - MARGIN.top - MARGIN.bottom);
const path = (points) => points.map(([budget, share], place) => `${place ? "L" : "M"}${x(budget).toFixed(1)} ${y(share).toFixed(1)}`).join("");

/** Draw a model; the part stays hidden where the calibration knows no limits. */
export function showPromise(model) {
  if (model.settings.some((one) => one.limit === null)) return;
  byId("promise").replaceChildren(draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": labelOf(model) }, ...axes(), ...lines(model), ...dots(model)));
  byId("promise-note").textContent = noteOf(model);
  byId("promise-part").hidden = false;
}

/** Ask the server what was spent since, and draw that. */
export async function refreshPromise() {
  try {
    showPromise(await describe());
  } catch {} // the next run says what is wrong
}

function axes() {
  const across = TICKS.map((share) => draw("text", { x: x(share), y: HEIGHT - MARGIN.bottom + 18, "text-anchor": "middle" }, `${100 * share}`));
  const up = TICKS.flatMap((share) => [
    draw("line", { class: "rule", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y(share), y2: y(share) }),
    draw("text", { x: MARGIN.left - 7, y: y(share) + 4, "text-anchor": "end" }, `${100 * share}`),
  ]);
  const name = draw("text", { x: (MARGIN.left + WIDTH - MARGIN.right) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, "budget, %");
  return [...up, ...across, name];
}

function lines({ settings }) {
  const limits = settings.map((one) => [one.budget, one.limit]);
  return [
    draw("path", { class: "band", d: `${path([...limits, [1, 0], [0, 0]])}Z` }),
    draw("path", { class: "reference", d: path([[0, 0], [1, 1]]) }),
    draw("path", { class: "line", d: path(settings.map((one) => [one.budget, one.share])) }),
  ];
}

function dots({ served }) {
  return served.map((one) => {
    const words = `budget ${percent(one.budget, 0)}: ${percent(one.share)} spent on ${plural(one.inputs, "input")}`;
    return draw("circle", { class: "served", cx: x(one.budget), cy: y(one.share), r: 5 }, draw("title", {}, words));
  });
}

const inputsOf = (model) => model.served.reduce((sum, one) => sum + one.inputs, 0);
const labelOf = (model) => `Share spent by budget, with its limit, and what ${plural(inputsOf(model), "input")} spent that were served`;

function noteOf(model) {
  const limit = model.promise?.confidence
    ? `the promise: ${model.promise.words}`
    : "as far as the calibration can tell, the expected share of an input lies below its upper edge";
  const warning = model.drift?.warning ? ` Warning: ${model.drift.warning}.` : "";
  return `Share of tokens by the expert, in %. Band: ${limit}. Line: what the calibration saw. Dots: what ${plural(inputsOf(model), "input")} spent since the server started.${warning}`;
}
