// Chunks and bytes by tier, over all instances and of each instance.

import { h } from "../dom.js";
import { count, exact } from "../format.js";
import { tierOrder, tiersOf } from "../model.js";
import { instanceLink, noInstances } from "../instance_parts.js";
import { usage } from "../parts.js";
import { table } from "../table.js";

let of = null; // the instances from which `told` was made
let told = null;

/** {sums, rows}: tiers over all instances that are not dead, and the tiers of each instance. */
function tiersIn(instances) {
  if (of === instances) return told;
  const sums = new Map();
  const rows = [];
  for (const one of instances) {
    if (one.state === "dead") continue;
    for (const tier of tiersOf(one)) {
      rows.push({ ...tier, instance: one.id, name: `${one.id}/${tier.tier}` });
      if (!sums.has(tier.tier)) sums.set(tier.tier, { tier: tier.tier, instances: 0, keys: 0, used_bytes: 0, capacity_bytes: 0 });
      const sum = sums.get(tier.tier);
      sum.instances += 1;
      for (const name of ["keys", "used_bytes", "capacity_bytes"]) sum[name] += tier[name];
    }
  }
  of = instances;
  told = { rows, sums: [...sums.values()] };
  return told;
}

const numbers = (tier) => [tier.instances, tier.keys, tier.used_bytes, tier.capacity_bytes];

export const tiersPage = {
  title: () => "Tiers",
  view({ live, redraw }) {
    const heading = h("h1", {}, "Tiers");
    if (!live.instances) return [heading, h("p", { class: "quiet" }, "Asking the controller …")];
    if (live.instances.length === 0) return [heading, noInstances(live.cluster)];
    const { sums, rows } = tiersIn(live.instances);
    return [
      heading,
      h("p", { class: "quiet" }, "L1 is shared memory, which peers can read; the other tiers each belong to the instance that reports them."),
      table({ id: "tiers", caption: "Tiers of the cluster", rows: sums, key: (tier) => tier.tier, deps: numbers, prefix: "all.", redraw, columns: [
        { name: "tier", title: "Tier", sort: (tier) => tierOrder(tier.tier), cell: (tier) => tier.tier },
        { name: "instances", title: "Instances", number: true, sort: (tier) => tier.instances, cell: (tier) => count(tier.instances) },
        { name: "chunks", title: "Chunks", number: true, sort: (tier) => tier.keys, cell: (tier) => exact(tier.keys) },
        { name: "bytes", title: "Bytes", number: false, wide: true, sort: (tier) => tier.used_bytes, cell: (tier) => usage(tier.used_bytes, tier.capacity_bytes) },
      ] }),
      h("section", { key: "each" }, h("h2", {}, "By instance"), table({
        id: "tiers-each", caption: "Tiers of each instance", rows, key: (row) => row.name, text: (row) => `${row.instance} ${row.tier}`, first: "instance", prefix: "", filter: true, redraw, columns: [
          { name: "instance", title: "Instance", sort: (row) => `${row.instance}/${tierOrder(row.tier)}`, shows: () => [], cell: (row) => instanceLink(row.instance) },
          { name: "tier", title: "Tier", sort: (row) => row.tier, shows: () => [], cell: (row) => row.tier },
          { name: "chunks", title: "Chunks", number: true, sort: (row) => row.keys, shows: (row) => [row.keys], cell: (row) => exact(row.keys) },
          { name: "bytes", title: "Bytes", wide: true, sort: (row) => row.used_bytes, shows: (row) => [row.used_bytes, row.capacity_bytes], cell: (row) => usage(row.used_bytes, row.capacity_bytes) },
        ] })),
    ];
  },
};
