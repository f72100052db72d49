"""Starts what finds engines beside those that the settings name: Kubernetes, this host's sockets, or controllers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata.gateway.fleet import EngineState, Fleet
from kvstrata.gateway.kubernetes import Endpoints
from kvstrata.observability.logging import EventLog

if TYPE_CHECKING:
    from kvstrata.config.gateway_model import GatewaySettings
    from kvstrata.gateway.controllers.asking import Controllers
    from kvstrata.gateway.engine_link import Links
    from kvstrata.gateway.plan import Plan
    from kvstrata.gateway.probing import Probing
    from kvstrata.process.supervisor import Supervisor


class Parts(NamedTuple):
    """Parts of the gateway that engines are found with, and told to."""

    settings: Callable[[], GatewaySettings]
    plan: Plan
    fleet: Fleet
    links: Links
    probing: Probing
    controllers: Controllers
    supervisor: Supervisor
    closers: list[Callable[[], Coroutine[Any, Any, None]]]
    log: EventLog


async def start_finding(parts: Parts, own_ports: set[int]) -> None:
    """Find engines from now on, and wait a moment for the first. `own_ports`: ports of the gateway itself."""
    wanted = parts.settings().engines_from
    if wanted.kubernetes is not None:
        await _watch_kubernetes(parts)
    elif wanted.local is not None:
        await _look_here(parts, own_ports)
    elif wanted.controllers is not None:
        await _ask_controllers(parts)


async def _watch_kubernetes(parts: Parts) -> None:
    settings, account = parts.settings(), parts.plan.account
    service = settings.engines_from.kubernetes
    if service is None or account is None:
        return
    endpoints = Endpoints(
        service, account, parts.plan.found_key, parts.probing.set_found, settings.timeouts.connect_s
    )
    parts.closers.append(endpoints.close)
    parts.supervisor.spawn(endpoints.keep(), "endpoints")
    await _first(endpoints.known, settings.health.timeout_s)


async def _look_here(parts: Parts, own_ports: set[int]) -> None:
    from kvstrata.gateway.local_engines import LocalEngines

    settings, probing = parts.settings(), parts.probing
    assert settings.engines_from.local is not None
    local = LocalEngines(
        settings.engines_from.local,
        parts.plan.found_key,
        parts.links,
        probing.set_found,
        lambda: {*own_ports, *probing.loopback_ports()},
        time.monotonic,
    )
    await local.look(settings.health.timeout_s)
    if not parts.fleet.engines:
        says = "start one, or name engines by --engine URL or in the file"
        parts.log.warning("no_engine_here", note=says)
    parts.supervisor.spawn(local.keep(lambda: parts.settings().health), "local-engines")


async def _ask_controllers(parts: Parts) -> None:
    from kvstrata.gateway.controller_engines import ControllerEngines

    fleet, probing, controllers, allowed = parts.fleet, parts.probing, parts.controllers, parts.plan.allowed
    assert allowed is not None

    def serves(name: str) -> bool:
        engine = fleet.engines.get(name)
        return engine is not None and engine.state is EngineState.UP

    named = ControllerEngines(
        allowed, parts.plan.found_key, probing.set_found, serves, probing.addresses, time.monotonic
    )
    controllers.named = named.named
    await _first(controllers.heard, parts.settings().health.timeout_s)


async def _first(known: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await known.wait()
