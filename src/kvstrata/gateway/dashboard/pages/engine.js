// One engine, or one data-parallel rank: its load, its rates, what is heard of its cache, and the last requests that it got.

import { h } from "../dom.js";
import { count, duration, exact, plural, rate } from "../format.js";
import { decisions, engine } from "../gateway_parts.js";
import { engineState, heardState, tierTokens } from "../model.js";
import { facts, mark } from "../parts.js";
import { table } from "../table.js";
import { columnsOf } from "./engines.js";

function cache(one, thread) {
  const { heard } = one;
  return h("section", { key: "cache" }, h("h2", {}, "Cache"), facts([
    ["KV events", mark(...heardState(heard, thread)), heardState(heard, thread)[2]],
    ...Object.keys(heard?.blocks ?? {}).map((tier) => [tier === "l0" ? "In its own cache" : `In ${tier.toUpperCase()}`,
      `${plural(heard.blocks[tier], "block")}${tierTokens(heard, tier) === null ? "" : `, ${count(tierTokens(heard, tier))} tokens`}`]),
    heard && ["Batches", exact(heard.batches)],
    heard && ["Lost for good", plural(heard.gaps, "time")],
    heard && ["Restarts", exact(heard.restarts)],
    heard && ["Malformed", exact(heard.malformed)],
    heard && ["Beginning unknown", plural(heard.orphans, "block")],
    heard && ["Life of a block", heard.block_life_s ? duration(heard.block_life_s * 1000) : "not measured"],
    heard && ["Delay of events", heard.event_lag_s ? duration(heard.event_lag_s * 1000) : "not measured"],
  ]));
}

function load(one) {
  return h("section", { key: "load" }, h("h2", {}, "Load"), facts([
    ["Running", plural(one.in_flight - one.waiting, "request")],
    ["Waiting", `${plural(one.waiting, "request")}, ${count(one.waiting_tokens)} tokens to compute`],
    ["Queue", duration(one.queue_s * 1000)],
    ["In its context", plural(one.context_tokens, "token")],
    ["Prefill", `${rate(one.prefill_tokens_s, "tokens")}, ${one.measured ? "measured" : "not measured: that of the others, or assumed"}`],
    ["Requests sent", exact(one.sent)],
    ["Models", one.models.length ? one.models.map((name) => h("div", { class: "break" }, h("code", {}, name))) : "none told"],
  ]));
}

export const enginePage = {
  title: ({ params }) => params.parts[0],
  view({ live, redraw, params }) {
    const [name] = params.parts;
    let crumbs = h("p", { class: "crumbs" }, h("a", { href: "#/engines" }, "Engines"));
    const heading = h("h1", { class: "break" }, name);
    if (!live.engines) return [crumbs, heading, h("p", { class: "quiet" }, "Asking the gateway …")];
    const owner = live.engines.find((each) => each.name === name || each.ranks.some((rank) => rank.name === name));
    const one = owner?.ranks.find((rank) => rank.name === name) ?? owner;
    if (!one) return [crumbs, heading, h("p", {}, "The gateway knows no engine of this name.")];
    const names = new Set([name, ...one.ranks.map((rank) => rank.name)]);
    const rows = live.decisions.filter(({ decision }) => names.has(decision.engine));
    if (owner !== one) crumbs = h("p", { class: "crumbs" }, h("a", { href: "#/engines" }, "Engines"), " / ", engine(owner.name));
    return [
      crumbs,
      h("div", { class: "heading" }, heading, mark(...engineState(one)), one.reason && h("span", { class: "quiet break" }, one.reason)),
      h("div", { class: "columns" }, load(one), cache(one, live.status.kv_events_thread)),
      one.ranks.length > 0 && h("h2", {}, "Ranks"),
      one.ranks.length > 0 && table({ id: "ranks", caption: "Ranks", columns: columnsOf(live.status.kv_events_thread), rows: one.ranks, key: (rank) => rank.name, redraw }),
      rows.length > 0 && h("h2", {}, "Its last requests"),
      rows.length > 0 && decisions({ id: "decisions", rows, redraw }),
    ];
  },
};
