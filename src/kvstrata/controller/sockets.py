"""The controller's three sockets: bound early, read later; each hands its frames to one handler (answers.py).

reply       ROUTER   one answer each
pull        PULL     no answer; not read while too many changes wait for the directory
heartbeat   ROUTER   one answer each, and a Nudge for an instance that has a new command
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstrata.config.controller_model import ControllerSettings
from kvstrata.observability.numbers import Numbers, counter, parts_by
from kvstrata.rpc.cluster_wire import MAX_CLUSTER_MESSAGE_BYTES, Nudge, encode
from kvstrata.rpc.zmq_curve import CurveKeys
from kvstrata.rpc.zmq_server import Address, ZmqServer

OnFrame = Callable[[Address, bytes], None]


def zmq_host(settings: ControllerSettings) -> str:
    """The address of the ZMQ ports."""
    return settings.monitor_host or settings.http.host


def zmq_host_setting(settings: ControllerSettings) -> str:
    """The setting that names the address of the ZMQ ports."""
    return "monitor_host" if settings.monitor_host else "http.host"


class Sockets(Numbers):
    """The three sockets of one controller. Belongs to the event loop."""

    servers = parts_by("socket", ZmqServer, lambda self: self._servers)
    bad_frames = counter("Invalid frames; the handlers count them.", "socket")

    def __init__(self, loop: asyncio.AbstractEventLoop, epoch: int) -> None:
        def server(receive_only: bool = False) -> ZmqServer:
            return ZmqServer(loop, receive_only=receive_only, max_message_bytes=MAX_CLUSTER_MESSAGE_BYTES)

        self._reply, self._pull, self._heartbeat = server(), server(receive_only=True), server()
        self._servers = {"reply": self._reply, "pull": self._pull, "heartbeat": self._heartbeat}
        self._nudge_frame = encode(Nudge(epoch))
        self._beat_from: dict[str, Address] = {}
        """Address of each instance's last heartbeat."""
        self._paused = False
        self.ports: dict[str, int] = {}
        """Ports by name of the socket, once they are bound."""

    def bind(
        self,
        settings: ControllerSettings,
        curve: CurveKeys,
        clients: Callable[[], frozenset[bytes] | None],
        refused_note: str,
    ) -> None:
        """Listen on all ports, without reading yet. Raises ConfigError.

        `clients()` tells who may connect now; `refused_note` is what the log advises those who may not.
        """
        ports, host = settings.monitor_ports, zmq_host(settings)
        for name in ("pull", "reply", "heartbeat"):
            self.ports[name] = self._servers[name].bind_tcp(
                host,
                getattr(ports, name),
                curve=curve,
                clients=clients,
                insecure=settings.security.insecure,
                host_setting=zmq_host_setting(settings),
                port_setting=f"monitor_ports.{name}",
                flag="--monitor-ports",
                refused_note=refused_note,
            )

    def start(
        self,
        on_request: OnFrame,
        on_events: OnFrame,
        on_heartbeat: OnFrame,
        wrong_frames: Callable[[str, int], bytes],
    ) -> None:
        """Begin to read. `wrong_frames(socket, count)` makes the answer to a message that has not exactly one frame."""
        self._reply.start(on_request, lambda _, count: wrong_frames("reply", count))
        self._pull.start(on_events, lambda _, count: wrong_frames("pull", count))
        self._heartbeat.start(on_heartbeat, lambda _, count: wrong_frames("heartbeat", count))

    def answer(self, address: Address, frame: bytes) -> None:
        """Answer a request."""
        self._reply.send(address, frame)

    def beat(self, address: Address, frame: bytes) -> None:
        """Answer a heartbeat."""
        self._heartbeat.send(address, frame)

    def heard(self, instance: str, address: Address) -> None:
        """A heartbeat of this instance came from this address."""
        self._beat_from[instance] = address

    def keep_addresses(self, at_most: int, wanted: Callable[[str], bool]) -> None:
        """Once more than `at_most` addresses are known, forget those of instances that are not `wanted`."""
        if len(self._beat_from) > at_most:
            self._beat_from = {name: where for name, where in self._beat_from.items() if wanted(name)}

    def nudge(self, instance: str) -> None:
        """Ask an instance for a heartbeat, whose answer carries its commands."""
        address = self._beat_from.get(instance)
        if address is not None:
            self._heartbeat.send(address, self._nudge_frame)

    def pause(self) -> None:
        """Read no events until `resume`."""
        if not self._paused:
            self._paused = True
            self._pull.pause()

    def resume(self) -> None:
        """Read events again."""
        if self._paused:
            self._paused = False
            self._pull.resume()

    def rows(self) -> dict[str, dict[str, int]]:
        """The numbers of each socket."""
        return {
            name: {**server.document(), "bad_frames": self.bad_frames[name]}
            for name, server in self._servers.items()
        }

    def close(self) -> None:
        """Stop reading, give queued answers a moment to leave, and close."""
        for server in self._servers.values():
            server.close()
