"""Remote tiers on free ports of this machine, for the demo and the benchmarks: real servers, gone at the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness import mooncake, redis_server, s3_server

NAMES = ("mooncake", "redis", "s3")
Tier = tuple[dict[str, Any], dict[str, str]]
"""An entry for --l2-adapter, and the environment of the process that gets it."""


@contextlib.contextmanager
def tier(name: str, folder: Path) -> Iterator[Tier]:
    """The servers of one kind. Raises daemon.Unavailable."""
    if name == "mooncake":
        with mooncake.cluster(folder, segment_mb=512) as (master, _):
            yield {"type": "mooncake_store", **master.setup()}, {**os.environ, **mooncake.environment()}
    elif name == "redis":
        with redis_server.RedisServer(folder) as server:
            yield server.entry(), dict(os.environ)
    else:
        with s3_server.S3Server(folder) as server:
            yield server.entry(), dict(os.environ)
