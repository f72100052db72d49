"""The simulated engine (`gpu_engine`) as a child process, whose CUDA driver is the simulated one or the machine's."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors import device
from kvstrata.connectors.vllm.metadata import Store
from kvstrata.types import RequestIdentity, shown_name
from tests.harness.cache_engine import eventually
from tests.harness.child import serve
from tests.harness.gpu_engine import Cache, GpuEngine
from tests.harness.gpu_kv import TINY

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


def settings_of(socket_dir: str, **more: Any) -> ClientSettings:
    return ClientSettings(socket_dir=socket_dir, chunk_size=CHUNK_TOKENS, **more)


class _Child:
    def __init__(self) -> None:
        self._engine: GpuEngine

    def start(
        self,
        socket_dir: str,
        *,
        engine: str = "auto",
        layout: str = "LBNHC",
        load_mode: str = "auto",
        save_decode_cache: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
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
            sync_load_bytes=SYNC_CHUNKS * chunk_bytes,
        )
        chosen = self._cache.engine
        return {"engine": chosen.engine, "reason": chosen.reason}

    @property
    def _cache(self) -> Cache:
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

    def check(self) -> int:
        """All that is there of the prompts of random traffic is right; chunks found."""
        return sum(self.load(seed, MOST_CHUNKS)["chunks"] for seed in range(PROMPTS))

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

    def close(self) -> None:
        self._engine.cache.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    child = _Child()
    own = [name for name in dir(_Child) if not name.startswith("_")]
    handlers: dict[str, Callable[..., Any]] = {name: getattr(child, name) for name in own}
    serve(handlers)


if __name__ == "__main__":
    main()
