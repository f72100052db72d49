"""Opens an instance. Only this file and composition.py know all of its rooms.

    ports ─▶ segment and pool ─▶ ground ─▶ tables ─▶ news ─▶ L2 ─▶ tiers open ─▶ requests ─▶ attach ─▶ admin
          ─▶ membership ─▶ boundary ─▶ HTTP made

Rules:

1. Every part is complete when it is constructed; nothing is put into it afterwards.  The parts and callbacks that it
   needs are made before it.
2. Each step adds a closer to `Shell.closers` for everything that it opens; the closers run in reverse, even when a
   later step fails.
3. Nothing answers yet: ports are bound early, to report a taken port early, and read late (server/process.py).
   Only the tiers and the store controller, which puts to them, are at work.
"""

from __future__ import annotations

import asyncio
import functools
import os
import platform
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError, StorageError
from kvstrata.memory.attach.server import AttachServer
from kvstrata.memory.paths import RPC_SOCKET, segment_dir, socket_dir
from kvstrata.memory.segment import Segment
from kvstrata.observability.exposition import ServerCollector
from kvstrata.observability.logging import EventLog, log_stats
from kvstrata.p2p.serving import PeerServer
from kvstrata.policy.misses import Explainer
from kvstrata.process.http_gate import Access
from kvstrata.process.http_thread import Port, make_port
from kvstrata.process.keeper import Restarts
from kvstrata.process.lane import PoolLane
from kvstrata.process.lifecycle import soon
from kvstrata.process.listen import Listener, ServedToken, warn_if_open
from kvstrata.process.listen import listen as http_listen
from kvstrata.process.supervisor import Supervisor
from kvstrata.server.admin.admin import Admin, StrandedSessions
from kvstrata.server.admin.status import TenantRows
from kvstrata.server.cluster.events import TierNews
from kvstrata.server.cluster.membership import (
    Membership,
    make_membership,
    other_hosts_out_of_reach,
    peer_config,
    serve_peers,
)
from kvstrata.server.cluster.own_key import member_keys
from kvstrata.server.cluster.told_tiers import ToldTiers
from kvstrata.server.composition import (
    L2,
    Ground,
    Tables,
    lay_ground,
    make_admin,
    make_boundary,
    make_l2,
    make_requests,
    make_tables,
)
from kvstrata.server.facts import MAX_SESSION_SHARE, InstanceFacts
from kvstrata.server.housekeeping import Housekeeping
from kvstrata.server.l2.reports import TierReports
from kvstrata.server.l2.tier_control import TierControl
from kvstrata.server.l2.tiers import TierSet
from kvstrata.server.plan import Plan, embedded_adapter, segment_settings
from kvstrata.server.requests.boundary import Boundary
from kvstrata.storage.base import AdapterContext
from kvstrata.storage.entry import TierConfig, configure_tier
from kvstrata.storage.stack import Surroundings, build_stack
from kvstrata.types import NOT_IN_A_NAME

if TYPE_CHECKING:
    from fastapi import FastAPI

RECUTS_WAITING = 16
"""Most lookups whose missing chunks wait to be made of records of other geometries; one is at work at a time."""


class Shell(NamedTuple):
    """What the server process gives its instance."""

    loop: asyncio.AbstractEventLoop
    supervisor: Supervisor
    closers: list[Callable[[], Coroutine[Any, Any, None]]]
    """One closer for each part that was opened; they are called last first."""
    log: EventLog
    restarts: Restarts
    started_s: float


class Instance(NamedTuple):
    """A whole instance, which does not answer anybody yet."""

    facts: InstanceFacts
    ground: Ground
    adopted: bool
    """L1 was taken over from the previous server."""
    segment: Segment
    tables: Tables
    l2: L2
    boundary: Boundary
    attach: AttachServer
    housekeeping: Housekeeping
    peer_server: PeerServer | None
    membership: Membership | None
    http: tuple[Listener, Port] | None
    http_token: ServedToken | None
    """The admin port's token; None without that port."""
    tenants: TenantRows


async def open_instance(plan: Plan, shell: Shell) -> Instance:
    """Open everything that the plan names. Raises KvstrataError; the caller then runs `shell.closers`."""
    settings, closers = plan.settings, shell.closers

    # 1. Ports, L1, and the facts about the instance.
    port = settings.named_port
    listener = http_listen(settings.http) if settings.http.enabled else None
    if listener is not None:
        closers.append(soon(listener.close))
    segment, directory = _open_segment(plan, port, shell)
    pool = segment.pool
    facts = InstanceFacts(
        instance_id=settings.instance_id or NOT_IN_A_NAME.sub("-", f"{platform.node()}-{port}")[:64],
        epoch=pool.epoch,
        port=port,
        http_port=0 if listener is None else listener.port,
        socket_dir=directory,
        chunk_tokens=settings.chunk_size,
        max_reserved_bytes=pool.extents_bytes // MAX_SESSION_SHARE,
        started_s=shell.started_s,
    )
    lane, own_lane = PoolLane(shell.loop), PoolLane(shell.loop, threads=1, queue=None, name="kv-own")
    recut_lane = PoolLane(shell.loop, threads=1, queue=RECUTS_WAITING, name="kv-recut")
    closers += [soon(lane.close), soon(recut_lane.close), soon(own_lane.close)]
    ground = lay_ground(
        settings,
        facts,
        pool,
        shell.loop,
        shell.supervisor,
        lane,
        recut_lane,
        own_lane,
        SystemClock(),
        Explainer(),
    )

    # 2. Tables, news, L2 and its tiers.
    tables = make_tables(ground)
    tiers = TierSet()
    told = ToldTiers(tiers, shell.supervisor)
    urls = settings.controller.url.split(",") if settings.controller.url else []
    news_of = {url: TierNews(told) for url in dict.fromkeys(urls)}
    keys = member_keys(settings, facts, shell.supervisor, os.environ) if news_of else None
    peer = peer_config(plan, keys)
    l2 = make_l2(ground, tiers, list(news_of.values()), peer_tier=peer.name if peer else "")
    control = _make_tier_control(ground, tables, l2, segment)
    closers.append(control.close)
    ground.board.put("l2_adapters", control.status)
    l2.store.start()
    await _open_tiers(plan, peer, control, port, shell.log)

    # 3. Requests, processes, and the operations of admins.
    requests = make_requests(ground, tables, l2, plan.tokens)
    attach = AttachServer(
        directory / RPC_SOCKET,
        pool,
        segment.descriptors,
        requests.hooks,
        instance_id=facts.instance_id,
        max_reserved_bytes=facts.max_reserved_bytes,
    )
    admin = make_admin(ground, tables, l2)

    # 4. The cluster, if a controller is set: a server of peers, and a link to each controller.
    served = membership = None
    if keys is not None:
        served = serve_peers(plan, keys, ground, l2, closers)
        membership = make_membership(plan, keys, ground, tables, l2, admin, told, news_of, served)
        closers.append(membership.stop)
        ground.board.put("cluster", membership.status)
        ground.board.put("peers_served", served.server.status)

    # 5. The boundary, which answers frames, and the HTTP application.
    boundary = make_boundary(ground, tables, l2, requests, plan.tokens)
    housekeeping = Housekeeping(
        pool,
        own_lane,
        l2.events,
        l2.store,
        l2.borrowed,
        ground.clock,
        shell.supervisor,
        l2.tails,
    )
    restarts = shell.restarts
    ground.board.put("process", lambda: {"restarts": restarts.times, "last_end": restarts.cause})
    ground.board.put("log", log_stats)
    ground.board.put("attach", attach.stats)
    ground.board.put("rpc", attach.traffic)
    closers.append(attach.stop)
    http, http_token = None, None
    if listener is not None:
        whole_admin = Admin(
            pool,
            ground.readiness,
            ground.board,
            ServerCollector(facts.instance_id, ground.counters, ground.board.numbers),
            ground.explainer,
            admin.prewarms,
            admin.clearing,
            StrandedSessions(attach),
            control,
        )
        insecure = settings.security.insecure
        warn_if_open(settings.http, plan.http_token, listener.port, shell.log, insecure=insecure)
        access = Access(settings.http, plan.http_token)
        http_port = await make_port(functools.partial(_make_app, whole_admin), access)
        http_token = ServedToken(
            http_port.set_token, settings.http, listener, plan.http_token, "server", shell.log
        )
        closers.append(soon(http_token.close))
        ground.board.put("http", http_port.stats)
        http = listener, http_port
    return Instance(
        facts=facts,
        ground=ground,
        adopted=segment.adopted,
        segment=segment,
        tables=tables,
        l2=l2,
        boundary=boundary,
        attach=attach,
        housekeeping=housekeeping,
        peer_server=served.server if served else None,
        membership=membership,
        http=http,
        http_token=http_token,
        tenants=admin.tenants,
    )


# --- the steps ------------------------------------------------------------------------------------------------


def _open_segment(plan: Plan, port: int, shell: Shell) -> tuple[Segment, Path]:
    """Make or adopt L1. Returns the segment, which a closer closes, and the folder of the sockets.

    Raises ConfigError or SegmentError.
    """
    settings = plan.settings
    directory = socket_dir(settings.socket_dir, port)
    shm = (
        Path(settings.l1.segment_dir) if settings.l1.segment_dir else segment_dir(port, settings.instance_id)
    )
    forgotten = settings.l1.forget_on_exit
    segment = Segment.open(segment_settings(settings, plan.extents_bytes, directory, shm), shell.restarts)
    shell.closers.append(soon(segment.destroy if forgotten else segment.close))
    return segment, directory


def _make_tier_control(ground: Ground, tables: Tables, l2: L2, segment: Segment) -> TierControl:
    """Make the part that opens and closes tiers, with what this instance lends to each tier."""
    pool = ground.pool
    reports = TierReports(ground.loop, l2.store, ground.history, ground.counters)

    around = Surroundings(
        ground.clock, pool.extents_bytes, reports.operation, deadline_ms=ground.settings.l2.deadline_ms
    )

    def context(name: str) -> AdapterContext:
        return AdapterContext(
            ground.facts.instance_id,
            ground.clock,
            pool.extents_address,
            pool.extents_bytes,
            functools.partial(reports.dropped, name),
            segment.descriptors.extents,
            segment.descriptors.sessions_lock,
            tables.payload_kinds.element_bytes_of,
        )

    return TierControl(
        l2.tiers,
        pool,
        l2.store,
        l2.prefetch,
        build=functools.partial(build_stack, around=around),
        context=context,
    )


async def _open_tiers(
    plan: Plan, peer: TierConfig | None, control: TierControl, port: int, log: EventLog
) -> None:
    """Open the tiers of the plan. The tier that reads other instances comes first: their RAM is nearer than a disk.

    Raises ConfigError.  A tier that no setting asks for (the embedded one, peers with `auto`) is left out if it cannot
    be opened.
    """
    settings = plan.settings
    automatic = settings.p2p.engine == "auto"
    if peer is not None:
        if other_hosts_out_of_reach(plan, os.environ):
            log.warning(
                "p2p_this_host_only",
                note="no RDMA card is here and p2p.tcp is off: no L1 of another host is read; set p2p.tcp (--p2p-tcp) "
                "if only the instances reach this network, since UCX's tcp lets its peers write the server's memory",
            )
        try:
            await control.open(peer, must=automatic)
        except (ConfigError, StorageError) as error:
            if not automatic or error.field == "controller.url":
                raise
            log.warning("p2p_off", reason=error.message)
    elif settings.controller.url and automatic:
        log.warning("p2p_off", reason="no transfer engine is installed (ucx, or nixl with p2p.tcp)")
    for config in plan.adapters:
        await control.open(config)
    if plan.embedded_l2:  # its directory is named after the port that was bound
        try:
            await control.open(configure_tier(embedded_adapter(port, os.environ), 0), must=True)
        except (ConfigError, StorageError) as error:
            log.warning("embedded_l2_off", reason=error.message)


def _make_app(admin: Admin) -> FastAPI:
    # FastAPI is imported here, on a thread, and only if HTTP is served.
    from kvstrata.server.http.app import make_app

    return make_app(admin)
