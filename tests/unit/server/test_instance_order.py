"""In which order an instance opens, starts and closes its parts, and which keys its status document has.

The instance is whole and real, in this process: with an HTTP port, an L2 tier, a tier that reads peers, and a
controller that is absent.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstrata.config.model import (
    ControllerLinkSettings,
    HttpSettings,
    L1Settings,
    L2Settings,
    P2pSettings,
    ServerSettings,
)
from kvstrata.memory.attach.server import AttachServer
from kvstrata.memory.segment import Segment
from kvstrata.p2p.serving import PeerServer
from kvstrata.p2p.tier import PeerTier
from kvstrata.process.http_token import find_token
from kvstrata.process.lane import PoolLane
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.zmq_server import ZmqServer
from kvstrata.server import instance, process
from kvstrata.server.cluster.membership import Membership
from kvstrata.server.l2.prefetch import PrefetchController
from kvstrata.server.l2.store import StoreController
from kvstrata.server.l2.tier_control import TierControl
from kvstrata.server.plan import plan
from kvstrata.storage.native_adapter import NativeAdapter
from tests.harness.daemon import free_port

OPENED = [
    "HTTP port bound",
    "segment opened",
    "puts begin",
    "peer tier opened",
    "disk tier opened",
    "readers' port bound",
    "peers are answered",
    "socket listens",
    "membership begins",
    "ready",
]
CLOSED = [
    "membership ends",
    "puts end",
    "loads end",
    "tasks end",
    "socket closed",
    "peer server closed",
    "tier control closed",
    "peer tier closed",
    "disk tier closed",
    "lane closed",
    "lane closed",
    "segment closed",
]


OTHERS = re.compile(r"\.numbers\.")
"""Paths whose keys depend on the machine or on a tier's medium."""


class Watched:
    """Notes calls of the parts' methods as steps; a step that repeats in a row is noted once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self._patch = monkeypatch

    def note(self, step: str) -> None:
        self.said.append(step)

    def method(
        self, owner: Any, name: str, step: str, when: Callable[[Any], bool] = lambda part: True
    ) -> None:
        """From now on each call of `owner.name` on a part for which `when` holds is noted as this step."""
        real = getattr(owner, name)

        @functools.wraps(real)
        def called(part: Any, *args: Any, **more: Any) -> Any:
            if when(part):
                self.note(step)
            return real(part, *args, **more)

        self._patch.setattr(owner, name, called)

    def steps(self, known: list[str]) -> list[str]:
        """Those of `known`, a second call of one that repeats nothing left out."""
        counts = {step: known.count(step) for step in known}
        found = []
        for step in self.said:
            if counts.get(step, 0):
                counts[step] -= 1
                found.append(step)
        return found


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched(monkeypatch)

    watched.method(ZmqServer, "bind_tcp", "readers' port bound")
    real_open, real_listen = Segment.open, instance.http_listen

    def opened(*args: Any) -> Segment:
        watched.note("segment opened")
        return real_open(*args)

    def listens(*args: Any) -> Any:
        watched.note("HTTP port bound")
        return real_listen(*args)

    monkeypatch.setattr(Segment, "open", opened)
    monkeypatch.setattr(instance, "http_listen", listens)
    monkeypatch.setattr(process, "tell_ready", lambda *told: watched.note("ready"))
    watched.method(Segment, "destroy", "segment closed")
    watched.method(Segment, "close", "segment closed")
    watched.method(StoreController, "start", "puts begin")
    watched.method(StoreController, "stop", "puts end")
    watched.method(PrefetchController, "stop", "loads end")
    watched.method(PeerTier, "open", "peer tier opened")
    watched.method(PeerTier, "close", "peer tier closed")
    watched.method(NativeAdapter, "open", "disk tier opened")
    watched.method(NativeAdapter, "close", "disk tier closed")
    watched.method(TierControl, "close", "tier control closed")
    watched.method(PeerServer, "start", "peers are answered")
    watched.method(PeerServer, "close", "peer server closed")
    watched.method(AttachServer, "start", "socket listens")
    watched.method(AttachServer, "stop", "socket closed")
    watched.method(Membership, "start", "membership begins")
    watched.method(Membership, "stop", "membership ends")
    watched.method(Supervisor, "stop", "tasks end")
    watched.method(PoolLane, "close", "lane closed")
    return watched


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Unfreezes the objects that a ready server has hidden from the garbage collector (`gc.freeze`)."""
    yield
    gc.unfreeze()


def settings(folder: Path) -> ServerSettings:
    return ServerSettings(
        instance_id="whole",
        port=free_port(),
        socket_dir=str(folder / "sockets"),
        l1=L1Settings(size_gb=0.0625, segment_dir=str(folder / "segment")),
        l2=L2Settings(drain_s=1.0),
        l2_adapters=[{"type": "disk", "base_path": str(folder / "l2"), "capacity_gb": 1}],
        http=HttpSettings(port=0),
        controller=ControllerLinkSettings(url="tcp://127.0.0.1:9"),
        p2p=P2pSettings(engine="ucx", listen="127.0.0.1:0"),
    )


async def whole_life(server: process.Server, while_ready: Callable[[], Any]) -> None:
    """Start, call `while_ready` and stop, as the process does."""
    ready = asyncio.Event()
    real_start = server.start

    async def start() -> None:
        await real_start()
        ready.set()

    server.start = start  # type: ignore[method-assign]
    running = asyncio.create_task(server.run())
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not running.done():
        await while_ready()
        os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def nothing() -> None:
    """Nothing to look at."""


async def test_an_instance_opens_and_closes_its_parts_in_this_order(watched: Watched, tmp_path: Path) -> None:
    server = process.Server(plan(settings(tmp_path), os.environ), lambda: settings(tmp_path))
    await whole_life(server, nothing)
    at = watched.said.index("ready") + 1
    opened, watched.said[:at] = watched.said[:at], []
    closed = watched.steps(CLOSED)
    watched.said[:] = opened
    assert watched.steps(OPENED) == OPENED
    assert closed == CLOSED


async def test_an_instance_that_cannot_open_closes_the_parts_that_it_has_opened(
    watched: Watched, tmp_path: Path
) -> None:
    taken = settings(tmp_path)
    (tmp_path / "l2").write_text("not a folder")
    server = process.Server(plan(taken, os.environ), lambda: taken)
    with pytest.raises(Exception, match="base_path"):
        await server.run()
    assert "ready" not in watched.said
    end = watched.said.index("tasks end")
    del watched.said[:end]
    never_open = {"membership ends", "socket closed", "peer server closed", "disk tier closed"}
    tier_control = CLOSED.index("tier control closed")
    assert watched.steps(CLOSED) == [
        "tasks end",
        "tier control closed",
        "puts end",
        "loads end",
        *(step for step in CLOSED[tier_control + 1 :] if step not in never_open),
    ]


def keys_in(document: Any, above: str = "") -> Iterator[str]:
    """Paths of all keys of a document; a list counts by its first item."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield f"{above}{key}"
            yield from keys_in(value, f"{above}{key}.")
    elif isinstance(document, list) and document:
        yield from keys_in(document[0], f"{above.removesuffix('.')}[].")


async def test_the_status_document_has_these_keys(tmp_path: Path) -> None:
    server = process.Server(plan(settings(tmp_path), os.environ), lambda: settings(tmp_path))
    port = 0
    told: dict[str, Any] = {}

    def announced(_: int, ready: Mapping[str, Any]) -> None:
        nonlocal port
        port = ready["http_port"]

    async def look() -> None:
        url = f"http://127.0.0.1:{port}"
        headers = {"authorization": f"Bearer {find_token(url)}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
            told.update((await client.get("/v1/status")).json())

    real, process.tell_ready = process.tell_ready, announced
    try:
        await whole_life(server, look)
    finally:
        process.tell_ready = real
    expected = Path(__file__).with_name("status_keys.json")
    found = [key for key in sorted(keys_in(told)) if not OTHERS.search(key)]
    assert found == json.loads(expected.read_text())
