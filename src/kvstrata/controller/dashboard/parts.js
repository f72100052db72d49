// Parts that pages share: states, bars, facts, tiles, lines for a shell, failures, and documents asked for again and again.

import { get } from "./api.js";
import { h, toast } from "./dom.js";
import { bytes, percent } from "./format.js";

/** A state in one word; its mark's shape and colour tell its tone: good, busy, calm, warn or bad. */
export function mark(name, tone, note = "") {
  return h("span", { class: `state ${tone}`, title: note || null }, h("i", { "aria-hidden": "true" }), name);
}

/** A share of a whole, as a bar with its text beside it. */
export function usage(used, capacity, brief = false) {
  if (!used && !capacity) return h("span", { class: "quiet" }, "not reported");
  const share = capacity > 0 ? Math.min(1, used / capacity) : 0;
  return h("div", { class: "usage" },
    h("svg", { class: "meter", "aria-hidden": "true", preserveAspectRatio: "none", viewBox: "0 0 100 4" },
      h("rect", { class: "whole", width: 100, height: 4 }),
      h("rect", { class: share > 0.97 ? "part full" : "part", width: (share * 100).toFixed(2), height: 4 })),
    h("span", {}, bytes(used), capacity > 0 ? h("span", { class: "quiet" }, brief ? ` · ${percent(used / capacity)}` : ` of ${bytes(capacity)} · ${percent(used / capacity)}`) : null));
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value, title]) => h("div", { key: name },
    h("dt", {}, name), h("dd", { title }, value ?? "–"))));
}

export function tile(name, value, note, tone) {
  return h("div", { class: `tile ${tone ?? ""}`, key: name }, h("dt", {}, name), h("dd", {}, h("b", {}, value), h("span", {}, note ?? "")));
}

/** A line for a shell, with a button that copies it. */
export function line(text) {
  const copy = async (event) => {
    const code = event.currentTarget.previousElementSibling;
    try {
      await navigator.clipboard.writeText(text);
      toast("Copied.");
    } catch {
      getSelection().selectAllChildren(code); // a page over plain HTTP may not write to the clipboard
      toast("The line is selected; press Ctrl+C to copy it.");
    }
  };
  return h("div", { class: "line" }, h("code", {}, text), h("button", { onclick: copy }, "Copy", h("span", { class: "unseen" }, " the line")));
}

export function failure(error, what) {
  return h("div", { class: "wrong", role: "alert", key: "failure" }, h("strong", {}, what), " ", error.field ? h("code", {}, error.field) : null, error.field ? ": " : "", error.message);
}

/** Asks for `path` every `everyMs` while a page is shown. */
export function poller(path, everyMs, redraw, ask = get) {
  const answer = { document: null, error: null, loading: true };
  let stopped = false;
  let timer = 0;
  const again = async () => {
    try {
      const document = await ask(typeof path === "function" ? path() : path);
      if (stopped) return;
      Object.assign(answer, { document, error: null });
    } catch (error) {
      if (stopped) return;
      answer.error = error;
    }
    answer.loading = false;
    redraw();
    timer = setTimeout(again, everyMs);
  };
  again();
  answer.stop = () => {
    stopped = true;
    clearTimeout(timer);
  };
  return answer;
}
