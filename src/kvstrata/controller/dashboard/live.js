// The live state of the cluster, asked for every two seconds.
//
// States of the connection: connecting, live, lost. `sinceMs` is the time when the state began; for lost, the time of the
// last answer, whose state the page goes on showing.

import { get } from "./api.js";
import { announce } from "./dom.js";
import { named, words } from "./format.js";
import { factsText, remember } from "./model.js";

const ANSWER_MS = 4_000;
const POLL_MS = 2_000;
const RETRY_MS = 1_000;
export const MAX_EVENTS = 1_000;
const TOLD = new Set(["joined", "left", "died", "removed", "superseded", "came_back", "directory_full"]);

export const live = {
  connection: { state: "connecting", sinceMs: Date.now() },
  cluster: null,
  instances: null, // rows in the order of their ids
  removed: [],
  events: [],
  /** The present time by the controller's clock; while the connection is lost, the time of the last message. */
  nowMs: () => live.cluster.unix_ms + (live.connection.state === "lost" ? 0 : Date.now() - heardMs),
};
let changed = () => {};
let lastCursor = null;
let heardMs = Date.now();

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function connection(state, sinceMs = Date.now()) {
  const before = live.connection.state;
  if (before === state) return;
  live.connection = { state, sinceMs };
  if (state === "lost") announce("The connection to the controller is lost.");
  else if (before === "lost") announce("The connection to the controller is back.");
  changed();
}

/** Takes over a state. */
async function tell({ cluster, instances, removed }) {
  const restarted = live.cluster !== null && live.cluster.epoch !== cluster.epoch;
  if (restarted) lastCursor = null; // another run of the controller numbers its events anew
  live.cluster = cluster;
  for (const one of instances) {
    // To the second, so that the times of an instance that was not heard stay the same.
    const at = (ago) => Math.round(cluster.unix_ms / 1000 - ago) * 1000;
    [one.heard_unix_ms, one.joined_unix_ms] = [at(one.heard_ago_s), at(one.joined_ago_s)];
    if (one.following.last_ended_ago_s !== null) one.following.last_ended_unix_ms = at(one.following.last_ended_ago_s);
  }
  live.instances = instances;
  live.removed = removed;
  remember(live.instances, live.nowMs());
  if (lastCursor === null || cluster.last_event > lastCursor) await catchUp();
}

function tellEvents(events, aloud) {
  const fresh = events.filter((event) => lastCursor === null || event.number > lastCursor);
  if (!fresh.length) return;
  lastCursor = fresh.at(-1).number;
  for (const event of fresh) event.message = factsText(event.facts, named, words);
  live.events = [...live.events, ...fresh].slice(-MAX_EVENTS);
  if (aloud) for (const event of fresh.slice(-3)) if (TOLD.has(event.kind)) announce(`${event.instance} ${event.kind.replaceAll("_", " ")}`);
}

async function catchUp() {
  const aloud = lastCursor !== null;
  const { events, next_after: cursor } = await get(aloud ? `/v1/events?after=${lastCursor}&limit=${MAX_EVENTS}` : "/v1/events?limit=200");
  tellEvents(events, aloud);
  lastCursor = Math.max(lastCursor ?? 0, cursor);
}

/** Follows the controller for as long as the page lives; calls `onChange` after each answer. */
export async function listen(onChange) {
  changed = onChange;
  for (;;) {
    try {
      const state = await get("/v1/state", { timeoutMs: ANSWER_MS });
      heardMs = Date.now();
      await tell(state);
      connection("live");
      changed();
      await pause(POLL_MS);
    } catch (error) {
      if (!("status" in error) && error.name !== "TimeoutError") console.warn(error);
      connection("lost", heardMs);
      await pause(RETRY_MS);
    }
  }
}
