"""The controller's three sockets: frames in, decisions by the cluster, answers out.

    reply       ROUTER   one answer each; garbage gets a Failure
    pull        PULL     no answer; garbage is dropped and counted; not handled while the directory is behind
    heartbeat   ROUTER   Beat, or a Failure; and Nudge where a command waits

A failure of one message costs its sender an answer and nobody else anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from kvstrata.config.model import ControllerSettings
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.directory import INLINE_TAGS
from kvstrata.controller.members import Denied
from kvstrata.errors import BadRequest, InternalError
from kvstrata.observability.logging import EventLog
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import (
    EVENTS,
    HEARTBEATS,
    MAX_CLUSTER_MESSAGE_BYTES,
    REPLY_REQUESTS,
    TAG_BYTES,
    Beat,
    Done,
    Failure,
    Goodbye,
    Nudge,
    Register,
    Registered,
    SyncBegin,
    SyncEnd,
    SyncPart,
    ToReply,
    Where,
    WhereReply,
    encode,
)
from kvstrata.rpc.zmq_server import Address, CurveKeys, ZmqServer

MAX_UNANSWERED = 4_096
"""Requests under way; more are refused."""


class Links:
    """All three sockets."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cluster: Cluster, supervisor: Supervisor) -> None:
        self._cluster = cluster
        self._supervisor = supervisor
        self._log = EventLog("links")

        def server(receive_only: bool = False) -> ZmqServer:
            return ZmqServer(loop, receive_only=receive_only, max_message_bytes=MAX_CLUSTER_MESSAGE_BYTES)

        self._reply, self._pull, self._heartbeat = server(), server(receive_only=True), server()
        self.ports = cluster.ports
        self.bad_frames: dict[str, int] = {}
        """Frames that are no message of their socket, by socket."""
        self._beat_from: dict[str, Address] = {}
        """Where each instance's last heartbeat came from."""
        self._unanswered = 0
        self._paused = False

    def bind(self, settings: ControllerSettings, curve: CurveKeys | None) -> None:
        """Listen. Raises ConfigError."""
        ports = settings.monitor_ports
        for name, server, port in (
            ("pull", self._pull, ports.pull),
            ("reply", self._reply, ports.reply),
            ("heartbeat", self._heartbeat, ports.heartbeat),
        ):
            self.ports[name] = server.bind_tcp(
                settings.monitor_host or settings.http.host,
                port,
                curve=curve,
                insecure=settings.security.insecure,
                host_setting="monitor_host" if settings.monitor_host else "http.host",
                port_setting=f"monitor_ports.{name}",
                flag="--monitor-ports",
            )

    def start(self) -> None:
        """Begin to read."""
        self._cluster.nudge = self._nudge
        self._cluster.directory.drained = self._drained
        self._reply.start(self._on_request, self._wrong_frames("reply"))
        self._pull.start(self._on_events, self._wrong_frames("pull"))
        self._heartbeat.start(self._on_heartbeat, self._wrong_frames("heartbeat"))

    def stats(self) -> dict[str, dict[str, int]]:
        """Counts by socket, for status and metrics."""
        servers = {"reply": self._reply, "pull": self._pull, "heartbeat": self._heartbeat}
        return {
            name: {**server.stats(), "bad_frames": self.bad_frames.get(name, 0)}
            for name, server in servers.items()
        }

    def close(self) -> None:
        """Stop reading, give queued answers a moment to leave."""
        for server in (self._reply, self._pull, self._heartbeat):
            server.close()

    # --- reply ----------------------------------------------------------------------------------------------

    def _on_request(self, address: Address, frame: bytes) -> None:
        started_s = time.perf_counter()
        try:
            request = REPLY_REQUESTS.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._reply.send(address, self._bad("reply", error))
            return
        if isinstance(request, Where) and len(request.tags) % (TAG_BYTES * request.n_slices):
            self._reply.send(address, self._bad_tags(request))
        elif isinstance(request, Where) and len(request.tags) <= INLINE_TAGS * TAG_BYTES:
            owners = self._cluster.where_now(request)
            self._reply.send(address, encode(WhereReply(request.seq, self._cluster.epoch, owners)))
            self._cluster.lookup.add(time.perf_counter() - started_s)
        elif self._unanswered >= MAX_UNANSWERED:
            busy = Denied(
                "refused", "too many requests are under way; ask again", retryable=True, retry_after_s=0.1
            )
            self._reply.send(address, self._failure(request.seq, busy))
        else:
            self._unanswered += 1
            self._supervisor.spawn(self._answer(address, request, started_s), type(request).__name__)

    async def _answer(self, address: Address, request: ToReply, started_s: float) -> None:
        try:
            reply = encode(await self._outcome(request))
        except Denied as denied:
            reply = self._failure(request.seq, denied)
        except Exception as error:
            # The RPC boundary: a mistake of ours in one request is answered and logged, and costs nobody else anything.
            self._log.error("request_failed", request=type(request).__name__, error=repr(error))
            reply = self._failure(
                request.seq, Denied(InternalError.code, "the controller failed; see its log")
            )
        finally:
            self._unanswered -= 1
        self._reply.send(address, reply)
        if isinstance(request, Where):
            self._cluster.lookup.add(time.perf_counter() - started_s)

    async def _outcome(self, request: ToReply) -> msgspec.Struct:
        cluster = self._cluster
        match request:
            case Register():
                sync = cluster.register(request)
                return Registered(
                    request.seq,
                    cluster.epoch,
                    cluster.name,
                    self.ports["pull"],
                    self.ports["heartbeat"],
                    round(1000 * cluster.settings.heartbeat_s),
                    round(1000 * cluster.settings.dead_after_s),
                    sync,
                )
            case Goodbye():
                cluster.goodbye(request)
            case SyncBegin():
                cluster.sync_begin(request)
            case SyncPart():
                await cluster.sync_part(request)
            case SyncEnd():
                await cluster.sync_end(request)
            case Where():
                return WhereReply(request.seq, cluster.epoch, await cluster.where(request))
        return Done(request.seq, cluster.epoch)

    # --- pull -----------------------------------------------------------------------------------------------

    def _on_events(self, _: Address, frame: bytes) -> None:
        try:
            events = EVENTS.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._bad("pull", error)
            return
        self._cluster.apply(events)
        if self._cluster.directory.busy and not self._paused:
            self._paused = True
            self._pull.pause()

    def _drained(self) -> None:
        if self._paused:
            self._paused = False
            self._pull.resume()

    # --- heartbeat ------------------------------------------------------------------------------------------

    def _on_heartbeat(self, address: Address, frame: bytes) -> None:
        try:
            told = HEARTBEATS.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._heartbeat.send(address, self._bad("heartbeat", error))
            return
        try:
            commands = self._cluster.heartbeat(told)
        except Denied as denied:
            self._heartbeat.send(address, self._failure(told.seq, denied))
            return
        self._beat_from[told.instance] = address
        if len(self._beat_from) > 2 * len(self._cluster.members) + 16:
            self._beat_from = {
                name: where for name, where in self._beat_from.items() if self._cluster.members.get(name)
            }
        cluster = self._cluster
        leadership = (
            (cluster.token, cluster.election.cluster_id) if cluster.election and cluster.token else (0, 0)
        )
        self._heartbeat.send(address, encode(Beat(told.seq, cluster.epoch, commands, *leadership)))

    def _nudge(self, instance: str) -> None:
        address = self._beat_from.get(instance)
        if address is not None:
            self._heartbeat.send(address, encode(Nudge(self._cluster.epoch)))

    # --- what is wrong --------------------------------------------------------------------------------------

    def _bad(self, name: str, error: Exception) -> bytes:
        self.bad_frames[name] = self.bad_frames.get(name, 0) + 1
        self._log.repeated(30, f"bad_frame {name}", "bad_frame", socket=name, error=str(error))
        return self._failure(0, Denied(BadRequest.code, f"not a message of the {name} socket: {error}"))

    def _bad_tags(self, request: Where) -> bytes:
        return self._failure(
            request.seq,
            Denied(
                BadRequest.code,
                f"tags: {len(request.tags)} bytes are no multiple of {TAG_BYTES} × n_slices ({request.n_slices})",
                field="tags",
            ),
        )

    def _wrong_frames(self, name: str) -> Callable[[Address, int], bytes]:
        def reply(_: Address, count: int) -> bytes:
            return self._bad(name, BadRequest(f"{count} frames; a message is one"))

        return reply

    def _failure(self, seq: int, denied: Denied) -> bytes:
        self._cluster.denied[denied.code] = self._cluster.denied.get(denied.code, 0) + 1
        return encode(
            Failure(
                seq,
                self._cluster.epoch,
                denied.code,
                denied.message,
                denied.field,
                denied.retryable,
                denied.retry_after_ms,
            )
        )
