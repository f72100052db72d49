"""The servers and the connections to them: one server, a cluster, or the master that sentinels name.

    single     the configured address
    cluster    CRC16 of a key's name -> slot -> master, by CLUSTER SLOTS of any node; asked again when a node says MOVED
               or is lost
    sentinel   the sentinels are asked for the master's address at first, and whenever it is lost or turns read-only

Invariants
1. A connection has one user at a time.  When anything goes wrong on it, it is closed together with the idle connections
   to the same server.
2. While a server cannot be reached or refuses us, one caller at a time tries it, after pauses of PAUSE_S, doubled up to
   MAX_PAUSE_S; all other callers get that caller's result at once.
3. No error and no log line holds a secret, and the password is only sent to a server that speaks RESP.

All functions block; the lanes' threads call them.
"""

from __future__ import annotations

import binascii
import contextlib
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvstrata.errors import ConfigError, StorageError
from kvstrata.tiers.media.resp.connection import Link, LinkLost, Reply, ServerError, command
from kvstrata.tiers.media.resp.replies import port_of, reason_of
from kvstrata.tiers.reasons import CLOSED

log = logging.getLogger(__name__)

SLOTS = 1 << 14
PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
ASK_PAUSE_S = 0.3
"""Minimum interval of requests for the owners of the slots, or for the master, while an older answer is known."""
MOST_NODES = 1024
"""Beyond this many servers, those without connections are forgotten; redirections may name any number of servers."""
_WRONG = ("denied", "protocol", "settings", "tls")
"""Reasons for which a server that answers cannot be used until a setting is changed."""


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RespServers(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the servers; checked. Its `repr` shows only addresses, no secret."""

    addresses: tuple[Address, ...]
    """The server, some nodes of the cluster, or the sentinels."""
    cluster: bool = False
    master_name: str = ""
    """The sentinels' name for the master; empty without sentinels."""
    username: str = ""
    password: str = ""
    sentinel_password: str = ""
    """Empty: a sentinel that asks for a password gets that of the servers."""
    database: int = 0
    tls: ssl.SSLContext | None = None
    tls_server_name: str = ""
    """The name that the server's certificate must have; empty: the configured host."""
    connection_timeout_s: float = 2.0

    def __repr__(self) -> str:
        return f"RespServers({', '.join(map(str, self.addresses))})"


class _Node:
    """One server: its connections, and whether it can be reached."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.idle: list[Link] = []
        self.failures = 0
        """Failures in a row."""
        self.denied = False
        """Whether the last failure was a refusal: the server answers, but rejects our login."""
        self.try_at_s = 0.0
        self.trying = False


class Servers:
    """The servers and their connections. Thread-safe."""

    def __init__(self, name: str, settings: RespServers) -> None:
        self._name = name
        self._settings = settings
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        """Held by the thread that asks which server has which slots."""
        self._nodes: dict[Address, _Node] = {}
        self._slots: list[Address] = []
        """Master of each slot of a cluster."""
        self._master = settings.addresses[0]
        """The server of all keys, if the servers do not form a cluster."""
        self._stale = True
        self._ask_at_s = 0.0
        self._closed = False
        self.connections = 0
        """Number of connections made so far."""
        self.lost = 0
        """Number of connections that broke, or on which an answer came too late."""

    # -- which server has a key ----------------------------------------------------------------------------

    def of(self, name: bytes) -> Address:
        """The server that has the key of this name. Raises LinkLost."""
        if self._stale:
            self._ask()
        if not self._settings.cluster:
            return self._master
        return self._slots[slot_of(name)]

    def group(self, names: Sequence[bytes]) -> dict[Address, Sequence[int]]:
        """For each server the indices of the names that it has. Raises LinkLost."""
        if self._stale:
            self._ask()
        if not self._settings.cluster:
            return {self._master: range(len(names))}
        groups: dict[Address, list[int]] = {}
        for i, name in enumerate(names):
            groups.setdefault(self._slots[slot_of(name)], []).append(i)
        return dict(groups)

    def known(self, name: bytes) -> Address | None:
        """Like `of`, without a request: None if it is unknown now. Never blocks."""
        return self._slots[slot_of(name)] if self._slots else None

    def masters(self) -> list[Address]:
        """All servers that have keys. Raises LinkLost."""
        if self._stale:
            self._ask()
        return list(dict.fromkeys(self._slots)) if self._settings.cluster else [self._master]

    def moved(self, names: Sequence[bytes], address: Address) -> None:
        """A node has answered that `address` has these keys now; other keys may have moved too."""
        for name in names:
            self._slots[slot_of(name)] = address
        self._doubt()

    def _doubt(self) -> None:
        """Ask again, before the next use, which server has which slots: the known answer may be out of date."""
        self._stale = bool(self._settings.cluster or self._settings.master_name)

    def _ask(self) -> None:
        settings = self._settings
        if not settings.cluster and not settings.master_name:
            self._stale = False
            return
        known = bool(self._slots) if settings.cluster else self._master != settings.addresses[0]
        # While another thread asks, and for a short while after, callers use the old answer if there is one.
        if known and time.monotonic() < self._ask_at_s:
            return
        if not self._asking.acquire(blocking=not known):
            return
        try:
            if self._stale:
                if settings.cluster:
                    self._slots = self._ask_cluster()
                else:
                    self._master = self._ask_sentinels()
                self._stale = False
        except LinkLost as lost:
            if not known:
                raise
            log.warning("%s: cannot read which server has which keys: %s", self._name, lost)
        finally:
            self._ask_at_s = time.monotonic() + ASK_PAUSE_S
            self._asking.release()

    def _ask_cluster(self) -> list[Address]:
        wrong = LinkLost("unreachable", "no node of the cluster can be reached")
        for address in dict.fromkeys([*self._slots, *self._settings.addresses]):
            try:
                with self.link(address, time.monotonic() + self._settings.connection_timeout_s) as link:
                    link.send([command(b"CLUSTER", b"SLOTS")])
                    reply = link.reply()
                return _slots(reply, address.host)
            except LinkLost as lost:
                wrong = LinkLost(lost.reason, f"{address}: {lost}")
        raise wrong

    def _ask_sentinels(self) -> Address:
        settings = self._settings
        wrong = LinkLost("unreachable", "no sentinel can be reached")
        for address in settings.addresses:
            try:
                with contextlib.closing(self._connect(address, sentinel=True)) as link:
                    link.send(
                        [command(b"SENTINEL", b"get-master-addr-by-name", settings.master_name.encode())]
                    )
                    reply = link.reply()
            except LinkLost as lost:
                wrong = LinkLost(lost.reason, f"{address}: {lost}")
                continue
            match reply:
                case [bytes() as host, bytes() as port] if port_of(port):
                    return Address(host.decode(errors="replace"), port_of(port))
                case None:
                    wrong = LinkLost(
                        "settings",
                        f"sentinel_master: the sentinel {address} knows no master {settings.master_name!r}",
                    )
                case _:
                    wrong = LinkLost("protocol", f"{address} is not a sentinel: it answers {reply!r:.80}")
        raise wrong

    # -- connections ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def link(self, address: Address, deadline_s: float) -> Iterator[Link]:
        """A connection for the body's exclusive use. Raises LinkLost, its own or the body's."""
        node = self._node(address)
        link = self._take(node)
        try:
            link.deadline_s = deadline_s
            yield link
        except BaseException as error:
            link.close()
            if isinstance(error, LinkLost):
                self._broke(node, error)
            raise
        with self._lock:
            if not self._closed:
                node.idle.append(link)
                return
        link.close()

    def close(self) -> None:
        """Close the idle connections; users close those in use. Idempotent."""
        with self._lock:
            self._closed = True
            idle = [link for node in self._nodes.values() for link in node.idle]
            self._nodes.clear()
        for link in idle:
            link.close()

    def _node(self, address: Address) -> _Node:
        with self._lock:
            if address not in self._nodes and len(self._nodes) >= MOST_NODES:
                for old in [old for old, node in self._nodes.items() if not node.idle and not node.trying]:
                    del self._nodes[old]
            return self._nodes.setdefault(address, _Node(address))

    def _take(self, node: _Node) -> Link:
        while True:
            with self._lock:
                if self._closed:
                    raise LinkLost(CLOSED, "the adapter is closed")
                link = node.idle.pop() if node.idle else None
                if link is None:
                    if node.failures and (node.trying or time.monotonic() < node.try_at_s):
                        reason = "denied" if node.denied else "unreachable"
                        raise LinkLost(reason, f"{node.address}: {reason} a moment ago")
                    node.trying = True
            if link is None:
                break
            if link.is_quiet():
                return link
            link.close()
        try:
            link = self._connect(node.address)
        except BaseException as error:
            if isinstance(error, LinkLost):
                self._broke(node, error)
            raise
        finally:
            node.trying = False
        with self._lock:
            failures, node.failures = node.failures, 0
            self.connections += 1
        if failures:
            log.warning("%s: %s can be reached again", self._name, node.address)
        return link

    def _broke(self, node: _Node, error: LinkLost) -> None:
        """A connection broke: drop the idle ones too, so that the next user tries a new one."""
        with self._lock:
            idle, node.idle = node.idle, []
            node.failures += 1
            denied = error.reason == "denied"
            tell = node.failures == 1 or denied > node.denied
            node.denied = denied
            pause_s = min(PAUSE_S * 2 ** min(node.failures - 1, 10), MAX_PAUSE_S)
            node.try_at_s = time.monotonic() + pause_s * random.uniform(0.5, 1)
            self.lost += 1
        for link in idle:
            link.close()
        if tell:
            log.warning("%s: %s: %s", self._name, node.address, error)
        self._doubt()

    def _connect(self, address: Address, *, sentinel: bool = False) -> Link:
        """A new connection, logged in and ready for use. Raises LinkLost."""
        settings = self._settings
        deadline_s = time.monotonic() + settings.connection_timeout_s
        try:
            connected = socket.create_connection(address, settings.connection_timeout_s)
        except (OSError, ValueError) as error:  # ValueError: a server has named an impossible host
            sentence = f"cannot be reached: {getattr(error, 'strerror', None) or error}"
            raise LinkLost("unreachable", sentence) from None
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if settings.tls is not None:
                try:
                    connected = settings.tls.wrap_socket(
                        connected, server_hostname=settings.tls_server_name or address.host
                    )
                except OSError as error:
                    reason = "tls" if isinstance(error, ssl.SSLCertVerificationError) else "unreachable"
                    raise LinkLost(reason, f"TLS: {_tls_advice(error)}") from None
            link = Link(connected, deadline_s)
            try:
                self._greet(link, sentinel=sentinel)
            except LinkLost as lost:
                if lost.reason != "lost" or settings.tls is not None:
                    raise
                raise LinkLost(lost.reason, f"{lost} (if it expects TLS, set tls_enable)") from None
        except BaseException:
            connected.close()
            raise
        return link

    def _greet(self, link: Link, *, sentinel: bool) -> None:
        """Log in. PING comes before AUTH, so that only a server that speaks RESP gets the password. Raises LinkLost."""
        settings = self._settings
        link.send([command(b"PING")])
        reply = link.reply()
        wants_one = isinstance(reply, ServerError) and reply.code == "NOAUTH"
        own = settings.sentinel_password if sentinel else ""
        password = (own or settings.password) if wants_one or not sentinel else ""
        who, field = ("sentinel", "sentinel_password_file") if sentinel else ("server", "password_file")
        if wants_one and not password:
            raise LinkLost("denied", f"the {who} wants a password: set {field}")
        if password:
            user = [settings.username.encode()] if settings.username and not own else []
            link.send([command(b"AUTH", *user, password.encode())])
            reply = link.reply()
            if isinstance(reply, ServerError) and user and sentinel:  # it may lack the servers' users
                link.send([command(b"AUTH", password.encode())])
                reply = link.reply()
            if isinstance(reply, ServerError):
                named = f"username {settings.username!r}, password" if user else "password"
                also = f"; set {field}" if sentinel else ""
                raise LinkLost("denied", f"{named}: refused by the {who} ({reply.code}){also}")
        elif isinstance(reply, ServerError) and reply.code not in ("NOPERM", "MASTERDOWN"):
            raise LinkLost(reason_of(reply), f"the server answers PING with {reply.text:.80}")
        if settings.database and not sentinel:
            link.send([command(b"SELECT", b"%d" % settings.database)])
            reply = link.reply()
            if isinstance(reply, ServerError):
                raise LinkLost("settings", f"database_id: {settings.database}: {reply.text:.80}")
        if settings.master_name and not sentinel:
            link.send([command(b"ROLE")])
            reply = link.reply()
            if isinstance(reply, list) and reply and reply[0] != b"master":
                # This is the middle of a failover; the sentinels will name the new master.
                raise LinkLost("read_only", "the server is no longer a master")

    # -- at the start --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Log in to each server. Raises StorageError if one cannot be reached, ConfigError if one refuses us."""
        try:
            for address in self.masters():
                try:
                    with self.link(address, time.monotonic() + self._settings.connection_timeout_s):
                        pass
                except LinkLost as lost:
                    raise LinkLost(lost.reason, f"{address}: {lost}") from None
        except LinkLost as lost:
            kind = ConfigError if lost.reason in _WRONG else StorageError
            raise kind(f"{self._name}: {lost}", field=self._name) from None


def slot_of(name: bytes) -> int:
    """The cluster's slot of a key, whose name has no braces."""
    return binascii.crc_hqx(name, 0) % SLOTS


def _slots(reply: Reply, asked: str) -> list[Address]:
    """The master of each slot by CLUSTER SLOTS. Raises LinkLost for an invalid reply, or if a slot has no master."""
    if not isinstance(reply, list):
        raise LinkLost(reason_of(reply), f"CLUSTER SLOTS is answered with {reply!r:.80}")
    table: list[Address | None] = [None] * SLOTS
    for row in reply:
        match row:
            case [int() as first, int() as last, [host, int() as port, *_], *_] if (
                0 <= first <= last < SLOTS and isinstance(host, bytes | None) and 0 < port < 1 << 16
            ):
                # An empty host, or "?", means the node that answered, at the address that was used.
                where = host.decode(errors="replace") if host and host != b"?" else asked
                table[first : last + 1] = [Address(where, port)] * (last + 1 - first)
            case _:
                raise LinkLost("protocol", f"CLUSTER SLOTS has a row {row!r:.80}")
    slots = [address for address in table if address is not None]
    if len(slots) < SLOTS:
        raise LinkLost("cluster_down", f"{SLOTS - len(slots)} slots of the cluster belong to no node")
    return slots


def _tls_advice(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time; a server without TLS stays silent: set tls_enable to false for it"
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the server's certificate is not accepted: {error.verify_message}; give the CA in tls_ca_file, or the name"
            " it is for in tls_server_name"
        )
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return "the server does not speak TLS: set tls_enable to false"
    return str(error.strerror or error) or "the server closed the connection"
