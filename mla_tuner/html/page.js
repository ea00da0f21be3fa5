// The page's own: filters, heat map, the measurements of a shape, curves.
const data = JSON.parse(document.getElementById("data").textContent);
const place = (id) => document.getElementById(id);
const show = (id, ...children) => place(id).replaceChildren(...children);
const ordered = (values) =>
  [...new Set(values)].sort((a, b) => (typeof a === "number" ? a - b : a < b ? -1 : 1));

// --- filters -------------------------------------------------------------------------------------

const FACETS = {
  heads: "Heads",
  dtype: "Data type",
  geometry: "Geometry",
  q_len: "Query tokens",
  layout: "Cache",
};
const ALWAYS = ["heads", "dtype"];
const chosen = {};

const kind = (bucket) =>
  Object.keys(FACETS)
    .map((name) => bucket[name])
    .join();
const shown = () =>
  data.buckets.filter((bucket) => Object.keys(FACETS).every((name) => bucket[name] === chosen[name]));

function chooseLargestKind() {
  const counts = new Map();
  for (const bucket of data.buckets) counts.set(kind(bucket), (counts.get(kind(bucket)) ?? 0) + 1);
  const most = Math.max(...counts.values());
  const first = data.buckets.find((bucket) => counts.get(kind(bucket)) === most);
  for (const name of Object.keys(FACETS)) chosen[name] = first[name];
}

function facet(name) {
  const values = ordered(data.buckets.map((bucket) => bucket[name]));
  const labels = values.map((value) => {
    const input = el("input", { type: "radio", name, value });
    input.checked = value === chosen[name];
    input.addEventListener("change", () => {
      chosen[name] = value;
      update();
    });
    return el("label", {}, input, el("span", {}, String(value)));
  });
  const hidden = values.length === 1 && !ALWAYS.includes(name);
  return hidden ? null : el("fieldset", { class: "choice" }, el("legend", {}, FACETS[name]), ...labels);
}

// --- heat map ------------------------------------------------------------------------------------

// Upper ends of all colours but the last: equal steps of the ratio between this device's extremes.
const COLOURS = 6;
const steps = (() => {
  const gains = data.buckets.filter((each) => each.won && !each.won.stays).map((each) => each.won.speedup);
  const [low, high] = [Math.min(...gains), Math.max(...gains)];
  const ends = Array.from({ length: COLOURS - 1 }, (_, at) => low * (high / low) ** ((at + 1) / COLOURS));
  return gains.length ? [...new Set(ends.map((end) => Number(end.toPrecision(2))))] : [];
})();
const gain = (won) => (won.stays ? 0 : 1 + steps.filter((end) => won.speedup >= end).length);

function heat(buckets) {
  const contexts = columns(data.buckets),
    batches = ordered(data.buckets.map((bucket) => bucket.batch));
  const head = el(
    "tr",
    {},
    el("th", { class: "corner", scope: "col" }, "Batch"),
    ...contexts.map((each) => el("th", { scope: "col" }, each.tokens)),
  );
  const rows = batches.map((batch) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, String(batch)),
      ...contexts.map(({ context }) =>
        cell(buckets.find((each) => each.context === context && each.batch === batch)),
      ),
    ),
  );
  const title = el(
    "caption",
    { class: "unseen" },
    "Speed-up, path and partitions; contexts across, batches down",
  );
  return el("table", {}, title, el("thead", {}, head), el("tbody", {}, ...rows));
}

function columns(buckets) {
  const found = new Map(
    buckets.map((bucket) => [bucket.context, { context: bucket.context, tokens: bucket.tokens }]),
  );
  return [...found.values()].sort((a, b) => a.context - b.context);
}

function cell(bucket) {
  if (!bucket) return el("td", {}, el("span", { class: "unseen" }, "not tuned"));
  const won = bucket.won;
  const [large, small] = !won ? ["?", "undecided"] : [speedup(won.speedup), cut(won)];
  const button = el(
    "button",
    { type: "button", tabindex: "-1", "aria-pressed": "false" },
    el("b", {}, large),
    " ",
    el("small", {}, small),
    el("span", { class: "unseen" }, `, context ${bucket.tokens}, batch ${bucket.batch}`),
  );
  button.className = won ? `gain-${gain(won)}` : "gain-0";
  button.addEventListener("click", () => open(bucket, button));
  return el("td", {}, button);
}

const cut = (won) => (won.path === "split" ? `split x${won.partitions}` : won.path);

// One stop for the tab key; arrow keys go to the next tuned shape in their direction.
function moveByArrows(event) {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const from = event.target.closest("td");
  if (!step || !from) return;
  event.preventDefault();
  const rows = [...place("heat").querySelectorAll("tbody tr")];
  let x = from.cellIndex + step[0],
    y = rows.indexOf(from.parentNode) + step[1];
  while (rows[y]?.cells[x]) {
    const button = rows[y].cells[x].querySelector("button");
    if (button) return stop(button, true);
    x += step[0];
    y += step[1];
  }
}

function stop(button, focus = false) {
  for (const each of place("heat").querySelectorAll("button")) each.tabIndex = each === button ? 0 : -1;
  if (focus) button.focus();
}

function stepName(at) {
  if (!steps.length) return "faster";
  if (at === 0) return `below ${steps[0]}x`;
  return at === steps.length ? `${steps.at(-1)}x and more` : `${steps[at - 1]}x to ${steps[at]}x`;
}

function legends() {
  const names = ["baseline stays", ...Array.from({ length: steps.length + 1 }, (_, at) => stepName(at))];
  show("scale", ...names.map((name, at) => el("li", {}, el("i", { class: `gain-${at}` }), name)));
  const there = data.paths.filter((path) =>
    data.buckets.some((each) => each.points.some((point) => point.path === path)),
  );
  show("paths", ...legend(there.map((path) => [data.paths.indexOf(path), path])));
}

// --- the measurements of a shape -----------------------------------------------------------------

function open(bucket, button) {
  for (const each of place("heat").querySelectorAll("button"))
    each.setAttribute("aria-pressed", each === button);
  stop(button);
  const won = bucket.won;
  const found = won ? summed(won) : "No verdict yet.";
  const title = `Measurements of ${bucket.name}`;
  place("opened").textContent = `${title} follow the heat map. ${found}`;
  const rows = bucket.measured.map(taken);
  const box = el(
    "div",
    { class: "scroll", role: "region", tabindex: "0", "aria-label": title },
    measured(bucket, rows),
  );
  show(
    "bucket",
    el("h3", {}, bucket.name),
    el("p", {}, found),
    ...(won?.reason ? [el("p", {}, `Why: ${won.reason}.`)] : []),
    el("div", { class: "beside" }, box, ...partitioned(bucket, rows)),
  );
}

function summed(won) {
  const gain = won.stays
    ? `${won.plan} stays`
    : `${won.plan}: ${interval(won.speedup, won.speedup_low, won.speedup_high)} over ${won.baseline}`;
  const regret = won.regret === null ? "" : `, ${percent(won.regret)} behind the best measured`;
  return `${gain}; ${microseconds(won.median_us)}${regret} (${won.day}).`;
}

// A measurement by the names of its fields; `page.py` wrote them in this order.
function taken([plan, stage, status, message, rounds, median, low, high, ratio, from, to, error, behind]) {
  const [path, partitions, tile, text] = data.plans[plan];
  return {
    path,
    partitions,
    tile,
    text,
    stage,
    status,
    message,
    rounds,
    median,
    low,
    high,
    ratio,
    from,
    to,
    error,
    behind,
  };
}

function measured(bucket, rows) {
  const cells = (row) => [
    row.text,
    row.status === "ok" ? row.stage : `${row.stage}, ${row.status}: ${row.message}`,
    String(row.rounds || "-"),
    microseconds(row.median),
    span(row.low, row.high),
    interval(row.ratio, row.from, row.to),
    percent(row.behind),
    row.error === null ? "-" : row.error.toExponential(1),
  ];
  const names = ["plan", "stage", "rounds", "median", "p10 to p90", "speed-up", "behind", "error"];
  const sorted = [...rows].sort((a, b) => (a.median ?? Infinity) - (b.median ?? Infinity));
  const title = `${rows.length} measurements, fastest first`;
  return table(
    title,
    names,
    sorted.map((row) => [row.text === bucket.won?.plan ? "won" : "", cells(row)]),
    2,
  );
}

// Time over partitions, a line a tile; nothing where there are no two counts to compare.
function partitioned(bucket, rows) {
  const ours = rows.filter((row) => ["single", "split"].includes(row.path) && row.stage !== "duel");
  const timed = ours.filter((row) => row.status === "ok" && row.median !== null);
  const counts = ordered(timed.map((row) => row.partitions));
  if (counts.length < 2) return [];
  const tiles = ordered(timed.map((row) => row.tile));
  const lines = tiles.map((tile, series) => [series, sweep(timed.filter((row) => row.tile === tile))]);
  const powers = Array.from({ length: 9 }, (_, at) => 2 ** at).filter((count) => count <= counts.at(-1));
  const labels = [...new Set([...powers, counts.at(-1)])].map((count) => [count, String(count)]);
  const fastest = timed.reduce((a, b) => (b.median < a.median ? b : a));
  const told = `the fastest has ${fastest.partitions}. All numbers are in the table.`;
  const figure = plot(
    "Time by partitions, a line a tile",
    told,
    lines,
    labels,
    rangeOf(lines.flatMap(([, points]) => points)),
  );
  figure.append(
    el("ul", { class: "legend" }, ...legend(tiles.map((tile, series) => [series, tile || "default tile"]))),
  );
  return [figure];
}

// Of each count the measurement of most rounds.
function sweep(rows) {
  const found = new Map();
  for (const row of rows)
    if (row.rounds >= (found.get(row.partitions)?.rounds ?? 0)) found.set(row.partitions, row);
  return [...found.values()]
    .sort((a, b) => a.partitions - b.partitions)
    .map((row) => ({
      x: row.partitions,
      y: row.median,
      low: row.low,
      high: row.high,
      note: `${row.text}: ${microseconds(row.median)} in ${row.rounds} rounds`,
    }));
}

// --- curves --------------------------------------------------------------------------------------

function curves(buckets) {
  const known = buckets.filter((bucket) => bucket.points.length);
  const labels = columns(known).map(({ context, tokens }) => [context, tokens]);
  const range = rangeOf(known.flatMap((bucket) => bucket.points.map(placed(bucket))));
  show(
    "curves",
    ...ordered(known.map((bucket) => bucket.batch)).map((batch) =>
      latencies(
        `Batch ${batch}`,
        known.filter((each) => each.batch === batch),
        labels,
        range,
      ),
    ),
  );
  const rows = known.flatMap((bucket) =>
    bucket.points.map((point) => [
      "",
      [
        bucket.name,
        point.plan,
        String(point.rounds || "-"),
        microseconds(point.median_us),
        microseconds(point.p10_us),
        microseconds(point.p90_us),
        speedup(point.speedup),
      ],
    ]),
  );
  const names = ["shape", "plan", "rounds", "median", "p10", "p90", "speed-up"];
  show("curves-table", table("Best plan of each path", names, rows, 2));
}

function latencies(title, buckets, labels, range) {
  const lines = data.paths.map((path, series) => [
    series,
    buckets.flatMap((bucket) => bucket.points.filter((point) => point.path === path).map(placed(bucket))),
  ]);
  const last = buckets.at(-1);
  const times = last.points.map((point) => `${point.path} ${microseconds(point.median_us)}`).join(", ");
  const told = `latency by context; at ${last.tokens} ${times}. All numbers are in the table.`;
  return plot(
    title,
    told,
    lines.filter(([, points]) => points.length),
    labels,
    range,
  );
}

const placed = (bucket) => (point) => ({
  x: bucket.context,
  y: point.median_us,
  low: point.p10_us,
  high: point.p90_us,
  note:
    `${bucket.name}: ${point.plan}, ${microseconds(point.median_us)}` +
    (point.p10_us === null ? "" : `, ${span(point.p10_us, point.p90_us)}`),
});

// --- all together --------------------------------------------------------------------------------

function update() {
  const buckets = shown();
  const what = Object.keys(FACETS)
    .map((name) => `${FACETS[name].toLowerCase()} ${chosen[name]}`)
    .join(", ");
  place("status").textContent = buckets.length
    ? `${buckets.length} shapes: ${what}`
    : `Nothing was tuned with ${what}.`;
  show("heat", heat(buckets));
  show("bucket");
  place("opened").textContent = "";
  curves(buckets);
  const first = place("heat").querySelector("button");
  if (first) stop(first);
}

place("theme").addEventListener("change", (event) => {
  document.documentElement.dataset.theme = event.target.value;
});
place("filters").addEventListener("submit", (event) => event.preventDefault());
place("heat").addEventListener("keydown", moveByArrows);
if (data.buckets.length) {
  chooseLargestKind();
  place("filters").append(...Object.keys(FACETS).map(facet).filter(Boolean));
  legends();
  update();
}
