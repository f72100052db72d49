// Events of the cluster as they happen, newest first.

import { h, lazy } from "../dom.js";
import { clock, date } from "../format.js";
import { MAX_EVENTS } from "../live.js";
import { instanceLink } from "../instance_parts.js";
import { ask, asked, inOrder, noneMatch, windowed } from "../rows.js";

const TONES = {
  joined: "good", came_back: "good", listed: "good", died: "bad", directory_full: "bad", snapshot_failed: "bad", move_incomplete: "bad",
  superseded: "warn", list_again: "warn", clock: "warn", snapshot_ignored: "warn", state: "busy",
};

let frozen = null; // the events at the time when the tail was stopped
let from = null; // the events, kind and instance from which `chosen` was made
let chosen = [];

/** The events of a kind and an instance, newest first. */
function choice(events, kind, instance) {
  if (from?.events !== events || from.kind !== kind || from.instance !== instance) {
    from = { events, kind, instance };
    chosen = events.filter((event) => (!kind || event.kind === kind) && (!instance || event.instance === instance)).reverse();
  }
  return chosen;
}

function select(name, title, values, redraw) {
  const value = asked(name);
  const choices = [...new Set([...values, value])].filter(Boolean).sort(inOrder);
  return [h("label", { for: `event-${name}` }, title), lazy("select", `event-${name}`, [choices.join(), value], () => h("select", {
    id: `event-${name}`, value, onchange: (event) => { ask({ [name]: event.target.value, page: "" }); redraw(); },
  }, h("option", { value: "" }, "all"), choices.map((each) => h("option", { value: each }, each))))];
}

function line(event) {
  return h("li", {},
    h("time", { datetime: new Date(event.unix_ms).toISOString(), title: date(event.unix_ms) }, clock(event.unix_ms, true)),
    h("span", { class: `state ${TONES[event.kind] ?? "calm"}` }, h("i", { "aria-hidden": "true" }), event.kind.replaceAll("_", " ")),
    h("span", { class: "who" }, event.instance ? instanceLink(event.instance) : ""),
    h("span", { class: "what" }, event.message));
}

export const eventsPage = {
  title: () => "Events",
  enter() {
    frozen = null;
  },
  view({ live, redraw }) {
    const all = frozen ?? live.events;
    const rows = choice(all, asked("kind"), asked("instance"));
    const last = frozen?.at(-1)?.number ?? 0;
    const missed = frozen ? live.events.filter((event) => event.number > last).length : 0;
    const { shown, tools } = windowed({ id: "events", what: "events", rows, key: (event) => String(event.number), text: (event) => `${event.kind} ${event.instance} ${event.message}`, prefix: "", filter: true, redraw });
    return [
      h("div", { class: "heading" }, h("h1", {}, "Events"),
        h("div", { class: "filter" },
          select("kind", "Kind", all.map((event) => event.kind), redraw),
          select("instance", "Instance", all.map((event) => event.instance), redraw),
          h("button", { "aria-pressed": String(frozen !== null), onclick: () => { frozen = frozen ? null : live.events; redraw(); } },
            frozen ? `Go on${missed ? ` (${missed} new)` : ""}` : "Stop the tail"))),
      all.length >= MAX_EVENTS && h("p", { class: "quiet" }, `The last ${all.length} events; older ones are gone.`),
      tools,
      rows.length === 0 ? h("p", { class: "quiet" }, all.length ? "No event is of this kind and instance." : "Nothing has happened yet. An instance that registers is the first event.")
        : h("ol", { class: "log", tabindex: "0", "aria-label": "Events, newest first" },
          shown.map((event) => lazy("li", event.number, [event], () => line(event)))),
      noneMatch({ id: "events", what: "events", rows, shown, prefix: "", redraw }),
    ];
  },
};
