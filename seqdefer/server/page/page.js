// The page: connects the budget, the input, the runs and the server.

import { RequestError, complete, describe, hasKey, useKey } from "./api.js";
import { CurveView } from "./curve.js";
import { byId, make, percent, plural, recall, remember } from "./dom.js";
import { TextInput, TourInput } from "./inputs.js";
import { History, averageNote, newRun, statsOf, summaryOf } from "./runs.js";
import { refreshPromise, showPromise } from "./promise.js";
import { asCurl, asPython } from "./snippets.js";
import { SoundInput } from "./sound.js";
import { pricesOf, showTiming } from "./timing.js";
import { TokenList } from "./tokens.js";

const SWEEP = [0, 0.1, 0.2, 0.5, 1];
const ALONE = [0, 1];
const TOLERANCE = 0.02; // a share further from its budget does not meet it

class Page {
  constructor(model) {
    this.model = model;
    this.shown = null; // the run on display
    this.controller = null; // the AbortController of the current work
    this.curve = new CurveView(byId("curve"), model, (budget) => this.setBudget(budget));
    this.history = new History(byId("history"), byId("runs"), (run) => this.pick(run));
    this.input = new (model.audio ? SoundInput : model.kind === "tour" ? TourInput : TextInput)(model);
    this.input.onChange = () => this.changed();
    this.input.onRecorded = () => this.run([this.budget]);
    this.input.onTrouble = showError;
    const parts = { list: byId("tokens"), readout: byId("readout"), rows: byId("rows") };
    this.list = new TokenList({ ...parts, onPoint: (token) => this.input.point(token) });
    this.introduce();
    this.listen();
    this.setBudget(model.quality ? null : Math.round(100 * model.budget) / 100);
  }

  introduce() {
    const { model } = this;
    byId("name").textContent = model.id;
    document.title = `${model.id} · seqdefer`;
    const what = model.about || "writes sequences";
    byId("about").textContent = `This model ${what}. A cheap predictor writes, and an expert takes over where it pays off.`;
    const how = model.by === "token" ? "defers token by token" : "hands off once";
    const facts = [how, `writes up to ${plural(model.length, "token")}`, `calibrated on ${plural(model.calibrated_on, "input")}`];
    byId("facts").textContent = facts.join(" · ");
    byId("curve-title").textContent = this.curve.title;
    byId("curve-note").textContent = this.curve.note;
    showPromise(model);
    showTiming(model.timing);
    byId("prices").hidden = model.currency !== null;
    byId("board").hidden = false;
  }

  listen() {
    byId("budget").addEventListener("input", (event) => this.setBudget(event.target.value / 100));
    byId("run").addEventListener("click", () => this.run([this.budget]));
    byId("sweep").addEventListener("click", () => this.run(SWEEP));
    byId("alone").addEventListener("click", () => this.run(ALONE));
    byId("stop").addEventListener("click", () => this.controller?.abort());
    byId("forget").addEventListener("click", () => this.history.clear());
    byId("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run([this.budget]);
    });
    const prices = pricesOf(this.model.timing);
    for (const author of Object.keys(prices)) {
      const field = byId(`price-${author}`);
      field.value = recall("localStorage", `price-${author}`) ?? prices[author];
      field.addEventListener("input", () => {
        remember("localStorage", `price-${author}`, field.value);
        this.showStats();
      });
    }
    for (const button of document.querySelectorAll("[data-copies]")) button.addEventListener("click", () => copy(button));
  }

  get prices() {
    if (this.model.currency !== null) return null;
    const value = (author) => Math.max(0, byId(`price-${author}`).valueAsNumber || 0);
    return { predictor: value("predictor"), expert: value("expert") };
  }

  // null: the setting of the promised quality, which is that of no budget. The page begins there, and runs it until the
  // user sets a budget.
  setBudget(budget) {
    const { quality, settings } = this.model;
    const place = Math.round(100 * this.shareOf(budget));
    const shown = budget === null ? percent(quality.share) : percent(budget, 0);
    this.budget = budget;
    byId("budget").value = place;
    byId("budget").setAttribute("aria-valuetext", shown);
    byId("budget-shown").textContent = shown;
    byId("spent").textContent = budget === null ? `Default: ${quality.words}.` : this.spentAt(budget, settings[place]);
    this.curve.moveTo(place / 100, budget === null ? { budget: quality.share, share: quality.share } : settings[place]);
    this.changed();
  }

  shareOf(budget) {
    return budget ?? this.model.quality.share;
  }

  spentAt(budget, setting) {
    const [low, high] = [setting.low, setting.high].map((share) => (100 * share).toFixed(1));
    const spent = `spends ${percent(setting.share)} [${low}, ${high}] of the tokens`;
    const isMet = this.model.promise !== null || Math.abs(setting.share - budget) <= TOLERANCE;
    return isMet ? `On average, this ${spent}.` : `This budget cannot be met. On average, the nearest ${spent}.`;
  }

  changed() {
    byId("copied").textContent = "";
    byId("as-curl").textContent = asCurl(this.model.id, this.input.value, this.budget);
    byId("as-python").textContent = asPython(this.model.id, this.input.value, this.budget);
  }

  // -- runs --------------------------------------------------------------------------------------------------------

  async run(budgets) {
    if (this.controller) return;
    const { problem, value } = this.input;
    byId("status").textContent = "";
    showError(problem);
    if (problem) return;
    this.controller = new AbortController();
    this.setBusy(true);
    try {
      const runs = budgets.map((budget) => newRun(value, budget));
      for (const run of runs) await this.write(run);
      this.showNearest(runs);
      byId("status").textContent = runs.length > 1 ? `Done: ${runs.length} runs to compare.` : summaryOf(this.shown);
    } catch (error) {
      this.fail(error);
    } finally {
      this.controller = null;
      this.setBusy(false);
      refreshPromise();
    }
  }

  // The slider stays where the user left it; of several runs, show the one nearest to it.
  showNearest(runs) {
    const distance = (run) => Math.abs(this.shareOf(run.budget) - this.shareOf(this.budget));
    this.show(runs.reduce((best, run) => (distance(run) < distance(best) ? run : best)));
  }

  async write(run) {
    this.show(run);
    try {
      for await (const event of complete(this.model.id, run.input, run.budget, this.controller.signal)) this.receive(run, event);
      run.end = "done";
    } catch (error) {
      run.end = error.name === "AbortError" ? "stopped" : "failed";
      throw error;
    } finally {
      if (run.tokens.length) this.history.add(run);
      this.showStats();
    }
  }

  receive(run, event) {
    if (event.usage) {
      run.deferral = event.deferral;
      this.showRemarks();
      return;
    }
    run.tokens.push(event);
    run.facts = event.facts ?? run.facts;
    this.list.add(event);
    this.input.drawRun(run);
    this.showStats();
  }

  fail(error) {
    if (error.name === "AbortError") {
      byId("status").textContent = summaryOf(this.shown);
      return;
    }
    if (!(error instanceof RequestError)) throw error;
    if (error.status === 401) askForKey(error.message, () => {});
    else if (error.status === 404) showError(`${error.message}. The server now has another model; reload the page.`);
    else showError(error.message);
  }

  setBusy(isBusy) {
    const focused = document.activeElement;
    for (const id of ["run", "sweep", "alone"]) byId(id).disabled = isBusy;
    byId("stop").disabled = !isBusy;
    byId("tokens").setAttribute("aria-busy", String(isBusy));
    // A disabled button loses the focus: move it to its counterpart.
    if (focused.disabled) byId(isBusy ? "stop" : "run").focus();
  }

  // -- display -----------------------------------------------------------------------------------------------------

  pick(run) {
    if (this.controller) return;
    this.input.restore(run.input);
    this.setBudget(run.budget);
    this.show(run);
  }

  show(run) {
    this.shown = run;
    byId("nothing").hidden = true;
    byId("table-part").hidden = false;
    this.list.show(run.tokens);
    this.input.drawRun(run);
    this.showRemarks();
    this.showStats();
  }

  showRemarks() {
    const { deferral } = this.shown;
    const said = [...(deferral?.remarks ?? []), ...(deferral?.drift ? [deferral.drift] : [])];
    const items = said.map((remark) => make("li", { textContent: remark }));
    if (deferral?.degraded) {
      const failure = `The expert failed, and the predictor finished: ${deferral.reason}`;
      items.unshift(make("li", { className: "failed", textContent: failure }));
    }
    if (deferral?.capped) items.unshift(make("li", { textContent: `The cap kept ${plural(deferral.capped, "token")} from the expert.` }));
    byId("remarks").hidden = items.length === 0;
    byId("remarks").replaceChildren(...items);
  }

  showStats() {
    if (!this.shown) return;
    const stats = statsOf(this.shown, this.prices, this.history.aloneFor(this.shown));
    byId("stats").hidden = byId("average").hidden = this.shown.tokens.length === 0;
    byId("average").textContent = averageNote(this.shown);
    byId("stats").replaceChildren(...stats.map(([name, value, detail]) =>
      make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }), make("dd", { className: "soft", textContent: detail }))));
  }
}

function showError(message) {
  byId("trouble").textContent = message;
  byId("trouble").hidden = !message;
}

async function copy(button) {
  const part = byId(button.dataset.copies);
  try {
    await navigator.clipboard.writeText(part.textContent);
    byId("copied").textContent = "Copied.";
  } catch {
    // Browsers allow the clipboard in secure contexts only. Select the text instead.
    getSelection().selectAllChildren(part);
    byId("copied").textContent = "The browser does not allow copying. The text is selected: press Ctrl+C.";
  }
}

function askForKey(reason, then) {
  const form = byId("key-form");
  showError(reason);
  form.hidden = false;
  form.onsubmit = (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    form.hidden = true;
    byId("key").value = "";
    connect(then, key);
  };
  byId("key").focus();
}

// Ask the server for its model, with a new key if given, and pass it on; ask for a key until the server accepts one.
async function connect(then, key) {
  showError("");
  try {
    if (key !== undefined) useKey(key);
    then(await describe());
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    if (error.status === 401) askForKey(hasKey() || key !== undefined ? error.message : "", then);
    else showError(`${error.message} Reload the page to try again.`);
  }
}

connect((model) => new Page(model));
