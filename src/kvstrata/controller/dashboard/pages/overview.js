// The cluster at a glance: instances, tiers, hit rates, and instances that need attention.

import { get } from "../api.js";
import { chart } from "../chart.js";
import { h } from "../dom.js";
import { ago, bytes, count, date, duration, exact, percent, rate } from "../format.js";
import { hitShare, stateOf, sum, tierOrder } from "../model.js";
import { list } from "../rows.js";
import { instanceLink, leaderLink, followText, noInstances, state } from "../instance_parts.js";
import { facts, failure, tile } from "../parts.js";
import { table } from "../table.js";

const WINDOWS = [[300, "5 min"], [900, "15 min"], [3600, "1 hour"]];
const EVERY_MS = 5_000;
// The order in which the areas are stacked; the nearest source is at the bottom.
const SOURCES = [["l1", "L1", "tone-l1"], ["l2", "L2", "tone-l2"], ["peer", "Peer", "tone-peer"], ["miss", "Miss", "tone-miss"]];
const TIER_TONES = ["tone-l1", "tone-l2", "tone-peer", "tone-4", "tone-5"];

let windowS = 900;
let points = []; // of /v1/series, oldest first
let error = null;
let timer = 0;
let run = 0;

async function load(mine, redraw) {
  try {
    const { points: more } = await get(`/v1/series?after_unix_ms=${points.at(-1)?.unix_ms ?? 0}`);
    if (mine !== run) return;
    points = [...points, ...more];
    points = points.filter(({ unix_ms: time }) => time > points.at(-1).unix_ms - WINDOWS.at(-1)[0] * 1000);
    error = null;
  } catch (failed) {
    if (mine !== run) return;
    error = failed;
  }
  redraw();
  timer = setTimeout(() => load(mine, redraw), EVERY_MS);
}

function shownPoints() {
  const newest = points.at(-1)?.unix_ms ?? 0;
  return points.filter(({ unix_ms: time }) => time > newest - windowS * 1000);
}

function tiles(cluster) {
  const { live, dead, restored, draining, late, unconfirmed } = cluster.instances;
  const not = [[draining, "draining"], [late, "late"], [unconfirmed, "unconfirmed"], [restored, "restored"], [dead, "dead"]]
    .filter(([number]) => number > 0).map(([number, name]) => `${number} ${name}`);
  const { l1: used = 0 } = cluster.used_bytes;
  const { l1: capacity = 0 } = cluster.capacity_bytes;
  const newest = points.at(-1);
  const share = newest ? hitShare(newest.hits_per_s) : null;
  return h("dl", { class: "tiles" },
    tile("Instances", count(live), not.join(", ") || (live ? "all in step" : "none yet"), dead || unconfirmed || restored ? "warn" : ""),
    tile("Chunks known", count(sum(cluster.keys)), Object.entries(cluster.keys).map(([name, value]) => `${name} ${count(value)}`).join(" · ")),
    tile("L1 in use", bytes(used), capacity ? `${percent(used / capacity)} of ${bytes(capacity)}` : ""),
    tile("Hit rate", percent(share), share === null ? "no lookups in the last 5 s" : "of chunks, last 5 s"),
    tile("Changes", rate(newest?.event_keys_per_s, "keys"), "of chunks that came and went"),
    tile("Lookups", rate(newest?.lookups_per_s), `${count(cluster.lookups.total)} in all, ${duration(cluster.lookups.mean_ms)} each`));
}

function attention(cluster, instances, redraw) {
  const tiers = (one) => Object.entries(one.tier_states).map(([tier, word]) => `${tier} is ${word}`);
  const rows = instances.filter((one) => stateOf(one) !== "ready" || one.following.state !== "exact" || tiers(one).length);
  const why = (one) => [followText(one), ...tiers(one)].join(", ");
  const refused = cluster.directory.refused_keys_total;
  return h("section", { key: "attention" }, h("h2", {}, "Needs attention"),
    !cluster.ready && h("p", { class: "wrong" }, `The controller is not ready: ${cluster.why_not_ready}`),
    !cluster.election.leader && h("p", { class: "wrong" }, "No controller leads."),
    refused > 0 && h("p", { class: "wrong" }, `The directory is full: ${count(refused)} chunks were refused.`),
    rows.length === 0 ? h("p", { class: "fine" }, instances.length === 1 ? "The one instance is in step." : `All ${instances.length} instances are in step.`)
      : list({ id: "attention", what: "instances", rows, key: (one) => one.id, text: (one) => `${one.id} ${stateOf(one)} ${why(one)}`, attributes: { class: "rows" }, redraw,
        item: (one) => [instanceLink(one.id), state(stateOf(one)), h("div", {}, why(one))] }));
}

const SILENT_S = 6; // a gateway tells something every 2 s

function gateways(rows, redraw) {
  return h("section", { key: "gateways" }, h("h2", {}, "Gateways"), rows.length ? table({
    id: "gateways", caption: "Gateways that ask this controller", rows, key: (one) => one.name, deps: (one) => Object.values(one), redraw, columns: [
      { name: "name", title: "Gateway", sort: (one) => one.name, cell: (one) => h("code", { class: "break" }, one.name) },
      { name: "at", title: "Reached at", sort: (one) => one.host, cell: (one) => h("code", {}, one.port ? `${one.host.includes(":") ? `[${one.host}]` : one.host}:${one.port}` : one.host) },
      { name: "policy", title: "Policy", sort: (one) => one.policy, cell: (one) => one.policy },
      { name: "engines", title: "Engines up", number: true, sort: (one) => one.engines_up, cell: (one) => `${exact(one.engines_up)} of ${exact(one.engines)}` },
      { name: "in_flight", title: "Requests under way", number: true, sort: (one) => one.in_flight, cell: (one) => exact(one.in_flight) },
      { name: "requests", title: "Requests ended", number: true, sort: (one) => one.requests_total, cell: (one) => exact(one.requests_total) },
      { name: "heard", title: "Heard", sort: (one) => one.heard_ago_s, cell: (one) => (one.heard_ago_s > SILENT_S ? `silent for ${duration(one.heard_ago_s * 1000)}` : "now") },
      { name: "version", title: "Version", sort: (one) => one.version, cell: (one) => one.version },
    ] }) : h("p", { class: "quiet" }, "No gateway asks this controller. Name it in a gateway's controllers.urls."));
}

function aboutController(cluster) {
  const { directory, snapshot, election } = cluster;
  return h("section", { key: "controller" }, h("h2", {}, "Controller"), facts([
    ["Name", h("code", {}, cluster.name)],
    ["Version", cluster.version],
    ["Runs since", `${date(cluster.unix_ms - cluster.up_s * 1000)} (${duration(cluster.up_s * 1000)})`],
    !cluster.ready && ["Not ready", cluster.why_not_ready],
    ["Directory", `${count(directory.placements)} placements in ${bytes(directory.bytes)} of at most ${bytes(directory.max_bytes)}`],
    election.members.length > 1 && ["Leads", election.leads ? "this one" : election.leader ? leaderLink(election) : "nobody at the moment"],
    election.members.length > 1 && ["Controllers", election.members.join(", ")],
    ["Slots", `${exact(directory.slots)} used, ${exact(directory.retired_slots)} retired`],
    ["Heartbeats", `every ${duration(cluster.heartbeat_s * 1000)}, dead after ${duration(cluster.dead_after_s * 1000)}`],
    ["Snapshot", snapshot.path ? h("span", {}, snapshot.written_unix_ms ? `${bytes(snapshot.written_bytes)} written ${ago(snapshot.written_unix_ms)} ` : "not written yet ", h("code", {}, snapshot.path)) : "none"],
    snapshot.ignored_reason && ["Ignored snapshot", snapshot.ignored_reason],
  ]));
}

let prepared = {}; // the series of the last shown points

/** The series of the charts; the same object until a new point arrives. */
function series() {
  if (prepared.points === points && prepared.windowS === windowS) return prepared;
  const shown = shownPoints();
  const times = shown.map(({ unix_ms: time }) => time);
  const sources = SOURCES.map(([source, name, tone]) => ({ name, tone, values: shown.map(({ hits_per_s: hits }) => hits[source] ?? 0) }));
  const shares = SOURCES.map(([source, name, tone]) => ({ name, tone, values: shown.map(({ hits_per_s: hits }) => (sum(hits) > 0 ? (hits[source] ?? 0) / sum(hits) : null)) }));
  const tiers = (what) => [...new Set(shown.flatMap((point) => Object.keys(point[what])))].sort((one, other) => tierOrder(one).localeCompare(tierOrder(other)))
    .map((tier, index) => ({ name: tier, tone: TIER_TONES[index % TIER_TONES.length], values: shown.map((point) => point[what][tier] ?? null) }));
  const one = (what, name, tone) => ({ name, tone, values: shown.map((point) => point[what]) });
  prepared = {
    points, windowS, times, sources, shares, bytes: tiers("used_bytes"), keys: tiers("keys"),
    events: [one("event_keys_per_s", "Changes", "tone-l1"), one("listed_keys_per_s", "Lists", "tone-peer")],
    lookups: [one("lookups_per_s", "Lookups", "tone-4")],
  };
  return prepared;
}

function charts() {
  const windowMs = windowS * 1000;
  const { times, sources, shares, bytes: byteTiers, keys: keyTiers, events, lookups } = series();
  return h("div", { class: "charts" },
    chart({ id: "share", title: "Hit rate by source", note: "share of the chunks that were looked up", times, series: shares, format: percent, stacked: true, max: 1, windowMs }),
    chart({ id: "found", title: "Chunks looked up, by source", note: "chunks per second", times, series: sources, format: (value) => rate(value), stacked: true, windowMs }),
    chart({ id: "bytes", title: "Bytes by tier", times, series: byteTiers, format: bytes, binary: true, windowMs }),
    chart({ id: "keys", title: "Chunks by tier", times, series: keyTiers, format: count, windowMs }),
    chart({ id: "events", title: "Events", note: "keys per second that instances reported, as changes and in full reports", times, series: events, format: (value) => rate(value), windowMs }),
    chart({ id: "lookups", title: "Lookups at the directory", note: "questions per second", times, series: lookups, format: (value) => rate(value), windowMs }));
}

export const overviewPage = {
  title: () => "Overview",
  enter({ redraw }) {
    run += 1;
    points = [];
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
    return [
      h("div", { class: "heading" }, h("h1", {}, "Overview"),
        h("fieldset", { class: "choice" }, h("legend", { class: "unseen" }, "Time shown"), WINDOWS.map(([seconds, name]) => h("button", {
          key: seconds, "aria-pressed": String(seconds === windowS), onclick: () => { windowS = seconds; redraw(); },
        }, name)))),
      attention(cluster, instances, redraw),
      tiles(cluster),
      error && error.status !== 0 && failure(error, "The charts have no new numbers."),
      h("h2", { class: "unseen" }, "Over time"),
      charts(),
      aboutController(cluster),
      gateways(cluster.gateways, redraw),
    ];
  },
};
