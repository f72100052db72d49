"""Lets vLLM's `OffloadingConnector` and `MooncakeConnector` copy on the CPU, where they only know GPUs.

vLLM's engine process imports this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostSpec(CPUOffloadingSpec):
    """vLLM's spec of offloading to the CPU, for KV that is in the memory of the CPU already.

    While the file `hold_file` of its extra config exists, no load ends.
    """

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return HostWorker(kv_caches, Path(self.extra_config["hold_file"]))


class HostWorker(OffloadingWorker):
    """Copies at once; loads are reported, and written, when no `hold` file exists."""

    def __init__(self, kv_caches: Any, hold: Path) -> None:
        self._caches, self._hold = kv_caches, hold
        self._kept: dict[int, list[Any]] = {}
        """Chunk → what its block holds in each tensor of its group."""
        self._ended: list[TransferResult] = []
        self._loads: list[tuple[int, list[tuple[int, int, int]]]] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for group, block, chunk in _pairs(src_spec, dst_spec):
            self._kept[chunk] = [tensor[block].clone() for tensor in self._tensors(group)]
        self._ended.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks to blocks, as soon as no file holds it up."""
        self._loads.append((job_id, _pairs(dst_spec, src_spec)))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that have ended since the last call."""
        if not self._hold.exists():
            loads, self._loads = self._loads, []
            for job_id, pairs in loads:
                for group, block, chunk in pairs:
                    for tensor, kept in zip(self._tensors(group), self._kept[chunk], strict=True):
                        tensor[block] = kept
                self._ended.append(TransferResult(job_id, True))
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: stores have ended when they are submitted."""

    def _tensors(self, group: int) -> list[Any]:
        references = self._caches.group_data_refs[group]
        return [self._caches.tensors[each.tensor_idx].tensor for each in references]


def _pairs(blocks: Any, chunks: Any) -> list[tuple[int, int, int]]:
    """(group, block, chunk) of a transfer; a chunk has one block."""
    groups = [group for group, size in enumerate(blocks.group_sizes) for _ in range(size)]
    each = zip(groups, blocks.block_ids, chunks.block_ids, strict=True)
    return [(group, int(block), int(chunk)) for group, block, chunk in each]


class HostMooncake(MooncakeConnector):
    """vLLM's connector for engines without an accelerator, whose index is all that it asks one for."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        torch.accelerator.current_device_index = lambda: 0
        super().__init__(*arguments, **more)
