"""The link to one controller: heartbeats, whose answers tell of instances, and orders of copies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.gateway.controllers.directory import Directory
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, gauge
from kvstrata.rpc.cluster_wire import (
    Done,
    GatewayBeat,
    GatewayHeard,
    Replicate,
)
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.rpc.zmq_link import Links

BEAT_S, BEAT_MAX_S = 0.5, 30.0
"""Bounds of the interval that a controller names for heartbeats."""
ANSWER_S = 2.0
"""Time for the answer to a heartbeat."""


class ControllerLink(Numbers):
    """See the module. Belongs to the event loop."""

    up = gauge("1 while a controller is connected, else 0.", name="controller_up")

    def __init__(
        self,
        url: str,
        links: Links,
        keys: ClusterKeys,
        now_s: Callable[[], float],
        told: Callable[[Directory], None],
    ) -> None:
        """`told` gets each answer to a heartbeat. Raises Unavailable if `url` is not an endpoint."""
        self.url = url
        self._now_s = now_s
        self._told = told
        self._beat_s = ANSWER_S
        self._wake = asyncio.Event()
        self._log = EventLog("controllers")
        self.up = False
        """Whether there is a connection."""
        self.directory: Directory | None = None
        self._complaint = ""
        self._link = links.ask(url, keys=keys, changed=self._changed, refused=self._refused)

    async def replicate(self, order: Replicate) -> str | None:
        """Order a copy; returns why it was not ordered, None if it was."""
        if not self.up:
            return "it is not connected"
        try:
            await self._link.ask(order, Done, ANSWER_S)
        except (ClusterFailure, Unavailable) as error:
            return error.message
        return None

    async def keep(self, beat: Callable[[], GatewayBeat]) -> None:
        """Send heartbeats until cancelled."""
        while True:
            self._wake.clear()
            if self.up:
                await self._beat(beat())
            try:
                async with asyncio.timeout(self._beat_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _beat(self, beat: GatewayBeat) -> None:
        try:
            heard = await self._link.ask(beat, GatewayHeard, ANSWER_S)
        except (ClusterFailure, Unavailable) as error:
            if self._complaint != error.message:
                self._complaint = error.message
                self._log.repeated(
                    logging.WARNING, self.url, "controller_refuses", url=self.url, reason=error.message
                )
            return
        self._complaint = ""
        self._beat_s = min(max(BEAT_S, heard.beat_ms / 1000), BEAT_MAX_S)
        self.directory = Directory(heard, self._now_s())
        self._told(self.directory)

    def page(self) -> dict[str, Any]:
        """State and counts, for operators."""
        known = self.directory
        return {
            "url": self.url,
            "connected": self.up,
            "told_ago_s": None if known is None else round(self._now_s() - known.heard_s, 3),
            "instances": 0 if known is None else len(known.instances),
            "engines": 0 if known is None else len(known.urls),
            "garbage": self._link.garbage_count,
        }

    def close(self) -> None:
        """Close the link."""
        self._link.close()

    def _changed(self, up: bool) -> None:
        self.up = up
        if up:
            self._wake.set()

    def _refused(self) -> None:
        why = "it ends the handshake: it does not list this gateway's key, or has keys of another cluster"
        self._log.repeated(
            logging.WARNING, f"{self.url} keys", "controller_has_other_keys", url=self.url, why=why
        )
