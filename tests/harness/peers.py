"""An owner with a real pool that serves peers over real sockets, and a reader of it, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvstrata.p2p.finding import Shared
from kvstrata.p2p.serving import PeerServer, RecordServer
from kvstrata.p2p.settings import PeerSettings
from kvstrata.p2p.tier import PeerTier
from kvstrata.rpc.cluster_wire import Owner
from kvstrata.rpc.control_port import ControlPort
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.testing.strategies import (
    Found,
    Settled,
    ask_for,
    lent_context,
    load_item,
    loaded_payload,
    payload_of,
    settled,
    watched,
)
from kvstrata.tiers.base import Ask, Item, Outcome, Presence
from tests.harness.directory_double import Directory
from tests.harness.l1 import L1, SIZE, chain
from tests.harness.waiting import until

LOADED = Settled(Outcome.LOADED)
ABSENT = Settled(Outcome.ABSENT)
THERE = Found(Presence.PRESENT)
NOT_THERE = Found(Presence.ABSENT)
KEYS = chain("a", 8)


def failed(reason: str) -> Settled:
    return Settled(Outcome.FAILED, reason)


def unknown(reason: str) -> Found:
    return Found(Presence.UNKNOWN, reason)


class PeerOwner:
    """Serves the records of a pool to peers."""

    def __init__(
        self, l1: L1, name: str = "owner", *, seal: bool = False, socket_path: Path | None = None,
        engine: str = "tcp", metadata: bytes = b"",
    ) -> None:  # fmt: skip
        public, secret = zmq.curve_keypair()
        self.l1, self.name, self.public = l1, name, public.decode()
        self.members: frozenset[bytes] | None = None
        self.metadata = metadata
        self.control = ControlPort(asyncio.get_running_loop(), 11)
        self.port = self.control.server.bind_tcp("127.0.0.1", 0, keys=ClusterKeys(secret), anywhere=False)
        self.records = RecordServer(l1.pool, socket_path=socket_path, host="127.0.0.1", port=0)
        self.server = PeerServer(
            self.records, self.control, instance_id=name, incarnation=11, engine=engine,
            metadata=lambda: self.metadata, seal=seal, members=lambda: self.members,
        )  # fmt: skip
        self.control.start()

    @property
    def entry(self) -> Owner:
        """The owner as the directory names it."""
        return Owner(self.name, 11, f"tcp://127.0.0.1:{self.port}", len(KEYS), True, self.public)

    async def close(self) -> None:
        """Stop, and assert that nothing is held any more."""
        await self.control.close()
        await self.server.close()
        assert self.records.sending_bytes == 0
        await until(lambda: self.l1.pool.stats()["holds"] == 0)  # those of another owner of this L1
        self.l1.nothing_in_use()


class PeerNet:
    """One reader, one owner with eight records, and a directory that knows the owner."""

    def __init__(self, l1: L1, owner: Any, **settings: Any) -> None:
        """`owner` has an `entry` and a `close`."""
        self.l1, self.owner, self.others = l1, owner, []  # type: Any, Any, list[Any]
        self.directory = Directory()
        values = {
            # Tests of silent parties set shorter times by `patience`.
            "lookup_timeout_ms": 60_000, "load_timeout_ms": 60_000, "remember_ms": 0, "remember_none_ms": 0, **settings,
        }  # fmt: skip
        self.settings = PeerSettings((self.directory.endpoint,), "tcp", **values)
        self.adapter = PeerTier(self.settings)
        self.each = False
        """Whether the reader's keys are asked for as those of windows are."""
        self.named = b""
        """The owner that is named for the reader's keys."""
        l1.store(KEYS)
        self.directory.tell(owner.entry, KEYS)

    @property
    def shared(self) -> Shared:
        assert self.adapter._parts is not None
        return self.adapter._parts.shared

    def patience(self, **settings: int) -> None:
        """Set how long the reader waits from now on."""
        self.shared.settings = msgspec.structs.replace(self.shared.settings, **settings)

    async def open(self) -> PeerNet:
        await self.adapter.open(lent_context(lambda key: None, "reader"))
        return self

    async def close(self) -> None:
        await self.adapter.close()
        self.directory.close()
        for owner in (self.owner, *self.others):
            await owner.close()

    async def ask(self, keys: Sequence[bytes]) -> list[Found]:
        return await ask_for(self.adapter, keys, each=self.each, owner=self.named)

    async def load(self, *keys: bytes, items: list[Item] | None = None) -> list[Settled]:
        """Load; assert that all holds were dropped once and that loaded bytes are right."""
        asked = [load_item(key, SIZE) for key in keys]
        for item in asked:
            item.ask = Ask(each=self.each, owner=self.named)
        items = items or asked
        outcomes = await settled(self.adapter.load, items)
        for item, outcome in zip(items, outcomes, strict=True):
            await watched(item).until_dropped()
            watched(item).check()
            if outcome == LOADED:
                assert loaded_payload(item, SIZE) == payload_of(item.key, SIZE)
        return outcomes

    def counted(self, name: str) -> int:
        return self.adapter.numbers()[name]


Opened = Callable[..., Any]
