"""Warming maps the pool's existing pages ahead of the copies, and allocates none."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator

import pytest

from kvstrata.client.pinning import SLAB_BYTES
from kvstrata.client.warmup import STEP_BYTES, PageWarmer, present_steps
from kvstrata.memory.linux import HUGE_PAGE_BYTES
from kvstrata.native.core import ExtentsMap, map_present_pages
from tests.harness.cache_engine import eventually

BYTES = 2 * STEP_BYTES + (8 << 20)


class Mapped:
    """The part of a `Mapping` that a warmer uses."""

    def __init__(self, fd: int) -> None:
        self.extents = ExtentsMap(fd, BYTES)


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("extents")
    os.ftruncate(fd, BYTES)
    yield fd
    os.close(fd)


def test_pages_allocated_later_are_mapped_later_and_warming_allocates_none(file):
    os.pwrite(file, bytes(STEP_BYTES), 0)
    mapping, warmer = Mapped(file), PageWarmer()
    warmer.warm(mapping)
    eventually("the first part is mapped", lambda: warmer.mapped_bytes == STEP_BYTES)
    assert os.fstat(file).st_blocks * 512 == STEP_BYTES
    os.pwrite(file, bytes(BYTES - STEP_BYTES), STEP_BYTES)
    eventually("the rest is mapped", lambda: warmer.mapped_bytes == BYTES)
    warmer.close(10)


def test_a_warmer_keeps_no_mapping_alive(file):
    mapping, warmer = Mapped(file), PageWarmer()
    gone = weakref.ref(mapping)
    warmer.warm(mapping)  # nothing exists, so it goes on looking
    del mapping
    gc.collect()
    eventually("the mapping is gone", lambda: gone() is None)
    warmer.close(10)


def test_a_pool_of_huge_pages_is_registered_in_whole_huge_pages(file):
    os.write(file, bytes(BYTES))
    assert BYTES % HUGE_PAGE_BYTES == 0 and BYTES % SLAB_BYTES
    mapping = Mapped(file)
    slabs = list(present_steps(lambda: mapping, threading.Event(), SLAB_BYTES))
    assert sum(size for _, size in slabs) == BYTES
    assert all(offset % HUGE_PAGE_BYTES == size % HUGE_PAGE_BYTES == 0 for offset, size in slabs)


def test_impossible_ranges_are_refused(file):
    mapping = Mapped(file)
    with pytest.raises(ValueError, match="must begin a page"):
        map_present_pages(mapping.extents.address + 1, 4096)
    with pytest.raises(OSError):
        map_present_pages(0, 4096)
