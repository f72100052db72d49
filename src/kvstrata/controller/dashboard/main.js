// The dashboard's frame: chooses the page that the address names, and draws the head and the state of the
// connection.

import { measure, onRedraw } from "./chart.js";
import { announce, h, morphChildren } from "./dom.js";
import { ago, clock } from "./format.js";
import { listen, live } from "./live.js";
import { logInByAddress, logOut, pageKey } from "./login.js";
import { eventsPage } from "./pages/events.js";
import { explorerPage } from "./pages/explorer.js";
import { instancePage } from "./pages/instance.js";
import { instancesPage } from "./pages/instances.js";
import { metricsPage } from "./pages/metrics.js";
import { overviewPage } from "./pages/overview.js";
import { tiersPage } from "./pages/tiers.js";

/** A page is {title, view(context) → content, enter?(context), leave?()}, its context {live, redraw, params}. */
const PAGES = [
  [/^\/?$/, overviewPage],
  [/^\/instances$/, instancesPage],
  [/^\/instances\/([^/]+)(?:\/(runtime|workers))?$/, instancePage],
  [/^\/tiers$/, tiersPage],
  [/^\/explorer$/, explorerPage],
  [/^\/events$/, eventsPage],
  [/^\/metrics$/, metricsPage],
];
const MENU = [
  ["/", "Overview"], ["/instances", "Instances"], ["/tiers", "Tiers"], ["/explorer", "Explorer"], ["/events", "Events"],
  ["/metrics", "Metrics"],
];
const CONNECTIONS = {
  connecting: ["Connecting", "Asking the controller."],
  live: ["Live", "The page asks every two seconds."],
  lost: ["Disconnected", "The controller does not answer."],
};
const TICK_MS = 900;
const THEMES = { "": "System", light: "Light", dark: "Dark" };

let page = null;
let context = null;
let waiting = false;
let drawnMs = 0;
let pressed = false; // while a button is pressed nothing is drawn, since a moved button would lose the click
let owed = false;

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (pressed) owed = true;
    else draw();
  });
}

function press(begins) {
  pressed = begins;
  if (begins || !owed) return;
  owed = false;
  redraw();
}
addEventListener("pointerdown", () => press(true), true);
for (const end of ["pointerup", "pointercancel", "blur"]) addEventListener(end, () => press(false), true);

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // an address that nobody has encoded
  }
}

function route() {
  const [path, query = ""] = (location.hash.slice(1) || "/").split("?");
  const search = new URLSearchParams(query);
  for (const [pattern, found] of PAGES) {
    const match = pattern.exec(path);
    if (match) return [found, { path, search, parts: match.slice(1).map((part) => part && decoded(part)) }];
  }
  return [missingPage, { path, search, parts: [] }];
}

const missingPage = {
  title: () => "No such page",
  view: ({ params }) => [h("h1", {}, "No such page"), h("p", {}, "There is nothing at ", h("code", {}, params.path), ". ", h("a", { href: "#/" }, "Go to the overview"), ".")],
};

function navigate() {
  const [next, params] = route();
  const another = page !== next || context.params.parts[0] !== params.parts[0] || String(context.params.search) !== String(params.search);
  if (another) page?.leave?.();
  const first = page === null;
  page = next;
  context = { live, redraw, params };
  if (another) page.enter?.(context);
  draw();
  document.title = `${page.title(context)} · kvstrata`;
  if (!first && another) {
    window.scrollTo(0, 0);
    document.getElementById("main").focus({ preventScroll: true });
    announce(page.title(context));
  }
}

function chooseTheme(theme) {
  if (theme) {
    localStorage.setItem("kvstrata.theme", theme);
    document.documentElement.dataset.theme = theme;
  } else {
    localStorage.removeItem("kvstrata.theme");
    delete document.documentElement.dataset.theme;
  }
  redraw();
}

function bar() {
  const { state } = live.connection;
  const [says, note] = CONNECTIONS[state];
  const here = (path) => (path === "/" ? context.params.path === "/" || context.params.path === "" : context.params.path.startsWith(path));
  return [
    h("a", { class: "brand", href: "#/" },
      h("svg", { viewBox: "0 0 32 32", "aria-hidden": "true" },
        h("path", { class: "s3", d: "M16 17 28 22l-12 5L4 22z" }), h("path", { class: "s2", d: "M16 11 28 16l-12 5L4 16z" }),
        h("path", { class: "s1", d: "M16 5 28 10l-12 5L4 10z" })),
      h("span", {}, "kvstrata")),
    h("nav", { "aria-label": "Pages" }, h("ul", {}, MENU.map(([path, name]) => h("li", { key: path },
      h("a", { href: `#${path}`, "aria-current": here(path) ? "page" : null }, name))))),
    h("div", { class: "tools" },
      h("span", { class: `connection ${state}`, id: "connection", title: note }, h("i", { "aria-hidden": "true" }),
        h("span", { class: "unseen" }, "Connection: "), says),
      h("label", { class: "unseen", for: "theme" }, "Theme"),
      h("select", { id: "theme", value: document.documentElement.dataset.theme ?? "", onchange: (event) => chooseTheme(event.target.value) },
        Object.entries(THEMES).map(([value, name]) => h("option", { value }, name))),
      pageKey() && h("button", { key: "log-out", onclick: logOut }, "Log out")),
  ];
}

function banner() {
  const { state, sinceMs } = live.connection;
  if (state !== "lost") return [];
  return [h("div", { class: "lost", role: "alert", key: "lost" },
    h("strong", {}, `Connection lost at ${clock(sinceMs)}`),
    live.cluster ? " What you see was true then. " : " ", "The page goes on trying. ",
    h("span", { class: "ticking", "aria-hidden": "true" }, `(${ago(sinceMs)})`))];
}

function draw() {
  if (!context) return;
  drawnMs = performance.now();
  morphChildren(document.getElementById("bar"), bar());
  morphChildren(document.getElementById("banner"), banner());
  const main = document.getElementById("main");
  main.classList.toggle("stale", live.connection.state === "lost");
  morphChildren(main, [h("div", { key: context.params.path.split("/").slice(0, 3).join("/"), class: "page" }, page.view(context))]);
  measure();
}

onRedraw(redraw);
window.addEventListener("hashchange", () => logInByAddress().then(navigate));
window.addEventListener("resize", redraw);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address's hash names the page
  document.getElementById("main").focus();
});
setInterval(() => { if (performance.now() - drawnMs > TICK_MS) redraw(); }, 1000); // ages tick also without messages
await logInByAddress();
navigate();
listen(redraw);
