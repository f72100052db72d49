"""Promises: chunks that an engine computes now and will store, and the lookups that wait for them.

    promised ─┬─▶ withdrawn  its engine has stored the chunks, or will not
              └─▶ process_gone

A promise reserves nothing in L1: it only says which process computes which chunks.  That process ends it by a message
or by its death, never a clock, so a promise of a stopped process stays.  A lookup waits for chunks in L1; the end of
the promise makes it stop waiting.

    lookup ── its next chunk is promised by another engine ──▶ waits ─┬─▶ ready   L1 has what was promised of the prompt
                                                                      ├─▶ broken  the promise ended before that
                                                                      ├─▶ late    the lookup's waiting time is over
                                                                      └─▶ soon    the rest is expected in less time
                                                                                  than the copy takes; see `Early`

Invariants
1. A promise is here exactly as long as it is in its process's grants.
2. A lookup waits only for promises of other engines, and only for those that were made before it arrived.  So the
   chunks of a waiting request may be promised too, and no two requests wait for each other.  A lookup that expects a
   promise waits for later ones too; its request has promised nothing.  Lookups of peers wait for any promise, since
   they stand for lookups that expect one.
3. The index in shared memory says whether any promise may exist, here or at a peer.  While none does, an engine that
   finds no chunks there need not ask the server, and an engine that is alone at its server need not promise.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from kvstrata.errors import Refused
from kvstrata.keys.batch import count, nth, part
from kvstrata.keys.spans import PromptKeys
from kvstrata.native.core import Pool, storage_keys
from kvstrata.observability.load_line import prompt_work
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.rpc.cluster_wire import Await
from kvstrata.server.processes import EngineGroup, Process, Use
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.server.cluster.held import HeldChunks

MAX_PROMISED_CHUNKS = 131_072
"""Maximum number of promised chunks of one process, over all its sessions (4 MiB of keys)."""
MAX_WAITING = 256
"""Maximum number of waiting lookups of one session, or of one peer; further ones are answered at once."""
MAX_PEERS_WAITING = 512
"""Maximum number of waiting lookups of all peers."""
PEEKED_KEYS = 256
"""Number of keys that are looked up at a time for a peer, some 40 µs of the loop."""
STAGED_BYTES = 8 << 20
"""Maximum bytes of records loaded from L2 into L1 for one request of a peer; or one chunk, if that is larger."""
LOOKED_BACK = 512
"""Maximum number of chunks between the first one of a promise and the missing chunk."""

LEAST_PATIENCE_S = 0.25
PATIENCE = 4.0
"""A lookup whose engine holds blocks for the rest gives up when no new chunk has come for this factor times the time in
which the rest is expected, but not before LEAST_PATIENCE_S."""

Waited = Literal["ready", "broken", "late", "soon"]
Waiter = Process | str
"""The party that waits: a process, or the public key of a peer."""


class Promise(msgspec.Struct, eq=False):
    """Chunks of one prompt that an engine has promised."""

    process: Process
    use: Use
    """The counters of its process, which include its chunks."""
    root: bytes
    """Of the identity."""
    chain: bytes
    """Their chain keys, in order."""
    slices: bytes
    """Digests of the engine's slices, kept here because the engine forgets them with its last process."""
    spans: tuple[int, ...]
    """Spans of the slices (keys/spans.py).  Windows and states are stored at the prompt's end, all at once."""
    number: int
    """Serial number among the promises of this server."""
    given_s: float
    """When it was made, by the loop's clock."""
    waiting: dict[asyncio.Future[Waited], tuple[int, int]] = {}
    """Waiting lookups, each with the numbers of the promise's leading chunks that it waits for now, and in all."""
    n_ready: int = 0
    """Number of leading chunks that were found in L1."""
    ready_s: float = 0.0
    """When the last of them was found."""
    told: bytes = b""
    """The storage key of its first chunk, if it was announced to followers."""

    def left_s(self, n_chunks: int, now_s: float) -> float:
        """Seconds until L1 is expected to have `n_chunks`, by the pace of the earlier ones; inf before the first."""
        if not self.n_ready:
            return math.inf
        each_s = (self.ready_s - self.given_s) / self.n_ready
        return max(0.0, (n_chunks - self.n_ready) * each_s - (now_s - self.ready_s))


class Early(NamedTuple):
    """The condition for answering a lookup before L1 has all promised chunks: its engine takes them in parts."""

    least: int
    """Minimum number of leading chunks of the promise that L1 must have."""
    copy_s: Callable[[int], float]
    """Function from the number of chunks in L1 to the seconds within which the rest must be expected."""
    holds: bool
    """The engine holds blocks for the rest, so it waits no longer than LEAST_PATIENCE_S and PATIENCE allow."""


class Promised(NamedTuple):
    """The part of a promise that belongs to a prompt."""

    promise: Promise
    n_chunks: int
    """Number of chunks, from the first one of the promise."""
    end: int
    """Index in the prompt of the chunk after the last of them."""

    def expected_s(self, n_chunks: int) -> float | None:
        """Seconds in which its engine computes the chunks after the prompt's first `n_chunks`; None: speed unknown."""
        group = self.promise.process.group
        size, tokens_s = group.layout.chunk_tokens, group.prompt_tokens_s
        return prompt_work(n_chunks * size, self.end * size) / tokens_s if tokens_s else None


class Promises(Numbers):
    """The promises of one instance. Belongs to the event loop."""

    live = gauge("Promises of chunks that engines are computing.", lambda self: self._live)
    waits_now = gauge("Lookups that wait for promised chunks.", lambda self: sum(self._waits.values()))
    given = counter("Promises made by engines.")
    waits = counter("Lookups that waited for promised chunks, by how the wait ended.", "end")
    peers_wait_now = gauge("Waits of peers for chunks that engines of this instance have promised.")
    peer_waits = counter("Waits of peers that were answered, by how they ended.", "end")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._followed: HeldChunks | None = None
        self._live = 0
        self._by_first: dict[tuple[bytes, bytes], list[Promise]] = {}
        """Promises by root and key of the first chunk."""
        self._waits: dict[Waiter, int] = {}
        self._expecting: dict[asyncio.Future[bool], tuple[Waiter, bytes, bytes]] = {}
        """Lookups that wait for a promise to be made, with the roots of their identities and their slices."""
        self.awaited: dict[Promise, None] = {}
        """The promises that lookups wait for."""

    def begin_to_tell(self, held: HeldChunks) -> None:
        """Announce promises to followers from now on, and tell engines that peers may have promised chunks."""
        self._followed = held
        self._pool.set_has_promises(True)

    def add(self, process: Process, root: bytes, chain: bytes) -> Promise:
        """Keep a promise until `end`. Raises Refused."""
        use = process.uses[0]
        n_chunks = use.promised_chunks + count(chain)
        if n_chunks > MAX_PROMISED_CHUNKS:
            raise Refused(
                f"chain: this process has promised {n_chunks} chunks with these; {MAX_PROMISED_CHUNKS} may be promised",
                field="chain",
            )
        use.promised_chunks = n_chunks
        self.given += 1
        now_s = asyncio.get_running_loop().time()
        group = process.group
        promise = Promise(process, use, root, chain, group.packed_slices, group.spans, self.given, now_s)
        self._by_first.setdefault((root, nth(chain, 0)), []).append(promise)
        self._live += 1
        if self._followed is not None and promise.slices and not promise.spans:
            first = storage_keys(root, nth(chain, 0), promise.slices[:KEY_BYTES])
            promise.told = first if self._followed.promised(first) else b""
        if self._live == 1:
            self._pool.set_has_promises(True)
        self._expected([one for one, (_, other, _) in self._expecting.items() if other == root], True)
        return promise

    def end(self, promise: Promise) -> None:
        """The promise is withdrawn, or its process is gone."""
        first = promise.root, nth(promise.chain, 0)
        self._by_first[first].remove(promise)
        if not self._by_first[first]:
            del self._by_first[first]
        promise.use.promised_chunks -= count(promise.chain)
        self._live -= 1
        if self._followed is not None and promise.told:
            self._followed.promise_ended(promise.told)
        if not self._live and self._followed is None:
            self._pool.set_has_promises(False)
        self._look(promise)
        for waiting in list(promise.waiting):
            self._tell(promise, waiting, "broken")

    def process_gone(self, groups: Iterable[EngineGroup]) -> None:
        """A process has ended: end the waits for promises that no remaining engine can make.

        `groups`: the remaining engines.  The process's own promises end through `end`.
        """
        left = [group for group in groups if group.complete]
        vain = []
        for expecting, (waiter, _, slices) in self._expecting.items():
            own = waiter.group if isinstance(waiter, Process) else None
            if not any(group.packed_slices == slices and group is not own for group in left):
                vain.append(expecting)
        self._expected(vain, False)

    def _expected(self, those: Iterable[asyncio.Future[bool]], given: bool) -> None:
        for one in those:
            del self._expecting[one]
            if not one.done():
                one.set_result(given)

    def committed(self, process: Process) -> None:
        """A process has committed chunks: answer the lookups whose promised chunks are all in L1 now."""
        for promise in [one for one in self.awaited if one.process.group is process.group]:
            self._look(promise)

    def may_wait(self, waiter: Waiter) -> bool:
        """Whether one more lookup of this process or peer may wait."""
        if isinstance(waiter, str) and self.peers_wait_now >= MAX_PEERS_WAITING:
            return False
        return self._waits.get(waiter, 0) < MAX_WAITING

    def find(
        self, waiter: Waiter, root: bytes, chain: bytes, n_present: int, latest: int = -1
    ) -> Promised | None:
        """The promise of another engine that has the most chunks after the first `n_present` of a prompt.

        Only promises up to number `latest` count (-1: any); of equals the first.  Those of an engine with windows or
        states count only if they end where the prompt does, since windows and states are stored there.
        """
        if not (self._live and self.may_wait(waiter)):
            return None
        own = waiter.group if isinstance(waiter, Process) else None
        most, found = n_present, None
        for first in range(n_present, max(-1, n_present - LOOKED_BACK), -1):
            for promise in self._by_first.get((root, nth(chain, first)), ()):
                if promise.process.group is own or 0 <= latest < promise.number:
                    continue
                n_chunks = count(promise.chain)
                common = _common(promise.chain, part(chain, first, first + n_chunks))
                # A request asks for one chunk less than the other one stores, if its prompt ends with a chunk.
                ends_there = not promise.spans or n_chunks - 1 <= common == count(chain) - first
                if first + common > most and ends_there:
                    most = first + common
                    found = Promised(promise, common, most)
        return found

    def promises_itself(self, process: Process, root: bytes, chain: bytes, n_present: int) -> bool:
        """Whether the process's own engine has promised the chunk after the first `n_present` of a prompt."""
        for first in range(n_present, max(-1, n_present - LOOKED_BACK), -1):
            for promise in self._by_first.get((root, nth(chain, first)), ()):
                if promise.process.group is process.group and first + count(promise.chain) > n_present:
                    return True
        return False

    async def expect(self, waiter: Waiter, root: bytes, slices: bytes, most_s: float) -> bool:
        """Wait, at most `most_s`, for a promise under this identity. False: the engines that could make one are gone.

        `slices`: the digests of those engines' slices, as in a promise.
        """
        expecting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._expecting[expecting] = waiter, root, slices
        with self.counted(waiter):
            try:
                await asyncio.wait([expecting], timeout=most_s)
            finally:
                self._expecting.pop(expecting, None)
        return not expecting.done() or expecting.result()

    async def wait(
        self, waiter: Waiter, promised: Promised, most_s: float, early: Early | None = None
    ) -> Waited:
        """Wait, at most `most_s`, until L1 has the promised chunks in all slices of the promising engine.

        With `early`, the wait may end when the rest is expected soon.
        """
        promise, n_chunks, _ = promised
        now = asyncio.get_running_loop().time
        ends_s, end = now() + most_s, None
        with self.counted(waiter):
            while end is None:
                end = await self._wait_for_more(promise, n_chunks, ends_s - now(), early)
        (self.waits if isinstance(waiter, Process) else self.peer_waits)[end] += 1
        return end

    async def _wait_for_more(
        self, promise: Promise, n_chunks: int, most_s: float, early: Early | None
    ) -> Waited | None:
        """Like `wait`; None: L1 has more chunks than before."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Waited] = loop.create_future()
        promise.waiting[waiting] = n_chunks if early is None else promise.n_ready + 1, n_chunks
        self.awaited[promise] = None
        try:
            self._look(promise)
            soon_s = math.inf
            if early is not None and not waiting.done() and promise.n_ready >= early.least:
                left_s = promise.left_s(n_chunks, loop.time())
                soon_s = left_s - early.copy_s(promise.n_ready)
                if early.holds:
                    most_s = min(most_s, max(LEAST_PATIENCE_S, PATIENCE * left_s))
            if soon_s > 0.0:
                await asyncio.wait([waiting], timeout=min(most_s, soon_s))
            if waiting.done():
                return (
                    None if waiting.result() == "ready" and promise.n_ready < n_chunks else waiting.result()
                )
            return "soon" if soon_s <= most_s else "late"
        finally:
            self._forget(promise, waiting)

    async def for_peer(
        self, peer: str, asked: Await, stage: Callable[[bytes], Awaitable[object]]
    ) -> tuple[int, Literal["ready", "broken", "late", "expected", "none"]]:
        """Wait until L1 has one chunk more than the peer, or will not get it. Returns the number in L1, and the end.

        `stage(chain)` loads the chunks that L2 has into L1.
        """
        n_slices, n_chunks = count(asked.slices), count(asked.chain)
        staged = False
        most = max(1, PEEKED_KEYS // n_slices)
        ends_s, expects = asyncio.get_running_loop().time() + asked.wait_ms / 1000, asked.expects
        end: Literal["ready", "broken", "late", "expected", "none"] = "none"
        while True:
            n = min(asked.n_present, n_chunks)
            beyond = part(asked.chain, n, n + most)
            n += self._pool.peek(storage_keys(asked.root, beyond, asked.slices), n_slices) if beyond else 0
            left_s = ends_s - asyncio.get_running_loop().time()
            if n > asked.n_present or end == "ready" or n == n_chunks:
                return n, "ready" if n > asked.n_present else "broken"
            if left_s <= 0:
                return n, "expected" if expects else "late"
            if asked.record_bytes:  # the peer asks for chunks in L2, so no promise is awaited
                if staged or not self.may_wait(peer):
                    return n, "none"
                at_once = max(1, STAGED_BYTES // sum(asked.record_bytes))
                with self.counted(peer):
                    await stage(part(asked.chain, n, n + min(at_once, most)))
                staged = True
                continue
            found = self.find(peer, asked.root, asked.chain, n)
            if found is not None and 0 < asked.within_ms < 1000 * (found.expected_s(n) or 0.0):
                return n, end
            if found is not None and found.promise.slices == asked.slices:
                one_more = n + 1 - (found.end - found.n_chunks)
                waited = await self.wait(peer, found._replace(n_chunks=one_more), left_s)
                end, expects = "late" if waited == "soon" else waited, False
            elif expects and self.may_wait(peer):
                expects = await self.expect(peer, asked.root, asked.slices, left_s)
                end = end if expects else "broken"
            else:
                return n, end

    @contextlib.contextmanager
    def counted(self, waiter: Waiter) -> Iterator[None]:
        """Count a lookup of this process, or of this peer, as waiting."""
        of_peer = isinstance(waiter, str)
        self._waits[waiter] = self._waits.get(waiter, 0) + 1
        self.peers_wait_now += of_peer
        try:
            yield
        finally:
            self._waits[waiter] -= 1
            self.peers_wait_now -= of_peer
            if not self._waits[waiter]:
                del self._waits[waiter]

    def _look(self, promise: Promise) -> None:
        """Check how many chunks are in L1 now, and answer the lookups that need no more."""
        if not promise.waiting:
            return
        beyond = part(promise.chain, promise.n_ready, max(whole for _, whole in promise.waiting.values()))
        if beyond and (not promise.spans or self._ends_ready(promise, beyond)):
            keys = PromptKeys(promise.root, beyond, promise.slices, promise.spans)
            more = (
                keys.peek_whole(self._pool)
                if promise.spans
                else self._pool.peek(keys.derive(), keys.n_slices)
            )
            if more and (more == keys.n_chunks or not promise.spans):
                promise.n_ready += more
                promise.ready_s = asyncio.get_running_loop().time()
        for waiting, (n_chunks, _) in list(promise.waiting.items()):
            if n_chunks <= promise.n_ready:
                self._tell(promise, waiting, "ready")

    def _ends_ready(self, promise: Promise, chain: bytes) -> bool:
        """Whether L1 has the windows and states of a hit that ends with these chunks."""
        end = count(chain)
        ending = part(chain, max(0, end - max(promise.spans)), end)
        keys = PromptKeys(promise.root, ending, promise.slices, promise.spans)
        return keys.peek_windows(self._pool, keys.n_chunks) == keys.n_chunks

    def _tell(self, promise: Promise, waiting: asyncio.Future[Waited], end: Waited) -> None:
        self._forget(promise, waiting)
        if not waiting.done():
            waiting.set_result(end)

    def _forget(self, promise: Promise, waiting: asyncio.Future[Waited]) -> None:
        promise.waiting.pop(waiting, None)
        if not promise.waiting:
            self.awaited.pop(promise, None)


def _common(one: bytes, other: bytes) -> int:
    """How many leading keys two chains share: a key stands for all before it."""
    most = min(count(one), count(other))
    return bisect_left(range(most), True, key=lambda at: nth(one, at) != nth(other, at))
