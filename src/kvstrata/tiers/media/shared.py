"""Code that several media share: fields of their entries, directories, and error texts of a medium."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import platform
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.structs import Place

NumWorkers = Annotated[
    int, Meta(ge=1, le=256, description="Threads for the lanes that `per_op_workers` does not name.")
]
PerOpWorkers = Annotated[
    dict[Lane, Annotated[int, Meta(ge=1, le=256)]],
    Meta(description="Number of dedicated threads for `lookup`, `retrieve`, `store` or `delete`."),
]


def folder_at(base_path: str) -> str:
    """The directory of an adapter. `base_path` was checked by `absolute`."""
    return os.path.abspath(os.path.expanduser(base_path))


def absolute(path: str, place: Place, name: str) -> str:
    """The directory of field `name` as an absolute path.

    Raises ConfigError if its `~` cannot be resolved, or if it contains a null byte, at which the system would cut it.
    """
    if "\0" in path:
        raise place.wrong(name, path, "must be a path without null bytes")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise place.wrong(name, path, "must be an absolute path, since the home directory is not known here")
    return os.path.abspath(expanded)


def medium_name(kind: str, *parts: object, hosts: Iterable[str] = ()) -> str:
    """A name of a medium: a digest, equal for equal arguments, that reveals none of them.

    `hosts`: the addresses of the medium.  If only this host reaches one of them, or there is none (a directory), the
    name is unique to this host, since the same address means another medium on another host.
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
