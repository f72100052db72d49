"""The controller's port: instances and gateways ask here, each what the kind of its key may ask.

1. Each request gets one answer; an invalid frame gets a Failure.
2. A message that fails affects only its sender.
3. At most MAX_UNANSWERED requests are under way; further requests are refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import msgspec

from kvstrata.cluster.lookups import INLINE_TAGS
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.operations import Operations
from kvstrata.controller.peer_hosts import PeerHosts
from kvstrata.controller.prompts import Named
from kvstrata.errors import BadRequest, InternalError, KvstrataError, NotPermitted, Refused
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.cluster_wire import (
    BAD_FRAME,
    MAX_PEER_KEYS,
    TAG_BYTES,
    TO_CONTROLLER,
    ClusterRequest,
    Done,
    GatewayBeat,
    Goodbye,
    Register,
    Registered,
    Replicate,
    ToController,
    Where,
    WhereReply,
    encode,
    failure,
)
from kvstrata.rpc.zmq_curve import KeyKind
from kvstrata.rpc.zmq_server import Address, ZmqServer
from kvstrata.types import KEY_BYTES

MAX_UNANSWERED = 4_096
ASKS: dict[KeyKind, tuple[type[ClusterRequest], ...]] = {
    KeyKind.INSTANCE: (Register, Goodbye, Where),
    KeyKind.GATEWAY: (GatewayBeat, Replicate),
    KeyKind.CONTROLLER: (),
}
"""What a key of each kind may ask."""


def zmq_host(settings: ControllerSettings) -> str:
    """The address of the ZMQ port."""
    return settings.monitor_host or settings.http.host


def zmq_host_setting(settings: ControllerSettings) -> str:
    """The setting that names the address of the ZMQ port."""
    return "monitor_host" if settings.monitor_host else "http.host"


class Answers(Numbers):
    """Connects the port with one cluster. Belongs to the event loop."""

    bad_frames = counter("Invalid frames.")

    def __init__(
        self,
        cluster: Cluster,
        operations: Operations,
        server: ZmqServer,
        supervisor: Supervisor,
        peer_hosts: PeerHosts,
        kinds_of: Callable[[str], Collection[KeyKind]],
    ) -> None:
        """`server` is bound; `kinds_of` says what a client's public key is."""
        self._operations = operations
        self._cluster = cluster
        self._peer_hosts = peer_hosts
        self._server = server
        self._supervisor = supervisor
        self._kinds_of = kinds_of
        self._log = EventLog("links")
        self._unanswered = 0

    def start(self) -> None:
        """Begin to read."""
        self._server.start(self._on_request, self._wrong_frames)

    def _on_request(self, address: Address, frame: bytes) -> None:
        started_s = time.perf_counter()
        try:
            request = TO_CONTROLLER.decode(frame)
        except BAD_FRAME as error:
            self._server.send(address, self._bad(error))
            return
        kinds = self._kinds_of(address.key)
        # A member whose key is listed no more is refused, and forgotten, by its id.
        unlisted = isinstance(request, Register) and not kinds
        if not unlisted and not any(isinstance(request, ASKS[kind]) for kind in kinds):
            self._server.send(address, self._failure(request.seq, _denied(request, kinds)))
        elif isinstance(request, Where) and (wrong := _odd_tags(request)):
            self._server.send(address, self._failure(request.seq, BadRequest(wrong, field="tags")))
        elif isinstance(request, Where) and not request.each and len(request.tags) <= INLINE_TAGS * TAG_BYTES:
            owners = self._cluster.ranking.where_now(request)
            self._server.send(address, encode(WhereReply(request.seq, self._cluster.epoch, owners)))
            self._cluster.ranking.seconds.add(time.perf_counter() - started_s)
        elif self._unanswered >= MAX_UNANSWERED:
            busy = Refused("too many requests are under way; ask again", retry_after_s=0.1)
            self._server.send(address, self._failure(request.seq, busy))
        else:
            self._unanswered += 1
            self._supervisor.job(self._answer(address, request, started_s), type(request).__name__)

    async def _answer(self, address: Address, request: ToController, started_s: float) -> None:
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
        self._server.send(address, reply)
        if isinstance(request, Where):
            self._cluster.ranking.seconds.add(time.perf_counter() - started_s)

    async def _outcome(self, request: ToController, address: Address) -> msgspec.Struct:
        cluster, key = self._cluster, address.key
        match request:
            case Register():
                await self._peer_hosts.check(request.control_endpoint, address.host)
                await cluster.register(request, key)
                beat_ms = round(1000 * cluster.settings.heartbeat_s)
                return Registered(request.seq, cluster.epoch, cluster.name, beat_ms)
            case Goodbye():
                cluster.goodbye(request, key)
            case Where():
                return WhereReply(request.seq, cluster.epoch, await cluster.ranking.where(request))
            case GatewayBeat():
                return cluster.gateways.beat(request, key, address.host, cluster.epoch)
            case Replicate():
                await self._replicate(request, key)
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

    def _bad(self, error: Exception) -> bytes:
        self.bad_frames += 1
        self._log.repeated(30, "bad_frame", "bad_frame", error=str(error))
        return self._failure(0, BadRequest(f"not a message to a controller: {error}"))

    def _wrong_frames(self, _: Address, count: int) -> bytes:
        return self._bad(BadRequest(f"{count} frames; a message has one frame"))

    def _failure(self, seq: int, error: KvstrataError) -> bytes:
        self._cluster.refused_requests[error.code] += 1
        return encode(failure(seq, self._cluster.epoch, error))


def _denied(request: ClusterRequest, kinds: Collection[KeyKind]) -> NotPermitted:
    whose = [kind for kind, asks in ASKS.items() if isinstance(request, asks)]
    return NotPermitted(
        f"{type(request).__name__} is for a key of kind {' or '.join(whose)}; the key of this connection is of kind "
        f"{' and '.join(sorted(kinds)) or 'none'} (kvstrata cluster init)"
    )


def _odd_tags(request: Where) -> str:
    """What is wrong with the tags of a question; empty if nothing is."""
    n_tags, rest = divmod(len(request.tags), TAG_BYTES)
    if request.each and (request.n_slices != 1 or n_tags > MAX_PEER_KEYS):
        return f"tags: {n_tags} single tags in {request.n_slices} slices; ask for at most {MAX_PEER_KEYS} in 1 slice"
    if rest or n_tags % request.n_slices:
        return f"tags: {len(request.tags)} bytes are not a multiple of {TAG_BYTES} × n_slices ({request.n_slices})"
    return ""
