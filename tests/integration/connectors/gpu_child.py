"""The simulated engine (`gpu_engine`) as a child process, whose CUDA driver is the simulated one or the machine's."""

from __future__ import annotations

import logging
import mmap
import random
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

from kvstrata.client import LoadItem
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors import device
from kvstrata.connectors.device import DeviceMover
from kvstrata.connectors.vllm.metadata import Store
from kvstrata.keys import ChunkHasher
from kvstrata.native.core import buffer_address
from kvstrata.native.cuda import CudaCopyPlan
from kvstrata.types import RequestIdentity, Role, shown_name, unpack_extents
from tests.harness.cache_engine import PATIENCE_S, eventually
from tests.harness.child import serve
from tests.harness.gpu_engine import Cache, GpuEngine, client_of
from tests.harness.gpu_kv import TINY, PagedKv, block_keys

CHUNK_TOKENS = 16
BLOCK_TOKENS = 8
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
LAYERS = TINY.layers
SYNC_CHUNKS = 3
"""In mode `auto`, longer hits are loaded beside other work."""
PROMPTS = 12
"""That random traffic chooses from."""
MOST_CHUNKS = 8


def prompt(seed: int, n_chunks: int, more: int = 1) -> list[int]:
    """Tokens of a prompt; two with other seeds share no chunk. One token at least is computed."""
    return [seed * 1_000_003 + at for at in range(n_chunks * CHUNK_TOKENS + more)]


class Unordered(DeviceMover):
    """A planted bug: copies do not begin behind what the engine's stream has to do."""

    def _behind_now(self, plan: CudaCopyPlan) -> CudaCopyPlan | None:
        return plan


def settings_of(socket_dir: str, **more: Any) -> ClientSettings:
    return ClientSettings(socket_dir=socket_dir, chunk_size=CHUNK_TOKENS, **more)


class HostEngine:
    """The same KV with its blocks in host memory, on the client's own copy threads."""

    def __init__(self, socket_dir: str, layout: str, num_blocks: int = 64) -> None:
        self.memory = mmap.mmap(-1, PagedKv.memory_bytes(TINY, BLOCK_TOKENS, num_blocks))
        self.kv = PagedKv(
            buffer_address(self.memory),
            TINY,
            layout=layout,
            block_tokens=BLOCK_TOKENS,
            num_blocks=num_blocks,
            chunk_tokens=CHUNK_TOKENS,
        )
        settings = settings_of(socket_dir)
        self.client = client_of(settings, self.kv, Role.CLIENT, secrets.token_bytes(16))
        self.client.start()
        self.identity = self.client.identity(RequestIdentity())
        eventually("the host's identity is ready", lambda: self.identity.ready)

    def _hasher(self, tokens: list[int]) -> ChunkHasher:
        hasher = self.identity.hasher()
        hasher.feed(tokens)
        return hasher

    def _pieces(self, layer: int, block: int) -> list[slice]:
        start = self.kv.address(layer, block) - self.kv.base
        return [slice(start + offset, start + offset + n) for offset, _, n in self.kv.places(0, BLOCK_TOKENS)]

    def store(self, seed: int, n_chunks: int) -> int:
        """Chunks of a prompt that were stored."""
        tokens = prompt(seed, n_chunks)
        hasher = self._hasher(tokens)
        for block, key in enumerate(block_keys(tokens, BLOCK_TOKENS)[: n_chunks * CHUNK_BLOCKS]):
            for layer in range(LAYERS):
                data = self.kv.expected(key, layer, 0, BLOCK_TOKENS)
                for where in self._pieces(layer, block):
                    length = where.stop - where.start
                    self.memory[where], data = data[:length], data[length:]
        job = self.client.store(self.identity, b"", hasher.chain, self.kv.host_plan, self._blocks(n_chunks))
        assert job.done.wait(PATIENCE_S), "the store never ended"
        return [str(outcome) for outcome in job.outcomes].count("stored")

    def load(self, seed: int, n_chunks: int) -> int:
        """Chunks of a prompt that are there; asserts that they are right."""
        tokens = prompt(seed, n_chunks)
        hasher = self._hasher(tokens)
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
        job = self.client.load(self.identity, result.lease, items, self.kv.host_plan, sync=True)
        assert not job.failed
        for block, key in enumerate(block_keys(tokens, BLOCK_TOKENS)[: result.n_chunks * CHUNK_BLOCKS]):
            for layer in range(LAYERS):
                found = b"".join(self.memory[where] for where in self._pieces(layer, block))
                wanted = self.kv.expected(key, layer, 0, BLOCK_TOKENS)
                assert found == wanted, f"prompt {seed}: layer {layer}, block {block} is wrong"
        return result.n_chunks

    def _blocks(self, n_chunks: int) -> list[list[int]]:
        return [[chunk * CHUNK_BLOCKS + at for at in range(CHUNK_BLOCKS)] for chunk in range(n_chunks)]


class _Child:
    def __init__(self) -> None:
        self._engine: GpuEngine
        self._host: HostEngine | None = None

    def start(
        self,
        socket_dir: str,
        *,
        engine: str = "auto",
        layout: str = "LBNHC",
        pin: bool = True,
        load_mode: str = "auto",
        save_decode_cache: bool = False,
        ordered: bool = True,
        settings: dict[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        self._socket_dir, self._layout = socket_dir, layout
        device.DMA_RUN_BYTES = {"dma": 0, "kernel": 1 << 62}.get(engine, device.DMA_RUN_BYTES)
        chosen_settings = settings_of(
            socket_dir,
            load_mode=load_mode,
            save_decode_cache=save_decode_cache,
            **(settings or {}),
        )
        chunk_bytes = LAYERS * CHUNK_TOKENS * TINY.token_bytes
        self._engine = GpuEngine(
            chosen_settings,
            layout=layout,
            block_tokens=BLOCK_TOKENS,
            pin=pin,
            sync_load_bytes=SYNC_CHUNKS * chunk_bytes,
            **({} if ordered else {"mover": Unordered}),
            **more,
        )
        chosen = self._cache.engine
        return {"engine": chosen.engine, "reason": chosen.reason}

    @property
    def _cache(self) -> Cache:
        assert isinstance(self._engine.cache, Cache)
        return self._engine.cache

    def connect(self) -> str:
        self._cache.connect()
        return shown_name(self._cache.client.session)

    def store(self, seed: int, n_chunks: int) -> int:
        """Ask a prompt; its chunks that were stored."""
        before = self._engine.counts["stored"]
        self._engine.submit(prompt(seed, n_chunks), 1)
        self._engine.settle()
        return self._engine.counts["stored"] - before

    def load(self, seed: int, n_chunks: int, layerwise: bool = True) -> dict[str, int]:
        """Ask a prompt; the chunks that were there, blocks of layers that were loaded and right, and that were not."""
        engine = self._engine
        before = engine.counts.copy()
        engine.layerwise = layerwise
        request = engine.submit(prompt(seed, n_chunks), 1)
        engine.settle()
        return {
            "chunks": request.cached_tokens // CHUNK_TOKENS,
            "right": engine.counts["loaded blocks"] - before["loaded blocks"],
            "bad": engine.counts["bad blocks"] - before["bad blocks"],
        }

    def begin_store(self, seed: int, n_chunks: int) -> bool:
        """Compute a prompt and begin to store it; returns when its extents are reserved."""
        self._engine.wait_share = 0.0
        self._engine.submit(prompt(seed, n_chunks), 2)
        while not self._engine.step():
            pass
        return bool(eventually("a copy begins", lambda: self.stats()["copies_running"]))

    def break_device(self, seed: int, n_chunks: int, fault: str) -> dict[str, Any]:
        """The device breaks while a prompt is loaded for a forward pass; what the worker says of it and of a store."""
        engine, cache = self._engine, self._cache
        begun: list[Any] = []
        plan_step = cache.scheduler.plan_step

        def plan(output: Any) -> Any:
            begun.append(plan_step(output))
            if begun[-1].loads:
                engine.checks.compare()
                engine.device.set("fail", fault)
                raise InterruptedError  # the engine itself can compute no more
            return begun[-1]

        cache.scheduler.plan_step = plan  # type: ignore[method-assign]
        request = engine.submit(prompt(seed, n_chunks), 1)
        try:
            engine.run_until(lambda: False)
        except InterruptedError:
            pass
        [load] = begun[-1].loads
        chain = self._cache.identity.hasher()
        chain.feed(request.tokens)
        store = Store(
            10_000,
            request.request_id,
            RequestIdentity(),
            b"",
            chain.chain,
            request.blocks[: n_chunks * CHUNK_BLOCKS],
            b"",
        )
        begun[-1].stores.clear()
        told = []
        for stores, failures_seen in (([], 0), ([store], 1), ([], 1)):
            step = begun[-1]
            step.stores, step.failures_seen = stores, failures_seen
            cache.begin_step(step)
            cache.begin_loads(layerwise=True)
            for name in engine.kv.sections:
                cache.layer(name)
            heard = cache.end_step()
            told.append((sorted(heard.bad_blocks), heard.report is not None and heard.report.broken))
            step.loads = []
        [(bad, _), (none, broken), (_, still)] = told
        return {"bad": bad == sorted(load.blocks), "none": none == [], "broken": broken and still}

    def churn(self, seed: int, steps: int) -> dict[str, int]:
        """Random prompts with answers of random lengths, preempted and aborted at random."""
        engine, chance = self._engine, random.Random(seed)
        engine.chance = random.Random(seed + 1)
        engine.layerwise, engine.preempt_share, engine.wait_share = None, 0.05, 0.5
        for _ in range(steps):
            if len(engine.requests) < 24:
                for _ in range(chance.randrange(3)):
                    tokens = prompt(
                        chance.randrange(PROMPTS), chance.randint(0, MOST_CHUNKS), chance.randint(1, 20)
                    )
                    engine.submit(tokens, chance.choice((1, 2, chance.randint(1, 24))))
            living = [one for one in engine.requests.values() if not one.ended]
            if living and chance.random() < 0.08:
                engine.abort(chance.choice(living))
            if not engine.step():
                time.sleep(0.0002)
        engine.settle()
        print(f"churn {seed}: {dict(engine.counts)}", file=sys.stderr, flush=True)
        return dict(engine.counts)

    def stats(self) -> dict[str, Any]:
        return self._cache.client.stats()

    def take_counts(self) -> dict[str, int | float]:
        """What vLLM would collect from this worker."""
        return self._cache.worker.take_counts()

    def wait_pinned(self, n_bytes: int) -> None:
        eventually("the pool is pinned", lambda: self.stats()["pinned_bytes"] == n_bytes)

    def wait_stat(self, name: str) -> Any:
        return eventually(f"{name} says something", lambda: self.stats()[name])

    def broken(self) -> bool:
        return self._cache.engine.failed is not None

    def set_driver(self, name: str, value: str) -> None:
        self._engine.device.set(name, value)

    def wait_call(self, name: str) -> None:
        eventually(f"{name} is called", lambda: self._engine.device.calls(name))

    def registrations(self) -> int:
        """Slabs that are registered with the simulated driver."""
        device = self._engine.device
        return device.calls("cuMemHostRegister") - device.calls("cuMemHostUnregister")

    def wait_registrations(self, count: int) -> None:
        eventually("so much is registered", lambda: self.registrations() == count)

    def host_store(self, seed: int, n_chunks: int) -> int:
        return self._on_host().store(seed, n_chunks)

    def host_load(self, seed: int, n_chunks: int) -> int:
        return self._on_host().load(seed, n_chunks)

    def host_check(self) -> int:
        """All that is there of the prompts of random traffic is right; chunks found."""
        return sum(self._on_host().load(seed, MOST_CHUNKS) for seed in range(PROMPTS))

    def _on_host(self) -> HostEngine:
        if self._host is None:
            self._host = HostEngine(self._socket_dir, self._layout)
        return self._host

    def close(self) -> None:
        if self._host is not None:
            self._host.client.close()
        self._engine.cache.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    child = _Child()
    own = [name for name in dir(_Child) if not name.startswith("_")]
    handlers: dict[str, Callable[..., Any]] = {name: getattr(child, name) for name in own}
    serve(handlers)


if __name__ == "__main__":
    main()
