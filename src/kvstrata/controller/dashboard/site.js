// What the shared modules need to know of this dashboard: who serves it, and how one logs in.

import { h } from "./dom.js";

export const site = {
  name: "controller",
  login: "/v1/login",
  logout: "/v1/logout",
  hint: () => ["Run ", h("code", {}, "kvstrata ctl cluster dashboard-link"), " as the user of the controller, on its machine. ",
    "Open the link that it prints, or paste it here. It works once, for five minutes."],
};
