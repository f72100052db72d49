// Logging in. The code of a link, `#/login/CODE`, becomes a session, which two secrets prove together: a cookie that scripts
// cannot read, and the page key, which each request carries as a header. Both end with the session; all tabs share them.

import { show } from "./dialog.js";
import { h } from "./dom.js";

const KEY = "kvstrata.page-key";
const PATH = "#/login/";
let asking = null;
let finish = null; // ends the open dialog
let wrong = "";

/** The page key; null if this browser has not logged in. */
export const pageKey = () => localStorage.getItem(KEY);

/** Begins a session. Returns why not, or "" for success. */
async function begin(code) {
  let response;
  try {
    response = await fetch("/v1/login", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ code }) });
  } catch {
    return "The controller does not answer.";
  }
  const { message, page_key: key } = await response.json().catch(() => ({}));
  if (!response.ok) return message || `The controller answered ${response.status}.`;
  localStorage.setItem(KEY, key);
  finish?.();
  return "";
}

/** Logs in by the address, if it holds a code; the code leaves the address and the history at once. */
export async function logInByAddress() {
  if (!location.hash.startsWith(PATH)) return;
  const code = location.hash.slice(PATH.length);
  history.replaceState(null, "", "#/");
  wrong = await begin(code);
}

/** Waits until this browser has another session than that of `refused`, the page key which was not taken. */
export function newSession(refused) {
  if (pageKey() !== refused) return Promise.resolve();
  asking ??= ask().finally(() => { asking = finish = null; });
  return asking;
}

function ask() {
  return new Promise((resolve) => {
    const field = h("input", {
      id: "code", type: "password", autocomplete: "off", required: true, autofocus: true, "aria-describedby": "code-note",
    });
    const fault = h("p", { class: "wrong", role: "alert", hidden: !wrong }, wrong);
    const dialog = show("Log in", [
      fault,
      h("p", { id: "code-note" }, "Run ", h("code", {}, "kvstrata ctl cluster dashboard-link"), " as the user of the controller, on its machine. ",
        "Open the link that it prints, or paste it here. It works once, for five minutes."),
      h("label", { for: "code" }, "Link, or the controller\u2019s token"), field,
    ], [h("button", { class: "primary" }, "Log in")]);
    finish = () => {
      wrong = "";
      dialog.remove();
      resolve();
    };
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.querySelector("form").addEventListener("submit", async (event) => {
      event.preventDefault();
      const text = field.value.trim();
      const at = text.indexOf(PATH);
      fault.textContent = await begin(at < 0 ? text : text.slice(at + PATH.length));
      fault.hidden = !fault.textContent;
      field.value = "";
    });
  });
}

/** Ends the session, in all tabs, and draws the page anew. */
export async function logOut() {
  await fetch("/v1/logout", { method: "POST", headers: { "kvstrata-page-key": pageKey() ?? "" } }).catch(() => {});
  localStorage.removeItem(KEY);
  location.reload();
}

addEventListener("storage", (event) => { if (event.key === KEY && event.newValue) finish?.(); }); // another tab has logged in
