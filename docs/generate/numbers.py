"""docs/metrics.md, and the lists of all numbers of each kind of process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from docs.generate.source import GENERATED, table
from kvstrata.cluster.directory import Directory
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.copies import Copies
from kvstrata.controller.gateways import Gateways
from kvstrata.controller.metrics import ClusterNumbers
from kvstrata.controller.ranking import Ranking
from kvstrata.controller.snapshot import Snapshots
from kvstrata.gateway.admission import Admission
from kvstrata.gateway.controllers.asking import Controllers
from kvstrata.gateway.controllers.following import Following
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.metrics import Glance, PartNumbers
from kvstrata.gateway.tokens.source import Tokens
from kvstrata.observability.explain import ServerNumbers
from kvstrata.observability.logging import LogNumbers
from kvstrata.observability.numbers import Family, Numbers, families
from kvstrata.observability.tracing import Tracer
from kvstrata.p2p.serving import RecordServer
from kvstrata.process.http_connections import Bounds
from kvstrata.process.lifecycle import ProcessNumbers
from kvstrata.rpc.control_port import ControlPort
from kvstrata.rpc.zmq_server import ZmqServer
from kvstrata.server.admin.status import ForecastNumbers, InstanceNumbers, PoolNumbers, SessionNumbers
from kvstrata.server.claims import Claims
from kvstrata.server.cluster.held import HeldChunks
from kvstrata.server.cluster.membership import Membership
from kvstrata.server.listener import AttachServer, Traffic
from kvstrata.server.recuts.recuts import Recuts
from kvstrata.server.requests.promises import Promises
from kvstrata.tiers.config import StorePolicy
from kvstrata.tiers.loads import PrefetchController
from kvstrata.tiers.puts import StoreController
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tails import TailPuts

Parts = dict[str, tuple[type[Numbers], ...]]
SERVER: Parts = {
    "instance": (InstanceNumbers,),
    "counters": (ServerNumbers,),
    "tracing": (Tracer,),
    "pool": (PoolNumbers, ForecastNumbers),
    "sessions": (SessionNumbers,),
    "l2_store": (StoreController,),
    "tails": (TailPuts,),
    "l2_prefetch": (PrefetchController,),
    "l2_adapters": (TierSet,),
    "recuts": (Recuts,),
    "claims": (Claims,),
    "promises": (Promises,),
    "cluster": (Membership,),
    "peers_served": (RecordServer,),
    "control": (HeldChunks, ControlPort, ZmqServer),
    "attach": (AttachServer,),
    "rpc": (Traffic,),
    "http": (Bounds,),
    "process": (ProcessNumbers,),
    "log": (LogNumbers,),
}
"""By section of the status document."""
CONTROLLER: Parts = {
    "controller": (
        *(ClusterNumbers, Directory, Ranking, Gateways, Copies, Cluster, ControlPort, ZmqServer, Snapshots),
        ProcessNumbers,
    ),
    "controller_http": (Bounds,),
    "controller_log": (LogNumbers,),
}
GATEWAY: Parts = {
    "gateway": (Meters, Tokens, Admission, Controllers, Following, Glance, PartNumbers),
    "gateway_http": (Bounds,),
    "gateway_log": (LogNumbers,),
}
"""Of controllers and gateways by prefix."""


def families_of(process: Parts) -> dict[str, Family]:
    """The families of a process, by name."""
    found = itertools.chain.from_iterable(
        families(part, section if part.prefix is None else part.prefix)
        for section, parts in process.items()
        for part in parts
    )
    return {family.name: family for family in found}


LABELS = {
    "end": "how a lookup's wait for promised chunks ended: `ready`, `broken` or `late`",
    "size": "`0.5`, `1`, `2`, `4`: times the present size of L1, or of a tenant's share of it",
    "of": "`hits`, `seconds`",
    "instance_id": "`instance_id` of the configuration",
    "op": "[operations](internals/protocol.md#operations)",
    "code": "[error codes](internals/protocol.md#errors)",
    "reason": "[reasons of a miss](internals/protocol.md#reasons-of-a-miss); for skipped puts: `Skip` in "
    "`src/kvstrata/tiers/puts.py`, or the adapter's own word",
    "outcome": "[outcomes of reserve](internals/protocol.md#operations); for an adapter: `stored`, `absent` and so "
    "on, with `:reason` if it has one",
    "tier": "`l1`, or `l2` for chunks that were loaded first",
    "tenant": "a tenant named in the settings or the tenants file",
    "adapter": "type and index in `l2_adapters`, like `fs-0`",
    "operation": "`exists`, `put`, `load`, `delete`",
    "state": "states of an entry in L1: `reserved`, `ready`, `unverified`, `quarantined`",
    "cause": "causes of an eviction: `policy`, `window`",
    "phase": "`lookup` (asking the adapters), `wait` (for the adapter, in its lane, or for another load of the same "
    "chunk), `medium`, `verify` (checksums), `promote` (making the chunks visible in L1)",
    "event": "the adapter's own counts (`numbers` in the status); for bytes, without `_bytes`",
}


def _table(found: Iterable[Family]) -> str:
    rows = [
        [
            f"`{one.name}{'_total' if one.kind == 'counter' else ''}`",
            one.kind,
            ", ".join(f"`{label}`" for label in one.labels),
            one.meaning,
        ]
        for one in found
    ]
    return table(["metric", "type", "labels", "meaning"], rows)


def metrics() -> str:
    """docs/metrics.md."""
    labels = dict.fromkeys(label for family in families_of(SERVER).values() for label in family.labels)
    return "".join(
        (
            "# Metrics\n\n",
            GENERATED.format("the declarations of the parts that `docs/generate/numbers.py` lists"),
            "\nThe admin port serves `/metrics` in Prometheus' text format, at most 0.25 s old. Counters start at 0 "
            "with the server, durations are in seconds, and ratios are between 0 and 1. Labels never name requests or "
            "keys, and every label has a closed set of values. The status document (`kvstrata ctl status --all`) has "
            "the same numbers in the sections below, without the histograms.\n\n## Labels\n\n",
            table(["label", "values"], [[f"`{label}`", LABELS[label]] for label in labels]),
            *(
                f"\n## `{section}`\n\n{_table(families_of({section: parts}).values())}"
                for section, parts in SERVER.items()
            ),
            "\n## Of the controller\n\n`/metrics` on its HTTP port. `instance` is the name of an instance, at most "
            "1,000 of them.\n\n",
            _table(families_of(CONTROLLER).values()),
            "\n## Of the gateway\n\n`/metrics` on its port. Tenants and engines are named as in the settings, models "
            "as by the engines; the label is empty if a request has none, and beyond 4,096 combinations of the three "
            "all are `other`.\n\n",
            _table(families_of(GATEWAY).values()),
            f"\nPolicies of an adapter (`l2_store.adapters.ADAPTER.policy`): {', '.join(map(str, StorePolicy))}.\n",
        )
    )
