"""docs/wire-codes.md and docs/cluster-messages.md."""

from __future__ import annotations

import inspect

import msgspec

from docs.generate.source import GENERATED, fields, line, members, table
from kvstrata.client.handles import StoreOutcome
from kvstrata.errors import WIRE_ERRORS
from kvstrata.native.status import reasons
from kvstrata.policy.store import Skip
from kvstrata.process.http import HTTP_STATUS
from kvstrata.rpc import attach_wire, cluster_fields, cluster_wire, gateway_wire, wire
from kvstrata.rpc.ping_wire import DeviceCopies, LoadRate
from kvstrata.types import LayoutIdentity, MissReason, RequestIdentity, Role, Slice


def wire_codes() -> str:
    """docs/wire-codes.md."""
    parts = [
        "# Messages and codes on the wire\n\n",
        GENERATED.format(
            "`src/kvstrata/rpc/wire.py`, `attach_wire.py`, `types.py`, `errors.py` and `ext/core/src/base/reason.h`, "
            "where the texts here stand below or beside the names"
        ),
        "\nThe rules are in [protocol.md](protocol.md). The secret of its session precedes a request. "
        "Every request begins with `op`, `session`, `seq`, every reply with `op`, `seq`, `epoch`. The "
        "fields after these are listed here, in order. Fields with a default may be left out at the end of a message; "
        "fields after the known ones are ignored.\n",
        "\n## Attach\n",
    ]
    for struct in (attach_wire.AttachRequest, attach_wire.AttachReply):
        parts.append(f"\n### {struct.__name__}\n\nA map. {line(struct.__doc__)}\n\n{fields(struct)}")
    parts.append("\n## Operations\n")
    for request, reply in wire.REPLIES.items():
        op, answer = (str(kind.__struct_config__.tag) for kind in (request, reply))
        parts.append(f"\n### {op}\n\n{line(request.__doc__)}\n\n{fields(request, ('session', 'seq'))}")
        if answer == op:
            parts.append(f"\nReply `{answer}`: {line(reply.__doc__)}\n\n{fields(reply, ('seq', 'epoch'))}")
        else:
            parts.append(f"\nReply: [{answer}](#{answer}).\n")
    parts.append("\n## Other replies\n")
    shared = [
        reply
        for request, reply in wire.REPLIES.items()
        if reply.__struct_config__.tag != request.__struct_config__.tag
    ]
    for reply in dict.fromkeys([*shared, wire.Error]):
        more = inspect.cleandoc(reply.__doc__ or "").split("\n\n")
        parts.append(f"\n### {reply.__struct_config__.tag}\n\n{line(reply.__doc__)}\n\n")
        parts.append("".join(f"{line(text)}\n\n" for text in more[1:]) + fields(reply, ("seq", "epoch")))
    parts.append("\n## Inside messages\n")
    for struct in (LayoutIdentity, RequestIdentity, Slice, DeviceCopies, LoadRate, wire.Miss):
        parts.append(f"\n### {struct.__name__}\n\n{line(struct.__doc__)}\n\n{fields(struct)}")
    parts.append(
        "\n## Error codes\n\nIn error replies, attach replies and the JSON of the admin HTTP port (with that status)."
        "\n\n"
    )
    rows = [
        [
            f"`{code}`",
            "yes" if error.retryable else "no",
            str(HTTP_STATUS.get(error, 500)),
            line(error.__doc__),
        ]
        for code, error in WIRE_ERRORS.items()
    ]
    parts.append(table(["code", "retryable", "HTTP", ""], rows))
    for title, words in (
        ("Outcomes of reserve", wire.ReserveOutcome),
        ("Outcomes of commit", wire.CommitOutcome),
        ("Reasons of a miss", MissReason),
        ("Reasons of a put to L2 that was skipped", Skip),
    ):
        parts.append(f"\n## {title}\n\n{line(words.__doc__)}\n\n{members(words)}")
    parts.append(
        "\n## Reasons of the native adapters and the pool\n\nThe reasons for which `disk`, `fs` and the pool refuse a "
        "call or fail. A put with a retryable reason is THROTTLED, with any other it is FAILED.\n\n"
    )
    parts.append(
        table(
            ["reason", "retryable", ""],
            ([f"`{row.word}`", "yes" if row.retryable else "no", row.meaning] for row in reasons()),
        )
    )
    for title, words in (
        ("Outcomes of a store, as the Python client tells them", StoreOutcome),
        ("Roles", Role),
        ("Rules of a lookup's group", wire.Rule),
        ("Tiers of a clear", wire.ClearScope),
    ):
        parts.append(f"\n## {title}\n\n{line(words.__doc__)}\n\n{members(words)}")
    return "".join(parts)


def cluster_messages() -> str:
    """docs/cluster-messages.md."""
    parts = [
        "# Messages of the cluster\n\n",
        GENERATED.format("`src/kvstrata/rpc/cluster_wire.py`, `cluster_fields.py` and `gateway_wire.py`"),
        f"\nProtocol {cluster_wire.CLUSTER_PROTOCOL_VERSION}. ZMQ over TCP, one msgpack array a frame, its name first; "
        "always with CURVE (RFC 26), which proves whose message it is. In a request `seq` follows the "
        "name. In its answer the same `seq` follows, then the `epoch` of the process that answers, which changes "
        "whenever that process restarts. The fields after these are listed here, in order. Each request has one "
        "answer: the one named here, or `failure`. The process that asks waits a bounded time and then goes on without "
        "an answer. Times are "
        "remaining milliseconds. Between instance and controller, chunks are named by *tags*, the first 8 bytes of a "
        "storage key; between instances, by whole keys.\n",
    ]
    for title, rows in _CLUSTER_SOCKETS.items():
        parts.append(f"\n## {title}\n")
        for request, reply in rows:
            more = inspect.cleandoc(request.__doc__ or "").split("\n\n")
            name = request.__struct_config__.tag
            parts.append(f"\n### {name}\n\n" + "".join(f"{line(text)}\n\n" for text in more))
            parts.append(
                fields(request, ("seq",) if issubclass(request, cluster_fields.ClusterRequest) else ())
            )
            if reply is not None:
                parts.append(f"\nAnswer `{reply.__struct_config__.tag}`: {line(reply.__doc__)}\n\n")
                parts.append(fields(reply, ("seq", "epoch")))
    parts.append(f"\n## Failure\n\nInstead of any answer. {line(cluster_wire.Failure.__doc__)}\n\n")
    parts.append(fields(cluster_wire.Failure, ("seq", "epoch")))
    parts.append("\n## Arrays inside messages\n")
    for struct in (
        cluster_fields.KvKind,
        cluster_wire.Owner,
        cluster_wire.Run,
        cluster_wire.Command,
        cluster_wire.CommandResult,
        cluster_wire.Load,
        gateway_wire.TierRate,
        gateway_wire.Served,
        gateway_wire.Holding,
    ):
        parts.append(f"\n### {struct.__name__}\n\n{line(struct.__doc__)}\n\n{fields(struct)}")
    parts.append("\n### LayoutIdentity\n\nAs in [wire-codes.md](wire-codes.md#layoutidentity).\n")
    for words in (cluster_wire.Change, cluster_wire.CommandKind):
        parts.append(f"\n## {words.__name__}\n\n{line(words.__doc__)}\n\n{members(words)}")
    return "".join(parts)


_CLUSTER_SOCKETS: dict[str, list[tuple[type[msgspec.Struct], type[msgspec.Struct] | None]]] = {
    "Controller, reply port (ROUTER)": [
        (cluster_wire.Register, cluster_wire.Registered),
        (cluster_wire.Goodbye, cluster_wire.Done),
        (cluster_wire.SyncBegin, cluster_wire.Done),
        (cluster_wire.SyncPart, cluster_wire.Done),
        (cluster_wire.SyncEnd, cluster_wire.Done),
        (cluster_wire.Where, cluster_wire.WhereReply),
        (gateway_wire.GatewayBeat, gateway_wire.GatewayHeard),
        (gateway_wire.Holdings, gateway_wire.HoldingsReply),
        (gateway_wire.Replicate, cluster_wire.Done),
    ],
    "Controller, pull port (PULL; no answer)": [(cluster_wire.Events, None)],
    "Controller, heartbeat port (ROUTER)": [
        (cluster_wire.Heartbeat, cluster_wire.Beat),
        (cluster_wire.Nudge, None),
    ],
    "Instance, `p2p.listen` (ROUTER)": [
        (cluster_wire.PeerHello, cluster_wire.PeerWelcome),
        (cluster_wire.PeerLease, cluster_wire.PeerLeased),
        (cluster_wire.PeerRelease, cluster_wire.PeerReleased),
    ],
}
