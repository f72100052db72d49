"""The word by which instances recognise that they put into the same medium."""

from __future__ import annotations

import hashlib
import ipaddress
import platform
from collections.abc import Iterable


def medium_word(kind: str, *parts: object, hosts: Iterable[str] = ()) -> str:
    """The same word for the same arguments; it shows none of them.

    `hosts`: where the medium is reached.  One that only this host reaches makes the word this host's own, since it
    names something else on another host; no host at all does too, for a directory.
    """
    at = sorted(hosts)
    local = not at or any(_is_local(host) for host in at)
    told = [kind, *map(str, parts), *at, platform.node() if local else ""]
    return hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]


def _is_local(host: str) -> bool:
    """Whether an address, with or without a port, means this host wherever it is used."""
    name = host.rpartition("://")[2]
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name in ("", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
