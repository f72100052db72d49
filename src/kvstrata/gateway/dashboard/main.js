// The gateway's dashboard: its pages, and the words for the state of its connection.

import { run } from "./frame.js";
import { listen, live } from "./live.js";
import { decisionPage } from "./pages/decision.js";
import { enginePage } from "./pages/engine.js";
import { enginesPage } from "./pages/engines.js";
import { overviewPage } from "./pages/overview.js";
import { routingPage } from "./pages/routing.js";

await run({
  pages: [
    [/^\/?$/, overviewPage],
    [/^\/routing$/, routingPage],
    [/^\/routing\/([^/]+)$/, decisionPage],
    [/^\/engines$/, enginesPage],
    [/^\/engines\/([^/]+)$/, enginePage],
  ],
  menu: [["/", "Overview"], ["/routing", "Routing"], ["/engines", "Engines"]],
  says: {
    connecting: "Asking the gateway.",
    live: "The page asks every two seconds.",
    lost: "The gateway does not answer.",
  },
  source: live,
  listen,
});
