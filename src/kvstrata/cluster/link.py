"""The link of an instance or a gateway to one controller: it sends heartbeats.

The controller's reply sets their interval (`beat_ms`).  A member registers with every heartbeat, since the controller
may have forgotten it or been replaced by a new process.  If SILENT_BEATS in a row are not answered, the link is
replaced and the controller's name is resolved again: the controller may have moved while the kernel of its old host
still holds the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.rpc.cluster_wire import ClusterRequest, Done, GatewayHeard, Registered
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.rpc.zmq_link import AskLink, Links

AGAIN_S, AGAIN_MAX_S = 0.2, 5.0
"""Wait between two attempts to register, doubling; a new connection ends it."""
ANSWER_S = 5.0
GOODBYE_S = 1.0
SILENT_BEATS = 3
MIN_BEAT_S, MAX_BEAT_S = 0.05, 3_600.0


class Beats(NamedTuple):
    """How a process makes its heartbeats for controllers, and handles their replies."""

    say: Callable[[], Awaitable[ClusterRequest]]
    answer: type[Registered] | type[GatewayHeard]
    heard: Callable[[Any], None] = lambda _: None
    refused_why: str = "it does not list this process's key, or has keys of another cluster"
    """Explanation in the log if a controller ends the handshake."""


class ControllerLink(Numbers):
    """The link to one controller. Belongs to the event loop."""

    member = gauge(
        "1 while the controller accepts this process and answers, else 0.",
        lambda self: self._member,
    )
    registrations = counter("Answered registrations with a controller, including repeated ones.")
    unanswered = counter("Registrations not answered.", name="unanswered_registrations")
    reconnects = counter("Reconnections because a controller was silent.", name="links_made_anew")

    def __init__(self, url: str, links: Links, keys: ClusterKeys, beats: Beats) -> None:
        """`url`: of the controller's port. Raises Unavailable if it is not an endpoint."""
        self._url, self._links, self._keys, self._beats = url, links, keys, beats
        self._log = EventLog("cluster")
        self._wake = asyncio.Event()
        self._link = self._connect()
        self._member = False
        self._beat_s = 10.0
        self._unheard = 0
        """Registrations in a row that were not answered."""
        self._complaint = ""
        """Event and cause of the last line about a controller that refuses or does not answer; empty after `member`."""

    async def keep(self) -> None:
        """Register until cancelled; the controller may be absent."""
        again_s = AGAIN_S
        while True:
            self._wake.clear()
            asked = await self._beats.say()
            try:
                self._joined(await self._link.ask(asked, self._beats.answer, self._patience_s()))
                again_s = AGAIN_S
                await self._pause(self._beat_s)
            except ClusterFailure as refused:
                self._member, self._unheard = False, 0
                again_s = max(min(2 * again_s, AGAIN_MAX_S), refused.retry_after_ms / 1000)
                self._complain("controller_refuses", refused.code, code=refused.code, reason=refused.message)
                await self._pause(again_s)
            except Unavailable as absent:
                self._unanswered(absent)
                again_s = min(2 * again_s, AGAIN_MAX_S)
                await self._pause(min(again_s, self._beat_s))

    async def goodbye(self, request: ClusterRequest) -> None:
        """Say goodbye if the controller has accepted this process."""
        if self._member:
            self._member = False
            try:
                await self._link.ask(request, Done, GOODBYE_S)
            except (Unavailable, ClusterFailure) as error:
                self._log.info("goodbye_unheard", reason=str(error))

    def close(self) -> None:
        """Close the link."""
        self._link.close()

    def document(self) -> dict[str, Any]:
        """The numbers of this link."""
        return {"url": self._url, **super().document()}

    def _patience_s(self) -> float:
        """A member waits for a beat at most, so that a silent controller is found out in time."""
        return max(1.0, min(self._beat_s, ANSWER_S)) if self._member else ANSWER_S

    def _joined(self, answer: Registered | GatewayHeard) -> None:
        self.registrations += 1
        self._beat_s = min(max(MIN_BEAT_S, answer.beat_ms / 1000), MAX_BEAT_S)
        if self._complaint:
            self._log.repeated(logging.INFO, "back", "controller_back", url=self._url)
        if not self._member:
            self._log.repeated(logging.INFO, "member", "member", url=self._url)
        self._member, self._complaint, self._unheard = True, "", 0
        self._beats.heard(answer)

    def _unanswered(self, absent: Unavailable) -> None:
        self.unanswered += 1
        self._unheard += 1
        if not self._member:
            self._complain("controller_absent", "", reason=absent.message)
        if self._unheard % SILENT_BEATS:
            return
        if self._member:
            self._member = False
            self._complain("controller_lost", "", unanswered=self._unheard)
        self.reconnects += 1
        self._link.close()
        self._link = self._connect()

    def _complain(self, event: str, cause: str, **fields: object) -> None:
        """Log why this process is no member, once for each cause until it is a member again."""
        if self._complaint != (complaint := f"{event} {cause}"):
            self._complaint = complaint
            self._log.repeated(logging.WARNING, complaint, event, **fields, url=self._url)

    async def _pause(self, seconds: float) -> None:
        """Wait at most `seconds`, and no longer than until there is a new connection."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _connect(self) -> AskLink:
        return self._links.ask(
            self._url, keys=self._keys, few=True, changed=self._connected, refused=self._handshake_refused
        )

    def _connected(self, up: bool) -> None:
        if up:  # the new connection may lead to another process
            self._wake.set()

    def _handshake_refused(self) -> None:
        why = f"this controller ends the handshake: {self._beats.refused_why}"
        self._log.repeated(
            logging.WARNING, f"{self._url} keys", "controller_has_other_keys", url=self._url, why=why
        )
