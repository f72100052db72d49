"""The L1 of other instances as a read-only tier: the directory names owners, and one of them sends the records.

    exists   keys ─▶ directory (remembered for a moment) ─▶ PRESENT as far as the best owner's prefix goes
    load     items ─▶ their owners, best first ─▶ bytes in the reserved extents, verified ─▶ LOADED

Invariants
1. LOADED is answered only for bytes that verify as the record of their key.  Everything else is a miss, such as a wrong
   directory, an owner that has evicted, cleared or restarted, or another record version.
2. The hold of a destination is dropped when nothing writes to it any more (reading.py); no clock, deadline or cancelled
   wait drops it.
3. Each answer of an owner or a controller is checked before it is used, and awaited for at most `lookup_timeout_ms` in
   a lookup and `load_timeout_ms` in a load.  After a failure the owner is skipped for a while (finding.py).
4. Nothing is put, deleted or cleared, since the records belong to their owner.

The keys of a lookup form a prefix: key i is only useful if keys 0..i-1 are present.  Single keys (`Ask.each`) are asked
of the owners themselves, since the directory counts only prefixes.

If the request names an owner (`Ask.owner`, in msgpack), that owner is asked first, whatever the directory says.  Other
owners are asked only for the keys that it does not send; it is counted and logged if it sends nothing.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from kvstrata.errors import ClusterFailure, ConfigError, TransferError, Unavailable
from kvstrata.keys.batch import split
from kvstrata.observability.logging import Thinning
from kvstrata.p2p.finding import COUNTED, Controllers, Finder, OwnerBook, Shared
from kvstrata.p2p.frames import MAX_KEYS, FrameError
from kvstrata.p2p.nixl import NixlEngine, Region
from kvstrata.p2p.reading import LOADED, UNSOUND, Busy, Late, Reader
from kvstrata.p2p.settings import PeerSettings
from kvstrata.rpc.cluster_wire import Owner
from kvstrata.rpc.zmq_curve import open_keys, read_cluster_keys
from kvstrata.rpc.zmq_link import Links
from kvstrata.tiers.base import (
    AdapterContext,
    Ask,
    Capabilities,
    Item,
    Outcome,
    Presence,
    ReadsPeers,
    StorageAdapter,
    Usage,
)
from kvstrata.tiers.reasons import (
    BAD_ITEM,
    CLOSED,
    CONTROLLER_DOWN,
    PEER_DEADLINE,
    PEER_DIFFERS,
    PEER_FAILED,
    PEER_GONE,
    PEER_SKIPPED,
    READ_ONLY,
    THROTTLED,
)
from kvstrata.types import KEY_BYTES

log = logging.getLogger(__name__)
_thinning = Thinning()
T = TypeVar("T")

MAX_BATCH = 256
ATTEMPTS = 2
"""Maximum number of owners asked for one key, besides the one that a command named."""


class _Parts(NamedTuple):
    """The parts of an open tier."""

    shared: Shared
    links: Links
    controllers: Controllers
    reader: Reader
    owners: OwnerBook
    finder: Finder


class PeerTier(StorageAdapter, ReadsPeers):
    """The adapter that reads other instances. It connects and registers nothing before `open`."""

    def __init__(
        self,
        settings: PeerSettings,
        make_engine: Callable[[], NixlEngine] | None = None,
        *,
        name: str = "peer",
    ) -> None:
        """`make_engine` may raise a TransferError that says what to install; None: owners send the bytes."""
        self.name = name
        self.capabilities = Capabilities(
            persistent=False,
            shared=True,
            max_batch=MAX_BATCH,
            wants_registered_memory=make_engine is not None,
            takes_puts=False,
            can_delete=False,
            quiesce="drain" if make_engine is None else "never",
        )
        self._settings = settings
        self._make_engine = make_engine
        self._engine: NixlEngine | None = None
        self._advertised = b""
        self._parts: _Parts | None = None
        """None until the tier is open."""
        self._closed = False

    # --- life --------------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Register L1 with the transfer engine, if there is one; controllers may be absent. Raises ConfigError."""
        self._region = Region(context.region_address, context.region_bytes)
        settings = self._settings
        if settings.curve_file:
            keys = read_cluster_keys(settings.curve_file, "controller.curve_file")
        else:
            keys = open_keys()  # --insecure: owners serve every reader
        if self._make_engine is not None:
            try:
                self._engine = self._make_engine()
                self._advertised = await self._engine.open(self._region)
            except TransferError as error:
                raise ConfigError(f"{self.name}: {error.message}", field="p2p.engine") from None
        links = Links(asyncio.get_running_loop())
        shared = Shared(self.name, settings, context.clock, context.instance_id)
        try:
            controllers = Controllers(shared, links, keys)
        except Unavailable as error:
            links.close()
            if self._engine is not None:
                await self._engine.close()
            raise ConfigError(f"controller.url: {error.message}", field="controller.url") from None
        reader = Reader(shared, links, keys, self._engine)
        owners = OwnerBook(settings.limits, reader.under_way)
        self._parts = _Parts(shared, links, controllers, reader, owners, Finder(shared, controllers))

    async def close(self) -> None:
        """Wait for the operations in flight, close all connections, unregister L1. Idempotent."""
        if self._closed or self._parts is None:
            self._closed = True
            return
        self._closed = True
        shared, links, controllers, reader, _, _ = self._parts
        await shared.work.ended()
        await reader.close()
        await shared.work.ended()
        controllers.close()
        if self._engine is not None:
            await self._engine.close()
        links.close()

    # --- the contract ------------------------------------------------------------------------------------

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """PRESENT for keys that owners have, by the directory; UNKNOWN if no controller answers."""
        if self._parts is None or self._closed:
            return ask.unknown(keys, CLOSED)
        if not keys:
            return b""
        find = self._find_each if ask.each else self._find
        return await self._parts.shared.work.own(find(self._parts, split(keys), ask))

    async def put(self, items: Sequence[Item]) -> None:
        """Refuse all items."""
        is_open = self._parts is not None and not self._closed
        for item in items:
            item.settle(Outcome.FAILED, READ_ONLY if is_open else CLOSED)

    async def load(self, items: Sequence[Item]) -> None:
        """Read the records from their owners. If the call is cancelled, the batch continues."""
        if self._parts is not None and not self._closed:
            await self._parts.shared.work.own(self._load(self._parts, items))
            return
        for item in items:
            item.settle(Outcome.FAILED, CLOSED)

    async def delete(self, keys: bytes) -> int:
        """Delete nothing."""
        return 0

    def advertisement(self) -> bytes:
        """The metadata of the transfer engine; empty without one."""
        return self._advertised

    def numbers(self) -> dict[str, int]:
        """The counters of COUNTED, and the numbers of known and skipped owners."""
        if self._parts is None:
            return dict.fromkeys(COUNTED, 0)
        return {**self._parts.shared.counts, **self._parts.owners.states()}

    def remarks(self) -> dict[str, str]:
        """The engine that moves the bytes, and the reason for its choice."""
        return {"engine": self._settings.why} if self._settings.why else {}

    async def usage(self) -> Usage:
        """All zero, since the records belong to their owners."""
        return Usage(0, 0, 0)

    # --- lookups -----------------------------------------------------------------------------------------

    async def _find(self, parts: _Parts, keys: list[bytes], ask: Ask) -> bytes:
        now_s = parts.shared.now_s()
        owners = [
            one for one in parts.finder.named(ask, len(keys)) if not parts.owners.is_skipped(one, now_s)
        ]
        if not owners:
            ends_s = now_s + parts.shared.settings.lookup_timeout_ms / 1000
            found = await parts.finder.owners(keys, ask, ends_s)
            if found is None:
                return ask.unknown(b"".join(keys), CONTROLLER_DOWN)
            owners = found
        now_s, n_there, n_skipped = parts.shared.now_s(), 0, 0
        for owner in owners:
            if parts.owners.is_skipped(owner, now_s):
                n_skipped = max(n_skipped, owner.n_keys)
            else:
                n_there = max(n_there, owner.n_keys)
        ask.reason = PEER_SKIPPED if n_skipped > n_there else ""
        rest = Presence.UNKNOWN if ask.reason else Presence.ABSENT
        return bytes([Presence.PRESENT] * n_there + [rest] * (len(keys) - n_there))

    async def _find_each(self, parts: _Parts, keys: list[bytes], ask: Ask) -> bytes:
        ends_s = parts.shared.now_s() + parts.shared.settings.lookup_timeout_ms / 1000
        found = dict.fromkeys(keys, Presence.ABSENT)
        reason = ""

        async def see(owners: Sequence[Owner]) -> None:
            nonlocal reason
            for owner in owners:
                missing = [key for key, one in found.items() if one is not Presence.PRESENT][:MAX_KEYS]
                if not missing:
                    return
                ask_it = functools.partial(self._have, parts, owner, missing, ends_s)
                has, word = await self._ask_owner(parts, owner, ask_it)
                reason = reason or word
                found.update(dict.fromkeys(itertools.compress(missing, has or b""), Presence.PRESENT))

        await see(parts.finder.named(ask, len(keys)))
        if Presence.ABSENT in found.values():
            owners = await parts.finder.owners(keys, ask, ends_s)
            if owners is None:
                reason = reason or CONTROLLER_DOWN
            else:
                await see(parts.owners.in_order(owners, parts.shared.now_s())[:ATTEMPTS])
                if any(parts.owners.is_skipped(owner, parts.shared.now_s()) for owner in owners):
                    reason = reason or PEER_SKIPPED
        ask.reason = reason if Presence.ABSENT in found.values() else ""
        rest = Presence.UNKNOWN if ask.reason else Presence.ABSENT
        return bytes([Presence.PRESENT if found[key] else rest for key in keys])

    # --- loads -------------------------------------------------------------------------------------------

    def _is_whole_extent(self, item: Item) -> bool:
        """Whether the item's hold is a whole extent of L1 and its key a storage key."""
        hold, region = item.hold, self._region
        in_l1 = (
            hold.address - hold.offset == region.address and 0 <= hold.offset <= region.length - hold.length
        )
        return in_l1 and len(item.key) == KEY_BYTES

    async def _load(self, parts: _Parts, batch: Sequence[Item]) -> None:
        items = []
        for item in batch:
            if self._is_whole_extent(item):
                items.append(item)
            else:
                item.settle(Outcome.FAILED, BAD_ITEM)
        if not items:
            return
        ends_s = parts.shared.now_s() + parts.shared.settings.load_timeout_ms / 1000
        ask, counts = items[0].ask or Ask(), parts.shared.counts
        for owner in parts.finder.named(ask, len(items)):
            left = await self._read(parts, owner, items, ends_s)
            counts["named_reads" if len(left) < len(items) else "named_refused"] += 1
            if len(left) == len(items):
                text = f"{owner.instance} sends none of the chunks that the directory lists for it; asking others"
                parts.shared.warn_once(text)
            items = left
        groups: dict[int, tuple[list[Owner], list[Item]]] = {}
        unknown = []
        for item in items:
            owners = parts.finder.hint(item.key)
            if owners is None:
                unknown.append(item)
            else:
                groups.setdefault(id(owners), (owners, []))[1].append(item)
        if unknown:
            found = await parts.finder.owners([item.key for item in unknown], ask, ends_s)
            if found is None:
                _note(unknown, CONTROLLER_DOWN)
            groups[0] = found or [], unknown
        works = [self._read_in_turn(parts, owners, group, ends_s) for owners, group in groups.values()]
        for left in await asyncio.gather(*works):
            parts.finder.forget([item.key for item in left])
            for item in left:
                item.settle(Outcome.FAILED if item.reason else Outcome.ABSENT, item.reason)

    async def _read_in_turn(
        self, parts: _Parts, owners: list[Owner], items: list[Item], ends_s: float
    ) -> list[Item]:
        """Read these items from these owners, the best first; returns those that none of them sent."""
        skipped = any(parts.owners.is_skipped(owner, parts.shared.now_s()) for owner in owners)
        for owner in parts.owners.in_order(owners, parts.shared.now_s())[:ATTEMPTS]:
            items = await self._read(parts, owner, items, ends_s) if items else []
        if skipped:
            _note(items, PEER_SKIPPED)
        return items

    async def _read(self, parts: _Parts, owner: Owner, items: list[Item], ends_s: float) -> list[Item]:
        """Read these items from this owner; returns those that it did not send, which are not settled."""
        parts.shared.counts["reads"] += 1
        began_s = parts.shared.now_s()
        try:
            came, word = await self._ask_owner(
                parts, owner, functools.partial(parts.reader.read, owner, items, ends_s)
            )
        except Late:
            for item in items:  # the reader drops the holds
                item.outcome, item.reason = Outcome.FAILED, PEER_DEADLINE
            return []
        if came is None:
            parts.shared.counts["read_failures"] += 1
            _note(items, word)
            return items
        left, n_bytes = [], 0
        for item, one in zip(items, came, strict=True):
            if one == LOADED:
                n_bytes += item.hold.length
                item.settle(*one)
            else:
                left.append(item)
                _note([item], "" if one == UNSOUND else one[1])
        parts.owners.measured(owner.instance, n_bytes, began_s, parts.shared.now_s())
        if n_unsound := came.count(UNSOUND):
            parts.shared.counts["unsound_records"] += n_unsound
            parts.owners.ended(owner.instance, parts.shared.now_s(), well=False)
            text = "%s: %d records read from %s failed the check"
            _thinning.log(log, logging.ERROR, owner.instance, text, self.name, n_unsound, owner.instance)
        return left

    async def _have(self, parts: _Parts, owner: Owner, keys: list[bytes], ends_s: float) -> bytes:
        try:
            return await parts.reader.have(owner, keys, ends_s)
        except Late:
            raise Unavailable(f"{owner.instance} did not answer in time") from None

    # --- one owner ---------------------------------------------------------------------------------------

    async def _ask_owner(
        self, parts: _Parts, owner: Owner, ask: Callable[[], Awaitable[T]]
    ) -> tuple[T | None, str]:
        """An owner's answer, or None and a reason code; reports to its breaker. Raises Late."""
        shared, owners = parts.shared, parts.owners
        if not owners.admit(owner.instance, shared.now_s()):
            return None, PEER_SKIPPED
        well = False
        try:
            answer = await ask()
            well = True
            return answer, ""
        except Busy:
            well = True
            return None, THROTTLED
        except Unavailable:
            return None, PEER_DEADLINE
        except (ClusterFailure, TransferError) as error:
            shared.warn_once(f"{owner.instance} cannot be read: {error}")
            return None, PEER_DIFFERS if error.field in ("engine", "seal") else PEER_FAILED
        except (OSError, FrameError) as error:
            shared.warn_once(f"a connection to {owner.instance} ended: {error}")
            return None, PEER_GONE
        finally:
            owners.ended(owner.instance, shared.now_s(), well=well)


def _note(items: Sequence[Item], word: str) -> None:
    """Record why an owner did not send these items ("": it does not have them); the first reason counts."""
    for item in items:
        item.reason = item.reason or word
