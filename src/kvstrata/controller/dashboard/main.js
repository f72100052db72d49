// The controller's dashboard: its pages, and the words for the state of its connection.

import { run } from "./frame.js";
import { listen, live } from "./live.js";
import { eventsPage } from "./pages/events.js";
import { explorerPage } from "./pages/explorer.js";
import { instancePage } from "./pages/instance.js";
import { instancesPage } from "./pages/instances.js";
import { metricsPage } from "./pages/metrics.js";
import { overviewPage } from "./pages/overview.js";
import { tiersPage } from "./pages/tiers.js";

await run({
  pages: [
    [/^\/?$/, overviewPage],
    [/^\/instances$/, instancesPage],
    [/^\/instances\/([^/]+)(?:\/(runtime|workers))?$/, instancePage],
    [/^\/tiers$/, tiersPage],
    [/^\/explorer$/, explorerPage],
    [/^\/events$/, eventsPage],
    [/^\/metrics$/, metricsPage],
  ],
  menu: [
    ["/", "Overview"], ["/instances", "Instances"], ["/tiers", "Tiers"], ["/explorer", "Explorer"], ["/events", "Events"],
    ["/metrics", "Metrics"],
  ],
  says: {
    connecting: "Asking the controller.",
    live: "The page asks every two seconds.",
    lost: "The controller does not answer.",
  },
  source: live,
  listen,
});
