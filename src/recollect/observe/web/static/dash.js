// The live page: tabs of the running jobs and of runs on disk; the chosen one as tiles, charts and tables, or several in one plot.
"use strict";

const shown = { listed: null, key: null, charts: new Map(), parts: {}, last: null, axis: new URLSearchParams(location.search).get("x") };

// What curves are drawn over, if every run that is shown has it; the first that can be had is taken unless one is chosen.
const AXES = {
  steps: { of: (job) => job.history.values["axis/env_steps_total"], show: shortNumber, label: "environment steps" },
  time: { of: (job) => (job.history.at.length ? job.history.at : undefined), show: shortTime, incrs: TIME_STEPS, label: "time since the start" },
  iterations: { of: (job) => job.history.values.iteration, show: shortNumber, label: "iterations" },
};

const possibleAxes = (jobs) => Object.keys(AXES).filter((name) => jobs.every((job) => AXES[name].of(job)));

// The address that shows these jobs and runs.
function address(ids) {
  const query = new URLSearchParams(ids.map((id) => ["job", id]));
  if (shown.axis) query.set("x", shown.axis);
  return "?" + query;
}

// The links stay as they are while nothing about them changes: one that is replaced under the mouse loses its click.
function drawJobs(jobs, current) {
  const here = current.map((job) => job.id), listed = JSON.stringify([jobs, here, shown.axis]);
  if (listed === shown.listed) return;
  shown.listed = listed;
  const links = jobs.map((job) => {
    const isHere = here.includes(job.id);
    const link = element("a", { href: address([job.id]), ...(isHere ? { "aria-current": "page" } : {}) },
      `${job.title} `, element("span", { class: "faint" }, job.pid ? `${job.kind}, pid ${job.pid}, began ${clock(job.started)}` : "on disk"));
    const others = isHere ? here.filter((id) => id !== job.id) : [...here, job.id];
    const words = isHere ? `Leave ${job.title} out of the plot` : `Show ${job.title} in the same plot`;
    const add = element("a", { href: address(others), class: "add", title: words, "aria-label": words }, isHere ? "–" : "+");
    return element("span", { class: isHere ? "tab here" : "tab" }, link, ...(others.length ? [add] : []));
  });
  document.getElementById("jobs").replaceChildren(...(jobs.length > 1 || !here.length ? links : []));
}

function clock(seconds) { return new Date(1000 * seconds).toLocaleTimeString("en-GB"); }

// The place of what is shown: made anew for other jobs or another axis, filled for each state.
function begin(jobs, axes) {
  const place = document.getElementById("job"), axis = element("div", { class: "axis faint" });
  shown.charts = new Map();
  shown.parts = {
    head: element("div"), tiles: element("div", { class: "tiles" }), axis,
    charts: element("div", { class: "grid" }), tables: element("div"), rest: element("details", { class: "card" }),
  };
  if (axes.length > 1) {
    const select = element("select", { id: "axis", "aria-label": "Curves over" }, ...axes.map((name) => element("option", { value: name }, AXES[name].label)));
    select.value = shown.now;
    select.addEventListener("change", () => { shown.axis = select.value; history.replaceState(null, "", address(jobs.map((job) => job.id))); draw(shown.last); });
    axis.append("curves over ", select);
  }
  shown.parts.rest.append(element("summary", {}, "all figures"), element("div", { class: "scroll" }));
  if (jobs.length > 1) { shown.parts.rest.hidden = true; shown.parts.tiles.hidden = true; }
  place.replaceChildren(...Object.values(shown.parts));
}

function headOf(job) {
  const done = job.figures.iteration, total = job.facts.iterations;
  const bar = total ? [element("progress", { max: total, value: done || 0 }), ` ${shortNumber(done || 0)} of ${shortNumber(total)}`] : [];
  const look = { running: "good", completed: "good", starting: "faint", interrupted: "faint", recorded: "faint" }[job.state] || "bad";
  return element("div", { class: "head" },
    element("b", {}, job.title), element("span", { class: `state ${look}` }, job.state), ...(job.elapsed_s ? [shortTime(job.elapsed_s)] : []), ...bar,
    element("span", { class: "faint" }, Object.entries(job.facts).filter(([name]) => name !== "iterations").map(([name, x]) => `${name} ${x}`).join(" · ")));
}

function drawTiles(job) {
  const tiles = Object.entries(job.charts).filter(([title, names]) => names[0] in job.figures && job.tiles.includes(title));
  shown.parts.tiles.replaceChildren(...tiles.map(([title, names]) =>
    element("div", { class: "tile" }, element("b", {}, shortNumber(job.figures[names[0]])), element("span", {}, title))));
}

// The points of a run whose place on the axis goes on: a run that was taken up again may count from an earlier one.
function points(job, names) {
  const at = AXES[shown.now].of(job), kept = [];
  at.forEach((x, k) => {
    if (x === null) return;
    while (kept.length && at[kept[kept.length - 1]] >= x) kept.pop();
    kept.push(k);
  });
  return [kept.map((k) => at[k]), ...names.map((name) => kept.map((k) => (job.history.values[name] || [])[k] ?? null))];
}

function chart(key, title, names, label) {
  if (!shown.charts.has(key)) {
    const place = element("div"), axis = AXES[shown.now];
    shown.parts.charts.append(element("div", { class: "card" }, element("h2", {}, title), place));
    shown.charts.set(key, new LineChart(place, names, { x: axis.show, steps: axis.incrs, label }));
  }
  return shown.charts.get(key);
}

function drawCharts(job) {
  for (const [title, names] of Object.entries(job.charts)) {
    const [at, ...lines] = points(job, names);
    chart(`${title} ${names}`, title, names, shortName(names)).set(at, Object.fromEntries(names.map((name, k) => [name, lines[k]])));
  }
}

// Several runs: a chart for each figure, a line for each run.
function drawTogether(jobs) {
  const charts = new Map();
  for (const job of jobs) for (const [title, names] of Object.entries(job.charts)) for (const name of names) {
    if (!charts.has(name)) charts.set(name, names.length > 1 ? `${title}: ${shortName(names)(name)}` : title);
  }
  const ids = jobs.map((job) => job.id), titles = Object.fromEntries(jobs.map((job) => [job.id, job.title]));
  for (const [name, title] of charts) {
    const [at, ...lines] = uPlot.join(jobs.map((job) => points(job, [name])));
    chart(name, title, ids, (id) => titles[id]).set(at, Object.fromEntries(ids.map((id, k) => [id, lines[k]])));
  }
  const rows = jobs.map((job) => ({ run: job.title, state: job.state, ...Object.fromEntries(
    job.tiles.filter((title) => job.charts[title][0] in job.figures).map((title) => [title, job.figures[job.charts[title][0]]])) }));
  shown.parts.tables.replaceChildren(element("div", { class: "card scroll" }, element("h2", {}, "newest figures"), table(rows)));
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
  const jobs = message.shown, axes = possibleAxes(jobs);
  shown.last = message;
  shown.now = axes.includes(shown.axis) ? shown.axis : axes[0] || "time";
  drawJobs(message.jobs, jobs);
  if (!jobs.length) {
    document.getElementById("job").replaceChildren(element("p", { class: "empty" }, "No job is running. Start one, such as ", element("code", {}, "recollect demo"), ", and it appears here."));
    shown.key = null;
    return;
  }
  document.title = jobs.length > 1 ? `${jobs.length} runs` : `${jobs[0].title}: ${jobs[0].state}`;
  const key = JSON.stringify([jobs.map((job) => job.id), shown.now, axes]);
  if (key !== shown.key) begin(jobs, axes);
  shown.key = key;
  shown.parts.head.replaceChildren(...(jobs.length > 1 ? [] : jobs.map(headOf)));
  if (jobs.length > 1) return axes.length ? drawTogether(jobs) : undefined;
  for (const part of [drawTiles, ...(axes.length ? [drawCharts] : []), drawTables]) part(jobs[0]); // no axis: nothing was measured yet
  return undefined;
}

live("events" + location.search, draw);
