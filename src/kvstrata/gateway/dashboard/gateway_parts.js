// What several pages show of engines and decisions.

import { h } from "./dom.js";
import { clock, count, duration, exact, named } from "./format.js";
import { decisionLink, engineLink, reasonText } from "./model.js";
import { table } from "./table.js";

const ms = (seconds) => duration(typeof seconds === "number" ? seconds * 1000 : null);

export function engine(name) {
  return name ? h("a", { href: engineLink(name) }, name) : h("span", { class: "quiet" }, "none");
}

/** A cost, or a part of one: its policy's names tell the unit. */
export const costText = (name, value) => (/_s$/.test(name) ? named(name, value) : exact(Math.round(value * 1000) / 1000));

function rejected({ decision: { policy, alternatives } }) {
  const name = policy === "ttft" ? "cost_s" : "cost";
  return alternatives.map((one) => h("small", { class: "break", title: Object.entries(one.terms).map(([term, value]) => `${term} ${costText(term, value)}`).join(", ") },
    one.engine, " ", costText(name, one.cost)));
}

const COLUMNS = [
  { name: "time", title: "Time", sort: (one) => one.number, cell: (one) => h("span", { title: `decision ${one.number}` }, clock(one.time_s * 1000, true)) },
  { name: "request", title: "Request", sort: (one) => one.request, cell: (one) => [h("a", { href: decisionLink(one), class: "break" }, one.request), h("small", { class: "break" }, one.model || "any model")], wide: true },
  { name: "engine", title: "Engine", sort: (one) => one.decision.engine, cell: (one) => [engine(one.decision.engine), h("small", {}, reasonText(one.decision.reason))] },
  { name: "rejected", title: "Instead of", cell: (one) => (one.decision.alternatives.length ? rejected(one) : h("span", { class: "quiet" }, "no other")) },
  { name: "tokens", title: "Tokens", number: true, sort: (one) => one.tokens, cell: (one) => count(one.tokens) },
  { name: "cached", title: "Cached", number: true, sort: (one) => one.observed.cached_tokens, cell: (one) => [count(one.observed.cached_tokens), h("small", {}, `expected ${count(one.expected.cached_tokens)}`)] },
  { name: "ttft", title: "First token", number: true, sort: (one) => one.observed.ttft_s, cell: (one) => [ms(one.observed.ttft_s), h("small", {}, `expected ${ms(one.expected.ttft_s)}`)] },
];

/** A table of decisions. */
export function decisions({ id, rows, redraw, filter, prefix }) {
  return table({
    id, caption: "Decisions", columns: COLUMNS, rows, key: (one) => String(one.number), first: "time", down: true, filter, prefix, redraw,
    hint: "request, model or engine", text: (one) => `${one.request} ${one.model} ${one.decision.engine} ${reasonText(one.decision.reason)}`,
  });
}
