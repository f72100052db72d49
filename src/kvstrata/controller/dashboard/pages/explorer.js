// Shows where the chunks of a prompt are: by token ids or by keys.

import { send } from "../api.js";
import { h } from "../dom.js";
import { exact, plural } from "../format.js";
import { instanceLink, noInstances } from "../instance_parts.js";
import { failure, poller } from "../parts.js";
import { list } from "../rows.js";
import { table } from "../table.js";

const MODES = [["tokens", "Token ids"], ["keys", "Storage keys"]];
const MODELS_MS = 10_000;
const MAX_CHUNKS = 65_536;

const form = { mode: "tokens", text: "", model: "", adapter: "", tenant: "", salt: "" };
let asked = null; // poller for the models of the cluster
let answer = null; // {document} or {error}
let asking = false;
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

async function ask(redraw) {
  const mine = (run += 1);
  asking = true;
  redraw();
  try {
    const body = { limit: MAX_CHUNKS, ...(form.mode === "tokens" ? { tokens: tokensIn(form.text) } : { keys: keysIn(form.text) }) };
    for (const name of ["model", "adapter", "tenant", "salt"]) if (form[name] && form.mode === "tokens") body[name] = form[name];
    const document = await send("POST", "/v1/lookup", body);
    if (mine === run) answer = { document };
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

function placements({ places }) {
  if (!places.length) return h("span", { class: "quiet" }, "nowhere");
  return places.map(({ instance, tier, confirmed }) => h("span", { class: `place ${tone(tier)}`, key: `${instance} ${tier}` }, instanceLink(instance), ` ${tier}`, confirmed ? "" : " · unconfirmed"));
}

function chunksView(document, redraw) {
  const { chunks, longest, held_chunks: held, n_chunks: all, chunk_tokens: tokens } = document;
  const best = longest.filter((one) => one.chunks > 0 && one.chunks === longest[0].chunks);
  const whole = held >= all;
  return [
    h("section", { class: `verdict ${whole && all ? "hit" : held ? "part" : "miss"}`, key: "verdict", role: "status" },
      h("h2", {}, !all ? "The prompt has no whole chunk" : !held ? "No instance has its first chunk" : whole ? `All ${all} chunks are there` : `The first ${held} of ${all} chunks are there`),
      !all ? h("p", {}, `A chunk has ${exact(tokens)} tokens; only whole chunks are cached.`) : null,
      best.length ? h("p", {}, "Longest in one L1: ", best.slice(0, 8).map((one, index) => [index ? ", " : "", instanceLink(one.instance)]),
        ` with ${plural(best[0].chunks, "chunk")}${best[0].tokens ? `, ${exact(best[0].tokens)} tokens` : ""}.`) : held ? h("p", {}, "No L1 has the first chunk; it has to be loaded from a lower tier.") : null,
      !whole ? h("p", {}, `Chunk ${held} is the first that no instance has reported. `, h("span", { class: "quiet" }, "An instance's own kvstrata ctl explain REQUEST_ID says why a request missed it.")) : null),
    strips(document, redraw),
    chunks.length ? h("section", { key: "chunks" }, h("h2", {}, "Chunks"), table({
      id: "chunks", caption: "Chunks of the prompt", rows: chunks, key: (chunk) => String(chunk.index), deps: (chunk) => [chunk], redraw, prefix: "",
      text: (chunk) => [chunk.index, ...chunk.keys, ...chunk.places.map(({ instance, tier }) => `${instance} ${tier}`), chunk.places.length ? "" : "nowhere"].join(" "),
      mark: (chunk) => (chunk.places.length ? null : "absent"), columns: [
        { name: "index", title: "Chunk", number: true, sort: (chunk) => chunk.index, cell: (chunk) => String(chunk.index) },
        ...(tokens ? [{ name: "tokens", title: "Tokens", cell: (chunk) => `${chunk.index * tokens} to ${(chunk.index + 1) * tokens - 1}` }] : []),
        { name: "where", title: "Where", cell: placements, wide: true },
        { name: "key", title: "Storage key", cell: (chunk) => [h("code", { title: chunk.keys.join(" ") }, `${chunk.keys[0].slice(0, 16)}…`), chunk.keys.length > 1 && h("small", {}, `and ${plural(chunk.keys.length - 1, "other slice")}`)] },
      ] })) : null,
  ];
}

function field(name, title, attributes = {}) {
  return h("div", { class: "field", key: name }, h("label", { for: `x-${name}` }, title), h("input", { id: `x-${name}`, value: form[name], autocomplete: "off", spellcheck: "false", ...attributes, oninput: (event) => { form[name] = event.target.value; } }));
}

export const explorerPage = {
  title: () => "Explorer",
  enter({ redraw }) {
    answer = null;
    asked = poller("/v1/models", MODELS_MS, redraw);
  },
  leave() {
    asked.stop();
  },
  view({ live, redraw }) {
    const heading = h("h1", {}, "Explorer");
    if (live.instances?.length === 0) return [heading, noInstances(live.cluster)];
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
        h("div", { class: "field", key: "text" }, h("label", { for: "x-text" }, form.mode === "tokens" ? "Token ids of the prompt" : "Storage keys"),
          h("textarea", { id: "x-text", rows: 4, spellcheck: "false", value: form.text, "aria-describedby": "x-note", oninput: (event) => { form.text = event.target.value; } }),
          h("p", { class: "quiet", id: "x-note" }, form.mode === "tokens" ? "Numbers between commas, spaces or brackets, as in prompt_token_ids." : "64 hexadecimal digits each, between commas or spaces.")),
        form.mode === "tokens" && h("div", { class: "fields", key: "identity" },
          field("model", "Model", { list: "models" }), h("datalist", { id: "models" }, models.map((model) => h("option", { value: model }))),
          field("adapter", "Adapter (LoRA)"), field("tenant", "Tenant"), field("salt", "Salt")),
        h("div", { class: "buttons" }, h("button", { class: "primary", "aria-disabled": asking ? "true" : null }, asking ? "Asking …" : "Look up"))),
      answer?.error && failure(answer.error, "That cannot be looked up."),
      answer?.document && h("div", { key: "answer", class: "page" }, chunksView(answer.document, redraw)),
    ];
  },
};
