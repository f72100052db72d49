// All engines in one table, each with its data-parallel ranks below it.

import { h } from "../dom.js";
import { count, duration, plural, rate } from "../format.js";
import { engine } from "../gateway_parts.js";
import { engineState, heardState, tierTokens } from "../model.js";
import { mark } from "../parts.js";
import { table } from "../table.js";

const told = ({ ranks, reason }) => [ranks.length > 0 && h("small", {}, plural(ranks.length, "rank")), reason && h("small", { class: "break" }, reason)];

const COLUMNS = (thread) => [
  { name: "engine", title: "Engine", sort: (one) => one.name, cell: (one) => [engine(one.name), told(one)] },
  { name: "state", title: "State", sort: (one) => engineState(one)[0], cell: (one) => mark(...engineState(one)) },
  { name: "running", title: "Requests", number: true, sort: (one) => one.in_flight, cell: (one) => [`${count(one.in_flight - one.waiting)} running`, h("small", {}, `${count(one.waiting)} waiting`)] },
  { name: "queue", title: "Queue", number: true, sort: (one) => one.queue_s, cell: (one) => [duration(one.queue_s * 1000), h("small", {}, `${count(one.waiting_tokens)} tokens`)] },
  { name: "rate", title: "Prefill", number: true, sort: (one) => one.prefill_tokens_s, cell: (one) => [rate(one.prefill_tokens_s, "tokens"), h("small", {}, one.measured ? "measured" : "not measured")] },
  { name: "heard", title: "KV events", sort: (one) => heardState(one.heard, thread)[0], shows: (one) => [one.heard, thread.hears], cell: (one) => mark(...heardState(one.heard, thread)) },
  { name: "l0", title: "In its cache", number: true, sort: (one) => tierTokens(one.heard, "l0") ?? undefined, cell: (one) => [`${count(tierTokens(one.heard, "l0"))}`, h("small", {}, one.heard ? "tokens" : "unknown")] },
  { name: "l1", title: "In L1", number: true, sort: (one) => tierTokens(one.heard, "l1") ?? undefined, cell: (one) => [`${count(tierTokens(one.heard, "l1"))}`, h("small", {}, one.heard ? "tokens" : "unknown")] },
  { name: "sent", title: "Sent", number: true, sort: (one) => one.sent, cell: (one) => count(one.sent) },
];

/** Columns of a table of engines. `of(row)`: the engine whose place in the order a row has. */
export const columnsOf = (thread, of = (one) => one) => COLUMNS(thread).map((column) => ({ ...column, sort: (row) => column.sort(of(row)) }));

/** Each engine, and behind it its ranks; the same array as long as the engines are the same. */
let last = { engines: null, rows: [] };
function rowsOf(engines) {
  if (last.engines !== engines) last = { engines, rows: engines.flatMap((one) => [one, ...one.ranks]) };
  return last.rows;
}

export const enginesPage = {
  title: () => "Engines",
  view({ live, redraw }) {
    const heading = h("h1", {}, "Engines");
    if (!live.engines) return [heading, h("p", { class: "quiet" }, "Asking the gateway …")];
    const thread = live.status.kv_events_thread;
    const engineOf = new Map(live.engines.flatMap((one) => one.ranks.map((rank) => [rank.name, one])));
    return [
      h("div", { class: "heading" }, heading),
      live.engines.length === 0 ? h("p", { class: "quiet" }, "No engine is known.") : table({
        id: "engines", caption: "Engines", columns: columnsOf(thread, (one) => engineOf.get(one.name) ?? one), rows: rowsOf(live.engines), key: (one) => one.name, prefix: "", filter: true,
        hint: "name, state or model", redraw, text: (one) => `${one.name} ${engineState(one)[0]} ${heardState(one.heard, thread)[0]} ${one.models.join(" ")}`,
        mark: (one) => (one.state === "down" ? "dead" : null),
      }),
    ];
  },
};
