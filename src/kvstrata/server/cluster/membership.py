"""An instance's membership in a cluster: a link to each controller, and the parts that the links share.

Rules:

1. A controller can neither stop nor slow this instance: no engine's request waits for anything here, every message to a
   controller has a timeout, every queue a bound.  A follower that does not keep up lists everything again.
2. An operation is carried out once, when it arrives.
3. The instance registers with each of several controllers, and each follows it.  One of them leads: an operation whose
   (cluster id, token) is smaller than the greatest seen is refused.

The link to one controller: cluster/link.py; replies to followers: held.py, condition.py; operations: commands.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from kvstrata import __version__
from kvstrata.cluster.link import Beats, ControllerLink
from kvstrata.config.model import ServerSettings
from kvstrata.errors import NotFound, Refused
from kvstrata.keys.batch import count
from kvstrata.memory.paths import PEER_SOCKET
from kvstrata.native.core import storage_keys
from kvstrata.observability.numbers import Number, Numbers
from kvstrata.p2p.medium import peer_tier
from kvstrata.p2p.serving import PeerServer, PeersServed, RecordServer
from kvstrata.p2p.settings import PeerSettings
from kvstrata.process.http_gate import is_loopback
from kvstrata.rpc.cluster_wire import (
    CLUSTER_PROTOCOL_VERSION,
    Await,
    Awaited,
    Changed,
    Changes,
    Do,
    Goodbye,
    List,
    Listed,
    Register,
    Registered,
    Run,
)
from kvstrata.rpc.control_port import ControlPort
from kvstrata.rpc.zmq_curve import KeyKind
from kvstrata.rpc.zmq_link import Links
from kvstrata.rpc.zmq_server import Address
from kvstrata.server.cluster.commands import Actions
from kvstrata.server.cluster.condition import Condition
from kvstrata.server.cluster.held import HeldChunks
from kvstrata.server.cluster.own_key import MemberKeys
from kvstrata.server.parts import Parts
from kvstrata.server.plan import Plan
from kvstrata.server.processes import tenant_number
from kvstrata.tiers.config import TierConfig
from kvstrata.types import KEY_BYTES

_PORT = re.compile(r":\d{1,5}$")


def peer_config(plan: Plan, keys: MemberKeys | None) -> TierConfig | None:
    """Configuration of the tier that reads other instances; None without a cluster or a transfer engine."""
    settings = plan.settings
    if keys is None or plan.p2p_engine is None:
        return None
    return peer_tier(
        PeerSettings(
            tuple(dict.fromkeys(settings.controller.url.split(","))),
            plan.p2p_engine.name,
            plan.p2p_engine.why,
            tcp=settings.p2p.tcp,
            this_host_only=_this_host_only(settings),
            curve_file=keys.file,
            seal=settings.p2p.seal,
            lookup_timeout_ms=settings.p2p.lookup_timeout_ms,
            load_timeout_ms=settings.p2p.load_timeout_ms,
        ),
        len(plan.adapters),
    )


def _this_host_only(settings: ServerSettings) -> bool:
    """Whether peers can reach this instance from its own host only."""
    return not settings.p2p.advertise and is_loopback(_host_of(settings.p2p.listen))


class Served(NamedTuple):
    """The control port of one instance, and the server of peers behind it."""

    port: ControlPort
    endpoint: str
    peers: PeersServed
    gives_to_peers: bool


def serve(
    plan: Plan,
    keys: MemberKeys,
    parts: Parts,
    closers: list[Callable[[], Coroutine[Any, Any, None]]],
) -> Served:
    """Bind the control port, and make the server that sends records of L1 to peers, if the plan has peers.

    Adds their closers to `closers`.  Raises ConfigError.
    """
    settings, p2p = plan.settings, plan.settings.p2p
    control = ControlPort(parts.loop, parts.facts.epoch, keys.listening)
    closers.append(control.close)
    host, port_text = _host_of(p2p.listen), p2p.listen.rpartition(":")[2]
    port = control.server.bind_tcp(
        host,
        int(port_text),
        keys=keys.listening,
        anywhere=settings.security.insecure or bool(settings.controller.curve_file),
        host_setting="p2p.listen",
        port_setting="p2p.listen",
        flag="--p2p-listen",
        keys_setting="controller.curve_file (--cluster-curve-file)",
        refused_note=keys.refused_note,
    )
    shown = "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host
    advertised = p2p.advertise or f"{shown}:{port}"
    server, peers = None, PeersServed(None)
    if plan.p2p_engine is not None and parts.tiers.get(parts.peer_reads.name) is not None:
        socket_path = parts.facts.socket_dir / PEER_SOCKET
        server = PeerServer(
            RecordServer(parts.pool, socket_path=socket_path, host=host, port=p2p.data_port),
            control,
            instance_id=parts.facts.instance_id,
            incarnation=parts.facts.epoch,
            engine=plan.p2p_engine.name,
            metadata=parts.peer_reads.metadata,
            seal=p2p.seal,
            members=lambda: keys.listening.now().clients,
        )
        closers.append(server.close)
        peers = PeersServed(server)

        async def awaited(asked: Await, peer: Address) -> Awaited:
            n_slices = count(asked.slices)
            is_whole = not (len(asked.chain) % KEY_BYTES or len(asked.slices) % KEY_BYTES)
            if peers.draining or not is_whole or len(asked.record_bytes) not in (0, n_slices):
                return Awaited(asked.seq, parts.facts.epoch, 0, "none")

            async def stage(chain: bytes) -> None:
                keys = storage_keys(asked.root, chain, asked.slices)
                await parts.prefetch.fetch(
                    keys, n_slices, identity=asked.root, tenant=tenant_number(asked.tenant), limits=asked.record_bytes,
                    deadline_s=parts.clock.monotonic_s() + asked.wait_ms / 1000, own=True,
                )  # fmt: skip

            found = await parts.grants.promises.for_peer(peer.key, asked, stage)
            return Awaited(asked.seq, parts.facts.epoch, *found)

        control.serve((KeyKind.INSTANCE,), {Await: awaited})
    endpoint = f"tcp://{advertised if _PORT.search(advertised) else f'{advertised}:{port}'}"
    return Served(control, endpoint, peers, server is not None)


class Membership(Numbers):
    """The links to all controllers, and the sums of their metrics. Belongs to the event loop."""

    def __init__(
        self,
        told: Register,
        keys: MemberKeys,
        urls: Iterable[str],
        parts: Parts,
        held: HeldChunks,
        peers: PeersServed,
        actions: Actions,
    ) -> None:
        """`told`: the registration; its tiers are filled in when it is sent. Raises Unavailable for an invalid URL."""

        async def say() -> Register:
            return msgspec.structs.replace(told, tiers=held.tiers(), media=held.media())

        self._sockets = Links(parts.loop)
        beats = Beats(say, Registered, refused_why=keys.refused_why)
        self._links = [ControllerLink(url, self._sockets, keys.own, beats) for url in urls]
        self._goodbye = Goodbye(0, told.instance, told.incarnation)
        self._supervisor = parts.supervisor
        self._held = held
        self._peers = peers
        self._actions = actions
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to register with each controller; they may be absent."""
        self._held.start()
        self._tasks = [self._supervisor.spawn(link.keep(), "cluster") for link in self._links]

    async def stop(self) -> None:
        """Stop serving peers, say goodbye to the connected controllers, and close. Idempotent."""
        self._peers.drain(True)
        self._actions.thaw()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self._held.stop(), *(link.goodbye(self._goodbye) for link in self._links))
        self._sockets.close()

    def values(self) -> Iterator[tuple[Number, Any]]:
        """Sums over all links; a boolean is true if it is true for any link."""
        for number in ControllerLink.declared:
            values = [getattr(link, number.field) for link in self._links]
            yield number, any(values) if isinstance(values[0], bool) else sum(values)

    def document(self) -> dict[str, Any]:
        """The sums, and a row for each controller."""
        return {**super().document(), "controllers": [link.document() for link in self._links]}


Membership.declared = ControllerLink.declared


def make_membership(
    plan: Plan, keys: MemberKeys, parts: Parts, held: HeldChunks, urls: Iterable[str], served: Served
) -> Membership:
    """Make a link to each controller, and answer followers. Raises Unavailable if a URL is not an endpoint."""
    facts, actions = parts.facts, Actions(parts, served.peers)
    condition = Condition(parts, held, served.peers)

    def changes(asked: Changes, _: Address) -> asyncio.Future[Changed]:
        for said in asked.hints:
            with contextlib.suppress(NotFound, Refused):
                parts.requests.lookups.hint(said.request_id, said.next)

        def changed(following: int, runs: list[Run]) -> Changed:
            now = condition.now(actions.leader) if asked.condition else None
            return Changed(asked.seq, facts.epoch, following, runs, now)

        return held.changes(asked.cursor, asked.wait_ms / 1000, changed)

    async def page(asked: List, _: Address) -> Listed:
        return Listed(asked.seq, facts.epoch, *await held.page(asked.tier, asked.cursor))

    served.port.serve((KeyKind.CONTROLLER, KeyKind.GATEWAY), {Changes: changes, List: page})
    served.port.serve((KeyKind.CONTROLLER,), {Do: lambda asked, _: actions.carry_out(asked)})
    if served.gives_to_peers:
        parts.grants.promises.begin_to_tell(held)
    told = Register(
        0,
        CLUSTER_PROTOCOL_VERSION,
        facts.instance_id,
        facts.epoch,
        __version__,
        held.tiers(),
        parts.pool.extents_bytes,
        facts.chunk_tokens,
        served.endpoint,
        f"http://{plan.settings.http.host}:{facts.http_port}" if facts.http_port else "",
        served.gives_to_peers,
        plan.settings.p2p.zone,
        platform.node()[:200],
        os.getpid(),
        peer_engine=plan.p2p_engine.why[:200] if plan.p2p_engine is not None else "",
    )
    return Membership(told, keys, urls, parts, held, served.peers, actions)


def _host_of(listen: str) -> str:
    """The host of HOST:PORT or [HOST]:PORT."""
    return listen.rpartition(":")[0].strip("[]")
