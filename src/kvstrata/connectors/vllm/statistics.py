"""The connector's statistics, which vLLM collects and shows in its log and on its /metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvstrata.client.handles import StoreOutcome
from kvstrata.connectors.boundary import guarded
from kvstrata.types import MissReason

COUNTERS = {
    "lookups": "Lookups sent to the cache server.",
    "lookup_hit_tokens": "Prompt tokens that were found in the cache.",
    "lookups_left_out": "Requests not looked up because they need the activations of their whole prompt.",
    "lookup_timeouts": "Lookups that had no answer in time and counted as misses.",
    "leases_revoked": "Leases that waiting requests returned because others needed the space.",
    "loads_sync": "Requests loaded before their forward pass.",
    "loads_async": "Requests loaded during the forward passes of others.",
    "loaded_chunks": "Chunks copied into the engine's blocks.",
    "loaded_bytes": "Bytes copied into the engine's blocks.",
    "load_failed_chunks": "Chunks that failed to load and were computed.",
    "stored_bytes": "Bytes copied out of the engine's blocks.",
    "stores_preempted": "Stores given up because their request was preempted.",
    "late_missed_chunks": "Chunks whose blocks vLLM reused before they were copied into L1, with late stores.",
    "late_overtaken_stores": "Late stores cancelled because vLLM reused their blocks.",
    "late_held_hits": "Steps in which a hit waited for late stores of the blocks that it would take.",
    "copy_dma_workers": "Workers since the start whose KV is copied by the GPU's copy engines.",
    "copy_kernel_workers": "Workers since the start whose KV is copied by a kernel straight on host memory.",
    "pinned_bytes": "Bytes registered with a GPU's driver since the start, summed over all pools.",
    "pin_refusals": "Pools that the driver did not register whole.",
    "errors": "Calls of vLLM that failed inside the connector and were answered as without a cache; see its log.",
    "skipped_prompt_embeds": "Requests computed without the cache because they gave embeddings, not tokens.",
    "skipped_resumable": "Requests computed without the cache because their prompt may still change.",
    "skipped_unnamed_media": "Requests computed without the cache because a medium has an empty identifier.",
    "skipped_counted_media": "Requests computed without the cache because vLLM numbers media instead of hashing them.",
    "skipped_unreadable_adapter": "Requests computed without the cache because their LoRA files cannot be read.",
    "skipped_tenant_invalid": "Requests computed without the cache because kvstrata.tenant was not a valid name.",
    "skipped_tenant_refused": "Requests computed without the cache because the engine may not name their tenant.",
    "skipped_error": "Requests computed without the cache after an error in the connector.",
    "stores_dropped": "Stores given up because a load that they may depend on failed.",
    **{
        f"miss_{reason}": f"Lookups whose first chunk not served was missed as {reason}."
        for reason in MissReason
    },
    **{f"store_{outcome}_chunks": f"Chunks whose store ended as {outcome}." for outcome in StoreOutcome},
}
"""Counts that are exported as counters; others appear in the log only."""


class KvstrataStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one interval; `aggregate` sums over workers and intervals."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, int | float] = {}

    @guarded(None, lambda self, other: self)
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add `other` to this one."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    @guarded({})
    def reduce(self) -> dict[str, int | float]:
        """The counts that vLLM writes to its log."""
        shown = {name: round(amount, 4) for name, amount in sorted(self.data.items())}
        seconds = self.data.get("load_s", 0)
        if seconds:
            shown["load_gb_per_s"] = round(self.data.get("loaded_bytes", 0) / seconds / 1e9, 2)
        return shown

    def is_empty(self) -> bool:
        """Whether all counts are zero."""
        return not self.data


class KvstrataPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters on vLLM's own /metrics, as `vllm:kvstrata_NAME`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:kvstrata_{name}", documentation=meaning, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, meaning in COUNTERS.items()
        }

    @guarded(None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        for name, counter in self._counters.items():
            amount = transfer_stats_data.get(name, 0)
            if amount:
                counter[engine_idx].inc(amount)
