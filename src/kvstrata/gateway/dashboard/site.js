// What the shared modules need to know of this dashboard: who serves it, and how one logs in.

import { h } from "./dom.js";

export const site = {
  name: "gateway",
  login: "/gateway/login",
  logout: "/gateway/logout",
  hint: () => ["The gateway\u2019s log has a link (", h("code", {}, "dashboard open="), "), which works once, for five minutes. ",
    "The line ", h("code", {}, "ready"), " names the file with the operators\u2019 token (", h("code", {}, "http_token_file"), "). Paste either here."],
};
