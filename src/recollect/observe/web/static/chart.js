// Line charts on uPlot: colours of the theme, width of the place, any number of named lines over one axis.
"use strict";

// const chart = new LineChart(place, ["reward/mean"], {x: shortTime, steps: TIME_STEPS});
// chart.set(at, {"reward/mean": [...]});
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];

class LineChart {
  constructor(place, names, { x = shortNumber, y = shortNumber, height = 190, label = (name) => name, steps = undefined } = {}) {
    Object.assign(this, { place, names, x, y, height, label, steps, data: [[], ...names.map(() => [])], plot: null });
    place.classList.add("chart");
    new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.width(), height })).observe(place);
    window.addEventListener("themechange", () => { if (this.plot) this.draw(); });
  }

  width() { return Math.max(200, this.place.clientWidth); }

  set(at, values) {
    this.data = [at, ...this.names.map((name) => values[name] || at.map(() => null))];
    if (this.plot) this.plot.setData(this.data);
    else if (at.length) this.draw();
  }

  draw() {
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "12px system-ui" };
    const lines = this.names.map((name, k) => ({
      label: this.label(name), stroke: colour(`--c${k % 8}`), width: 1.6, spanGaps: true, points: { show: false },
      value: (_, v) => this.y(v),
    }));
    if (this.plot) this.plot.destroy();
    this.plot = new uPlot({
      width: this.width(), height: this.height, scales: { x: { time: false } }, cursor: { y: false },
      series: [{ label: "at", value: (_, v) => (v === null ? "–" : this.x(v)) }, ...lines],
      axes: [
        { ...axis, values: (_, ticks) => ticks.map(this.x), space: 60, ...(this.steps ? { incrs: this.steps } : {}) },
        { ...axis, values: (_, ticks) => ticks.map(this.y), size: 58 },
      ],
    }, this.data, this.place);
  }
}
