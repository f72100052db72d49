"""`groups_copy_store`, `groups_copy_retrieve`: copies of models with several groups, beside one group of as many bytes.

One thread gathers the records of hits, with checksums, and scatters them out again, verified.  Two models, in the
shapes of their large versions:

- gpt-oss: full attention and windows of 128 tokens, 18 layers each.  A record of a window holds the last 8 of a
  chunk's 16 blocks.
- Qwen3-Next: full attention and three groups of states, 12 layers each.  vLLM lets the block of attention grow to 544
  tokens, so that a state fits into it; a state leaves 1.5 % of its block, which is padding that is not copied.

All groups of a model are views of the same memory, in which each block belongs to one group, and blocks are taken in
shuffled order.  The connector's own code makes the views.  One group has the model's layers of full attention alone, in
blocks of 16 tokens.  Model and one group take turns, in buffers that are faulted in and larger than the cache.

Sketch: a byte is read once and written once, whichever group it belongs to, and all runs have 32 KiB or more.  So the
target holds for each group by itself; `ratio` is that of the slowest.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from typing import Any, Literal, NamedTuple

from benchmarks.common import figure, median_spread, sized
from kvstrata.connectors.vllm.groups import CacheGroup, Rule, whole_group
from kvstrata.connectors.vllm.kv_view import Heads, build_view
from kvstrata.connectors.vllm.layer_kinds import LayerKind
from kvstrata.native import copying
from kvstrata.native.copying import CopyEngine, CopyPlan
from kvstrata.native.record import RecordSpec

COPIED_BYTES = sized(384 << 20, 64 << 20)
"""About so many are copied of each model."""
REPEATS = sized(9, 1)
TARGET = 0.9
ALIGNMENT = 64
STATE_BYTES = 32 * 128 * 128 * 2 + 3 * 8192 * 2
"""A layer's state of Qwen3-Next: 32 heads of 128 × 128, and three steps of the convolution, in bfloat16."""


class Tensor(NamedTuple):
    """A layer's tensor as vLLM registers it, of bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = "torch.int8"

    def stride(self) -> tuple[int, ...]:
        """Return the bytes between neighbours, for each axis."""
        return self.strides

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return 1

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


class Part(NamedTuple):
    """One group of a model."""

    name: str
    group: CacheGroup
    heads: int
    token_bytes: int
    """Bytes that one head has for a token, or those of a state."""
    every: int = 1
    """There is a record for so many chunks."""


class Model(NamedTuple):
    """The number of layers of each group, the bytes of a block with its padding, and the groups."""

    layers: int
    page_bytes: int
    parts: list[Part]


GROWN_TOKENS = 544
"""vLLM's block of attention in Qwen3-Next: the next multiple of 16 tokens whose 2,048 bytes each hold a state."""
MODELS = {
    "gpt-oss": Model(
        18,
        16 * 8 * 256,
        [
            Part("full attention", whole_group(16, 256), 8, 256),
            Part("windows", CacheGroup(1, Rule.LAST_WINDOW, 16, 16, 8, 1, 128), 8, 256, every=4),
        ],
    ),
    "Qwen3-Next": Model(
        12,
        GROWN_TOKENS * 2 * 1024,
        [
            Part("grown attention", whole_group(GROWN_TOKENS, GROWN_TOKENS), 2, 1024),
            *(
                Part(
                    f"states {number}",
                    CacheGroup(number, Rule.STATE_AT, GROWN_TOKENS, 1, 1, 1),
                    1,
                    STATE_BYTES,
                    every=4,
                )
                for number in (1, 2, 3)
            ),
        ],
    ),
}


def one_group(model: Model) -> Model:
    """Return a model of nothing but the full attention of `model`, in blocks of 16 tokens."""
    full = model.parts[0]
    part = Part("one group", whole_group(16, 256), full.heads, full.token_bytes)
    return Model(model.layers, 16 * full.heads * full.token_bytes, [part])


def plan_of(model: Model, part: Part, base: int, n_blocks: int) -> CopyPlan:
    """Return the plan that the connector makes of a group's tensors, which lie layer after layer from `base` on."""
    tokens = 1 if part.group.rule is Rule.STATE_AT else part.group.block_tokens
    shape = n_blocks, part.heads, tokens, part.token_bytes
    strides = model.page_bytes, tokens * part.token_bytes, part.token_bytes, 1
    tensors = {
        f"layers.{layer}": Tensor(base + layer * n_blocks * model.page_bytes, shape, strides)
        for layer in range(model.layers)
    }
    content_bytes = part.heads * tokens * part.token_bytes
    kind = LayerKind(part.heads, tokens, content_bytes, ("kv_heads", "tokens", "content"), "NONE", False, ())
    view = build_view(
        tensors,
        num_blocks=n_blocks,
        group=part.group,
        heads=Heads((0, model.layers), (0, part.heads), 1),
        dtype="bfloat16",
        kinds=dict.fromkeys(tensors, kind),
    )
    return view.plan()


class Memory:
    """An engine's blocks, and extents; both are faulted in."""

    def __init__(self) -> None:
        self.size_bytes = COPIED_BYTES + COPIED_BYTES // 4
        self._maps = [mmap.mmap(-1, self.size_bytes) for _ in range(2)]
        noise = os.urandom(1 << 20)
        for buffer in self._maps:
            for at in range(0, self.size_bytes, len(noise)):
                buffer[at : at + len(noise)] = noise[: self.size_bytes - at]
        self.blocks, self.extents = (copying.buffer_address(buffer, writable=True) for buffer in self._maps)

    def close(self) -> None:
        """Unmap the memory."""
        for buffer in self._maps:
            buffer.close()


class Copies:
    """The gathers and scatters of a model's records, group by group."""

    def __init__(self, memory: Memory, model: Model) -> None:
        n_blocks = memory.size_bytes // (model.layers * model.page_bytes)
        free = random.Random(1).sample(range(n_blocks), n_blocks)
        plans = [plan_of(model, part, memory.blocks, n_blocks) for part in model.parts]
        sizes = [
            plan.payload_bytes(part.group.record_blocks)
            for plan, part in zip(plans, model.parts, strict=True)
        ]
        n_chunks = int(
            COPIED_BYTES / sum(size / part.every for size, part in zip(sizes, model.parts, strict=True))
        )
        self._groups: list[tuple[str, CopyPlan, dict[str, list[Any]], int]] = []
        at = memory.extents
        for plan, part, size in zip(plans, model.parts, sizes, strict=True):
            items: dict[str, list[Any]] = {"gather": [], "scatter": []}
            n_records = max(1, n_chunks // part.every)
            for number in range(n_records):
                ids = [free.pop() for _ in range(part.group.record_blocks)]
                key, length = number.to_bytes(32, "little"), plan.record_bytes(len(ids))
                spec = RecordSpec(key, bytes(32), bytes(32), b"", part.group.chunk_tokens)
                items["gather"].append((ids, at, length, spec))
                items["scatter"].append((ids, at, length, (key, bytes(32))))
                at += -(-length // ALIGNMENT) * ALIGNMENT
            self._groups.append((part.name, plan, items, size * n_records))
        assert at <= memory.extents + memory.size_bytes

    def rates(self, engine: CopyEngine, kind: Literal["gather", "scatter"]) -> dict[str, float]:
        """Copy everything; return the GB/s of each group, and of all of them as `all`."""
        rates, all_bytes, all_s = {}, 0, 0.0
        for name, plan, items, size in self._groups:
            started = time.perf_counter()
            outcomes = engine.run(kind, plan, items[kind])
            took_s = time.perf_counter() - started
            if any(outcomes):
                raise RuntimeError(f"a {kind} of {name} failed: {outcomes}")
            rates[name] = size / took_s / 1e9
            all_bytes, all_s = all_bytes + size, all_s + took_s
        return {**rates, "all": all_bytes / all_s / 1e9}


def measure(memory: Memory, engine: CopyEngine, model: Model) -> dict[str, dict[str, list[float]]]:
    """Return the rates of each repeat, by kind of copy and by group, those of one group as `one group`."""
    grouped, single = Copies(memory, model), Copies(memory, one_group(model))
    found: dict[str, dict[str, list[float]]] = {"gather": {}, "scatter": {}}
    for repeat in range(REPEATS + 1):
        for copies in (grouped, single):
            for kind, of_kind in found.items():
                rates = copies.rates(engine, kind)
                if copies is single:
                    del rates["all"]
                for name, rate in rates.items():
                    if repeat:
                        of_kind.setdefault(name, []).append(rate)
    return found


def run() -> list[dict[str, Any]]:
    """Measure both figures."""
    memory, engine = Memory(), CopyEngine(threads=0)
    try:
        found = {name: measure(memory, engine, model) for name, model in MODELS.items()}
    finally:
        engine.close()
        memory.close()
    return [summary(what, kind, found) for what, kind in (("store", "gather"), ("retrieve", "scatter"))]


def summary(what: str, kind: str, found: dict[str, dict[str, dict[str, list[float]]]]) -> dict[str, Any]:
    """Return the figure of one kind of copy: the rate of the slower model's groups, the ratio of the worst group."""
    groups: dict[str, dict[str, Any]] = {}
    whole: dict[str, tuple[float, list[float]]] = {}
    for model, kinds in found.items():
        rates = kinds[kind]
        single = rates.pop("one group")
        whole[model] = median_spread(rates["all"])
        for name, of_group in rates.items():
            ratio, ratio_spread = median_spread([a / b for a, b in zip(of_group, single, strict=True)])
            value, _ = median_spread(of_group)
            groups[f"{model}, {name}"] = {"value": value, "ratio": ratio, "ratio_spread": ratio_spread}
            print(
                f"   {what}: {model}, {name}: {value:.1f} GB/s, {ratio:.2f} × one group "
                f"({ratio_spread[0]:.2f}-{ratio_spread[1]:.2f}) of {median_spread(single)[0]:.1f} GB/s",
                flush=True,
            )
    value, spread = min(whole.values())
    worst = min(groups, key=lambda name: float(groups[name]["ratio"]))
    ratio = groups[worst]["ratio"]
    return figure(
        f"groups_copy_{what}",
        value=value,
        unit="GB/s",
        ratio=ratio,
        ratio_to=f"one group of as many bytes beside it, of the slowest group: {worst}",
        target=f"≥ {TARGET} × one group, each group",
        ok=ratio >= TARGET,
        spread=spread,
        ratio_spread=groups[worst]["ratio_spread"],
        groups=groups,
    )
