// What budgets take, as measured when the model was fitted or calibrated.

import { byId, make, percent, plural } from "./dom.js";

const UNMEASURED = { predictor: 1, expert: 10 };

/** Prices per token to start from: the time that each model takes alone. */
export function pricesOf(timing) {
  if (!timing || !(timing.predictor > 0)) return UNMEASURED;
  return { predictor: 1, expert: Number((timing.expert / timing.predictor).toPrecision(2)) };
}

/** Fill the table of seconds; it stays hidden where nothing was measured. */
export function showTiming(timing) {
  if (!timing) return;
  const alone = (name, seconds, asked, share) => ({ name, seconds, asked, share });
  const rows = [
    alone("predictor alone", timing.predictor, 0, 0),
    ...timing.budgets.map((one) => ({ ...one, name: percent(one.budget, 0) })),
    alone("expert alone", timing.expert, 1, 1),
  ];
  byId("timing-rows").replaceChildren(...rows.map((row) => asRow(row, timing.expert)));
  byId("timing-note").textContent = `Seconds per sequence of ${plural(timing.inputs, "input")}, ${timing.at_once} written at once.`;
  byId("timing-part").hidden = false;
}

function asRow({ name, share, asked, seconds }, expert) {
  const speed = `${(expert / seconds).toFixed(2)} ×${seconds > expert ? " (slower)" : ""}`;
  const cells = [percent(share), asked.toFixed(1), seconds.toPrecision(3), speed];
  return make("tr", {}, make("th", { scope: "row" }, name), ...cells.map((cell) => make("td", {}, cell)));
}
