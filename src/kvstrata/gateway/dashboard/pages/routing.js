// The last decisions, newest first.

import { h } from "../dom.js";
import { decisions } from "../gateway_parts.js";

export const routingPage = {
  title: () => "Routing",
  view({ live, redraw }) {
    const heading = h("h1", {}, "Routing");
    if (!live.status) return [heading, h("p", { class: "quiet" }, "Asking the gateway …")];
    return [
      h("div", { class: "heading" }, heading, h("span", { class: "quiet" }, "policy ", h("code", {}, live.status.gateway.policy))),
      live.decisions.length === 0 ? h("p", { class: "quiet" }, "No request has come yet.")
        : decisions({ id: "decisions", rows: live.decisions, filter: true, prefix: "", redraw }),
    ];
  },
};
