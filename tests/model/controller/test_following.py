"""Followers against a real pool and its tiers: whatever is lost, late or restarted, they end with what is held.

Chunks come and go in L1 and in two tiers, in stretches that may go round the pool's ring.  Followers lose answers,
stand still and are made anew with the cursor that they had, as after a snapshot; a tier cannot be listed for a while.
When all of that is over, the directory of each follower has exactly what the instance holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstrata.cluster import follow
from kvstrata.cluster.directory import Directory
from kvstrata.cluster.follow import Follower, Listener
from kvstrata.cluster.lookups import Lookups
from kvstrata.errors import BadRequest, ClusterFailure, KvstrataError, Unavailable
from kvstrata.native.core import Registry
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.cluster_wire import TAG_BYTES, tags_of
from kvstrata.server.cluster import held as held_module
from kvstrata.server.cluster.held import HeldChunks
from kvstrata.tiers.base import KeyPage
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tier import TierState
from tests.harness.amount import amount
from tests.harness.l1 import L1, chain
from tests.harness.waiting import until

INCARNATION = 7
TIERS = ["l1", "disk-0", "resp-1"]
KEYS = chain("model", 60)
LAP = b"".join(KEYS) * 1_500
"""A change that names these tags overwrites a third of the ring."""


class Tier:
    """An L2 tier: `disk-0` lists its keys, `resp-1` is shared and does not."""

    def __init__(self, name: str, *, shared: bool) -> None:
        self.name = name
        self.state, self.shown_state = TierState.ACTIVE, TierState.ACTIVE
        self.capabilities = SimpleNamespace(takes_puts=True, shared=shared, lists=not shared, medium="")
        self.keys: dict[bytes, None] = {}
        self.can_list = True

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        if not self.can_list:
            return None
        await asyncio.sleep(0)
        page = [key for key in sorted(self.keys) if int.from_bytes(key[:7], "big") >= cursor][: most // 64]
        following = int.from_bytes(page[-1][:7], "big") + 1 if page else 0
        return KeyPage(page, following)


class Instance:
    """A real pool, and the tiers; `tags` says what it holds."""

    def __init__(self) -> None:
        self.l1 = L1()
        self.tiers = [Tier("disk-0", shared=False), Tier("resp-1", shared=True)]
        self.held = HeldChunks(
            self.l1.pool, cast(TierSet, self.tiers), Supervisor(asyncio.get_running_loop())
        )

    def tags(self) -> dict[str, set[bytes]]:
        found, _ = self.l1.pool.ready_tags(0, 1 << 20)
        l2 = {tier.name: {key[:TAG_BYTES] for key in tier.keys} for tier in self.tiers}
        return {"l1": {found[at : at + 8] for at in range(0, len(found), 8)}, **l2}

    def change(self, rng: random.Random) -> None:
        """Something happens to some chunks."""
        some = rng.sample(KEYS, rng.randrange(1, 20))
        tier = rng.choice(self.tiers)
        match rng.randrange(7):
            case 0 | 1:
                self.l1.store(some)
            case 2:
                self.l1.pool.remove(b"".join(some))
            case 3 | 4:
                tier.keys.update(dict.fromkeys(some))
                self.held.tier_got(tier.name, some)
            case 5:
                for key in some:
                    tier.keys.pop(key, None)
                self.held.tier_lost(tier.name, some)
            case _:
                tier.keys.clear()
                self.held.tier_emptied(tier.name)

    def lap(self) -> None:
        """Many changes that change nothing in the end."""
        for _ in range(3):
            self.l1.pool.note_changes(9, wire.Change.EVICT, LAP)
        self.held._names += [f"t{n}" for n in range(10)]


class Link:
    """Questions to the instance, of which some are lost on their way there or back."""

    endpoint = "tcp://model:1"

    def __init__(self, instance: Instance, rng: random.Random) -> None:
        self.instance, self.rng = instance, rng
        self.faults = True
        self.stopped = asyncio.Event()
        self.stopped.set()

    async def ask(self, request: Any, answer: Any, timeout_s: float) -> Any:
        await self.stopped.wait()
        if self.faults and self.rng.random() < 0.1:
            raise Unavailable("lost")
        request = wire.TO_INSTANCE.decode(wire.encode(request))
        try:
            reply = await self._answer(request)
        except KvstrataError as error:
            raise ClusterFailure(
                error.code, error.message, field="", retryable=False, retry_after_ms=0
            ) from None
        if self.faults:
            await asyncio.sleep(self.rng.random() * 0.004)
            await self.stopped.wait()
            if self.rng.random() < 0.1:
                raise Unavailable("lost")
        return wire.ANSWERS.decode(wire.encode(msgspec.structs.replace(reply, epoch=INCARNATION)))

    async def _answer(self, request: Any) -> Any:
        held = self.instance.held
        match request:
            case wire.Changes():
                following, runs = await held.changes(
                    request.cursor, request.wait_ms / 1000, lambda *found: found
                )
                return wire.Changed(1, 0, following, runs)
            case wire.List():
                return wire.Listed(1, 0, *await held.page(request.tier, request.cursor))
        raise BadRequest("what?")


class Known(Listener):
    """One follower with its directory."""

    def __init__(self, instance: Instance, rng: random.Random) -> None:
        loop = asyncio.get_running_loop()
        self.instance, self.rng = instance, rng
        self.registry = Registry(max_bytes=64 << 20)
        self.lookups = Lookups(loop, self.registry)
        self.failures: list[str] = []
        self.directory = Directory(
            loop, self.registry, self.lookups, failed=lambda group, why: self.failures.append(why)
        )
        self.sweeping = asyncio.ensure_future(self.directory.keep_swept())
        self.losses: list[str] = []
        self.link = Link(instance, rng)
        self.follower: Follower | None = None
        self.task: asyncio.Task[None] | None = None
        self.restart()

    def lost(self, reason: str) -> None:
        self.losses.append(reason)

    def restart(self) -> None:
        """Follow by a new task, from the cursor of the old one if it was in step."""
        cursor = None
        if self.task is not None and self.follower is not None:
            self.task.cancel()
            cursor = self.follower.cursor if self.rng.random() < 0.7 else None
        self.follower = Follower(
            cast(Any, self.link), self.directory, 1, self, asyncio.Semaphore(1), incarnation=INCARNATION,
            tiers=TIERS, beat_s=0.1, cursor=cursor,
        )  # fmt: skip
        self.task = asyncio.ensure_future(self.follower.run())

    async def tags(self) -> dict[str, set[bytes]]:
        await self.directory.idle()
        everything = [key[:TAG_BYTES] for key in KEYS]
        rows = await self.lookups.holders(b"".join(everything))
        found: dict[str, set[bytes]] = {tier: set() for tier in TIERS}
        for tag, row in zip(everything, rows, strict=True):
            for place in row:
                found[place.tier].add(tag)
        return found

    async def close(self) -> None:
        for task in (self.task, self.sweeping):
            assert task is not None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.directory.close()
        self.lookups.close()


@pytest.mark.parametrize("seed", range(amount(3, 60)))
async def test_followers_end_with_what_the_instance_holds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    for module, name, value in (
        (follow, "AGAIN_S", 0.001), (follow, "LIST_AGAIN_S", 0.02), (follow, "LIST_AGAIN_MAX_S", 0.05),
        (held_module, "GATHER_S", 0.001), (held_module, "PAGE_TAGS", 7), (held_module, "SCAN_ENTRIES", 16),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    instance = Instance()
    known = [Known(instance, random.Random(f"{seed} {n}")) for n in range(3)]
    try:
        for _ in range(100):
            instance.change(rng)
            one = rng.choice(known)
            match rng.randrange(16):
                case 0:
                    one.link.stopped.clear()
                case 1:
                    one.restart()
                case 2 if rng.random() < 0.3:
                    instance.lap()
                case 3:
                    instance.tiers[0].can_list = not instance.tiers[0].can_list
                case 4 | 5 | 6:
                    one.link.stopped.set()
            if rng.random() < 0.7:
                await asyncio.sleep(rng.random() * 0.004)
        instance.tiers[0].can_list = True
        for one in known:
            one.link.faults = False
            one.link.stopped.set()
        for one in known:
            await until(lambda one=one: in_step(one, instance))
            assert await one.tags() == instance.tags(), f"seed {seed}"
            assert not one.failures
    finally:
        for one in known:
            await one.close()
        await instance.held.stop()


def in_step(one: Known, instance: Instance) -> bool:
    follower = one.follower
    assert follower is not None
    return follower.confirmed and not follower._unlisted and follower.cursor == instance.l1.pool.next_change


async def test_a_follower_that_falls_behind_the_ring_says_so_and_lists_again() -> None:
    instance = Instance()
    instance.l1.store(KEYS[:5])
    one = Known(instance, random.Random(0))
    one.link.faults = False
    try:
        await until(lambda: in_step(one, instance))
        one.link.stopped.clear()
        await asyncio.sleep(0.1)  # the open poll is answered
        instance.l1.pool.remove(KEYS[0])
        instance.lap()
        one.link.stopped.set()
        await until(lambda: in_step(one, instance))
        assert one.losses == ["too_old"] and one.follower is not None and one.follower.lists == 2
        assert (await one.tags())["l1"] == {tags_of(key) for key in KEYS[1:5]}
    finally:
        await one.close()
        await instance.held.stop()
