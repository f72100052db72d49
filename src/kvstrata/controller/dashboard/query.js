// What the address says behind the path of a page: filters, orders, page numbers. It is their only place, so a link, a
// reload and the way back show the same.

const parts = () => {
  const [path, query = ""] = (location.hash.slice(1) || "/").split("?");
  return [path, new URLSearchParams(query)];
};

/** A parameter's value; empty where there is none. */
export function asked(name) {
  return parts()[1].get(name) ?? "";
}

/** Changes parameters of the page that is shown; an empty value takes one away. */
export function ask(changes) {
  const [path, query] = parts();
  for (const [name, value] of Object.entries(changes)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  const text = String(query);
  history.replaceState(null, "", `#${path}${text && `?${text}`}`);
}
