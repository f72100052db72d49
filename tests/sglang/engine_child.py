"""SGLang's own host pools and cache controller with our storage, in a child process without a model or a GPU.

The child runs SGLang's wheel (tests/tools/fetch_wheels.py) in front of the environment of `vllm_env.py`; none of its
kernels is there.  The bytes of a page follow from its name, so that any process can tell right pages from wrong ones.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

from tests.harness.child import ROOT, Child, serve
from tests.harness.vllm_env import environment

PAGE_TOKENS = 16
PATIENCE_S = 480.0


def child(python: Path, wheel: Path, folder: Path, **variables: str) -> Child:
    """Start a child. `python` has torch, `wheel` is the folder with SGLang; `folder` receives its log and files."""
    folder.mkdir(parents=True, exist_ok=True)
    told = environment(folder / "state")
    told["PYTHONPATH"] = f"{ROOT}:{wheel}:{told['PYTHONPATH']}"
    told["TORCH_EXTENSIONS_DIR"] = f"{wheel}-extensions"  # SGLang's prefetch compiles its hashes at first use
    return Child(
        "tests.sglang.engine_child",
        log=folder / "sglang.log",
        environment={**told, **variables},
        python=python,
    )


def _page_bytes(name: str, length: int) -> bytes:
    return random.Random(name).randbytes(length)


class _Engine:
    """The operations of the child that a test can ask for. One engine at a time; `start` replaces it."""

    def __init__(self) -> None:
        self.controller: Any = None
        self.storage: Any = None
        self.pool: Any = None

    def start(
        self,
        kind: str,
        layout: str,
        extra: dict[str, Any] | None = None,
        tp: tuple[int, int] = (0, 1),
        arguments: dict[str, Any] | None = None,
        heads: int = 2,
    ) -> dict[str, Any]:
        """Make host pools and a controller with our storage as its dynamic one; returns facts about the pool."""
        self.stop()
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.runtime_context import get_parallel

        device, self.pool = _pools(kind, layout, heads)
        allocator = PagedTokenToKVPoolAllocator(256, PAGE_TOKENS, torch.float16, "cpu", device, False)
        for name, value in {"weight_version": "1", **(arguments or {})}.items():
            msgspec.Struct.__setattr__(get_context().server_args, name, value)
        widths = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), tp[1])
        with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, tp_rank=tp[0], pp_rank=0, **widths):
            self.controller = HiCacheController(
                allocator,
                self.pool,
                PAGE_TOKENS,
                torch.distributed.group.WORLD,
                threading.Event(),
                io_backend="direct",
                storage_backend="dynamic",
                prefetch_threshold=PAGE_TOKENS,
                model_name="served-name",
                storage_backend_extra_config={
                    "backend_name": "kvstrata",
                    "module_path": "kvstrata.connectors.sglang",
                    "class_name": "HiCacheKvstrata",
                    **({"interface_v1": 1} if extra is None else extra),
                },
                enable_storage_metrics=True,
            )
        self.storage = self.controller.storage_backend
        cache = self.storage._caches["kv"]
        return {
            "pages": self.pool.page_num,
            "page_bytes": cache.runs.page_bytes,
            "runs": len(cache.runs.run_bytes),
            "zero_copy": self.controller.page_get_func.__name__,
        }

    def wait_connected(self) -> None:
        """Wait until the storage's client has a server."""
        ends_s = time.monotonic() + PATIENCE_S
        cache = self.storage._caches["kv"]
        while not (cache._client.connected and cache._identity.ready):
            assert time.monotonic() < ends_s, cache._client.error
            time.sleep(0.01)

    def stop(self) -> None:
        """Detach the storage, as SGLang does when it ends."""
        if self.controller is not None:
            self.controller.detach_storage_backend()
            self.controller = None

    def set(self, names: list[str], first_page: int = 0) -> list[bool]:
        """Write the pages of these names into the pool and store them by the interface v1."""
        self._fill(names, first_page)
        return list(self.storage.batch_set_v1(names, self._slots(first_page, len(names))))

    def exists(self, names: list[str]) -> int:
        return int(self.storage.batch_exists(names))

    def get(self, names: list[str], first_page: int = 0) -> list[str]:
        """Load pages by the interface v1; for each `right`, `wrong` or `missing`."""
        self._fill(["not loaded"] * len(names), first_page)
        done = self.storage.batch_get_v1(names, self._slots(first_page, len(names)))
        return [
            "missing" if not whole else self._verdict(name, first_page + i)
            for i, (name, whole) in enumerate(zip(names, done, strict=True))
        ]

    def backup(self, tokens: list[int]) -> int:
        """Let SGLang's thread store the pages of a prompt under SGLang's own hashes; returns the tokens it stored."""
        names = self._names(tokens)
        self._fill(names, 0)
        self.controller.write_storage(self._slots(0, len(names)), tokens, hash_value=names)
        return int(self.controller.ack_backup_queue.get(timeout=PATIENCE_S).completed_tokens)

    def prefetch(self, tokens: list[int], first_page: int = 10) -> dict[str, Any]:
        """Let SGLang's threads find and load a prompt; returns tokens found, tokens loaded and each page's verdict."""
        operation = self.controller.prefetch("request", tokens)
        self.controller.prefetch_hit_queue.get(timeout=PATIENCE_S)
        names = list(operation.hash_value)
        self._fill(["not loaded"] * len(names), first_page)
        operation.host_indices = self._slots(first_page, len(names))
        self.controller.prefetch_buffer.put(operation)
        loaded = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=PATIENCE_S)
            if ack.completed_req:
                break
            loaded = int(ack.completed_tokens or 0)
        verdicts = [self._verdict(name, first_page + i) for i, name in enumerate(names)]
        return {"found": operation.storage_hit_count, "loaded": loaded, "verdicts": verdicts}

    def pools(self, names: list[str], states: list[int]) -> dict[str, Any]:
        """Store KV, an indexer and the states of some pages, as a model with several pools does; then find and load."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        _, more = _pools("mha", "page_first", 1)
        _, state = _pools("mla", "page_first", 1)
        self.storage.register_mem_host_pool_v2(self.pool, PoolName.KV)
        self.storage.register_mem_host_pool_v2(more, PoolName.INDEXER)
        self.storage.register_mem_host_pool_v2(state, PoolName.MAMBA)
        ends_s = time.monotonic() + PATIENCE_S
        caches = self.storage._caches
        while not all(each._client.connected and each._identity.ready for each in caches.values()):
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        slots = self._slots(0, len(names))
        set_kv = self.set(names)
        for i, name in enumerate(names):
            for pool in (more, state):
                _write(pool, i, _page_bytes(f"{name} {id(pool)}", _length(pool)))
        kept = [names[i] for i in states]
        where = torch.cat([self._slots(i, 1) for i in states])
        set_v2 = self.storage.batch_set_v2(
            [
                PoolTransfer(PoolName.INDEXER, host_indices=slots, keys=names),
                PoolTransfer(
                    PoolName.MAMBA, host_indices=where, keys=kept, hit_policy=PoolHitPolicy.TRAILING_PAGES
                ),
            ]
        )
        wanted = [
            PoolTransfer(PoolName.INDEXER),
            PoolTransfer(PoolName.MAMBA, keys=["x"], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ]
        found = self.storage.batch_exists_v2([*names, "absent"], wanted)
        moved = self._slots(12, len(names))
        got = self.storage.batch_get_v2([PoolTransfer(PoolName.INDEXER, host_indices=moved, keys=names)])
        right = [
            _read(more, 12 + i) == _page_bytes(f"{name} {id(more)}", _length(more))
            for i, name in enumerate(names)
        ]
        return {
            "set": [*set_kv, *(done for each in set_v2.values() for done in each)],
            "found": found.kv_hit_pages,
            "restorable": found.restorable_prefix_pages,
            "got": got[PoolName.INDEXER],
            "right": right,
        }

    def metrics(self) -> dict[str, list[float]]:
        return dict(vars(self.storage.get_stats()))

    def clear(self) -> str:
        """The error that SGLang logs when an operator asks it to clear the storage."""
        try:
            self.storage.clear()
        except Exception as error:
            return str(error)
        return ""

    def parsed(self, words: list[str]) -> dict[str, Any]:
        """The arguments of a command line, as SGLang's own parser and SGLang's check of the extra config read them."""
        import argparse
        import json

        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser(exit_on_error=False)
        ServerArgs.add_cli_args(parser)
        told = parser.parse_args(words)
        return {
            "page_size": told.page_size,
            "layout": told.hicache_mem_layout,
            "storage": told.hicache_storage_backend,
            "extra": json.loads(told.hicache_storage_backend_extra_config),
        }

    def signatures(self) -> list[str]:
        """Methods of SGLang's base class that ours overrides with other parameters."""
        import inspect

        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

        unlike = []
        for name, theirs in vars(HiCacheStorage).items():
            if not callable(theirs) or name.startswith("__"):
                continue
            ours = getattr(type(self.storage), name)
            if list(inspect.signature(ours).parameters) != list(inspect.signature(theirs).parameters):
                unlike.append(name)
        return unlike

    def _names(self, tokens: list[int]) -> list[str]:
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        return list(get_storage_hash_str(_key(tokens), None, page_size=PAGE_TOKENS))

    def _slots(self, first_page: int, n_pages: int) -> Any:
        return torch.arange(first_page * PAGE_TOKENS, (first_page + n_pages) * PAGE_TOKENS)

    def _fill(self, names: list[str], first_page: int) -> None:
        for i, name in enumerate(names):
            _write(self.pool, first_page + i, _page_bytes(name, _length(self.pool)))

    def _verdict(self, name: str, page: int) -> str:
        return "right" if _read(self.pool, page) == _page_bytes(name, _length(self.pool)) else "wrong"


def _key(tokens: list[int]) -> Any:
    from array import array

    return array("q", tokens)


def _pools(kind: str, layout: str, heads: int) -> tuple[Any, Any]:
    """SGLang's pool of the device, here in host memory, and its host pool."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    common: dict[str, Any] = {"device_capacity_tokens": 256, "start_layer": 0, "end_layer": 3}
    made = {"size": 256, "page_size": PAGE_TOKENS, "dtype": torch.float16, "layer_num": 3, "device": "cpu"}
    placed = (2.0, 0, PAGE_TOKENS, layout)
    if kind == "mla":
        device = MLATokenToKVPool(kv_lora_rank=32, qk_rope_head_dim=8, enable_memory_saver=False, **made)
        info = device._mla_buffer_info()
        return device, MLATokenToKVPoolHost(info, *placed, pin_memory=False, target_layer_num=3, **common)
    device = MHATokenToKVPool(head_num=heads, head_dim=8, enable_memory_saver=False, **made)
    return device, MHATokenToKVPoolHost(device._mha_buffer_info(), *placed, pin_memory=False, **common)


def _length(pool: Any) -> int:
    page = pool.get_data_page(0)
    return int(page.numel() * page.element_size())


def _write(pool: Any, page: int, data: bytes) -> None:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(pool.dtype)
    pool.set_from_flat_data_page(page * PAGE_TOKENS, tensor)


def _read(pool: Any, page: int) -> bytes:
    flat = pool.get_data_page(page * PAGE_TOKENS).contiguous()
    return bytes(flat.view(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    import logging

    import msgspec
    import torch

    logging.basicConfig(level=logging.INFO)
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args(device="cpu").install()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    assert "KVSTRATA_SOCKET_DIR" in os.environ
    engine = _Engine()
    serve(
        {
            name: getattr(engine, name)
            for name in dir(engine)
            if name[0] != "_" and callable(getattr(engine, name))
        }
    )
