// The gateway's state, asked for again and again. States of the connection: connecting, live, lost. `sinceMs` is the time when
// the state began; for lost, the time of the last answer, which the page goes on showing.

import { get } from "./api.js";
import { announce } from "./dom.js";
import { withRanks } from "./model.js";

const ASK_MS = 2_000;
const ANSWER_MS = 10_000;
const RECENT_MS = 60_000;

export const live = {
  connection: { state: "connecting", sinceMs: Date.now() },
  status: null, // of /gateway/status
  engines: null, // its rows, with what is heard of each as `heard`
  decisions: [], // of /gateway/decisions, newest first
  known: () => live.status !== null,
};

const seen = []; // [{ms, slo}], oldest first: the counts a minute ago and since then
let heardMs = Date.now();

function connection(state, sinceMs = Date.now()) {
  const before = live.connection.state;
  if (before === state) return;
  live.connection = { state, sinceMs };
  if (state === "lost") announce("The connection to the gateway is lost.");
  else if (before === "lost") announce("The connection to the gateway is back.");
}

export const sloKey = ({ tenant, slo }) => `${tenant}\n${slo}`;

function remember({ slo }) {
  const now = Date.now();
  const counts = new Map(slo.map((row) => [sloKey(row), row]));
  const last = seen.at(-1);
  // Smaller counts than before are those of another run of the gateway.
  if (last && [...last.counts].some(([key, row]) => (counts.get(key)?.requests ?? 0) < row.requests)) seen.length = 0;
  seen.push({ ms: now, counts });
  while (seen.length > 1 && seen[1].ms <= now - RECENT_MS) seen.shift();
}

/** Requests of a tenant and class in the last minute that this page has seen: {requests, met}. */
export function recent(row) {
  const before = seen[0]?.counts.get(sloKey(row)) ?? { requests: 0, met: 0 };
  const since = seen.length > 1 ? before : row;
  return { requests: row.requests - since.requests, met: row.met - since.met };
}

/** The rows of a new answer; a row whose values have not changed stays the same object. */
function same(before, rows, key) {
  const known = new Map((before ?? []).map((row) => [key(row), row]));
  return rows.map((row) => {
    const old = known.get(key(row));
    return old && JSON.stringify(old) === JSON.stringify(row) ? old : row;
  });
}

async function ask() {
  const [status, { decisions }] = await Promise.all([
    get("/gateway/status", { timeoutMs: ANSWER_MS }), get("/gateway/decisions", { timeoutMs: ANSWER_MS }),
  ]);
  heardMs = Date.now();
  live.status = status;
  live.engines = same(live.engines, status.engines.map((one) => withRanks(one, status.kv_events)), ({ name }) => name);
  live.decisions = same(live.decisions, decisions, ({ number }) => number);
  remember(status);
}

/** Follows the gateway for as long as the page lives; calls `onChange` after each answer. */
export async function listen(onChange) {
  for (;;) {
    try {
      await ask();
      connection("live");
    } catch (error) {
      if (!("status" in error)) console.warn(error);
      connection("lost", heardMs);
    }
    onChange();
    await new Promise((resolve) => setTimeout(resolve, ASK_MS));
  }
}
