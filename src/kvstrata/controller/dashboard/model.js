// Reads the API's documents for the pages.

/** The state of an instance in one word. */
export function stateOf(one) {
  if (one.state === "dead") return "dead";
  if (one.state === "restored") return "restored";
  if (one.reported_state === "stopping" || one.reported_state === "frozen") return one.reported_state;
  if (one.draining) return "draining";
  if (one.late) return "late";
  if (one.following.state === "listing") return "listing";
  return one.confirmed ? "ready" : "unconfirmed";
}

/** Sort key of tiers: L1 comes first. */
export const tierOrder = (tier) => (tier === "l1" ? "" : tier);

/** The tiers of an instance: [{tier, keys, used_bytes, capacity_bytes}]. */
export function tiersOf(one) {
  return one.tiers.map((tier) => ({
    tier, keys: one.keys[tier] ?? 0, used_bytes: one.used_bytes[tier] ?? 0, capacity_bytes: one.capacity_bytes[tier] ?? 0,
  }));
}

export const sum = (numbers) => Object.values(numbers).reduce((all, value) => all + value, 0);

/** Share of chunks that were found, from counts by source; null if all counts are 0. */
export function hitShare(counts) {
  const all = sum(counts);
  return all > 0 ? (all - (counts.miss ?? 0)) / all : null;
}

const RECENT_MS = 60_000;
const RECENT_STEP_MS = 1_000;
const seen = new Map(); // incarnation → [{ms, counts}]: its counts a minute ago and since then

/** Remembers the counts of instances, for `recentHits`. */
export function remember(instances, nowMs) {
  const there = new Set();
  for (const { incarnation, hits_total: counts } of instances) {
    there.add(incarnation);
    const told = seen.get(incarnation);
    const last = told?.at(-1);
    if (!told) seen.set(incarnation, [{ ms: nowMs, counts }]);
    else if (nowMs - last.ms >= RECENT_STEP_MS) told.push({ ms: nowMs, counts });
    while (told?.length > 1 && told[1].ms <= nowMs - RECENT_MS) told.shift();
  }
  for (const incarnation of seen.keys()) if (!there.has(incarnation)) seen.delete(incarnation);
}

/** Share of chunks that were found in the last minute that this page has seen; null without lookups. */
export function recentHits({ incarnation, hits_total: counts }) {
  const first = seen.get(incarnation)?.[0].counts ?? {};
  let all = 0;
  for (const [name, value] of Object.entries(counts)) all += value - (first[name] ?? 0);
  return all > 0 ? (all - ((counts.miss ?? 0) - (first.miss ?? 0))) / all : null;
}

/** The facts of an event as text, such as "tags l1 400; took 52 ms". */
export function factsText(facts, named, words) {
  return Object.entries(facts).filter(([, value]) => value !== "" && value !== null).map(([name, value]) => {
    if (name === "ok") return value ? "done" : "failed";
    if (name === "reason" || name === "message") return String(value);
    const text = value !== null && typeof value === "object" && !Array.isArray(value)
      ? Object.entries(value).map(([key, each]) => `${key} ${named(key, each)}`).join(", ") : named(name, value);
    return `${words(name).toLowerCase()} ${text}`;
  }).join("; ");
}
