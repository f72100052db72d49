"""Remote tiers on free ports of this machine, for the demo and the benchmarks: real servers, gone at the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.daemon import Daemon

NAMES = ("mooncake", "redis", "s3")
MAY_BE_ADDED = {
    "KVSTRATA_L2_RUNTIME_TYPES": "[mooncake_store, resp, object_store]",
    "KVSTRATA_L2_RUNTIME_HOSTS": "['127.0.0.1', localhost]",
}
"""For the environment of a server to which these tiers are added while it runs."""


class Tier(NamedTuple):
    """One that runs."""

    entry: dict[str, Any]
    """For --l2-adapter."""
    environment: dict[str, str]
    """Of the process that gets the entry."""
    server: Daemon
    """To kill and freeze: of Mooncake the master."""


@contextlib.contextmanager
def tier(name: str, folder: Path) -> Iterator[Tier]:
    """The servers of one kind. Raises daemon.Unavailable."""
    # Their clients are needed by those alone who ask for a remote tier.
    from tests.harness import mooncake, redis_server, s3_server

    if name == "mooncake":
        with mooncake.cluster(folder, segment_mb=512) as (master, _):
            entry = {"type": "mooncake_store", **master.setup()}
            yield Tier(entry, {**os.environ, **mooncake.environment()}, master)
    elif name == "redis":
        with redis_server.RedisServer(folder) as server:
            yield Tier(server.entry(), dict(os.environ), server)
    else:
        with s3_server.S3Server(folder) as server:
            yield Tier(server.entry(), dict(os.environ), server)
