"""Decodes frames of instances and gateways, hands them to the cluster, and sends the answers.

1. Each request and each heartbeat gets one answer; an invalid frame gets a Failure.  Events get no answer; an invalid
   frame among them is counted and dropped.
2. A message that fails affects only its sender.
3. At most MAX_UNANSWERED requests are under way; further requests are refused.
"""

from __future__ import annotations

import time

import msgspec

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.lookups import INLINE_TAGS
from kvstrata.controller.operations import Operations
from kvstrata.controller.peer_hosts import PeerHosts
from kvstrata.controller.prompts import Named
from kvstrata.controller.sockets import Sockets
from kvstrata.errors import BadRequest, InternalError, KvstrataError, Refused
from kvstrata.observability.logging import EventLog
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import (
    EVENTS,
    HEARTBEATS,
    MAX_PEER_KEYS,
    REPLY_REQUESTS,
    TAG_BYTES,
    Beat,
    Done,
    Failure,
    GatewayBeat,
    Goodbye,
    Holdings,
    HoldingsReply,
    Register,
    Registered,
    Replicate,
    SyncBegin,
    SyncEnd,
    SyncPart,
    ToReply,
    Where,
    WhereReply,
    encode,
)
from kvstrata.rpc.zmq_server import Address
from kvstrata.types import KEY_BYTES

MAX_UNANSWERED = 4_096
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that decoding an invalid frame may raise."""


class Answers:
    """Connects the sockets with one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        operations: Operations,
        sockets: Sockets,
        supervisor: Supervisor,
        peer_hosts: PeerHosts,
    ) -> None:
        self._operations = operations
        self._cluster = cluster
        self._peer_hosts = peer_hosts
        self._sockets = sockets
        self._supervisor = supervisor
        self._log = EventLog("links")
        self._unanswered = 0

    def start(self) -> None:
        """Begin to read."""
        self._sockets.start(self._on_request, self._on_events, self._on_heartbeat, self._wrong_frames)

    # --- reply ----------------------------------------------------------------------------------------------

    def _on_request(self, address: Address, frame: bytes) -> None:
        started_s = time.perf_counter()
        try:
            request = REPLY_REQUESTS.decode(frame)
        except UNREADABLE as error:
            self._sockets.answer(address, self._bad("reply", error))
            return
        if isinstance(request, Where | Holdings) and (wrong := _odd_tags(request)):
            self._sockets.answer(address, self._failure(request.seq, BadRequest(wrong, field="tags")))
        elif isinstance(request, Where) and not request.each and len(request.tags) <= INLINE_TAGS * TAG_BYTES:
            owners = self._cluster.ranking.where_now(request)
            self._sockets.answer(address, encode(WhereReply(request.seq, self._cluster.epoch, owners)))
            self._cluster.ranking.seconds.add(time.perf_counter() - started_s)
        elif isinstance(request, Holdings) and 2 * len(request.tags) <= INLINE_TAGS * TAG_BYTES:
            holdings = self._cluster.gateways.holdings_now(request)
            self._sockets.answer(address, encode(HoldingsReply(request.seq, self._cluster.epoch, holdings)))
            self._cluster.gateways.seconds.add(time.perf_counter() - started_s)
        elif self._unanswered >= MAX_UNANSWERED:
            busy = Refused("too many requests are under way; ask again", retry_after_s=0.1)
            self._sockets.answer(address, self._failure(request.seq, busy))
        else:
            self._unanswered += 1
            self._supervisor.job(self._answer(address, request, started_s), type(request).__name__)

    async def _answer(self, address: Address, request: ToReply, started_s: float) -> None:
        try:
            reply = encode(await self._outcome(request, address))
        except KvstrataError as refused:
            reply = self._failure(request.seq, refused)
        except Exception as error:
            # The RPC boundary: our own mistake in one request is answered and logged, and affects only its sender.
            self._log.error("request_failed", request=type(request).__name__, error=repr(error))
            reply = self._failure(request.seq, InternalError("the controller failed; see its log"))
        finally:
            self._unanswered -= 1
        self._sockets.answer(address, reply)
        if isinstance(request, Where | Holdings):
            of = self._cluster.ranking if isinstance(request, Where) else self._cluster.gateways
            of.seconds.add(time.perf_counter() - started_s)

    async def _outcome(self, request: ToReply, address: Address) -> msgspec.Struct:
        cluster, key = self._cluster, address.key
        match request:
            case Register():
                await self._peer_hosts.check(request.peer_endpoint, address.host)
                sync = cluster.register(request, key)
                return Registered(
                    request.seq,
                    cluster.epoch,
                    cluster.name,
                    self._sockets.ports["pull"],
                    self._sockets.ports["heartbeat"],
                    round(1000 * cluster.settings.heartbeat_s),
                    sync,
                )
            case Goodbye():
                cluster.goodbye(request, key)
            case SyncBegin():
                cluster.sync_begin(request, key)
            case SyncPart():
                await cluster.sync_part(request, key)
            case SyncEnd():
                await cluster.sync_end(request, key)
            case Where():
                return WhereReply(request.seq, cluster.epoch, await cluster.ranking.where(request))
            case GatewayBeat():
                return cluster.gateways.beat(request, key, address.host, cluster.epoch)
            case Replicate():
                await self._replicate(request, key)
            case Holdings():
                holdings = await cluster.gateways.holdings(request)
                return HoldingsReply(request.seq, cluster.epoch, holdings)
        return Done(request.seq, cluster.epoch)

    async def _replicate(self, asked: Replicate, key: str) -> None:
        """Have a prompt copied, as a gateway asks. Raises KvstrataError."""
        self._cluster.gateways.check_known(asked.gateway, key)
        n_keys, rest = divmod(len(asked.keys), KEY_BYTES)
        if rest or n_keys % asked.n_slices:
            raise BadRequest(
                f"keys: {len(asked.keys)} bytes are not a multiple of {KEY_BYTES} × n_slices ({asked.n_slices})",
                field="keys",
            )
        for field, each in (("spans", asked.spans), ("record_bytes", asked.record_bytes)):
            if each and len(each) != asked.n_slices:
                raise BadRequest(
                    f"{field}: {len(each)} for {asked.n_slices} slices; give one for each, or none",
                    field=field,
                )
        named = Named(
            asked.keys, asked.n_slices, asked.identity, asked.tenant, 0, tuple(asked.spans),
            tuple(asked.record_bytes),
        )  # fmt: skip
        await self._operations.copy(named, asked.to, asked.source, move=False)

    # --- pull -----------------------------------------------------------------------------------------------

    def _on_events(self, address: Address, frame: bytes) -> None:
        try:
            events = EVENTS.decode(frame)
        except UNREADABLE as error:
            self._bad("pull", error)
            return
        self._cluster.apply(events, address.key)
        if self._cluster.directory.busy:
            self._sockets.pause()

    # --- heartbeat ------------------------------------------------------------------------------------------

    def _on_heartbeat(self, address: Address, frame: bytes) -> None:
        cluster = self._cluster
        try:
            told = HEARTBEATS.decode(frame)
        except UNREADABLE as error:
            self._sockets.beat(address, self._bad("heartbeat", error))
            return
        try:
            commands = cluster.heartbeat(told, address.key)
        except KvstrataError as refused:
            self._sockets.beat(address, self._failure(told.seq, refused))
            return
        self._sockets.heard(told.instance, address)
        self._sockets.keep_addresses(
            2 * len(cluster.members) + 16, lambda name: cluster.members.get(name) is not None
        )
        self._sockets.beat(
            address, encode(Beat(told.seq, cluster.epoch, commands, *cluster.leadership.proof))
        )

    # --- failures -------------------------------------------------------------------------------------------

    def _bad(self, name: str, error: Exception) -> bytes:
        self._sockets.bad_frames[name] += 1
        self._log.repeated(30, f"bad_frame {name}", "bad_frame", socket=name, error=str(error))
        return self._failure(0, BadRequest(f"not a message of the {name} socket: {error}"))

    def _wrong_frames(self, name: str, count: int) -> bytes:
        return self._bad(name, BadRequest(f"{count} frames; a message has one frame"))

    def _failure(self, seq: int, error: KvstrataError) -> bytes:
        self._cluster.refused_requests[error.code] += 1
        return encode(
            Failure(
                seq,
                self._cluster.epoch,
                error.code,
                error.message,
                error.field,
                error.retryable,
                error.retry_after_ms,
            )
        )


def _odd_tags(request: Where | Holdings) -> str:
    """What is wrong with the tags of a question; empty if nothing is."""
    n_tags, rest = divmod(len(request.tags), TAG_BYTES)
    if isinstance(request, Where) and request.each and (request.n_slices != 1 or n_tags > MAX_PEER_KEYS):
        return f"tags: {n_tags} single tags in {request.n_slices} slices; ask for at most {MAX_PEER_KEYS} in 1 slice"
    if rest or n_tags % request.n_slices:
        return f"tags: {len(request.tags)} bytes are not a multiple of {TAG_BYTES} × n_slices ({request.n_slices})"
    return ""
