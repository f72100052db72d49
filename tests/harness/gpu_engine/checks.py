"""Compares the KV in an engine's blocks with the KV that the tokens determine, in the order of the engine's stream."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstrata.connectors.vllm.metadata import SKIP_BLOCK
from tests.harness.gpu_engine.connector import Request
from tests.harness.gpu_kv import POISON, Device, DeviceKv, Later


class Check(NamedTuple):
    """A part of a block that the stream will read, and the bytes that it must hold."""

    what: str
    block: int
    parts: list[Later]
    wanted: bytes


class BlockChecks:
    """Reads blocks on the engine's stream, compares the bytes after the reads, and poisons free blocks.

    Without `enabled` nothing is read, compared or poisoned.
    """

    def __init__(
        self, device: Device, kv: DeviceKv, counts: collections.Counter[str], *, enabled: bool
    ) -> None:
        self._device = device
        self._kv = kv
        self._counts = counts
        self._enabled = enabled
        self._pending: list[Check] = []
        if enabled:
            kv.poison(range(kv.num_blocks))

    def read(
        self, request: Request, blocks: Sequence[int], end: int, layers: Iterable[int] | None = None
    ) -> list[Check]:
        """Queue reads of the first `end` tokens of a request, in these layers (None: in all)."""
        checks: list[Check] = []
        if not self._enabled:
            return checks
        block_tokens = self._kv.block_tokens
        for layer in range(self._kv.shape.layers) if layers is None else layers:
            for at in range(-(-end // block_tokens)):
                if blocks[at] == SKIP_BLOCK:
                    continue
                last = min(block_tokens, end - at * block_tokens)
                checks.append(
                    Check(
                        f"{request.request_id}: layer {layer}, block {at} of the request",
                        blocks[at],
                        self._kv.read(layer, blocks[at], 0, last),
                        self._kv.expected(request.keys[at], layer, 0, last),
                    )
                )
        return checks

    def expect(self, checks: Iterable[Check]) -> None:
        """Compare these parts at the next `compare`."""
        self._pending += checks

    def last_look(self, request: Request, blocks: Sequence[int], computed_tokens: int) -> None:
        """Read the computed tokens of blocks that their request gives up, then poison the blocks."""
        if self._enabled:
            self.expect(self.read(request, blocks, computed_tokens))
            self._kv.poison(blocks)

    def compare(self) -> None:
        """Wait for the device and compare everything that was read."""
        self._device.finish()
        for check in self._pending:
            found = b"".join(part.raw for part in check.parts)
            what = "poison" if bytes([POISON]) * 16 in found else "wrong"
            assert found == check.wanted, f"{check.what} is {what}"
        self._counts["compared blocks"] += len(self._pending)
        self._pending.clear()
