// Modal dialogs: the browser keeps the focus inside, closes them by Escape, and gives the focus back afterwards.

import { h } from "./dom.js";

let number = 0;

function show(title, content, buttons, attributes = {}) {
  const id = `dialog-${(number += 1)}`;
  const dialog = h("dialog", { "aria-labelledby": id, ...attributes },
    h("form", { method: "dialog" }, h("h2", { id }, title), content, h("div", { class: "buttons" }, buttons)));
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** Asks the user to confirm an action. Resolves to whether it was confirmed. */
export function confirm({ title, paragraphs, action, danger = false }) {
  return new Promise((resolve) => {
    const dialog = show(title, paragraphs.map((text) => h("p", {}, text)), [
      h("button", { value: "no", autofocus: true }, "Cancel"),
      h("button", { value: "yes", class: danger ? "danger" : "primary" }, action),
    ], { role: "alertdialog" });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
  });
}

/** Asks the user for the bearer token until one is given. */
export function askToken(refused) {
  return new Promise((resolve) => {
    const field = h("input", {
      id: "token", type: "password", autocomplete: "current-password", required: true, autofocus: true,
      "aria-describedby": "token-note", "aria-invalid": refused ? "true" : null,
    });
    const dialog = show("Token", [
      refused && h("p", { class: "wrong", role: "alert" }, "The controller refused that token."),
      h("p", { id: "token-note" }, "This controller wants the token of its ",
        h("code", {}, "http.token_file"), ". It is kept until this tab is closed."),
      h("label", { for: "token" }, "Bearer token"), field,
    ], [h("button", { class: "primary" }, "Sign in")]);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(field.value.trim());
    });
  });
}
