// The gateway at a glance: engines, goodput by class of service, queue, tenants, and the newest decisions.

import { h } from "../dom.js";
import { bytes, count, duration, exact, named, percent, plural, words } from "../format.js";
import { decisions } from "../gateway_parts.js";
import { recent, sloKey } from "../live.js";
import { engineState, goodput, heardState, total } from "../model.js";
import { facts, tile } from "../parts.js";
import { list } from "../rows.js";
import { table } from "../table.js";

const NEWEST = 8;
const sumOf = (rows, of) => rows.reduce((all, row) => all + of(row), 0);

function hearing({ kv_events_thread: thread, kv_events: heard }) {
  const rows = Object.values(heard);
  if (!thread.hears) return tile("KV events", "not heard", "the thread has ended", "warn");
  const exactly = rows.filter((one) => heardState(one, thread)[1] === "good").length;
  return tile("KV events", rows.length ? `${count(exactly)} of ${count(rows.length)}` : "none", rows.length ? "engines known in full" : "no engine is listened to");
}

function tiles(status, engines) {
  const up = engines.filter(({ state }) => state === "up").length;
  const now = total(status.slo.map(recent));
  return h("dl", { class: "tiles" },
    tile("Engines", `${count(up)} of ${count(engines.length)}`, up === engines.length ? "all serve" : `${plural(engines.length - up, "engine")} without requests`, up === engines.length ? "" : "warn"),
    tile("Under way", count(status.gateway.in_flight), `${count(sumOf(engines, ({ waiting }) => waiting))} wait for their first token`),
    tile("Goodput", percent(goodput(now) ?? goodput(total(status.slo))), now.requests ? `of ${plural(now.requests, "request")} in the last minute` : "since the start"),
    tile("Tokens waiting", count(sumOf(engines, (one) => one.waiting_tokens)), `longest queue ${duration(1000 * Math.max(0, ...engines.map((one) => one.queue_s)))}`),
    hearing(status),
    tile("Retries left", count(Math.floor(status.gateway.retry_budget)), "may be made now"));
}

function ended({ hears, error }) {
  return !hears && h("div", { class: "wrong", role: "alert", key: "ended" }, h("strong", {}, "The thread that hears KV events has ended. "),
    error && h("code", {}, error), error && ". ", "What engines have cached is known only from the requests that passed here. Restart the gateway, and report this defect.");
}

const wanted = (slo) => (slo ? [["ttft_ms", "first token"], ["tpot_ms", "per token"], ["e2e_ms", "whole"]].filter(([name]) => slo[name])
  .map(([name, what]) => `${what} ${duration(slo[name])}`).join(", ") || "any time" : "no class");

function classes({ slo, classes: known }, redraw) {
  const byName = new Map(known.map((one) => [one.name, one]));
  const columns = [
    { name: "slo", title: "Class", sort: (one) => one.slo, cell: (one) => [one.slo || "none", h("small", {}, wanted(byName.get(one.slo)))] },
    { name: "tenant", title: "Tenant", sort: (one) => one.tenant, cell: (one) => one.tenant || "–" },
    { name: "requests", title: "Received", number: true, sort: (one) => one.requests, cell: (one) => count(one.requests) },
    { name: "goodput", title: "Goodput", number: true, sort: goodput, cell: (one) => percent(goodput(one)) },
    { name: "recent", title: "Last minute", number: true, sort: (one) => goodput(recent(one)), shows: (one) => [recent(one).requests, recent(one).met], cell: (one) => [percent(goodput(recent(one))), h("small", {}, `of ${count(recent(one).requests)}`)] },
  ];
  return h("section", { key: "slo" }, h("h2", {}, "Classes of service"),
    slo.length === 0 ? h("p", { class: "quiet" }, "No request has ended yet.")
      : table({ id: "slo", caption: "Goodput by class and tenant", columns, rows: slo, key: sloKey, deps: (one) => [one.requests, one.met, wanted(byName.get(one.slo))], text: (one) => `${one.slo} ${one.tenant}`, size: 20, redraw }));
}

/** A document of numbers, those inside it by their paths. */
function numbers(value, path = []) {
  return Object.entries(value).flatMap(([name, each]) => (each !== null && typeof each === "object" ? numbers(each, [...path, name])
    : [[[...path, words(name)].join(" · "), named(name, each)]]));
}

function queue({ queue: told }) {
  return told && h("section", { key: "queue" }, h("h2", {}, "Queue"), facts(numbers(told).slice(0, 40)));
}

function tenants({ tenants: told }, redraw) {
  const rows = Object.entries(told);
  return rows.length > 0 && h("section", { key: "tenants" }, h("h2", {}, "Tenants"), list({
    id: "tenants", what: "tenants", rows, key: ([name]) => name, text: ([name]) => name, attributes: { class: "rows pairs" }, deps: ([, value]) => [value], redraw,
    item: ([name, value]) => [h("span", {}, name), h("span", { class: "number" }, `${count(value)} under way`)],
  }));
}

function attention(engines, thread, redraw) {
  const rows = engines.filter((one) => engineState(one)[1] !== "good" || ["warn", "bad"].includes(heardState(one.heard, thread)[1]));
  return rows.length > 0 && h("section", { key: "attention" }, h("h2", {}, "Engines to look at"), list({
    id: "attention", what: "engines to look at", rows, key: ({ name }) => name, text: (one) => `${one.name} ${one.reason}`, attributes: { class: "rows" }, redraw,
    deps: (one) => [one, thread.hears],
    item: (one) => [h("a", { href: `#/engines/${encodeURIComponent(one.name)}` }, one.name), h("span", {}, engineState(one)[0]),
      h("span", {}, engineState(one)[2] || heardState(one.heard, thread)[2])],
  }));
}

function about({ gateway, http }) {
  return h("section", { key: "gateway" }, h("h2", {}, "Gateway"), facts([
    ["Version", gateway.version],
    ["Policy", h("code", {}, gateway.policy)],
    gateway.stopping && ["Stopping", "it takes no new connections"],
    ["Restarts", exact(gateway.restarts)],
    ["Connections", exact(http.connections ?? 0)],
    ["Remembered prefixes", plural(gateway.prefix_pieces, "piece")],
    ["Token ids kept", bytes(gateway.token_cache_bytes)],
  ]));
}

export const overviewPage = {
  title: () => "Overview",
  view({ live, redraw }) {
    const { status, engines } = live;
    if (!status) return [h("h1", {}, "Overview"), h("p", { class: "quiet" }, "Asking the gateway …")];
    const thread = status.kv_events_thread;
    return [
      h("div", { class: "heading" }, h("h1", {}, "Overview")),
      ended(thread),
      tiles(status, engines),
      classes(status, redraw),
      h("div", { class: "columns" }, queue(status), tenants(status, redraw), attention(engines, thread, redraw), about(status)),
      h("div", { class: "heading" }, h("h2", {}, "Newest decisions"), live.decisions.length > NEWEST && h("a", { href: "#/routing", class: "push" }, "All")),
      live.decisions.length === 0 ? h("p", { class: "quiet" }, "No request has come yet.") : decisions({ id: "newest", rows: live.decisions.slice(0, NEWEST), redraw }),
    ];
  },
};
