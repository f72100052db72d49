"""Checks our view of KV caches that vLLM's own code lays out; run by the Python of the vLLM environment.

For every attention backend that can be imported without its device, every cache dtype and every physical layout that it
takes: vLLM makes description, placement and tensors; our view of them is read, blocks are gathered and scattered with
native plans, and compared with what torch says those blocks hold. One JSON line per case.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention.attention import unified_attention_with_output
from vllm.model_executor.layers.attention.mla_attention import unified_mla_attention_with_output
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvstrata.connectors.vllm.build import layers_ask
from kvstrata.connectors.vllm.groups import read_groups
from kvstrata.connectors.vllm.kv_view import Heads, KvView, build_view, chunk_bytes, layer_kinds
from kvstrata.keys.recut import Part, plan_recut
from kvstrata.native.core import CopyEngine, RecordSpec, buffer_address, record_header
from kvstrata.server.recuts.recuts import Place, recut_records

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

LAYERS, BLOCKS, CHUNK_BLOCKS = 3, 11, 2
HEADS, HEAD_SIZE, LATENT = 4, 64, 576
KEY, IDENTITY = b"k" * 32, b"i" * 32
SPEC = RecordSpec(KEY, IDENTITY, b"s" * 32, b"", 1, 1)


class Case(NamedTuple):
    backend: str
    cls: str
    dtype: str
    block_tokens: int
    kernel_tokens: int
    mla: bool = False


CASES = [
    *(Case("flash_attn", "FlashAttentionBackend", "auto", *tokens) for tokens in ((16, 16), (64, 16))),
    Case("flash_attn", "FlashAttentionBackend", "fp8", 32, 32),
    Case("flash_attn_diffkv", "FlashAttentionDiffKVBackend", "auto", 16, 16),
    Case("triton_attn", "TritonAttentionBackend", "auto", 16, 16),
    Case("triton_attn", "TritonAttentionBackend", "fp8_per_token_head", 16, 16),
    Case("triton_attn", "TritonAttentionBackend", "int4_per_token_head", 16, 16),
    Case("flex_attention", "FlexAttentionBackend", "auto", 32, 32),
    Case("turboquant_attn", "TurboQuantAttentionBackend", "turboquant_k8v4", 16, 16),
    Case("cpu_attn", "CPUAttentionBackend", "auto", 128, 32),
    Case("b12x", "B12xPagedAttentionBackend", "auto", 64, 64),
    Case("rocm_attn", "RocmAttentionBackend", "auto", 16, 16),
    Case("mla.flashmla", "FlashMLABackend", "auto", 64, 64, mla=True),
    Case("mla.flashmla", "FlashMLABackend", "auto", 256, 64, mla=True),
    Case("mla.triton_mla", "TritonMLABackend", "fp8", 16, 16, mla=True),
    Case("mla.flashmla_sparse", "FlashMLASparseBackend", "fp8_ds_mla", 64, 64, mla=True),
]
INDEXER = Case("mla.indexer", "DeepseekV32IndexerBackend", "auto", 64, 64, mla=True)


def backend_of(case: Case) -> Any:
    module = importlib.import_module("vllm.v1.attention.backends." + case.backend)
    return getattr(module, case.cls)


def spec_of(case: Case, heads: int = HEADS) -> Any:
    """vLLM's description of a layer, as its attention layers make it, packed as the backend wants it."""
    dtype = torch.bfloat16 if case.dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[case.dtype]
    common = {"block_size": case.block_tokens, "dtype": dtype, "kv_quant_mode": get_kv_quant_mode(case.dtype)}
    if case.mla:
        spec: Any = MLAAttentionSpec(
            num_kv_heads=1,
            head_size=LATENT,
            cache_dtype_str=case.dtype,
            state_content_bytes={"fp8_ds_mla": 656}.get(case.dtype),
            **common,
        )
    else:
        values = HEAD_SIZE // 2 if "diffkv" in case.backend else HEAD_SIZE
        spec = FullAttentionSpec(num_kv_heads=heads, head_size=HEAD_SIZE, head_size_v=values, **common)
    return backend_of(case).customize_spec(spec)


def indexer_spec() -> Any:
    """What DeepSeek V3.2 declares beside its latents: 128 numbers of 8 bits and their scale for each token."""
    return backend_of(INDEXER).customize_spec(
        MLAAttentionSpec(
            block_size=64,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=132,
            dtype=torch.uint8,
            cache_role=SparseCacheRole.INDEXER,
        )
    )


def layouts_of(case: Case) -> list[KVCacheLayout]:
    supported = backend_of(case).supported_kv_cache_layouts()
    return list(KVCacheLayout) if supported is None else list(dict.fromkeys(supported))


class Engine:
    """The KV cache of one worker, of random bytes, and our view of it."""

    def __init__(
        self,
        case: Case,
        layout: KVCacheLayout,
        *,
        kv_heads: tuple[int, int] = (0, HEADS),
        chunk_blocks: int = CHUNK_BLOCKS,
        indexer: bool = False,
    ) -> None:
        heads = kv_heads[1] - kv_heads[0]
        self.case, self.layout = case, layout
        module = SimpleNamespace(
            get_attn_backend=lambda: backend_of(case),
            isa="amx" if case.backend == "cpu_attn" else None,
            _k_scale=torch.tensor(0.5),
            _v_scale=torch.tensor(2.0),
        )
        spec = spec_of(case, heads)
        specs = {f"model.layers.{i}.self_attn.attn": spec for i in range(LAYERS)}
        modules = dict.fromkeys(specs, module)
        if indexer:
            beside = {f"model.layers.{i}.self_attn.indexer.k_cache": indexer_spec() for i in range(LAYERS)}
            modules |= dict.fromkeys(beside, SimpleNamespace(get_attn_backend=lambda: backend_of(INDEXER)))
            specs |= beside
            whole = UniformTypeKVCacheSpecs.from_specs(specs)
            assert whole is not None, "vLLM has these layers in groups of their own"
            self.group = KVCacheGroupSpec(list(specs), whole)
        else:
            self.group = KVCacheGroupSpec(list(specs), spec)
        config = SimpleNamespace(
            attention_config=SimpleNamespace(hisparse_config=None),
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: layout,
                prefix_cache_retention_interval=None,
                num_gpu_blocks_override=BLOCKS,
            ),
        )
        memory = sum(each.page_size_bytes for each in specs.values()) * BLOCKS
        self.config = get_kv_cache_config_from_groups(config, [self.group], memory)
        self.tensors = allocate_kv_cache(
            self.config, torch.device("cpu"), layout, kernel_block_sizes=[case.kernel_tokens]
        )
        for i, tensor in enumerate(self.tensors.values()):
            raw = torch.randint(
                0,
                256,
                (*tensor.shape[:3], tensor.shape[3] * tensor.element_size()),
                dtype=torch.uint8,
                generator=torch.Generator().manual_seed(i),
            )
            tensor.copy_(raw.view(tensor.dtype))
        [group] = read_groups(self.config.kv_cache_groups, case.block_tokens * chunk_blocks, 0)
        self.view: KvView = build_view(
            self.tensors,
            num_blocks=self.config.num_blocks,
            group=group,
            heads=Heads((0, LAYERS), kv_heads, 1),
            dtype=case.dtype,
            kinds=layer_kinds(self.config.kv_cache_groups, modules, lambda *_: "@V"),
        )
        self.plan = self.view.plan()

    def fill(self, kv: torch.Tensor, blocks: list[int]) -> None:
        """Write a chunk of `kv`, (layers, heads, tokens, content), as the attention layers would."""
        heads = slice(*self.view.slice.kv_heads)
        kernel = self.case.kernel_tokens
        pieces = self.case.block_tokens // kernel
        for tensor, layer in zip(self.tensors.values(), kv, strict=True):
            for token in range(kv.shape[2]):
                block = blocks[token // self.case.block_tokens] * pieces
                block += token % self.case.block_tokens // kernel
                tensor[block, :, token % kernel] = layer[heads, token]

    def gather(self, blocks: list[int]) -> bytearray:
        record = bytearray(self.plan.record_bytes(len(blocks)) + 8)
        item = (blocks, buffer_address(record, writable=True), len(record), SPEC)
        assert CopyEngine(threads=0).run("gather", self.plan, [item]) == [0]
        return record

    def block(self, layer: str, block: int) -> bytes:
        """The bytes of one block as torch finds them, axes in the order in which they lie in memory."""
        tensor = self.tensors[layer]
        pieces = tensor.shape[0] // self.config.num_blocks
        block_tensor = tensor[block * pieces : (block + 1) * pieces]
        order = sorted(range(4), key=lambda axis: -tensor.stride(axis))
        return bytes(block_tensor.permute(order).contiguous().view(torch.uint8).flatten().tolist())


def copies_are_right(engine: Engine) -> dict[str, Any]:
    blocks = [7, 2]
    record = engine.gather(blocks)
    address = buffer_address(record, writable=True)
    header = record_header(address, len(record))
    payload = memoryview(record)[header.header_bytes :]
    expected = [b"".join(engine.block(layer, block) for block in blocks) for layer in engine.view.layers]
    gathered = all(
        payload[offset : offset + length] == section
        for (offset, length, _), section in zip(header.sections, expected, strict=True)
    )
    before = {name: tensor.clone() for name, tensor in engine.tensors.items()}
    for tensor in engine.tensors.values():
        tensor.view(torch.uint8).fill_(0)
    item = (blocks, address, len(record), (KEY, IDENTITY))
    scattered = CopyEngine(threads=0).run("scatter", engine.plan, [item]) == [0]
    pieces = next(iter(before.values())).shape[0] // engine.config.num_blocks
    for name, tensor in engine.tensors.items():
        now, then = (t.view(torch.uint8).unflatten(0, (-1, pieces)) for t in (tensor, before[name]))
        rest = [block for block in range(engine.config.num_blocks) if block not in blocks]
        scattered &= bool((now[blocks] == then[blocks]).all()) and not now[rest].any()
    facts = engine.view.facts
    return {
        "gathered": gathered,
        "scattered": scattered,
        "loops": max(len(layer.dims) for layer in engine.view.layers.values()),
        **{name: facts.get(name) for name in ("axes", "quantisation", "makes", "section_makes")},
        "stored": facts.get("stored_dtype"),
        "scales": facts["scales"],
        "chunk_bytes": facts["payload_bytes"] == chunk_bytes(engine.group, CHUNK_BLOCKS),
    }


def results() -> Iterator[dict[str, Any]]:
    # vLLM has latents and the indexer beside them in one cache group.
    for case, indexer in (*((case, False) for case in CASES), (CASES[-1], True)):
        for layout in layouts_of(case):
            backend = backend_of(case).get_name() + (" and indexer" if indexer else "")
            named = {"case": f"{backend} {case.dtype} {case.block_tokens}/{case.kernel_tokens}"}
            named["layout"] = layout.name
            try:
                engine = Engine(case, layout, indexer=indexer)
            except ValueError as error:
                # vLLM itself does not make it: kernel blocks smaller than blocks that are not dense, blocks of
                # several sizes where layers lie outside blocks.
                yield {**named, "vllm_refuses": str(error)}
                continue
            yield {**named, **copies_are_right(engine)}
    yield from recuts()
    yield {"asks": asks()}


def asks() -> dict[str, bool]:
    """For each kind of model: may loads come layer by layer?"""
    attention, latents, indexer = (
        cls.__new__(cls) for cls in (Attention, MLAAttention, DeepseekV32IndexerCache)
    )
    return {
        "attention": layers_ask([attention, attention]),
        "latents": layers_ask([latents]),
        "latents and indexer": layers_ask([latents, indexer]),
        # vLLM's reason: what runs the first two is wrapped in calls of the connector.
        "vllm waits": all(
            any("wait_for_layer_load" in function.__code__.co_names for function in wrappings(op))
            for op in (unified_attention_with_output, unified_mla_attention_with_output)
        ),
    }


def wrappings(function: Any) -> Iterator[Any]:
    """A function and what its decorators wrapped, outermost first."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def recuts() -> Iterator[dict[str, Any]]:
    """Records of two workers of one backend, recut for one worker of another backend and layout."""
    kv = torch.randn(LAYERS, HEADS, 128, 2 * HEAD_SIZE, generator=torch.Generator().manual_seed(7)).bfloat16()
    flash = Case("flash_attn", "FlashAttentionBackend", "auto", 16, 16)
    pairs = [
        (flash, KVCacheLayout.LBNHC, Case("triton_attn", "TritonAttentionBackend", "auto", 64, 64), layout)
        for layout in KVCacheLayout
    ]
    pairs.append((pairs[0][2], KVCacheLayout.BHLNC, flash._replace(block_tokens=64), KVCacheLayout.LBHNC))
    for case, layout, other, other_layout in pairs:
        halves = [
            Engine(case, layout, kv_heads=half, chunk_blocks=128 // case.block_tokens)
            for half in ((0, HEADS // 2), (HEADS // 2, HEADS))
        ]
        whole = Engine(other, other_layout, chunk_blocks=128 // other.block_tokens)
        records = []
        for engine in (*halves, whole):
            blocks = list(range(10, 10 - 128 // engine.case.block_tokens, -1))
            engine.fill(kv, blocks)
            records.append(engine.gather(blocks))
        made = plan_recut(
            [Part(engine.view.slice, engine.view.facts) for engine in halves],
            Part(whole.view.slice, whole.view.facts),
        )
        record = bytearray(len(records[-1]))
        places = [(buffer_address(r, writable=True), len(r), KEY) for r in records[:2]]
        place = Place(made, buffer_address(record, writable=True), len(record), SPEC)
        outcome = recut_records(places, [place])
        yield {
            "recut": f"{case.backend} {layout.name} -> {other.backend} {other_layout.name}",
            "outcome": int(outcome),
            "same": record == records[-1],
            "copies": len(made.copies),
        }


if __name__ == "__main__":
    for result in results():
        print(json.dumps(result), flush=True)
