// One leaf over time, for one episode or for two beside each other on the same scales.
"use strict";

class LeafCurves {
  // state has step and zoom ([first, end] or null); goTo(step) and zoomTo(range) change them for the whole page.
  constructor(leaf, state, goTo, zoomTo) {
    Object.assign(this, { leaf, state, goTo, zoomTo, rows: [], plots: [], component: 0, isSeen: false, isStale: true });
    this.more = element("span", { class: "faint" });
    this.places = element("div", { class: "pair" });
    this.place = element("section", { class: "card leaf", "data-leaf": leaf.name },
      element("h2", {}, leaf.name, element("span", { class: "faint" }, kindOf(leaf)), this.more), this.places);
    new IntersectionObserver(([entry]) => { this.isSeen = entry.isIntersecting; this.refresh(); }, { rootMargin: "300px" }).observe(this.place);
    new ResizeObserver(() => this.plots.forEach((plot) => plot.setSize({ width: this.width(), height: 200 }))).observe(this.place);
    window.addEventListener("themechange", () => this.draw());
  }

  width() { return Math.max(200, (this.place.clientWidth - 32 - 16 * (this.rows.length - 1)) / Math.max(1, this.rows.length)); }

  set(rows) { this.rows = rows; this.isStale = true; this.refresh(); }

  // Read what is not read yet, once the card comes into sight.
  async refresh() {
    if (!this.isSeen || !this.isStale || !this.rows.length) return;
    this.isStale = false;
    const rows = this.rows, zoom = this.state.zoom;
    const values = { leaf: this.leaf.name, width: Math.round(this.width()), component: this.component };
    if (zoom) Object.assign(values, { first: zoom[0], end: zoom[1] + 1 });
    try {
      const found = await Promise.all(rows.map((row) => ask("curves", { episode: row.episode, ...values })));
      if (rows === this.rows && zoom === this.state.zoom) { this.found = found; this.draw(); }
    } catch (error) {
      if (rows === this.rows) this.places.replaceChildren(element("p", { class: "bad" }, error.message));
    }
  }

  draw() {
    if (!this.found) return;
    this.plots.forEach((plot) => plot.destroy());
    const places = this.found.map(() => element("div", {}));
    this.places.replaceChildren(...places);
    this.tellMore();
    const longest = Math.max(...this.found.map((one) => one.length));
    const x = this.state.zoom || [0, Math.max(1, longest - 1)];
    const y = this.range();
    this.plots = this.found.map((one, k) => this.plot(one, places[k], x, y));
    this.place.dataset.ready = this.rows.map((row) => row.episode).join(" ");
  }

  range() {
    let low = Infinity, high = -Infinity;
    for (const one of this.found) for (const line of one.values) for (const v of line) if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); }
    if (low > high) return [0, 1];
    return low === high ? [low - 1, high + 1] : [low - 0.06 * (high - low), high + 0.06 * (high - low)];
  }

  plot(one, place, x, y) {
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "12px system-ui" };
    const paths = this.leaf.whole && one.exact ? uPlot.paths.stepped({ align: 1 }) : undefined;
    const lines = one.names.map((name, k) => ({
      label: name || this.leaf.name, stroke: colour(`--c${k % 8}`), width: 1.4, paths, value: (_, v) => shortNumber(v),
    }));
    const made = new uPlot({
      width: this.width(), height: 200, legend: { show: lines.length > 1 },
      scales: { x: { time: false, range: x }, y: { range: y } },
      cursor: { y: false, sync: { key: "view" }, drag: { x: true, y: false, setScale: false } },
      series: [{ label: "step" }, ...lines],
      axes: [{ ...axis, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7] },
        { ...axis, values: (_, ticks) => ticks.map((v) => String(Number(v.toPrecision(4)))), size: 62 }],
      hooks: { setSelect: [(plot) => this.selected(plot)], draw: [(plot) => this.drawStep(plot, colour("--ink"))] },
    }, [one.steps, ...one.values], place);
    this.listen(made);
    setTimeout(() => this.plots.includes(made) && this.tellStep(made, one)); // uPlot empties its legend when it is ready
    return made;
  }

  listen(plot) {
    let pressed = 0;
    plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    plot.over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - pressed) < 4) this.goTo(Math.round(plot.posToVal(event.offsetX, "x")));
    });
    plot.over.addEventListener("mouseleave", () => this.moveStep());
    plot.over.addEventListener("dblclick", () => this.zoomTo(null));
  }

  selected(plot) {
    if (plot.select.width < 4) return;
    const ends = [plot.select.left, plot.select.left + plot.select.width].map((at) => Math.round(plot.posToVal(at, "x")));
    plot.setSelect({ width: 0, height: 0, left: 0, top: 0 }, false);
    if (ends[1] > ends[0]) this.zoomTo(ends);
  }

  // The line that marks the step of the player.
  drawStep(plot, colour) {
    const at = plot.valToPos(this.state.step, "x", true);
    if (at < plot.bbox.left || at > plot.bbox.left + plot.bbox.width) return;
    plot.ctx.save();
    plot.ctx.strokeStyle = colour;
    plot.ctx.lineWidth = devicePixelRatio;
    plot.ctx.setLineDash([4, 3]);
    plot.ctx.beginPath();
    plot.ctx.moveTo(at, plot.bbox.top);
    plot.ctx.lineTo(at, plot.bbox.top + plot.bbox.height);
    plot.ctx.stroke();
    plot.ctx.restore();
  }

  // Move that line, and let the legend tell the values there.
  moveStep() {
    if (!this.isSeen) return;
    this.plots.forEach((plot, k) => {
      plot.redraw(false);
      this.tellStep(plot, this.found[k]);
    });
  }

  tellStep(plot, one) {
    const idx = one.exact ? this.state.step - one.steps[0] : -1;
    if (idx >= 0 && idx < one.steps.length) plot.setLegend({ idx });
  }

  // A wide leaf comes 32 components at a time.
  tellMore() {
    const { first, of, names } = this.found[0];
    if (of <= 32) return this.more.replaceChildren();
    const turn = (to, word) => {
      const button = element("button", {}, word);
      button.disabled = to < 0 || to >= of;
      button.addEventListener("click", () => { this.component = to; this.isStale = true; this.refresh(); });
      return button;
    };
    return this.more.replaceChildren(`components ${first} to ${first + names.length - 1} of ${of} `, turn(first - 32, "previous"), " ", turn(first + 32, "next"));
  }
}
