"""The metrics of a simulated engine under vLLM's names, in Prometheus' text format, by its data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstrata.testing.engine_sim.engine import SimEngine, Totals
from kvstrata.testing.engine_sim.engine_model import PS_PER_S
from kvstrata.testing.engine_sim.requests import SimRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
LABELS = ("model_name", "engine")


class Metrics:
    """Reads the state of all ranks when asked, and keeps histograms of the requests that have ended.

    Times are those of the engine divided by `speed`, so that they agree with what clients see.
    """

    def __init__(self, engines: Sequence[SimEngine], model: str, speed: float) -> None:
        """`engines`: by rank."""
        self._engines = engines
        self._model = model
        self._ps_per_s = PS_PER_S * speed
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._first_token = self._histogram("time_to_first_token_seconds", FIRST_TOKEN_S)
        self._between = self._histogram("inter_token_latency_seconds", BETWEEN_TOKENS_S)
        self._whole = self._histogram("e2e_request_latency_seconds", REQUEST_S)
        self._queued = self._histogram("request_queue_time_seconds", REQUEST_S)

    def count_of(self, rank: int) -> Callable[[SimRequest], None]:
        """What counts a request that has ended at a rank."""
        histograms = (self._first_token, self._between, self._whole, self._queued)
        first_token, between, whole, queued = (one.labels(self._model, str(rank)) for one in histograms)

        def count(request: SimRequest) -> None:
            times = [at / self._ps_per_s for at in request.token_times_ps]
            arrived = request.arrived_ps / self._ps_per_s
            if times:
                first_token.observe(times[0] - arrived)
            for before, after in pairwise(times):
                between.observe(after - before)
            whole.observe(request.ended_ps / self._ps_per_s - arrived)
            if request.scheduled_ps >= 0:
                queued.observe(request.queued_ps / self._ps_per_s)

        return count

    def text(self) -> bytes:
        """What `/metrics` answers."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The ranks' state, for the registry."""
        gauges: dict[str, Callable[[SimEngine], float]] = {
            "num_requests_running": lambda one: one.running,
            "num_requests_waiting": lambda one: one.waiting,
            "kv_cache_usage_perc": lambda one: one.used_share,
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=LABELS)
            for rank, engine in enumerate(self._engines):
                gauge.add_metric((self._model, str(rank)), value(engine))
            yield gauge
        counters: dict[str, Callable[[Totals], int]] = {
            "prefix_cache_queries": lambda one: one.lookup_tokens,
            "prefix_cache_hits": lambda one: one.cached_tokens,
            "external_prefix_cache_queries": lambda one: one.external_lookup_tokens,
            "external_prefix_cache_hits": lambda one: one.external_tokens,
            "num_preemptions": lambda one: one.preemptions,
            "prompt_tokens": lambda one: one.prompt_tokens,
            "generation_tokens": lambda one: one.answer_tokens,
        }
        for name, total in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=LABELS)
            for rank, engine in enumerate(self._engines):
                counter.add_metric((self._model, str(rank)), total(engine.totals))
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success", "requests that have ended", labels=(*LABELS, "finished_reason")
        )
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "the cache's size", labels=("block_size", "num_gpu_blocks", "engine")
        )
        for rank, engine in enumerate(self._engines):
            for reason, count in engine.totals.ended.items():
                ended.add_metric((self._model, str(rank), reason), count)
            cache.add_metric((str(engine.model.block_tokens), str(engine.model.kv_blocks), str(rank)), 1)
        yield ended
        yield cache

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"vllm:{name}", name.replace("_", " "), LABELS, buckets=buckets, registry=self._registry
        )
