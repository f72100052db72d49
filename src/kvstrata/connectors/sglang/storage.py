"""`HiCacheKvstrata`: implements SGLang's storage interface behind its host pool with kvstrata.

SGLang's controller of the hierarchical cache makes one storage in each rank's process and registers its host pools. Its
threads then ask how many pages of a prompt are stored, load pages into the pool, and store pages.  Each pool has a
client and a slice of its own.  Ranks do not coordinate, because SGLang itself takes the minimum over all ranks.

Errors at the start (settings, layouts) reach SGLang and stop its start.  Afterwards no exception reaches it: if the
server is unreachable or our code fails, the pages count as missing.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args

from kvstrata.client import CacheClient
from kvstrata.connectors.boundary import guarded
from kvstrata.connectors.settings import load_settings
from kvstrata.connectors.sglang.identity import KV_POOL, layout_identity, pool_slice
from kvstrata.connectors.sglang.page_cache import PageCache
from kvstrata.connectors.sglang.pages import read_pages
from kvstrata.errors import ConfigError, NotPermitted
from kvstrata.types import Role

logger = logging.getLogger("kvstrata.connectors.sglang")

OPTION = "hicache-storage-backend-extra-config"
SGLANGS_OWN = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"})
"""Names in the extra config that SGLang reads."""
KEPT_SAMPLES = 1024
SMALL_PAGE_BYTES = 64 << 10


def _all_missing(self: Any, keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _all_pools_missing(self: Any, transfers: Sequence[Any], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


class HiCacheKvstrata(HiCacheStorage):  # type: ignore[misc]
    """A storage of SGLang's hierarchical cache: see the module, and docs/engines.md for the command."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """`storage_config` is SGLang's `HiCacheStorageConfig`. Raises ConfigError for unusable settings."""
        extra = {
            name: value
            for name, value in (storage_config.extra_config or {}).items()
            if name not in SGLANGS_OWN
        }
        self._settings, notes = load_settings(extra, os.environ, OPTION)
        for note in notes:
            logger.warning("%s", note)
        if not (storage_config.extra_config or {}).get("interface_v1"):
            raise ConfigError(
                f'{OPTION}: lacks "interface_v1": 1, without which SGLang copies each page once more; add it',
                field="interface_v1",
            )
        if storage_config.dcp_size != 1:
            raise ConfigError(
                f"dcp_size: {storage_config.dcp_size} is not supported, only 1; leave --hicache-storage-backend out",
                field="dcp_size",
            )
        if self._settings.fidelity != "lossless":
            logger.warning(
                "fidelity: %r has no effect with SGLang, whose KV is kept as it is", self._settings.fidelity
            )
        self._config = storage_config
        self._arguments = get_server_args()
        self._caches: dict[str, PageCache] = {}
        self._metrics: dict[str, deque[float]] = (
            {name: deque(maxlen=KEPT_SAMPLES) for name in vars(StorageMetrics())}
            if storage_config.enable_storage_metrics
            else {}
        )

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool with the KV. Raises ConfigError if its layout is not supported."""
        super().register_mem_pool_host(mem_pool_host)
        self._open(KV_POOL, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a further pool (states, windows, indexers). Raises ConfigError if its layout is not supported."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) not in self._caches:
            self._open(str(host_pool_name), host_pool)

    def _open(self, name: str, pool: Any) -> None:
        runs = read_pages(name, pool)
        part, facts = pool_slice(name, pool, runs, self._config, sglang.__version__)
        client = CacheClient(
            self._settings,
            role=Role.CLIENT,
            layout=layout_identity(self._arguments, facts),
            group=secrets.token_bytes(16),
            engine_slices=1,
            slice=part,
            facts=facts,
        )
        client.start()
        wait_s = self._settings.lookup_timeout_ms / 1000
        before = self._caches.pop(name, None)
        self._caches[name] = PageCache(client, runs, tenant=self._settings.tenant, wait_s=wait_s)
        if before is not None:
            before.close()
        logger.info(
            "host pool %s: %d pages of %d tokens and %.2f MiB in %d runs, slice %s",
            *(name, runs.n_pages, runs.page_tokens, runs.page_bytes / (1 << 20), len(runs.run_bytes)),
            part.digest().hex()[:12],
        )
        if name == KV_POOL and runs.page_bytes < SMALL_PAGE_BYTES:
            logger.warning(
                "a page has %d bytes only, so most of the time goes into finding pages; set --page-size to 64 or more",
                runs.page_bytes,
            )

    # The KV of a prompt.

    @guarded(0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many of these pages are stored, counted up to the first that is not."""
        return self._caches[KV_POOL].count(keys) if keys else 0

    @guarded(False)
    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self._caches[KV_POOL].count([key]) == 1

    @guarded([], _all_missing)
    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool; returns for each page whether it is there, whole."""
        return self._load(KV_POOL, keys, host_indices)

    @guarded([], _all_missing)
    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages out of the host pool; returns for each page whether it is stored."""
        return self._store(KV_POOL, keys, host_indices, extra_info)

    # SGLang demands these methods and does not call them with `interface_v1`.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load nothing."""
        return None

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Load nothing."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store nothing."""
        return False

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store nothing."""
        return False

    # Several pools.

    @guarded(PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """The longest prefix of these pages for which each pool has what its policy asks for.

        Of pools that need the last pages of a prefix only, just the pages that L1 has now are counted.
        """
        n_kv = self.batch_exists(keys, extra_info)
        hits = {KV_POOL: n_kv} if n_kv else {}
        usable = set(range(1, n_kv + 1))
        for transfer in pool_transfers or []:
            cache = self._caches.get(str(transfer.name))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                n_pages = cache.count(keys[:n_kv]) if cache is not None and n_kv else 0
                fits = set(range(1, n_pages + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                present = cache.present(keys[:n_kv]) if cache is not None else [False] * n_kv
                tail = max(1, len(transfer.keys or ()))
                fits = {end for end in usable if all(present[max(0, end - tail) : end])}
            else:
                continue  # such a pool never limits the prefix, and gets no verdict
            if fits:
                hits[transfer.name] = max(fits)
            usable &= fits
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    @guarded({}, _all_pools_missing)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Load pages of several pools; returns for each pool and page whether it is there, whole."""
        return {
            each.name: self._load(str(each.name), each.keys or [], each.host_indices) for each in transfers
        }

    @guarded({}, _all_pools_missing)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools; returns for each pool and page whether it is stored."""
        return {
            each.name: self._store(
                str(each.name),
                each.keys or [],
                each.host_indices,
                extra_info if each.hit_policy == PoolHitPolicy.ALL_PAGES else None,
            )
            for each in transfers
        }

    # Control.

    def clear(self) -> None:
        """Refuses, because the server's pages belong to all its engines. SGLang logs the error."""
        raise NotPermitted(
            "the pages of this storage are shared by all engines of the cache server, so SGLang does not clear them; "
            "to do so: kvstrata ctl clear"
        )

    @guarded(None)
    def get_stats(self) -> Any:
        """Pages and GB/s of each call since the last one, if SGLang was started with storage metrics."""
        if not self._metrics:
            return None
        told = StorageMetrics()
        for name, samples in self._metrics.items():
            while samples:
                getattr(told, name).append(samples.popleft())
        return told

    @guarded(None)
    def close(self) -> None:
        """End the clients. Idempotent."""
        while self._caches:
            self._caches.popitem()[1].close()

    # Inside.

    def _load(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        cache = self._caches.get(name)
        pages = _pages(cache, keys, host_indices)
        if cache is None or not pages:
            return [False] * len(keys)
        begun_s = time.perf_counter()
        done = cache.load(keys, pages)
        self._sample("prefetch", cache, sum(done), time.perf_counter() - begun_s)
        return done

    def _store(self, name: str, keys: Sequence[str], host_indices: Any, extra_info: Any) -> list[bool]:
        cache = self._caches.get(name)
        pages = _pages(cache, keys, host_indices)
        if cache is None or not pages:
            return [False] * len(keys)
        before = getattr(extra_info, "prefix_keys", None)
        begun_s = time.perf_counter()
        done = cache.store(keys, pages, before[-1] if before else None)
        self._sample("backup", cache, sum(done), time.perf_counter() - begun_s)
        return done

    def _sample(self, what: str, cache: PageCache, n_pages: int, took_s: float) -> None:
        if self._metrics and n_pages:
            self._metrics[f"{what}_pgs"].append(n_pages)
            self._metrics[f"{what}_bandwidth"].append(n_pages * cache.runs.page_bytes / took_s / 1e9)


def _pages(cache: PageCache | None, keys: Sequence[str], host_indices: Any) -> list[int]:
    """The numbers of the pool's pages that these slots make up; empty if they are not whole pages for these keys."""
    if cache is None or host_indices is None or not keys:
        return []
    slots, size = host_indices.tolist(), cache.runs.page_tokens
    starts = slots[::size]
    whole = len(slots) == len(keys) * size and all(start % size == 0 for start in starts)
    if not whole:
        logger.error("%d slots are not %d whole pages of %d slots", len(slots), len(keys), size)
        return []
    return [start // size for start in starts]
