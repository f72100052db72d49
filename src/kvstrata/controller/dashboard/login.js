// Logging in. A link `#/login/TOKEN` gives this browser the token of the controller's port, which each request carries then. All
// tabs share it, until one logs out.

import { show } from "./dialog.js";
import { h } from "./dom.js";

const KEY = "kvstrata.token";
const PATH = "#/login/";
let asking = null;
let finish = null; // ends the open dialog

/** The token; null if this browser has none. */
export const token = () => localStorage.getItem(KEY);

/** Takes the token of a link, or a token as such. */
function take(text) {
  const at = text.indexOf(PATH);
  localStorage.setItem(KEY, at < 0 ? text : decodeURIComponent(text.slice(at + PATH.length)));
  finish?.();
}

/** Logs in by the address, if it holds a token; the token leaves the address and the history at once. */
export function logInByAddress() {
  if (!location.hash.startsWith(PATH)) return;
  take(location.hash);
  history.replaceState(null, "", "#/");
}

/** Waits until this browser has another token than `refused`. */
export function newToken(refused) {
  if (token() !== refused) return Promise.resolve();
  asking ??= ask(refused).finally(() => { asking = finish = null; });
  return asking;
}

function ask(refused) {
  return new Promise((resolve) => {
    const field = h("input", {
      id: "code", type: "password", autocomplete: "off", required: true, autofocus: true, "aria-describedby": "code-note",
    });
    const dialog = show("Log in", [
      h("p", { class: "wrong", role: "alert", hidden: refused === null }, "The controller's token has changed."),
      h("p", { id: "code-note" }, "Run ", h("code", {}, "kvstrata ctl cluster dashboard-link"), " on the controller's machine, as its user. ",
        "Open the link that it prints, or paste it here."),
      h("label", { for: "code" }, "Link, or the controller\u2019s token"), field,
    ], [h("button", { class: "primary" }, "Log in")]);
    finish = () => {
      dialog.remove();
      resolve();
    };
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      take(field.value.trim());
    });
  });
}

/** Forgets the token, in all tabs, and draws the page anew. */
export function logOut() {
  localStorage.removeItem(KEY);
  location.reload();
}

addEventListener("storage", (event) => { if (event.key === KEY && event.newValue) finish?.(); }); // another tab has logged in
