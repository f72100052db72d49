"""L1 on a /dev/shm that fills up: 48 MiB of tmpfs, mounted in a namespace of the child's own."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.memory.segment import Segment, SegmentSettings
from kvstrata.native.core import IndexReader, Pool
from kvstrata.types import unpack_extents
from tests.harness.namespaces import CONTAINER, hidden_shm, why_not
from tests.harness.validation import validate

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).resolve().parents[3]
MIB = 1 << 20
EXTENTS_BYTES = 32 * MIB
RECORD = 256 << 10
CHUNKS = EXTENTS_BYTES // RECORD
OTHER = Path("/dev/shm/other")


def chain(name: str, n: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}.{i}".encode()).digest() for i in range(n)]


def open_segment(name: str) -> Segment:
    sockets = Path(sys.argv[2]) / name
    return Segment.open(
        SegmentSettings(
            socket_dir=sockets,
            directory=Path("/dev/shm") / name,
            extents_bytes=EXTENTS_BYTES,
            max_session_share=1,
            policy="LRU",  # what was stored last is present
        )
    )


def take_the_rest() -> None:
    with OTHER.open("wb", buffering=0) as other, contextlib.suppress(OSError):
        while other.write(bytes(4096)) == 4096:
            pass


def store(pool: Pool, keys: list[bytes], record_bytes: int = RECORD) -> int:
    """Store chunks and write every byte of their extents, as a worker does; returns how many chunks got an extent."""
    ticket, outcomes, packed = pool.reserve(b"".join(keys), b"", record_bytes, 0, bytes(32))
    reserved = [i for i, outcome in enumerate(outcomes) if outcome == 0]
    extents = unpack_extents(packed)
    for i in reserved:
        ctypes.memset(pool.extents_address + extents[i].offset_bytes, i, extents[i].length_bytes)
    if ticket:
        assert not any(pool.commit(ticket, reserved, check=False))
    validate(pool)
    return len(reserved)


def a_pool_that_lost_its_room() -> None:
    segment = open_segment("lost")
    pool = segment.pool
    assert segment.backing == "files"
    assert store(pool, chain("first", 20)) == 20
    assert pool.stats()["missing_bytes"] == 0
    take_the_rest()
    assert store(pool, chain("second", CHUNKS - 20)) >= 20  # at least in the place of the first ones
    stats = pool.stats()
    assert 20 * RECORD <= stats["used_bytes"] <= stats["backed_bytes"] < EXTENTS_BYTES
    assert stats["missing_bytes"] == EXTENTS_BYTES - stats["backed_bytes"]
    assert pool.retry_missing() == stats["missing_bytes"]

    # The memory that the pool has is used on: for other chunks, other sizes, other processes.
    numbers = random.Random(1)
    for number in range(200):
        size = numbers.choice([RECORD, RECORD, 12 << 10, 1 << 20])
        store(pool, chain(f"{number}", numbers.randint(1, 12)), size)
    assert store(pool, chain("third", 10)) == 10
    for number in range(1, 200):
        pool.claim_row(number.to_bytes(16, "little"), bytes(16), number)
    pool.heartbeat()
    assert IndexReader(segment.descriptors.index_readonly).peek(b"".join(chain("third", 10))) == 10
    assert pool.stats()["backed_bytes"] == stats["backed_bytes"]

    # Memory is free again: prefaulting, which waited, goes on.
    pool.prefault_start(2)
    OTHER.unlink()
    while pool.prefaulted_bytes < EXTENTS_BYTES:
        pool.retry_missing()
        os.sched_yield()
    assert (pool.stats()["missing_bytes"], pool.stats()["backed_bytes"]) == (0, EXTENTS_BYTES)
    pool.clear()
    assert store(pool, chain("fourth", CHUNKS)) == CHUNKS
    del pool
    segment.destroy()


def a_restart_without_room() -> None:
    segment = open_segment("restarted")
    segment.pool.prefault_start(1)
    while segment.pool.prefaulted_bytes < EXTENTS_BYTES:
        os.sched_yield()
    store(segment.pool, chain("first", 20))
    take_the_rest()
    for _ in range(2):
        segment.close()
        segment = open_segment("restarted")
        pool = segment.pool
        assert segment.adopted
        for number in range(1, 1024):
            pool.claim_row(number.to_bytes(16, "little"), bytes(16), number)
        for number in range(40):
            store(pool, chain(f"{number}", 30), 32 << 10)
        assert store(pool, chain("last", 50)) == 50
        del pool
    OTHER.unlink()
    segment.destroy()

    # Without the files of a pool the next server takes memory of another kind.
    segment = open_segment("half")
    store(segment.pool, chain("first", 20))
    segment.close()
    take_the_rest()
    segment = open_segment("half")
    assert not segment.adopted
    assert store(segment.pool, chain("second", CHUNKS)) == CHUNKS
    segment.destroy()


def two_pools_made_at_once() -> None:
    segments = [open_segment("left"), open_segment("right")]
    for segment in segments:
        segment.pool.prefault_start(1)
    got = [store(segment.pool, chain("both", CHUNKS)) for segment in segments]
    backed = [segment.pool.stats()["backed_bytes"] for segment in segments]
    assert all(n * RECORD <= there for n, there in zip(got, backed, strict=True))
    assert sum(backed) <= 48 * MIB
    assert any(segment.pool.stats()["missing_bytes"] for segment in segments)
    for segment in segments:
        segment.destroy()


SCENES = [a_pool_that_lost_its_room, a_restart_without_room, two_pools_made_at_once]


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(scene.__name__, marks=() if scene is a_pool_that_lost_its_room else pytest.mark.long)
        for scene in SCENES
    ],
)
def test_a_full_dev_shm_kills_no_process(scene: str, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    program = [sys.executable, "-m", "tests.integration.memory.test_full_shm", scene, str(tmp_path)]
    command = [*CONTAINER, *hidden_shm("48m"), *program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"


if __name__ == "__main__":
    next(scene for scene in SCENES if scene.__name__ == sys.argv[1])()
