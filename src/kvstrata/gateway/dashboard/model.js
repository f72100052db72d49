// Reads the gateway's documents for the pages.

/** The state of an engine: [word, tone, note]. */
export function engineState({ state, reason, share }) {
  if (state === "down") return ["down", "bad", reason];
  if (state === "new") return ["new", "busy", reason];
  if (state === "leaving") return ["leaving", "calm", reason];
  return share < 1 ? ["returning", "busy", `It has ${(share * 100).toFixed(0)} % of its usual share of requests, which grows.`] : ["up", "good", ""];
}

/** What is heard of an engine's cache: [word, tone, note]. */
export function heardState(heard, thread) {
  if (!heard) return ["not heard", "calm", "Its KV events are not listened to: it publishes none, or the policy needs none."];
  if (!thread.hears) return ["ended", "bad", `The thread that hears KV events has ended: ${thread.error || "no reason is known"}`];
  if (heard.connected === false) return ["unreachable", "warn", "There is no connection to its publisher."];
  if (heard.phase === "joining") return ["joining", "busy", "Everything that its publisher has kept is being asked for."];
  if (heard.phase === "asking") return ["asking", "busy", "Lost batches are being asked for again."];
  if (heard.whole) return ["exact", "good", "Every event of the engine's life was heard."];
  if (heard.gaps > 0) return ["with gaps", "warn", "Batches were lost for good; what was known before counts less with age."];
  return ["in order", "good", "Batches come in order; the first ones of the engine's life were not heard."];
}

const sumsOf = (rows) => rows.reduce((all, row) => {
  for (const [tier, number] of Object.entries(row)) all[tier] = (all[tier] ?? 0) + number;
  return all;
}, {});

/** What is heard of all ranks of an engine together: as well as of the one that is heard worst. null: of none. */
function together(ranks) {
  const heard = ranks.map((one) => one.heard);
  const known = heard.filter((one) => one);
  if (!known.length) return null;
  const sum = (of) => known.reduce((all, one) => all + of(one), 0);
  const most = (of) => known.reduce((all, one) => Math.max(all, of(one)), 0);
  const sizes = (tier) => [...new Set(known.flatMap((one) => one.block_tokens[tier] ?? []))];
  return {
    connected: heard.every((one) => one && one.connected !== false),
    phase: ["joining", "asking"].find((phase) => known.some((one) => one.phase === phase)) ?? "in_order",
    whole: known.every((one) => one.whole),
    doubtful: known.some((one) => one.doubtful),
    blocks: sumsOf(known.map((one) => one.blocks)),
    block_tokens: Object.fromEntries(Object.keys(known[0].block_tokens).map((tier) => [tier, sizes(tier)])),
    batches: sum((one) => one.batches),
    gaps: sum((one) => one.gaps),
    restarts: sum((one) => one.restarts),
    malformed: sum((one) => one.malformed),
    orphans: sum((one) => one.orphans),
    block_life_s: most((one) => one.block_life_s),
    event_lag_s: most((one) => one.event_lag_s),
  };
}

/** A row of the status with what is heard of the engine, and the same of its ranks, each a row like one of an engine. */
export function withRanks(one, heard) {
  const { state, reason, share, models } = one;
  const ranks = one.ranks.map((rank) => ({ ...rank, state, reason, share, models, heard: heard[rank.name] ?? null, ranks: [] }));
  return { ...one, ranks, heard: ranks.length ? together(ranks) : heard[one.name] ?? null };
}

/** Tokens that an engine is known to hold in a tier; null if they cannot be told from its blocks. */
export function tierTokens(heard, tier) {
  const sizes = heard?.block_tokens[tier];
  return sizes?.length === 1 ? heard.blocks[tier] * sizes[0] : heard && heard.blocks[tier] === 0 ? 0 : null;
}

/** The counts of all tenants and classes together: {requests, met}. */
export function total(rows) {
  return rows.reduce((all, { requests, met }) => ({ requests: all.requests + requests, met: all.met + met }), { requests: 0, met: 0 });
}

/** Share of the requests that met their class; null without requests. */
export const goodput = ({ requests, met }) => (requests > 0 ? met / requests : null);

const REASONS = {
  lowest_cost: "lowest cost",
  near_tie: "tie, by hash",
  drawn: "drawn",
  only_eligible: "the only one",
  none_eligible: "none was eligible",
};

export const reasonText = (reason) => REASONS[reason] ?? reason;

/** The address of the page of a decision. */
export const decisionLink = ({ request, number }) => `#/routing/${encodeURIComponent(request)}?number=${number}`;

export const engineLink = (name) => `#/engines/${encodeURIComponent(name)}`;
