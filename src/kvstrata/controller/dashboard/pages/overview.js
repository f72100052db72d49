// The cluster at a glance: what is there, how much of it is hit, and what wants attention.

import { get } from "../api.js";
import { chart } from "../chart.js";
import { h } from "../dom.js";
import { ago, bytes, count, date, duration, exact, percent, plural, rate } from "../format.js";
import { facts, failure, instanceLink, noInstances, state, syncText, tile } from "../parts.js";

const WINDOWS = [[60, "1 min"], [300, "5 min"], [900, "15 min"]];
const KEPT_S = 900;
const EVERY_MS = 2_000;
const OVERLAP_S = 20;
// The order in which they lie on each other; the nearest source is at the bottom.
const SOURCES = [["l1", "L1", "tone-l1"], ["l2", "L2", "tone-l2"], ["peer", "Peer", "tone-peer"], ["miss", "Miss", "tone-miss"]];
const TIER_TONES = ["tone-l1", "tone-l2", "tone-peer", "tone-4", "tone-5"];

let windowS = 300;
let history = null; // {step, rows: Map time → {name: value}, names}
let error = null;
let timer = 0;
let run = 0;

function take(document, restart) {
  if (restart || !history) history = { rows: new Map(), names: new Set() };
  document.times_ms.forEach((time, index) => {
    const row = {};
    for (const [name, values] of Object.entries(document.series)) {
      row[name] = values[index];
      history.names.add(name);
    }
    history.rows.set(time, row);
  });
  const newest = document.times_ms.at(-1) ?? 0;
  for (const time of history.rows.keys()) if (time <= newest - KEPT_S * 1000) history.rows.delete(time);
}

async function load(mine, redraw) {
  try {
    const all = !history || error;
    const document = await get(`/v1/series?seconds=${all ? KEPT_S : OVERLAP_S}`);
    if (mine !== run) return;
    take(document, all);
    error = null;
  } catch (failed) {
    if (mine !== run) return;
    error = failed;
  }
  redraw();
  timer = setTimeout(() => load(mine, redraw), EVERY_MS);
}

function columns() {
  const times = [...(history?.rows.keys() ?? [])].sort((one, other) => one - other);
  const newest = times.at(-1) ?? 0;
  const shown = times.filter((time) => time > newest - windowS * 1000);
  return { times: shown, values: (name) => shown.map((time) => history.rows.get(time)[name] ?? null) };
}

const tiersOf = (prefix) => [...(history?.names ?? [])].filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length))
  .sort((one, other) => (other === "l1") - (one === "l1") || one.localeCompare(other));

function hitShare(now) {
  const hits = SOURCES.slice(0, 3).reduce((sum, [name]) => sum + now(`hits.${name}`), 0);
  const asked = hits + now("hits.miss");
  return asked > 0 ? hits / asked : null;
}

function tiles(cluster, data) {
  const recent = (name) => {
    const last = data.values(name).slice(-10).filter((value) => value !== null);
    return last.length ? last.reduce((sum, value) => sum + value, 0) / last.length : 0;
  };
  const { live = 0, syncing = 0, frozen = 0, draining = 0, unconfirmed = 0, dead = 0 } = cluster.instances;
  const not = [[syncing, "syncing"], [frozen, "frozen"], [draining, "draining"], [unconfirmed, "unconfirmed"], [dead, "dead"]]
    .filter(([number]) => number > 0).map(([number, name]) => `${number} ${name}`);
  const l1 = cluster.bytes.l1 ?? { used: 0, capacity: 0 };
  const share = hitShare(recent);
  const all = Object.values(cluster.keys).reduce((sum, value) => sum + value, 0);
  return h("dl", { class: "tiles" },
    tile("Instances", count(live), not.join(", ") || (live ? "all in sync" : "none yet"), dead || unconfirmed ? "warn" : ""),
    tile("Chunks known", count(all), Object.entries(cluster.keys).map(([name, value]) => `${name} ${count(value)}`).join(" · ")),
    tile("L1 in use", bytes(l1.used), l1.capacity ? `${percent(l1.used / l1.capacity)} of ${bytes(l1.capacity)}` : ""),
    tile("Hit rate", percent(share), share === null ? "nobody asked in the last 10 s" : "of chunks, last 10 s"),
    tile("Events", rate(recent("events"), "keys"), `${plural(cluster.events.gaps_total, "gap")}, ${count(cluster.events.rejected_total)} rejected`),
    tile("Lookups", rate(recent("lookups")), `${count(cluster.lookups_total)} in all`));
}

function attention(cluster, instances) {
  const rows = instances.filter((one) => one.state !== "ready" || one.sync || one.events_behind > 0);
  return h("section", { key: "attention" }, h("h2", {}, "Sync state"),
    rows.length === 0 ? h("p", { class: "fine" }, instances.length === 1 ? "The one instance is in sync." : `All ${instances.length} instances are in sync.`)
      : h("ul", { class: "rows" }, rows.map((one) => h("li", { key: one.instance }, instanceLink(one.instance), state(one.state),
        h("div", {}, syncText(one), one.events_behind > 0 && h("small", {}, `${plural(one.events_behind, "batch", "batches")} of events behind`))))));
}

function aboutController(cluster) {
  const { controller, registry, snapshot } = cluster;
  return h("section", { key: "controller" }, h("h2", {}, "Controller"), facts([
    ["Id", h("code", {}, controller.id)],
    ["Version", controller.version],
    ["Runs since", `${date(controller.started_ms)} (${duration(controller.uptime_s * 1000)})`],
    ["Process", exact(controller.pid).replaceAll(",", "")],
    ["Directory", `${count(registry.placements)} placements in ${bytes(registry.bytes)}`],
    ["Slots", `${exact(registry.slots_used)} used, ${exact(registry.slots_free)} free, ${exact(registry.slots_sweeping)} being swept`],
    ["Snapshot", snapshot?.path ? h("span", {}, `${snapshot.state ?? ""}${snapshot.last_ms ? ` ${ago(snapshot.last_ms)}` : ""} `, h("code", {}, snapshot.path)) : "none"],
  ]));
}

function charts(data) {
  const windowMs = windowS * 1000;
  const { times } = data;
  const sources = SOURCES.map(([name, title, tone]) => ({ name: title, tone, values: data.values(`hits.${name}`) }));
  const shares = sources.map(({ name, tone, values }) => ({ name, tone, values: values.map((value, index) => {
    const sum = sources.reduce((all, each) => all + (each.values[index] ?? 0), 0);
    return sum > 0 ? (value ?? 0) / sum : 0;
  }) }));
  const tiers = (prefix) => tiersOf(prefix).map((tier, index) => ({ name: tier, tone: TIER_TONES[index % TIER_TONES.length], values: data.values(prefix + tier) }));
  const one = (name, title, tone) => [{ name: title, tone, values: data.values(name) }];
  return h("div", { class: "charts" },
    chart({ id: "share", title: "Hit rate by source", note: "share of the chunks that were looked up", times, series: shares, format: percent, stacked: true, max: 1, windowMs }),
    chart({ id: "found", title: "Chunks looked up, by source", note: "chunks per second", times, series: sources, format: (value) => rate(value), stacked: true, windowMs }),
    chart({ id: "bytes", title: "Bytes by tier", times, series: tiers("bytes."), format: bytes, binary: true, windowMs }),
    chart({ id: "keys", title: "Chunks by tier", times, series: tiers("keys."), format: count, windowMs }),
    chart({ id: "events", title: "Events", note: "keys admitted and evicted per second", times, series: one("events", "Keys", "tone-l1"), format: (value) => rate(value), windowMs }),
    chart({ id: "lookups", title: "Lookups at the directory", note: "questions per second", times, series: one("lookups", "Lookups", "tone-4"), format: (value) => rate(value), windowMs }));
}

export const overviewPage = {
  title: () => "Overview",
  enter({ redraw }) {
    run += 1;
    history = null;
    load(run, redraw);
  },
  leave() {
    run += 1;
    clearTimeout(timer);
  },
  view({ live, redraw }) {
    const { cluster, instances } = live;
    if (!cluster || !instances) return [h("h1", {}, "Overview"), h("p", { class: "quiet" }, "Asking the controller …")];
    if (instances.length === 0) return [h("h1", {}, "Overview"), noInstances(cluster), aboutController(cluster)];
    const data = columns();
    return [
      h("div", { class: "heading" }, h("h1", {}, "Overview"),
        h("fieldset", { class: "choice" }, h("legend", { class: "unseen" }, "Time shown"), WINDOWS.map(([seconds, name]) => h("button", {
          key: seconds, "aria-pressed": String(seconds === windowS), onclick: () => { windowS = seconds; redraw(); },
        }, name)))),
      tiles(cluster, data),
      error && error.status !== 0 && failure(error, "The charts have no new numbers."),
      h("h2", { class: "unseen" }, "Over time"),
      charts(data),
      h("div", { class: "columns" }, attention(cluster, instances), aboutController(cluster)),
    ];
  },
};
