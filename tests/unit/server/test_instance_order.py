"""In which order an instance opens, starts and closes its parts, and which keys its status document has.

The instance is whole and real, in this process: with an HTTP port, an L2 tier, a tier that reads peers, and a
controller that is absent.
"""

from __future__ import annotations

import asyncio
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
from kvstrata.process.http_token import find_token
from kvstrata.process.supervisor import Supervisor
from kvstrata.server import instance, process
from kvstrata.server.cluster.membership import Membership
from kvstrata.server.l2.prefetch import PrefetchController
from kvstrata.server.l2.store import StoreController
from kvstrata.server.l2.tier_control import TierControl
from kvstrata.server.plan import plan
from tests.harness.daemon import free_port

STEPS: list[tuple[str, Any, str]] = [
    ("the HTTP port is bound", instance, "http_listen"),
    ("L1 is opened", Segment, "open"),
    ("puts begin", StoreController, "start"),
    ("tiers are opened", TierControl, "open"),
    ("peers are answered", PeerServer, "start"),
    ("engines can attach", AttachServer, "start"),
    ("controllers are told", Membership, "start"),
    ("ready", process, "tell_ready"),
    ("controllers hear a goodbye", Membership, "stop"),
    ("puts end", StoreController, "stop"),
    ("loads end", PrefetchController, "stop"),
    ("tasks end", Supervisor, "stop"),
    ("the attach socket is closed", AttachServer, "stop"),
    ("tiers are closed", TierControl, "close"),
    ("L1 is closed", Segment, "close"),
]
"""What an instance does from its start to its end, and where."""


OTHERS = re.compile(r"\.numbers\.")
"""Paths whose keys depend on the machine or on a tier's medium."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[str, None]:
    """The steps in the order in which each is taken for the first time."""
    said: dict[str, None] = {}
    for step, owner, name in STEPS:
        real = getattr(owner, name)

        def called(*args: Any, _real: Any = real, _step: str = step, **more: Any) -> Any:
            said.setdefault(_step)
            return _real(*args, **more)

        monkeypatch.setattr(owner, name, called)
    return said


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


async def test_an_instance_binds_early_answers_late_and_closes_in_reverse(
    said: dict[str, None], tmp_path: Path
) -> None:
    server = process.Server(plan(settings(tmp_path), os.environ), lambda: settings(tmp_path))
    await whole_life(server, nothing)
    assert list(said) == [step for step, _, _ in STEPS]


async def test_an_instance_that_cannot_open_closes_the_parts_that_it_has_opened(
    said: dict[str, None], tmp_path: Path
) -> None:
    taken = settings(tmp_path)
    (tmp_path / "l2").write_text("not a folder")
    server = process.Server(plan(taken, os.environ), lambda: taken)
    with pytest.raises(Exception, match="base_path"):
        await server.run()
    assert list(said) == [
        "the HTTP port is bound", "L1 is opened", "puts begin", "tiers are opened", "tasks end", "tiers are closed",
        "puts end", "loads end", "L1 is closed",
    ]  # fmt: skip


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
