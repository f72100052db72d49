"""Finds the configuration of vLLM's `MultiConnector` when our connector is one of several in it.

`MultiConnector` gives each of its connectors a copy of vLLM's configuration, whose `kv_transfer_config` is that of the
connector alone.  Settings that vLLM reads from the outer one, such as `kv_load_failure_policy`, are not in the copy.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

OUR_PREFIXES = ("kvstrata.", "lmcache.")


def outer_transfer(vllm_config: VllmConfig) -> Any:
    """The `KVTransferConfig` that vLLM itself reads. Call it only while the connector is made."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, MultiConnector):
            return owner._vllm_config.kv_transfer_config
        frame = frame.f_back
    return vllm_config.kv_transfer_config


def misplaced_notes(vllm_config: VllmConfig) -> list[str]:
    """Lines to log about settings of ours that stand in the configuration of `MultiConnector`, where nobody reads them.

    Call it only while the connector is made.
    """
    outer = outer_transfer(vllm_config)
    if outer is vllm_config.kv_transfer_config:
        return []
    return [
        f"kv_connector_extra_config of MultiConnector: {key} has no effect there: put it into the "
        "kv_connector_extra_config of the entry of this connector"
        for key in outer.kv_connector_extra_config
        if key.startswith(OUR_PREFIXES)
    ]
