// The page: which episodes are shown, which step, and what the keys do. The address keeps all three.
"use strict";

class View {
  constructor(about) {
    this.about = about;
    this.state = { a: null, b: null, step: 0, zoom: null };
    this.list = new EpisodeList(about, (row) => this.show(row), (row) => this.compare(row));
    const goTo = (step) => this.goTo(step), zoomTo = (range) => this.zoomTo(range);
    this.curves = about.leaves.filter((leaf) => leaf.shown === "curves").map((leaf) => new LeafCurves(leaf, this.state, goTo, zoomTo));
    // next_obs and its like repeat what is shown above, one step later: they come last.
    this.curves.sort((x, y) => x.leaf.name.startsWith("next_") - y.leaf.name.startsWith("next_"));
    document.getElementById("curves").append(...this.curves.map((one) => one.place));
    document.getElementById("leaf-filter").hidden = !this.curves.length;
    document.getElementById("now").hidden = about.leaves.every((leaf) => leaf.shown === "picture");
    this.frames = [];
    this.isPlaying = false;
    if (about.fps) this.playAsRecorded(about.fps);
    this.listen();
  }

  seconds(steps) { return (steps / this.about.fps).toFixed(2); }

  playAsRecorded(fps) {
    const speed = document.getElementById("speed"), value = String(fps);
    let option = [...speed.options].find((one) => one.value === value);
    if (!option) speed.append(option = element("option", { value }, shortNumber(fps)));
    option.value = value; // the text was the value before it says more
    option.textContent += " (as recorded)";
    speed.value = value;
  }

  get rows() { return [this.state.a, this.state.b].filter((row) => row !== null); }
  get length() { return Math.max(1, ...this.rows.map((row) => row.length)); }

  async start() {
    await this.list.reload();
    const kept = new URLSearchParams(location.hash.slice(1));
    const find = async (number) => this.list.rows.find((row) => row.episode === Number(number))
      || { episode: Number(number), length: (await ask("curves", { episode: number, leaf: this.curves[0].leaf.name, width: 1 })).length, return: null, end: "", task: "" };
    let a = this.list.rows[0] || null, b = null;
    try {
      if (kept.has("a")) a = await find(kept.get("a"));
      if (kept.has("b")) b = await find(kept.get("b"));
    } catch { /* an address of another day */ }
    if (a) this.set(a, b, Number(kept.get("step")) || 0);
    else document.getElementById("show").replaceChildren(element("p", { class: "empty" }, "This set holds no samples."));
  }

  // -- what is shown

  show(row) { this.set(row, this.state.b && this.state.b.episode !== row.episode ? this.state.b : null, 0); }
  compare(row) { if (this.state.a && row.episode !== this.state.a.episode) this.set(this.state.a, row, this.state.step); }

  set(a, b, step) {
    Object.assign(this.state, { a, b, zoom: null });
    document.getElementById("unzoom").hidden = true;
    this.list.mark(a.episode, b && b.episode);
    this.list.reveal(a.episode);
    document.getElementById("heads").replaceChildren(...this.rows.map((row, k) => this.head(row, k)));
    for (const id of ["pictures", "curves"]) document.getElementById(id).classList.toggle("compared", b !== null);
    this.setFrames();
    document.getElementById("slider").max = this.length - 1;
    for (const one of this.curves) one.set(this.rows);
    this.goTo(step);
  }

  head(row, k) {
    const words = [`${row.length.toLocaleString("en-US")} steps`];
    if (row.return !== null) words.push(`return ${shortNumber(row.return)}`);
    if (this.about.fps) words.push(`${this.seconds(row.length)} s`);
    if (row.end) words.push(row.end);
    if (row.task) words.push(row.task);
    const head = element("div", { class: k ? "shown b" : "shown" }, element("b", {}, `${this.about.has_episodes ? "Episode" : "Run"} ${row.episode}`), ` · ${words.join(" · ")}`);
    if (k) {
      const close = element("button", {}, "close");
      close.addEventListener("click", () => this.set(this.state.a, null, this.state.step));
      head.prepend(close);
    }
    return head;
  }

  setFrames() {
    const pictures = this.about.leaves.filter((leaf) => leaf.shown === "picture");
    const lines = pictures.map((leaf) => this.rows.map((row) => new Frames(leaf, row, (step) => this.goTo(step))));
    this.frames = lines.flat();
    document.getElementById("pictures").replaceChildren(...lines.map((line) => element("div", { class: "pair" }, ...line.map((one) => one.place))));
  }

  goTo(step) {
    this.state.step = Math.min(Math.max(0, step), this.length - 1);
    document.getElementById("slider").value = this.state.step;
    const time = this.about.fps ? ` · ${this.seconds(this.state.step)} s` : "";
    document.getElementById("at").textContent = `step ${this.state.step} / ${this.length - 1}${time}`;
    for (const one of this.curves) one.moveStep();
    this.tellValues();
    this.keepAddress();
    return Promise.all(this.frames.map((one) => one.show(this.state.step, this.isPlaying ? 8 : 1)));
  }

  keepAddress() {
    const { a, b, step } = this.state;
    const kept = new URLSearchParams({ a: a.episode, ...(b ? { b: b.episode } : {}), step });
    history.replaceState(null, "", "#" + kept);
  }

  zoomTo(range) {
    this.state.zoom = range;
    document.getElementById("unzoom").hidden = range === null;
    for (const one of this.curves) one.set(this.rows);
  }

  // The values in words, asked for once stepping pauses for a moment.
  tellValues() {
    clearTimeout(this.telling);
    this.telling = setTimeout(async () => {
      const { step } = this.state, rows = this.rows;
      try {
        const found = await Promise.all(rows.map((row) => ask("step", { episode: row.episode, step: Math.min(step, row.length - 1) })));
        if (step === this.state.step) this.fillValues(found, rows);
      } catch (error) { document.getElementById("status").textContent = error.message; }
    }, this.isPlaying ? 120 : 30);
  }

  fillValues(found, rows) {
    const head = rows.length > 1 ? [element("tr", {}, element("th"), ...rows.map((row) => element("th", {}, `episode ${row.episode}`)))] : [];
    const lines = Object.keys(found[0]).map((name) => element("tr", {}, element("td", {}, name), ...found.map((one) => element("td", {}, one[name]))));
    const table = document.querySelector("#now table");
    table.replaceChildren(...head, ...lines);
    table.dataset.step = this.state.step;
  }

  // -- playing

  async play() {
    this.isPlaying = !this.isPlaying;
    document.getElementById("play").textContent = this.isPlaying ? "stop" : "play";
    if (this.isPlaying && this.state.step >= this.length - 1) await this.goTo(0);
    while (this.isPlaying && this.state.step < this.length - 1) {
      const next = new Promise((done) => setTimeout(done, 1000 / Number(document.getElementById("speed").value)));
      await Promise.all([this.goTo(this.state.step + 1), next]); // a slow frame slows the film, it is not left out
    }
    this.isPlaying = false;
    document.getElementById("play").textContent = "play";
  }

  // -- keys and buttons

  listen() {
    const on = (id, act) => document.getElementById(id).addEventListener("click", (event) => { act(); event.target.blur(); });
    on("back", () => this.goTo(this.state.step - 1));
    on("forward", () => this.goTo(this.state.step + 1));
    on("play", () => this.play());
    on("unzoom", () => this.zoomTo(null));
    document.getElementById("slider").addEventListener("input", (event) => this.goTo(Number(event.target.value)));
    document.getElementById("leaves").addEventListener("input", (event) => this.filterLeaves(event.target.value.trim().toLowerCase()));
    document.addEventListener("keydown", (event) => this.key(event));
    this.filterLeaves("");
  }

  filterLeaves(part) {
    for (const one of this.curves) one.place.hidden = !one.leaf.name.toLowerCase().includes(part);
    const n = this.curves.filter((one) => !one.place.hidden).length;
    document.getElementById("leaf-count").textContent = `${n} of ${this.curves.length} leaves`;
  }

  key(event) {
    const typing = event.target.matches("input:not([type=range]), select") || event.ctrlKey || event.metaKey || event.altKey;
    if (typing || !this.state.a) return;
    const far = event.shiftKey ? 10 : 1;
    const acts = {
      ArrowRight: () => this.goTo(this.state.step + far), ArrowLeft: () => this.goTo(this.state.step - far),
      Home: () => this.goTo(0), End: () => this.goTo(this.length - 1), " ": () => this.play(), c: () => this.compareNext(),
      ArrowDown: () => this.move(1), ArrowUp: () => this.move(-1), Escape: () => this.set(this.state.a, null, this.state.step),
    };
    const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act) { event.preventDefault(); act(); }
  }

  move(by) {
    const row = this.list.beside(this.state.a.episode, by);
    if (row) this.show(row);
  }

  compareNext() {
    const row = this.list.beside((this.state.b || this.state.a).episode, 1);
    if (row) this.compare(row);
  }
}

document.addEventListener("DOMContentLoaded", async () => {
  try {
    window.view = new View(await ask("about"));
    await window.view.start();
  } catch (error) { document.getElementById("status").textContent = error.message; }
});
