"""Run by the Python of the vLLM environment: the staging path against the direct path, on torch tensors of the host.

Arguments: socket directory, then `layouts` (one JSON line per layout: whether each path reads what the other one wrote)
or `faults` (one line: what became of jobs that the device or memory failed, or that were cancelled). The device's
streams and pinned memory are what this cannot show; everything else is the code that a GPU runs.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from kvstrata.client import CacheClient, LoadItem
from kvstrata.config.model import ClientSettings
from kvstrata.connectors.vllm.kv_view import Heads, build_view
from kvstrata.connectors.vllm.metadata import SKIP_BLOCK, Store
from kvstrata.connectors.vllm.staging import StagingMover
from kvstrata.connectors.vllm.worker import HostMover
from kvstrata.native.copying import CopyPlan
from kvstrata.types import EXTENT, LayoutIdentity, RequestIdentity, Role

LAYERS, BLOCKS, BLOCK_TOKENS, CHUNK_TOKENS, CHUNKS = 3, 40, 16, 64, 5
WAIT_S = 30.0


def layouts() -> dict[str, Any]:
    """Name → a function that makes one layer's tensor."""

    def make(*shape: int) -> Any:
        return lambda: torch.empty(shape, dtype=torch.bfloat16)

    def permuted(order: tuple[int, ...], *shape: int) -> Any:
        # `shape` is the physical one; the view has its axes in the order the engine names them.
        return lambda: torch.empty(shape, dtype=torch.bfloat16).permute(order)

    return {
        "cpu": make(BLOCKS, 4, BLOCK_TOKENS, 64),
        "flash-attention": make(2, BLOCKS, BLOCK_TOKENS, 4, 32),
        "flash-attention, heads first": permuted((0, 1, 3, 2, 4), 2, BLOCKS, 4, BLOCK_TOKENS, 32),
        "flashinfer": make(BLOCKS, 2, BLOCK_TOKENS, 4, 32),
        "heads outside blocks": permuted((1, 0, 2, 3), 4, BLOCKS, BLOCK_TOKENS, 64),
        "mla": make(BLOCKS, BLOCK_TOKENS, 576),
        "kernel blocks": make(2 * BLOCKS, 4, BLOCK_TOKENS // 2, 64),
    }


class Engine:
    """The blocks of an engine with random KV, a client, and a block table for one prompt of `CHUNKS` chunks."""

    def __init__(self, socket_dir: str, name: str, make: Any) -> None:
        draw = torch.Generator().manual_seed(len(name))
        self.tensors = {f"model.layers.{i}.attn": make() for i in range(LAYERS)}
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=draw))
        self.original = {key: tensor.clone() for key, tensor in self.tensors.items()}
        self.view = build_view(
            self.tensors,
            num_blocks=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            heads=Heads((0, LAYERS), (0, 4), 1),
            dtype="bfloat16",
        )
        self.client = CacheClient(
            ClientSettings(socket_dir=socket_dir, chunk_size=CHUNK_TOKENS),
            role=Role.CLIENT,
            layout=LayoutIdentity(model=name, kv_dtype="bfloat16", chunk_tokens=CHUNK_TOKENS),
            group=bytes(15) + bytes([len(name)]),
            engine_slices=1,
            slice=self.view.slice,
            facts=self.view.facts,
        )
        self.client.start()
        size = self.view.chunk_blocks
        self.table = torch.randperm(BLOCKS - 1, generator=draw).add(1).tolist()[: CHUNKS * size]
        self.blocks = [self.table[i * size : (i + 1) * size] for i in range(CHUNKS)]

    def store(self, mover: Any, salt: str) -> tuple[Any, Any]:
        """Begin to store the prompt under a salt: (job, its hasher)."""
        identity = self.client.identity(RequestIdentity(salt=salt))
        deadline_s = time.monotonic() + WAIT_S
        while not (self.client.connected and identity.ready) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        hasher = identity.hasher()
        hasher.feed(list(range(CHUNKS * CHUNK_TOKENS)))
        store = Store(1, "r", identity.request, b"", hasher.chain, self.table, hasher.probe)
        return mover.store(identity, store, self.blocks), hasher

    def outcomes(self, mover: Any, salt: str) -> set[str]:
        """What became of the chunks of a store."""
        job, _ = self.store(mover, salt)
        if not job.done.wait(WAIT_S) or not job.gathered.is_set():
            return {"never ended"}
        return {str(outcome) for outcome in job.outcomes}

    def lookup(self, salt: str) -> Any:
        """The result of asking for the prompt."""
        identity = self.client.identity(RequestIdentity(salt=salt))
        hasher = identity.hasher()
        hasher.feed(list(range(CHUNKS * CHUNK_TOKENS)))
        call = self.client.lookup(identity, hasher, request_id="r")
        call.wait(WAIT_S)
        return call.result

    def load(self, mover: Any, salt: str) -> Any:
        """Zero all blocks and load the prompt, but for its first block, which the engine is said to have."""
        for tensor in self.tensors.values():
            tensor.zero_()
        hasher = self.client.identity(RequestIdentity(salt=salt)).hasher()
        hasher.feed(list(range(CHUNKS * CHUNK_TOKENS)))
        result = self.lookup(salt)
        assert result.lease is not None, result
        wanted = [[SKIP_BLOCK, *self.blocks[0][1:]], *self.blocks[1:]]
        items = [
            LoadItem(hasher.key(i), offset, length, wanted[i])
            for i, (offset, length, *_) in enumerate(EXTENT.iter_unpack(result.extents))
        ]
        job = mover.load(result.lease, items, sync=True)
        assert job.wait(WAIT_S), "the load never ended"
        return job

    def is_restored(self) -> bool:
        """Whether all blocks but the first one are as they were, and that one was left alone."""
        equal = all(
            torch.equal(self._block(tensor, block), self._block(self.original[key], block))
            for key, tensor in self.tensors.items()
            for block in self.table[1:]
        )
        return equal and all(not self._block(t, self.table[0]).any() for t in self.tensors.values())

    def restore(self) -> None:
        """All blocks as they were."""
        for key, tensor in self.tensors.items():
            tensor.copy_(self.original[key])

    @staticmethod
    def _block(tensor: torch.Tensor, block: int) -> torch.Tensor:
        axis = next(index for index, size in enumerate(tensor.shape) if size % BLOCKS == 0)
        pieces = tensor.shape[axis] // BLOCKS
        return tensor.narrow(axis, block * pieces, pieces)


def both_ways(socket_dir: str, name: str, make: Any) -> dict[str, Any]:
    """Store by one path, load by the other, both ways."""
    engine = Engine(socket_dir, name, make)
    view = engine.view
    plan = CopyPlan(view.section_bases, view.num_blocks, view.block_strides, view.dims, view.run_bytes)
    movers = {
        "direct": HostMover(engine.client, plan),
        "staged": StagingMover(engine.client, view, engine.tensors),
    }
    found: dict[str, Any] = {"layout": name}
    for writer, reader in (("direct", "staged"), ("staged", "direct"), ("staged", "staged")):
        salt = f"{writer} to {reader}"
        stored = engine.outcomes(movers[writer], salt)
        load = engine.load(movers[reader], salt)
        found[salt] = stored == {"stored"} and not load.failed and engine.is_restored()
        engine.restore()
    for mover in movers.values():
        mover.close()
    engine.client.close()
    return found


class OutOfMemory(RuntimeError):
    """As torch says it."""


def faults(socket_dir: str) -> dict[str, Any]:
    """What becomes of jobs that fail or are cancelled, and of those after them."""
    engine = Engine(socket_dir, "faults", layouts()["flash-attention"])
    mover = StagingMover(engine.client, engine.view, engine.tensors)
    slots = mover._free_slots.qsize()
    found: dict[str, Any] = {}

    def refuse(*arguments: Any) -> Any:
        raise OutOfMemory("the device has no memory left")

    def broken(name: str, call: Any) -> Any:
        setattr(mover, name, refuse)
        try:
            return call()
        finally:
            delattr(mover, name)

    found["store that the device fails"] = sorted(broken("_to_host", lambda: engine.outcomes(mover, "a")))
    found["store after it"] = sorted(engine.outcomes(mover, "a"))
    for name, fault in (("memory", "_host_blocks"), ("the device", "_to_device")):
        load = broken(fault, lambda: engine.load(mover, "a"))
        found[f"load that {name} fails"] = sorted(load.failed)
    load = engine.load(mover, "a")
    found["load after them"] = [sorted(load.failed), engine.is_restored()]
    engine.restore()

    real, cancelled = mover._to_host, []

    def cancelled_meanwhile(*arguments: Any) -> Any:
        real(*arguments)
        cancelled.append(None)
        while len(cancelled) < 2:  # by this time the blocks may be somebody else's
            time.sleep(0.001)

    mover._to_host = cancelled_meanwhile  # type: ignore[method-assign]
    job, _ = engine.store(mover, "b")
    while not cancelled:
        time.sleep(0.001)
    job.cancel()
    cancelled.append(None)
    job.done.wait(WAIT_S)
    del mover._to_host  # type: ignore[attr-defined]
    found["store that was cancelled while it was read"] = sorted({str(outcome) for outcome in job.outcomes})
    found["chunks of it that can be hit"] = engine.lookup("b").n_chunks
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        found["slots lost"] = slots - mover._free_slots.qsize()
        found["leases kept"] = len(engine.client.live_lookups())
        if not found["slots lost"] and not found["leases kept"]:
            break
        time.sleep(0.01)
    mover.close()
    engine.client.close()
    return found


def main() -> None:
    socket_dir, what = sys.argv[1:]
    if what == "faults":
        print(json.dumps(faults(socket_dir)), flush=True)
        return
    for name, make in layouts().items():
        print(json.dumps(both_ways(socket_dir, name, make)), flush=True)


if __name__ == "__main__":
    main()
