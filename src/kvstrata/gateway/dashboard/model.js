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
