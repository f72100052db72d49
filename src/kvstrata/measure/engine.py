"""A simulated engine: it attaches to a running server as an engine does, with two sets of blocks and without a model.

It stores from the first set of blocks, loads into the second, and returns the seconds of each step.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvstrata.client import CacheClient, LoadItem, StoreOutcome
from kvstrata.config.client_model import ClientSettings
from kvstrata.errors import InternalError, Refused, Unavailable
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.measure.figures import chain_of
from kvstrata.native.core import CopyEngine
from kvstrata.rpc import wire
from kvstrata.types import (
    KEY_BYTES,
    LayoutIdentity,
    LeaseName,
    MissReason,
    RequestIdentity,
    Role,
    unpack_extents,
)

ANSWER_S = 3.0
"""Limit for the answer to a status request, which takes a running server milliseconds."""
WAIT_S = 60.0
"""Limit for a step, which takes milliseconds on an idle machine."""
SETTLE_S = 10.0
"""Limit for leases and puts to L2 to end, after which chunks can be cleared."""
UNANSWERED = frozenset({StoreOutcome.UNAVAILABLE, StoreOutcome.FAILED})
"""Outcomes of a store to which the server did not answer in time."""


class Shape(NamedTuple):
    """The shape of a chunk's KV."""

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    chunk_tokens: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        """Blocks in a chunk."""
        return self.chunk_tokens // self.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes * self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk's payload."""
        return self.layers * self.blocks * self.block_bytes

    def __str__(self) -> str:
        return (
            f"{self.layers} layers × {self.kv_heads} kv heads × {self.head_dim}, {self.element_bytes} bytes, "
            f"{self.chunk_tokens} tokens in blocks of {self.block_tokens}"
        )


class Plan(NamedTuple):
    """What an engine does."""

    directory: str
    port: int
    shape: Shape
    chunks: int
    threads: int
    tenant: str
    salt: str
    token_file: str


class Timed(NamedTuple):
    """Seconds that a step took, and the bytes it moved."""

    seconds: float
    moved_bytes: int


class SimulatedEngine:
    """One attached process with two sets of blocks for the chunks of a round: one to store from, one to load into."""

    def __init__(self, plan: Plan) -> None:
        """Raises Refused without memory for the blocks, and another KvstrataError if the server cannot be used."""
        shape = self._shape = plan.shape
        self._chunks = plan.chunks
        self._bytes = plan.chunks * shape.chunk_bytes
        try:
            self._source, self._target = (
                PagedBlocks(
                    layers=shape.layers,
                    num_blocks=plan.chunks * shape.blocks,
                    block_bytes=shape.block_bytes,
                    chunk_blocks=shape.blocks,
                )
                for _ in range(2)
            )
        except (OSError, OverflowError) as error:
            raise Refused(f"--chunks: no memory for {plan.chunks} chunks in blocks ({error})") from None
        self._source.fill(range(self._source.num_blocks), plan.salt)
        self._target.touch()
        self._libc = ctypes.CDLL(None)
        self._libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._threads = ThreadPoolExecutor(plan.threads)
        self.client = CacheClient(
            ClientSettings(
                socket_dir=plan.directory,
                port=plan.port,
                chunk_size=shape.chunk_tokens,
                token_file=plan.token_file,
            ),
            role=Role.CLIENT,
            layout=LayoutIdentity(
                model=f"kvstrata bench of {shape}", kv_dtype="bytes", chunk_tokens=shape.chunk_tokens
            ),
            group=secrets.token_bytes(wire.SESSION_BYTES),
            engine_slices=1,
            slice=self._source.slice(kv_heads=(0, shape.kv_heads)),
            engine=CopyEngine(threads=plan.threads),
            facts=self._source.facts,
        )
        self.client.start()
        self._identity = self.client.identity(RequestIdentity(tenant=plan.tenant, salt=plan.salt))
        self._chain = b""

    def connect(self, mapped_bytes: int) -> bool:
        """Wait until the client can use the cache; returns whether it has also mapped `mapped_bytes` of the pool ahead.

        Raises Refused if the server refuses the tenant, Unavailable if it does not answer.
        """
        identity = self._identity
        wait_until(
            lambda: identity.ready or bool(identity.error) or "refused" in self.client.error, ANSWER_S * 3
        )
        if identity.error:
            raise Refused(
                f"the server refuses to store for tenant {identity.request.tenant!r}: {identity.error}; "
                "give --tenant and --token-file"
            )
        if not identity.ready:
            raise Unavailable(self.client.error or "the server does not answer")
        return wait_until(lambda: int(self.client.stats()["mapped_ahead_bytes"]) >= mapped_bytes, SETTLE_S)

    def memcpy(self) -> Timed:
        """Copy the bytes of a round from the first set to the second, on as many threads as the client copies with."""
        chunk_bytes = self._shape.chunk_bytes
        source, target = self._source.bases[0], self._target.bases[0]

        def copy(chunk: int) -> None:
            self._libc.memcpy(target + chunk * chunk_bytes, source + chunk * chunk_bytes, chunk_bytes)

        begun_s = time.monotonic()
        list(self._threads.map(copy, range(self._chunks)))
        return Timed(time.monotonic() - begun_s, self._bytes)

    def store(self, prompt: int) -> Timed:
        """Store a prompt's chunks.

        Raises Refused if one was not stored, Unavailable if the server did not answer in time.
        """
        self._chain = chain_of(self._identity.root, prompt, self._chunks)
        blocks = [self._blocks_of(chunk) for chunk in range(self._chunks)]
        begun_s = time.monotonic()
        job = self.client.store(self._identity, b"", self._chain, self._source.plan, blocks)
        if not job.done.wait(WAIT_S):
            raise Unavailable(f"a store did not end within {WAIT_S:.0f} s")
        ended_s = time.monotonic()
        refused = Counter(str(outcome) for outcome in job.outcomes if outcome is not StoreOutcome.STORED)
        if refused:
            reasons = ", ".join(f"{count} × {word}" for word, count in refused.items())
            text = f"{sum(refused.values())} of {self._chunks} chunks were not stored: {reasons}"
            raise Unavailable(text) if refused.keys() & UNANSWERED else Refused(text)
        return Timed(ended_s - begun_s, job.bytes)

    def retrieve(self) -> Timed:
        """Look up the chunks that were stored last, load them, and compare every byte.

        Raises InternalError for a chunk that failed to load and for a wrong byte, otherwise as `lookups`.
        """
        self._libc.memset(self._target.bases[0], 0xA5, self._bytes)
        begun_s = time.monotonic()
        lease, extents = self._look_up()
        items = [
            LoadItem(
                self._chain[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES],
                extent.offset_bytes,
                extent.length_bytes,
                self._blocks_of(chunk),
            )
            for chunk, extent in enumerate(unpack_extents(extents))
        ]
        job = self.client.load(self._identity, lease, items, self._target.plan, sync=False)
        if not job.wait(WAIT_S):
            raise Unavailable(f"a load did not end within {WAIT_S:.0f} s")
        ended_s = time.monotonic()
        if job.failed:
            raise InternalError(
                f"chunks {sorted(job.failed)} of {self._chunks} failed to load; see the server's log"
            )
        if self._libc.memcmp(self._source.bases[0], self._target.bases[0], self._bytes):
            raise InternalError("chunks came back with other bytes than were stored")
        return Timed(ended_s - begun_s, job.bytes)

    def lookups(self, count: int) -> list[float]:
        """Look up the chunks that were stored last, `count` times, and release each lease; returns the seconds of each
        lookup.

        Raises Refused if a chunk is gone, Unavailable if the server did not answer in time.
        """
        taken = []
        for _ in range(count):
            begun_s = time.monotonic()
            lease, _ = self._look_up()
            taken.append(time.monotonic() - begun_s)
            self.client.release([lease])
        return taken

    def close(self) -> None:
        """Leave the server, which then keeps nothing of this process but its committed chunks."""
        self.client.close()
        self._threads.shutdown()
        if self.client.stats()["copies_running"] == 0:
            self._source.close()
            self._target.close()

    def _look_up(self) -> tuple[LeaseName, bytes]:
        """Lease the chunks that were stored last; returns the lease and their packed extents. Raises as `lookups`."""
        call = self.client.lookup(
            self._identity, self._chain, request_id="kvstrata bench", deadline_ms=30_000
        )
        if not call.wait(WAIT_S):
            raise Unavailable(f"a lookup was not answered within {WAIT_S:.0f} s")
        result = call.result
        if result.lease is not None and result.n_chunks == self._chunks:
            return result.lease, result.extents
        if result.lease is not None:
            self.client.release([result.lease])
        text = f"only {result.n_chunks} of the {self._chunks} stored chunks are found: {result.reason}"
        if result.reason in (MissReason.BREAKER_OPEN, MissReason.DEADLINE):
            raise Unavailable(text)
        raise Refused(f"{text}; does another process fill or clear L1?")

    def _blocks_of(self, chunk: int) -> list[int]:
        return list(range(chunk * self._shape.blocks, (chunk + 1) * self._shape.blocks))


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Check a condition every few milliseconds; returns whether it held before the time limit."""
    ends_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.005)
    return True
