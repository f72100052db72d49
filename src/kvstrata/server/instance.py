"""Opens an instance. Only this file and parts.py know all of its packages.

    ports ─▶ segment and pool ─▶ held ─▶ parts ─▶ tiers open ─▶ attach ─▶ membership ─▶ HTTP made

Rules:

1. Every part is complete when it is constructed; no dependency is set afterwards.  The parts and callbacks that it
   needs are made before it.
2. Each step adds a closer to `closers` for everything that it opens; the closers run in reverse order, even when a
   later step fails.
3. No port answers yet: ports are bound early, to report a taken port early, and read late (server/process.py).  Only
   the tiers and the store controller, which puts to them, run already.
"""

from __future__ import annotations

import asyncio
import functools
import os
import platform
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError, StorageError
from kvstrata.memory.paths import RPC_SOCKET, segment_dir, socket_dir
from kvstrata.memory.segment import Segment
from kvstrata.observability.logging import EventLog, LogNumbers
from kvstrata.observability.numbers import Pages
from kvstrata.p2p.awaiting import AwaitedPeers
from kvstrata.p2p.settings import PeerSettings
from kvstrata.process.http_gate import Access
from kvstrata.process.http_thread import Port, make_port
from kvstrata.process.keeper import Restarts
from kvstrata.process.lifecycle import ProcessNumbers, soon
from kvstrata.process.listen import Listener, ServedToken, warn_if_open
from kvstrata.process.listen import listen as http_listen
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.control_port import ControlPort
from kvstrata.server.admin.operations import OPERATIONS, Admin
from kvstrata.server.cluster.held import HeldChunks
from kvstrata.server.cluster.membership import (
    Membership,
    make_membership,
    peer_config,
    serve,
)
from kvstrata.server.cluster.own_key import MemberKeys, member_keys
from kvstrata.server.housekeeping import Housekeeping
from kvstrata.server.listener import AttachServer
from kvstrata.server.parts import Parts
from kvstrata.server.plan import MAX_SESSION_SHARE, InstanceFacts, P2pEngine, Plan, segment_settings
from kvstrata.tiers.base import AdapterContext
from kvstrata.tiers.config import TierConfig
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tier import Tier, limits_of
from kvstrata.types import NOT_IN_A_NAME


class Instance(NamedTuple):
    """A complete instance that does not answer requests yet."""

    parts: Parts
    segment: Segment
    attach: AttachServer
    housekeeping: Housekeeping
    control: ControlPort | None
    membership: Membership | None
    http: tuple[Listener, Port] | None
    http_token: ServedToken | None
    """The admin port's token; None without that port."""


async def open_instance(
    plan: Plan,
    supervisor: Supervisor,
    closers: list[Callable[[], Coroutine[Any, Any, None]]],
    restarts: Restarts,
    started_s: float,
) -> Instance:
    """Open everything that the plan names. Raises KvstrataError; the caller then runs the closers, last first."""
    settings, loop, log = plan.settings, asyncio.get_running_loop(), EventLog("server")

    # 1. Ports, L1, and the facts about the instance.
    port = settings.named_port
    listener = http_listen(settings.http) if settings.http.enabled else None
    if listener is not None:
        closers.append(soon(listener.close))
    segment, directory = _open_segment(plan, port, closers, restarts)
    pool = segment.pool
    facts = InstanceFacts(
        instance_id=settings.instance_id or NOT_IN_A_NAME.sub("-", f"{platform.node()}-{port}")[:64],
        epoch=pool.epoch,
        port=port,
        http_port=0 if listener is None else listener.port,
        socket_dir=directory,
        chunk_tokens=settings.chunk_size,
        max_reserved_bytes=pool.extents_bytes // MAX_SESSION_SHARE,
        started_s=started_s,
    )

    # 2. The chunks that followers read, the parts, and the tiers.
    tiers = TierSet(pool)
    urls = dict.fromkeys(settings.controller.url.split(",") if settings.controller.url else [])
    held = HeldChunks(pool, tiers, supervisor) if urls else None
    if held is not None:
        closers.append(held.stop)
    keys = member_keys(settings, facts, supervisor, os.environ) if urls else None
    peer, awaited = peer_config(plan, keys), None
    if peer is not None:
        assert isinstance(peer.fields, PeerSettings)
        awaited = AwaitedPeers(peer.fields, SystemClock(), facts.instance_id)
        closers.append(soon(awaited.close))
    parts = Parts(
        settings,
        facts,
        pool,
        loop,
        supervisor,
        clock=SystemClock(),
        tiers=tiers,
        news=held,
        tokens=plan.tokens,
        peer_tier=peer.name if peer else "",
        awaited=awaited,
    )
    closers.append(soon(parts.close))
    if parts.tracer is not None:
        closers.append(functools.partial(asyncio.to_thread, parts.tracer.close))
    board = parts.board
    closers.append(functools.partial(_close_tiers, parts))
    board.put("l2_adapters", tiers)
    # The tier that reads other instances comes first: their RAM is nearer than a disk.
    plan = await _open_peers(plan, keys, parts, segment, log)
    await _open_tiers(plan, parts, segment, log)

    # 3. Restore the claims of the last server before anything can be evicted; then processes attach.
    await parts.claims.restore(adopted=segment.adopted)
    attach = AttachServer(
        directory / RPC_SOCKET,
        pool,
        segment.descriptors,
        parts.processes,
        instance_id=facts.instance_id,
        max_reserved_bytes=facts.max_reserved_bytes,
    )

    # 4. The cluster, if a controller is set: the control port, and a link to each controller.
    served = membership = None
    if keys is not None and held is not None:
        served = serve(plan, keys, parts, closers)
        membership = make_membership(plan, keys, parts, held, urls, served)
        closers.append(membership.stop)
        board.put("cluster", membership)
        if served.peers.server is not None:
            board.put("peers_served", served.peers.server.records)
        board.put("control", held, *served.port.numbers())

    # 5. Housekeeping, and the HTTP application.
    housekeeping = Housekeeping(parts)
    board.put("process", ProcessNumbers(restarts))
    board.put("log", LogNumbers())
    board.put("attach", attach)
    board.put("rpc", attach.traffic)
    closers.append(attach.stop)
    http, http_token = None, None
    if listener is not None:
        page = (await loop.run_in_executor(None, Pages, board.numbers)).page
        admin = Admin(parts, page, log)
        insecure = settings.security.insecure
        warn_if_open(settings.http, plan.http_token, listener.port, log, insecure=insecure)
        access = Access(settings.http, plan.http_token)
        http_port = await make_port("kvstrata", OPERATIONS, admin, access)
        http_token = ServedToken(http_port.set_token, settings.http, listener.port, plan.http_token, log)
        closers.append(soon(http_token.close))
        board.put("http", *http_port.numbers)
        http = listener, http_port
    return Instance(
        parts=parts,
        segment=segment,
        attach=attach,
        housekeeping=housekeeping,
        control=served.port if served else None,
        membership=membership,
        http=http,
        http_token=http_token,
    )


# --- the steps ------------------------------------------------------------------------------------------------


def _open_segment(
    plan: Plan, port: int, closers: list[Callable[[], Coroutine[Any, Any, None]]], restarts: Restarts
) -> tuple[Segment, Path]:
    """Make or adopt L1. Returns the segment, which a closer closes, and the folder of the sockets.

    Raises ConfigError or SegmentError.
    """
    settings = plan.settings
    directory = socket_dir(settings.socket_dir, port)
    shm = (
        Path(settings.l1.segment_dir) if settings.l1.segment_dir else segment_dir(port, settings.instance_id)
    )
    forgotten = settings.l1.forget_on_exit
    segment = Segment.open(segment_settings(settings, plan.extents_bytes, directory, shm), restarts)
    closers.append(soon(segment.destroy if forgotten else segment.close))
    return segment, directory


async def _open_tier(config: TierConfig, parts: Parts, segment: Segment, *, must: bool) -> None:
    """Open a tier and add it to the others. Raises ConfigError; with `must` also StorageError (Tier.open)."""
    pool, loop = parts.pool, parts.loop

    def forget(key: bytes) -> None:
        parts.store.dropped(config.name, [key])
        parts.explainer.dropped(config.name, key)

    def dropped(key: bytes) -> None:
        loop.call_soon_threadsafe(forget, key)

    limits = limits_of(config, pool.extents_bytes)
    context = AdapterContext(
        parts.facts.instance_id,
        parts.clock,
        pool.extents_address,
        pool.extents_bytes,
        dropped,
        segment.descriptors.extents,
        segment.descriptors.sessions_lock,
        parts.processes.element_bytes_of,
    )
    await parts.tiers.open(Tier(config, limits, parts.clock), context, must=must)


async def _close_tiers(parts: Parts) -> None:
    await parts.store.stop(0.0)
    await parts.prefetch.stop(0.0)
    await parts.tiers.close()


async def _open_peers(
    plan: Plan, keys: MemberKeys | None, parts: Parts, segment: Segment, log: EventLog
) -> Plan:
    """Open the tier that reads other instances, if the plan has one; returns the plan with the engine in use.

    Raises ConfigError.  If an engine that `auto` has chosen cannot be opened, tcp is used instead.
    """
    peer = peer_config(plan, keys)
    if peer is None or plan.p2p_engine is None:
        return plan
    chosen = plan.settings.p2p.engine == "auto" and plan.p2p_engine.name != "tcp"
    try:
        await _open_tier(peer, parts, segment, must=chosen)
    except (ConfigError, StorageError) as error:
        if not chosen or error.field == "controller.url":
            raise
        plan = plan._replace(
            p2p_engine=P2pEngine("tcp", f"tcp, since {plan.p2p_engine.name} fails: {error.message}")
        )
        return await _open_peers(plan, keys, parts, segment, log)
    assert plan.p2p_engine is not None
    log.info("p2p_engine", engine=plan.p2p_engine.why)
    return plan


async def _open_tiers(plan: Plan, parts: Parts, segment: Segment, log: EventLog) -> None:
    """Open the other tiers of the plan. Raises ConfigError; the embedded one is skipped if it cannot be opened."""
    for config in plan.adapters:
        try:
            await _open_tier(config, parts, segment, must=plan.embedded_l2)
        except (ConfigError, StorageError) as error:
            if not plan.embedded_l2:
                raise
            log.warning("embedded_l2_off", reason=error.message)
