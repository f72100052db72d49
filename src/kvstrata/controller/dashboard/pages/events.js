// What happened in the cluster, newest first, as it happens.

import { h } from "../dom.js";
import { clock, date } from "../format.js";
import { MAX_EVENTS } from "../live.js";
import { instanceLink } from "../parts.js";

const TONES = {
  joined: "good", came_back: "good", synced: "good", died: "bad", directory_full: "bad", snapshot_failed: "bad", move_incomplete: "bad",
  superseded: "warn", resync: "warn", clock: "warn", snapshot_ignored: "warn", state: "busy",
};

let wanted = "";
let kind = "";
let instance = "";
let frozen = null; // what was there when the tail was stopped

export const eventsPage = {
  title: () => "Events",
  enter({ params }) {
    instance = params.search.get("instance") ?? "";
    wanted = "";
    kind = "";
    frozen = null;
  },
  view({ live, redraw }) {
    const all = frozen ?? live.events;
    const set = (change) => (event) => { change(event.target.value); redraw(); };
    const choices = (values, title) => [h("option", { value: "" }, title), values.map((value) => h("option", { value }, value))];
    const kinds = [...new Set([...all.map((event) => event.kind), ...(kind ? [kind] : [])])].sort();
    const instances = [...new Set([...all.map((event) => event.instance).filter(Boolean), ...(instance ? [instance] : [])])].sort();
    const word = wanted.trim().toLowerCase();
    const shown = all.filter((event) => (!kind || event.kind === kind) && (!instance || event.instance === instance)
      && (!word || `${event.kind} ${event.instance} ${event.message}`.toLowerCase().includes(word))).reverse();
    const missed = frozen ? live.events.filter((event) => !frozen.includes(event)).length : 0;
    return [
      h("div", { class: "heading" }, h("h1", {}, "Events"),
        h("div", { class: "filter" },
          h("label", { for: "event-kind" }, "Kind"), h("select", { id: "event-kind", value: kind, onchange: set((value) => { kind = value; }) }, choices(kinds, "all")),
          h("label", { for: "event-instance" }, "Instance"), h("select", { id: "event-instance", value: instance, onchange: set((value) => { instance = value; }) }, choices(instances, "all")),
          h("label", { for: "event-text" }, "Text"), h("input", { id: "event-text", type: "search", value: wanted, oninput: set((value) => { wanted = value; }) }),
          h("button", { "aria-pressed": String(frozen !== null), onclick: () => { frozen = frozen ? null : live.events; redraw(); } },
            frozen ? `Go on${missed ? ` (${missed} new)` : ""}` : "Stop the tail"))),
      h("p", { class: "quiet", role: "status" }, `${shown.length} of the last ${all.length} events${all.length >= MAX_EVENTS ? "; older ones are gone" : ""}`),
      shown.length === 0 ? h("p", { class: "quiet" }, all.length ? "No event matches the filter." : "Nothing has happened yet. An instance that registers is the first event.")
        : h("ol", { class: "log", tabindex: "0", "aria-label": "Events, newest first" }, shown.slice(0, 500).map((event) => h("li", { key: event.number },
          h("time", { datetime: new Date(event.unix_ms).toISOString(), title: date(event.unix_ms) }, clock(event.unix_ms, true)),
          h("span", { class: `state ${TONES[event.kind] ?? "calm"}` }, h("i", { "aria-hidden": "true" }), event.kind.replaceAll("_", " ")),
          h("span", { class: "who" }, event.instance ? instanceLink(event.instance) : ""),
          h("span", { class: "what" }, event.message))),
        shown.length > 500 && h("li", { key: "more", class: "quiet" }, `${shown.length - 500} older ones are not shown; use the filter.`)),
    ];
  },
};
