"""Stands for an adapter's host process: the test reads what the server asks of it, and answers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from kvstrata.testing.strategies import WAIT_S, Settled, lent_context
from kvstrata.tiers.base import Capabilities, Outcome, StorageAdapter
from kvstrata.tiers.config import TierConfig
from kvstrata.tiers.host.frames import (
    MAX_FRAME_BYTES,
    Answer,
    Configure,
    Message,
    Opened,
    answer_of,
    frame_of,
    read_request,
)
from kvstrata.tiers.host.parent import HostedAdapter
from kvstrata.tiers.media.fs import FsConfig
from kvstrata.tiers.structs import Place

STORED = Settled(Outcome.STORED)
PUT_DIED = Settled(Outcome.FAILED, "host_died")
LOADED = Settled(Outcome.LOADED)


def never_made() -> StorageAdapter:
    raise AssertionError("only the child makes it")


CONFIG = TierConfig(
    "hosted-0",
    never_made,
    "kvstrata.tiers.media.fs:MEDIUM",
    FsConfig(base_path="/x"),
    Place("l2_adapters[0]"),
)
CAPABILITIES = Capabilities(persistent=True, shared=False, max_batch=7)


class Child:
    """In place of the process: the test reads what the server says, and answers. It is reaped when `reap` says so."""

    made: list[Child]

    def __init__(self, name: str, channel_fd: int, pool_fds: list[int], ended: Callable[[str], None]) -> None:
        self.pid = 1
        self.killed = asyncio.Event()
        self.reaps_at_once = False
        self._ended = ended
        self._channel = socket.socket(fileno=os.dup(channel_fd))
        self._channel.setblocking(False)
        os.close(channel_fd)
        Child.made.append(self)

    def start(self) -> None:
        pass

    def kill(self) -> None:
        if not self.killed.is_set():
            self.killed.set()
            if self.reaps_at_once:
                asyncio.get_running_loop().call_soon(self.reap)

    def last_lines(self) -> str:
        return "E1128 no such host"

    def reap(self) -> None:
        if self.pid:
            self.pid = 0
            self._channel.close()
            self._ended("SIGKILL")

    async def request(self) -> Any:
        """The next message."""
        frame = await asyncio.wait_for(
            asyncio.get_running_loop().sock_recv(self._channel, MAX_FRAME_BYTES), WAIT_S
        )
        return read_request(frame)

    def say(self, *messages: Message | bytes) -> None:
        for message in messages:
            self._channel.send(message if isinstance(message, bytes) else frame_of(message))

    async def until_killed(self) -> None:
        await asyncio.wait_for(self.killed.wait(), WAIT_S)


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until something that must happen has happened."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (a host has no event for this)
            await asyncio.sleep(0.001)


async def opened_with(
    evicted: Callable[[bytes], None] = lambda key: None,
    capabilities: Capabilities = CAPABILITIES,
    kill_ms: int = 600_000,
) -> tuple[HostedAdapter, Child]:
    adapter = HostedAdapter(CONFIG, kill_ms=kill_ms, max_pause_s=0.01)
    opening = asyncio.create_task(adapter.open(lent_context(evicted)))
    await until(lambda: Child.made)
    child = Child.made[-1]
    config = await child.request()
    assert isinstance(config, Configure)
    assert (config.medium, config.name, config.place) == (CONFIG.medium, "hosted-0", CONFIG.place)
    assert msgspec.json.decode(config.config, type=FsConfig) == CONFIG.fields
    child.say(Opened(capabilities, b"first"))
    await opening
    return adapter, child


def all_stored(request: Any, *, dropped: bool = True) -> Answer:
    count = len(request.items)
    return answer_of(request.number, [STORED] * count, list(range(count)) if dropped else [])
