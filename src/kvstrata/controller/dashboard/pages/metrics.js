// /metrics as one table, which can be searched by name and help. Histograms are shown as count, mean and quantiles.

import { open } from "../api.js";
import { h } from "../dom.js";
import { bytes, duration, exact } from "../format.js";
import { failure, poller } from "../parts.js";
import { table } from "../table.js";

const EVERY_MS = 5_000;
const QUANTILES = [0.5, 0.99];
let asked = null;

const unescape = (text) => text.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));

/** Families of the Prometheus text format: [{name, type, help, samples: [{name, labels, value}]}]. */
export function parse(text) {
  const families = new Map();
  const family = (name) => {
    if (!families.has(name)) families.set(name, { name, type: "untyped", help: "", samples: [] });
    return families.get(name);
  };
  let current = null;
  for (const row of text.split("\n")) {
    const about = /^# (HELP|TYPE) (\S+) ?(.*)$/.exec(row);
    if (about) {
      current = family(about[2]);
      current[about[1].toLowerCase()] = unescape(about[3]);
      continue;
    }
    const sample = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(row);
    if (!sample) continue;
    const labels = [...(sample[2] ?? "").matchAll(/([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g)].map(([, name, value]) => [name, unescape(value)]);
    const value = { "+Inf": Infinity, "-Inf": -Infinity, NaN }[sample[3]] ?? Number(sample[3]);
    const owner = current && sample[1].startsWith(current.name) ? current : family(sample[1]);
    owner.samples.push({ name: sample[1], labels, value });
  }
  return [...families.values()];
}

/** The value below which a share of the observations of cumulative `buckets` lies, by interpolation. */
function quantile(buckets, share) {
  const total = buckets.at(-1)?.count ?? 0;
  if (!total) return null;
  let low = 0;
  let before = 0;
  for (const { edge, count } of buckets) {
    if (count >= share * total) return edge === Infinity ? low : low + ((edge - low) * (share * total - before)) / Math.max(1, count - before);
    low = edge;
    before = count;
  }
  return low;
}

const unitOf = (name) => (/_bytes(_total)?$/.test(name) ? bytes : /_seconds(_total)?$/.test(name) ? (value) => duration(value * 1000) : exact);

function rowsOf(family) {
  if (family.type !== "histogram") {
    return family.samples.filter((sample) => !sample.name.endsWith("_created")).map((sample) => {
      const at = sample.name.includes("timestamp") || sample.name.includes("start_time");
      return {
        name: sample.name, labels: sample.labels, sort: sample.value, type: family.type, help: family.help, exact: String(sample.value),
        text: () => (at ? new Date(sample.value * 1000).toISOString().slice(0, 19).replace("T", " ") : unitOf(sample.name)(sample.value)),
      };
    });
  }
  const groups = new Map();
  for (const sample of family.samples) {
    const labels = sample.labels.filter(([name]) => name !== "le");
    const id = JSON.stringify(labels);
    if (!groups.has(id)) groups.set(id, { labels, buckets: [], sum: 0, count: 0 });
    const group = groups.get(id);
    if (sample.name.endsWith("_bucket")) {
      const edge = sample.labels.find(([name]) => name === "le")?.[1];
      group.buckets.push({ edge: edge === "+Inf" ? Infinity : Number(edge), count: sample.value });
    } else if (sample.name.endsWith("_sum")) group.sum = sample.value;
    else if (sample.name.endsWith("_count")) group.count = sample.value;
  }
  const unit = unitOf(family.name);
  return [...groups.values()].map(({ labels, buckets, sum, count }) => ({
    name: family.name, labels, sort: count, type: family.type, help: family.help, exact: `${count} observations, sum ${sum}`,
    text: () => (count ? [`${exact(count)}×`, `mean ${unit(sum / count)}`, ...QUANTILES.map((share) => `p${share * 100} ≈ ${unit(quantile(buckets, share))}`)].join(" · ") : "none yet"),
  }));
}

const labelsOf = (row) => row.labels.map(([name, value]) => `${name}=${value}`).join(" ");

function rows(text) {
  const found = parse(text).flatMap(rowsOf);
  for (const row of found) row.key = row.labels.length ? `${row.name} ${labelsOf(row)}` : row.name;
  return found;
}

export const metricsPage = {
  title: () => "Metrics",
  enter({ redraw }) {
    asked = poller("/metrics", EVERY_MS, redraw, async (path) => rows(await (await open("GET", path)).text()));
  },
  leave() {
    asked.stop();
  },
  view({ redraw }) {
    const heading = h("h1", {}, "Metrics");
    if (!asked.document) return [heading, asked.error && asked.error.status !== 0 ? failure(asked.error, "The metrics cannot be shown.") : h("p", { class: "quiet" }, "Asking the controller …")];
    return [
      heading,
      table({
        id: "metrics", caption: "Metrics of the controller", rows: asked.document, key: (row) => row.key, text: (row) => `${row.key} ${row.help}`,
        prefix: "", filter: true, hint: "words of name, label or help", redraw, columns: [
          { name: "name", title: "Metric", sort: (row) => row.key, shows: () => [], cell: (row) => [h("code", { class: "break" }, row.name), h("small", {}, row.help)], wide: true },
          { name: "labels", title: "Labels", sort: labelsOf, shows: () => [], cell: (row) => row.labels.map(([name, value]) => h("span", { class: "label-pair" }, `${name}=`, h("b", {}, value))) },
          { name: "type", title: "Kind", sort: (row) => row.type, shows: () => [], cell: (row) => row.type },
          { name: "value", title: "Value", number: true, sort: (row) => row.sort, shows: (row) => [row.exact], cell: (row) => h("span", { title: row.exact }, row.text()) },
        ] }),
    ];
  },
};
