// All instances in one table.

import { h } from "../dom.js";
import { bytes, count, percent, seconds } from "../format.js";
import { recentHits, stateOf, sum } from "../model.js";
import { actions, allow, follower, instanceLink, noInstances, state, syncText, usage } from "../parts.js";
import { table } from "../table.js";

let wanted = "";

const COLUMNS = [
  { name: "instance", title: "Instance", sort: (one) => one.id, cell: (one) => [instanceLink(one.id), h("small", { class: "short", title: one.host }, one.host), one.zone && h("small", { class: "short", title: one.zone }, `zone ${one.zone}`)] },
  { name: "state", title: "State", sort: stateOf, cell: (one) => [state(stateOf(one)), one.sync.state !== "exact" && one.state !== "dead" && h("small", {}, syncText(one))] },
  { name: "l1", title: "L1", sort: (one) => one.used_bytes.l1, cell: (one) => h("div", { title: `of ${bytes(one.capacity_bytes.l1)}` }, usage(one.used_bytes.l1 ?? 0, one.capacity_bytes.l1 ?? 0, true)), wide: true },
  { name: "chunks", title: "Chunks", number: true, sort: (one) => sum(one.keys), cell: (one) => count(sum(one.keys)) },
  { name: "hits", title: "Hit rate", number: true, sort: recentHits, cell: (one) => h("span", { title: "Chunks found, of those looked up in the last minute" }, percent(recentHits(one))) },
  { name: "peers", title: "Peers", number: true, sort: (one) => one.peer_sent_bytes_total + one.peer_read_bytes_total, cell: (one) => [`${bytes(one.peer_sent_bytes_total)} sent`, h("small", {}, `${bytes(one.peer_read_bytes_total)} read`)] },
  { name: "sessions", title: "Workers", number: true, sort: (one) => one.sessions, cell: (one) => count(one.sessions) },
  { name: "heartbeat", title: "Heartbeat", number: true, sort: (one) => one.heard_ago_s, cell: (one) => `${seconds(one.heard_ago_s * 1000)} ago` },
  { name: "actions", title: "Actions", cell: actions, wide: true },
];

function removedOnes(removed) {
  return removed.length > 0 && h("section", { key: "removed" }, h("h2", {}, "Removed"),
    h("p", { class: "quiet" }, "They were removed while they lived, and are not let in again until they are allowed."),
    h("ul", { class: "rows pairs" }, removed.map((id) => h("li", { key: id }, h("span", {}, id), h("button", { onclick: () => allow(id) }, "Allow", h("span", { class: "unseen" }, ` ${id}`))))));
}

export const instancesPage = {
  title: () => "Instances",
  view({ live, redraw }) {
    const { instances, cluster } = live;
    const heading = h("h1", {}, "Instances");
    if (!instances) return [heading, h("p", { class: "quiet" }, "Asking the controller …")];
    if (instances.length === 0) return [heading, noInstances(cluster), removedOnes(live.removed)];
    const word = wanted.trim().toLowerCase();
    const shown = instances.filter((one) => [one.id, one.host, one.zone, stateOf(one)].some((text) => String(text ?? "").toLowerCase().includes(word)));
    return [
      h("div", { class: "heading" }, heading,
        h("div", { class: "filter" }, h("label", { for: "wanted" }, "Filter"),
          h("input", { id: "wanted", type: "search", placeholder: "name, host, zone or state", value: wanted, oninput: (event) => { wanted = event.target.value; redraw(); } }),
          h("span", { class: "quiet", role: "status" }, shown.length === instances.length ? `${instances.length} in all` : `${shown.length} of ${instances.length}`))),
      follower(cluster),
      shown.length ? table({ id: "instances", caption: "Instances", columns: COLUMNS, rows: shown, key: (one) => one.id, redraw, mark: (one) => (one.state === "dead" ? "dead" : null) })
        : h("p", { class: "quiet" }, "No instance matches. ", h("button", { onclick: () => { wanted = ""; redraw(); } }, "Show all")),
      removedOnes(live.removed),
    ];
  },
};
