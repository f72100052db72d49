// What the controller tells by itself: one stream, and where a proxy swallows streams, questions every two seconds.
//
// States of the connection: connecting, live (the stream), polling, lost. `sinceMs` is when the state began, for lost: when the
// controller was heard last; what is shown then is what was known then.

import { get, open } from "./api.js";
import { announce } from "./dom.js";
import { named, words } from "./format.js";
import { factsText, remember } from "./model.js";

const SILENCE_MS = 6_000; // the stream tells something every second
const ANSWER_MS = 4_000;
const POLL_MS = 2_000;
const STREAM_AGAIN_MS = 30_000;
const RETRY_MS = 1_000;
export const MAX_EVENTS = 1_000;
const TOLD = new Set(["joined", "left", "died", "removed", "superseded", "came_back", "directory_full"]);

export const live = {
  connection: { state: "connecting", sinceMs: Date.now() },
  cluster: null,
  instances: null,
  removed: [],
  events: [],
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

function tellCluster(document) {
  if (live.cluster && live.cluster.epoch !== document.epoch) {
    lastCursor = null; // another run of the controller counts its events anew
  }
  live.cluster = document;
}

function tellInstances(document) {
  live.instances = document.instances;
  live.removed = document.removed;
  remember(live.instances, Date.now());
}

function tellEvents(document, aloud) {
  const fresh = document.events.filter((event) => lastCursor === null || event.number > lastCursor);
  lastCursor = Math.max(lastCursor ?? 0, document.next_after);
  if (!fresh.length) return;
  for (const event of fresh) event.message = factsText(event.facts, named, words);
  live.events = [...live.events, ...fresh].slice(-MAX_EVENTS);
  if (aloud) for (const event of fresh.slice(-3)) if (TOLD.has(event.kind)) announce(`${event.instance} ${event.kind.replaceAll("_", " ")}`);
}

async function catchUp() {
  const aloud = lastCursor !== null;
  tellEvents(await get(lastCursor === null ? "/v1/events?limit=200" : `/v1/events?after=${lastCursor}&limit=200`), aloud);
}

/** Reads the stream until it ends. Returns whether anything came. */
async function stream() {
  const abort = new AbortController();
  let watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
  let came = false;
  try {
    const response = await open("GET", "/v1/live", { signal: abort.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return came;
      heardMs = Date.now();
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let kind = "";
        let data = "";
        for (const line of block.split("\n")) {
          if (line.startsWith("event:")) kind = line.slice(6).trim();
          else if (line.startsWith("data:")) data += line.slice(5).trim();
        }
        if (!data) continue;
        const document = JSON.parse(data);
        if (kind === "cluster") {
          const restarted = live.cluster && live.cluster.epoch !== document.epoch;
          tellCluster(document);
          if (!came || restarted) await catchUp();
        } else if (kind === "instances") tellInstances(document);
        else if (kind === "events") tellEvents(document, true);
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
  const [cluster, instances] = await Promise.all([
    get("/v1/cluster", { timeoutMs: ANSWER_MS }),
    get("/v1/instances", { timeoutMs: ANSWER_MS }),
  ]);
  heardMs = Date.now();
  tellCluster(cluster);
  tellInstances(instances);
  await catchUp();
}

/** Listens for ever; calls `onChange` after each change. */
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
