"""A Redis server that the tests of a module share; each test begins with an empty one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.redis_server import RedisServer


@pytest.fixture(scope="module")
def shared_redis(redis_folder: Path) -> Iterator[RedisServer]:
    """A running server."""
    with RedisServer(redis_folder / "shared") as server:
        yield server


@pytest.fixture
def server(shared_redis: RedisServer) -> Iterator[RedisServer]:
    """The server of the module, without any key."""
    with shared_redis.client() as client:
        client.flushall()
    yield shared_redis
