// Chooses the rows of a long list that are shown: filtered, ordered, a page at a time. Tables, logs and lists draw them.
//
// The filter, the order and the page number are kept only in the address, so a link, a reload and the back button show the
// same rows.

import { h, lazy } from "./dom.js";
import { exact } from "./format.js";

const PAGE_ROWS = 100;
const FILTER_FROM = 9; // fewer rows need no filter
const collator = new Intl.Collator("en", { numeric: true });
const drawn = new Map(); // list id → {rows, signature, chosen} of the last draw

const parts = () => {
  const [path, query = ""] = (location.hash.slice(1) || "/").split("?");
  return [path, new URLSearchParams(query)];
};

/** A parameter's value; empty if it is not in the address. */
export function asked(name) {
  return parts()[1].get(name) ?? "";
}

/** Changes parameters of the present page; an empty value removes one. */
export function ask(changes) {
  const [path, query] = parts();
  for (const [name, value] of Object.entries(changes)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  const text = String(query);
  history.replaceState(null, "", `#${path}${text && `?${text}`}`);
}

export const inOrder = (one, other) => collator.compare(one, other);

function ordered(rows, key, sort, down) {
  const values = new Map(rows.map((row) => [row, sort(row)]));
  const turn = down ? -1 : 1;
  return [...rows].sort((one, other) => turn * compare(values.get(one), values.get(other)) || collator.compare(key(one), key(other)));
}

const missing = (value) => value === null || value === undefined;

function compare(one, other) {
  if (missing(one) || missing(other)) return missing(one) - missing(other);
  return typeof one === "number" && typeof other === "number" ? one - other : collator.compare(String(one), String(other));
}

/**
 * `key(row)` names a row, the filter searches `text(row)`, `sort(row)` is the value to order by (without it rows keep their
 * order). `prefix` begins the names of the parameters in the address. Returns {shown, tools}: the rows of the page, and the
 * controls above them. `filter`: show the filter's field, which short lists have only while it holds text; `hint`: what may
 * be typed into it.
 */
export function windowed({ id, what, rows, key, text, sort, sorting = "", down = false, prefix = `${id}.`, size = PAGE_ROWS, hint = "", redraw, filter = rows.length >= FILTER_FROM }) {
  const word = asked(`${prefix}filter`);
  const signature = JSON.stringify([what, word, sorting, down]);
  if (drawn.get(id)?.rows !== rows || drawn.get(id).signature !== signature) {
    const words = word.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = words.length ? rows.filter((row) => words.every((each) => text(row).toLowerCase().includes(each))) : rows;
    drawn.set(id, { rows, signature, chosen: sort ? ordered(matching, key, sort, down) : matching });
  }
  const { chosen } = drawn.get(id);
  const pages = Math.max(1, Math.ceil(chosen.length / size));
  const page = Math.min(pages, Math.max(1, Number.parseInt(asked(`${prefix}page`), 10) || 1));
  return { shown: chosen.slice((page - 1) * size, page * size), tools: tools({ id, what, rows, word, prefix, page, pages, size, total: chosen.length, filter, hint, redraw }) };
}

function tools({ id, what, rows, word, prefix, page, pages, size, total, filter, hint, redraw }) {
  if (!word && pages === 1 && !filter) return null;
  const turn = (to) => () => { ask({ [`${prefix}page`]: to > 1 ? String(to) : "" }); redraw(); };
  const step = (name, to, there) => h("button", { "aria-disabled": there ? null : "true", onclick: there ? turn(to) : null }, name, h("span", { class: "unseen" }, ` page of ${what}`));
  const count = total === rows.length ? `${exact(total)} in all` : `${exact(total)} of ${exact(rows.length)}`;
  return h("div", { class: "tools-row", key: `${id}-tools` },
    h("div", { class: "filter", key: "filter" }, h("label", { for: `${id}-filter` }, "Filter", h("span", { class: "unseen" }, ` ${what}`)),
      h("input", { id: `${id}-filter`, type: "search", autocomplete: "off", placeholder: hint || null, value: word, oninput: (event) => { ask({ [`${prefix}filter`]: event.target.value, [`${prefix}page`]: "" }); redraw(); } })),
    h("span", { class: "quiet", role: "status", key: "count" }, count),
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
    h("ul", attributes, shown.map((row) => lazy("li", key(row), deps(row), () => h("li", {}, item(row))))));
}
