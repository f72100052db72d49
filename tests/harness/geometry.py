"""Engines of any geometry without a model: paged blocks as vLLM lays them out, seen by the connector's own view."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstrata.client import CacheClient, LoadItem, StoreJob
from kvstrata.config.client_model import ClientSettings
from kvstrata.connectors.vllm.groups import whole_group
from kvstrata.connectors.vllm.kv_view import Heads, KvView, LayerKind, build_view
from kvstrata.keys import ChunkHasher
from kvstrata.native import core
from kvstrata.types import RequestIdentity, Role, unpack_extents
from tests.harness.cache_engine import PATIENCE_S, eventually, layout_identity
from tests.harness.gpu_kv import ELEMENT_BYTES, Tensor, layer_tensors, strides_of

CHUNK, DIM = 96, 4


@dataclass(frozen=True)
class Geometry:
    """A worker's layers and KV heads, and the layout of its blocks."""

    layers: tuple[int, int]
    heads: tuple[int, int]
    block_tokens: int
    kernel_tokens: int
    layout: str
    scales: tuple[str, ...] = ()
    content: str = "k+v"


class Cache:
    """The blocks of one worker, full of noise, and the tensors that it registers for its layers."""

    def __init__(self, geometry: Geometry, blocks: int, seed: int) -> None:
        self.geometry, self.blocks = geometry, blocks
        first, end = geometry.layers
        pieces = geometry.block_tokens // geometry.kernel_tokens
        heads = geometry.heads[1] - geometry.heads[0]
        shape = (end - first, blocks * pieces, heads, geometry.kernel_tokens, 2 * DIM)
        sizes = dict(zip("LBHNC", shape, strict=True))
        self.strides = strides_of(geometry.layout, sizes)
        self.memory = bytearray(random.Random(seed).randbytes(math.prod(shape) * ELEMENT_BYTES))
        base = core.buffer_address(self.memory, writable=True)
        self.tensors = layer_tensors(base, geometry.layout, sizes, first)

    def place(self, layer: int, block: int, head: int, token: int) -> slice:
        """Return where the K and V of a token of a block lie; layers and heads are those of the model."""
        geometry = self.geometry
        kernel_block = block * (geometry.block_tokens // geometry.kernel_tokens)
        kernel_block += token // geometry.kernel_tokens
        numbers = (
            layer - geometry.layers[0],
            kernel_block,
            head - geometry.heads[0],
            token % geometry.kernel_tokens,
        )
        at = 2 * sum(i * self.strides[axis] for i, axis in zip(numbers, "LBHN", strict=True))
        return slice(at, at + 2 * 2 * DIM)


def view_of(geometry: Geometry, tensors: dict[str, Tensor], blocks: int) -> KvView:
    heads = geometry.heads[1] - geometry.heads[0]
    kind = LayerKind(
        heads=heads,
        block_tokens=geometry.block_tokens,
        page_bytes=heads * geometry.block_tokens * 2 * DIM * 2,
        axes=("kv_heads", "tokens", geometry.content),
        quantisation="NONE",
        latent=False,
        scales=geometry.scales,
    )
    return build_view(
        tensors,
        num_blocks=blocks,
        group=whole_group(geometry.block_tokens, CHUNK),
        heads=Heads(geometry.layers, geometry.heads, 1),
        dtype="bfloat16",
        kinds=dict.fromkeys(tensors, kind),
    )


class Rank:
    """One worker: its blocks, and its client."""

    def __init__(self, engine: GeometryEngine, geometry: Geometry, blocks: int, seed: int) -> None:
        self.geometry = geometry
        self.cache = Cache(geometry, blocks, seed)
        self.view = view_of(geometry, self.cache.tensors, blocks)
        self.plan = self.view.plan()
        self.client = CacheClient(
            ClientSettings(socket_dir=str(engine.socket_dir), chunk_size=CHUNK),
            role=Role.CLIENT,
            layout=layout_identity(CHUNK, engine.model),
            group=engine.group,
            engine_slices=engine.n_slices,
            slice=self.view.slice,
            facts=self.view.facts,
        )
        self.identity = self.client.identity(RequestIdentity(salt=engine.salt))

    def blocks_of(self, chunk: int) -> list[int]:
        per_chunk = CHUNK // self.geometry.block_tokens
        return list(range(chunk * per_chunk, (chunk + 1) * per_chunk))

    def tokens_of(self, chunk: int, key: bytes) -> list[tuple[slice, bytes]]:
        """Return for each layer, head and token of a chunk its place in memory and its right bytes."""
        geometry, found = self.geometry, []
        blocks = self.blocks_of(chunk)
        for layer, head in itertools.product(range(*geometry.layers), range(*geometry.heads)):
            kv = hashlib.shake_128(key + bytes([layer, head])).digest(CHUNK * 4 * DIM)
            for token in range(CHUNK):
                block, rest = divmod(token, geometry.block_tokens)
                place = self.cache.place(layer, blocks[block], head, rest)
                found.append((place, kv[token * 4 * DIM : (token + 1) * 4 * DIM]))
        return found


class GeometryEngine:
    """All workers of one engine, in this process. The KV of a chunk follows from its key, in every geometry."""

    def __init__(
        self,
        socket_dir: Path,
        *,
        heads_by: int = 1,
        layers_by: int = 1,
        block_tokens: int = 16,
        layout: str = "LBHNC",
        layers: int = 4,
        heads: int = 8,
        chunks: int = 6,
        model: str = "a model",
        salt: str = "",
        scales: tuple[str, ...] = (),
    ) -> None:
        """`heads_by`, `layers_by`: tensor- and pipeline-parallel size. `chunks`: most chunks of a prompt."""
        self.socket_dir, self.model, self.salt = socket_dir, model, salt
        self.n_slices = heads_by * layers_by
        self.group = random.randbytes(16)
        self.ranks = [
            Rank(
                self,
                Geometry(
                    (stage * layers // layers_by, (stage + 1) * layers // layers_by),
                    (rank * heads // heads_by, (rank + 1) * heads // heads_by),
                    block_tokens,
                    block_tokens,
                    layout,
                    scales,
                ),
                chunks * CHUNK // block_tokens,
                seed=stage * 100 + rank,
            )
            for stage in range(layers_by)
            for rank in range(heads_by)
        ]

    def __enter__(self) -> GeometryEngine:
        """Wait until all workers are attached, and know of each other."""
        for rank in self.ranks:
            rank.client.start()
        eventually("all workers are attached", lambda: all(rank.client.connected for rank in self.ranks))
        eventually("the identity is ready", lambda: all(rank.identity.ready for rank in self.ranks))
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.client.close()

    def hasher(self, tokens: Sequence[int]) -> ChunkHasher:
        hasher = self.ranks[0].identity.hasher()
        hasher.feed(tokens)
        return hasher

    def stored(self, tokens: Sequence[int]) -> list[str]:
        """Compute and store a prompt; return the outcomes of all chunks, of each worker in turn."""
        hasher = self.hasher(tokens)
        jobs: list[StoreJob] = []
        for rank in self.ranks:
            for chunk in range(hasher.n_chunks):
                for place, kv in rank.tokens_of(chunk, hasher.key(chunk)):
                    rank.cache.memory[place] = kv
            blocks = [rank.blocks_of(chunk) for chunk in range(hasher.n_chunks)]
            jobs.append(
                rank.client.store(rank.identity, b"", hasher.chain, rank.plan, blocks, probe=hasher.probe)
            )
        assert all(job.done.wait(PATIENCE_S) for job in jobs)
        return [str(outcome) for job in jobs for outcome in job.outcomes]

    def hit(self, tokens: Sequence[int], deadline_ms: int = 10_000) -> int:
        """Look a prompt up, load it into all workers, and assert that each byte is right; how many chunks it had."""
        first, hasher = self.ranks[0], self.hasher(tokens)
        call = first.client.lookup(first.identity, hasher, request_id="a request", deadline_ms=deadline_ms)
        assert call.wait(PATIENCE_S)
        result, slices = call.result, first.client.slices
        if not result.n_chunks:
            return 0
        assert result.lease is not None
        for rank in self.ranks:
            rank.cache.memory[:] = bytes(len(rank.cache.memory))
            mine = unpack_extents(result.extents)[slices.index(rank.client.slice_digest) :: len(slices)]
            items = [
                LoadItem(hasher.key(chunk), extent.offset_bytes, extent.length_bytes, rank.blocks_of(chunk))
                for chunk, extent in enumerate(mine)
            ]
            job = rank.client.load(rank.identity, result.lease, items, rank.plan, sync=True)
            assert job.wait(PATIENCE_S) and not job.failed
            for chunk in range(result.n_chunks):
                for place, kv in rank.tokens_of(chunk, hasher.key(chunk)):
                    assert rank.cache.memory[place] == kv, f"chunk {chunk} is wrong in {rank.geometry}"
        return result.n_chunks
