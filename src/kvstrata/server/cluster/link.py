"""The link to one controller: the instance registers there, sends heartbeats and news, and takes commands.

While the instance is a member, it runs each full sync that is wanted (sync.py) and otherwise sends events as they come.
It registers until it succeeds; what ends the membership: `_live`.
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
from kvstrata.rpc.cluster_wire import (
    CLUSTER_PROTOCOL_VERSION,
    Beat,
    CommandKind,
    Done,
    Goodbye,
    Heartbeat,
    Nudge,
    Register,
    Registered,
)
from kvstrata.rpc.zmq_link import AskLink, Links, PushLink
from kvstrata.server.cluster.commands import Actions, CommandTable
from kvstrata.server.cluster.condition import Condition
from kvstrata.server.cluster.events import L1_TIER, TierNews
from kvstrata.server.cluster.own_key import MemberKeys
from kvstrata.server.cluster.sync import ANSWER_S, FullSync
from kvstrata.server.cluster.told_tiers import ToldTiers

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

AGAIN_S, AGAIN_MAX_S = 0.2, 5.0
"""Wait between two attempts to register, doubling; a new connection ends it."""
SEND_S = 0.1
"""Interval at which queued events are sent."""
GOODBYE_S = 1.0
SILENT_BEATS = 3
"""After so many unanswered heartbeats in a row the log says that the controller is lost."""
MAX_HEARTBEAT_S = 3_600.0


class Advertised(NamedTuple):
    """The addresses under which others reach the instance, and its zone."""

    peer_endpoint: str
    """Where peers ask for leases; empty: peers get none."""
    http_url: str
    zone: str


class ControllerLink(Numbers):
    """The link of this instance to one controller. Belongs to the event loop."""

    member = gauge(
        "1 if the controller has accepted this instance and has answered since, else 0.",
        lambda self: self._member,
    )
    last_event = gauge(
        "Sequence number of the last batch of events sent to the controller.", lambda self: self._news.seq
    )
    queued_tags = gauge(
        "Chunks with a change that the controller has not been told yet.", lambda self: self._news.queued_tags
    )
    commands_waiting = gauge(
        "Commands of the controller that are running or whose result it does not have yet.",
        lambda self: len(self._commands),
    )
    registrations = counter("Registrations with a controller.")
    heartbeats = counter("Heartbeats answered.")
    unanswered = counter("Heartbeats not answered.", name="unanswered_heartbeats")
    event_batches = counter("Batches of events sent.")
    events = counter("Changes of chunks sent in batches of events.", read=lambda self: self._news.n_events)

    def __init__(
        self,
        url: str,
        keys: MemberKeys,
        parts: Parts,
        advertised: Advertised,
        news: TierNews,
        told: ToldTiers,
        condition: Condition,
        actions: Actions,
    ) -> None:
        """`url`: of the controller's reply port; `news`: for this controller. All links share the other parts.

        Raises Unavailable if `url` is not an endpoint.
        """
        facts, counters = parts.facts, parts.counters
        self._url, self._keys, self._refused_why = url, keys.own, keys.refused_why
        self._facts, self._advertised = facts, advertised
        self._l1_bytes = parts.pool.extents_bytes
        self._news, self._told = news, told
        self._condition, self._actions = condition, actions
        self._readiness, self._supervisor, self._counters = parts.readiness, parts.supervisor, counters
        self._loop = asyncio.get_running_loop()
        self._log = EventLog("cluster")
        self._links = Links(self._loop)
        self._reply = self._links.ask(
            url, keys=keys.own, changed=self._connection_changed, refused=self._handshake_refused
        )
        self._heart: AskLink | None = None
        self._push: PushLink | None = None
        """The links to the two ports that the last registration named."""
        self._ports = (0, 0)
        self.sync = FullSync(self._reply, url, parts, news, told)
        self._commands = CommandTable(actions, self.sync.resync, news.wake.set)
        self._tasks: list[asyncio.Task[None]] = []
        self._member = False
        self._reconnected = False
        self._controller_epoch = 0
        self._heartbeat_s = 10.0
        self._stopped = False
        self._complaint = ""
        """Event and cause of the last line about a controller that refuses or does not answer; empty after `member`."""
        self._unheard = 0
        """Heartbeats in a row that were not answered."""

    def start(self) -> None:
        """Begin to register; the controller may be absent."""
        spawn = self._supervisor.spawn
        self._tasks = [spawn(self._run(), "cluster"), spawn(self._send_events(), "cluster-events")]

    async def stop(self) -> None:
        """Say goodbye if the controller is connected, and close. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        self.sync.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._commands.stop()
        self.sync.thaw()
        if self._member:
            try:
                request = Goodbye(0, self._facts.instance_id, self._facts.epoch)
                await self._reply.ask(request, Done, GOODBYE_S)
            except (Unavailable, ClusterFailure) as error:
                self._log.info("goodbye_unheard", reason=str(error))
        self._links.close()

    def document(self) -> dict[str, Any]:
        """The numbers of this link, and its state."""
        return {"url": self._url, "state": self._word(), **super().document(), **self.sync.document()}

    # --- membership ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        again_s = AGAIN_S
        while True:
            self._reconnected = False
            try:
                self._joined(await self._register())
            except ClusterFailure as refused:
                again_s = max(min(2 * again_s, AGAIN_MAX_S), refused.retry_after_ms / 1000)
                self._complain("controller_refuses", refused.code, code=refused.code, reason=refused.message)
                await self._pause(again_s)
                continue
            except Unavailable as absent:
                again_s = min(2 * again_s, AGAIN_MAX_S)
                self._complain("controller_absent", "", reason=absent.message)
                await self._pause(again_s)
                continue
            again_s = AGAIN_S
            await self._live()
            self._member = False
            self.sync.thaw()

    def _complain(self, event: str, cause: str, **fields: object) -> None:
        """Log why the instance is no member, once for each cause until it is a member again."""
        if self._complaint != (complaint := f"{event} {cause}"):
            self._complaint = complaint
            self._log.repeated(logging.WARNING, complaint, event, **fields, url=self._url)

    async def _register(self) -> Registered:
        facts, advertised = self._facts, self._advertised
        self._news.set_tiers(self._tiers())
        request = Register(
            0, CLUSTER_PROTOCOL_VERSION, facts.instance_id, facts.epoch, __version__, self._news.tiers,
            self._l1_bytes, facts.chunk_tokens, advertised.peer_endpoint, advertised.http_url, advertised.zone,
            platform.node()[:2000], os.getpid(), self._news.seq, self._told.media(),
        )  # fmt: skip
        return await self._reply.ask(request, Registered, ANSWER_S)

    def _joined(self, registered: Registered) -> None:
        """Become a member, with links to the ports that the answer names. Raises Unavailable for unusable ports."""
        ports = (registered.pull_port, registered.heartbeat_port)
        if not all(0 < port <= 65_535 for port in ports):
            raise Unavailable(f"the controller at {self._url} names ports out of range: {ports}")
        self._member = True
        self.registrations += 1
        self._controller_epoch = registered.epoch
        self._heartbeat_s = min(max(0.05, registered.heartbeat_ms / 1000), MAX_HEARTBEAT_S)
        if ports != self._ports:
            for link in (self._push, self._heart):
                if link is not None:
                    link.close()
            host = self._url.rpartition(":")[0]
            self._push = self._links.push(f"{host}:{ports[0]}", keys=self._keys)
            self._heart = self._links.ask(f"{host}:{ports[1]}", keys=self._keys, told=self._nudged)
            self._ports = ports
        if registered.sync or not self._news.telling:
            self._news.want_sync("registered")
        self._complaint, self._unheard = "", 0
        self._log.repeated(
            logging.INFO, "member", "member", url=self._url, controller=registered.controller,
            sync=self._news.sync_wanted,
        )  # fmt: skip

    async def _live(self) -> None:
        """Send heartbeats until the instance must register again: on a new connection, which may lead to another
        process, to a controller that refuses a heartbeat or has restarted, or with other tiers than it has registered.
        """
        while not self._reconnected:
            self._news.wake.clear()
            self.sync.begin_if_wanted()
            if not await self._beat() or self._tiers() != self._news.tiers:
                return
            await self._pause(self._heartbeat_s)

    async def _beat(self) -> bool:
        """Send one heartbeat, which changes nothing if it is not answered. False: the membership has ended."""
        assert self._heart is not None
        results = self._commands.results()
        request = Heartbeat(
            0, self._facts.instance_id, self._facts.epoch, self._news.seq, self._word(),
            self._condition.load(self._news), self._condition.models(), results, self._actions.leader,
            self._condition.draining, self._condition.engines(), self._condition.rates(),
        )  # fmt: skip
        asked_s = self._loop.time()
        try:
            beat = await self._heart.ask(request, Beat, max(self._heartbeat_s, 1.0))
        except Unavailable:
            self.unanswered += 1
            self.sync.unanswered()
            self._unheard += 1
            if self._unheard == SILENT_BEATS:
                self._log.repeated(
                    logging.WARNING, "silent", "controller_lost", url=self._url, unanswered=self._unheard,
                    meaning="engines find this instance's chunks only, until it is back",
                )  # fmt: skip
            return True
        except ClusterFailure as refused:
            self._log.repeated(
                logging.WARNING, "heartbeat", "heartbeat_refused", code=refused.code, reason=refused.message
            )
            return False
        self.heartbeats += 1
        self._counters.heartbeat.add(self._loop.time() - asked_s)
        if self._unheard >= SILENT_BEATS:
            self._log.repeated(logging.INFO, "heard", "controller_back", url=self._url)
        self._unheard = 0
        self._commands.acknowledged(results)
        if beat.epoch != self._controller_epoch:
            return False
        self._take_commands(beat)
        return True

    def _take_commands(self, beat: Beat) -> None:
        """Carry out commands of the leader; from another controller, only RESYNC."""
        leads = self._actions.obeys(beat.cluster_id, beat.token)
        for command in beat.commands:
            if leads or command.kind is CommandKind.RESYNC:
                self._commands.take(command)
                continue
            cluster_id, token = self._actions.leader
            whose = "an earlier leader" if beat.token else "no leader"
            self._commands.refuse(
                command,
                f"token: {beat.token} of cluster {beat.cluster_id} belongs to {whose} (seen: {token} of cluster "
                f"{cluster_id}); ask the controllers who leads",
            )

    async def _pause(self, seconds: float) -> None:
        """Wait until `wake` is set, for at most `seconds`, then clear it."""
        wake = self._news.wake
        try:
            async with asyncio.timeout(seconds):
                await wake.wait()
        except TimeoutError:
            pass
        wake.clear()

    def _connection_changed(self, up: bool) -> None:
        if up:  # the new connection may lead to another process
            self._reconnected = True
            self._news.wake.set()

    def _handshake_refused(self) -> None:
        why = f"this controller ends the handshake: {self._refused_why}"
        self._log.repeated(
            logging.WARNING, "keys", "controller_has_other_keys", controller=self._url, why=why
        )

    def _nudged(self, _: Nudge) -> None:
        self._news.wake.set()

    def _tiers(self) -> list[str]:
        return [L1_TIER, *self._told.names()]

    def _word(self) -> str:
        """The state of the instance that heartbeats name."""
        if not self._readiness.ready:
            return "stopping"
        if self.sync.frozen:
            return "frozen"
        if self.sync.running:
            return "syncing"
        return "draining" if self._condition.draining else "ready"

    # --- events --------------------------------------------------------------------------------------------

    async def _send_events(self) -> None:
        while True:
            due_s = self._loop.time() + SEND_S
            await asyncio.sleep(SEND_S)
            self._actions.note_lag(self._loop.time() - due_s)
            self._flush()

    def _flush(self) -> None:
        """Send the queued events, until the socket takes no more."""
        news, push = self._news, self._push
        self.sync.note_overflow()
        in_step = news.telling and not self.sync.running and not news.sync_wanted
        if not in_step or not self._member or push is None:
            return
        while (frame := news.next_frame(self._facts.instance_id, self._facts.epoch)) is not None:
            if not push.try_send(frame):
                return
            news.sent()
            self.event_batches += 1
