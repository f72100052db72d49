// One decision: what it weighed, what came of it, all that it was made from, and whether deciding again gives the same.

import { get } from "../api.js";
import { h } from "../dom.js";
import { count, date, duration, exact, named, plural, words } from "../format.js";
import { costText, engine } from "../gateway_parts.js";
import { reasonText } from "../model.js";
import { facts, failure } from "../parts.js";
import { table } from "../table.js";

let told = null; // the gateway's answer
let error = null;
let run = 0;

async function load({ params, redraw }) {
  const mine = run;
  try {
    const found = await get(`/gateway/decisions/${encodeURIComponent(params.parts[0])}?number=${Number(params.search.get("number")) || 0}`);
    if (mine !== run) return;
    told = found;
    error = null;
  } catch (failed) {
    if (mine !== run) return;
    error = failed;
  }
  redraw();
}

const seconds = (value) => duration(typeof value === "number" ? value * 1000 : null);

function outcome({ model, tokens, time_s: at, decision, expected, observed }) {
  const { way } = decision;
  return h("section", { key: "outcome" }, h("h2", {}, "What was chosen"), facts([
    ["Engine", engine(decision.engine)],
    ["Why", reasonText(decision.reason)],
    ["Of", `${plural(decision.eligible, "engine")}${decision.unhealthy ? `, without ${decision.unhealthy} that did not serve` : ""}`],
    ["When", date(at * 1000)],
    ["Model", model || "any"],
    ["Prompt", plural(tokens, "token")],
    ["First token", `${seconds(observed.ttft_s)}, expected ${seconds(expected.ttft_s)}`],
    ["Cached tokens", `${count(observed.cached_tokens)}, expected ${count(expected.cached_tokens)}`],
    way?.load_tokens > 0 && ["Loaded", `${plural(way.load_tokens, "token")} from ${way.tier}${way.source ? ` (${way.source})` : ""} in ${seconds(way.load_s)}`],
  ]));
}

function costs({ decision }, redraw) {
  const rows = [{ engine: decision.engine, cost: decision.cost, terms: decision.terms, chosen: true }, ...decision.alternatives];
  const names = [...new Set(rows.flatMap(({ terms }) => Object.keys(terms)))];
  const columns = [
    { name: "engine", title: "Engine", cell: (one) => [engine(one.engine), h("small", {}, one.chosen ? "chosen" : "rejected")] },
    { name: "cost", title: "Cost", number: true, sort: (one) => one.cost, cell: (one) => costText(decision.policy === "ttft" ? "cost_s" : "cost", one.cost) },
    ...names.map((name) => ({ name, title: words(name), number: true, sort: (one) => one.terms[name], cell: (one) => (one.terms[name] === undefined ? "–" : costText(name, one.terms[name])) })),
  ];
  return h("section", { key: "costs" }, h("h2", {}, "What it would have cost"),
    table({ id: "costs", caption: "Costs by engine", columns, rows, key: (one) => one.engine, first: "cost", redraw }));
}

function verdict({ equal, again, decision }) {
  return h("section", { key: "again", class: `verdict ${equal ? "hit" : "miss"}` }, h("h2", {}, equal ? "Deciding again gives the same" : "Deciding again gives something else"),
    h("p", {}, equal ? "From the inputs below, the same code takes the same engine, for the same reason and cost."
      : [engine(again.engine), ` (${reasonText(again.reason)}, cost ${again.cost}) in place of `, engine(decision.engine), ` (${reasonText(decision.reason)}, cost ${decision.cost}).`]));
}

const COLUMNS = [
  { name: "engine", title: "Engine", sort: (one) => one.name, cell: (one) => engine(one.name) },
  { name: "requests", title: "Requests", number: true, sort: (one) => one.requests, cell: (one) => [exact(one.requests), h("small", {}, `${exact(one.waiting)} waiting`)] },
  { name: "backlog", title: "Backlog", number: true, sort: (one) => one.backlog_tokens, cell: (one) => [count(Math.round(one.backlog_tokens)), h("small", {}, "tokens")] },
  { name: "rate", title: "Prefill", number: true, sort: (one) => one.prefill_tokens_s, cell: (one) => `${count(Math.round(one.prefill_tokens_s))} tokens/s` },
  { name: "cached", title: "Known cached", number: true, sort: (one) => one.cached, cell: (one) => count(one.cached) },
  { name: "copies", title: "May have", cell: (one) => (one.copies.length ? one.copies.map((copy) => h("small", {}, `${count(copy.tokens)} tokens in ${copy.tier}, ${copy.certainty}`)) : h("span", { class: "quiet" }, "–")) },
];

function inputs({ request, fleet, knowledge, policy }, redraw) {
  const rows = fleet.engines.map((one) => ({ ...one, cached: knowledge.cached[one.name] ?? 0, copies: knowledge.copies.filter((copy) => !copy.engine || copy.engine === one.name) }));
  return [
    h("h2", { key: "inputs" }, "What it was made from"),
    h("div", { class: "columns", key: "facts" },
      h("section", {}, h("h3", {}, "Request"), facts(Object.entries(request).filter(([, value]) => value !== "").map(([name, value]) => [words(name), named(name, value)]))),
      h("section", {}, h("h3", {}, "Policy and knowledge"), facts([
        ...Object.entries(policy).map(([name, value]) => [words(name), named(name, value)]),
        ["Life of a block", seconds(knowledge.block_life_s)], ["Delay of events", seconds(knowledge.event_lag_s)],
      ]))),
    table({ id: "fleet", caption: "Engines as they were", columns: COLUMNS, rows, key: (one) => one.name, filter: rows.length > 8, redraw }),
  ];
}

export const decisionPage = {
  title: ({ params }) => params.parts[0],
  enter(context) {
    run += 1;
    [told, error] = [null, null];
    load(context);
  },
  leave() {
    run += 1;
  },
  view({ live, redraw, params }) {
    const crumbs = h("p", { class: "crumbs" }, h("a", { href: "#/routing" }, "Routing"));
    const heading = h("div", { class: "heading" }, h("h1", { class: "break" }, params.parts[0]),
      told && h("button", { onclick: () => load({ params, redraw }) }, "Replay this decision"));
    const number = Number(params.search.get("number")) || 0;
    const shown = told ?? live.decisions.find((one) => one.request === params.parts[0] && (!number || one.number === number));
    if (!shown) return [crumbs, heading, error ? failure(error, "This decision cannot be shown.") : h("p", { class: "quiet" }, "Asking the gateway …")];
    return [
      crumbs, heading,
      error && failure(error, "It cannot be decided again."),
      !told && !shown.recorded && h("p", { class: "note", key: "note" }, "Its inputs were not kept, since the fleet was too large for that; the decision itself is."),
      h("div", { class: "columns" }, outcome(shown), told && verdict(told)),
      costs(shown, redraw),
      told && inputs(told.record, redraw),
    ];
  },
};
