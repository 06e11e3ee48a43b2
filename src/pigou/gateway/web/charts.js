"use strict";

// One chart over time with axes, drawn by uPlot; the numbers are the server's.
class Plot {
  // `lines` are [name of the series, label, colour]; `band` names two series to fill between.
  constructor(card, title, lines, format, band = null) {
    this.lines = lines;
    this.format = format;
    this.band = band;
    this.card = card;
    if (title === null) {
      this.node = card;
    } else {
      const head = document.createElement("h3");
      head.textContent = title;
      head.dataset.word = title;
      head.title = WORDS[title] ?? "";
      this.now = document.createElement("div");
      this.now.className = "now";
      this.node = document.createElement("div");
      this.node.className = "plot";
      card.replaceChildren(head, this.now, this.node);
    }
    this.drawn = null;
    new ResizeObserver(() => this.fit()).observe(this.node);
  }

  colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  size() {
    return { width: Math.max(200, Math.floor(this.node.clientWidth)), height: 150 };
  }

  fit() {
    if (this.drawn && this.node.clientWidth && this.drawn.width !== this.size().width) this.drawn.setSize(this.size());
  }

  options() {
    const soft = this.colour("--soft"), line = this.colour("--line");
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui, sans-serif" };
    const series = this.lines.map(([, label, colour]) => ({
      label, stroke: this.colour(colour), width: 1.75, points: { show: false }, spanGaps: false,
      value: (_, value) => this.format(value),
    }));
    const place = (name) => 1 + this.lines.findIndex(([key]) => key === name);
    return {
      ...this.size(),
      cursor: { drag: { x: false, y: false }, points: { size: 6 } },
      legend: { live: true },
      bands: this.band ? [{ series: [place(this.band[1]), place(this.band[0])], fill: `${this.colour("--both")}22` }] : [],
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [
        { ...axis, values: (plot, ticks) => ticks.map((tick) => this.clock(plot, tick)), space: 70 },
        { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => this.format(tick)) },
      ],
      series: [{ label: "time", value: (_, value) => value === null ? "–" : new Date(value * 1000).toLocaleTimeString("en-GB") }, ...series],
    };
  }

  // Hours and minutes; with seconds where the whole chart is a few minutes.
  clock(plot, tick) {
    const short = plot.scales.x.max - plot.scales.x.min < 600;
    return new Date(tick * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(short ? { second: "2-digit" } : {}) });
  }

  show(past) {
    const times = past.time ?? [];
    if (!times.length || !this.node.clientWidth) return;
    const data = [times, ...this.lines.map(([name]) => past[name])];
    if (this.drawn) this.drawn.setData(data);
    else this.drawn = new uPlot(this.options(), data, this.node);
    if (this.now) this.now.replaceChildren(...this.lines.map(([name, label]) => this.latest(label, past[name])));
  }

  // Colours are those of the scheme at the first drawing: the next one takes them anew.
  repaint() {
    this.drawn?.destroy();
    this.drawn = null;
  }

  latest(label, values) {
    const known = values.filter((value) => value !== null);
    const made = document.createElement("span"), value = document.createElement("b"), name = document.createElement("span");
    value.textContent = known.length ? this.format(known.at(-1)) : "–";
    name.textContent = ` ${label}`;
    name.className = "unit";
    made.append(value, name);
    return made;
  }
}
