"""Copies that wait for room in the native queue."""

from __future__ import annotations

import mmap
import select
from collections.abc import Iterator

import pytest

from kvstrata.client import copies
from kvstrata.client.copies import Copier
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.native.core import CopyEngine, RecordSpec, buffer_address, record_bytes

QUEUE = 256
"""So many jobs the native copy engine takes before their results are read."""


class Gathers:
    """Gathers, each of one block into one extent, both in memory of the test."""

    def __init__(self) -> None:
        self.copier = Copier(CopyEngine(threads=1))
        self.blocks = PagedBlocks(layers=1, num_blocks=1, block_bytes=64)
        self.blocks.fill([0], "written")
        self.length = record_bytes(1, self.blocks.plan.payload_bytes(1))
        self.memory = mmap.mmap(-1, (QUEUE + 8) * self.length)
        self.codes: dict[int, list[int]] = {}

    def begin(self, *, may_wait: bool = True) -> int:
        at = len(self.codes)
        self.codes[at] = []
        spec = RecordSpec(bytes(32), bytes(32), bytes(32), bytes(32), 16)
        item = ([0], buffer_address(self.memory) + at * self.length, self.length, spec)
        return self.copier.begin("gather", self.blocks.plan, [item], self.codes[at].extend, may_wait=may_wait)

    def written(self, at: int) -> bool:
        return any(self.memory[at * self.length : (at + 1) * self.length])

    def collect(self) -> None:
        """Read results of jobs, as the I/O thread does, until every job has one."""
        while self.copier._ended:
            assert select.select([self.copier.event_fd], [], [], 120)[0], "nothing woke the I/O thread"
            self.copier.collect()


@pytest.fixture
def gathers() -> Iterator[Gathers]:
    gathers = Gathers()
    yield gathers
    gathers.copier.close()


def test_a_job_that_waits_for_room_copies_nothing_once_it_is_cancelled(gathers):
    jobs = [gathers.begin() for _ in range(QUEUE + 3)]
    gathers.copier.cancel(jobs[QUEUE + 1])
    gathers.collect()
    assert gathers.codes == {at: [0] if at != QUEUE + 1 else [copies.REFUSED] for at in range(QUEUE + 3)}
    assert [at for at in range(QUEUE + 3) if not gathers.written(at)] == [QUEUE + 1]


def test_the_end_of_a_cancelled_waiting_job_is_reported_while_the_queue_stays_full(gathers, monkeypatch):
    monkeypatch.setattr(gathers.copier, "_engine", FullEngine())
    first, second = gathers.begin(), gathers.begin()
    gathers.copier.cancel(first)
    assert select.select([gathers.copier.event_fd], [], [], 0)[0]
    gathers.copier.collect()
    assert gathers.codes == {0: [copies.REFUSED], 1: []}
    gathers.copier.cancel(first)
    gathers.copier.cancel(second)
    gathers.collect()
    assert gathers.codes == {0: [copies.REFUSED], 1: [copies.REFUSED]}


class FullEngine:
    """A copy engine whose queue is full and which ends no job."""

    def submit(self, *job: object) -> bool:
        return False

    def cancel(self, job: int) -> bool:
        return False

    def completions(self) -> list[tuple[int, list[int]]]:
        return []
