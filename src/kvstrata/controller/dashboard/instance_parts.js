// What several pages show of instances: states, links, empty places, actions.

import { send } from "./api.js";
import { instancePath, outcomes } from "./commands.js";
import { confirm } from "./dialog.js";
import { h, toast } from "./dom.js";
import { count } from "./format.js";
import { live } from "./live.js";
import { sum } from "./model.js";
import { line, mark } from "./parts.js";

const STATES = {
  ready: ["good", "Serves and answers."],
  listing: ["busy", "Its chunks are listed; lookups use the previous knowledge until the list ends."],
  late: ["warn", "Has not answered for a while; its chunks are forgotten if it stays silent."],
  frozen: ["busy", "Stores nothing new, as ordered, for a minute at most."],
  draining: ["calm", "Serves its own engines; leases nothing to peers."],
  stopping: ["calm", "Is about to leave."],
  unconfirmed: ["warn", "The directory's knowledge of its chunks may be wrong until it is in step again."],
  restored: ["warn", "Known from before the controller's restart; it has not registered since."],
  dead: ["bad", "No answer for longer than the timeout; its chunks are forgotten."],
};

export function state(name) {
  const [tone, note] = STATES[name] ?? ["calm", ""];
  return mark(name, tone, note);
}

export function startLine(cluster) {
  const port = cluster?.monitor_ports.reply ?? 8400;
  const host = location.hostname.replace(/^\[|\]$/g, "");
  const address = host.includes(":") ? `[${host}]` : host;
  return `lmcache-server --controller-url tcp://${address}:${port}`;
}

export function noInstances(cluster) {
  return h("section", { class: "empty", key: "empty" }, h("h2", {}, "No instance has registered yet"),
    h("p", {}, "Start a cache server on each host that runs engines, and tell it where this controller is. It appears here within a second."),
    line(startLine(cluster)),
    h("p", { class: "quiet" }, "A server that runs already takes ", h("code", {}, "controller.url"), " in its settings file. Between machines both sides need keys; see docs/operations.md."));
}

/** The leader's name, as a link to its dashboard: only the leader takes orders. */
export function leaderLink({ leader, leader_url: url }) {
  return /^https?:\/\//.test(url) ? h("a", { href: url }, leader) : leader;
}

export function follower(cluster) {
  if (!cluster || cluster.election.leads) return null;
  return h("p", { class: "note", key: "follower" }, "This controller does not lead, so it takes no orders. ",
    cluster.election.leader ? ["Give them to ", leaderLink(cluster.election), "."] : "No controller leads at the moment.");
}

export function instanceLink(id) {
  return h("a", { href: `#/instances/${encodeURIComponent(id)}` }, id);
}

export function followText({ state: instanceState, following }) {
  if (instanceState === "dead") return "forgotten";
  if (following.state === "listing" || following.state === "wanted") return `is listed: ${following.listed_because}`;
  return { exact: "in step", behind: "catches up", none: "waits for its registration" }[following.state];
}

export async function drain(id, on) {
  const sure = await confirm(on ? {
    title: `Drain ${id}?`,
    paragraphs: ["Peers get no more leases on its chunks, and read them elsewhere or compute them. Its own engines go on as before.", "It stays drained until somebody ends that here."],
    action: "Drain",
  } : {
    title: `Let ${id} serve peers again?`,
    paragraphs: ["Peers may lease its chunks from now on."],
    action: "End draining",
  });
  if (sure) await command(id, on ? "drain" : "undrain", on ? `${id} is draining.` : `${id} serves peers again.`);
}

/** Commands an instance, and shows the outcome. */
export async function command(id, what, done) {
  try {
    const failed = (await outcomes(await send("POST", `${instancePath(id)}/${what}`, {}))).filter(({ state: end }) => end !== "done");
    for (const { message } of failed) toast(`${id}: ${message || "refused"}`, "bad");
    if (!failed.length) toast(done);
  } catch (error) {
    toast(`${id}: ${error.message}`, "bad");
  }
}

/** Lets a removed instance join again. */
export async function allow(id) {
  try {
    await send("POST", `${instancePath(id)}/allow`);
    toast(`${id} may come back.`);
  } catch (error) {
    toast(`${id}: ${error.message}`, "bad");
  }
}

export async function remove(id) {
  const instance = live.instances.find((one) => one.id === id);
  if (!instance) return;
  const alive = instance.state !== "dead";
  const sure = await confirm({
    title: `Remove ${id}?`,
    paragraphs: [
      `The directory forgets its ${count(sum(instance.keys))} chunks at once, and nobody is sent to it any more. The chunks themselves stay where they are.`,
      alive ? "It goes on alone for its own engines, and is not let in again until somebody allows it here." : "It comes back when its server is started again.",
    ],
    action: "Remove", danger: true,
  });
  if (!sure) return;
  try {
    await send("DELETE", instancePath(id));
    toast(`${id} is removed.`);
  } catch (error) {
    toast(`${id}: ${error.message}`, "bad");
  }
}

export function actions(instance) {
  const { id, draining } = instance;
  const here = instance.state === "live" && instance.reported_state !== "stopping";
  return h("div", { class: "actions" },
    here && h("button", { onclick: () => drain(id, !draining) }, draining ? "End draining" : "Drain", h("span", { class: "unseen" }, ` ${id}`)),
    h("button", { class: "quiet-danger", onclick: () => remove(id) }, "Remove", h("span", { class: "unseen" }, ` ${id}`)));
}
