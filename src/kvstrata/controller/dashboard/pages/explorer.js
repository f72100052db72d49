// Shows where the chunks of a prompt are or why they were missed: by token ids, by keys, or by a request's id.

import { send } from "../api.js";
import { h } from "../dom.js";
import { date, duration, exact, plural } from "../format.js";
import { instanceLink, noInstances } from "../instance_parts.js";
import { facts, failure, poller } from "../parts.js";
import { list } from "../rows.js";
import { table } from "../table.js";

const MODES = [["tokens", "Token ids"], ["keys", "Storage keys"], ["request", "Request id"]];
const MODELS_MS = 10_000;
const REASONS = {
  never_stored: "It was asked for before, and nobody has stored it.",
  evicted: "It was evicted to make room for others.",
  in_flight: "It is being stored or loaded right now.",
  corrupt: "Its bytes failed their checksum, so it was dropped.",
  deadline: "It was not loaded before the deadline of the request.",
  refused: "Its store was refused, for lack of room or because of a limit.",
  put_skipped: "It was not put to L2, and has left L1 since.",
  breaker_open: "The tier that may have it is switched off for a while after failures.",
  identity_differs: "The same tokens are stored under another identity.",
  unknown_key: "No request has named this chunk here before.",
  forgotten: "Too much has happened since; the reason is forgotten.",
  frozen: "It arrived while the instance stored nothing because of a full report.",
};

const form = { mode: "tokens", text: "", request: "", model: "", adapter: "", tenant: "", salt: "" };
let asked = null; // poller for the models of the cluster
let answer = null; // {kind, …} or {error}
let asking = false;
let linked = false; // a link named the request: ask for it once the instances are known
let run = 0;

function wrong(field, message) {
  return Object.assign(new Error(message), { field });
}

/** Token ids from pasted text: numbers between commas, spaces or brackets. */
export function tokensIn(text) {
  const strange = /[^\d\s,[\]]+/.exec(text);
  if (strange) throw wrong("tokens", `token ids are whole numbers, found ${JSON.stringify(strange[0].slice(0, 20))}`);
  const found = (text.match(/\d+/g) ?? []).map(Number);
  if (!found.length) throw wrong("tokens", "give the token ids of a prompt, such as 101, 2023, 2003");
  return found;
}

function keysIn(text) {
  const found = text.split(/[\s,"[\]]+/).filter(Boolean);
  const bad = found.find((key) => !/^[0-9a-fA-F]{64}$/.test(key));
  if (bad !== undefined) throw wrong("keys", `a storage key is 64 hexadecimal digits, found ${JSON.stringify(bad.slice(0, 20))}`);
  if (!found.length) throw wrong("keys", "give at least one storage key");
  return found;
}

function forgotten(id, { answered, unanswered }) {
  const silent = unanswered.length ? `; no answer came from ${unanswered.map(({ instance, why }) => `${instance} (${why})`).join(", ")}` : "";
  return `none of the ${plural(answered.length, "instance")} that answered remembers ${JSON.stringify(id)}${silent}. Each remembers its last 1,024 lookups.`;
}

/** The instances that were asked and have not answered, so that their knowledge is missing. */
function silence({ unanswered }, redraw) {
  if (!unanswered.length) return null;
  return h("section", { class: "panel", key: "silent" }, h("h2", {}, "Without an answer"),
    list({ id: "silent", what: "instances without an answer", rows: unanswered, key: ({ instance }) => instance, text: ({ instance, why }) => `${instance} ${why}`, redraw,
      item: ({ instance, why }) => [instanceLink(instance), `: ${why}`] }));
}

async function ask(redraw) {
  const mine = (run += 1);
  asking = true;
  redraw();
  try {
    let next;
    if (form.mode === "request") {
      const id = form.request.trim();
      if (!id) throw wrong("request id", "give the id of a recent request, as the engine's API returned it");
      const told = await send("POST", "/v1/explain", { request_id: id });
      if (!told.lookups.length) throw wrong("request id", forgotten(id, told));
      next = { kind: "request", id, told };
    } else {
      const body = form.mode === "tokens" ? { tokens: tokensIn(form.text) } : { keys: keysIn(form.text) };
      for (const name of ["model", "adapter", "tenant", "salt"]) if (form[name] && form.mode === "tokens") body[name] = form[name];
      next = { kind: "chunks", told: await send("POST", "/v1/explain", body) };
    }
    if (mine === run) answer = next;
  } catch (error) {
    if (mine === run) answer = { error };
  }
  if (mine !== run) return;
  asking = false;
  redraw();
}

const tone = (tier) => (tier === "l1" ? "tone-l1" : "tone-l2");

const held = new WeakMap(); // answer → its holders

/** For each instance, the chunks that it has whole: runs of the same tier. */
function holders(document) {
  if (held.has(document)) return held.get(document);
  const found = new Map();
  document.chunks.forEach(({ places }, index) => {
    const nearest = new Map();
    for (const place of places) if (!nearest.has(place.instance) || place.tier === "l1") nearest.set(place.instance, place);
    for (const { instance, tier, confirmed } of nearest.values()) {
      const runs = found.get(instance) ?? [];
      const last = runs.at(-1);
      if (last && last.to === index && last.tier === tier && last.confirmed === confirmed) last.to = index + 1;
      else runs.push({ from: index, to: index + 1, tier, confirmed });
      found.set(instance, runs);
    }
  });
  held.set(document, [...found.entries()].sort(([, one], [, other]) => leading(other) - leading(one)));
  return held.get(document);
}

function leading(runs) {
  let next = 0;
  for (const { from, to } of runs) {
    if (from !== next) break;
    next = to;
  }
  return next;
}

function strips(document, redraw) {
  const all = document.chunks.length;
  const rows = holders(document);
  if (!rows.length) return null;
  return h("section", { key: "strips" }, h("h2", {}, "Who has what"),
    list({ id: "strips", what: "holders", rows, key: ([instance]) => instance, text: ([instance]) => instance, deps: () => [document], attributes: { class: "strips" }, redraw, item: ([instance, runs]) => {
      const tiers = new Map();
      for (const { from, to, tier } of runs) tiers.set(tier, (tiers.get(tier) ?? 0) + to - from);
      const waiting = runs.some(({ confirmed }) => !confirmed);
      const text = `first ${leading(runs)} of ${all}; ${[...tiers].map(([tier, number]) => `${tier} ${number}`).join(", ")}${waiting ? "; not confirmed since the controller's restart" : ""}`;
      return [instanceLink(instance),
        h("svg", { class: "strip", viewBox: `0 0 ${all} 1`, preserveAspectRatio: "none", "aria-hidden": "true" },
          h("rect", { class: "whole", width: all, height: 1 }),
          runs.map(({ from, to, tier, confirmed }) => h("rect", { class: `swatch ${tone(tier)}${confirmed ? "" : " unconfirmed"}`, x: from, width: to - from, height: 1 }))),
        h("span", { class: "quiet" }, text)];
    } }),
    h("ul", { class: "legend" }, [["tone-l1", "in L1"], ["tone-l2", "in another tier"], ["whole", "not there"]].map(([name, title]) => h("li", {},
      h("svg", { class: "key", viewBox: "0 0 12 12", "aria-hidden": "true" }, h("rect", { class: `swatch ${name}`, width: 12, height: 12, rx: 2 })), title))));
}

/** Why no instance has a chunk, by the most informative answer. */
function because(miss) {
  const [first] = miss?.told ?? [];
  if (!first) return null;
  if (first.tier) return ["It is in L1 of ", instanceLink(first.instance), "; the directory does not know that yet."];
  return [REASONS[first.reason] ?? first.reason, h("span", { class: "quiet break" }, " (", instanceLink(first.instance), first.detail ? `: ${first.detail})` : ")")];
}

function placements({ places }, miss) {
  if (!places.length) return [h("span", { class: "quiet" }, "nowhere"), miss?.told.length ? h("small", {}, because(miss)) : null];
  return places.map(({ instance, tier, confirmed }) => h("span", { class: `place ${tone(tier)}`, key: `${instance} ${tier}` }, instanceLink(instance), ` ${tier}`, confirmed ? "" : " · unconfirmed"));
}

function chunksView({ placement: document, misses, ...told }, redraw) {
  const missing = new Map(misses.map((miss) => [miss.chunk, miss]));
  const { chunks, longest, held_chunks: held, n_chunks: all, chunk_tokens: tokens } = document;
  const best = longest.filter((one) => one.chunks > 0 && one.chunks === longest[0].chunks);
  const whole = held >= all;
  return [
    h("section", { class: `verdict ${whole && all ? "hit" : held ? "part" : "miss"}`, key: "verdict", role: "status" },
      h("h2", {}, !all ? "The prompt has no whole chunk" : !held ? "No instance has its first chunk" : whole ? `All ${all} chunks are there` : `The first ${held} of ${all} chunks are there`),
      !all ? h("p", {}, `A chunk has ${exact(tokens)} tokens; only whole chunks are cached.`) : null,
      best.length ? h("p", {}, "Longest in one L1: ", best.slice(0, 8).map((one, index) => [index ? ", " : "", instanceLink(one.instance)]),
        ` with ${plural(best[0].chunks, "chunk")}${best[0].tokens ? `, ${exact(best[0].tokens)} tokens` : ""}.`) : held ? h("p", {}, "No L1 has the first chunk; it has to be loaded from a lower tier.") : null,
      !whole ? h("p", {}, `Chunk ${held} is the first that no instance has reported. `, because(missing.get(held)) ?? h("span", { class: "quiet" }, "Ask with the id of a request that missed it.")) : null),
    silence(told, redraw),
    strips(document, redraw),
    chunks.length ? h("section", { key: "chunks" }, h("h2", {}, "Chunks"), table({
      id: "chunks", caption: "Chunks of the prompt", rows: chunks, key: (chunk) => String(chunk.index), deps: (chunk) => [chunk, missing.get(chunk.index)], redraw, prefix: "",
      text: (chunk) => [chunk.index, ...chunk.keys, ...chunk.places.map(({ instance, tier }) => `${instance} ${tier}`), chunk.places.length ? "" : "nowhere"].join(" "),
      mark: (chunk) => (chunk.places.length ? null : "absent"), columns: [
        { name: "index", title: "Chunk", number: true, sort: (chunk) => chunk.index, cell: (chunk) => String(chunk.index) },
        ...(tokens ? [{ name: "tokens", title: "Tokens", cell: (chunk) => `${chunk.index * tokens} to ${(chunk.index + 1) * tokens - 1}` }] : []),
        { name: "where", title: "Where", cell: (chunk) => placements(chunk, missing.get(chunk.index)), wide: true },
        { name: "key", title: "Storage key", cell: (chunk) => [h("code", { title: chunk.keys.join(" ") }, `${chunk.keys[0].slice(0, 16)}…`), chunk.keys.length > 1 && h("small", {}, `and ${plural(chunk.keys.length - 1, "other slice")}`)] },
      ] })) : null,
  ];
}

function requestView(id, told, redraw) {
  return [silence(told, redraw), told.lookups.map(({ instance, document: lookup, missing_now: places }, index) => {
    const { hits, first_miss: miss } = lookup;
    const fetched = Object.entries(hits).filter(([name]) => name !== "served");
    return h("section", { key: `lookup-${instance}-${index}`, class: `verdict ${miss ? (hits.served ? "part" : "miss") : "hit"}` },
      h("h2", { class: "break" }, miss ? `${hits.served} of ${lookup.chunks} chunks served` : `All ${lookup.chunks} chunks served`),
      h("p", { class: "break" }, `Request ${id}, looked up by `, instanceLink(instance), "."),
      miss && h("p", {}, `Chunk ${miss.chunk} was missed: `, h("b", {}, REASONS[miss.reason] ?? miss.reason), miss.detail ? h("span", { class: "break" }, ` (${miss.detail})`) : ""),
      places.length ? h("p", {}, "Now it is at: ", placements({ places })) : null,
      facts([
        ["When", date(lookup.unix_ms)], ["Took", duration(lookup.duration_ms)], ...fetched.map(([name, value]) => [`From ${name.toUpperCase()}`, plural(value, "chunk")]),
        lookup.tenant && ["Tenant", lookup.tenant], ["Identity", h("code", { title: lookup.identity }, `${lookup.identity.slice(0, 16)}…`)],
        miss && ["Reason", h("code", {}, miss.reason)], miss && ["Missing key", h("code", { class: "break" }, miss.storage_key)],
      ]));
  })];
}

function field(name, title, attributes = {}, note = null) {
  return h("div", { class: "field", key: name }, h("label", { for: `x-${name}` }, title), h("input", { id: `x-${name}`, value: form[name], autocomplete: "off", spellcheck: "false", ...attributes, oninput: (event) => { form[name] = event.target.value; } }), note);
}

export const explorerPage = {
  title: () => "Explorer",
  enter({ params, redraw }) {
    answer = null;
    asked = poller("/v1/models", MODELS_MS, redraw);
    const request = params.search.get("request");
    if (request) {
      form.mode = "request";
      form.request = request;
      linked = true;
    }
  },
  leave() {
    asked.stop();
  },
  view({ live, redraw }) {
    const heading = h("h1", {}, "Explorer");
    if (live.instances?.length === 0) return [heading, noInstances(live.cluster)];
    if (linked && live.instances) {
      linked = false;
      ask(redraw);
    }
    const models = [...new Set(asked.document?.models.map(({ layout }) => layout.model) ?? [])].sort();
    if (!form.model && models.length === 1) [form.model] = models;
    const choose = (mode) => {
      form.mode = mode;
      form.text = "";
      answer = null;
      redraw();
    };
    return [
      heading,
      h("form", { class: "panel", onsubmit: (event) => { event.preventDefault(); ask(redraw); } },
        h("fieldset", { class: "choice" }, h("legend", { class: "unseen" }, "Ask by"), MODES.map(([mode, title]) => h("button", {
          type: "button", key: mode, "aria-pressed": String(mode === form.mode), onclick: () => choose(mode) }, title))),
        form.mode === "request"
          ? field("request", "Request id", { required: true, placeholder: "cmpl-…" }, h("p", { class: "quiet" }, "As the engine's API returned it. Each instance remembers its last 1,024 lookups."))
          : h("div", { class: "field", key: "text" }, h("label", { for: "x-text" }, form.mode === "tokens" ? "Token ids of the prompt" : "Storage keys"),
            h("textarea", { id: "x-text", rows: 4, spellcheck: "false", value: form.text, "aria-describedby": "x-note", oninput: (event) => { form.text = event.target.value; } }),
            h("p", { class: "quiet", id: "x-note" }, form.mode === "tokens" ? "Numbers between commas, spaces or brackets, as in prompt_token_ids." : "64 hexadecimal digits each, between commas or spaces.")),
        form.mode === "tokens" && h("div", { class: "fields", key: "identity" },
          field("model", "Model", { list: "models" }), h("datalist", { id: "models" }, models.map((model) => h("option", { value: model }))),
          field("adapter", "Adapter (LoRA)"), field("tenant", "Tenant"), field("salt", "Salt")),
        h("div", { class: "buttons" }, h("button", { class: "primary", "aria-disabled": asking ? "true" : null }, asking ? "Asking …" : form.mode === "request" ? "Explain" : "Look up"))),
      answer?.error && failure(answer.error, "That cannot be looked up."),
      answer?.kind === "chunks" && h("div", { key: "answer", class: "page" }, chunksView(answer.told, redraw)),
      answer?.kind === "request" && h("div", { key: "explained", class: "page" }, requestView(answer.id, answer.told, redraw)),
    ];
  },
};
