"""In which order an instance opens, starts and closes its parts.

The instance is whole and real, in this process: with an HTTP port, an L2 tier, a tier that reads peers, and a
controller that is absent.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.config.model import (
    ControllerLinkSettings,
    HttpSettings,
    L1Settings,
    L2Settings,
    P2pSettings,
    ServerSettings,
)
from kvstrata.memory.segment import Segment
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.control_port import ControlPort
from kvstrata.server import instance, process
from kvstrata.server.cluster.membership import Membership
from kvstrata.server.listener import AttachServer
from kvstrata.server.plan import P2pEngine, plan
from kvstrata.tiers.loads import PrefetchController
from kvstrata.tiers.puts import StoreController
from kvstrata.tiers.set import TierSet
from tests.harness.daemon import free_port

STEPS: list[tuple[str, Any, str]] = [
    ("the HTTP port is bound", instance, "http_listen"),
    ("L1 is opened", Segment, "open"),
    ("tiers are opened", TierSet, "open"),
    ("peers are answered", ControlPort, "start"),
    ("engines can attach", AttachServer, "start"),
    ("controllers are told", Membership, "start"),
    ("ready", process, "tell_ready"),
    ("controllers hear a goodbye", Membership, "stop"),
    ("puts end", StoreController, "stop"),
    ("loads end", PrefetchController, "stop"),
    ("tasks end", Supervisor, "stop"),
    ("the attach socket is closed", AttachServer, "stop"),
    ("tiers are closed", TierSet, "close"),
    ("L1 is closed", Segment, "close"),
]
"""What an instance does from its start to its end, and where."""


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
        p2p=P2pSettings(listen="127.0.0.1:0"),
    )


async def whole_life(server: process.Server) -> None:
    """Start and stop, as the process does."""
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
        os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_an_instance_binds_early_answers_late_and_closes_in_reverse(said, tmp_path):
    server = process.Server("server", plan(settings(tmp_path), os.environ), lambda: settings(tmp_path))
    await whole_life(server)
    assert list(said) == [step for step, _, _ in STEPS]


async def test_an_instance_that_cannot_open_closes_the_parts_that_it_has_opened(said, tmp_path):
    taken = settings(tmp_path)
    (tmp_path / "l2").write_text("not a folder")
    server = process.Server("server", plan(taken, os.environ), lambda: taken)
    with pytest.raises(Exception, match="base_path"):
        await server.run()
    assert list(said) == [
        "the HTTP port is bound", "L1 is opened", "tiers are opened", "tasks end", "puts end", "loads end",
        "tiers are closed", "L1 is closed",
    ]  # fmt: skip


async def test_an_engine_that_auto_has_chosen_and_that_fails_gives_way_to_tcp(tmp_path, monkeypatch):
    chosen = plan(settings(tmp_path), os.environ)
    chosen = chosen._replace(p2p_engine=P2pEngine("nixl", "nixl, since this host has an RDMA card"))
    monkeypatch.setitem(sys.modules, "nixl", None)
    server = process.Server("server", chosen, lambda: settings(tmp_path))
    why: list[str] = []

    def look() -> None:
        tier = server._instance.parts.tiers.get("peer-1")
        why.append(tier.medium.remarks()["engine"])

    monkeypatch.setattr(process, "tell_ready", lambda *_: look())
    await whole_life(server)
    assert why and why[0].startswith("tcp, since nixl fails: ")
