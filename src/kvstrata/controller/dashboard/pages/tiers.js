// What lies in which tier, over all instances and for each.

import { h } from "../dom.js";
import { count, exact } from "../format.js";
import { tierOrder } from "../model.js";
import { failure, instanceLink, noInstances, poller, usage } from "../parts.js";
import { table } from "../table.js";

const EVERY_MS = 2_000;
let asked = null;

export const tiersPage = {
  title: () => "Tiers",
  enter({ redraw }) {
    asked = poller("/v1/tiers", EVERY_MS, redraw);
  },
  leave() {
    asked.stop();
  },
  view({ live, redraw }) {
    const heading = h("h1", {}, "Tiers");
    if (live.instances?.length === 0) return [heading, noInstances(live.cluster)];
    if (!asked.document) return [heading, asked.error && asked.error.status !== 0 ? failure(asked.error, "The tiers cannot be shown.") : h("p", { class: "quiet" }, "Asking the controller …")];
    const { tiers, rows } = asked.document;
    return [
      heading,
      h("p", { class: "quiet" }, "L1 is shared memory and can be read by peers; the others are tiers of one instance that it reports."),
      table({ id: "tiers", caption: "Tiers of the cluster", rows: tiers, key: (tier) => tier.tier, redraw, columns: [
        { name: "tier", title: "Tier", sort: (tier) => tierOrder(tier.tier), cell: (tier) => tier.tier },
        { name: "instances", title: "Instances", number: true, sort: (tier) => tier.instances, cell: (tier) => count(tier.instances) },
        { name: "chunks", title: "Chunks", number: true, sort: (tier) => tier.keys, cell: (tier) => exact(tier.keys) },
        { name: "bytes", title: "Bytes", number: false, wide: true, sort: (tier) => tier.used_bytes, cell: (tier) => usage(tier.used_bytes, tier.capacity_bytes) },
      ] }),
      h("section", { key: "each" }, h("h2", {}, "By instance"), table({
        id: "tiers-each", caption: "Tiers of each instance", rows, key: (row) => `${row.instance}/${row.tier}`, redraw, first: "instance", columns: [
          { name: "instance", title: "Instance", sort: (row) => `${row.instance}/${tierOrder(row.tier)}`, cell: (row) => instanceLink(row.instance) },
          { name: "tier", title: "Tier", sort: (row) => row.tier, cell: (row) => row.tier },
          { name: "chunks", title: "Chunks", number: true, sort: (row) => row.keys, cell: (row) => exact(row.keys) },
          { name: "bytes", title: "Bytes", wide: true, sort: (row) => row.used_bytes, cell: (row) => usage(row.used_bytes, row.capacity_bytes) },
        ] })),
    ];
  },
};
