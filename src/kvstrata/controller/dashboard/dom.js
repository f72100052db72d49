// Builds elements from values, and changes the page's tree into a new one.
//
// A page is a function of the state: it builds the wanted tree, and `morphChildren` changes the present tree as little as it
// can, so that focus, selection, scroll positions and open dialogs survive every update.
// Every value becomes a text node or an attribute; nothing is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "rect"]);
const HANDLERS = ["onclick", "oninput", "onsubmit"];

/** An element. Attributes that are null or false are left out; `on…` are handlers; `key` names it among its siblings. */
export function h(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "key") element.key = String(value);
    else if (name.startsWith("on")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
}

/** Changes the children of `parent` into `wanted`; null and false in it are left out. */
export function morphChildren(parent, wanted) {
  reconcile(parent, wanted.filter(Boolean));
}

function reconcile(parent, wanted) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.key !== undefined) keyed.set(child.key, child);
  let place = parent.firstChild;
  for (const child of wanted) {
    const found = child.key === undefined ? place : keyed.get(child.key);
    if (!found || found.nodeName !== child.nodeName || found.key !== child.key) {
      parent.insertBefore(child, place);
      continue;
    }
    if (found === place) place = place.nextSibling;
    else parent.insertBefore(found, place);
    update(found, child);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function update(element, wanted) {
  if (element.nodeType === Node.TEXT_NODE) {
    if (element.data !== wanted.data) element.data = wanted.data;
    return;
  }
  for (const { name } of [...element.attributes]) if (!wanted.hasAttribute(name)) element.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  for (const name of HANDLERS) if (element[name] !== wanted[name]) element[name] = wanted[name];
  reconcile(element, [...wanted.childNodes]);
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
