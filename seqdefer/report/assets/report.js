// Toggles curves and shows the loss of each at any budget. The page is complete without this script.
// Text enters by textContent only, so that no name can become markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const figure = document.getElementById("curves");
  const find = (selector) => figure.querySelector(selector);
  const slider = find(".slider");
  const box = find(".box");
  const cross = find(".cross");
  const buttons = [...figure.querySelectorAll(".legend button[data-series]")];
  const curveOf = (button) => find(`.series[data-series="${button.dataset.series}"]`);
  const steps = Number(slider.max);
  document.documentElement.classList.add("js");
  cross.hidden = false;

  const figureText = (value) => value.toFixed(data.decimals).replace(/^-(?=0\.?0*$)/, "").replace("-", "−");
  const make = (tag, text, name) => {
    const node = document.createElement(tag);
    node.textContent = text;
    if (name) node.className = name;
    return node;
  };

  // Return the visible curves, lowest loss at this budget first.
  function visible(step) {
    return buttons
      .filter((button) => button.getAttribute("aria-pressed") === "true")
      .map((button) => {
        const { name, mean, std } = data.series[button.dataset.series];
        return { name, loss: mean[step], spread: std[step], key: button.querySelector(".key") };
      })
      .sort((one, other) => one.loss - other.loss);
  }

  function row({ name, loss, spread, key }) {
    const item = document.createElement("li");
    const about = data.has_spread ? `±\u00a0${figureText(spread)}` : "";
    item.append(key.cloneNode(true), make("span", name, "name"), make("b", figureText(loss)), make("small", about));
    return item;
  }

  function dot({ loss, key }) {
    const mark = document.createElement("i");
    mark.style.setProperty("--c", key.style.getPropertyValue("--c"));
    mark.style.bottom = `${(100 * (loss - data.low)) / (data.high - data.low)}%`;
    return mark;
  }

  function update() {
    const step = Number(slider.value);
    const rows = visible(step);
    const tokens = ((data.end * step) / steps).toFixed(1);
    find(".readout .at").textContent = `Loss at ${step}\u00a0% budget (${tokens} tokens)`;
    find(".readout ol").replaceChildren(...rows.map(row));
    cross.style.left = `${(100 * step) / steps}%`;
    cross.replaceChildren(...rows.map(dot).reverse()); // the lowest loss is drawn last, on top
    const spoken = rows.map(({ name, loss }) => `${name} ${figureText(loss)}`).join(", ");
    slider.setAttribute("aria-valuetext", `${step} percent, ${tokens} tokens: ${spoken}`);
  }

  function moveTo(event) {
    const area = box.getBoundingClientRect();
    slider.value = String(Math.round((steps * (event.clientX - area.left)) / area.width));
    update();
  }

  function toggle(button) {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    curveOf(button).classList.toggle("off", !on);
    single(pointed);
    update();
  }

  // Pointing at a name highlights its curve, if visible. Not by touch, which has no end of pointing.
  let pointed = null;
  function single(button) {
    pointed = button;
    const chosen = button?.getAttribute("aria-pressed") === "true" ? curveOf(button) : null;
    for (const curve of figure.querySelectorAll(".series")) curve.classList.toggle("picked", curve === chosen);
    figure.classList.toggle("picking", chosen !== null);
  }

  slider.addEventListener("input", update);
  find(".bands input")?.addEventListener("change", (event) => {
    figure.classList.toggle("no-bands", !event.target.checked);
  });
  box.addEventListener("pointerdown", moveTo);
  box.addEventListener("pointermove", moveTo);
  for (const button of buttons) {
    button.addEventListener("click", () => toggle(button));
    button.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && single(button));
    button.addEventListener("pointerleave", () => single(null));
    button.addEventListener("focus", () => button.matches(":focus-visible") && single(button));
    button.addEventListener("blur", () => single(null));
  }

  // Open all details for printing, and restore them afterwards.
  const closed = new Set();
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not([open])")) {
      closed.add(details);
      details.open = true;
    }
  });
  addEventListener("afterprint", () => {
    for (const details of closed) details.open = false;
    closed.clear();
  });

  update();
})();
