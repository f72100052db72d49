// One instance: its facts, its tiers, its workers, and its process.

import { get } from "../api.js";
import { documentOf, instancePath } from "../commands.js";
import { h } from "../dom.js";
import { bytes, count, duration, exact, named, percent, seconds, words } from "../format.js";
import { live } from "../live.js";
import { recentHits, stateOf, sum, tierOrder, tiersOf } from "../model.js";
import { actions, command, follower, followText, noInstances, state } from "../instance_parts.js";
import { facts, failure, poller, usage } from "../parts.js";
import { list } from "../rows.js";
import { table } from "../table.js";

const SECTIONS = [["", "Summary"], ["workers", "Workers"], ["runtime", "Runtime"]];
const EVERY_MS = 5_000;

let asked = {}; // section → poller

/** The cluster's models, and L1 and its tenants of the instance's status (null, [] if the instance does not answer). */
async function summarised(path) {
  const [{ models }, status] = await Promise.all([get("/v1/models"), documentOf(path).catch(() => null)]);
  return { models, pool: status?.pool ?? null, tenants: status?.tenants ?? [] };
}

function forecasts(one, { forecast_hits: hits, forecast_seconds: saved, extents_bytes: size }, redraw) {
  return h("section", { key: "forecasts" }, h("h2", {}, "What other sizes of L1 would have saved"), table({
    id: "instance-forecasts", caption: `L1s of other sizes for ${one.id}`, rows: Object.keys(saved).map(Number), key: String, deps: (part) => [saved[part], hits[part], size], redraw, columns: [
      { name: "size", title: "L1", number: true, sort: (part) => part, cell: (part) => `${bytes(part * size)} (${part} ×)` },
      { name: "found", title: "Chunks found", number: true, sort: (part) => hits[part], cell: (part) => percent(hits[part]) },
      { name: "saved", title: "Prefill seconds saved", number: true, sort: (part) => saved[part], cell: (part) => percent(saved[part]) },
    ] }));
}

function shares(one, rows, redraw) {
  const sizes = ["0.5", "1", "2", "4"].map((part) => ({ name: `x${part}`, title: `Saved by ${part} × its L1`, number: true, sort: (row) => row.seconds?.[part] ?? -1, cell: (row) => percent(row.seconds?.[part]) }));
  return h("section", { key: "shares" }, h("h2", {}, "What other shares of L1 would have saved"), table({
    id: "instance-shares", caption: `Tenants' shares of L1 of ${one.id}`, rows, key: (row) => row.tenant, deps: (row) => [row.bytes, row.part, ...Object.values(row.seconds ?? {})], redraw, first: "bytes", down: true, columns: [
      { name: "tenant", title: "Tenant", sort: (row) => row.tenant, cell: (row) => row.tenant || "(unnamed)" },
      { name: "bytes", title: "L1", number: true, sort: (row) => row.bytes, cell: (row) => bytes(row.bytes) },
      { name: "part", title: "Of all prefill", number: true, sort: (row) => row.part ?? -1, cell: (row) => percent(row.part) },
      ...sizes,
    ] }));
}

function start(context) {
  const [id, section = ""] = context.params.parts;
  for (const [name, other] of Object.entries(asked)) {
    if (name !== section) {
      other.stop();
      delete asked[name];
    }
  }
  if (asked[section]) return;
  if (section === "") asked[""] = poller(`${instancePath(id)}/status`, EVERY_MS, context.redraw, summarised);
  if (section === "workers") asked.workers = poller(`${instancePath(id)}/status`, EVERY_MS, context.redraw, documentOf);
  if (section === "runtime") asked.runtime = poller(`${instancePath(id)}/runtime`, EVERY_MS, context.redraw, documentOf);
}

function summary(one, redraw) {
  const models = (asked[""]?.document?.models ?? []).filter(({ instances }) => instances.includes(one.id));
  const { pool = null, tenants = [] } = asked[""]?.document ?? {};
  const tiers = tiersOf(one);
  const hits = Object.entries(one.hits_total);
  const all = hits.reduce((sum, [, value]) => sum + value, 0);
  return [
    h("div", { class: "columns" },
      h("section", { key: "is" }, h("h2", {}, "What it is"), facts([
        ["Host", one.host || "–"], ["Zone", one.zone || "–"], ["Process", String(one.pid ?? "–")], ["Version", one.version],
        ["Admin HTTP", one.http_url ? h("code", {}, one.http_url) : "–"], ["Control port", h("code", {}, one.control_endpoint)], ["Peers", one.gives_to_peers ? "may read it" : "cannot read it"],
        ["Incarnation", h("code", {}, String(one.incarnation))], ["Member for", duration(live.nowMs() - one.joined_unix_ms)],
        ["Chunk", `${exact(one.chunk_tokens)} tokens`],
      ])),
      h("section", { key: "does" }, h("h2", {}, "What it does"), facts([
        ["Answered", `${seconds(live.nowMs() - one.heard_unix_ms)} ago`], ["Followed", followText(one)],
        ["Lists", `${exact(one.following.lists)}${one.following.lists ? `, the last ${duration(live.nowMs() - one.following.last_ended_unix_ms)} ago in ${duration(one.following.last_took_s * 1000)}` : ""}`],
        ["Changes", exact(one.following.changes)],
        ["Commands waiting", exact(one.waiting_commands)], ["Workers", exact(one.sessions)],
        ["Engines", one.engines.length ? h("code", { class: "break" }, one.engines.join(" ")) : "none tells its URL"],
        ["Hit rate, last minute", percent(recentHits(one))],
        ["Being sent to peers", bytes(one.peer_sending_bytes)], ["Sent to peers", bytes(one.peer_sent_bytes_total)], ["Read from peers", bytes(one.peer_read_bytes_total)],
      ]))),
    h("section", { key: "tiers" }, h("h2", {}, "Tiers"), table({
      id: "instance-tiers", caption: `Tiers of ${one.id}`, rows: tiers, key: (tier) => tier.tier, deps: (tier) => Object.values(tier), redraw, columns: [
        { name: "tier", title: "Tier", sort: (tier) => tierOrder(tier.tier), cell: (tier) => tier.tier },
        { name: "keys", title: "Chunks", number: true, sort: (tier) => tier.keys, cell: (tier) => exact(tier.keys) },
        { name: "used", title: "Bytes", wide: true, sort: (tier) => tier.used_bytes, cell: (tier) => usage(tier.used_bytes, tier.capacity_bytes) },
      ] })),
    pool && Object.keys(pool.forecast_seconds ?? {}).length > 0 && forecasts(one, pool, redraw),
    tenants.length > 1 && shares(one, tenants, redraw),
    h("section", { key: "hits" }, h("h2", {}, "Chunks looked up since it started"), hits.length ? table({
      id: "instance-hits", caption: `Chunks looked up on ${one.id}`, rows: hits, key: ([name]) => name, deps: (row) => [...row, all], redraw, first: "count", down: true, columns: [
        { name: "source", title: "Found in", sort: ([name]) => name, cell: ([name]) => (name === "miss" ? "nowhere (miss)" : name) },
        { name: "count", title: "Chunks", number: true, sort: ([, value]) => value, cell: ([, value]) => exact(value) },
        { name: "share", title: "Share", number: true, sort: ([, value]) => value, cell: ([, value]) => percent(all ? value / all : null) },
      ] }) : h("p", { class: "quiet" }, "No lookup has come to it yet.")),
    h("section", { key: "models" }, h("h2", {}, "Models"), models.length ? table({
      id: "instance-models", caption: `Models whose KV ${one.id} serves`, rows: models, key: (model) => String(model.kind), redraw, columns: [
        { name: "model", title: "Model", sort: ({ layout }) => layout.model, cell: ({ layout }) => h("span", { class: "break" }, layout.model) },
        { name: "revision", title: "Revision", sort: ({ layout }) => layout.revision, cell: ({ layout }) => h("span", { class: "break" }, layout.revision || "–") },
        { name: "dtype", title: "KV type", sort: ({ layout }) => layout.kv_dtype, cell: ({ layout }) => layout.kv_dtype },
        { name: "slices", title: "Slices", number: true, sort: (model) => model.slices, cell: (model) => exact(model.slices) },
        { name: "chunk", title: "Tokens a chunk", number: true, sort: ({ layout }) => layout.chunk_tokens, cell: ({ layout }) => exact(layout.chunk_tokens) },
      ] }) : h("p", { class: "quiet" }, "No engine is attached. Engines attach when they start with the connector LMCacheConnectorV1.")),
  ];
}

function answered(answer, what, view) {
  if (!answer || answer.loading) return h("p", { class: "quiet" }, "Asking the instance …");
  return [answer.error && failure(answer.error, what), answer.document && view(answer.document)];
}

function workers(one, redraw) {
  return answered(asked.workers, "The workers cannot be shown.", (document) => (document.peers.length ? table({
    id: "workers", caption: `Workers of ${one.id}`, rows: document.peers, key: (worker) => worker.session, deps: (worker) => [JSON.stringify(worker)], redraw, columns: [
      { name: "session", title: "Session", sort: (worker) => worker.session, cell: (worker) => h("code", { title: worker.session }, worker.session.slice(0, 12)) },
      { name: "role", title: "Role", sort: (worker) => worker.role, cell: (worker) => worker.role },
      { name: "model", title: "Model", sort: (worker) => worker.model, cell: (worker) => h("span", { class: "break" }, worker.model) },
      { name: "group", title: "Engine", sort: (worker) => worker.group, cell: (worker) => h("code", { title: worker.group }, String(worker.group ?? "").slice(0, 12)) },
      { name: "pid", title: "Process", number: true, sort: (worker) => worker.pid, cell: (worker) => String(worker.pid) },
      { name: "attached", title: "Attached", sort: (worker) => Number(worker.detached), cell: (worker) => (worker.detached ? "detached, still alive" : "yes") },
    ] }) : h("p", { class: "quiet" }, "No worker is attached. Engines attach when they start with the connector LMCacheConnectorV1.")));
}

// The fields of the runtime document by section; fields that are not listed go to the first section.
const PLACES = [["Process", []], ["Event loop", ["loop_lag_ms", "tasks"]], ["Garbage collector", ["gc_count", "gc_collections", "gc_frozen"]]];
const APART = ["python_threads", "environment"];

const shownValue = (name, value) => (Array.isArray(value) ? value.map((each) => named(name, each)).join(" · ") : /(^|_)pid$/.test(name) ? String(value) : named(name, value));

function runtime(one, redraw) {
  return answered(asked.runtime, "The runtime cannot be shown.", (document) => {
    const placed = new Set([...APART, ...PLACES.flatMap(([, names]) => names)]);
    const others = Object.keys(document).filter((name) => !placed.has(name));
    const { python_threads: threads = [], environment = {} } = document;
    const found = Object.entries(environment);
    return [
      h("div", { class: "columns" }, PLACES.map(([title, names]) => h("section", { key: title }, h("h2", {}, title),
        facts([...names.filter((name) => name in document), ...(names.length ? [] : others)].map((name) => [words(name.replace(/^(gc|loop)_/, "")), shownValue(name, document[name])]))))),
      h("section", { key: "threads" }, h("h2", {}, `Python threads (${threads.length})`), list({ id: "threads", what: "Python threads", rows: threads.map((name, index) => [String(index), name]), key: ([index]) => index, text: ([, name]) => name, deps: ([, name]) => [name], size: 100, attributes: { class: "names" }, redraw, item: ([, name]) => name })),
      h("section", { key: "environment" }, h("h2", {}, "Environment"), h("p", { class: "quiet" }, "Allow-listed variables only; the instance leaves secrets out."),
        found.length === 0 ? h("p", {}, "None of them is set.")
          : table({ id: "environment", caption: "Environment", filter: true, rows: found, key: ([name]) => name, deps: (row) => row, redraw, columns: [
            { name: "name", title: "Variable", sort: ([name]) => name, cell: ([name]) => h("code", { class: "break" }, name) },
            { name: "value", title: "Value", sort: ([, value]) => String(value), cell: ([, value]) => h("code", { class: "break" }, String(value)) },
          ] })),
    ];
  });
}

export const instancePage = {
  title: ({ params }) => params.parts[0],
  enter() {
    asked = {};
  },
  leave() {
    for (const answer of Object.values(asked)) answer.stop();
    asked = {};
  },
  view(context) {
    const { params, redraw } = context;
    const [id, section = ""] = params.parts;
    const crumbs = h("p", { class: "crumbs" }, h("a", { href: "#/instances" }, "Instances"), " / ");
    if (!live.instances) return [crumbs, h("h1", { class: "break" }, id), h("p", { class: "quiet" }, "Asking the controller …")];
    const one = live.instances.find((each) => each.id === id);
    if (!one) {
      return [crumbs, h("h1", { class: "break" }, id), live.instances.length === 0 ? noInstances(live.cluster)
        : h("p", {}, "The controller knows no instance of this id. It may have left or been removed; ", h("a", { href: `#/events?instance=${encodeURIComponent(id)}` }, "its events"), " may say when.")];
    }
    start(context);
    const views = { "": summary, workers, runtime };
    return [
      crumbs,
      h("div", { class: "heading" }, h("h1", { class: "break" }, id), state(stateOf(one)),
        h("span", { class: "quiet" }, `${count(sum(one.keys))} chunks`), h("div", { class: "push actions" },
          one.state === "live" && h("button", { onclick: () => command(id, "resync", `${id} is listed again.`) }, "List again", h("span", { class: "unseen" }, ` ${id}`)), actions(one))),
      follower(live.cluster),
      h("nav", { class: "tabs", "aria-label": `Parts of ${id}` }, SECTIONS.map(([name, title]) => h("a", {
        key: name, href: `#/instances/${encodeURIComponent(id)}${name && `/${name}`}`, "aria-current": name === section ? "page" : null,
      }, title))),
      h("div", { key: `section-${section}`, class: "page" }, views[section](one, redraw)),
    ];
  },
};
