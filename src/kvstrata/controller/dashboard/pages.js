// The pages: what needs attention and the cluster as a whole, all instances, one instance, and the events.

import { h } from "./dom.js";
import { bytes, clock, count, date, duration, exact, factsText, named, percent, seconds, words } from "./format.js";
import {
  actions, allowAction, facts, failure, follower, followText, hitShare, instanceLink, instancePath, leaderLink, noInstances, section, state, stateOf, sum,
  table, tile, usage,
} from "./parts.js";

const MAX_EVENTS = 500;
const MAX_ROWS = 200;
const SILENT_S = 6; // a gateway tells something every 2 s
const filters = { instances: "", events: "" };

export const missingPage = {
  title: () => "No such page",
  view: ({ path }) => [h("p", {}, "There is nothing at ", h("code", {}, path), ".")],
};

/** A field whose words choose the rows that are shown. */
function filter(name, hint, draw) {
  return h("div", { class: "filter", key: "filter" }, h("label", { for: `filter-${name}` }, "Filter"),
    h("input", { id: `filter-${name}`, type: "search", autocomplete: "off", placeholder: hint, value: filters[name], oninput: (event) => { filters[name] = event.target.value; draw(); } }));
}

/** The first MAX_ROWS rows whose text has all words of the filter: drawing many more costs a share of the browser's core. */
function chosen(name, rows, text) {
  const all = filters[name].toLowerCase().split(/\s+/).filter(Boolean);
  return rows.filter((row) => all.every((word) => text(row).toLowerCase().includes(word))).slice(0, MAX_ROWS);
}

const left = (rows, all) => rows.length === MAX_ROWS && all.length > MAX_ROWS
  && h("p", { class: "quiet", key: "left" }, `Showing the first ${MAX_ROWS} of ${exact(all.length)}; use the filter to find the others.`);

// --- the overview ---

function attention(cluster, instances) {
  const tiers = (one) => Object.entries(one.tier_states).map(([tier, word]) => `${tier} is ${word}`);
  const rows = instances.filter((one) => stateOf(one) !== "ready" || one.following.state !== "exact" || tiers(one).length);
  const refused = cluster.directory.refused_keys_total;
  return section("Needs attention",
    !cluster.ready && h("p", { class: "wrong" }, `The controller is not ready: ${cluster.why_not_ready}`),
    !cluster.election.leader && h("p", { class: "wrong" }, "There is no leader."),
    refused > 0 && h("p", { class: "wrong" }, `The directory is full: ${count(refused)} chunks were refused.`),
    rows.length === 0 ? h("p", { class: "fine" }, instances.length === 1 ? "The instance is up to date." : `All ${instances.length} instances are up to date.`) : table("Instances that need attention", [
      ["Instance", (one) => instanceLink(one.id)],
      ["State", (one) => state(stateOf(one))],
      ["Why", (one) => [followText(one), ...tiers(one)].join(", ")],
    ], rows, (one) => one.id));
}

function tiles({ instances, keys, used_bytes: used, capacity_bytes: capacity, hits_total: hits, lookups }) {
  const not = ["draining", "late", "unconfirmed", "restored", "dead"].filter((name) => instances[name] > 0).map((name) => `${instances[name]} ${name}`);
  return h("dl", { class: "tiles" },
    tile("Instances", count(instances.live), not.join(", ") || "all up to date", not.length ? "warn" : ""),
    tile("Chunks", count(sum(keys)), "in all tiers"),
    tile("L1 in use", bytes(used.l1 ?? 0), `of ${bytes(capacity.l1 ?? 0)}`),
    tile("Hit rate", percent(hitShare(hits)), "of chunks, since start"),
    tile("Lookups", count(lookups.total), `${duration(lookups.mean_ms)} each`));
}

function tiers({ keys, used_bytes: used, capacity_bytes: capacity }) {
  return section("Tiers", table("Tiers of the cluster", [
    ["Tier", (tier) => tier],
    ["Chunks", (tier) => exact(keys[tier]), "number"],
    ["Bytes", (tier) => usage(used[tier], capacity[tier])],
  ], Object.keys(keys), (tier) => tier));
}

function gateways(rows) {
  return section("Gateways", rows.length ? table("Gateways of this controller", [
    ["Gateway", (one) => h("code", { class: "break" }, one.name)],
    ["Address", (one) => h("code", {}, one.port ? `${one.host.includes(":") ? `[${one.host}]` : one.host}:${one.port}` : one.host)],
    ["Policy", (one) => one.policy],
    ["Engines up", (one) => `${exact(one.engines_up)} of ${exact(one.engines)}`, "number"],
    ["Requests in flight", (one) => exact(one.in_flight), "number"],
    ["Requests finished", (one) => exact(one.requests_total), "number"],
    ["Last heard", (one) => (one.heard_ago_s > SILENT_S ? `silent for ${duration(one.heard_ago_s * 1000)}` : "now")],
    ["Version", (one) => one.version],
  ], rows, (one) => one.name) : h("p", { class: "quiet" }, "No gateway is connected. Add this controller to a gateway's controllers.urls."));
}

function aboutController(cluster) {
  const { directory, snapshot, election } = cluster;
  const several = election.members.length > 1;
  const written = snapshot.written_unix_ms ? `${bytes(snapshot.written_bytes)} written at ${clock(snapshot.written_unix_ms)}` : "not written yet";
  return section("Controller", facts([
    ["Name", h("code", {}, cluster.name)],
    ["Version", cluster.version],
    ["Running since", `${date(cluster.unix_ms - cluster.up_s * 1000)} (${duration(cluster.up_s * 1000)})`],
    ["Directory", `${count(directory.placements)} placements in ${bytes(directory.bytes)} of at most ${bytes(directory.max_bytes)}`],
    several && ["Leader", election.leads ? "this controller" : election.leader ? leaderLink(election) : "none at the moment"],
    several && ["Controllers", election.members.join(", ")],
    ["Heartbeats", `every ${duration(cluster.heartbeat_s * 1000)}, dead after ${duration(cluster.dead_after_s * 1000)}`],
    ["Snapshot", snapshot.path ? h("span", {}, `${written} `, h("code", {}, snapshot.path)) : "none"],
    snapshot.ignored_reason && ["Ignored snapshot", snapshot.ignored_reason],
  ]));
}

export const overviewPage = {
  title: () => "Overview",
  view({ state: { cluster, instances } }) {
    if (!instances.length) return [noInstances(cluster), aboutController(cluster)];
    return [attention(cluster, instances), tiles(cluster), tiers(cluster), aboutController(cluster), gateways(cluster.gateways)];
  },
};

// --- instances ---

const COLUMNS = [
  ["Instance", (one) => [instanceLink(one.id), h("small", {}, one.host), one.zone && h("small", {}, `zone ${one.zone}`)]],
  ["State", (one) => [state(stateOf(one)), one.following.state !== "exact" && h("small", {}, followText(one))]],
  ["L1", (one) => usage(one.used_bytes.l1, one.capacity_bytes.l1)],
  ["Chunks", (one) => count(sum(one.keys)), "number"],
  ["Hit rate", (one) => percent(hitShare(one.hits_total)), "number"],
  ["Peers", (one) => [`${bytes(one.peer_sent_bytes_total)} sent`, h("small", {}, `${bytes(one.peer_read_bytes_total)} read`)], "number"],
  ["Workers", (one) => count(one.sessions), "number"],
  ["Last answer", (one) => (one.late ? `${seconds(one.heard_ago_s * 1000)} ago` : "on time"), "number"],
  ["Actions", actions],
];

function removedOnes(removed) {
  return removed.length > 0 && section("Removed",
    h("p", { class: "quiet" }, "These instances were removed while live, and cannot rejoin until you allow them."),
    table("Removed instances", [["Instance", (id) => id], ["Actions", allowAction]], removed, (id) => id));
}

export const instancesPage = {
  title: () => "Instances",
  view({ state: { cluster, instances, removed }, draw }) {
    if (!instances.length) return [noInstances(cluster), removedOnes(removed)];
    const rows = chosen("instances", instances, (one) => `${one.id} ${one.host} ${one.zone} ${one.version} ${stateOf(one)}`);
    return [follower(cluster), filter("instances", "name, host, zone or state", draw), left(rows, instances), table("Instances", COLUMNS, rows, (one) => one.id), removedOnes(removed)];
  },
};

// --- one instance ---

function description(one) {
  const { following } = one;
  return h("div", { class: "columns", key: "description" },
    section("Properties", facts([
      ["Host", one.host || "–"], ["Zone", one.zone || "–"], ["Process", String(one.pid)], ["Version", one.version],
      ["Admin HTTP", one.http_url ? h("code", {}, one.http_url) : "–"], ["Control port", h("code", {}, one.control_endpoint)],
      ["Peers", `${one.gives_to_peers ? "may read it" : "cannot read it"}; ${one.peer_engine || "no transfer engine"}`], ["Incarnation", h("code", {}, one.incarnation)],
      ["Member for", duration(one.joined_ago_s * 1000)], ["Chunk", `${exact(one.chunk_tokens)} tokens`],
    ])),
    section("Activity", facts([
      ["Last answer", `${seconds(one.heard_ago_s * 1000)} ago`], ["Directory", followText(one)],
      ["Full lists", `${exact(following.lists)}${following.lists ? `, the last in ${duration(following.last_took_s * 1000)}` : ""}`], ["Changes", exact(following.changes)],
      ["Workers", exact(one.sessions)], ["Engines", one.engines.length ? h("code", { class: "break" }, one.engines.join(" ")) : "no URL reported"],
      ["Being sent to peers", bytes(one.peer_sending_bytes)], ["Sent to peers", bytes(one.peer_sent_bytes_total)], ["Read from peers", bytes(one.peer_read_bytes_total)],
    ])));
}

function numbers(one) {
  const hits = Object.entries(one.hits_total);
  return [
    section("Tiers", table(`Tiers of ${one.id}`, [
      ["Tier", (tier) => tier], ["Chunks", (tier) => exact(one.keys[tier] ?? 0), "number"], ["Bytes", (tier) => usage(one.used_bytes[tier], one.capacity_bytes[tier])],
    ], one.tiers, (tier) => tier)),
    section("Chunks looked up since its start", table(`Chunks looked up on ${one.id}`, [
      ["Found in", ([name]) => (name === "miss" ? "nowhere (miss)" : name)], ["Chunks", ([, value]) => exact(value), "number"],
    ], hits, ([name]) => name)),
  ];
}

function forecasts({ pool, tenants }) {
  const parts = Object.keys(pool.forecast_seconds ?? {}).map(Number).sort((one, other) => one - other);
  return [
    parts.length > 0 && section("Savings with other sizes of L1", table("L1s of other sizes", [
      ["L1", (part) => `${bytes(part * pool.extents_bytes)} (${part} ×)`],
      ["Chunks found", (part) => percent(pool.forecast_hits[part]), "number"],
      ["Prefill seconds saved", (part) => percent(pool.forecast_seconds[part]), "number"],
    ], parts, String)),
    tenants.length > 1 && section("Savings with other shares of L1", table("Tenants' shares of L1", [
      ["Tenant", (row) => row.tenant || "(unnamed)"], ["L1", (row) => bytes(row.bytes), "number"], ["Share of prefill", (row) => percent(row.part), "number"],
      ...["0.5", "1", "2", "4"].map((part) => [`Saved by ${part} × its L1`, (row) => percent(row.seconds?.[part]), "number"]),
    ], tenants, (row) => row.tenant)),
  ];
}

function workers({ peers }) {
  return section("Workers", peers.length ? table("Workers", [
    ["Session", (worker) => h("code", { title: worker.session }, worker.session.slice(0, 12))],
    ["Role", (worker) => worker.role],
    ["Model", (worker) => h("span", { class: "break" }, worker.model)],
    ["Engine", (worker) => h("code", { title: worker.group }, String(worker.group ?? "").slice(0, 12))],
    ["Process", (worker) => String(worker.pid), "number"],
    ["Attached", (worker) => (worker.detached ? "detached, still alive" : "yes")],
  ], peers, (worker) => worker.session) : h("p", { class: "quiet" }, "No worker is attached. Engines attach when they start with the connector LMCacheConnectorV1."));
}

function runtime({ python_threads: threads, ...rest }) {
  return [
    section("Process", facts(Object.entries(rest).map(([name, value]) => [words(name), Array.isArray(value) ? value.join(" · ") : named(name, value)]))),
    section("Python threads", h("p", { class: "names" }, threads.join(", "))),
  ];
}

/** The instance's own answer, or why there is none. */
function answered(answer, view) {
  if (!answer) return null;
  if (answer.error || !answer.document.ok) return failure(answer.error ?? answer.document, "The instance's status is not available.");
  return view(answer.document.document);
}

export const instancePage = {
  title: (id) => id,
  documents: (id) => ({ status: `${instancePath(id)}/status` }),
  view({ state: { cluster, instances }, documents, id }) {
    const one = instances.find((each) => each.id === id);
    if (!one) return [h("p", {}, "No instance has this id. It may have left or been removed; ", h("a", { href: "#/events" }, "the events"), " may show when.")];
    return [
      h("div", { class: "heading", key: "heading" }, state(stateOf(one)), actions(one)),
      follower(cluster), description(one), numbers(one),
      one.state === "live" && answered(documents.status, (told) => [forecasts(told), workers(told), runtime(told.runtime)]),
    ];
  },
};

// --- events ---

const TONES = {
  joined: "good", came_back: "good", listed: "good", died: "bad", directory_full: "bad", snapshot_failed: "bad", move_incomplete: "bad",
  superseded: "warn", list_again: "warn", clock: "warn", snapshot_ignored: "warn", state: "busy",
};

export const eventsPage = {
  title: () => "Events",
  documents: () => ({ events: `/v1/events?limit=${MAX_EVENTS}` }),
  view({ documents: { events: answer }, draw }) {
    if (!answer?.document) return [answer?.error && failure(answer.error, "The events could not be loaded.")];
    const rows = chosen("events", answer.document.events.toReversed(), (event) => `${event.kind} ${event.instance} ${factsText(event.facts)}`);
    return [filter("events", "kind, instance or text", draw), left(rows, answer.document.events), table("Events, newest first", [
      ["Time", (event) => h("time", { title: date(event.unix_ms) }, clock(event.unix_ms))],
      ["Event", (event) => h("span", { class: `state ${TONES[event.kind] ?? "calm"}` }, h("i", { "aria-hidden": "true" }), event.kind.replaceAll("_", " "))],
      ["Instance", (event) => event.instance && instanceLink(event.instance)],
      ["Facts", (event) => factsText(event.facts)],
    ], rows, (event) => String(event.number))];
  },
};
