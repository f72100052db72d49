"""Run by the Python of the vLLM environment: the staging path against the direct path, on torch tensors of the host.

Arguments: socket directory. Prints one JSON line per layout: whether each path reads what the other one wrote. The
device's streams and pinned memory are what this cannot show; everything else is the code that a GPU runs.
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


def run(socket_dir: str, name: str, make: Any) -> dict[str, Any]:
    """Store by one path, load by the other, both ways."""
    draw = torch.Generator().manual_seed(len(name))
    tensors = {f"model.layers.{i}.attn": make() for i in range(LAYERS)}
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=draw))
    view = build_view(
        tensors,
        num_blocks=BLOCKS,
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        heads=Heads((0, LAYERS), (0, 4), 1),
        dtype="bfloat16",
    )
    client = CacheClient(
        ClientSettings(socket_dir=socket_dir, chunk_size=CHUNK_TOKENS),
        role=Role.CLIENT,
        layout=LayoutIdentity(model=name, kv_dtype="bfloat16", chunk_tokens=CHUNK_TOKENS),
        group=bytes(15) + bytes([len(name)]),
        engine_slices=1,
        slice=view.slice,
        facts=view.facts,
    )
    client.start()
    plan = CopyPlan(view.section_bases, view.num_blocks, view.block_strides, view.dims, view.run_bytes)
    movers = {"direct": HostMover(client, plan), "staged": StagingMover(client, view, tensors)}
    table = torch.randperm(BLOCKS - 1, generator=draw).add(1).tolist()[: CHUNKS * view.chunk_blocks]
    blocks = [table[i * view.chunk_blocks : (i + 1) * view.chunk_blocks] for i in range(CHUNKS)]
    original = {key: tensor.clone() for key, tensor in tensors.items()}
    found: dict[str, Any] = {"layout": name}
    for seed, (writer, reader) in enumerate(
        (("direct", "staged"), ("staged", "direct"), ("staged", "staged"))
    ):
        identity = client.identity(RequestIdentity(salt=str(seed)))
        deadline_s = time.monotonic() + WAIT_S
        while not (client.connected and identity.ready) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        hasher = identity.hasher()
        hasher.feed(list(range(CHUNKS * CHUNK_TOKENS)))
        store = Store(seed, "r", identity.request, b"", hasher.chain, table, hasher.probe)
        job = movers[writer].store(identity, store, blocks)
        job.done.wait(WAIT_S)
        outcomes = {str(outcome) for outcome in job.outcomes}
        for tensor in tensors.values():
            tensor.zero_()
        call = client.lookup(identity, hasher, request_id="r")
        call.wait(WAIT_S)
        assert call.result.lease is not None, (outcomes, call.result)
        # The engine already has the first block: it must not be written.
        wanted = [[SKIP_BLOCK, *blocks[0][1:]], *blocks[1:]]
        items = [
            LoadItem(hasher.key(i), offset, length, wanted[i])
            for i, (offset, length, *_) in enumerate(EXTENT.iter_unpack(call.result.extents))
        ]
        load = movers[reader].load(call.result.lease, items, sync=True)
        load.wait(WAIT_S)
        equal = all(
            torch.equal(_block(tensors[key], view, block), _block(original[key], view, block))
            for key in tensors
            for block in table[1:]
        )
        skipped = all(not _block(tensors[key], view, table[0]).any() for key in tensors)
        found[f"{writer} to {reader}"] = outcomes == {"stored"} and not load.failed and equal and skipped
        for key, tensor in tensors.items():
            tensor.copy_(original[key])
    for mover in movers.values():
        mover.close()
    client.close()
    return found


def _block(tensor: torch.Tensor, view: Any, block: int) -> torch.Tensor:
    axis = next(index for index, size in enumerate(tensor.shape) if size % BLOCKS == 0)
    pieces = tensor.shape[axis] // BLOCKS
    return tensor.narrow(axis, block * pieces, pieces)


def main() -> None:
    for name, make in layouts().items():
        print(json.dumps(run(sys.argv[1], name, make)), flush=True)


if __name__ == "__main__":
    main()
