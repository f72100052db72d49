// The parameters after a page's path in the address: filters, orders, page numbers. They are kept only there, so a link, a
// reload and the back button show the same page.

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
