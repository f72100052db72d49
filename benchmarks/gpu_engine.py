"""`gpu_engine_*`: the same traffic to an engine with its KV on a GPU, once with a cache and once without.

The engine is a simulated vLLM (`tests/harness/gpu_engine`): chunked prefill and decode in steps of at most 2,048
tokens, the matrix products of the model's layers by CuPy, the real connector to a real server.  In each of three
rounds, requests ask another question about each of 16 documents of 6,000 tokens, and arrive as a Poisson process.  The
GPU's blocks hold eight such requests and keep nothing of requests that have ended.  The traffic runs once without a
cache and once with an empty cache on a server of its own.  Time to the first token counts from a request's arrival.

A step's time is from its plan to the end of its work on the device.  `gpu_engine_decode_step_*` compares the medians of
steps that only decode, while a store or a load is under way and while none is.  A store's lag is the time from the end
of the step that computed its chunks to the moment at which their records are ready.

The simulator leaves out attention, sampling, CUDA graphs, and vLLM's own prefix cache.  Sketch: (rounds - 1) / rounds
of the tokens in whole chunks of documents can come from the cache; the rest is computed.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import WAIT_S, compared, median_spread, percentile, scratch, wait_until
from benchmarks.gpu import CHUNK_TOKENS, LayerProducts, on_gpu, require_cupy, require_gpu
from benchmarks.raw_session import start_faulted, status
from kvstrata.cli.bench import serve
from kvstrata.client import Identity, StoreJob
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.device import DeviceMover
from kvstrata.connectors.vllm.metadata import Store
from tests.harness.gpu_engine import Cache, GpuEngine, Request, Step
from tests.harness.gpu_kv import SHAPES, Device, Shape
from tests.harness.server_process import ServerProcess

DOCUMENTS = 16
DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 6000, 64, 64
ROUNDS = 3
PER_S = 4.0
BUDGET_TOKENS = 2048
MAX_RUNNING = 64
BLOCK_TOKENS = 16
RUNNING_PROMPTS = 8
"""Requests whose KV, documents included, fits into the GPU's blocks at the same time."""
POOL_SHARE = 1.2
"""The pool's bytes for each byte of the documents' KV."""
VOCABULARY = range(1000, 32_000)
PIN_S = 600.0


class Run(NamedTuple):
    """The result of one run of the traffic."""

    requests: list[Request]
    steps: list[Step]
    seconds: float
    lags_s: list[float]


class WatchedMover(DeviceMover):
    """A mover that notes the time at which the records of each store became ready."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.ready: list[tuple[StoreJob, float]] = []
        self.begun: list[StoreJob] = []
        self._jobs: queue.SimpleQueue[StoreJob | None] = queue.SimpleQueue()
        self._watcher = threading.Thread(target=self._watch, name="stores")
        self._watcher.start()

    def store(self, identity: Identity, store: Store, blocks: Sequence[Sequence[int]]) -> StoreJob:
        """Begin a store and watch it; see `DeviceMover.store`."""
        job = super().store(identity, store, blocks)
        self.begun.append(job)
        self._jobs.put(job)
        return job

    def _watch(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.done.wait(WAIT_S)
            self.ready.append((job, time.perf_counter()))

    def close(self) -> None:
        """Wait until all stores have ended, then close."""
        self._jobs.put(None)
        self._watcher.join()
        super().close()


def traffic(
    engine: GpuEngine, workload: list[list[serve.Request]], *, per_s: float, seed: int
) -> tuple[list[Request], float, dict[int, float]]:
    """Send all rounds, each after the last one has ended; return requests, seconds, and the end of each store's step.

    Within a round the requests arrive at random times, `per_s` of them a second on average.
    """
    chance = random.Random(seed)
    requests, ends_s = [], {}
    mover = engine.cache.mover if isinstance(engine.cache, Cache) else None
    begun_s = time.perf_counter()
    for sent in workload:
        at_s = time.perf_counter()
        coming = []
        for one in sent:
            at_s += chance.expovariate(per_s)
            coming.append((at_s, one))
        coming.reverse()
        while coming or not engine.idle or engine.cache.busy:
            now_s = time.perf_counter()
            while coming and coming[-1][0] <= now_s:
                arrived_s, one = coming.pop()
                requests.append(engine.submit(one.prompt(seed, VOCABULARY), one.output_tokens, arrived_s))
            if engine.idle and not engine.cache.busy:
                time.sleep(max(0.0, coming[-1][0] - now_s))
                continue
            engine.step()
            if isinstance(mover, WatchedMover):
                ended_s = time.perf_counter()
                ends_s.update({id(job): ended_s for job in mover.begun[len(ends_s) :]})
    return requests, time.perf_counter() - begun_s, ends_s


def run_traffic(
    device: Device,
    shape: Shape,
    workload: list[list[serve.Request]],
    settings: ClientSettings | None,
    products: Callable[[int], None],
    *,
    pool_bytes: int = 0,
    num_blocks: int,
    budget_tokens: int = BUDGET_TOKENS,
    block_tokens: int = BLOCK_TOKENS,
    per_s: float = PER_S,
    checks: bool = False,
) -> tuple[Run, dict[str, Any]]:
    """Run the traffic on an engine of its own, with a cache if `settings` is given; also return how KV was copied."""
    more: dict[str, Any] = {"mover": WatchedMover} if settings is not None else {}
    engine = GpuEngine(
        settings,
        shape=shape,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        budget_tokens=budget_tokens,
        max_running=MAX_RUNNING,
        products=products,
        checks=checks,
        write_tokens=checks,
        device=device,
        **more,
    )
    cache = engine.cache
    try:
        if not isinstance(cache, Cache):
            requests, seconds, _ = traffic(engine, workload, per_s=per_s, seed=1)
            engine.settle()
            return Run(requests, engine.steps, seconds, []), {}
        cache.connect()
        stats = cache.client.stats
        wait_until(
            lambda: bool(stats()["pin_refusal"]) or int(stats()["pinned_bytes"]) >= pool_bytes,
            "the pool is pinned",
            PIN_S,
        )
        requests, seconds, ends_s = traffic(engine, workload, per_s=per_s, seed=1)
        engine.settle()
        assert isinstance(cache.mover, WatchedMover)
        wait_until(lambda: len(cache.mover.ready) == len(cache.mover.begun), "all stores have ended")
        lags_s = [
            max(0.0, ready_s - ends_s[id(job)])
            for job, ready_s in cache.mover.ready
            if "stored" in job.outcomes
        ]
        copies = cache.engine
        copied = {"engine": copies.engine}
        return Run(requests, engine.steps, seconds, lags_s), copied
    finally:
        engine.close()


def figures_of(name: str, bare: Run, cached: Run, **more: Any) -> list[dict[str, Any]]:
    """Return the figures of the same traffic without and with a cache; `more` goes into each."""

    def first_tokens_ms(run: Run) -> list[float]:
        return [1e3 * (one.first_token_s - one.arrived_s) for one in run.requests if one.first_token_s]

    def times(values: Sequence[float]) -> dict[str, float]:
        return {
            "mean": sum(values) / len(values),
            "p50": percentile(values, 0.5),
            "p99": percentile(values, 0.99),
        }

    ours, theirs = times(first_tokens_ms(cached)), times(first_tokens_ms(bare))
    prompts = sum(one.num_prompt_tokens for one in cached.requests)
    share = sum(one.cached_tokens for one in cached.requests) / prompts
    rates = [len(run.requests) / run.seconds for run in (cached, bare)]
    decodes = [step for step in cached.steps if step.decodes and not step.prefill_tokens]
    beside, alone = ([1e3 * s.seconds for s in decodes if s.copies is which] for which in (True, False))
    prefix = "the same traffic with no cache"
    figures = [
        compared(
            f"gpu_engine_ttft_{name}",
            ours["mean"],
            "ms",
            f"{prefix} (how many times as fast)",
            theirs["mean"],
            inverse=True,
            with_cache=ours,
            without=theirs,
            **more,
        ),
        compared(f"gpu_engine_requests_{name}", rates[0], "1/s", prefix, rates[1], **more),
        compared(
            f"gpu_engine_from_cache_{name}", 100 * share, "%", "all tokens of all prompts", 100.0, **more
        ),
    ]
    if beside and alone:
        to = f"{len(alone)} steps that only decode, while nothing is copied"
        middle = median_spread(alone)[0]
        figures.append(
            compared(f"gpu_engine_decode_step_{name}", beside, "ms", to, middle, steps=len(beside), **more)
        )
    if cached.lags_s:
        lags = times([1e3 * lag for lag in cached.lags_s])
        step = median_spread([1e3 * step.seconds for step in cached.steps])[0]
        figures.append(
            compared(
                f"gpu_engine_store_lag_{name}",
                lags["p50"],
                "ms",
                "the median step",
                step,
                lags=lags,
                stores=len(cached.lags_s),
                **more,
            )
        )
    return figures


def measure(
    device: Device,
    name: str,
    shape: Shape,
    workload: list[list[serve.Request]],
    products: Callable[[int], None],
    *,
    pool_mb: int,
    chunk_tokens: int = CHUNK_TOKENS,
    more: dict[str, Any],
    **engine: Any,
) -> list[dict[str, Any]]:
    """Measure the figures of one shape; `more` goes into each, `engine` to `run_traffic`."""
    bare, _ = run_traffic(device, shape, workload, None, products, **engine)
    with (
        scratch("gpu-engine") as folder,
        ServerProcess(Path(folder), l1_mb=pool_mb, chunk_tokens=chunk_tokens) as server,
    ):
        start_faulted(server)
        pool_bytes = status(server)["pool"]["extents_bytes"]
        settings = ClientSettings(
            socket_dir=str(server.socket_dir), port=server.port, chunk_size=chunk_tokens
        )
        cached, copied = run_traffic(
            device, shape, workload, settings, products, pool_bytes=pool_bytes, **engine
        )
    return figures_of(
        name,
        bare,
        cached,
        workload=f"{len(workload)} rounds of {len(workload[0])} documents",
        **copied,
        **more,
    )


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    facts = require_gpu()
    require_cupy()
    workload = serve.long_documents(
        DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, rounds=ROUNDS, endpoints=1
    )
    prompt_blocks = -(-(DOCUMENT_TOKENS + QUESTION_TOKENS + ANSWER_TOKENS) // BLOCK_TOKENS)
    tokens = DOCUMENTS * (DOCUMENT_TOKENS + ROUNDS * (QUESTION_TOKENS + ANSWER_TOKENS))
    figures = []
    for name, shape in SHAPES.items():
        device = Device()
        products = LayerProducts(shape, BUDGET_TOKENS, device.computes)
        figures += measure(
            device,
            name,
            shape,
            workload,
            products,
            pool_mb=int(POOL_SHARE * tokens * shape.layers * shape.token_bytes) >> 20,
            num_blocks=1 + RUNNING_PROMPTS * prompt_blocks,
            more=on_gpu(facts),
        )
    return figures
