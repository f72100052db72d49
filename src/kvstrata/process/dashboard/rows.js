// Chooses the rows of a long list that are shown: filtered, ordered, a page at a time. Tables, logs and lists draw them.
//
// While the pointer or the focus is among the rows, each row keeps its place: values change, places do not. A row that
// ends meanwhile stays visible but inert; a new row comes last, or with `waits` after the pointer or focus has left.

import { ended, h, lazy } from "./dom.js";
import { exact } from "./format.js";
import { ask, asked } from "./query.js";

export const PAGE_ROWS = 100;
const FILTER_FROM = 9; // fewer rows need no filter
const collator = new Intl.Collator("en", { numeric: true });
const kept = new Map(); // list id → {signature, rows, all, order} of the last draw

export const inOrder = (one, other) => collator.compare(one, other);

const missing = (value) => value === null || value === undefined;

function compare(one, other) {
  if (missing(one) || missing(other)) return missing(one) - missing(other);
  return typeof one === "number" && typeof other === "number" ? one - other : collator.compare(String(one), String(other));
}

const hovers = matchMedia("(hover: hover)");

/** Whether the pointer or the focus is among the rows. */
function held(id) {
  const place = document.getElementById(`${id}-rows`);
  return Boolean(place && ((hovers.matches && place.matches(":hover")) || place.contains(document.activeElement)));
}

function ordered(rows, key, sort, down, before) {
  if (!sort) return rows.map(key);
  const values = new Map(rows.map((row) => [key(row), sort(row)]));
  // Sorting starts from the order of the last draw, which is nearly right.
  const names = before ? [...before.filter((name) => values.has(name)), ...[...values.keys()].filter((name) => !before.places.has(name))] : [...values.keys()];
  const turn = down ? -1 : 1;
  return names.sort((one, other) => turn * compare(values.get(one), values.get(other)) || collator.compare(one, other));
}

/**
 * `key(row)` names a row, the filter searches `text(row)`, `sort(row)` is the value to order by (without it rows keep their
 * order). `prefix` begins the names of the parameters in the address. Returns {shown: [[name, row | null]], tools}: the
 * rows of the page, null for a row that has ended, and the controls above them. The element around the rows must have the
 * id `${id}-rows`. `filter`: show the filter's field, which short lists have only while it holds text; `hint`: what may be
 * typed into it.
 */
export function windowed({ id, what, rows, key, text, sort, sorting = "", down = false, prefix = `${id}.`, size = PAGE_ROWS, waits = false, hint = "", redraw, filter = rows.length >= FILTER_FROM }) {
  const word = asked(`${prefix}filter`);
  const signature = JSON.stringify([what, word, sorting, down]);
  const before = kept.get(id);
  const same = before?.signature === signature ? before : null;
  const words = word.toLowerCase().split(/\s+/).filter(Boolean);
  const matching = words.length ? rows.filter((row) => {
    const seen = text(row).toLowerCase();
    return words.every((each) => seen.includes(each));
  }) : rows;
  const byName = new Map(rows.map((row) => [key(row), row]));
  let { all } = same ?? {};
  let late = 0;
  const holding = same !== null && held(id);
  if (holding) {
    const fresh = matching.map(key).filter((name) => !all.places.has(name));
    late = waits ? fresh.length : 0;
    if (fresh.length && !waits) all = placed([...all, ...fresh]);
  } else if (!same || same.rows !== rows) all = placed(ordered(matching, key, sort, down, same?.all));
  kept.set(id, { signature, rows: holding ? null : rows, all });
  const pages = Math.max(1, Math.ceil(all.length / size));
  const page = Math.min(pages, Math.max(1, Number.parseInt(asked(`${prefix}page`), 10) || 1));
  const shown = all.slice((page - 1) * size, page * size).map((name) => [name, byName.get(name) ?? null]);
  return { shown, matching, tools: tools({ id, what, rows, matching, word, prefix, page, pages, size, total: all.length, holding, late, filter, hint, redraw }) };
}

function placed(names) {
  return Object.assign(names, { places: new Set(names) });
}

function tools({ id, what, rows, matching, word, prefix, page, pages, size, total, holding, late, filter, hint, redraw }) {
  if (!word && pages === 1 && !filter) return null;
  const turn = (to) => () => { ask({ [`${prefix}page`]: to > 1 ? String(to) : "" }); redraw(); };
  const step = (name, to, there) => h("button", { "aria-disabled": there ? null : "true", onclick: there ? turn(to) : null }, name, h("span", { class: "unseen" }, ` page of ${what}`));
  const count = matching.length === rows.length ? `${exact(rows.length)} in all` : `${exact(matching.length)} of ${exact(rows.length)}`;
  return h("div", { class: "tools-row", key: `${id}-tools` },
    h("div", { class: "filter", key: "filter" }, h("label", { for: `${id}-filter` }, "Filter", h("span", { class: "unseen" }, ` ${what}`)),
      h("input", { id: `${id}-filter`, type: "search", autocomplete: "off", placeholder: hint || null, value: word, oninput: (event) => { ask({ [`${prefix}filter`]: event.target.value, [`${prefix}page`]: "" }); redraw(); } })),
    h("span", { class: "quiet", role: "status", key: "count" }, count),
    h("span", { class: `held${holding ? "" : " off"}`, key: "held", title: "While the pointer or the focus is among the rows they keep their places." }, late ? `held, ${late} new` : "held"),
    pages > 1 && h("nav", { class: "pager", key: "pager", "aria-label": `Pages of ${what}` },
      step("First", 1, page > 1), step("Previous", page - 1, page > 1),
      h("span", {}, `${exact((page - 1) * size + 1)}–${exact(Math.min(total, page * size))}`, h("span", { class: "unseen" }, `, page ${page} of ${pages}`)),
      step("Next", page + 1, page < pages), step("Last", pages, page < pages)));
}

/** The text shown if the filter lets no row through. */
export function noneMatch({ id, what, rows, shown, prefix = `${id}.`, redraw }) {
  if (shown.length || !rows.length) return null;
  return h("p", { class: "quiet", key: `${id}-none` }, `The filter lets none of the ${exact(rows.length)} through. `,
    h("button", { onclick: () => { ask({ [`${prefix}filter`]: "" }); redraw(); } }, "Show all", h("span", { class: "unseen" }, ` ${what}`)));
}

/** A list whose items `item(row)` makes, at most `size` at a time. */
export function list({ id, what, rows, key, text, item, deps = (row) => [row], size = 20, attributes = {}, redraw }) {
  const { shown, tools: above } = windowed({ id, what, rows, key, text, size, redraw });
  return h("div", { key: id }, above, noneMatch({ id, what, rows, shown, redraw }),
    h("ul", { ...attributes, id: `${id}-rows`, onpointerleave: redraw }, shown.map(([name, row]) => (row === null ? ended("li", name)
      : lazy("li", name, deps(row), () => h("li", {}, item(row)))))));
}
