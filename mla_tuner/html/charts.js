"use strict";

// Elements and curves. Text goes in as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// --- numbers: the same texts as on the command line ---------------------------------------------

const digits = (value) => value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);

function microseconds(value) {
  if (value === null) return "-";
  for (const [limit, factor, unit] of [
    [1, 1e3, "ns"],
    [1e3, 1, "us"],
    [1e6, 1e-3, "ms"],
  ]) {
    if (value < limit * 0.9995) return `${digits(value * factor)} ${unit}`;
  }
  return `${digits(value * 1e-6)} s`;
}

// `18.2 to 18.5 us`: the unit once where both have it.
function span(low, high) {
  if (low === null || high === null) return "-";
  const [from, to] = [microseconds(low), microseconds(high)];
  return `${from.split(" ")[1] === to.split(" ")[1] ? from.split(" ")[0] : from} to ${to}`;
}

const speedup = (value) => (value === null ? "-" : `${digits(value)}x`);

function interval(value, low, high) {
  return low === null || high === null
    ? speedup(value)
    : `${speedup(value)} [${digits(low)}, ${digits(high)}]`;
}

function percent(value) {
  if (value === null) return "-";
  const places = Math.abs(value) < 0.0995 ? 1 : 0;
  const text = (value * 100).toLocaleString("en", {
    minimumFractionDigits: places,
    maximumFractionDigits: places,
  });
  return `${text} %`;
}

// --- tables --------------------------------------------------------------------------------------

const LONG = 40; // characters of a cell that may wrap

// rows: [class, cells]; the first `words` columns hold words, the others numbers.
function table(title, columns, rows, words) {
  const kind = (at, cell = "") =>
    at >= words ? { class: "number" } : cell.length > LONG ? { class: "long" } : {};
  const head = columns.map((name, at) => el("th", { scope: "col", ...kind(at) }, name));
  const body = rows.map(([name, cells]) =>
    el(
      "tr",
      name ? { class: name } : {},
      ...cells.map((cell, at) =>
        at === 0 ? el("th", { scope: "row" }, cell) : el("td", kind(at, cell), cell),
      ),
    ),
  );
  return el(
    "table",
    {},
    el("caption", {}, title),
    el("thead", {}, el("tr", {}, ...head)),
    el("tbody", {}, ...body),
  );
}

// --- curves --------------------------------------------------------------------------------------

const WIDE = 340,
  HIGH = 230,
  LEFT = 50,
  RIGHT = 10,
  TOP = 8,
  BOTTOM = 26; // of a panel, in pixels

// The marks differ in shape, too: colour alone tells some people nothing.
const OUTLINES = [
  "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0",
  "M0 -4.6L4.6 0L0 4.6L-4.6 0Z",
  "M0 4.4L4.4 -3.4L-4.4 -3.4Z",
  "M-3.4 -3.4H3.4V3.4H-3.4Z",
  "M0 -4.6L4.4 3.4L-4.4 3.4Z",
];

function mark(series, x = 0, y = 0) {
  const outline = OUTLINES[series % OUTLINES.length];
  return draw("path", { class: "mark", d: outline, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
}

const seriesClass = (series) => `series-${series % OUTLINES.length}`;

// names: [series, text]
function legend(names) {
  return names.map(([series, text]) =>
    el(
      "li",
      { class: seriesClass(series) },
      draw("svg", { viewBox: "-8 -8 16 16", "aria-hidden": "true" }, mark(series)),
      text,
    ),
  );
}

// A logarithmic scale from one range to another.
function scale([low, high], from, to) {
  const width = Math.log(high / low) || 1;
  return (value) => from + (Math.log(value / low) / width) * (to - from);
}

// Whole decades, or 1, 2 and 5 of each where those are few.
function ticks([low, high]) {
  const steps = high / low > 100 ? [1] : [1, 2, 5];
  const found = [];
  for (let decade = Math.floor(Math.log10(low)); decade <= Math.ceil(Math.log10(high)); decade++) {
    found.push(...steps.map((step) => step * 10 ** decade));
  }
  return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

// Room around all times, the ends of their whiskers included.
function rangeOf(points) {
  const times = points.flatMap(({ y, low, high }) => [y, low, high]).filter((time) => time > 0);
  return [Math.min(...times) / 1.15, Math.max(...times) * 1.15];
}

// Times over x, both logarithmic. lines: [series, points] with points {x, y, low, high, note};
// labels: [x, text]; range: of y, in microseconds.
function plot(title, told, lines, labels, range) {
  const x = scale([labels[0][0], labels.at(-1)[0]], LEFT + 12, WIDE - RIGHT - 12);
  const y = scale(range, HIGH - BOTTOM, TOP);
  const level = (kind, at) => draw("line", { class: kind, x1: LEFT, x2: WIDE - RIGHT, y1: at, y2: at });
  const text = (at, down, anchor, content) =>
    draw("text", { x: at, y: down, "text-anchor": anchor }, content);
  const every = Math.ceil(labels.length / 6);
  return el(
    "figure",
    {},
    el("figcaption", {}, title),
    draw(
      "svg",
      { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `${title}: ${told}` },
      ...ticks(range).flatMap((tick) => [
        level("grid", y(tick)),
        text(LEFT - 6, y(tick) + 4, "end", microseconds(tick).replace(/\.0+ /, " ")),
      ]),
      ...labels
        .filter((_, at) => at % every === 0)
        .map(([at, label]) => text(x(at), HIGH - 8, "middle", label)),
      level("axis", HIGH - BOTTOM),
      ...lines.map(([series, points]) => curve(series, points, x, y)),
    ),
  );
}

function curve(series, points, x, y) {
  const places = points.map((point) => `${x(point.x).toFixed(1)},${y(point.y).toFixed(1)}`).join(" ");
  return draw(
    "g",
    { class: seriesClass(series) },
    draw("polyline", { class: "curve", points: places }),
    ...points.map((point) =>
      draw(
        "g",
        {},
        draw("title", {}, point.note),
        ...whisker(x(point.x), point, y),
        mark(series, x(point.x), y(point.y)),
      ),
    ),
  );
}

function whisker(x, { low, high }, y) {
  if (!(low > 0 && high > 0)) return [];
  const ends = [low, high].map((time) => `M${x - 4} ${y(time)}H${x + 4}`).join("");
  return [draw("path", { class: "whisker", d: `${ends}M${x} ${y(low)}V${y(high)}` })];
}
