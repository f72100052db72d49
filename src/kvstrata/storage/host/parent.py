"""The server's side of an adapter that runs in a child process of its own (`"isolation": "process"`).

While no child is UP, `exists` answers UNKNOWN('host_down'), `put` THROTTLED('host_down') and `load`
FAILED('host_down'), at once.  Operations under way when the child ends are FAILED or UNKNOWN with 'host_died'.

Invariants
1. Each item's hold is in the request table (requests.py) until the adapter has finished with its bytes or the child was
   reaped: no deadline, cancelled wait or closed channel drops it.
2. The server does not trust the child: the bytes that it wrote into extents are verified where they are used.

The children, and how they are watched: life.py.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvstrata.errors import StorageError
from kvstrata.native.batches import pack_keys
from kvstrata.policy.reasons import BAD_ITEM, CLOSED, HOST_DIED
from kvstrata.storage.base import (
    MORE_KEYS,
    AdapterContext,
    Capabilities,
    Found,
    KeyPage,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
    Usage,
)
from kvstrata.storage.host import channel as host_channel
from kvstrata.storage.host.channel import MAX_ITEMS, Kind
from kvstrata.storage.host.life import HostLife
from kvstrata.storage.host.pauses import MAX_PAUSE_S
from kvstrata.storage.host.requests import outcome_of
from kvstrata.storage.peers import ReadsPeers
from kvstrata.storage.recipe import Recipe
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold

T = TypeVar("T")


class HostedAdapter(StorageAdapter, ReadsPeers):
    """Runs a tier's medium and codec in a child process. `capabilities` are the medium's once it is open.

    A child is killed after `kill_ms` of silence, and as long again for every `bytes_per_kill` of payload under way.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        kill_ms: int,
        bytes_per_kill: int = 64 << 20,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        self.name = recipe.name
        self.capabilities = Capabilities(persistent=False, shared=False)
        self._encodes = recipe.codec.chain.encodes
        self._life = HostLife(recipe, kill_ms=kill_ms, bytes_per_kill=bytes_per_kill, max_pause_s=max_pause_s)
        self._context: AdapterContext | None = None

    def host_status(self) -> dict[str, Any]:
        """For status pages: pid (0: none), state, restarts, requests under way."""
        return self._life.status()

    def stats(self) -> dict[str, int]:
        """The counters of the codecs in the child, about a second old; empty after the child has ended."""
        return self._life.counted.codec

    def numbers(self) -> dict[str, int]:
        """The counters of the adapter in the child, about a second old; empty after the child has ended."""
        return self._life.counted.numbers

    def remarks(self) -> dict[str, str]:
        """The adapter's remarks in the child, about a second old; also the reason if no more children are started."""
        return self._life.remarks()

    def advertisement(self) -> bytes:
        """The medium's last advertisement; empty while no child is up, and for a medium that reads no peers."""
        return self._life.advertisement()

    def prefer(self, keys: Sequence[bytes], source: bytes) -> None:
        """Pass the preference on to the child; it is lost while no child is up, or while the child does not read."""
        if self._life.is_up and not self._life.is_full:
            for part in host_channel.parts_of(keys):
                self._life.send(host_channel.prefer(pack_keys(part), source))

    def scatter(self, keys: Sequence[bytes]) -> None:
        """Pass this on to the child, as `prefer` does."""
        if self._life.is_up and not self._life.is_full:
            for part in host_channel.parts_of(keys):
                self._life.send(host_channel.scatter(pack_keys(part)))

    # --- the contract ------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Start the child and open the adapter there. After ConfigError, StorageError or OSError no child is left."""
        self._context = context
        await self._life.open(context)
        self.capabilities = self._life.capabilities

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """As the adapter in the child."""
        try:
            waits = self._ask_keys(Kind.EXISTS, keys)
        except ValueError:  # a key of another length
            return [Found(Presence.UNKNOWN, 0, BAD_ITEM)] * len(keys)
        found: list[Found] = []
        for (future, why_not), part in zip(waits, host_channel.parts_of(keys), strict=True):
            found += await outcome_of(future, [Found(Presence.UNKNOWN, 0, why_not or HOST_DIED)] * len(part))
        return found

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the adapter in the child; None while no child is up."""
        most = min(most, MAX_ITEMS - MORE_KEYS)
        future, _ = self._life.ask(
            Kind.LIST, 0, [], lambda number: host_channel.list_keys(number, cursor, most)
        )
        page: KeyPage | None = await outcome_of(future, None)
        return page

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """As the adapter in the child. A cancelled wait lets the batch go on to its end."""
        bad = PutOutcome(PutStatus.FAILED, BAD_ITEM)

        def refused(why_not: str) -> PutOutcome:
            died = why_not in (HOST_DIED, CLOSED)
            return PutOutcome(PutStatus.FAILED if died else PutStatus.THROTTLED, why_not)

        return await self._move(Kind.PUT, items, bad, refused)

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """As the adapter in the child. A cancelled wait lets the batch go on to its end."""
        bad = LoadOutcome(LoadStatus.FAILED, BAD_ITEM)
        return await self._move(
            Kind.LOAD, items, bad, lambda why_not: LoadOutcome(LoadStatus.FAILED, why_not)
        )

    async def delete(self, keys: Sequence[bytes]) -> int:
        """As the adapter in the child; keys whose deletion was not answered count as absent."""
        waits = self._ask_keys(Kind.DELETE, [key for key in keys if len(key) == KEY_BYTES])
        counts: list[int] = [await outcome_of(future, 0) for future, _ in waits]
        return sum(counts)

    async def clear(self) -> int:
        """As the adapter in the child. Raises StorageError if the adapter does, and while no child is up."""
        future, why_not = self._ask_bare(Kind.CLEAR)
        removed: int | None = await outcome_of(future, None)
        if removed is None:
            raise StorageError(f"{self.name}: not cleared: {why_not or HOST_DIED}", field=self.name)
        return removed

    async def usage(self) -> Usage:
        """As the adapter in the child; all zero while no child is up."""
        future, _ = self._ask_bare(Kind.USAGE)
        return await outcome_of(future, Usage(0, 0, 0))

    async def close(self) -> None:
        """Let the child finish its operations and close its adapter; kill it when it is silent for CLOSE_S.

        Returns when the child was reaped and every hold is dropped. Idempotent.
        """
        await self._life.close()

    # --- asking ------------------------------------------------------------------------------------------

    async def _move(
        self,
        kind: Kind,
        items: Sequence[Any],
        bad: T,
        refused: Callable[[str], T],
    ) -> list[T]:
        """Outcomes of a PUT or LOAD; holds of items that are not sent are dropped at once."""
        outcomes = [bad] * len(items)
        places = [i for i, item in enumerate(items) if self._is_sound(item)]
        for i in set(range(len(items))).difference(places):
            items[i].hold.drop()
        waits = []
        for part in host_channel.parts_of(places):
            batch = [items[i] for i in part]
            future, why_not = self._ask_items(kind, batch)
            if future is None:
                for item in batch:
                    item.hold.drop()
            waits.append((part, future, why_not))
        del items
        for part, future, why_not in waits:
            answers = await outcome_of(future, [refused(why_not or HOST_DIED)] * len(part))
            for i, outcome in zip(part, answers, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _is_sound(self, item: PutItem | LoadItem) -> bool:
        """Whether the child can reach the item's bytes by their offset."""
        hold, context = item.hold, self._context
        return (
            len(item.key) == KEY_BYTES
            and context is not None
            and 0 <= hold.offset <= context.region_bytes - hold.length
            and hold.address == context.region_address + hold.offset
        )

    def _ask_keys(self, kind: Kind, keys: Sequence[bytes]) -> list[tuple[asyncio.Future[Any] | None, str]]:
        """`_ask` for each part of the keys. Raises ValueError, and asks nothing, if a key has another length."""
        packed = [pack_keys(part) for part in host_channel.parts_of(keys)]
        asks = [functools.partial(host_channel.keyed, kind, keys=part) for part in packed]
        return [
            self._life.ask(kind, len(part) // KEY_BYTES, [], ask)
            for part, ask in zip(packed, asks, strict=True)
        ]

    def _ask_items(
        self, kind: Kind, items: Sequence[PutItem | LoadItem]
    ) -> tuple[asyncio.Future[Any] | None, str]:
        holds: list[Hold | None] = [item.hold for item in items]

        def frame(number: int) -> bytes:
            if kind is Kind.PUT and self._encodes:
                self._life.tell_kinds([item.hold for item in items])
            return host_channel.moved(kind, number, items)

        return self._life.ask(kind, len(items), holds, frame)

    def _ask_bare(self, kind: Kind) -> tuple[asyncio.Future[Any] | None, str]:
        return self._life.ask(kind, 0, [], lambda number: host_channel.bare(kind, number))
