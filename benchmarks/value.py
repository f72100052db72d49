"""What the eviction policy keeps: seconds of prefill that L1 saves, on the real pool in the time of a trace.

    value          agents' sessions, 32 open at a time: the share of the way from LRU to Belady's choice, without hints,
                   with finish_reason, and with hints of which 70 % are right
    value_hits     conversations: hits beside those of LRU, ARC and S3-FIFO
    value_floor    the worst of many drawn traces and sizes, scans and pure recency among them, beside LRU
    value_cost     the time of 1,024 victims, of a request and of a lesson

`KVSTRATA_TRACE=FILE` (.gz too) replaces the drawn trace of the first two.  Its JSON lines are those of the traces
published with Mooncake (FAST 2025): `timestamp` (ms) and `hash_ids`, one for each 512 tokens, equal for equal prefixes.
Or they are requests of agents' sessions: `s` (session), `t` (seconds since it began), `r` (runs of chunk numbers
`[first, count, …]`, a chunk being 256 tokens); the sessions then begin at random times, so that 32 are open at once.

A chunk costs as much to compute as a chunk of an 8B model, 10.3 ms at the head of a prompt and 4.3 times that behind
100,000 tokens, and takes 32 MiB; hits are counted in chunks.
"""

from __future__ import annotations

import collections
import gzip
import hashlib
import heapq
import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import compared, figure, sized
from kvstrata.native.core import Pool
from kvstrata.types import Next, next_of

CHUNK_BYTES = 32 << 20
EXTENT_BYTES = 4096
"""An extent of the measured pool, which is never written."""
DEPTH_COST = 3.3 * 256 / 100_000
SIZES_GB = (64, 128, 256)
OPEN = 32
SHARES = (0.01, 0.02, 0.05, 0.10, 0.20, 0.50)
"""Of the distinct chunks of a trace."""
PIECE = 400
"""Chunks of one lease and one reserve, so that no limit of theirs matters."""


class Request(NamedTuple):
    """A prompt: when it came, and the numbers of its chunks. Equal numbers are equal prefixes."""

    at_s: float
    chunks: Sequence[int]
    took_s: float = 0.0
    ended: str = ""
    """Why its answer ended, as an API says it; empty if that is not known."""
    next_s: float = math.inf
    """Time from its end to the request that goes on from it; inf: none does."""


class Saved(NamedTuple):
    """Shares of what a cache could save."""

    seconds: float
    hits: float


def costs(depth_cost: float) -> list[float]:
    """Seconds that the first n chunks of a prompt cost, in units of the first chunk."""
    return [0.0, *itertools.accumulate(1 + depth_cost * depth for depth in range(1 << 16))]


def saved(requests: Sequence[Request], hits: Iterator[int], depth_cost: float) -> Saved:
    """Sum up, given the hits of each request in chunks."""
    cost = costs(depth_cost)
    hit_chunks = chunks = 0
    hit_s = all_s = 0.0
    for request, n in zip(requests, hits, strict=True):
        hit_chunks, chunks = hit_chunks + n, chunks + len(request.chunks)
        hit_s, all_s = hit_s + cost[n], all_s + cost[len(request.chunks)]
    return Saved(hit_s / all_s, hit_chunks / chunks)


# ---- caches


def new_pool(capacity: int, policy: str, depth_cost: float) -> Pool:
    """Return a pool that has room for `capacity` extents of EXTENT_BYTES."""
    fds = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("value-index", "value-extents")]
    try:
        return Pool.create(
            *fds,
            extents_bytes=capacity * EXTENT_BYTES,
            entry_capacity=2 * capacity,
            policy=policy,
            max_session_share=1,
            depth_cost=depth_cost,
        )
    finally:
        for fd in fds:
            os.close(fd)


def pool_hits(
    requests: Sequence[Request],
    capacity: int,
    policy: str,
    depth_cost: float,
    hints: Sequence[int] = (),
    tenants: Sequence[int] = (),
    look: Callable[[Pool, float], None] = lambda pool, now_s: None,
) -> Iterator[int]:
    """Yield the hits of the real pool, which gets the time of each request and learns as in a server.

    `hints`: for each request what is said at its end, see `kvstrata.types.Next`.  `tenants`: for each request whose it
    is.  `look` is called before each, with its time.
    """
    ends: list[tuple[float, int, bytes]] = []
    pool = new_pool(capacity, policy, depth_cost)
    row = pool.claim_row(b"s" * 16, b"g" * 16, 1)
    keys: dict[int, bytes] = {}
    for number, request in enumerate(requests):
        for chunk in request.chunks:
            if chunk not in keys:
                keys[chunk] = hashlib.sha256(b"%d" % chunk).digest()
        prompt = b"".join([keys[chunk] for chunk in request.chunks])
        while ends and ends[0][0] <= request.at_s:
            end_s, said, last = heapq.heappop(ends)
            pool.set_time(int((1_000 + end_s - requests[0].at_s) * 1e9))
            pool.hint(last, said)
        pool.set_time(int((1_000 + request.at_s - requests[0].at_s) * 1e9))
        look(pool, request.at_s)
        tenant = tenants[number] if tenants else 0
        n = pool.peek(prompt, 1)
        # A lease covers half of the pool at most, and counts as a use of all chunks before its own.
        ticket, *_ = pool.lease(prompt[max(0, n - PIECE) * 32 : n * 32], 1, [0], tenant=tenant)
        if ticket:
            pool.release(ticket)
        yield n
        if hints and hints[number]:
            last = prompt[-32:] + prompt[max(0, n - 1) * 32 : n * 32]
            heapq.heappush(ends, (request.at_s + request.took_s, hints[number], last))
        while n < len(request.chunks):
            parent = prompt[(n - 1) * 32 : n * 32] if n else b""
            ticket, outcomes, _ = pool.reserve(
                prompt[n * 32 : (n + PIECE) * 32], parent, EXTENT_BYTES, row, bytes(32), tenant
            )
            if ticket:
                pool.commit(ticket, [i for i, outcome in enumerate(outcomes) if outcome == 0], check=False)
            if any(outcomes):
                break
            n += PIECE
        if number % 512 == 31:
            pool.learn()
    pool.close()


def belady_hits(requests: Sequence[Request], capacity: int) -> Iterator[int]:
    """Yield the hits of a cache that knows the future: the chunk whose next use is furthest leaves, or never comes."""
    never = len(requests)
    next_use: list[list[int]] = []
    last: dict[int, int] = {}
    for number in range(never - 1, -1, -1):
        next_use.append([last.get(chunk, never) for chunk in requests[number].chunks])
        last.update(dict.fromkeys(requests[number].chunks, number))
    cache: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []  # the furthest next use first, and of equal ones the deepest chunk
    for request in requests:
        uses = next_use.pop()
        n = 0
        while n < len(request.chunks) and request.chunks[n] in cache:
            n += 1
        yield n
        for depth, (chunk, use) in enumerate(zip(request.chunks, uses, strict=True)):
            if chunk not in cache and use == never:
                break  # nor will any chunk behind it be used
            cache[chunk] = use
            heapq.heappush(heap, (-use, -depth, chunk))
        while len(cache) > capacity:
            use, _, chunk = heapq.heappop(heap)
            if cache.get(chunk) == -use:
                del cache[chunk]


class Arc:
    """ARC (Megiddo and Modha, FAST 2003)."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.target = capacity, 0.0
        self.recent, self.frequent, self.left_recent, self.left_frequent = (
            collections.OrderedDict[int, None]() for _ in range(4)
        )

    def __contains__(self, chunk: int) -> bool:
        return chunk in self.recent or chunk in self.frequent

    def use(self, chunk: int) -> None:
        """Use a chunk, which enters the cache if it is not in it."""
        if chunk in self:
            self.recent.pop(chunk, None)
            self.frequent.pop(chunk, None)
            self.frequent[chunk] = None
            return
        known_recent, known_frequent = chunk in self.left_recent, chunk in self.left_frequent
        if known_recent:
            step = max(1.0, len(self.left_frequent) / len(self.left_recent))
            self.target = min(self.capacity, self.target + step)
        elif known_frequent:
            self.target = max(0.0, self.target - max(1.0, len(self.left_recent) / len(self.left_frequent)))
        if len(self.recent) + len(self.frequent) >= self.capacity:
            over = len(self.recent) > self.target or (known_frequent and len(self.recent) == self.target)
            from_recent = bool(self.recent) and (over or not self.frequent)
            victims, left = (
                (self.recent, self.left_recent) if from_recent else (self.frequent, self.left_frequent)
            )
            left[victims.popitem(last=False)[0]] = None
        self.left_recent.pop(chunk, None)
        self.left_frequent.pop(chunk, None)
        while len(self.recent) + len(self.left_recent) > self.capacity and self.left_recent:
            self.left_recent.popitem(last=False)
        while len(self.left_recent) + len(self.left_frequent) > self.capacity and self.left_frequent:
            self.left_frequent.popitem(last=False)
        (self.frequent if known_recent or known_frequent else self.recent)[chunk] = None


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023), whose small queue is a tenth."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small, self.main, self.left = (collections.OrderedDict[int, int]() for _ in range(3))

    def __contains__(self, chunk: int) -> bool:
        return chunk in self.small or chunk in self.main

    def use(self, chunk: int) -> None:
        """Use a chunk, which enters the cache if it is not in it."""
        for queue in (self.small, self.main):
            if chunk in queue:
                queue[chunk] = min(3, queue[chunk] + 1)
                return
        while len(self.small) + len(self.main) >= self.capacity:
            self.evict()
        (self.small if self.left.pop(chunk, None) is None else self.main)[chunk] = 0

    def evict(self) -> None:
        """Make room for one chunk, or move one to the main queue."""
        if self.small and (len(self.small) >= self.capacity // 10 or not self.main):
            chunk, uses = self.small.popitem(last=False)
            (self.main if uses > 1 else self.left)[chunk] = 0
            while len(self.left) > self.capacity:
                self.left.popitem(last=False)
            return
        chunk, uses = self.main.popitem(last=False)
        if uses:
            self.main[chunk] = uses - 1


def classic_hits(requests: Sequence[Request], cache: Arc | S3Fifo) -> Iterator[int]:
    """Yield the hits of a cache of single chunks; a prompt uses its chunks from the last to the first."""
    for request in requests:
        n = 0
        while n < len(request.chunks) and request.chunks[n] in cache:
            n += 1
        yield n
        for chunk in reversed(request.chunks):
            cache.use(chunk)


# ---- traces


def spread(sessions: Sequence[Sequence[Request]], seed: int) -> list[Request]:
    """Begin sessions at random times, so that OPEN are open at once; what comes 8 hours after a begin is left out."""
    chance = random.Random(seed)
    limit_s = 8 * 3600.0
    whole_s = sum(min(limit_s, requests[-1].at_s) for requests in sessions) / OPEN
    begun = [
        [one._replace(at_s=begin_s + one.at_s) for one in requests if one.at_s <= limit_s]
        for requests in sessions
        for begin_s in [chance.uniform(0, whole_s)]
    ]
    return sorted(itertools.chain(*begun))


def agents(seed: int, n_sessions: int) -> list[list[Request]]:
    """Draw sessions of coding agents: a shared beginning, calls of tools, turns of a user, now and then a compaction.

    Pauses are log-normal with the medians and ninth deciles of recorded sessions: 8.5 and 72 s behind a tool call, 20
    and 704 s behind a turn.
    """
    chance = random.Random(seed)
    fresh = itertools.count(1 << 40)
    tools = [[next(fresh) for _ in range(45)] for _ in range(6)]
    sessions = []
    for _ in range(n_sessions):
        chunks, at_s, requests = list(chance.choice(tools)), 0.0, []
        for _ in range(max(2, int(chance.lognormvariate(math.log(40), 1.0)))):
            if chance.random() < 0.01:
                chunks = chunks[:45]
            chunks = chunks + [next(fresh) for _ in range(max(1, int(chance.lognormvariate(1.5, 1.0))))]
            tool = chance.random() < 0.85
            pause_s = chance.lognormvariate(math.log(8.5 if tool else 20), 1.67 if tool else 2.78)
            requests.append(Request(at_s, chunks, 10, "tool_calls" if tool else "stop", pause_s))
            at_s += 10 + pause_s
        requests[-1] = requests[-1]._replace(ended="stop", next_s=math.inf)
        sessions.append(requests)
    return sessions


def conversations(seed: int, requests: int, median_gap: float = 0.03, goes_on: float = 0.45) -> list[Request]:
    """Draw conversations whose prompts grow turn by turn, three a second; one in ten begins with a shared prompt."""
    chance = random.Random(seed)
    fresh = itertools.count()
    shared = [[next(fresh) for _ in range(chance.randint(1, 4))] for _ in range(5)]
    waiting: list[tuple[float, list[int]]] = []
    trace = []
    for now in range(requests):
        if waiting and waiting[0][0] <= now:
            chunks = heapq.heappop(waiting)[1]
        else:
            chunks = list(chance.choice(shared)) if chance.random() < 0.1 else []
        chunks = chunks + [next(fresh) for _ in range(max(1, int(chance.lognormvariate(2.0, 1.0))))]
        trace.append(Request(now / 3, chunks))
        if chance.random() < goes_on:
            gap = chance.lognormvariate(math.log(median_gap * requests), 1.2)
            heapq.heappush(waiting, (now + gap, chunks))
    return trace


def scan(seed: int, requests: int) -> list[Request]:
    """Draw popular documents beside a scan over prompts that never return."""
    chance = random.Random(seed)
    popular = [[document * 64 + i for i in range(24)] for document in range(requests // 20)]
    return [
        Request(
            number / 5,
            popular[min(len(popular) - 1, int(chance.paretovariate(0.8)) - 1)]
            if chance.random() < 0.4
            else range((1 << 40) + number * 64, (1 << 40) + number * 64 + 24),
        )
        for number in range(requests)
    ]


def recency(seed: int, requests: int) -> list[Request]:
    """Draw prompts of which one is likelier to return the newer it is: what LRU is best at."""
    chance = random.Random(seed)
    stack: list[int] = []
    trace = []
    for number in range(requests):
        back = int(chance.expovariate(1 / 200))
        prompt = stack.pop(-1 - back) if back < len(stack) else number
        stack.append(prompt)
        trace.append(Request(number / 5, range(prompt * 64, prompt * 64 + 16)))
    return trace


def read_trace(path: Path) -> tuple[list[Request], bool]:
    """Read a trace; whether it is of agents' sessions. Raises ValueError naming the line."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    plain: list[Request] = []
    sessions: dict[Any, list[Request]] = {}
    before: dict[Any, tuple[list[Request], int]] = {}
    ended = {"t": "tool_calls", "e": "stop"}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            one = json.loads(line)
            if "hash_ids" in one:
                plain.append(Request(one["timestamp"] / 1_000, one["hash_ids"]))
            else:
                runs = zip(one["r"][::2], one["r"][1::2], strict=True)
                chunks = [chunk for first, n in runs for chunk in range(first, first + n)]
                session = sessions.setdefault(one["s"], [])
                of, last = before.get((one["s"], one.get("a")), (session, -1))
                if last >= 0:
                    end_s = of[last].at_s + of[last].took_s
                    of[last] = of[last]._replace(next_s=max(0.0, one["t"] - end_s))
                before[one["s"], one.get("a")] = session, len(session)
                session.append(Request(one["t"], chunks, one.get("d", 0.0), ended.get(one.get("k", ""), "")))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: line {number} is no request of a known format: {error!r}") from None
    if plain:
        return [one for one in plain if one.chunks], False
    for requests in sessions.values():
        requests.sort(key=lambda one: one.at_s)
    return [one for one in spread(list(sessions.values()), seed=1) if one.chunks], True


def given(of_agents: bool) -> list[Request] | None:
    """The trace of KVSTRATA_TRACE, if it is of this kind."""
    path = os.environ.get("KVSTRATA_TRACE", "")
    requests, are_agents = read_trace(Path(path)) if path else ([], not of_agents)
    return requests if are_agents == of_agents else None


def said(requests: Sequence[Request], right: float) -> list[int]:
    """What is said at the end of each request: the seconds until the next one, or the end; wrong ones by chance."""
    chance = random.Random(7)
    seconds = (2, 10, 50, 200, 1_000, 4_000, math.inf)
    given = [one.next_s if chance.random() < right else chance.choice(seconds) for one in requests]
    return [Next.END if math.isinf(next_s) else next_of(next_s) for next_s in given]


# ---- figures


def run() -> list[dict[str, Any]]:
    """Seconds that are saved on agents' sessions."""
    requests = given(True) or spread(agents(4077, sized(300, 12)), seed=1)
    figures = []
    for size_gb in sized(SIZES_GB, SIZES_GB[:1]):
        capacity = int(size_gb * 1e9) // CHUNK_BYTES
        lru = saved(requests, pool_hits(requests, capacity, "LRU", DEPTH_COST), DEPTH_COST)
        belady = saved(requests, belady_hits(requests, capacity), DEPTH_COST)
        way = belady.seconds - lru.seconds
        reasons = [next_of(one.ended) if one.ended else 0 for one in requests]
        for name, hints, target in (
            ("", (), 0.35), ("_finish_reason", reasons, 0.43), ("_hints", said(requests, 0.7), 0.65),
        ):  # fmt: skip
            value = saved(requests, pool_hits(requests, capacity, "VALUE", DEPTH_COST, hints), DEPTH_COST)
            share = (value.seconds - lru.seconds) / way if way > 0 else 1.0
            figures.append(
                figure(
                    f"value_agents{name}_{size_gb}_gb",
                    value=value.seconds,
                    unit="of the prefill seconds saved",
                    ratio=share,
                    target=f"≥ {target} of the way",
                    ok=share >= target,
                    ratio_to="the way from LRU to Belady",
                    lru=lru,
                    belady=belady,
                    hits=value.hits,
                )
            )
    return figures


def run_value_hits() -> list[dict[str, Any]]:
    """Hits on conversations; the depth of a chunk costs nothing here."""
    requests = given(False) or conversations(1, sized(6_000, 600))
    distinct = len({chunk for request in requests for chunk in request.chunks})
    figures = []
    for share in sized(SHARES, SHARES[2:3]):
        capacity = max(PIECE, int(distinct * share))
        caches = {
            "value": pool_hits(requests, capacity, "VALUE", 0.0),
            "lru": pool_hits(requests, capacity, "LRU", 0.0),
            "arc": classic_hits(requests, Arc(capacity)),
            "s3fifo": classic_hits(requests, S3Fifo(capacity)),
            "belady": belady_hits(requests, capacity),
        }
        hits = {name: saved(requests, of_requests, 0.0).hits for name, of_requests in caches.items()}
        small = share <= 0.1
        best = max(hits["lru"], hits["arc"], hits["s3fifo"]) if small else hits["lru"]
        figures.append(
            compared(
                f"value_hits_{share:.0%}".replace("%", "_percent"),
                hits["value"],
                "of the chunks hit",
                "the best of LRU, ARC and S3-FIFO" if small else "LRU",
                best,
                least=1.0 if small else 0.99,
                hits=hits,
            )
        )
    return figures


def run_value_floor() -> list[dict[str, Any]]:
    """The worst of many traces and sizes."""
    n = sized(6_000, 600)
    traces = {
        "scan": scan(2, n),
        "recency": recency(3, n),
        "short gaps": conversations(4, n, median_gap=0.005, goes_on=0.8),
        "long gaps": conversations(5, n, median_gap=0.1, goes_on=0.8),
        "agents": spread(agents(6, sized(60, 12)), seed=2),
    }
    ratios = {}
    for name, requests in traces.items():
        distinct = len({chunk for request in requests for chunk in request.chunks})
        for share in sized((0.02, 0.1, 0.3), (0.1,)):
            capacity = max(PIECE, int(distinct * share))
            value, lru = (
                saved(requests, pool_hits(requests, capacity, policy, DEPTH_COST), DEPTH_COST).seconds
                for policy in ("VALUE", "LRU")
            )
            ratios[f"{name}, {share:.0%}"] = value / lru if lru else 1.0
    return [
        compared(
            "value_floor",
            min(ratios.values()),
            "of LRU's seconds saved",
            "LRU",
            1.0,
            least=0.97,
            by_trace=ratios,
        )
    ]


def run_value_cost() -> list[dict[str, Any]]:
    """The time that choosing takes, in a pool that has learnt from a trace and is full."""
    requests = spread(agents(7, sized(60, 12)), seed=3)
    victims = 1_024
    capacity = sized(16_384, 2_048)
    times: dict[str, list[float]] = {}
    lesson_ms = 0.0
    for policy in ("VALUE", "LRU"):
        pool = new_pool(capacity, policy, DEPTH_COST)
        pool.set_has_l2(True)  # nothing is refused
        row = pool.claim_row(b"s" * 16, b"g" * 16, 1)
        for number, request in enumerate(itertools.islice(itertools.cycle(requests), sized(8_192, 1_024))):
            prompt = b"".join(
                hashlib.sha256(str(chunk).encode()).digest() for chunk in request.chunks[:PIECE]
            )
            pool.set_time(int((1_000 + number) * 1e9))
            ticket, n, *_ = pool.lease(prompt, 1, [0])
            if ticket:
                pool.release(ticket)
            if n * 32 < len(prompt):
                parent = prompt[(n - 1) * 32 : n * 32] if n else b""
                ticket, outcomes, _ = pool.reserve(prompt[n * 32 :], parent, EXTENT_BYTES, row, bytes(32))
                pool.commit(ticket, [i for i, outcome in enumerate(outcomes) if outcome == 0], check=False)
            begin = time.perf_counter()
            if pool.learn():
                lesson_ms = max(lesson_ms, 1e3 * (time.perf_counter() - begin))
        full_ms, roomy_ms = [], []
        names = itertools.count()
        for _ in range(42):  # by turns, reserves for which as many chunks leave, and reserves of free room
            keys = b"".join(hashlib.sha256(b"%d" % next(names)).digest() for _ in range(victims))
            evicted = pool.stats()["evicted_entries"]
            begin = time.perf_counter()
            ticket, *_ = pool.reserve(keys, b"", EXTENT_BYTES, row, bytes(32))
            took_ms = 1e3 * (time.perf_counter() - begin)
            pool.commit(ticket, list(range(victims)), check=False)
            if pool.stats()["evicted_entries"] - evicted == victims:
                full_ms.append(took_ms)
                pool.remove(keys)
            else:
                roomy_ms.append(took_ms)
        n = min(len(full_ms), len(roomy_ms))
        times[policy] = [a - b for a, b in zip(sorted(full_ms)[:n], sorted(roomy_ms)[:n], strict=True)]
    return [
        compared(
            "value_victims",
            times["VALUE"],
            "ms for 1,024 victims",
            "LRU",
            times["LRU"],
            most=2.5,
            most_value=0.3,
            lesson_ms=lesson_ms,
        )
    ]
