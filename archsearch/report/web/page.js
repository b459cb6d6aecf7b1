// Draws every chart of the page from the data that stands in it. Colours of text and lines are the page's, light or dark.
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("chart-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function colours() {
    const style = getComputedStyle(document.documentElement);
    return { text: style.getPropertyValue("--text").trim(), line: style.getPropertyValue("--line").trim() };
  }

  function inked(value, ink) {
    if (value === "@ink") return ink;
    if (Array.isArray(value)) return value.map((part) => inked(part, ink));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, inked(part, ink)]));
    }
    return value;
  }

  const SVG = "http://www.w3.org/2000/svg";

  function shape(name, attributes) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  // What a line, a point or a bar looks like, beside its name.
  function swatch(trace) {
    const colour = (trace.marker && trace.marker.color) || (trace.line && trace.line.color);
    const box = shape("svg", { width: 22, height: 12, viewBox: "0 0 22 12", "aria-hidden": "true" });
    if (trace.type === "bar") {
      box.append(shape("rect", { x: 5, y: 0, width: 12, height: 12, fill: colour }));
      return box;
    }
    if (trace.mode !== "markers") {
      const dash = trace.line.dash ? { "stroke-dasharray": "5 3" } : {};
      box.append(shape("line", { x1: 0, y1: 6, x2: 22, y2: 6, stroke: colour, "stroke-width": 1.8, ...dash }));
    }
    if (trace.mode === "lines") return box;
    const symbol = trace.marker.symbol;
    const outline = { fill: "none", stroke: colour, "stroke-width": 1.5 };
    if (symbol === "circle-open") box.append(shape("circle", { cx: 11, cy: 6, r: 4.5, ...outline }));
    else if (symbol.startsWith("x-thin")) box.append(shape("path", { d: "M7 2L15 10M15 2L7 10", ...outline }));
    else if (symbol === "diamond") box.append(shape("path", { d: "M11 1L16 6L11 11L6 6Z", fill: colour }));
    else box.append(shape("circle", { cx: 11, cy: 6, r: 3.5, fill: colour }));
    return box;
  }

  // Below the chart and in the page's own lines, so that long names wrap and the plot keeps its size on a phone.
  function legend(place, figure, traces) {
    const named = traces.filter((trace) => trace.showlegend);
    let box = place.parentElement.querySelector(".legend");
    if (box) box.remove();
    if (named.length < 2) return;
    box = document.createElement("div");
    box.className = "legend";
    if (figure.legend) box.append(Object.assign(document.createElement("span"), { textContent: figure.legend }));
    for (const trace of named) {
      const key = document.createElement("button");
      key.type = "button";
      key.setAttribute("aria-pressed", "true");
      key.title = "show or hide";
      const name = trace.name.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
      key.append(swatch(trace), name);
      key.addEventListener("click", () => {
        const on = key.getAttribute("aria-pressed") !== "true";
        key.setAttribute("aria-pressed", String(on));
        const members = traces.flatMap((other, number) => (other.legendgroup === trace.legendgroup ? [number] : []));
        Plotly.restyle(place, { visible: on }, members);
      });
      box.append(key);
    }
    place.after(box);
  }

  function draw(place) {
    const figure = data[place.dataset.chart];
    if (!figure) return;
    const { text, line } = colours();
    const narrow = place.clientWidth < 520;
    const axis = (own) => Object.assign(
      { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true, fixedrange: narrow }, inked(own, text));
    const layout = Object.assign({}, inked(figure.layout, text), {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: text, size: narrow ? 11 : 12, family: "system-ui, sans-serif" },
      margin: { l: 48, r: figure.layout.yaxis2 ? 52 : 12, t: 8, b: 44 },
      hovermode: "closest", hoverlabel: { align: "left" }, showlegend: false,
      xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis),
    });
    if (figure.layout.yaxis2) layout.yaxis2 = axis(figure.layout.yaxis2);
    const traces = inked(figure.data, text);
    legend(place, figure, traces);
    Plotly.react(place, traces, layout, {
      responsive: true, displaylogo: false, displayModeBar: narrow ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      toImageButtonOptions: { format: "svg", filename: place.dataset.chart },
    }).then(() => place.setAttribute("data-drawn", "yes"));
  }

  const places = Array.from(document.querySelectorAll("[data-chart]"));
  // One after the other, so that a phone can scroll meanwhile; the first ones first.
  function all(number) {
    if (number >= places.length) return;
    draw(places[number]);
    setTimeout(() => all(number + 1), 0);
  }
  dark.addEventListener("change", () => all(0));
  all(0);
})();
