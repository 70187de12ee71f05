// Saves the curves as CSV and the figure as PNG, and keeps the view in the address: #budget=35&show=Random,ChowMean
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const figure = document.getElementById("curves");
  const slider = figure.querySelector(".slider");
  const buttons = [...figure.querySelectorAll(".legend button[data-series]")];
  const nameOf = (button) => data.series[button.dataset.series].name;
  const isShown = (button) => button.getAttribute("aria-pressed") === "true";
  const shown = () => buttons.filter(isShown);
  const bar = document.querySelector(".downloads");
  bar.hidden = false;

  // --- the view in the address ---
  const opening = { budget: slider.value, show: shown().map(nameOf).join() };
  function view() {
    const names = shown().map((button) => encodeURIComponent(nameOf(button)));
    return `#budget=${slider.value}&show=${names.join()}`;
  }
  function keepView() {
    const isOpening = slider.value === opening.budget && shown().map(nameOf).join() === opening.show;
    history.replaceState(null, "", isOpening ? location.pathname + location.search : view());
  }
  function decode(text) {
    try {
      return decodeURIComponent(text);
    } catch {
      return text; // a percent sign of a name that somebody typed
    }
  }
  function takeView() {
    const parts = new Map(location.hash.slice(1).split("&").map((part) => part.split(/=(.*)/s)));
    const budget = Number(parts.get("budget"));
    if (parts.has("budget") && budget >= 0 && budget <= Number(slider.max)) slider.value = String(Math.round(budget));
    if (parts.has("show")) {
      const names = new Set(parts.get("show").split(",").map(decode));
      for (const button of buttons) if (names.has(nameOf(button)) !== isShown(button)) button.click();
    }
    slider.dispatchEvent(new Event("input"));
  }
  slider.addEventListener("change", keepView);
  figure.addEventListener("pointerup", keepView);
  for (const button of buttons) button.addEventListener("click", keepView);
  addEventListener("hashchange", takeView);
  if (location.hash) takeView();

  // --- files ---
  function save(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  const quoted = (text) => `"${String(text).replace(/"/g, '""').replace(/^([=+@-])/, "'$1")}"`; // no formulas
  function csv() {
    const head = ["budget", "deferred"];
    for (const { name } of data.series) head.push(`${name} mean`, `${name} std`);
    const last = data.series[0].mean.length - 1;
    const rows = data.series[0].mean.map((_, step) => {
      const values = data.series.flatMap(({ mean, std }) => [mean[step], data.has_spread ? std[step] : ""]);
      return [step / last, ((data.end * step) / last).toPrecision(6), ...values].join();
    });
    return [head.map(quoted).join(), ...rows].join("\r\n") + "\r\n";
  }
  function picture() {
    const [width, height, left, top, right, bottom] = [1640, 960, 150, 90, 400, 120];
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    const pen = canvas.getContext("2d");
    const [wide, tall] = [width - left - right, height - top - bottom];
    const text = (words, x, y, align, colour = "#5b6675") => {
      Object.assign(pen, { textAlign: align, fillStyle: colour });
      pen.fillText(words, x, y);
    };
    const line = (points, colour, dash) => {
      pen.beginPath();
      pen.setLineDash(dash);
      pen.strokeStyle = colour;
      for (const [x, y] of points) pen.lineTo(x, y);
      pen.stroke();
    };
    Object.assign(pen, { fillStyle: "#ffffff", font: "24px system-ui, sans-serif", lineWidth: 1.5 });
    pen.fillRect(0, 0, width, height);
    for (const tick of figure.querySelectorAll(".scale.left span")) {
      const y = top + tall * (1 - parseFloat(tick.style.bottom) / 100);
      line([[left, y], [left + wide, y]], "#e3e7ec", []);
      text(tick.textContent, left - 16, y + 8, "right");
    }
    for (const tick of figure.querySelectorAll(".scale.bottom span")) {
      text(tick.textContent, left + (wide * parseFloat(tick.style.left)) / 100, top + tall + 40, "center");
    }
    text(figure.querySelector(".y-title").textContent, left - 110, 50, "left", "#1f2733");
    text(figure.querySelector(".x-title").textContent, left + wide / 2, height - 30, "center", "#1f2733");
    pen.lineWidth = 4;
    shown().forEach((button, place) => {
      const curve = figure.querySelector(`.series[data-series="${button.dataset.series}"] .line`);
      const dash = (curve.getAttribute("stroke-dasharray") ?? "").split(" ").filter(Boolean).map((one) => 2 * one);
      const { name, mean } = data.series[button.dataset.series];
      const at = (loss, step) => [
        left + (wide * step) / (mean.length - 1),
        top + tall * (1 - (loss - data.low) / (data.high - data.low)),
      ];
      const colour = getComputedStyle(curve).stroke;
      line(mean.map(at), colour, dash);
      const y = top + 20 + 40 * place;
      line([[left + wide + 40, y], [left + wide + 90, y]], colour, dash);
      text(name, left + wide + 104, y + 8, "left", "#1f2733");
    });
    return canvas;
  }
  const savers = {
    csv: () => save("curves.csv", new Blob([csv()], { type: "text/csv" })),
    png: () => picture().toBlob((blob) => save("curves.png", blob)),
    link: async (button) => {
      history.replaceState(null, "", view());
      const words = await navigator.clipboard?.writeText(location.href).then(() => "Copied", () => null);
      button.textContent = words ?? "The address of this page is the link";
    },
  };
  bar.addEventListener("click", ({ target }) => savers[target.dataset.save]?.(target));
})();
