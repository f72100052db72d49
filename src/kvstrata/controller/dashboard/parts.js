// Parts that pages share: tables, states of instances, bars, facts, tiles, lines for a shell, and the actions on an instance.

import { send } from "./api.js";
import { confirm } from "./dialog.js";
import { h, toast } from "./dom.js";
import { bytes, count, percent } from "./format.js";

const STATES = {
  ready: ["good", "Serves requests and answers the controller."],
  listing: ["busy", "Its chunks are being listed; lookups use the previous list until this one is complete."],
  late: ["warn", "Has not answered for a while; if it stays silent, the directory drops its chunks."],
  frozen: ["busy", "Stores nothing new, as ordered, for at most a minute."],
  draining: ["calm", "Serves its own engines; sends nothing to peers."],
  stopping: ["calm", "Is shutting down."],
  unconfirmed: ["warn", "The directory's list of its chunks may be wrong until it is up to date again."],
  restored: ["warn", "Known from before the controller's restart; has not registered since."],
  dead: ["bad", "No answer for longer than the timeout; the directory has dropped its chunks."],
};

/** The state of an instance in one word. */
export function stateOf(one) {
  if (one.state === "dead" || one.state === "restored") return one.state;
  if (one.reported_state === "stopping" || one.reported_state === "frozen") return one.reported_state;
  if (one.draining) return "draining";
  if (one.late) return "late";
  if (one.following.state === "listing") return "listing";
  return one.confirmed ? "ready" : "unconfirmed";
}

/** A state in one word; its mark's shape and colour tell its tone. */
export function state(name) {
  const [tone, note] = STATES[name];
  return h("span", { class: `state ${tone}`, title: note }, h("i", { "aria-hidden": "true" }), name);
}

export function followText({ state: instanceState, following }) {
  if (instanceState === "dead") return "dropped";
  if (following.state === "listing" || following.state === "wanted") return `being listed: ${following.listed_because}`;
  return { exact: "up to date", behind: "catching up", none: "waiting for registration" }[following.state];
}

export const sum = (numbers) => Object.values(numbers).reduce((all, value) => all + value, 0);

/** Share of chunks that were found, from counts by source; null if all counts are 0. */
export function hitShare(counts) {
  const all = sum(counts);
  return all > 0 ? (all - (counts.miss ?? 0)) / all : null;
}

export const instancePath = (id) => `/v1/instances/${encodeURIComponent(id)}`;

export function instanceLink(id) {
  return h("a", { href: `#/instances/${encodeURIComponent(id)}` }, id);
}

/** A table of `columns` [title, cell(row) → content, "number"?]; `key(row)` names a row, `caption` is for screen readers. */
export function table(caption, columns, rows, key) {
  return h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": caption }, h("table", {},
    h("caption", { class: "unseen" }, caption),
    h("thead", {}, h("tr", {}, columns.map(([title, , kind]) => h("th", { scope: "col", class: kind }, title)))),
    h("tbody", {}, rows.map((row) => h("tr", { key: key(row) }, columns.map(([title, cell, kind], index) => h(index ? "td" : "th", {
      scope: index ? null : "row", class: kind, "data-title": title,
    }, cell(row))))))));
}

/** A share of a whole, as a bar with its text beside it. */
export function usage(used, capacity) {
  if (!used && !capacity) return h("span", { class: "quiet" }, "not reported");
  const share = capacity > 0 ? Math.min(1, used / capacity) : 0;
  return h("div", { class: "usage" },
    h("svg", { class: "meter", "aria-hidden": "true", preserveAspectRatio: "none", viewBox: "0 0 100 4" },
      h("rect", { class: "whole", width: 100, height: 4 }), h("rect", { class: "part", width: (share * 100).toFixed(2), height: 4 })),
    h("span", {}, bytes(used), capacity > 0 && h("span", { class: "quiet" }, ` of ${bytes(capacity)} · ${percent(share)}`)));
}

export function section(title, ...content) {
  return h("section", { key: title }, h("h2", {}, title), content);
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => h("div", { key: name }, h("dt", {}, name), h("dd", {}, value ?? "–"))));
}

export function tile(name, value, note, tone = "") {
  return h("div", { class: `tile ${tone}`, key: name }, h("dt", {}, name), h("dd", {}, h("b", {}, value), h("span", {}, note)));
}

export function failure(error, what) {
  return h("div", { class: "wrong", role: "alert", key: "failure" }, h("strong", {}, what), " ", error.message);
}

export function noInstances(cluster) {
  const host = location.hostname.replace(/^\[|\]$/g, "");
  const address = `${host.includes(":") ? `[${host}]` : host}:${cluster.monitor_ports.reply}`;
  return h("section", { class: "empty", key: "empty" }, h("h2", {}, "No instance has registered yet"),
    h("p", {}, "Start a cache server with this controller's address on each host that runs engines. It appears here within a second."),
    h("p", {}, h("code", { class: "break" }, `lmcache-server --controller-url tcp://${address}`)),
    h("p", { class: "quiet" }, "Instead of the flag, you can set ", h("code", {}, "controller.url"), ". Across machines, both sides need keys; see docs/cluster.md."));
}

/** The leader's name, as a link to its dashboard: only the leader takes orders. */
export function leaderLink({ leader, leader_url: url }) {
  return /^https?:\/\//.test(url) ? h("a", { href: url }, leader) : leader;
}

export function follower(cluster) {
  if (cluster.election.leads) return null;
  return h("p", { class: "note", key: "follower" }, "This controller is not the leader, so it takes no orders. ",
    cluster.election.leader ? ["Use ", leaderLink(cluster.election), "."] : "There is no leader at the moment.");
}

/** Orders something about an instance, and shows how it ended, or that it has not ended. */
export async function order(id, method, what, done) {
  try {
    const answer = await send(method, `${instancePath(id)}${what && `/${what}`}`, method === "POST" ? {} : undefined);
    const failed = (answer.commands ?? []).filter(({ state: end }) => end === "failed");
    for (const { message } of failed) toast(`${id}: ${message}`, "bad");
    if (answer.done === false) toast(`${id} has not answered yet; the events will show the outcome.`);
    else if (!failed.length) toast(done);
  } catch (error) {
    toast(`${id}: ${error.message}`, "bad");
  }
}

async function drain(id, on) {
  const sure = await confirm(on ? {
    title: `Drain ${id}?`,
    paragraphs: ["It sends nothing more to peers, which read its chunks elsewhere or compute them. Its own engines are not affected.", "It stays drained until you end the drain here."],
    action: "Drain",
  } : {
    title: `Let ${id} serve peers again?`, paragraphs: ["Peers may read its chunks from now on."], action: "End draining",
  });
  if (sure) await order(id, "POST", on ? "drain" : "undrain", on ? `${id} is draining.` : `${id} serves peers again.`);
}

async function remove({ id, state: now, keys }) {
  const sure = await confirm({
    title: `Remove ${id}?`,
    paragraphs: [
      `The directory drops its ${count(sum(keys))} chunks at once, and directs no peer to it any more. The instance keeps the chunks themselves.`,
      now === "dead" ? "It rejoins when its server is started again." : "It continues to serve its own engines, and cannot rejoin until you allow it here.",
    ],
    action: "Remove", danger: true,
  });
  if (sure) await order(id, "DELETE", "", `${id} was removed.`);
}

function action(name, id, onclick, kind) {
  return h("button", { class: kind, onclick }, name, h("span", { class: "unseen" }, ` ${id}`));
}

export function actions(one) {
  const { id, draining } = one;
  const here = one.state === "live" && one.reported_state !== "stopping";
  return h("div", { class: "actions" },
    here && action(draining ? "End draining" : "Drain", id, () => drain(id, !draining)),
    here && action("List again", id, () => order(id, "POST", "resync", `${id} lists its chunks again.`)),
    action("Remove", id, () => remove(one), "quiet-danger"));
}

export function allowAction(id) {
  return action("Allow", id, () => order(id, "POST", "allow", `${id} may rejoin.`));
}
