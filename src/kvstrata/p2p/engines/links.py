"""The network devices of this machine that can be used now, and a watch for changes of them (rtnetlink(7)).

UCX chooses among the devices that are usable when a transfer engine is opened; that engine never uses another one.

The watch does not see a route that changes without a change of a device or an address, and it cannot tell whether a
link that is up leads anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import NamedTuple

_NEW_LINK, _GET_LINK, _NEW_ADDRESS, _GET_ADDRESS = 16, 18, 20, 22
_ERROR, _DONE = 2, 3
_REQUEST_DUMP = 0x301
_GROUPS = 0x1 | 0x10 | 0x100
"""Links, IPv4 addresses, IPv6 addresses."""
_UP_AND_RUNNING = 0x1 | 0x40
_TEMPORARY_OR_TENTATIVE = 0x01 | 0x40
"""Flags of an IPv6 address that changes every day for privacy, or is not in use yet."""
_UNIVERSE_SCOPE = 0
_NAME, _ADDRESS, _LOCAL = 3, 1, 2

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, change
_ADDRESS_HEAD = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, index
_ATTRIBUTE = struct.Struct("=HH")  # length, type

RECEIVE_BYTES = 1 << 16
ANSWER_S = 2.0
"""Longest wait for an answer of the kernel, which normally comes at once."""
RDMA = Path("/sys/class/infiniband")


class Devices(NamedTuple):
    """The devices of this machine that UCX_NET_DEVICES allows."""

    usable: frozenset[str]
    """`name address` of each network device that is up and has its link and a global address.  The address is the one
    that UCX takes: the device's first IPv4 address, else its first IPv6 address.  `card:port` of each active port of an
    RDMA card."""
    idle: frozenset[str]
    """Names of the devices and ports that cannot be used now."""


def find_devices() -> Devices:
    """Look at the devices now. Raises OSError if the kernel does not list them.

    Its system calls may take milliseconds on a machine with many devices.
    """
    allowed = allowed_devices(os.environ.get("UCX_NET_DEVICES", ""))
    names: dict[int, str] = {}
    running: set[int] = set()
    first: dict[int, IPv4Address | IPv6Address] = {}
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
    ) as asked:
        asked.settimeout(ANSWER_S)
        for body in _dump(asked, _GET_LINK, _NEW_LINK):
            _, _, index, flags, _ = _LINK.unpack_from(body)
            names[index] = (
                _attributes(body[_LINK.size :]).get(_NAME, b"").rstrip(b"\0").decode(errors="replace")
            )
            if flags & _UP_AND_RUNNING == _UP_AND_RUNNING:
                running.add(index)
        for body in _dump(asked, _GET_ADDRESS, _NEW_ADDRESS):
            _, _, flags, scope, index = _ADDRESS_HEAD.unpack_from(body)
            attributes = _attributes(body[_ADDRESS_HEAD.size :])
            packed = attributes.get(_LOCAL, attributes.get(_ADDRESS, b""))
            if scope != _UNIVERSE_SCOPE or len(packed) not in (4, 16):
                continue
            if len(packed) == 4 or not flags & _TEMPORARY_OR_TENTATIVE:
                address = ipaddress.ip_address(packed)
                known = first.get(index)
                if known is None or known.version > address.version:
                    first[index] = address
    usable, idle = set(), set()
    for index, name in names.items():
        if not allowed(name):
            continue
        if index in running and index in first:
            usable.add(f"{name} {first[index]}")
        else:
            idle.add(name)
    for port, is_active in _rdma_ports():
        if allowed(port):
            (usable if is_active else idle).add(port)
    return Devices(frozenset(usable), frozenset(idle))


def allowed_devices(setting: str) -> Callable[[str], bool]:
    """A function that tells whether a value of UCX_NET_DEVICES allows a device.

    The value is `all`, names separated by commas, or `^` followed by the names that are not allowed.
    """
    names = {name.strip() for name in setting.removeprefix("^").split(",")} - {""}
    if not names or "all" in names:
        return lambda name: True
    return lambda name: (name in names) != setting.startswith("^")


class LinkWatch:
    """Calls `changed` on the running loop after changes of links and addresses, until `close`."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """Raises OSError if the kernel refuses to report changes."""
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(
            socket.AF_NETLINK,
            socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
            socket.NETLINK_ROUTE,
        )
        try:
            self._socket.bind((0, _GROUPS))
        except OSError:
            self._socket.close()
            raise
        self._loop.add_reader(self._socket, self._read)

    def close(self) -> None:
        """Stop: `changed` is not called afterwards. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _read(self) -> None:
        # Only the arrival of a message counts, not its content, so a lost message (ENOBUFS) does no harm.
        with contextlib.suppress(OSError):
            self._socket.recv(RECEIVE_BYTES)
        self._changed()


def _dump(asked: socket.socket, request: int, answer: int) -> Iterator[bytes]:
    """Send a dump request; yields the bodies of the messages that answer it. Raises OSError."""
    # Family 0 asks for all families; an ifinfomsg of zeros serves both kinds of request.
    asked.sendto(
        _HEADER.pack(_HEADER.size + _LINK.size, request, _REQUEST_DUMP, 1, 0) + bytes(_LINK.size), (0, 0)
    )
    while True:
        rest = asked.recv(RECEIVE_BYTES)
        while len(rest) >= _HEADER.size:
            length, kind, _, _, _ = _HEADER.unpack_from(rest)
            if kind == _DONE:
                return
            if kind == _ERROR or length < _HEADER.size:
                raise OSError(f"rtnetlink: request {request} was refused")
            if kind == answer:
                yield rest[_HEADER.size : length]
            rest = rest[(length + 3) & ~3 :]


def _attributes(packed: bytes) -> dict[int, bytes]:
    found = {}
    while len(packed) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(packed)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = packed[_ATTRIBUTE.size : length]
        packed = packed[(length + 3) & ~3 :]
    return found


def _rdma_ports() -> Iterator[tuple[str, bool]]:
    for state in sorted(RDMA.glob("*/ports/*/state")) if RDMA.is_dir() else ():
        with contextlib.suppress(OSError):
            is_active = state.read_text().startswith("4")  # "4: ACTIVE"
            yield f"{state.parents[2].name}:{state.parent.name}", is_active
