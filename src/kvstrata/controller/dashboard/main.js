// The dashboard's frame: asks for the state every two seconds, chooses the page that the address names, and draws it.

import { get } from "./api.js";
import { h, morphChildren } from "./dom.js";
import { ago, clock } from "./format.js";
import { logInByAddress, logOut, token } from "./login.js";
import { eventsPage, instancePage, instancesPage, missingPage, overviewPage } from "./pages.js";

const ANSWER_MS = 4_000;
const POLL_MS = 2_000;
const RETRY_MS = 1_000;
/** A page is {title(id), view(context) → content, documents?(id) → {name: path}}. */
const PAGES = [
  [/^\/?$/, overviewPage],
  [/^\/instances$/, instancesPage],
  [/^\/instances\/([^/]+)$/, instancePage],
  [/^\/events$/, eventsPage],
];
const MENU = [["/", "Overview"], ["/instances", "Instances"], ["/events", "Events"]];
const CONNECTIONS = { connecting: "Connecting", live: "Live", lost: "Disconnected" };

/** What is known: the document of /v1/state, the documents of the page by name ({document} or {error}), and since when. */
const context = { state: null, documents: {}, connection: "connecting", heardMs: Date.now(), id: "", path: "/", draw };
let page = missingPage;

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // an address that nobody has encoded
  }
}

function navigate() {
  const path = location.hash.slice(1) || "/";
  const [pattern, found] = PAGES.find(([each]) => each.test(path)) ?? [null, missingPage];
  page = found;
  Object.assign(context, { path, id: decoded(pattern?.exec(path)[1] ?? ""), documents: {} });
  draw();
  askDocuments();
}

/** Asks for the documents of the present page; what arrives after the page was left is dropped. */
async function askDocuments() {
  const { documents } = context;
  await Promise.all(Object.entries(page.documents?.(context.id) ?? {}).map(async ([name, path]) => {
    try {
      documents[name] = { document: await get(path) };
    } catch (error) {
      documents[name] = { ...documents[name], error };
    }
  }));
  if (documents === context.documents) draw();
}

function bar() {
  const { connection, path } = context;
  const here = (menu) => (menu === "/" ? path === "/" || path === "" : path.startsWith(menu));
  return [
    h("a", { class: "brand", href: "#/" }, "kvstrata"),
    h("nav", { "aria-label": "Pages" }, h("ul", {}, MENU.map(([menu, name]) => h("li", { key: menu },
      h("a", { href: `#${menu}`, "aria-current": here(menu) ? "page" : null }, name))))),
    h("div", { class: "tools" },
      h("span", { class: `connection ${connection}`, id: "connection" }, h("i", { "aria-hidden": "true" }),
        h("span", { class: "unseen" }, "Connection: "), CONNECTIONS[connection]),
      token() && h("button", { key: "log-out", onclick: logOut }, "Log out")),
  ];
}

function banner() {
  if (context.connection !== "lost") return [];
  return [h("div", { class: "lost", role: "alert", key: "lost" }, h("strong", {}, `The controller has not answered since ${clock(context.heardMs)}. `),
    context.state ? "This page shows the state at that time. " : "", "It keeps retrying. ", `(${ago(context.heardMs)})`)];
}

function draw() {
  document.title = `${page.title(context.id)} · kvstrata`;
  morphChildren(document.getElementById("bar"), bar());
  morphChildren(document.getElementById("banner"), banner());
  const content = context.state || page === missingPage ? page.view(context) : [h("p", { class: "quiet" }, "Loading …")];
  morphChildren(document.getElementById("main"), [h("div", { key: context.path, class: "page" }, h("h1", { class: "break" }, page.title(context.id)), content)]);
}

async function follow() {
  for (;;) {
    let pauseMs = POLL_MS;
    try {
      context.state = await get("/v1/state", { timeoutMs: ANSWER_MS });
      Object.assign(context, { connection: "live", heardMs: Date.now() });
    } catch (error) {
      if (!("status" in error)) console.warn(error);
      context.connection = "lost";
      pauseMs = RETRY_MS;
    }
    draw();
    if (context.connection === "live") await askDocuments();
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
  }
}

addEventListener("hashchange", () => { logInByAddress(); navigate(); });
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address's hash names the page
  document.getElementById("main").focus();
});
logInByAddress();
navigate();
follow();
