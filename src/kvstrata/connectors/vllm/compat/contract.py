"""The names of vLLM that the connector reads while it serves, checked once at the start.

Everything else that it needs of vLLM is imported with the connector or read before vLLM is ready, so a missing name
stops the start.  A missing name of NEEDED would cause an error only in the middle of a request; so the cache is turned
off at the start, and one WARNING names what is missing.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

TESTED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""The versions of `make test-versions`."""

NEEDED: dict[str, tuple[str, ...]] = {
    "vllm.forward_context.ForwardContext": ("attn_metadata", "cudagraph_runtime_mode"),
    "vllm.v1.core.block_pool.BlockPool": ("free_blocks", "get_cached_block", "touch"),
    "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue": ("iter_blocks_after",),
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
"""Classes of vLLM, and the attributes or fields of their objects."""

logger = logging.getLogger("vllm.kvstrata")


def is_tested(version: str) -> bool:
    """Whether a version, possibly with a build suffix (`0.32.0+cpu`), is among TESTED."""
    return version.partition("+")[0] in TESTED


def check_vllm(version: str) -> bool:
    """Whether the running vLLM, of this version, has all names of NEEDED; logs one WARNING if not, or if untested."""
    missing = missing_names()
    if missing:
        logger.warning(
            "the cache is off for this engine: vLLM %s has no %s; use one of %s, or a newer kvstrata",
            version,
            ", ".join(missing),
            ", ".join(TESTED),
        )
    elif not is_tested(version):
        logger.warning(
            "vLLM %s is not among the versions that this connector is tested with (%s)",
            version,
            ", ".join(TESTED),
        )
    return not missing


def missing_names() -> list[str]:
    """The names of NEEDED, as dotted paths, that the running vLLM lacks."""
    missing = []
    for path, names in NEEDED.items():
        module, _, kind = path.rpartition(".")
        try:
            owner = getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError):
            missing.append(path)
            continue
        missing += [f"{path}.{name}" for name in names if not _has(owner, name)]
    return missing


def _has(owner: Any, name: str) -> bool:
    """Whether the class has an attribute, or its objects a field, of this name."""
    return hasattr(owner, name) or any(
        name in getattr(base, "__annotations__", ()) for base in getattr(owner, "__mro__", ())
    )
