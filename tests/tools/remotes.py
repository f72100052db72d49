"""Remote tiers on free ports of this machine, for the demo and the benchmarks: real servers, gone at the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.daemon import Daemon

NAMES = ("mooncake", "redis", "s3")


class Tier(NamedTuple):
    """A running tier."""

    entry: dict[str, Any]
    """The entry for --l2-adapter."""
    environment: dict[str, str]
    """The environment of the process that gets the entry."""
    server: Daemon
    """The server to kill and freeze; for Mooncake, the master."""


@contextlib.contextmanager
def tier(name: str, folder: Path) -> Iterator[Tier]:
    """Runs the servers of one kind of tier until the end of the block. Raises daemon.Unavailable."""
    # Imported here, because only runs with a remote tier need the clients.
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
