"""Puts load on one controller with simulated instances, which speak the real protocol and have no KV bytes.

    join        each instance registers and names `chunks` chunks in a full sync
    events      batches of admits and evicts are sent while lookups run, at a rate that doubles from step to step; the
                limit is the last rate at which the controller kept up
    lookups     lookups are sent; the number sent at a time doubles from step to step

Tags are random, so lookups of real engines do not find them.  At the end every instance says goodbye.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvstrata import __version__
from kvstrata.errors import ClusterFailure, Unavailable
from kvstrata.measure.figures import percentile
from kvstrata.native.copying import crc32c
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.cluster_fields import TAG_BYTES, KvKind
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.rpc.zmq_link import AskLink, Links, PushLink

ANSWER_S = 5.0
PART_TAGS = 65_536
JOIN_AT_A_TIME = 8
SYNC_ATTEMPTS = 100
EVICT_SHARE = 8
"""One in this many changes evicts a chunk that the previous batch admitted."""
KEPT_UP_SHARE = 0.95
LAG_S = 1.0
"""If lookups find the last change of a step later than this, the controller has not kept up."""
TICK_S = 0.005
SEEN_S, SEEN_PAUSE_S = 30.0, 0.001
NO_LOAD = wire.Load({}, {}, {}, {}, 0, 0, 0, 0)


@functools.cache
def own_address(url: str) -> str:
    """The address of this machine from which it connects to `url`, as endpoints write it. Raises Unavailable."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    try:
        family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise Unavailable(f"cannot connect to {url!r}: {error.strerror}") from None
    return f"[{address}]" if family == socket.AF_INET6 else address


class Step(NamedTuple):
    """One step of the ramp of events."""

    offered_keys_per_s: float
    taken_keys_per_s: float
    """Changes per second, counted until a lookup found the last change."""
    lag_ms: float
    """Time from the last batch until a lookup found its change."""
    lookups: int
    p50_ms: float
    p99_ms: float

    @property
    def kept_up(self) -> bool:
        """Whether the controller took in all offered changes in time."""
        return self.taken_keys_per_s >= KEPT_UP_SHARE * self.offered_keys_per_s and self.lag_ms <= LAG_S * 1e3


class LookupStep(NamedTuple):
    """One step of the ramp of lookups."""

    at_a_time: int
    per_s: float
    p50_ms: float
    p99_ms: float


class Instance:
    """One simulated instance."""

    def __init__(
        self,
        links: Links,
        url: str,
        keys: ClusterKeys,
        name: str,
        chunks: int,
        tiers: Sequence[str] = ("l1",),
    ) -> None:
        """The instance holds `chunks` chunks in L1 once it has joined. `tiers` begins with `l1`."""
        self.name = name
        self.tiers = list(tiers)
        self.incarnation = secrets.randbelow(1 << 62) + 1
        self.held = os.urandom(TAG_BYTES * chunks)
        """Tags that the instance names in its sync and never evicts."""
        self.newest = b""
        self._links = links
        self._host = url.rpartition(":")[0]
        self._peer_endpoint = f"tcp://{own_address(url)}:9"
        self._keys = keys
        self._reply = links.ask(url, keys=keys)
        self._push: PushLink | None = None
        self._heart: AskLink | None = None
        self._seq = 0
        self._before = b""
        self._frame = b""

    async def join(self) -> float:
        """Register and sync; returns the seconds between two heartbeats. Raises Unavailable or ClusterFailure."""
        request = wire.Register(
            0, wire.CLUSTER_PROTOCOL_VERSION, self.name, self.incarnation, __version__, self.tiers, len(self.held), 256,
            self._peer_endpoint, "", "bench", "bench", os.getpid(),
        )  # fmt: skip
        registered = await self._reply.ask(request, wire.Registered, ANSWER_S)
        self._push = self._links.push(f"{self._host}:{registered.pull_port}", keys=self._keys)
        self._heart = self._links.ask(f"{self._host}:{registered.heartbeat_port}", keys=self._keys)
        me = (self.name, self.incarnation, 1)
        await self._reply.ask(wire.SyncBegin(0, *me, 0), wire.Done, ANSWER_S)
        size = PART_TAGS * TAG_BYTES
        parts = [self.held[at : at + size] for at in range(0, len(self.held), size)]
        for index, tags in enumerate(parts):
            await self._part(wire.SyncPart(0, *me, index, "l1", tags, crc32c(tags)))
        counts = {"l1": len(self.held) // TAG_BYTES}
        await self._reply.ask(wire.SyncEnd(0, *me, len(parts), counts), wire.Done, ANSWER_S)
        await self.beat()
        return registered.heartbeat_ms / 1000

    async def _part(self, part: wire.SyncPart) -> None:
        for attempt in range(SYNC_ATTEMPTS):
            try:
                await self._reply.ask(part, wire.Done, ANSWER_S)
            except ClusterFailure as refused:
                if not refused.retryable or attempt == SYNC_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(refused.retry_after_ms / 1000)
            else:
                return

    async def beat(self, load: wire.Load = NO_LOAD, models: Sequence[KvKind] = ()) -> None:
        """Send one heartbeat. Raises Unavailable or ClusterFailure."""
        assert self._heart is not None
        told = wire.Heartbeat(0, self.name, self.incarnation, self._seq, "ready", load, list(models), [])
        await self._heart.ask(told, wire.Beat, ANSWER_S)

    def try_tell(self, keys: int, tier: str = "l1") -> bool:
        """Send a batch of `keys` changes of one tier; returns False if the socket accepts no message now.

        The next call then sends that same batch, whatever its arguments.
        """
        assert self._push is not None
        if not self._frame:
            evicts = self._before[: TAG_BYTES * (keys // EVICT_SHARE)]
            admits = os.urandom(TAG_BYTES * keys - len(evicts))
            runs = [wire.Run(wire.Change.ADMIT, tier, admits)]
            if evicts:
                runs.append(wire.Run(wire.Change.EVICT, tier, evicts))
            self._frame = wire.encode(wire.Events(self.name, self.incarnation, self._seq + 1, runs))
            self._before = admits
        if not self._push.try_send(self._frame):
            return False
        self._seq += 1
        self._frame = b""
        # The last tag of a batch is not among those that the next batch evicts.
        self.newest = self._before[-TAG_BYTES:]
        return True

    async def where(self, tags: bytes) -> int:
        """Look up tags; returns how many leading tags the best other instance holds.

        Raises Unavailable or ClusterFailure.
        """
        found = await self._reply.ask(wire.Where(0, self.name, tags, 1), wire.WhereReply, ANSWER_S)
        return found.owners[0].n_keys if found.owners else 0

    async def leave(self) -> None:
        """Say goodbye, if the instance has joined."""
        if self._push is None:
            return
        try:
            await self._reply.ask(
                wire.Goodbye(0, self.name, self.incarnation, for_ever=True), wire.Done, ANSWER_S
            )
        except (Unavailable, ClusterFailure):
            pass  # the controller forgets an instance that stays silent


class SimulatedCluster:
    """Simulated instances of one controller: they join when the context is entered and leave when it ends.

    A context can be entered once.
    """

    def __init__(self, url: str, *, instances: int, chunks: int, keys: ClusterKeys) -> None:
        """`url`: the controller's reply port, `tcp://HOST:PORT`; `instances` is 2 or more."""
        self._links = Links(asyncio.get_running_loop())
        run = secrets.token_hex(3)
        self._instances = [
            Instance(self._links, url, keys, f"bench-{run}-{number}", chunks) for number in range(instances)
        ]
        self.chunks = chunks
        self.join_s = 0.0
        """Time until all instances had registered and completed their full sync."""
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        started_s = time.perf_counter()
        turns = asyncio.Semaphore(JOIN_AT_A_TIME)

        async def join(one: Instance) -> float:
            async with turns:
                return await one.join()

        try:
            pauses_s = await asyncio.gather(*(join(one) for one in self._instances))
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        self.join_s = time.perf_counter() - started_s
        self._beating = asyncio.create_task(self._beat(min(pauses_s) / 2), name="heartbeats")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait({self._beating})
        await asyncio.gather(*(one.leave() for one in self._instances))
        self._links.close()

    async def _beat(self, pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            await asyncio.gather(*(one.beat() for one in self._instances), return_exceptions=True)

    async def events(
        self, keys_per_s: float, seconds: float, *, batch: int, lookups_per_s: int, tags: int
    ) -> Step:
        """Run one step: `keys_per_s` changes for `seconds`, in batches of `batch`, while lookups of `tags` tags run.

        Raises ClusterFailure or Unavailable; Unavailable also if lookups never find the last change.
        """
        loop = asyncio.get_running_loop()
        times_ms: list[float] = []
        looking = asyncio.create_task(self._look(lookups_per_s, tags, times_ms), name="lookups")
        started_s = loop.time()
        sent, at, past_s = 0, 0, 0.0
        while past_s < seconds:
            await asyncio.sleep(TICK_S if sent >= int(keys_per_s * past_s) // batch else 0)
            past_s = min(loop.time() - started_s, seconds)
            while sent < int(keys_per_s * past_s) // batch and self._instances[at].try_tell(batch):
                sent += 1
                at = (at + 1) % len(self._instances)
        sent_s = loop.time()
        for number, one in enumerate(self._instances):
            if one.newest:
                await self._until_seen(one.newest, self._instances[number - 1], sent_s + SEEN_S)
        done_s = loop.time()
        looking.cancel()
        await asyncio.wait({looking})
        if not looking.cancelled() and (error := looking.exception()) is not None:
            raise error
        taken = sent * batch / max(seconds, done_s - started_s - TICK_S)
        return Step(
            keys_per_s, taken, 1e3 * (done_s - sent_s), len(times_ms), _ms(times_ms, 0.5), _ms(times_ms, 0.99)
        )

    async def _until_seen(self, tag: bytes, asker: Instance, end_s: float) -> None:
        """Ask until the controller names an instance for this chunk. Raises Unavailable after `end_s`."""
        while not await asker.where(tag):
            if asyncio.get_running_loop().time() > end_s:
                raise Unavailable(
                    "no lookup found a change that was sent to the controller: it lost events and wants a full sync; "
                    "offer fewer changes (--most-keys-per-s), and see its log"
                )
            await asyncio.sleep(SEEN_PAUSE_S)

    async def lookups(self, at_a_time: int, seconds: float, *, tags: int) -> LookupStep:
        """Run one step: `at_a_time` concurrent lookups of `tags` tags each. Raises Unavailable or ClusterFailure."""
        end_s = time.perf_counter() + seconds
        times_ms: list[float] = []

        async def ask(number: int) -> None:
            while time.perf_counter() < end_s:
                times_ms.append(await self._lookup(number, tags))
                number += at_a_time

        started_s = time.perf_counter()
        await asyncio.gather(*(ask(number) for number in range(at_a_time)))
        per_s = len(times_ms) / (time.perf_counter() - started_s)
        return LookupStep(at_a_time, per_s, _ms(times_ms, 0.5), _ms(times_ms, 0.99))

    async def _look(self, per_s: int, tags: int, times_ms: list[float]) -> None:
        """Look up at an even rate, without catching up after a delay, and append each lookup's time."""
        number = 0
        while True:
            begun_s = time.perf_counter()
            times_ms.append(await self._lookup(number, tags))
            number += 1
            await asyncio.sleep(max(0.0, begun_s + 1 / per_s - time.perf_counter()))

    async def _lookup(self, number: int, tags: int) -> float:
        """Look up chunks of another instance; returns the milliseconds. Raises Unavailable if some are missing."""
        holder = self._instances[number % len(self._instances)]
        asker = self._instances[(number + 1) % len(self._instances)]
        first = number * tags % max(1, self.chunks - tags + 1)
        wanted = holder.held[TAG_BYTES * first : TAG_BYTES * (first + tags)]
        begun_s = time.perf_counter()
        found = await asker.where(wanted)
        took_ms = 1e3 * (time.perf_counter() - begun_s)
        if found != len(wanted) // TAG_BYTES:
            raise Unavailable(
                f"the controller found {found} of {len(wanted) // TAG_BYTES} chunks of {holder.name}"
            )
        return took_ms


def figures_of(step: Step | LookupStep) -> dict[str, Any]:
    """The step's numbers by name, for reports."""
    more = {"kept_up": step.kept_up} if isinstance(step, Step) else {}
    return {name: round(value, 3) for name, value in step._asdict().items()} | more


def _ms(times_ms: list[float], share: float) -> float:
    return percentile(times_ms, share) if times_ms else 0.0
