"""The parts of SGLang that our storage touches, without torch: its base class, enums and host pools in host memory.

Written from the published interface; `tests/sglang` compares our storage with SGLang's own classes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import itertools
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

PAGE_TOKENS = 4


class HitPolicy(enum.StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclasses.dataclass
class TransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> TransferResult:
        return cls(0, {})


@dataclasses.dataclass
class Transfer:
    name: str
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES


@dataclasses.dataclass
class Metrics:
    prefetch_pgs: list[int] = dataclasses.field(default_factory=list)
    backup_pgs: list[int] = dataclasses.field(default_factory=list)
    prefetch_bandwidth: list[float] = dataclasses.field(default_factory=list)
    backup_bandwidth: list[float] = dataclasses.field(default_factory=list)


class Storage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        self.__dict__.setdefault("registered_pools", {})[host_pool_name] = host_pool


@dataclasses.dataclass
class Arguments:
    model_path: str = "org/model"
    revision: str | None = None
    tokenizer_path: str | None = "org/model"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    quantization_param_path: str | None = None
    load_format: str = "auto"
    speculative_draft_model_path: str | None = None
    random_seed: int = 0
    weight_version: str = "1"


@dataclasses.dataclass
class StorageConfig:
    """What SGLang tells a storage about its rank."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    model_name: str = "served-name"
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1

    def __post_init__(self) -> None:
        self.extra_config = {"interface_v1": 1, **(self.extra_config or {})}


class Slots(list[int]):
    """Slot numbers, in place of a tensor."""

    def tolist(self) -> list[int]:
        return list(self)


class HostPool:
    """Pages in host memory. With the layout `layer_first` a page has a run for K and one for V in each layer, else one
    each; with `latent` there is no V."""

    dtype = "torch.float16"
    start_layer = 0

    def __init__(
        self,
        layout: str = "page_first",
        *,
        layers: int = 2,
        pages: int = 32,
        latent: bool = False,
        heads: int = 1,
    ) -> None:
        self.layout, self.page_size, self.size = layout, PAGE_TOKENS, pages * PAGE_TOKENS
        self.head_num, self.end_layer = heads, layers
        self._halves, self._layers, self._pages = (1 if latent else 2), layers, pages
        self._token_bytes = heads * 16
        self._memory = ctypes.create_string_buffer(self._halves * layers * self.size * self._token_bytes)

    @property
    def page_bytes(self) -> int:
        return len(self._memory.raw) // self._pages

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """(addresses, lengths) of the runs of these pages."""
        if self.layout == "no_addresses":
            raise ValueError("Unsupported layout: no_addresses")
        addresses, run = [], PAGE_TOKENS * self._token_bytes
        half = self._layers * self.size * self._token_bytes
        base = ctypes.addressof(self._memory)
        for slot in indices.tolist()[::PAGE_TOKENS]:
            if self.layout == "layer_first":
                for layer, part in itertools.product(range(self._layers), range(self._halves)):
                    layer_at = layer * self.size * self._token_bytes
                    addresses.append(base + part * half + layer_at + slot * self._token_bytes)
            else:
                for part in range(self._halves):
                    addresses.append(base + part * half + slot * self._token_bytes * self._layers)
        if self.layout != "layer_first":
            run *= self._layers
        return addresses, [run] * len(addresses)

    def slots(self, first_page: int, n_pages: int = 1) -> Slots:
        return Slots(range(first_page * PAGE_TOKENS, (first_page + n_pages) * PAGE_TOKENS))

    def write(self, page: int, data: bytes) -> None:
        for address, length in sorted(zip(*self.get_page_buffer_meta(self.slots(page)), strict=True)):
            ctypes.memmove(address, data[:length], length)
            data = data[length:]

    def read(self, page: int) -> bytes:
        runs = sorted(zip(*self.get_page_buffer_meta(self.slots(page)), strict=True))
        return b"".join(ctypes.string_at(address, length) for address, length in runs)

    def fill(self, page: int, name: str) -> bytes:
        data = random.Random(name).randbytes(self.page_bytes)
        self.write(page, data)
        return data


def modules(arguments: Arguments) -> Iterator[Any]:
    """Put the double in SGLang's place and yield our class; both are forgotten afterwards."""
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.5.23", "__path__": []},
        "sglang.srt": {"__path__": []},
        "sglang.srt.mem_cache": {"__path__": []},
        "sglang.srt.observability": {"__path__": []},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": Storage,
            "PoolHitPolicy": HitPolicy,
            "PoolTransferResult": TransferResult,
        },
        "sglang.srt.observability.metrics_collector": {"StorageMetrics": Metrics},
        "sglang.srt.runtime_context": {"get_server_args": lambda: arguments},
    }
    ours = "kvstrata.connectors.sglang.storage"
    with pytest.MonkeyPatch.context() as patch:
        for name, values in contents.items():
            module = types.ModuleType(name)
            module.__dict__.update(values)
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, ours, raising=False)
        from kvstrata.connectors.sglang import HiCacheKvstrata

        yield HiCacheKvstrata
        patch.delitem(sys.modules, ours, raising=False)
