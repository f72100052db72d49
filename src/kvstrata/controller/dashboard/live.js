// The live state of the cluster, from one stream of changes; if a proxy holds streams back, the page asks for the same
// changes every two seconds.
//
// States of the connection: connecting, live (the stream), polling, lost. `sinceMs` is the time when the state began; for
// lost, the time of the last message, whose state the page goes on showing.

import { get, open } from "./api.js";
import { announce } from "./dom.js";
import { named, words } from "./format.js";
import { NOTHING, applied, factsText, remember } from "./model.js";

const SILENCE_MS = 6_000; // the stream sends something every second
const ANSWER_MS = 4_000;
const POLL_MS = 2_000;
const STREAM_AGAIN_MS = 30_000;
const RETRY_MS = 1_000;
export const MAX_EVENTS = 1_000;
const TOLD = new Set(["joined", "left", "died", "removed", "superseded", "came_back", "directory_full"]);

export const live = {
  connection: { state: "connecting", sinceMs: Date.now() },
  cluster: null,
  instances: null, // rows in the order of their ids; a changed row is another object
  removed: [],
  events: [],
  known: () => live.cluster !== null,
  /** The present time by the controller's clock; while the connection is lost, the time of the last message. */
  nowMs: () => live.cluster.unix_ms + (live.connection.state === "lost" ? 0 : Date.now() - heardMs),
};
let changed = () => {};
let known = NOTHING;
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

/** Applies a change. Returns false if it does not follow the known state; then the whole state is needed. */
async function tell(change) {
  const next = applied(known, change);
  if (next === null) {
    known = NOTHING;
    return false;
  }
  if (live.cluster && live.cluster.epoch !== next.cluster.epoch) lastCursor = null; // another run of the controller numbers its events anew
  known = next;
  live.cluster = next.cluster;
  live.instances = [...next.instances.values()];
  live.removed = next.removed;
  remember(live.instances, live.nowMs());
  // A whole state has no events, and a change has only the newest ones: fetch the others.
  if (change.after === null || lastCursor === null || change.events[0]?.number > lastCursor + 1) await catchUp();
  else tellEvents(change.events, true);
  return true;
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

/** Reads the stream until it ends. Returns whether a change arrived. */
async function stream() {
  const abort = new AbortController();
  let watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
  let came = false;
  try {
    const response = await open("GET", `/v1/live?after=${known.look}`, { signal: abort.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return came;
      heardMs = Date.now();
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
      let searched = Math.max(0, rest.length - 1);
      rest += value;
      for (let end; (end = rest.indexOf("\n\n", searched)) >= 0; searched = 0) {
        const data = rest.slice(0, end).split("\n").find((line) => line.startsWith("data: "));
        rest = rest.slice(end + 2);
        if (!data) continue;
        if (!await tell(JSON.parse(data.slice(6)))) return came;
        came = true;
        connection("live");
        changed();
      }
    }
  } catch (error) {
    if (error.name !== "AbortError" && !("status" in error) && !(error instanceof TypeError)) console.warn(error);
    return came;
  } finally {
    clearTimeout(watchdog);
    abort.abort();
  }
}

async function poll() {
  const { changes } = await get(`/v1/changes?after=${known.look}`, { timeoutMs: ANSWER_MS });
  heardMs = Date.now();
  for (const change of changes) if (!await tell(change)) return;
}

/** Follows the controller for as long as the page lives; calls `onChange` after each change. */
export async function listen(onChange) {
  changed = onChange;
  let streamAt = 0;
  for (;;) {
    try {
      await poll();
    } catch {
      connection("lost", heardMs);
      streamAt = 0;
      await pause(RETRY_MS);
      continue;
    }
    if (Date.now() < streamAt) {
      connection("polling");
      changed();
      await pause(POLL_MS);
      continue;
    }
    changed();
    streamAt = (await stream()) ? 0 : Date.now() + STREAM_AGAIN_MS;
    await pause(RETRY_MS / 4);
  }
}
