"""Stands for an adapter's host process: the test reads what the server asks of it, and answers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import msgspec

from kvstrata.storage.base import Capabilities, LoadOutcome, LoadStatus, PayloadKind, PutOutcome, PutStatus
from kvstrata.storage.host import channel
from kvstrata.storage.host.channel import MAX_FRAME_BYTES, Kind, Request
from kvstrata.storage.host.parent import HostedAdapter
from kvstrata.storage.media.fs.config import FsConfig
from kvstrata.storage.recipe import CodecConfig, Recipe
from kvstrata.storage.structs import Place
from kvstrata.storage.wrap.codec_fields import ChainSettings
from kvstrata.testing.strategies import WAIT_S, lent_context

STORED = PutOutcome(PutStatus.STORED)
PUT_DIED = PutOutcome(PutStatus.FAILED, "host_died")
LOADED = LoadOutcome(LoadStatus.LOADED)
RECIPE = Recipe(
    "kvstrata.storage.media.fs.config:MEDIUM", FsConfig(base_path="/x"), Place("l2_adapters[0]"), "hosted-0"
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
            self._ended("signal SIGKILL")

    async def request(self) -> Request:
        """The next frame."""
        frame = await asyncio.wait_for(
            asyncio.get_running_loop().sock_recv(self._channel, MAX_FRAME_BYTES), WAIT_S
        )
        return channel.read_request(frame)

    def say(self, *frames: bytes) -> None:
        for frame in frames:
            self._channel.send(frame)

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
    payload_kind: Callable[[bytes, bytes], PayloadKind | None] | None = None,
) -> tuple[HostedAdapter, Child]:
    codec = CodecConfig() if payload_kind is None else CodecConfig(ChainSettings(fp8=True))
    recipe = RECIPE._replace(codec=codec)
    adapter = HostedAdapter(recipe, kill_ms=kill_ms, max_pause_s=0.01)
    context = lent_context(evicted)
    if payload_kind is not None:
        context = context._replace(payload_kind=payload_kind)
    opening = asyncio.create_task(adapter.open(context))
    await until(lambda: Child.made)
    child = Child.made[-1]
    request = await child.request()
    assert request.config is not None
    assert (request.config.medium, request.config.name) == (RECIPE.medium, "hosted-0")
    assert msgspec.json.decode(request.config.config, type=FsConfig) == RECIPE.config
    assert (request.config.place, request.config.codec) == (RECIPE.place, codec)
    child.say(channel.opened(capabilities, b"first"))
    await opening
    return adapter, child


def all_stored(request: Request, *, dropped: bool = True) -> bytes:
    outcomes = [STORED] * len(request.items)
    return channel.ended(Kind.PUT_ENDED, request.number, outcomes, [dropped] * len(outcomes))
