// The results of a run, and the last runs side by side.

import { make, percent, plural, short } from "./dom.js";
import { spansOf } from "./tokens.js";
import { smallTour } from "./tour.js";

const MAX_RUNS = 20;

// null: the setting of a promised quality, which requests get that name no budget.
export const nameOf = (budget) => (budget === null ? "default" : percent(budget, 0));

export function newRun(input, budget) {
  // The key identifies the input. It is made once, because a long input takes longer than a token.
  return { input, key: JSON.stringify(input), budget, tokens: [], facts: {}, deferral: null, end: "running" };
}

export function countOf({ tokens }) {
  const byExpert = tokens.filter((token) => token.author === "expert").length;
  const switches = tokens.filter((token, place) => place && token.author !== tokens[place - 1].author).length;
  return { written: tokens.length, byExpert, switches, share: tokens.length ? byExpert / tokens.length : 0 };
}

// The predictor proposes every token, even if the expert writes it. The expert alone is assumed to write as many.
export function savingOf(run, prices) {
  const { written, byExpert } = countOf(run);
  const cost = prices.predictor * written + prices.expert * byExpert;
  const alone = prices.expert * written;
  return { cost, alone, saved: alone > 0 ? 1 - cost / alone : null };
}

// `prices` are those that users set; null where the server has its own.
export function statsOf(run, prices, alone) {
  const { written, byExpert, switches, share } = countOf(run);
  const expected = run.deferral ? `, expected ${percent(run.deferral.expected_share)}` : "";
  const { cost, alone: full, saved } = savingOf(run, prices ?? { predictor: 0, expert: 0 });
  const costs = saved === null ? "set a price for the expert" : `${short(cost)} instead of ${short(full)} for the expert alone`;
  const facts = Object.entries(run.facts).map(([name, value]) => [name, short(value), comparison(name, alone)]);
  return [
    ...facts,
    ["by the expert", `${byExpert} of ${written}`, plural(switches, "switch")],
    ["share", percent(share), `budget ${nameOf(run.budget)}${expected}`],
    ...(prices ? [["estimated saving", saved === null ? "none" : percent(saved, 0).replace("-", "−"), costs]] : moneyOf(run)),
  ];
}

// What a run cost by the server's prices; it is known when the run is over.
function moneyOf({ deferral }) {
  if (!deferral?.money) return [];
  const { currency, predictor, expert, spent, expert_alone: alone, saved } = deferral.money;
  const amount = (value) => `${short(value)} ${currency}`;
  return [
    ["spent", amount(spent), `predictor ${amount(predictor)}, expert ${amount(expert)}`],
    [saved < 0 ? "lost" : "saved", amount(Math.abs(saved)), `the expert alone ${amount(alone)}`],
  ];
}

function comparison(name, { predictor, expert }) {
  const runs = [["predictor", predictor], ["expert", expert]]
    .filter(([, run]) => run && name in run.facts)
    .map(([author, run]) => `${author} alone ${short(run.facts[name])}`);
  return runs.join(", ") || "run each model alone to compare";
}

export function summaryOf(run) {
  const { written, byExpert, switches, share } = countOf(run);
  const start = run.end === "stopped" ? `Stopped after ${plural(written, "token")}` : "Done";
  return `${start}: the expert wrote ${byExpert} of ${plural(written, "token")} (${percent(share)}), ${plural(switches, "switch")}.`;
}

// A budget is a promise about many inputs; one of them may spend much more or nothing.
export function averageNote(run) {
  const { written, byExpert, share } = countOf(run);
  const at = run.budget === null ? "the default setting" : `a budget of ${percent(run.budget, 0)}`;
  const spent = `this one spent ${percent(share)} (${byExpert} of ${plural(written, "token")}) at ${at}`;
  return `This is one input: ${spent}. Budgets hold on average over many inputs.`;
}

export class History {
  constructor(part, list, onPick) {
    Object.assign(this, { part, list, onPick, runs: [] });
  }

  add(run) {
    const isSame = (other) => other.budget === run.budget && other.key === run.key;
    this.runs = [run, ...this.runs.filter((other) => !isSame(other))].slice(0, MAX_RUNS);
    this.draw();
  }

  clear() {
    this.runs = [];
    this.draw();
  }

  // The complete runs of each model alone for the same input, if any.
  aloneFor(run) {
    const whole = this.runs.filter((other) => other.end === "done" && other.key === run.key);
    const withShare = (share) => whole.find((other) => countOf(other).share === share);
    return { predictor: withShare(0), expert: withShare(1) };
  }

  draw() {
    this.part.hidden = this.runs.length === 0;
    const groups = new Map();
    for (const run of this.runs) groups.set(run.key, [...(groups.get(run.key) ?? []), run]);
    this.list.replaceChildren(...[...groups.values()].map((runs) => this.#group(runs)));
  }

  #group(runs) {
    const sorted = runs.toSorted((one, other) => one.budget - other.budget);
    const { input } = runs[0];
    const isTour = Array.isArray(input);
    const name = isTour ? `${input.length} cities` : make("bdi", { textContent: excerpt(input.name ?? input) });
    const lines = make("ol", { className: isTour ? "lines tours" : "lines" }, ...sorted.map((run) => this.#line(run)));
    return make("li", {}, make("p", { className: "soft" }, "for ", name), lines);
  }

  #line(run) {
    const { written, byExpert } = countOf(run);
    const button = make("button", { type: "button", textContent: nameOf(run.budget), title: "Show this run again" });
    button.addEventListener("click", () => this.onPick(run));
    const facts = Object.entries(run.facts).map(([name, value]) => `${name} ${short(value)} · `);
    const end = run.end === "done" ? "" : ` · ${run.end}`;
    const summary = `${facts.join("")}${byExpert} of ${written} by the expert${end}`;
    const shown = Array.isArray(run.input) ? smallTour(run.input, run.tokens) : make("p", { className: "tokens", dir: "auto" }, ...spansOf(run.tokens));
    return make("li", {}, button, shown, make("p", { className: "soft", textContent: summary }));
  }
}

function excerpt(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 90 ? `${line.slice(0, 90)}…` : line;
}
