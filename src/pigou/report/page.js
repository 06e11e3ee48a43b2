"use strict";
(() => {
  const { figures, colours } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const theme = () => root.dataset.theme || (system.matches ? "dark" : "light");

  // Colours stand in figures by name: "@ink".
  const paint = (value, names) => {
    if (typeof value === "string") return value[0] === "@" ? names[value.slice(1)] : value;
    if (Array.isArray(value)) return typeof value[0] === "number" && value.length > 2 ? value : value.map((each) => paint(each, names));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, paint(each, names)]));
    return value;
  };

  const draw = () => {
    button.textContent = theme() === "dark" ? "Light" : "Dark";
    for (const { id, data, layout } of figures) {
      const names = colours[theme()];
      Plotly.react(id, paint(data, names), paint(layout, names), {
        responsive: true, displaylogo: false, displayModeBar: "hover",
        modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
        toImageButtonOptions: { filename: id, scale: 2 },
      });
    }
  };

  button.addEventListener("click", () => { root.dataset.theme = theme() === "dark" ? "light" : "dark"; draw(); });
  system.addEventListener("change", draw);
  draw();
})();
