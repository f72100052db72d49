"""The controller's replies to instances and gateways at its port (rpc/control_port.py)."""

from __future__ import annotations

from kvstrata.config.controller_model import ControllerSettings
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.peer_hosts import PeerHosts
from kvstrata.errors import BadRequest
from kvstrata.rpc.cluster_wire import (
    MAX_PEER_KEYS,
    TAG_BYTES,
    Done,
    GatewayBeat,
    GatewayHeard,
    Goodbye,
    Register,
    Registered,
    Where,
    WhereReply,
)
from kvstrata.rpc.control_port import ControlPort
from kvstrata.rpc.zmq_curve import KeyKind
from kvstrata.rpc.zmq_server import Address

MAX_UNANSWERED = 4_096
"""Maximum number of requests that are answered later, such as registrations and long lookups."""


def zmq_host(settings: ControllerSettings) -> str:
    """The address of the ZMQ port."""
    return settings.monitor_host or settings.http.host


def zmq_host_setting(settings: ControllerSettings) -> str:
    """The setting that names the address of the ZMQ port."""
    return "monitor_host" if settings.monitor_host else "http.host"


class Answers:
    """The handlers of one controller's port. Belongs to the event loop."""

    def __init__(self, cluster: Cluster, port: ControlPort, peer_hosts: PeerHosts) -> None:
        self._cluster, self._peer_hosts = cluster, peer_hosts
        # A member whose key is listed no more is refused, and forgotten, by its id.
        port.serve((KeyKind.INSTANCE,), {Register: self._register}, unlisted=True)
        port.serve((KeyKind.INSTANCE,), {Goodbye: self._goodbye, Where: self._where})
        port.serve((KeyKind.GATEWAY,), {GatewayBeat: self._beat})

    async def _register(self, request: Register, address: Address) -> Registered:
        cluster = self._cluster
        await self._peer_hosts.check(request.control_endpoint, address.host)
        await cluster.register(request, address.key)
        beat_ms = round(1000 * cluster.settings.heartbeat_s)
        return Registered(request.seq, cluster.epoch, cluster.name, beat_ms)

    def _goodbye(self, request: Goodbye, address: Address) -> Done:
        self._cluster.goodbye(request, address.key)
        return Done(request.seq, self._cluster.epoch)

    async def _where(self, request: Where, _: Address) -> WhereReply:
        n_tags, rest = divmod(len(request.tags), TAG_BYTES)
        if request.each and (request.n_slices != 1 or n_tags > MAX_PEER_KEYS):
            raise BadRequest(
                f"tags: {n_tags} single tags in {request.n_slices} slices; ask for at most {MAX_PEER_KEYS} in 1 slice",
                field="tags",
            )
        if rest or n_tags % request.n_slices:
            raise BadRequest(
                f"tags: {len(request.tags)} bytes are not a multiple of {TAG_BYTES} × n_slices ({request.n_slices})",
                field="tags",
            )
        ranking = self._cluster.ranking
        owners = ranking.named(request) if request.named else await ranking.where(request)
        return WhereReply(request.seq, self._cluster.epoch, owners)

    def _beat(self, request: GatewayBeat, address: Address) -> GatewayHeard:
        return self._cluster.gateways.beat(request, address.key, address.host, self._cluster.epoch)
