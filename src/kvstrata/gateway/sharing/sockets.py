"""The sockets between gateways: each gateway listens and sends to all others; all share one CURVE secret.

1. Nothing waits for another gateway: frames to a gateway that is down, frozen or slow are dropped (rpc/zmq_link.py),
   and so are frames that arrive faster than they are handled (rpc/zmq_server.py).
2. The public key of the shared CURVE secret is kept as secret as the secret itself: a process without it can neither
   listen in a gateway's place nor connect (rpc/zmq_curve.py, 2).
3. All requests under way are announced every TURN_S, which shows that this gateway is alive and repairs lost messages.
4. If a name also resolves to this gateway, it gets a link to itself, whose frames are ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable

import msgspec

from kvstrata.config.gateway_model import SharingSettings
from kvstrata.errors import ConfigError, Unavailable
from kvstrata.gateway.engine_http import addresses_of
from kvstrata.gateway.fleet import DNS
from kvstrata.gateway.sharing.others import SILENT_S, Others
from kvstrata.gateway.sharing.telling import EVENT_BYTES, MAX_FRAME_BYTES, EventSender, frame_of
from kvstrata.observability.logging import EventLog
from kvstrata.process.ports import host_and_port
from kvstrata.rpc.zmq_curve import ClusterKeys, public_of, read_cluster_keys
from kvstrata.rpc.zmq_link import AskLink, Links
from kvstrata.rpc.zmq_server import Address, ZmqServer

FLUSH_S = 0.01
"""Maximum time for which an event waits to be sent together with others."""
TURN_S = 0.5
RESOLVE_TURNS = 10
"""Number of turns between two resolutions of names."""
MAX_LINKS = 256
FIELD = "sharing.curve_file"


class Sharing:
    """The links to the other gateways. Belongs to the event loop."""

    def __init__(self, settings: SharingSettings, keys: ClusterKeys, others: Others) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._keys = keys
        self.others = others
        self.teller = EventSender(self._begin_flush)
        self._server = ZmqServer(self._loop, max_message_bytes=MAX_FRAME_BYTES + 64 * EVENT_BYTES)
        self._links = Links(self._loop)
        self._to: dict[str, AskLink] = {}
        """Links to other gateways, by endpoint."""
        self._flush: asyncio.TimerHandle | None = None
        self.frames = {"sent": 0, "unsent": 0, "heard": 0, "refused": 0}
        self.port = 0
        self._log = EventLog("sharing")

    def start(self) -> None:
        """Listen. Raises ConfigError."""
        self.port = self._server.bind_tcp(
            *host_and_port(self._settings.listen),
            keys=self._keys,
            anywhere=True,
            host_setting="sharing.listen",
            port_setting="sharing.listen",
            flag="sharing.listen",
            keys_setting=FIELD,
            refused_note=f"gateways that share need the same {FIELD}",
        )
        self._server.start(self._heard, lambda _, __: b"")

    async def set(self, settings: SharingSettings) -> None:
        """Send to exactly these gateways from now on; if a name cannot be resolved, all current links stay."""
        self._settings = settings
        wanted: dict[str, None] = {}
        for one in settings.gateways:
            if one.startswith(DNS):
                wanted.update(dict.fromkeys(await self._resolved(one.removeprefix(DNS))))
            else:
                wanted[f"tcp://{one}"] = None
        if settings is self._settings:  # a reload may have replaced them meanwhile
            self._have(list(wanted)[:MAX_LINKS])

    async def keep(self) -> None:
        """Announce the requests under way and forget silent gateways, every TURN_S until cancelled."""
        turn = 0
        while True:
            await asyncio.sleep(TURN_S)
            self.flush()
            for frame in self.teller.under_way():
                self._send(frame)
            for name in self.others.forget_silent():
                self._log.warning("gateway_silent", gateway=name, after_s=SILENT_S)
            turn += 1
            if not turn % RESOLVE_TURNS and any(one.startswith(DNS) for one in self._settings.gateways):
                await self.set(self._settings)

    def flush(self) -> None:
        """Send all collected events."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        for frame in self.teller.take():
            self._send(frame)

    def close(self) -> None:
        """Close all sockets."""
        if self._flush is not None:
            self._flush.cancel()
        self.others.clear()
        self._server.close()
        self._links.close()

    def page(self) -> dict[str, object]:
        """The state of sharing, for the status page."""
        return {
            "name": self.teller.name,
            "to": {endpoint: link.connected for endpoint, link in sorted(self._to.items())},
            **self.counts(),
            "heard": len(self.others),
            "in_flight": self.others.in_flight,
            "refused_handshakes": self._server.refused_handshakes,
        }

    def counts(self) -> dict[str, int]:
        """Numbers of frames and events, by outcome."""
        return {**self.frames, "untold": self.teller.dropped, "ignored": self.others.ignored}

    def _begin_flush(self) -> None:
        self._flush = self._loop.call_later(FLUSH_S, self.flush)

    def _send(self, frame: bytes) -> None:
        for link in self._to.values():
            self.frames["sent" if link.try_send(frame) else "unsent"] += 1

    def _have(self, endpoints: Iterable[str]) -> None:
        wanted = set(endpoints)
        for endpoint in [one for one in self._to if one not in wanted]:
            self._to.pop(endpoint).close()
        for endpoint in wanted - self._to.keys():
            try:
                self._to[endpoint] = self._links.ask(endpoint, keys=self._keys)
            except Unavailable as error:
                self._log.repeated(logging.WARNING, endpoint, "gateway_not_told", reason=error.message)

    async def _resolved(self, name: str) -> list[str]:
        host, _, port = name.rpartition(":")
        try:
            addresses = await addresses_of(host, int(port))
        except OSError as error:
            self._log.repeated(logging.WARNING, name, "name_not_resolved", name=name, reason=str(error))
            return list(self._to)
        return [f"tcp://[{one}]:{port}" if ":" in one else f"tcp://{one}:{port}" for one in addresses]

    def _heard(self, _: Address, frame: bytes) -> bool | None:
        """Apply a received frame; False: it is invalid."""
        try:
            told = frame_of(frame)
            if told.gateway != self.teller.name:
                self.others.hear(told)
                self.frames["heard"] += 1
        except (msgspec.MsgspecError, ValueError) as error:
            self.frames["refused"] += 1
            self._log.repeated(logging.WARNING, "frame", "shared_frame_refused", reason=str(error)[:200])
            return False
        return None


def sharing_keys(path: str) -> ClusterKeys:
    """The keys in the file that all gateways share. Raises ConfigError unless it has exactly one secret."""
    keys = read_cluster_keys(path, FIELD)
    own = public_of(keys.secret)
    if keys.server != own or keys.clients != frozenset((own,)):
        raise ConfigError(
            f"{FIELD}: {path}: has keys of several members; give all gateways the same file, with the one line "
            "`secret KEY`",
            field=FIELD,
        )
    return keys


def piece_secret(keys: ClusterKeys) -> bytes:
    """The secret for the keys of prompts' pieces, equal in all gateways with these CURVE keys."""
    return hashlib.blake2b(keys.secret, digest_size=32, person=b"kvstrata-pieces").digest()
