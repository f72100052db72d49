"""The link to one controller: the instance registers there, and again every `beat_ms` of the answer.

A controller may have forgotten the instance, or be another process by now, so a registration is repeated also while it
holds.  If SILENT_BEATS in a row are not answered, the link is made anew, and the controller's name resolved again: the
controller may have moved while the kernel of its old host still holds the connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata import __version__
from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.rpc.cluster_wire import CLUSTER_PROTOCOL_VERSION, Done, Goodbye, Register, Registered
from kvstrata.rpc.zmq_link import AskLink, Links
from kvstrata.server.cluster.held import HeldChunks
from kvstrata.server.cluster.own_key import MemberKeys

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

AGAIN_S, AGAIN_MAX_S = 0.2, 5.0
"""Wait between two attempts to register, doubling; a new connection ends it."""
ANSWER_S = 5.0
GOODBYE_S = 1.0
SILENT_BEATS = 3
MIN_BEAT_S, MAX_BEAT_S = 0.05, 3_600.0


class Advertised(NamedTuple):
    """The addresses under which others reach the instance, its zone, and what moves bytes to and from its peers."""

    control_endpoint: str
    gives_to_peers: bool
    http_url: str
    zone: str
    peer_engine: str


class ControllerLink(Numbers):
    """The link of this instance to one controller. Belongs to the event loop."""

    member = gauge(
        "1 if the controller has accepted this instance and has answered since, else 0.",
        lambda self: self._member,
    )
    registrations = counter("Registrations with a controller that were answered, repeated ones included.")
    unanswered = counter("Registrations not answered.", name="unanswered_registrations")
    reconnects = counter("Links made anew because a controller was silent.", name="links_made_anew")

    def __init__(
        self, url: str, keys: MemberKeys, parts: Parts, advertised: Advertised, held: HeldChunks
    ) -> None:
        """`url`: of the controller's port. All links share the other parts.

        Raises Unavailable if `url` is not an endpoint.
        """
        self._url, self._keys = url, keys
        self._facts, self._advertised, self._held = parts.facts, advertised, held
        self._l1_bytes = parts.pool.extents_bytes
        self._supervisor = parts.supervisor
        self._log = EventLog("cluster")
        self._links = Links(asyncio.get_running_loop())
        self._wake = asyncio.Event()
        self._link = self._connect()
        self._task: asyncio.Task[None] | None = None
        self._member = False
        self._beat_s = 10.0
        self._unheard = 0
        """Registrations in a row that were not answered."""
        self._complaint = ""
        """Event and cause of the last line about a controller that refuses or does not answer; empty after `member`."""

    def start(self) -> None:
        """Begin to register; the controller may be absent."""
        self._task = self._supervisor.spawn(self._run(), "cluster")

    async def stop(self) -> None:
        """Say goodbye if the controller has accepted this instance, and close. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self._member:
                try:
                    request = Goodbye(0, self._facts.instance_id, self._facts.epoch)
                    await self._link.ask(request, Done, GOODBYE_S)
                except (Unavailable, ClusterFailure) as error:
                    self._log.info("goodbye_unheard", reason=str(error))
            self._links.close()

    def document(self) -> dict[str, Any]:
        """The numbers of this link."""
        return {"url": self._url, **super().document()}

    async def _run(self) -> None:
        again_s = AGAIN_S
        while True:
            self._wake.clear()
            try:
                self._joined(await self._link.ask(self._request(), Registered, self._patience_s()))
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

    def _patience_s(self) -> float:
        """A member waits for a beat at most, so that a silent controller is found out in time."""
        return max(1.0, min(self._beat_s, ANSWER_S)) if self._member else ANSWER_S

    def _request(self) -> Register:
        facts, advertised = self._facts, self._advertised
        return Register(
            0, CLUSTER_PROTOCOL_VERSION, facts.instance_id, facts.epoch, __version__, self._held.tiers(),
            self._l1_bytes, facts.chunk_tokens, advertised.control_endpoint, advertised.http_url,
            advertised.gives_to_peers, advertised.zone, platform.node()[:2000], os.getpid(), self._held.media(),
            advertised.peer_engine[:200],
        )  # fmt: skip

    def _joined(self, registered: Registered) -> None:
        self.registrations += 1
        self._beat_s = min(max(MIN_BEAT_S, registered.beat_ms / 1000), MAX_BEAT_S)
        if self._complaint:
            self._log.repeated(logging.INFO, "back", "controller_back", url=self._url)
        if not self._member:
            self._log.repeated(
                logging.INFO, "member", "member", url=self._url, controller=registered.controller
            )
        self._member, self._complaint, self._unheard = True, "", 0

    def _unanswered(self, absent: Unavailable) -> None:
        self.unanswered += 1
        self._unheard += 1
        if not self._member:
            self._complain("controller_absent", "", reason=absent.message)
        if self._unheard % SILENT_BEATS:
            return
        if self._member:
            self._member = False
            self._complain(
                "controller_lost", "", unanswered=self._unheard,
                meaning="engines find this instance's chunks only, until it is back",
            )  # fmt: skip
        self.reconnects += 1
        self._link.close()
        self._link = self._connect()

    def _complain(self, event: str, cause: str, **fields: object) -> None:
        """Log why the instance is no member, once for each cause until it is a member again."""
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
            self._url, keys=self._keys.own, changed=self._connection_changed, refused=self._handshake_refused
        )

    def _connection_changed(self, up: bool) -> None:
        if up:  # the new connection may lead to another process
            self._wake.set()
        else:
            self._link.fail_sent()

    def _handshake_refused(self) -> None:
        why = f"this controller ends the handshake: {self._keys.refused_why}"
        self._log.repeated(
            logging.WARNING, "keys", "controller_has_other_keys", controller=self._url, why=why
        )
