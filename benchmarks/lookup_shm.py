"""`lookup_shm_128k`: the time to count how many of 512 chunks are in L1, from shared memory and without a message.

The index has 1 M READY entries.  Each call asks for another chain, in random order, so that nothing is in a cache.  The
calls are those of the connector: `CacheClient.peek` with the request's hasher.  The hasher has derived the storage keys
before the call; a call for `with_derivation_us` derives them first.  `missed_us` is the
time to have a miss told with the next ping.

Sketch: each key touches a bucket and a hot entry, which makes two cache misses; 16 keys are prefetched at a time.  The
ratio compares with a Python dict of the same keys.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.common import compared, median_spread, percentile, sized
from kvstrata.client import CacheClient, Identity
from kvstrata.config.client_model import ClientSettings
from kvstrata.keys import ChunkHasher
from kvstrata.native.core import IndexReader, Pool
from kvstrata.rpc.wire import AttachReply
from kvstrata.session.attach import Attachment, LockHolder
from kvstrata.types import LayoutIdentity, RequestIdentity, Role, Slice

CHUNKS = 512
PROMPTS = sized(2048, 64)
RECORD_BYTES = 8192
TARGET_US = 30.0
REPEATS = sized(5, 1)


@contextmanager
def filled_index() -> Iterator[tuple[CacheClient, Identity, list[ChunkHasher], int, bytes]]:
    """Make a pool of 1 M entries whose extents are never touched, its prompts, and a client that sees the pool."""
    index_fd, extents_fd = os.memfd_create("index"), os.memfd_create("extents")
    part = Slice(layers=(0, 1), kv_heads=(0, 1), layout="bench")
    layout = LayoutIdentity(model="bench", kv_dtype="bf16", chunk_tokens=1)
    client = CacheClient(
        ClientSettings(), role=Role.CLIENT, layout=layout, group=bytes(16), engine_slices=1, slice=part
    )
    identity = client.identity(RequestIdentity())
    entries = PROMPTS * CHUNKS
    extents_bytes = 2 * entries * RECORD_BYTES
    pool = Pool.create(
        index_fd, extents_fd, extents_bytes=extents_bytes, entry_capacity=entries + entries // 8
    )
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.2):
            pool.heartbeat()

    beating = threading.Thread(target=beat)
    try:
        row = pool.claim_row(bytes(16), bytes(16), os.getpid())
        hashers = []
        for number in range(PROMPTS):
            hasher = identity.hasher()
            hasher.feed(list(range(number * CHUNKS, (number + 1) * CHUNKS)))  # a chunk is one token here
            keys = hasher.storage_keys((part.digest(),))
            ticket, outcomes, _ = pool.reserve(keys, b"", RECORD_BYTES, row, identity.root, 0)
            if any(outcomes) or any(pool.commit(ticket, list(range(CHUNKS)), check=False)):
                raise RuntimeError(f"the pool did not take prompt {number}: {set(outcomes)}")
            hashers.append(hasher)
        pool.heartbeat()
        beating.start()
        pool_id = IndexReader(index_fd).pool_id
        reply = AttachReply(row=row, epoch=pool.epoch, pool_id=pool_id, extents_bytes=extents_bytes)
        # No server runs: the client is shown the pool as an attach would show it.
        with socket.socket() as unconnected:
            client.pool.attached(
                Attachment(unconnected, reply, client.session, LockHolder(), index_fd, extents_fd)
            )
        yield client, identity, hashers, index_fd, part.digest()
    finally:
        stop.set()
        if beating.is_alive():
            beating.join()
        client.close()
        pool.close()
        os.close(index_fd)
        os.close(extents_fd)


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    with filled_index() as (client, identity, hashers, index_fd, digest):
        reader = IndexReader(index_fd)
        order = random.Random(1)
        table = {}
        for hasher in hashers:
            keys = hasher.storage_keys((digest,))
            table.update((keys[i : i + 32], None) for i in range(0, len(keys), 32))
        cases: dict[str, tuple[int, Callable[[ChunkHasher], int]]] = {
            "ours": (1000, lambda hasher: client.peek(identity, hasher)),
            "native": (1000, lambda hasher: reader.peek(hasher.storage_keys((digest,)), 1)),
            "derived": (500, lambda hasher: client.peek(identity, hasher.chain)),
            "told": (1000, lambda hasher: _told(client, identity, hasher)),
            "bare": (200, lambda hasher: _in_dict(table, hasher.storage_keys((digest,)))),
        }
        taken: dict[str, list[list[float]]] = {name: [] for name in cases}
        for _ in range(REPEATS):
            for name, (count, call) in cases.items():
                order.shuffle(hashers)
                taken[name].append([_timed_us(call, hasher) for hasher in hashers[:count]])

        p50 = {name: [percentile(part, 0.5) for part in parts] for name, parts in taken.items()}
        return [
            compared(
                "lookup_shm_128k",
                p50["ours"],
                "µs",
                "512 look-ups in a Python dict of as many keys",
                median_spread(p50["bare"])[0],
                most_value=TARGET_US,
                p99_us=median_spread([percentile(part, 0.99) for part in taken["ours"]])[0],
                native_us=median_spread(p50["native"])[0],
                with_derivation_us=median_spread(p50["derived"])[0],
                missed_us=median_spread(p50["told"])[0],
                missed_p99_us=median_spread([percentile(part, 0.99) for part in taken["told"]])[0],
                entries=PROMPTS * CHUNKS,
            )
        ]


def _timed_us(call: Callable[[ChunkHasher], int], hasher: ChunkHasher) -> float:
    started = time.perf_counter()
    found = call(hasher)
    seconds = time.perf_counter() - started
    if found != CHUNKS:
        raise RuntimeError(f"{found} of {CHUNKS} chunks were found")
    return seconds * 1e6


def _told(client: CacheClient, identity: Identity, hasher: ChunkHasher) -> int:
    client.missed(identity, hasher, request_id="request")
    return CHUNKS


def _in_dict(table: dict[bytes, None], keys: bytes) -> int:
    for i in range(0, len(keys), 32):
        if keys[i : i + 32] not in table:
            return i // 32
    return CHUNKS
