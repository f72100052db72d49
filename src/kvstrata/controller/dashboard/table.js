// Sortable tables that become cards where the page is narrow.

import { h } from "./dom.js";

const sorts = new Map(); // table id → {column, down}

const compare = (one, other) => {
  const missing = (value) => value === null || value === undefined;
  if (missing(one) || missing(other)) return missing(one) - missing(other);
  return typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
};

/**
 * `columns`: [{name, title, cell(row) → content, sort(row) → value, number, wide}]; without `sort` it cannot be sorted by.
 * `key(row)` names a row. `caption` is for screen readers. `first` is the column it is sorted by at first.
 */
export function table({ id, caption, columns, rows, key, first, down = false, redraw, mark }) {
  const chosen = sorts.get(id) ?? { column: first ?? columns[0].name, down };
  const by = columns.find((column) => column.name === chosen.column);
  const ordered = by?.sort ? [...rows].sort((one, other) => {
    const order = compare(by.sort(one), by.sort(other)) || compare(key(one), key(other));
    return chosen.down ? -order : order;
  }) : rows;
  const choose = (column, downwards) => {
    sorts.set(id, { column, down: downwards });
    redraw();
  };
  const head = (column) => {
    if (!column.sort) return h("th", { scope: "col", role: "columnheader", class: column.number ? "number" : null }, column.title);
    const sorted = chosen.column === column.name;
    return h("th", {
      scope: "col", role: "columnheader", class: column.number ? "number" : null,
      "aria-sort": sorted ? (chosen.down ? "descending" : "ascending") : "none",
    }, h("button", { class: "sort", onclick: () => choose(column.name, sorted ? !chosen.down : Boolean(column.number)) },
      column.title, h("span", { class: "arrow", "aria-hidden": "true" }, sorted ? (chosen.down ? "▾" : "▴") : "")));
  };
  const sortable = columns.filter((column) => column.sort);
  return h("div", { class: "cards", key: id },
    sortable.length > 1 && h("div", { class: "sorting" },
      h("label", { for: `${id}-sort` }, "Sort by"),
      h("select", { id: `${id}-sort`, value: chosen.column, onchange: (event) => choose(event.target.value, chosen.down) },
        sortable.map((column) => h("option", { value: column.name }, column.title))),
      h("button", { onclick: () => choose(chosen.column, !chosen.down) }, chosen.down ? "Descending" : "Ascending")),
    h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": caption },
      h("table", { role: "table" },
        h("caption", { class: "unseen" }, caption),
        h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, columns.map(head))),
        h("tbody", { role: "rowgroup" }, ordered.map((row) => h("tr", { role: "row", key: key(row), class: mark?.(row) },
          columns.map((column, index) => h(index === 0 ? "th" : "td", {
            role: index === 0 ? "rowheader" : "cell", scope: index === 0 ? "row" : null, "data-title": column.title,
            class: [column.number && "number", column.wide && "wide"].filter(Boolean).join(" ") || null,
          }, h("div", {}, column.cell(row))))))))));
}
