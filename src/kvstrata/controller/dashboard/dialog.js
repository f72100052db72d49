// Modal dialogs: the browser keeps the focus inside, closes them by Escape, and gives the focus back afterwards.

import { h } from "./dom.js";

let number = 0;

/** Opens a modal dialog, and returns its element. */
export function show(title, content, buttons, attributes = {}) {
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
