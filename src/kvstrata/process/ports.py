"""Addresses of hosts, and TCP ports of this machine: finds a port's listener, and settings that use a port twice."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvstrata.errors import ConfigError, MachineLacks


class Listening(NamedTuple):
    """A port that a setting names; 0: a free one."""

    setting: str
    host: str
    port: int


def host_and_port(place: str) -> tuple[str, int]:
    """The two parts of HOST:PORT; an IPv6 address may stand in brackets."""
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


def refuse_port_twice(ports: list[Listening]) -> None:
    """Raises ConfigError if two settings name the same port of one address."""
    for number, second in enumerate(ports):
        for first in ports[:number]:
            if first.port == second.port != 0 and _overlap(first.host, second.host):
                raise ConfigError(
                    f"{second.setting}: {second.host}:{second.port} is also the port of {first.setting} "
                    f"({first.host}:{first.port}); choose another, or 0 for a free one",
                    field=second.setting,
                )


def _overlap(first: str, second: str) -> bool:
    """Whether two addresses to listen on overlap, as far as their texts show."""
    both = {first, second}
    if len(both) == 1 or "::" in both:
        return True
    if both & {"*", "0.0.0.0"}:
        return not any(":" in host for host in both)
    return "localhost" in both and both <= {"localhost", "127.0.0.1", "::1"}


def resolve(host: str, setting: str = "host") -> tuple[str, socket.AddressFamily]:
    """The numeric address of a host name, IPv4 first. Raises MachineLacks."""
    if host in ("*", ""):
        return "0.0.0.0", socket.AF_INET
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise MachineLacks(f"{setting}: {host!r} is not an address: {error}", field=setting) from None
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(where[0]).partition("%")[0], family


def refuse_open(
    host: str, setting: str, keys_setting: str = "security.curve_secret_file (--curve-secret-file)"
) -> None:
    """Raise ConfigError if other machines reach a port at `host`; for a ZMQ port without keys."""
    if not ipaddress.ip_address(resolve(host, setting)[0]).is_loopback:
        raise ConfigError(
            f"{setting}: {host} is reachable from other machines; give {keys_setting}, listen on localhost, or allow "
            "it with --insecure",
            field=setting,
        )


def port_holder(port: int) -> str:
    """The process that listens on a TCP port here, as far as this user can see: `pid 12 (name)`; empty if none."""
    links = {f"socket:[{inode}]" for *_, inode in _listeners(port)}
    for entry in os.scandir("/proc") if links else ():
        if not entry.name.isdigit():
            continue
        try:
            for descriptor in os.scandir(f"/proc/{entry.name}/fd"):
                if os.readlink(descriptor.path) in links:
                    name = Path(f"/proc/{entry.name}/comm").read_text().strip()
                    return f"pid {entry.name} ({name})"
        except OSError:
            continue
    return "a process of another user or network namespace" if links else ""


def port_uids(port: int, host: str = "") -> set[int]:
    """The uids that listen on a TCP port in this network namespace; with `host`, only those that it would reach."""
    places: set[str] = set()
    if host:
        ip = ipaddress.ip_address(host)
        places = {_as_in_table(ip.packed), "0" * 32}
        if ip.version == 4:
            places |= {"0" * 8, _as_in_table(bytes(10) + b"\xff\xff" + ip.packed)}
    return {uid for place, uid, _ in _listeners(port) if not places or place in places}


def _as_in_table(address: bytes) -> str:
    return "".join(address[at : at + 4][::-1].hex().upper() for at in range(0, len(address), 4))


def _listeners(port: int) -> Iterator[tuple[str, int, str]]:
    """(address, uid, inode) of each socket that listens on a port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            next(lines)
            for line in lines:
                fields = line.split()
                if fields[3] != "0A":
                    break  # those that listen come first
                address, _, at = fields[1].rpartition(":")
                if int(at, 16) == port:
                    yield address, int(fields[7]), fields[9]
