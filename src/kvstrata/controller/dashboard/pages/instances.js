// All instances in one table.

import { h } from "../dom.js";
import { bytes, clock, count, percent, seconds } from "../format.js";
import { live } from "../live.js";
import { recentHits, stateOf, sum } from "../model.js";
import { actions, allow, follower, instanceLink, followText, noInstances, state } from "../instance_parts.js";
import { usage } from "../parts.js";
import { list } from "../rows.js";
import { table } from "../table.js";

const LATE_BEATS = 2.5;

/** The age of a late heartbeat in seconds; otherwise "on time". */
function heartbeat(one) {
  const ago = live.nowMs() - one.heard_unix_ms;
  return ago > LATE_BEATS * 1000 * live.cluster.heartbeat_s ? `${seconds(ago)} ago` : "on time";
}

const COLUMNS = [
  { name: "instance", title: "Instance", sort: (one) => one.id, shows: ({ id, host, zone }) => [id, host, zone], cell: (one) => [instanceLink(one.id), h("small", { class: "short", title: one.host }, one.host), one.zone && h("small", { class: "short", title: one.zone }, `zone ${one.zone}`)] },
  { name: "state", title: "State", sort: stateOf, shows: (one) => [stateOf(one), followText(one)], cell: (one) => [state(stateOf(one)), one.following.state !== "exact" && one.state !== "dead" && h("small", {}, followText(one))] },
  { name: "l1", title: "L1", sort: (one) => one.used_bytes.l1, shows: (one) => [one.used_bytes.l1, one.capacity_bytes.l1], cell: (one) => h("div", { title: `of ${bytes(one.capacity_bytes.l1)}` }, usage(one.used_bytes.l1 ?? 0, one.capacity_bytes.l1 ?? 0, true)), wide: true },
  { name: "chunks", title: "Chunks", number: true, sort: (one) => sum(one.keys), shows: (one) => [count(sum(one.keys))], cell: (one) => count(sum(one.keys)) },
  { name: "hits", title: "Hit rate", number: true, sort: recentHits, shows: (one) => [percent(recentHits(one))], cell: (one) => h("span", { title: "Chunks found, of those looked up in the last minute" }, percent(recentHits(one))) },
  { name: "peers", title: "Peers", number: true, sort: (one) => one.peer_sent_bytes_total + one.peer_read_bytes_total, shows: (one) => [one.peer_sent_bytes_total, one.peer_read_bytes_total], cell: (one) => [`${bytes(one.peer_sent_bytes_total)} sent`, h("small", {}, `${bytes(one.peer_read_bytes_total)} read`)] },
  { name: "sessions", title: "Workers", number: true, sort: (one) => one.sessions, shows: (one) => [one.sessions], cell: (one) => count(one.sessions) },
  { name: "heartbeat", title: "Heartbeat", number: true, sort: (one) => -one.heard_unix_ms, shows: (one) => [heartbeat(one), one.heard_unix_ms], cell: (one) => h("span", { title: `The last came at ${clock(one.heard_unix_ms)}` }, heartbeat(one)) },
  { name: "actions", title: "Actions", shows: (one) => [one.state, one.reported_state, one.draining], cell: actions, wide: true },
];

function removedOnes(removed, redraw) {
  return removed.length > 0 && h("section", { key: "removed" }, h("h2", {}, "Removed"),
    h("p", { class: "quiet" }, "These instances were removed while they lived, and may not join again until they are allowed."),
    list({ id: "removed", what: "removed instances", rows: removed, key: (id) => id, text: (id) => id, attributes: { class: "rows pairs" }, redraw,
      item: (id) => [h("span", {}, id), h("button", { onclick: () => allow(id) }, "Allow", h("span", { class: "unseen" }, ` ${id}`))] }));
}

export const instancesPage = {
  title: () => "Instances",
  view({ live, redraw }) {
    const { instances, cluster } = live;
    const heading = h("h1", {}, "Instances");
    if (!instances) return [heading, h("p", { class: "quiet" }, "Asking the controller …")];
    if (instances.length === 0) return [heading, noInstances(cluster), removedOnes(live.removed, redraw)];
    return [
      h("div", { class: "heading" }, heading),
      follower(cluster),
      table({
        id: "instances", caption: "Instances", columns: COLUMNS, rows: instances, key: (one) => one.id, prefix: "", filter: true, hint: "name, host, zone or state", redraw,
        text: (one) => `${one.id} ${one.host} ${one.zone} ${one.version} ${stateOf(one)}`,
        mark: (one) => (one.state === "dead" ? "dead" : null),
      }),
      removedOnes(live.removed, redraw),
    ];
  },
};
