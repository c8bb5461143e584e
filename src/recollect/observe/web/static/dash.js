// The live page: tabs of the running jobs, and the chosen one as tiles, charts and tables.
"use strict";

const chosen = new URLSearchParams(location.search).get("pid");
const shown = { listed: null, pid: null, started: null, charts: new Map(), parts: {} };

// The links stay as they are while nothing about them changes: one that is replaced under the mouse loses its click.
function drawJobs(jobs, current) {
  const listed = JSON.stringify([jobs, current && current.pid]);
  if (listed === shown.listed) return;
  shown.listed = listed;
  const links = jobs.map((job) => {
    const isHere = current && job.pid === current.pid;
    return element("a", { href: `?pid=${job.pid}`, class: "tab", ...(isHere ? { "aria-current": "page" } : {}) },
      `${job.title} `, element("span", { class: "faint" }, `${job.kind}, pid ${job.pid}`));
  });
  document.getElementById("jobs").replaceChildren(...(jobs.length > 1 || !current ? links : []));
}

// The place of a job: made anew for each job, filled for each state.
function begin(job) {
  const place = document.getElementById("job");
  shown.pid = job.pid; shown.started = job.started; shown.charts = new Map();
  shown.parts = {
    head: element("div", { class: "head" }), tiles: element("div", { class: "tiles" }),
    charts: element("div", { class: "grid" }), tables: element("div"), rest: element("details", { class: "card" }),
  };
  shown.parts.rest.append(element("summary", {}, "all figures"), element("div", { class: "scroll" }));
  place.replaceChildren(...Object.values(shown.parts));
}

function drawHead(job) {
  const done = job.figures.iteration, total = job.facts.iterations;
  const bar = total ? [element("progress", { max: total, value: done || 0 }), ` ${shortNumber(done || 0)} of ${shortNumber(total)}`] : [];
  const look = { running: "good", completed: "good", starting: "faint", interrupted: "faint" }[job.state] || "bad";
  shown.parts.head.replaceChildren(
    element("b", {}, job.title), element("span", { class: `state ${look}` }, job.state), shortTime(job.elapsed_s), ...bar,
    element("span", { class: "faint" }, Object.entries(job.facts).filter(([name]) => name !== "iterations").map(([name, x]) => `${name} ${x}`).join(" · ")));
}

function drawTiles(job) {
  const tiles = Object.entries(job.charts).filter(([title, names]) => names[0] in job.figures && job.tiles.includes(title));
  shown.parts.tiles.replaceChildren(...tiles.map(([title, names]) =>
    element("div", { class: "tile" }, element("b", {}, shortNumber(job.figures[names[0]])), element("span", {}, title))));
}

function drawCharts(job) {
  for (const [title, names] of Object.entries(job.charts)) {
    const key = `${title} ${names}`;
    if (!shown.charts.has(key)) {
      const place = element("div");
      shown.parts.charts.append(element("div", { class: "card" }, element("h2", {}, title), place));
      shown.charts.set(key, new LineChart(place, names, { x: shortTime, steps: TIME_STEPS, label: shortName(names) }));
    }
    shown.charts.get(key).set(job.history.at, job.history.values);
  }
}

// time/learner_wait_ms, time/learner_train_ms -> wait, train: what a chart's title says already is left out.
function shortName(names) {
  const last = names.map((name) => name.split("/").pop().replace(/_ms$/, "")), head = last[0].split("_")[0] + "_";
  const all = last.length > 1 && last.every((name) => name.startsWith(head));
  return (name) => name.split("/").pop().replace(/_ms$/, "").slice(all ? head.length : 0);
}

function table(rows) {
  const columns = [...new Set(rows.flatMap(Object.keys))];
  const isNumber = (column) => rows.every((row) => row[column] == null || typeof row[column] === "number");
  const cell = (tag, column, text) => element(tag, isNumber(column) ? { class: "number" } : {}, text);
  const show = (x) => (typeof x === "number" && !Number.isInteger(x) ? shortNumber(x) : x == null ? "–" : String(x));
  return element("table", {},
    element("thead", {}, element("tr", {}, ...columns.map((column) => cell("th", column, column)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...columns.map((column) => cell("td", column, show(row[column])))))));
}

function drawTables(job) {
  const tables = Object.entries(job.tables).filter(([, rows]) => rows.length);
  shown.parts.tables.replaceChildren(...tables.map(([name, rows]) =>
    element("div", { class: "card scroll" }, element("h2", {}, name), table(rows))));
  const figures = Object.entries(job.figures).map(([figure, value]) => ({ figure, value }));
  shown.parts.rest.lastChild.replaceChildren(table(figures));
}

function draw(message) {
  const job = message.job;
  drawJobs(message.jobs, job);
  if (!job) {
    document.getElementById("job").replaceChildren(element("p", { class: "empty" }, "No job is running. Start one, such as ", element("code", {}, "recollect demo"), ", and it appears here."));
    shown.pid = null;
    return;
  }
  document.title = `${job.title}: ${job.state}`;
  if (job.pid !== shown.pid || job.started !== shown.started) begin(job);
  for (const part of [drawHead, drawTiles, drawCharts, drawTables]) part(job);
}

live("events" + (chosen ? `?pid=${encodeURIComponent(chosen)}` : ""), draw);
