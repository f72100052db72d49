// All instances in one table.

import { h } from "../dom.js";
import { bytes, count, percent, plural, seconds } from "../format.js";
import { actions, instanceLink, keysOf, l1, noInstances, state, syncText, usage } from "../parts.js";
import { table } from "../table.js";

let wanted = "";

const COLUMNS = [
  { name: "instance", title: "Instance", sort: (one) => one.instance, cell: (one) => [instanceLink(one.instance), h("small", {}, [one.host, one.zone && `zone ${one.zone}`].filter(Boolean).join(" · "))] },
  { name: "state", title: "State", sort: (one) => one.state, cell: (one) => [state(one.state), (one.sync || one.state === "unconfirmed") && h("small", {}, syncText(one)), one.events_behind > 0 && h("small", {}, `${plural(one.events_behind, "batch", "batches")} behind`)] },
  { name: "l1", title: "L1", sort: (one) => l1(one).used_bytes, cell: (one) => h("div", { title: `of ${bytes(l1(one).capacity_bytes)}` }, usage(l1(one).used_bytes, l1(one).capacity_bytes, true)), wide: true },
  { name: "chunks", title: "Chunks", number: true, sort: keysOf, cell: (one) => count(keysOf(one)) },
  { name: "hits", title: "Hit rate", number: true, sort: (one) => one.hit_rate, cell: (one) => percent(one.hit_rate) },
  { name: "peers", title: "Peers", number: true, sort: (one) => one.peer_sent_bytes_total + one.peer_read_bytes_total, cell: (one) => [`${bytes(one.peer_sent_bytes_total)} sent`, h("small", {}, `${bytes(one.peer_read_bytes_total)} read`)] },
  { name: "sessions", title: "Workers", number: true, sort: (one) => one.sessions, cell: (one) => count(one.sessions) },
  { name: "heartbeat", title: "Heartbeat", number: true, sort: (one) => one.heartbeat_age_ms, cell: (one) => (typeof one.heartbeat_age_ms === "number" ? `${seconds(one.heartbeat_age_ms)} ago` : "–") },
  { name: "actions", title: "Actions", cell: actions, wide: true },
];

export const instancesPage = {
  title: () => "Instances",
  view({ live, redraw }) {
    const { instances, cluster } = live;
    const heading = h("h1", {}, "Instances");
    if (!instances) return [heading, h("p", { class: "quiet" }, "Asking the controller …")];
    if (instances.length === 0) return [heading, noInstances(cluster)];
    const word = wanted.trim().toLowerCase();
    const shown = instances.filter((one) => [one.instance, one.host, one.zone, one.state].some((text) => String(text ?? "").toLowerCase().includes(word)));
    return [
      h("div", { class: "heading" }, heading,
        h("div", { class: "filter" }, h("label", { for: "wanted" }, "Filter"),
          h("input", { id: "wanted", type: "search", placeholder: "name, host, zone or state", value: wanted, oninput: (event) => { wanted = event.target.value; redraw(); } }),
          h("span", { class: "quiet", role: "status" }, shown.length === instances.length ? `${instances.length} in all` : `${shown.length} of ${instances.length}`))),
      shown.length ? table({ id: "instances", caption: "Instances", columns: COLUMNS, rows: shown, key: (one) => one.instance, redraw, mark: (one) => (one.state === "dead" ? "dead" : null) })
        : h("p", { class: "quiet" }, "No instance matches. ", h("button", { onclick: () => { wanted = ""; redraw(); } }, "Show all")),
    ];
  },
};
