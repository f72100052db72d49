"""Waits at other instances for chunks that their engines have promised; the peer tier loads the chunks that are ready.

    lookup ─▶ controller: how to reach the instance ─▶ instance: Await, again and again ─┬─▶ ready   load, ask again
                                                                                         ├─▶ broken  compute
                                                                                         └─▶ late    compute

1. Nothing is reserved for chunks that do not exist yet: an owner reports which chunks are ready, and these are loaded
   like any others (tier.py).  So a chunk is transferred while the next one is computed.
2. An owner answers within POLL_S, so it keeps no state for an asker that is gone.  A frozen owner is detected ANSWER_S
   later, or when two questions in a row got no answer in time; a closed connection is noticed at once.  Such an owner
   is skipped for a while.
3. Answers are checked.  A dishonest owner costs its asker no more than the time that the request may wait.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from typing import Literal, NamedTuple

import msgspec

from kvstrata.clock import Clock
from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.keys.batch import count, split
from kvstrata.observability.load_line import LoadTimes
from kvstrata.p2p.finding import Controllers, Finder, Shared
from kvstrata.p2p.settings import PeerSettings
from kvstrata.patience import patience
from kvstrata.rpc.cluster_wire import Await, Awaited, Owner, Where
from kvstrata.rpc.zmq_curve import ClusterKeys, open_keys, read_cluster_keys
from kvstrata.rpc.zmq_link import AskLink, Links
from kvstrata.tiers.base import Ask
from kvstrata.tiers.breaker import Breaker, BreakerState

POLL_S = 1.0
SHARE = 0.8
"""Share of the remaining time for which an owner may wait; the rest is for the transfer of its answer."""
ANSWER_S = 1.0
TICK_S = 0.002
"""The loop's timers count milliseconds, so one may end this much before its time."""
MAX_OWNERS = 64
OWNER_S = 2.0
"""Time for which a controller's answer about an instance is reused."""
End = Literal["ready", "broken", "late", "none"]


class _Owner:
    """An instance that is asked for chunks."""

    def __init__(self, entry: Owner, link: AskLink) -> None:
        self.entry, self.link, self.known_s = entry, link, float("-inf")
        self.breaker = Breaker(1, 1.0, 30.0)
        self.silent = False
        """Whether the last completed request got no answer."""


class _Links(NamedTuple):
    """The links, opened with the first request."""

    links: Links
    keys: ClusterKeys
    controllers: Controllers
    finder: Finder


class AwaitedPeers:
    """Asks other instances for the lookups of this one. Belongs to the event loop."""

    def __init__(self, settings: PeerSettings, clock: Clock, instance_id: str) -> None:
        """Opens no connection before the first request."""
        self._instance_id = instance_id
        self._shared = Shared("peers", settings, clock, instance_id)
        self._loop = asyncio.get_running_loop()
        self._open: _Links | None = None
        self._owners: OrderedDict[str, _Owner] = OrderedDict()
        self.disk_times = LoadTimes()
        """Measured times of loads from owners' L2 tiers."""

    def close(self) -> None:
        """End all requests. Idempotent."""
        opened, self._open = self._open, None
        if opened is not None:
            for owner in self._owners.values():
                owner.link.close()
            opened.controllers.close()
            opened.links.close()

    async def wait(self, instance: str, asked: Await, most_s: float) -> tuple[int, End, bytes]:
        """Wait, at most `most_s`, until an instance has more of these chunks.

        Returns the number of chunks that it has, how the wait has ended, and the instance encoded for `Ask.owner`.
        """
        ends_s = self._loop.time() + most_s
        owner = await self._owner(instance, most_s)
        if owner is None or not owner.breaker.admit(self._loop.time()):
            return asked.n_present, "broken", b""
        well = waited = False
        try:
            while (left_s := ends_s - self._loop.time()) > 0:
                poll_s = min(SHARE * left_s, POLL_S)
                request = msgspec.structs.replace(asked, wait_ms=math.ceil(1000 * poll_s))
                reply = await owner.link.ask(request, Awaited, min(left_s, poll_s + patience(ANSWER_S)))
                owner.silent = False
                more = asked.n_present < reply.n_chunks <= count(asked.chain)
                if reply.epoch != owner.entry.incarnation or more != (reply.end == "ready"):
                    break
                if (
                    reply.end == "late"
                ):  # if the promise is broken before the next request, no other one is awaited
                    asked = msgspec.structs.replace(asked, expects=False)
                elif reply.end != "expected":
                    well = True
                    end: End = "broken" if reply.end == "none" and waited else reply.end
                    return reply.n_chunks, end, msgspec.msgpack.encode(owner.entry)
                waited = waited or reply.end == "late"
            else:
                well = True
                return asked.n_present, "late", b""
        except asyncio.CancelledError:  # not the owner's fault
            well = owner.breaker.state is BreakerState.CLOSED
            raise
        except (Unavailable, ClusterFailure):
            if self._loop.time() > ends_s - TICK_S:  # no time was left for an answer
                well, owner.silent = owner.link.connected and not owner.silent, True
                return asked.n_present, "late", b""
        finally:
            owner.breaker.ended(well, self._loop.time())
        owner.known_s = float("-inf")
        return asked.n_present, "broken", b""

    async def on_disks(self, keys: bytes, n_slices: int, most_s: float) -> tuple[str, int]:
        """The instance with most of these leading chunks in L1 and its own L2 tiers, and their number; "", 0: none."""
        ends_s = self._shared.now_s() + min(most_s, self._shared.settings.lookup_timeout_ms / 1000)
        found = await self._opened().finder.owners(split(keys), Ask(), ends_s)
        return (found[0].instance, found[0].n_keys // n_slices) if found else ("", 0)

    async def promiser(self, tags: bytes, most_s: float) -> str:
        """The instance whose engines compute the chunks from one of these on, the first best; "": no known instance."""
        found = await self._asked(Where(0, self._instance_id, tags, 1, 1, each=True, promised=True), most_s)
        return self._keep(found[0]).entry.instance if found else ""

    async def _owner(self, instance: str, most_s: float) -> _Owner | None:
        """An instance, by the last answer of controllers; None: they do not know it."""
        known = self._owners.get(instance)
        if known is not None and self._loop.time() < known.known_s + OWNER_S:
            self._owners.move_to_end(instance)
            return known
        found = await self._asked(Where(0, self._instance_id, b"", 1, 1, named=instance), most_s)
        for entry in found or ():
            if entry.instance == instance:
                return self._keep(entry)
        if found is not None and instance in self._owners:
            self._owners.pop(instance).link.close()
        return self._owners.get(instance)

    def _keep(self, entry: Owner) -> _Owner:
        """Remember an instance as a controller has named it now."""
        entry = msgspec.structs.replace(entry, n_keys=0)
        owner = self._owners.get(entry.instance)
        if owner is None or owner.entry != entry:
            if owner is not None:
                owner.link.close()
            owner = self._owners[entry.instance] = _Owner(entry, self._linked(entry))
        self._owners.move_to_end(entry.instance)
        owner.known_s = self._loop.time()
        if len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)[1].link.close()
        return owner

    async def _asked(self, where: Where, most_s: float) -> list[Owner] | None:
        """Other instances that a controller names; None: none has answered."""
        limit_s = min(most_s, self._shared.settings.lookup_timeout_ms / 1000)
        reply = await self._opened().controllers.ask(where, self._shared.now_s() + limit_s)
        return None if reply is None else [one for one in reply.owners if one.instance != self._instance_id]

    def _opened(self) -> _Links:
        if self._open is None:
            file = self._shared.settings.curve_file
            keys = read_cluster_keys(file, "controller.curve_file") if file else open_keys()
            links = Links(self._loop)
            controllers = Controllers(self._shared, links, keys)
            self._open = _Links(links, keys, controllers, Finder(self._shared, controllers, on_disks=True))
        return self._open

    def _linked(self, entry: Owner) -> AskLink:
        links, keys, _, _ = self._opened()
        return links.ask(entry.peer_endpoint, keys=keys.to(entry.peer_key), few=True)
