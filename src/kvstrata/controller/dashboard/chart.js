// Charts over time, drawn as SVG: lines with their names at their ends, or stacked areas.
//
// The cursor follows the pointer and the arrow keys; the legend shows the numbers at the cursor, else the newest. For a
// screen reader the chart is a slider over time whose value is the readout, and a table below has the same numbers.

import { h, lazy } from "./dom.js";
import { clock } from "./format.js";

const LEFT = 56;
const TOP = 8;
const BOTTOM = 20;
const LABEL_GAP = 13;
const TIP_WIDTH = 168;
const TABLE_ROWS = 12;

const widths = new Map();
const cursors = new Map(); // id → time under the cursor
let redraw = () => {};

export function onRedraw(callback) {
  redraw = callback;
}

/** After a change of the page: draws charts again whose width has changed. */
export function measure() {
  let stale = false;
  for (const plot of document.querySelectorAll("[data-plot]")) {
    const width = Math.floor(plot.clientWidth);
    if (width > 0 && widths.get(plot.dataset.plot) !== width) {
      widths.set(plot.dataset.plot, width);
      stale = true;
    }
  }
  if (stale) redraw();
}

/** Round values from 0 to at least `max`. */
export function ticks(max, binary) {
  if (!(max > 0)) return [0, 1];
  const base = binary ? 1024 : 10;
  const steps = binary ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] : [1, 2, 2.5, 5, 10];
  const rough = max / 4;
  const unit = base ** Math.floor(Math.log(rough) / Math.log(base));
  const step = unit * steps.find((each) => each * unit >= rough * 0.999);
  return Array.from({ length: Math.ceil(max / step - 1e-9) + 1 }, (_, index) => index * step);
}

const short = (text) => text.replace(/\.(\d*?)0+(?=\D|$)/, (_, digits) => (digits ? `.${digits}` : ""));

function timeTicks(from, to, width) {
  const steps = [5, 10, 15, 30, 60, 120, 180, 300, 600].map((s) => s * 1000);
  const step = steps.find((each) => ((to - from) / each) * 64 <= width) ?? steps.at(-1);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

function nearest(times, at) {
  let low = 0;
  let high = times.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - times[low - 1] < times[low] - at ? low - 1 : low;
}

function linePath(times, values, x, y) {
  let path = "";
  let pen = "M";
  values.forEach((value, index) => {
    if (value === null || value === undefined) {
      pen = "M";
      return;
    }
    path += `${pen}${x(times[index]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

/** Areas between two edges, one for each run of times with values, up to halfway to the run's neighbours. */
function areaPath(times, values, below, above, x, y) {
  let path = "";
  let run = [];
  const half = (index, to) => (x(times[index]) + x(times[to] ?? times[index])) / 2;
  for (let index = 0; index <= values.length; index += 1) {
    if (index < values.length && values[index] !== null && values[index] !== undefined) run.push(index);
    else if (run.length) {
      const [first, last] = [run[0], run.at(-1)];
      const edge = (of) => [[half(first, first - 1), of[first]], ...run.map((each) => [x(times[each]), of[each]]), [half(last, last + 1), of[last]]];
      path += `M${[...edge(above), ...edge(below).reverse()].map(([at, value]) => `${at.toFixed(1)} ${y(value).toFixed(1)}`).join("L")}Z`;
      run = [];
    }
  }
  return path;
}

/** Pushes overlapping labels apart; `places` are sorted by y. */
function spread(places, low, high) {
  for (let index = 1; index < places.length; index += 1) {
    places[index].at = Math.max(places[index].at, places[index - 1].at + LABEL_GAP);
  }
  const over = places.length ? places.at(-1).at - high : 0;
  if (over > 0) {
    places.at(-1).at = high;
    for (let index = places.length - 2; index >= 0; index -= 1) {
      places[index].at = Math.min(places[index].at, places[index + 1].at - LABEL_GAP);
    }
  }
  for (const place of places) place.at = Math.max(low, place.at);
}

/** A chart as `drawn` makes it, drawn again when its series, its width or its cursor has changed. */
export function chart(wanted) {
  const { id, series, windowMs } = wanted;
  return lazy("figure", id, [series, windowMs, widths.get(id), cursors.get(id)], () => drawn(wanted));
}

/**
 * One chart. `times`: unix ms, ascending; `series`: [{name, tone, values}] with one value (or null) for each time, `tone`
 * a colour class; `stacked`: the series are parts of a whole; `format` makes text of a value; `max`: the axis reaches at
 * least this value.
 */
function drawn({ id, title, note, times, series, format, stacked = false, binary = false, max = 0, height = 168, windowMs }) {
  const heading = `${id}-title`;
  if (times.length < 2) {
    return h("figure", { class: "chart", key: id, "aria-labelledby": heading }, h("figcaption", {}, h("h3", { id: heading }, title)),
      h("p", { class: "quiet" }, "The first numbers appear in a few seconds."));
  }
  const width = widths.get(id) ?? 560;
  const longest = Math.max(...series.map(({ name }) => name.length));
  const direct = !stacked && width >= 420 && series.length > 1;
  const right = direct ? 18 + longest * 7.4 : 10;
  const to = times.at(-1);
  const from = Math.max(times[0], to - windowMs);
  const sums = times.map(() => 0);
  const layers = series.map(({ values }) => {
    if (!stacked) return null;
    const below = [...sums];
    values.forEach((value, index) => { sums[index] += value ?? 0; });
    return { below, above: [...sums] };
  });
  const highest = stacked ? Math.max(...sums) : Math.max(...series.flatMap(({ values }) => values.map((value) => value ?? 0)));
  const marks = ticks(Math.max(highest, max), binary);
  const top = marks.at(-1);
  const x = (at) => LEFT + ((at - from) / Math.max(1, to - from)) * (width - LEFT - right);
  const y = (value) => TOP + (1 - value / top) * (height - TOP - BOTTOM);

  const at = cursors.get(id);
  const index = at === undefined ? times.length - 1 : nearest(times, at);
  const shown = (each) => (each.values[index] === null || each.values[index] === undefined ? "–" : format(each.values[index]));
  const readout = `${clock(times[index])}: ${series.map((each) => `${each.name} ${shown(each)}`).join(", ")}`;
  const move = (target) => {
    if (target === null) cursors.delete(id);
    else cursors.set(id, times[Math.max(0, Math.min(times.length - 1, target))]);
    redraw();
  };
  const keys = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -times.length, End: times.length };

  const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, height, width: "100%", "aria-hidden": "true", focusable: "false" });
  for (const mark of marks) {
    svg.append(h("line", { class: mark ? "grid" : "axis", x1: LEFT, x2: width - right, y1: y(mark), y2: y(mark) }),
      h("text", { class: "tick", x: LEFT - 6, y: y(mark) + 4, "text-anchor": "end" }, short(format(mark))));
  }
  for (const mark of timeTicks(from, to, width - LEFT - right)) {
    const near = x(mark) > width - right - 24;
    svg.append(h("line", { class: "axis", x1: x(mark), x2: x(mark), y1: height - BOTTOM, y2: height - BOTTOM + 4 }),
      h("text", { class: "tick", x: near ? width - right : x(mark), y: height - 4, "text-anchor": near ? "end" : "middle" },
        clock(mark).slice(0, (to - from) > 240_000 ? 5 : 8)));
  }
  series.forEach((each, place) => {
    if (stacked) {
      svg.append(h("path", { class: `area ${each.tone}`, d: areaPath(times, each.values, layers[place].below, layers[place].above, x, y) }));
    } else {
      svg.append(h("path", { class: `line ${each.tone}`, d: linePath(times, each.values, x, y) }));
    }
  });
  if (direct) {
    const places = series.map((each) => ({ each, at: y(each.values.at(-1) ?? 0) + 4 })).sort((one, other) => one.at - other.at);
    spread(places, TOP + 4, height - BOTTOM + 2);
    for (const { each, at: place } of places) {
      svg.append(h("text", { class: `label ${each.tone}`, x: width - right + 6, y: place }, each.name));
    }
  }
  if (at !== undefined) {
    const left = x(times[index]);
    svg.append(h("line", { class: "cursor", x1: left, x2: left, y1: TOP, y2: height - BOTTOM }));
    series.forEach((each, place) => {
      const value = stacked && each.values[index] !== null ? layers[place].above[index] : each.values[index];
      if (value !== null && value !== undefined) svg.append(h("circle", { class: `dot ${each.tone}`, cx: left, cy: y(value), r: 3 }));
    });
    const tipHeight = 24 + series.length * 15;
    const tip = left + TIP_WIDTH + 12 > width ? left - TIP_WIDTH - 10 : left + 10;
    const group = h("g", { transform: `translate(${Math.max(2, tip)} ${TOP})` },
      h("rect", { class: "tip", width: TIP_WIDTH, height: tipHeight, rx: 4 }),
      h("text", { class: "tip-title", x: 8, y: 16 }, clock(times[index])));
    [...series].reverse().forEach((each, row) => {
      const line = 31 + row * 15;
      group.append(h("rect", { class: `swatch ${each.tone}`, x: 8, y: line - 8, width: 8, height: 8, rx: 1 }),
        h("text", { class: "tip-text", x: 22, y: line }, each.name),
        h("text", { class: "tip-text", x: TIP_WIDTH - 8, y: line, "text-anchor": "end" }, shown(each)));
    });
    svg.append(group);
  }

  const legend = h("ul", { class: "legend" }, [...series].reverse().map((each) => h("li", { key: each.name },
    h("svg", { class: "key", viewBox: "0 0 12 12", "aria-hidden": "true" }, h("rect", { class: `swatch ${each.tone}`, width: 12, height: 12, rx: 2 })),
    each.name, " ", h("b", {}, shown(each)))));
  return h("figure", { class: "chart", key: id, "aria-labelledby": heading },
    h("figcaption", {}, h("h3", { id: heading }, title), note && h("p", { class: "quiet" }, note)),
    legend,
    h("div", {
      class: "plot", "data-plot": id, role: "slider", tabindex: "0", "aria-labelledby": heading,
      "aria-valuemin": 0, "aria-valuemax": times.length - 1, "aria-valuenow": index, "aria-valuetext": readout,
      onkeydown: (event) => {
        if (event.key === "Escape") move(null);
        else if (event.key in keys) move(index + keys[event.key]);
        else return;
        event.preventDefault();
      },
      onpointermove: (event) => {
        const box = event.currentTarget.getBoundingClientRect();
        const share = (event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT - right);
        move(nearest(times, from + share * (to - from)));
      },
      onpointerleave: () => move(null),
      onblur: () => move(null),
    }, svg),
    numbers(title, times, series, format));
}

function numbers(title, times, series, format) {
  const every = Math.max(1, Math.ceil(times.length / TABLE_ROWS));
  const rows = [];
  for (let index = times.length - 1; index >= 0; index -= every) rows.push(index);
  return h("details", { class: "numbers", "aria-label": `Numbers of: ${title}` }, h("summary", {}, "Numbers", h("span", { class: "unseen" }, ` of: ${title}`)),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Time"), series.map((each) => h("th", { scope: "col", class: "number" }, each.name)))),
      h("tbody", {}, rows.map((index) => h("tr", {}, h("td", {}, clock(times[index])),
        series.map((each) => h("td", { class: "number" }, each.values[index] === null || each.values[index] === undefined ? "–" : format(each.values[index])))))))));
}
