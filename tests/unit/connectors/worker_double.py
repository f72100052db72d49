"""Stands for what the connector's worker side drives: a client, copies and a clock; makes loads, stores and steps."""

from __future__ import annotations

from kvstrata.client.handles import StoreOutcome
from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, Load, Store
from kvstrata.types import EXTENT, LeaseName, RequestIdentity

MINE, OTHER = b"\2" * 32, b"\1" * 32


class Flag:
    """Stands for an Event; `on_wait` may set it during a wait, as a copy that ends then would."""

    def __init__(self, clock):
        self.clock, self.set_now, self.takes_s, self.waited_s = clock, False, None, 0.0

    def is_set(self):
        return self.set_now

    def set(self):
        self.set_now = True

    def wait(self, timeout_s):
        if not self.set_now:
            needed = timeout_s if self.takes_s is None else min(timeout_s, self.takes_s)
            self.clock.now_s += needed
            self.waited_s += needed
            if self.takes_s is not None:
                self.takes_s -= needed
                self.set_now = self.takes_s <= 0
        return self.set_now


class FakeStoreJob:
    def __init__(self, clock, n):
        self.gathered, self.done, self.cancelled, self.bytes = Flag(clock), Flag(clock), False, 10 * n
        self.outcomes = [StoreOutcome.STORED] * n

    def wait_gathered(self, timeout_s):
        return self.gathered.wait(timeout_s)

    def cancel(self):
        self.cancelled = True

    def end(self, outcome=None):
        if outcome is not None:
            self.outcomes = [outcome] * len(self.outcomes)
        self.gathered.set()
        self.done.set()


class FakeLoadJob:
    def __init__(self, clock):
        self.done, self.failed, self.cancelled, self.bytes = Flag(clock), set(), False, 100

    def wait(self, timeout_s):
        return self.done.wait(timeout_s)

    def cancel(self):
        self.cancelled = True
        self.done.takes_s = 0.01


class Fake:
    """Client, mover and clock in one."""

    def __init__(self):
        self.now_s = 0.0
        self.stores, self.loads, self.released, self.closed = [], [], [], False
        self.next_failed, self.next_takes_s = set(), 0.0
        self.sections, self.broken = {}, False
        self.ordered, self.unordered = [], set()

    def __call__(self):
        return self.now_s

    def identity(self, request):
        return request

    def store(self, identity, store, blocks):
        job = FakeStoreJob(self, len(blocks))
        self.stores.append((store, [list(ids) for ids in blocks], job))
        return job

    def load(self, identity, lease, items, *, sync):
        job = FakeLoadJob(self)
        job.failed, job.done.takes_s = set(self.next_failed), self.next_takes_s
        if sync and not self.next_takes_s:
            job.done.set()
        self.loads.append((lease, items, job))
        return job

    def await_section(self, job, section, timeout_s):
        self.ordered.append((job, section))
        return section not in self.unordered

    def release(self, leases, *, group=False):
        self.released.extend(leases)

    def take_counts(self):
        return {}

    def close(self, timeout_s=0.0):
        self.closed = True


def store_of(store_id, request="r", chunks=2):
    blocks = list(range(1, 1 + 2 * chunks))
    return Store(store_id, request, RequestIdentity(), b"", b"k" * 32 * chunks, blocks, b"")


def load_of(request="r", asynchronous=False, blocks=(SKIP_BLOCK, 4, 5, 6), seq=1):
    chunks = len(blocks) // 2
    extents = b"".join(EXTENT.pack(100 * i + s, 7, 0, 0, 0) for i in range(chunks) for s in range(2))
    lease = LeaseName(b"s" * 16, seq, 1)
    keys, slices = b"k" * 32 * chunks, (OTHER, MINE)
    return Load(request, lease, RequestIdentity(), keys, extents, slices, list(blocks), asynchronous)


def step(side, plan):
    """Make vLLM's calls of one step; returns (report, sent, received, bad blocks)."""
    side.before_step(plan)
    side.start_loads()
    side.start_stores()
    sent, received = side.finished()
    bad = side.take_bad_blocks()
    return side.report(), sent, received, bad
