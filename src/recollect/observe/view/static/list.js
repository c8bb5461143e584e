// The list of episodes: filters, order, further rows as one scrolls, and returns once they are known.
"use strict";

// Ask the server; what went wrong is told in the page's status line, in the server's words.
async function ask(address, values) {
  const answer = await fetch(address + "?" + new URLSearchParams(values || {}));
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// What a leaf holds, as float32[17].
function kindOf(leaf) { return leaf.shape.length ? `${leaf.dtype}[${leaf.shape.join(", ")}]` : leaf.dtype; }

const PAGE = 200;

class EpisodeList {
  // choose(row) shows an episode, compare(row) shows it beside the one that is shown.
  constructor(about, choose, compare) {
    Object.assign(this, { about, choose, compare, rows: [], count: 0, sort: "episode", descending: false, asked: 0 });
    this.body = document.querySelector("#list tbody");
    this.form = document.getElementById("filters");
    this.form.addEventListener("input", () => this.reload());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    for (const head of document.querySelectorAll("#list [data-sort]")) {
      head.addEventListener("click", () => this.order(head.dataset.sort));
    }
    document.getElementById("list").addEventListener("scroll", (event) => {
      const at = event.target;
      if (at.scrollTop + at.clientHeight > at.scrollHeight - 200) this.more();
    });
    if (about.reward === null) for (const id of ["return-filter", "return-head"]) document.getElementById(id).hidden = true;
    this.hasTasks = about.tasks.length > 1;
    for (const id of ["task-filter", "task-head"]) document.getElementById(id).hidden = !this.hasTasks;
    document.getElementById("tasks").append(...about.tasks.map((task) => element("option", { value: task })));
    this.tellSummary();
  }

  tellSummary() {
    const count = (n, word) => `${n.toLocaleString("en-US")} ${word}${n === 1 ? "" : "s"}`;
    document.getElementById("summary").textContent = this.about.has_episodes
      ? `${count(this.about.samples, "step")} in ${count(this.about.episodes, "episode")}` + (this.about.reward === null
        ? "; no leaf is called reward, so there are no returns (--reward names another)" : `; return is the sum of ${this.about.reward}`)
      : `${count(this.about.samples, "sample")}; where episodes begin is not known, so they are shown in runs of 1,000`;
    const { tasks, fps } = this.about, more = [];
    if (tasks.length === 1) more.push(`task: ${tasks[0]}`);
    if (fps) more.push(`${shortNumber(fps)} steps a second`);
    if (more.length) document.getElementById("summary").append("; " + more.join("; "));
  }

  order(sort) {
    this.descending = this.sort === sort ? !this.descending : sort !== "episode";
    this.sort = sort;
    this.reload();
  }

  query(offset) {
    const values = Object.fromEntries(new FormData(this.form));
    for (const name in values) values[name] = values[name].trim();
    return { ...values, sort: this.sort, descending: this.descending ? "1" : "", offset, limit: PAGE };
  }

  async reload() {
    const mine = ++this.asked;
    let found;
    try { found = await ask("episodes", this.query(0)); } catch (error) { return this.tell(`${error.message}`); }
    if (mine !== this.asked) return undefined; // a later question is under way
    this.rows = [];
    this.body.replaceChildren();
    const returns = found.progress < 1 && this.about.has_episodes;
    this.summing = returns;
    this.take(found);
    this.tell(found.problem || (returns ? `summing returns, ${Math.floor(100 * found.progress)} %` : ""));
    if (returns) setTimeout(() => mine === this.asked && this.reload(), 300);
    return undefined;
  }

  async more() {
    if (this.rows.length >= this.count || this.loading) return;
    this.loading = true;
    const mine = this.asked;
    try {
      const found = await ask("episodes", this.query(this.rows.length));
      if (mine === this.asked) this.take(found);
    } finally { this.loading = false; }
  }

  take(found) {
    this.count = found.count;
    this.rows.push(...found.rows);
    this.body.append(...found.rows.map((row) => this.line(row)));
    const ended = this.rows.some((row) => row.end) || this.form.end.value !== "";
    for (const id of ["end-filter", "end-head"]) document.getElementById(id).hidden = !ended;
    document.getElementById("more").textContent = this.count === 0 ? "No episode fits these filters."
      : `${this.rows.length.toLocaleString("en-US")} of ${this.count.toLocaleString("en-US")} listed`;
    for (const head of document.querySelectorAll("#list [data-sort]")) {
      if (head.dataset.sort === this.sort) head.dataset.way = this.descending ? "down" : "up";
      else delete head.dataset.way;
    }
    this.mark(...(this.marked || []));
  }

  line(row) {
    const number = (text) => element("td", { class: "number" }, text);
    const versus = element("button", { title: "Show beside the other episode", "aria-label": `Compare with episode ${row.episode}` }, "compare");
    versus.addEventListener("click", (event) => { event.stopPropagation(); this.compare(row); });
    const cells = [number(String(row.episode)), number(row.length.toLocaleString("en-US"))];
    if (this.about.reward !== null) cells.push(number(row.return !== null ? shortNumber(row.return) : this.summing ? "…" : "–"));
    if (row.end) cells.push(element("td", {}, row.end));
    if (this.hasTasks) cells.push(element("td", { class: "task", title: row.task }, row.task));
    const line = element("tr", { "data-episode": row.episode }, ...cells, element("td", {}, versus));
    line.addEventListener("click", () => this.choose(row));
    return line;
  }

  mark(a, b) {
    this.marked = [a, b];
    for (const line of this.body.children) {
      line.classList.toggle("a", a !== null && Number(line.dataset.episode) === a);
      line.classList.toggle("b", b !== null && Number(line.dataset.episode) === b);
    }
  }

  // The row that stands `by` places after an episode in the list as it is ordered now.
  beside(episode, by) {
    const at = this.rows.findIndex((row) => row.episode === episode);
    const next = at < 0 ? 0 : at + by;
    if (next >= this.rows.length - 1) this.more();
    return this.rows[next] || null;
  }

  reveal(episode) {
    const line = this.body.querySelector(`tr[data-episode="${episode}"]`);
    if (line) line.scrollIntoView({ block: "nearest" });
  }

  tell(text) { document.getElementById("note").textContent = text; }
}
