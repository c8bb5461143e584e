// A picture leaf of one episode: the frame at the step, and a strip of frames from the first to the last.
"use strict";

const KEPT_FRAMES = 64;

class Frames {
  constructor(leaf, row, goTo) {
    Object.assign(this, { leaf, row, kept: new Map(), shown: -1 });
    this.canvas = element("canvas", { width: 1, height: 1, role: "img", "aria-label": `${leaf.name} of episode ${row.episode}` });
    this.caption = element("span", { class: "faint" });
    this.strip = element("img", { class: "strip", alt: `${leaf.name} from the first step to the last`, src: `strip?${new URLSearchParams({ episode: row.episode, leaf: leaf.name })}` });
    this.strip.addEventListener("click", (event) => goTo(Math.round(event.offsetX / this.strip.clientWidth * (row.length - 1))));
    const exact = leaf.dtype === "uint8" ? "" : ", stretched from black to white";
    this.place = element("div", { class: "card picture" }, element("h2", {}, leaf.name + " ", element("span", { class: "faint" }, `${kindOf(leaf)}${exact}`)),
      this.canvas, this.caption, this.strip);
  }

  // The frame of a step, loading or loaded; the newest 64 are kept.
  frame(step) {
    if (!this.kept.has(step)) {
      const image = new Image();
      const loaded = new Promise((done, failed) => { image.onload = () => done(image); image.onerror = failed; });
      image.src = `frame?${new URLSearchParams({ episode: this.row.episode, step, leaf: this.leaf.name })}`;
      loaded.catch(() => this.kept.delete(step));
      this.kept.set(step, loaded);
      if (this.kept.size > KEPT_FRAMES) this.kept.delete(this.kept.keys().next().value);
    }
    return this.kept.get(step);
  }

  // Show a step and begin to load those after it; resolves once it is on the screen.
  async show(step, ahead) {
    const at = Math.min(step, this.row.length - 1);
    this.shown = at;
    for (let next = at + 1; next <= Math.min(at + ahead, this.row.length - 1); next++) this.frame(next);
    let image;
    try { image = await this.frame(at); } catch { this.caption.textContent = `step ${at}: this frame cannot be read`; return; }
    if (this.shown !== at) return;
    this.canvas.width = image.naturalWidth;
    this.canvas.height = image.naturalHeight;
    this.canvas.getContext("2d").drawImage(image, 0, 0);
    this.canvas.dataset.step = at;
    this.caption.textContent = step > at ? `ended at step ${at}` : "";
  }
}
