"""An engine without a model whose blocks are in device memory, as a child process: steps as vLLM takes them.

The child's CUDA driver is the simulated one (`tests/harness/cuda_driver`).  No torch.  The KV of a chunk follows
from its key, so right bytes can be told from wrong ones; blocks that the engine may reuse are poisoned at once.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import hashlib
import mmap
import random
import secrets
import time
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from kvstrata.client import CacheClient, Identity, LoadItem, LookupCall
from kvstrata.client.pinning import Pinner
from kvstrata.client.warmup import PageWarmer
from kvstrata.config.model import ClientSettings
from kvstrata.connectors.vllm.device import DeviceMover
from kvstrata.connectors.vllm.metadata import Load, StepPlan, Store
from kvstrata.connectors.vllm.worker import WorkerSide
from kvstrata.keys import ChunkHasher
from kvstrata.native.copying import CopyPlan, buffer_address
from kvstrata.native.cuda import CudaCopyEngine, CudaCopyPlan
from kvstrata.types import (
    KEY_BYTES,
    LayoutIdentity,
    RequestIdentity,
    Role,
    Slice,
    facts_digest,
    unpack_extents,
)
from tests.harness.cache_engine import PATIENCE_S, eventually
from tests.harness.child import serve
from tests.harness.cuda_driver import SimulatedGpu

CHUNK_TOKENS = 16
CHUNK_BLOCKS = 2
LAYERS = 3
HALF_BYTES = 2048
"""A block of a layer is a half with keys and one with values, which lie apart as FlashAttention has them."""
BLOCK_BYTES = 2 * HALF_BYTES
POISON = 0xDE
FACTS = {"layers": LAYERS, "block_bytes": BLOCK_BYTES}


ARENA_BYTES = 64 << 20


class Later(NamedTuple):
    """Bytes in the arena that are there after `Device.finish`, until something else is queued."""

    address: int
    length: int

    @property
    def raw(self) -> bytes:
        return ctypes.string_at(self.address, self.length)


class Device(SimulatedGpu):
    """The device, and the stream on which the engine computes: what is given to it runs later."""

    def __init__(self) -> None:
        super().__init__()
        self.computes = self.stream()
        arena = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(arena), ctypes.c_size_t(ARENA_BYTES), 0)
        assert arena.value is not None
        self._arena = arena.value
        self._used = 0

    def _take(self, length: int) -> int:
        """Pinned memory, since a copy of any other would be waited for by the driver."""
        self._used += length
        assert self._used <= ARENA_BYTES, "too much is queued at once"
        return self._arena + self._used - length

    def write_later(self, address: int, data: bytes) -> None:
        """On the engine's stream."""
        source = self._take(len(data))
        ctypes.memmove(source, data, len(data))
        self.copy_later(address, source, len(data), self.computes)

    def read_later(self, address: int, length: int) -> Later:
        """On the engine's stream."""
        target = self._take(length)
        where, count = ctypes.c_uint64(address), ctypes.c_size_t(length)
        self.call(
            "cuMemcpyDtoHAsync_v2", ctypes.c_void_p(target), where, count, ctypes.c_void_p(self.computes)
        )
        return Later(target, length)

    def finish(self) -> None:
        """Wait for the engine's stream."""
        self.synchronize(self.computes)
        self._used = 0

    def make_room(self) -> None:
        """For what one step queues."""
        if self._used > ARENA_BYTES // 2:
            self.finish()


class DeviceBlocks:
    """Blocks of all layers, (2, blocks, half) each."""

    def __init__(self, device: Device, num_blocks: int) -> None:
        self.device = device
        self.num_blocks = num_blocks
        self.bases = [device.allocate(num_blocks * BLOCK_BYTES) for _ in range(LAYERS)]
        self.plan = CopyPlan(
            self.bases, num_blocks, [HALF_BYTES] * LAYERS, [(2, num_blocks * HALF_BYTES)], HALF_BYTES
        )
        self.part = Slice(layers=(0, LAYERS), kv_heads=(0, 1), layout=facts_digest(FACTS))

    def _halves(self, layer: int, block: int) -> tuple[int, int]:
        first = self.bases[layer] + block * HALF_BYTES
        return first, first + self.num_blocks * HALF_BYTES

    def write(self, layer: int, block: int, data: bytes) -> None:
        """One block of a layer, on the engine's stream."""
        for at, address in enumerate(self._halves(layer, block)):
            self.device.write_later(address, data[at * HALF_BYTES : (at + 1) * HALF_BYTES])

    def read(self, layer: int, block: int) -> list[Later]:
        """Buffers of a block that are filled by the engine's stream."""
        return [self.device.read_later(address, HALF_BYTES) for address in self._halves(layer, block)]

    def poison(self, blocks: Sequence[int]) -> None:
        """They belong to nobody any more, so somebody may write anything into them, on the engine's stream."""
        for layer in range(LAYERS):
            for block in blocks:
                self.write(layer, block, bytes([POISON]) * BLOCK_BYTES)


@lru_cache(4096)
def kv(key: bytes, layer: int, block: int) -> bytes:
    """The KV of a chunk in one of its blocks."""
    return hashlib.shake_128(key + bytes([layer, block])).digest(BLOCK_BYTES)


@dataclasses.dataclass(slots=True)
class Request:
    """A prompt on its way."""

    name: str
    hasher: ChunkHasher
    blocks: list[int]
    n_chunks: int
    n_loaded: int = 0
    """Leading chunks that are loaded, and on the device unless `received` is still to come."""
    n_computed: int = 0
    loading: bool = False
    stores: set[int] = dataclasses.field(default_factory=set)


def make_client(settings: ClientSettings, part: Slice, **more: Any) -> CacheClient:
    """A client of an engine of its own."""
    return CacheClient(
        settings,
        role=Role.CLIENT,
        layout=LayoutIdentity(model="test-model", kv_dtype="bf16", chunk_tokens=CHUNK_TOKENS),
        group=secrets.token_bytes(16),
        engine_slices=1,
        slice=part,
        facts=FACTS,
        **more,
    )


def hasher_of(identity: Identity, seed: int, n_chunks: int) -> ChunkHasher:
    """Keys of a prompt; two with other seeds share no chunk."""
    hasher = identity.hasher()
    hasher.feed([seed * 1_000_003 + at for at in range(n_chunks * CHUNK_TOKENS)])
    return hasher


class GpuEngine:
    """One worker with a scheduler of its own, too simple to be wrong."""

    def __init__(
        self,
        socket_dir: str,
        *,
        num_blocks: int = 128,
        engine: str = "auto",
        pin: bool = True,
        measure: bool = False,
        **settings: Any,
    ) -> None:
        chosen = ClientSettings(socket_dir=socket_dir, chunk_size=CHUNK_TOKENS, **settings)
        self.engine = CudaCopyEngine(0, engine=engine, threads=2)  # type: ignore[arg-type]
        self.device = Device()
        self.blocks = DeviceBlocks(self.device, num_blocks)
        self.blocks.poison(range(num_blocks))
        self.client = make_client(
            chosen,
            self.blocks.part,
            engine=self.engine,
            pages=Pinner(self.engine, 0) if pin else PageWarmer(),
            registers_memory=True,
        )
        plan = CudaCopyPlan(self.blocks.plan, 0)
        if measure:
            self.engine.choose(self.blocks.plan, 0, 0, range(CHUNK_BLOCKS))
        mover = DeviceMover(
            self.client,
            self.engine,
            plan,
            sections={f"layer {number}": number for number in range(LAYERS)},
            current_stream=lambda: self.device.computes,
        )
        self.worker = WorkerSide(
            self.client,
            mover,
            slice_digest=self.blocks.part.digest(),
            chunk_blocks=CHUNK_BLOCKS,
            make_item=LoadItem,
        )
        self.identity_of = RequestIdentity()
        self.client.start()
        self.chance = random.Random(num_blocks)
        self.free = list(range(num_blocks))
        self.running: dict[str, Request] = {}
        self.ended: dict[str, Request] = {}
        """Requests that are over, whose blocks the worker still needs."""
        self.step_number = self.store_number = self.name_number = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures_seen = 0

    @property
    def identity(self) -> Identity:
        return self.client.identity(self.identity_of)

    def connect(self) -> None:
        eventually("the client connects", lambda: self.client.connected)
        eventually("the identity is ready", lambda: self.identity.ready)

    def looked_up(self, hasher: ChunkHasher, timeout_s: float = PATIENCE_S) -> LookupCall:
        self.name_number += 1
        call = self.client.lookup(self.identity, hasher, request_id=f"request-{self.name_number}")
        assert call.wait(timeout_s), "the lookup never ended"
        return call

    # -- one step --------------------------------------------------------------------------------------------

    def admit(
        self, seed: int, n_chunks: int, *, look: bool = True, asynchronous: bool = False
    ) -> tuple[Request, Load | None] | None:
        """A new request and what it is to load; None without room."""
        hasher = hasher_of(self.identity, seed, n_chunks)
        if len(self.free) < n_chunks * CHUNK_BLOCKS:
            return None
        call = self.looked_up(hasher) if look else None
        blocks = [self.free.pop() for _ in range(n_chunks * CHUNK_BLOCKS)]
        request = Request(f"request-{self.name_number}-{seed}", hasher, blocks, n_chunks)
        self.running[request.name] = request
        if call is None or call.result.lease is None or not call.claim():
            return request, None
        n = request.n_loaded = call.result.n_chunks
        request.loading = asynchronous
        load = Load(
            request.name,
            call.result.lease,
            hasher.chain[: n * KEY_BYTES],
            call.result.extents,
            self.identity.slices,
            blocks[: n * CHUNK_BLOCKS],
            asynchronous,
        )
        return request, load

    def step(
        self,
        loads: Sequence[Load] = (),
        compute: Sequence[Request] = (),
        preempted: Sequence[Request] = (),
        awaited: Sequence[Request] = (),
        *,
        layerwise: bool = True,
    ) -> set[str]:
        """One step of the engine; the requests whose asynchronous loads ended in it."""
        self.step_number += 1
        self.device.make_room()
        plan = StepPlan(
            self.step_number, list(loads), [], {one.name for one in preempted}, set(), self.failures_seen
        )
        for one in compute:
            first = one.n_loaded
            self.store_number += 1
            one.stores.add(self.store_number)
            plan.stores.append(
                Store(
                    self.store_number,
                    one.name,
                    self.identity_of,
                    one.hasher.key(first - 1) if first else b"",
                    one.hasher.chain[first * KEY_BYTES : one.n_chunks * KEY_BYTES],
                    one.blocks[first * CHUNK_BLOCKS :],
                    one.hasher.probe,
                )
            )
        for one in awaited:
            if one.stores:
                plan.awaited.add(one.name)
                self.ended[one.name] = self.running.pop(one.name)
            else:
                self.give_back(one)
        self.worker.before_step(plan)
        for one in preempted:
            self.give_back(one)
        self.worker.start_loads(layerwise=layerwise)
        resting = [(load, self.running[load.request_id]) for load in loads if not load.asynchronous]
        seen = self.forward(resting, compute)
        self.worker.start_stores()
        sent, received = self.worker.finished()
        bad = self.worker.take_bad_blocks()
        report = self.worker.report()
        if report is not None:
            self.failures_seen = max(self.failures_seen, report.failures)
            for number in [*report.gathered, *report.dropped]:
                for one in [*self.running.values(), *self.ended.values()]:
                    one.stores.discard(number)
            self.counts["stored"] += sum(mask.bit_count() for _, mask in report.stored)
            self.counts["broken"] = int(report.broken)
        self.check(seen, bad)
        for name in sent:
            self.give_back(self.ended.pop(name))
        for name in received:
            one = self.running[name]
            one.loading = False
            self.check([(one, self.read(one, range(LAYERS)))], bad)
        return received

    def forward(
        self, resting: Sequence[tuple[Load, Request]], compute: Sequence[Request]
    ) -> list[tuple[Request, Any]]:
        """Layer after layer: read what was loaded, write what is computed. Only given to the device, not waited for."""
        seen: list[tuple[Request, Any]] = []
        for layer in range(LAYERS):
            self.worker.wait_layer(f"layer {layer}")
            seen += [(one, self.read(one, [layer])) for _, one in resting]
            for one in compute:
                for at in range(one.n_loaded * CHUNK_BLOCKS, one.n_chunks * CHUNK_BLOCKS):
                    key = one.hasher.key(at // CHUNK_BLOCKS)
                    self.blocks.write(layer, one.blocks[at], kv(key, layer, at % CHUNK_BLOCKS))
        for one in compute:
            one.n_computed = one.n_chunks
        return seen

    def read(self, one: Request, layers: Sequence[int]) -> list[tuple[int, int, Any]]:
        """(layer, number of the block, buffers) of what was loaded for a request."""
        return [
            (layer, at, self.blocks.read(layer, one.blocks[at]))
            for layer in layers
            for at in range(one.n_loaded * CHUNK_BLOCKS)
        ]

    def check(self, seen: Sequence[tuple[Request, Any]], bad: set[int]) -> None:
        """What the model read of loaded blocks is right, unless it is told to compute them again."""
        if seen:
            self.device.finish()
        for one, parts in seen:
            for layer, at, buffers in parts:
                if one.blocks[at] in bad:
                    self.counts["bad blocks"] += 1
                    continue
                found = b"".join(buffer.raw for buffer in buffers)
                wanted = kv(one.hasher.key(at // CHUNK_BLOCKS), layer, at % CHUNK_BLOCKS)
                what = "poison" if bytes([POISON]) * 16 in found else "wrong"
                assert found == wanted, f"{one.name}: layer {layer}, block {at} of the request is {what}"
                self.counts["right blocks"] += 1

    def give_back(self, one: Request) -> None:
        """The request's blocks are nobody's."""
        self.running.pop(one.name, None)
        self.blocks.poison(one.blocks)
        if self.chance.random() < 0.5:
            self.device.finish()
        assert not set(self.free) & set(one.blocks), "blocks were given back twice"
        self.free += one.blocks

    # -- what tests ask ----------------------------------------------------------------------------------------

    def store(self, seed: int, n_chunks: int) -> int:
        """Compute a prompt, store it, and end it; the chunks that are in L1 now."""
        before = self.counts["stored"]
        admitted = self.admit(seed, n_chunks, look=False)
        assert admitted is not None
        self.step(compute=[admitted[0]])
        self.settle([admitted[0]])
        return self.counts["stored"] - before

    def settle(self, requests: Sequence[Request]) -> None:
        """End these requests and wait until nothing is under way for them."""
        self.step(awaited=requests)
        names = {one.name for one in requests}
        ends_s = time.monotonic() + PATIENCE_S
        while names & self.ended.keys() or self.worker._stores or self.worker._loads:
            assert time.monotonic() < ends_s, "copies never ended"
            self.step()
            time.sleep(0.001)

    def load(
        self, seed: int, n_chunks: int, *, asynchronous: bool = False, layerwise: bool = True
    ) -> dict[str, int]:
        """Load what is there of a prompt; asserts that it is right. Chunks found, blocks that were right and bad."""
        before = self.counts.copy()
        admitted = self.admit(seed, n_chunks, asynchronous=asynchronous)
        assert admitted is not None
        request, load = admitted
        self.step([load] if load is not None else [], layerwise=layerwise)
        ends_s = time.monotonic() + PATIENCE_S
        while request.loading:
            assert time.monotonic() < ends_s, "the load never ended"
            self.step()
            time.sleep(0.001)
        self.settle([request])
        return {
            "chunks": request.n_loaded,
            "right": self.counts["right blocks"] - before["right blocks"],
            "bad": self.counts["bad blocks"] - before["bad blocks"],
        }

    def begin_store(self, seed: int, n_chunks: int) -> bool:
        """Compute a prompt and begin to store it; returns when its extents are reserved."""
        admitted = self.admit(seed, n_chunks, look=False)
        assert admitted is not None
        self.step(compute=[admitted[0]])
        return bool(eventually("a copy begins", lambda: self.client.stats()["copies_running"]))

    def break_device(self, seed: int, n_chunks: int, fault: str) -> dict[str, Any]:
        """The device breaks while a prompt is loaded; what the worker says of it, and of the store after it."""
        admitted = self.admit(seed, n_chunks)
        assert admitted is not None and admitted[1] is not None
        request, load = admitted
        self.device.finish()
        self.device.set("fail", fault)
        told = []
        for plan in (
            StepPlan(1, loads=[load]),
            StepPlan(
                2,
                failures_seen=1,
                stores=[
                    Store(1, request.name, self.identity_of, b"", request.hasher.chain, request.blocks, b"")
                ],
            ),
            StepPlan(3),
        ):
            self.worker.before_step(plan)
            self.worker.start_loads(layerwise=True)
            for layer in range(LAYERS):
                self.worker.wait_layer(f"layer {layer}")
            self.worker.start_stores()
            self.worker.finished()
            report = self.worker.report()
            told.append((sorted(self.worker.take_bad_blocks()), report is not None and report.broken))
        [(bad, _), (none, broken), (_, still)] = told
        return {"bad": bad == sorted(request.blocks), "none": none == [], "broken": broken and still}

    def churn(self, seed: int, steps: int) -> dict[str, int]:
        """Random requests, preempted, aborted and ended at random; every block that is free is poisoned at once."""
        chance = random.Random(seed)
        for _ in range(steps):
            loads, compute, fresh = [], [], []
            for _ in range(chance.randrange(3)):
                admitted = self.admit(
                    chance.randrange(12), chance.randint(1, 8), asynchronous=chance.random() < 0.5
                )
                if admitted is None:
                    continue
                request, load = admitted
                fresh.append(request)
                if load is not None:
                    loads.append(load)
                if not request.loading and request.n_loaded < request.n_chunks:
                    compute.append(request)
            idle = [one for one in self.running.values() if one not in fresh and not one.loading]
            chance.shuffle(idle)
            for one in idle[:]:
                if one.n_loaded < one.n_chunks and not one.n_computed and chance.random() < 0.7:
                    idle.remove(one)
                    compute.append(one)
            cut = chance.randrange(len(idle) + 1)
            over = idle[:cut]
            preempted = [one for one in over if chance.random() < 0.4]
            self.step(
                loads,
                compute,
                preempted,
                [one for one in over if one not in preempted],
                layerwise=chance.random() < 0.7,
            )
        while any(one.loading for one in self.running.values()):
            self.step()
            time.sleep(0.001)
        self.settle(list(self.running.values()))
        assert len(self.free) == self.blocks.num_blocks
        return dict(self.counts)


class HostEngine:
    """The same KV with its blocks in host memory, on the client's own copy threads."""

    def __init__(self, socket_dir: str, num_blocks: int = 64) -> None:
        self.memory = mmap.mmap(-1, LAYERS * num_blocks * BLOCK_BYTES)
        self.num_blocks = num_blocks
        first = buffer_address(self.memory)
        bases = [first + layer * num_blocks * BLOCK_BYTES for layer in range(LAYERS)]
        dims = [(2, num_blocks * HALF_BYTES)]
        self.plan = CopyPlan(bases, num_blocks, [HALF_BYTES] * LAYERS, dims, HALF_BYTES)
        self.part = Slice(layers=(0, LAYERS), kv_heads=(0, 1), layout=facts_digest(FACTS))
        self.client = make_client(ClientSettings(socket_dir=socket_dir, chunk_size=CHUNK_TOKENS), self.part)
        self.client.start()
        self.identity = self.client.identity(RequestIdentity())
        eventually("the host's identity is ready", lambda: self.identity.ready)

    def _halves(self, layer: int, block: int) -> list[slice]:
        first = layer * self.num_blocks * BLOCK_BYTES + block * HALF_BYTES
        return [slice(at, at + HALF_BYTES) for at in (first, first + self.num_blocks * HALF_BYTES)]

    def store(self, seed: int, n_chunks: int) -> int:
        """Chunks of a prompt that were stored."""
        hasher = hasher_of(self.identity, seed, n_chunks)
        for layer in range(LAYERS):
            for block in range(n_chunks * CHUNK_BLOCKS):
                data = kv(hasher.key(block // CHUNK_BLOCKS), layer, block % CHUNK_BLOCKS)
                for at, where in enumerate(self._halves(layer, block)):
                    self.memory[where] = data[at * HALF_BYTES : (at + 1) * HALF_BYTES]
        job = self.client.store(self.identity, b"", hasher.chain, self.plan, self._blocks(n_chunks))
        assert job.done.wait(PATIENCE_S), "the store never ended"
        return [str(outcome) for outcome in job.outcomes].count("stored")

    def load(self, seed: int, n_chunks: int) -> int:
        """Chunks of a prompt that are there; asserts that they are right."""
        hasher = hasher_of(self.identity, seed, n_chunks)
        call = self.client.lookup(self.identity, hasher, request_id="host")
        assert call.wait(PATIENCE_S), "the lookup never ended"
        result = call.result
        if result.lease is None:
            return 0
        items = [
            LoadItem(hasher.key(chunk), extent.offset_bytes, extent.length_bytes, ids)
            for chunk, (extent, ids) in enumerate(
                zip(unpack_extents(result.extents), self._blocks(result.n_chunks), strict=True)
            )
        ]
        job = self.client.load(result.lease, items, self.plan, sync=True)
        assert not job.failed
        for layer in range(LAYERS):
            for block in range(result.n_chunks * CHUNK_BLOCKS):
                found = b"".join(self.memory[where] for where in self._halves(layer, block))
                wanted = kv(hasher.key(block // CHUNK_BLOCKS), layer, block % CHUNK_BLOCKS)
                assert found == wanted, f"prompt {seed}: layer {layer}, block {block} is wrong"
        return result.n_chunks

    def _blocks(self, n_chunks: int) -> list[list[int]]:
        return [[chunk * CHUNK_BLOCKS + at for at in range(CHUNK_BLOCKS)] for chunk in range(n_chunks)]


class _Child:
    """Handlers of the child process."""

    def __init__(self) -> None:
        self.engine: GpuEngine
        self.host: HostEngine | None = None

    def start(self, socket_dir: str, **more: Any) -> dict[str, Any]:
        self.socket_dir = socket_dir
        self.engine = GpuEngine(socket_dir, **more)
        return {"engine": self.engine.engine.engine, "reason": self.engine.engine.reason}

    def connect(self) -> str:
        self.engine.connect()
        return self.engine.client.session.hex()

    def stats(self) -> dict[str, Any]:
        return self.engine.client.stats()

    def take_counts(self) -> dict[str, int | float]:
        """What vLLM would collect from this worker."""
        return self.engine.worker.take_counts()

    def wait_pinned(self, n_bytes: int) -> None:
        eventually("the pool is pinned", lambda: self.engine.client.stats()["pinned_bytes"] == n_bytes)

    def wait_stat(self, name: str) -> Any:
        return eventually(f"{name} says something", lambda: self.engine.client.stats()[name])

    def broken(self) -> bool:
        return self.engine.engine.failed is not None

    def set_driver(self, name: str, value: str) -> None:
        self.engine.device.set(name, value)

    def registrations(self) -> int:
        """Slabs that are registered with the simulated driver."""
        return self.engine.device.calls("cuMemHostRegister") - self.engine.device.calls("cuMemHostUnregister")

    def wait_registrations(self, count: int) -> None:
        eventually("so much is registered", lambda: self.registrations() == count)

    def host_store(self, seed: int, n_chunks: int) -> int:
        return self._on_host().store(seed, n_chunks)

    def host_load(self, seed: int, n_chunks: int) -> int:
        return self._on_host().load(seed, n_chunks)

    def host_check(self, seeds: int, n_chunks: int) -> int:
        """All that is there of these prompts is right; chunks found."""
        return sum(self._on_host().load(seed, n_chunks) for seed in range(seeds))

    def _on_host(self) -> HostEngine:
        if self.host is None:
            self.host = HostEngine(self.socket_dir)
        return self.host

    def close(self) -> None:
        if self.host is not None:
            self.host.client.close()
        self.engine.worker.close()


def main() -> None:
    child = _Child()
    own = [name for name in dir(_Child) if not name.startswith("_")]
    handlers = {name: getattr(child, name) for name in own}
    for name in ("store", "load", "churn", "break_device", "begin_store"):
        handlers[name] = partial(_on_engine, child, name)
    serve(handlers)


def _on_engine(child: _Child, name: str, **arguments: Any) -> Any:
    return getattr(child.engine, name)(**arguments)


if __name__ == "__main__":
    main()
