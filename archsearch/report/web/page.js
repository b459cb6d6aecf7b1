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
      hovermode: "closest", hoverlabel: { align: "left" },
      xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis),
      legend: Object.assign({ orientation: "h", x: 0, y: -0.22, yanchor: "top", font: { size: 11 } }, figure.layout.legend),
    });
    if (figure.layout.yaxis2) layout.yaxis2 = axis(figure.layout.yaxis2);
    Plotly.react(place, inked(figure.data, text), layout, {
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
