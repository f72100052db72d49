// Builds elements from values, and changes the page's tree into a new one.
//
// A page is a function of the state: it builds the wanted tree, and `morph` changes the present tree as little as it can,
// so that focus, selection, scroll positions and open dialogs survive every update. Parts that are numerous or large are
// `lazy`: they are not built again as long as they show the same values.
// Every value becomes a text node or an attribute; nothing is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set("svg g path line rect circle text title polyline".split(" "));
const HANDLERS = [
  "onclick", "oninput", "onchange", "onsubmit", "onkeydown", "onpointermove", "onpointerleave", "onfocus", "onblur",
  "ontoggle",
];

/** An element. Attributes that are null or false are left out; `on…` are handlers; `key` names it among its siblings. */
export function h(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "key") element.key = String(value);
    else if (name.startsWith("on")) element[name.toLowerCase()] = value;
    else if (name === "value" && tag !== "option") element.wanted = String(value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  if (element.wanted !== undefined) element.value = element.wanted;
  return element;
}

/**
 * An element that `build` makes, and makes again only if one of `deps` has changed since the last time. `key` names the
 * element among its siblings. It may stand only in a tree that is given to `morphChildren`.
 */
export function lazy(tag, key, deps, build) {
  return Object.assign(document.createElement(tag), { key: String(key), deps, build });
}

function built({ key, deps, build }) {
  return Object.assign(build(), { key, deps });
}

/** A new tree with its lazy elements built. */
function grown(node) {
  const whole = node.build ? built(node) : node;
  for (const child of [...whole.childNodes]) {
    const next = grown(child);
    if (next !== child) child.replaceWith(next);
  }
  return whole;
}

const unchanged = (found, wanted) => found.deps?.length === wanted.deps.length && found.deps.every((each, index) => Object.is(each, wanted.deps[index]));

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
}

/** Changes the children of `parent` into `wanted`. */
export function morphChildren(parent, wanted) {
  const focused = document.activeElement;
  reconcile(parent, wanted);
  if (focused && focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}

function reconcile(parent, wanted) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.key !== undefined) keyed.set(child.key, child);
  const kept = new Set(wanted.map((child) => child.key));
  let place = parent.firstChild;
  for (const child of wanted) {
    while (place && place.key !== undefined && !kept.has(place.key)) place = drop(place);
    let found = place;
    if (child.key !== undefined) found = keyed.get(child.key) ?? null;
    else while (found && (found.key !== undefined || !alike(found, child))) found = found.nextSibling;
    if (!found || !alike(found, child)) {
      parent.insertBefore(grown(child), place);
      continue;
    }
    if (found === place) place = place.nextSibling;
    else parent.insertBefore(found, place);
    if (!child.build) update(found, child);
    else if (!unchanged(found, child)) {
      update(found, built(child));
      found.deps = child.deps;
    }
  }
  while (place) place = drop(place);
}

function drop(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function alike(one, other) {
  return one.nodeName === other.nodeName && one.key === other.key;
}

function update(element, wanted) {
  if (element.nodeType === Node.TEXT_NODE) {
    if (element.data !== wanted.data) element.data = wanted.data;
    return;
  }
  const theirs = element.nodeName === "DETAILS" || element.nodeName === "DIALOG" ? "open" : "";
  for (const { name } of [...element.attributes]) {
    if (name !== theirs && !wanted.hasAttribute(name)) element.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (name !== theirs && element.getAttribute(name) !== value) element.setAttribute(name, value);
  }
  for (const name of HANDLERS) if (element[name] !== wanted[name]) element[name] = wanted[name];
  reconcile(element, [...wanted.childNodes]);
  if (wanted.wanted !== undefined && element.value !== wanted.wanted) element.value = wanted.wanted;
}

const announcements = [];

/** Announces texts to a screen reader, one after the other. */
export function announce(text) {
  announcements.push(text);
  if (announcements.length > 1) return;
  const place = document.getElementById("announce");
  const next = () => {
    place.textContent = announcements[0] ?? "";
    if (announcements.length) setTimeout(() => { announcements.shift(); next(); }, 1500);
  };
  next();
}

/** A message at the edge of the page; errors stay until they are closed. */
export function toast(text, kind = "good") {
  const place = document.getElementById("toasts");
  const close = h("button", { class: "icon", "aria-label": "Close this message", onclick: () => box.remove() }, "×");
  const box = h("div", { class: `toast ${kind}`, role: kind === "bad" ? "alert" : "status" }, h("span", {}, text), close);
  place.append(box);
  while (place.childElementCount > 4) place.firstElementChild.remove();
  if (kind !== "bad") setTimeout(() => box.remove(), 8000);
}
