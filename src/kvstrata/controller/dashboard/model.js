// What the API's documents say, in the words of the pages.

/** One word for how an instance is. */
export function stateOf(one) {
  if (one.state === "dead") return "dead";
  if (one.state === "restored") return "restored";
  if (one.reported_state === "stopping" || one.reported_state === "frozen") return one.reported_state;
  if (one.draining) return "draining";
  if (one.sync.state === "running" || one.reported_state === "syncing") return "syncing";
  return one.confirmed ? "ready" : "unconfirmed";
}

/** L1 comes before all others. */
export const tierOrder = (tier) => (tier === "l1" ? "" : tier);

/** Its tiers: [{tier, keys, used_bytes, capacity_bytes}]. */
export function tiersOf(one) {
  return one.tiers.map((tier) => ({
    tier, keys: one.keys[tier] ?? 0, used_bytes: one.used_bytes[tier] ?? 0, capacity_bytes: one.capacity_bytes[tier] ?? 0,
  }));
}

export const sum = (numbers) => Object.values(numbers).reduce((all, value) => all + value, 0);

/** Share of chunks found, of counts by source; null when there are none. */
export function hitShare(counts) {
  const all = sum(counts);
  return all > 0 ? (all - (counts.miss ?? 0)) / all : null;
}

const RECENT_MS = 60_000;
const seen = new Map(); // incarnation → [{ms, counts}], of the last minute

/** Remembers what instances have counted, for `recentHits`. */
export function remember(instances, nowMs) {
  const there = new Set();
  for (const one of instances) {
    there.add(one.incarnation);
    const before = seen.get(one.incarnation) ?? [];
    const late = before.findLastIndex(({ ms }) => ms <= nowMs - RECENT_MS);
    seen.set(one.incarnation, [...before.slice(Math.max(0, late)), { ms: nowMs, counts: one.hits_total }]);
  }
  for (const incarnation of seen.keys()) if (!there.has(incarnation)) seen.delete(incarnation);
}

/** Share of chunks found in the last minute that this page has seen; null when nobody asked. */
export function recentHits(one) {
  const first = seen.get(one.incarnation)?.[0].counts ?? {};
  return hitShare(Object.fromEntries(Object.entries(one.hits_total).map(([name, value]) => [name, value - (first[name] ?? 0)])));
}

/** "synced: tags l1 400, took 52 ms" without the kind. */
export function factsText(facts, named, words) {
  return Object.entries(facts).filter(([, value]) => value !== "" && value !== null).map(([name, value]) => {
    if (name === "ok") return value ? "done" : "failed";
    if (name === "reason" || name === "message") return String(value);
    const text = value !== null && typeof value === "object" && !Array.isArray(value)
      ? Object.entries(value).map(([key, each]) => `${key} ${named(key, each)}`).join(", ") : named(name, value);
    return `${words(name).toLowerCase()} ${text}`;
  }).join("; ");
}
