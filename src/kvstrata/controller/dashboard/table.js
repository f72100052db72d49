// Tables that can be filtered and ordered by a column, a page of rows at a time; on a narrow page rows become cards.

import { h, lazy } from "./dom.js";
import { ask, asked, noneMatch, windowed } from "./rows.js";

/**
 * `columns`: [{name, title, cell(row) → content, sort(row) → value, shows(row), number, wide}]; a column without `sort`
 * cannot be sorted by. `key(row)` names a row, the filter searches `text(row)`. A cell is drawn again when one of the values
 * that its column `shows` has changed, or without `shows` one of `deps(row)`. `caption` is for screen readers. `first` is
 * the column of the first order. `prefix` begins the table's parameters in the address; it is empty for the main table of a
 * page.
 */
export function table({ id, caption, columns, rows, key, text, deps = (row) => [row], first, down = false, prefix = `${id}.`, size, filter, hint, redraw, mark }) {
  const said = asked(`${prefix}sort`);
  const known = columns.find((column) => column.sort && column.name === said.replace(/^-/, ""));
  const by = known ?? columns.find((column) => column.name === (first ?? columns[0].name));
  const downwards = known ? said.startsWith("-") : down;
  const choose = (name, turned) => {
    ask({ [`${prefix}sort`]: `${turned ? "-" : ""}${name}`, [`${prefix}page`]: "" });
    redraw();
  };
  const { shown, tools } = windowed({
    id, what: caption, rows, key, text: text ?? ((row) => columns.map((column) => column.sort?.(row) ?? "").join(" ")),
    sort: by.sort, sorting: by.name, down: downwards, prefix, size, filter, hint, redraw,
  });
  const sortable = columns.filter((column) => column.sort);
  return h("div", { class: "cards", key: id },
    tools,
    sortable.length > 1 && lazy("div", "sorting", [by.name, downwards], () => h("div", { class: "sorting" },
      h("label", { for: `${id}-sort` }, "Sort by"),
      h("select", { id: `${id}-sort`, value: by.name, onchange: (event) => choose(event.target.value, downwards) },
        sortable.map((column) => h("option", { value: column.name }, column.title))),
      h("button", { onclick: () => choose(by.name, !downwards) }, downwards ? "Descending" : "Ascending"))),
    h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": caption },
      h("table", { role: "table" },
        h("caption", { class: "unseen" }, caption),
        lazy("thead", "head", [by.name, downwards, columns.map(({ name }) => name).join()], () => h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, columns.map((column) => head(column, by === column, downwards, choose))))),
        h("tbody", { role: "rowgroup" }, shown.map((row) => line(key(row), row, { columns, deps, mark }))))),
    noneMatch({ id, what: caption, rows, shown, prefix, redraw }));
}

function head(column, sorted, downwards, choose) {
  if (!column.sort) return h("th", { scope: "col", role: "columnheader", class: column.number ? "number" : null }, column.title);
  return h("th", {
    scope: "col", role: "columnheader", class: column.number ? "number" : null,
    "aria-sort": sorted ? (downwards ? "descending" : "ascending") : "none",
  }, h("button", { class: "sort", onclick: () => choose(column.name, sorted ? !downwards : Boolean(column.number)) },
    column.title, h("span", { class: "arrow", "aria-hidden": "true" }, sorted ? (downwards ? "▾" : "▴") : "")));
}

function line(name, row, { columns, deps, mark }) {
  const told = columns.map((column) => (column.shows ?? deps)(row));
  const marked = mark?.(row);
  return lazy("tr", name, [marked, ...told.flat()], () => h("tr", { role: "row", class: marked },
    columns.map((column, index) => lazy(index === 0 ? "th" : "td", column.name, told[index], () => cell(column, index, row)))));
}

function cell(column, index, row) {
  return h(index === 0 ? "th" : "td", {
    role: index === 0 ? "rowheader" : "cell", scope: index === 0 ? "row" : null, "data-title": column.title,
    class: [column.number && "number", column.wide && "wide"].filter(Boolean).join(" ") || null,
  }, h("div", {}, column.cell(row)));
}
