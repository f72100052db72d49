"""Names and signatures: what the connector takes from vLLM and what it overrides, compared with the running vLLM.

`contract` has this done in a process of its own.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

import kvstrata.connectors.vllm as package

LATER = ("unregister_kv_caches", "restore_kv_caches")
"""Methods of ours that vLLM calls from 0.33 on; see `sleep_calls` for earlier versions."""

NAMES: dict[str, tuple[str, ...]] = {
    "vllm.config.ModelConfig": (
        "get_head_size",
        "get_layers_start_end_indices",
        "get_total_num_kv_heads",
        "is_prefix_caching_supported",
        "use_mla",
    ),
    "vllm.config.VllmConfig": ("max_concurrent_batches", "use_v2_model_runner"),
    "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory": ("_registry",),
    "vllm.distributed.parallel_state": ("get_tp_group",),
    "vllm.forward_context.ForwardContext": ("attn_metadata", "cudagraph_runtime_mode"),
    "vllm.model_executor.layers.attention": ("Attention", "MLAAttention"),
    "vllm.v1.core.block_pool.BlockHashToBlockMap": ("get_one_block",),
    "vllm.v1.core.block_pool.BlockPool": ("free_blocks", "touch"),
    "vllm.v1.core.kv_cache_utils": ("make_block_hash_with_group_id", "resolve_block_hashes"),
    "vllm.v1.kv_cache_interface": (
        "ChunkedLocalAttentionSpec",
        "FullAttentionSpec",
        "MambaSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
    ),
    "vllm.v1.kv_cache_interface.FullAttentionSpec": (
        "block_size",
        "head_size",
        "head_size_v",
        "kv_quant_mode",
        "num_heads",
        "tokens_per_state",
        "unpadded_page_size_bytes",
    ),
    "vllm.v1.kv_cache_interface.KVCacheConfig": ("kv_cache_groups", "num_blocks"),
    "vllm.v1.kv_cache_interface.MambaSpec": (
        "dtypes",
        "mamba_cache_mode",
        "shapes",
        "state_content_size_bytes",
        "tp_replicated",
    ),
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": ("sliding_window",),
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "finished_req_ids",
        "kv_connector_block_state",
        "num_scheduled_tokens",
        "preempted_req_ids",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
    ),
    "vllm.v1.outputs.KVConnectorOutput": (
        "failed_recving",
        "finished_recving",
        "invalid_block_ids",
        "kv_connector_worker_meta",
    ),
}
"""What the connector reads of vLLM where the dry run does not, or would not miss it."""

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "vllm.config.ModelConfig.get_layers_start_end_indices": ((None, None), {}),
    "vllm.config.ModelConfig.get_total_num_kv_heads": ((None,), {}),
    "vllm.config.ModelConfig.get_head_size": ((None,), {}),
    "vllm.distributed.parallel_state.get_tp_group": ((), {}),
    "vllm.v1.core.block_pool.BlockHashToBlockMap.get_one_block": ((None, b""), {}),
    "vllm.v1.core.block_pool.BlockPool.free_blocks": ((None, []), {}),
    "vllm.v1.core.block_pool.BlockPool.touch": ((None, []), {}),
    "vllm.v1.core.kv_cache_utils.make_block_hash_with_group_id": ((b"", 0), {}),
    "vllm.v1.core.kv_cache_utils.resolve_block_hashes": (([], 16, 16), {}),
    "vllm.v1.metrics.utils.create_metric_per_engine": ((None, {}), {}),
}
"""Calls that the dry run does not make: positional and named arguments; the first of a method is its object."""


def import_all() -> list[str]:
    """Import every module of the connector; returns their names. Raises ImportError."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    for name in names:
        importlib.import_module(f"{package.__name__}.{name}")
    return names


def of_vllm(name: str) -> Any:
    """What vLLM's base classes of ours have under this name; None if they have nothing."""
    for base in (KVConnectorBase_V1, SupportsHMA):
        if name in vars(base):
            return vars(base)[name]
    return inspect.getattr_static(KVConnectorBase_V1, name, None)


def unlike(own: Any, theirs: Any) -> str:
    """The difference between the parameters that our method takes and those that vLLM gives; empty if none matters."""
    own, theirs = (getattr(each, "__func__", getattr(each, "fget", each)) for each in (own, theirs))
    if not callable(own) or not callable(theirs):
        return ""
    takes, asked = (list(inspect.signature(each).parameters.values()) for each in (own, theirs))
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes)
    for position, parameter in enumerate(asked):
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        if position >= len(takes) or takes[position].name != parameter.name:
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and open_ended:
                continue
            return f"takes {[p.name for p in takes]}, vLLM gives {[p.name for p in asked]}"
    return ""


def found(path: str) -> Any:
    """What vLLM has under a dotted path. Raises LookupError with the part that is missing."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not has(owner, part):
                raise LookupError(f"{'.'.join(parts[:end])} has no {'.'.join(parts[end:])}")
            owner = getattr(owner, part)
        return owner
    raise LookupError(f"there is no module {parts[0]}")


def has(owner: Any, name: str) -> bool:
    """Whether a module or class has an attribute, or objects of the class have it as a field."""
    fields = [*getattr(owner, "__annotations__", ()), *getattr(owner, "__dataclass_fields__", ())]
    for base in getattr(owner, "__mro__", ()):
        fields += getattr(base, "__annotations__", ())
    return hasattr(owner, name) or name in fields


def compare() -> tuple[int, int, list[str]]:
    """How many names and how many signatures were compared, and what differs from what this connector needs."""
    from kvstrata.connectors.vllm.connector import LMCacheConnectorV1

    import_all()
    differs: list[str] = []
    for path, names in NAMES.items():
        try:
            owner = found(path)
        except LookupError as error:
            differs.append(str(error))
            continue
        differs += [f"{path} has no {name}" for name in names if not has(owner, name)]
    for path, (positional, named) in CALLS.items():
        try:
            inspect.signature(found(path)).bind(*positional, **named)
        except LookupError as error:
            differs.append(str(error))
        except TypeError as error:
            differs.append(f"{path} is called with other arguments than this connector gives: {error}")
    methods = [name for name in vars(LMCacheConnectorV1) if not name.startswith("_")]
    for name in methods:
        theirs = of_vllm(name)
        if theirs is None:
            if name not in LATER:
                differs.append(f"vLLM's connectors have no {name} any more, so it would not be called")
        elif wrong := unlike(vars(LMCacheConnectorV1)[name], theirs):
            differs.append(f"{name} {wrong}")
    differs += [f"vLLM demands a method {name}" for name in sorted(LMCacheConnectorV1.__abstractmethods__)]
    return sum(map(len, NAMES.values())), len(CALLS) + len(methods), differs
