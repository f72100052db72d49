"""vLLM's KV cache groups: which blocks of each group a chunk's record holds, and which chunks of a group a hit needs.

A model's layers form one or more groups.  Each has a rule for the tokens that a hit of n tokens needs:

- `prefix`: all tokens (full attention);
- `last_window`: the last W tokens (sliding windows; attention in chunks of W tokens);
- `state_at`: the state after exactly n tokens (state spaces, linear attention).

Each (chunk, group) has a record of its own.  If a window is shorter than a chunk, the record holds only the blocks at
the chunk's end that the window covers; the record of a state holds the one block with the state after the chunk.

vLLM's objects are read by attribute only; nothing here imports vLLM or torch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstrata.errors import ConfigError
from kvstrata.types import SPAN_FACT

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
"""vLLM's cache kinds that keep every block of a request until it ends."""
WINDOWS = {"SlidingWindowSpec": "sliding_window", "ChunkedLocalAttentionSpec": "attention_chunk_size"}
"""vLLM's cache kinds that keep the last tokens only, and the attribute that has their number."""
STATES = ("MambaSpec",)
"""vLLM's cache kinds whose block holds the state after the block's last token."""


class Rule(enum.StrEnum):
    """Which tokens of a group a hit needs; see the module."""

    PREFIX = "prefix"
    LAST_WINDOW = "last_window"
    STATE_AT = "state_at"


class CacheGroup(NamedTuple):
    """One group of layers, and how chunks of the engine lie in its block table."""

    number: int
    """Index of its block table in vLLM."""
    rule: Rule
    block_tokens: int
    chunk_blocks: int
    """Number of the table's blocks that a chunk covers."""
    record_blocks: int
    """Number of these blocks, from the chunk's end, that a record holds."""
    span: int
    """How many of a hit's last chunks the group needs; 0: all."""
    window_tokens: int = 0
    """Size of the window in tokens, for LAST_WINDOW."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a chunk, of every group of the engine."""
        return self.block_tokens * self.chunk_blocks

    def blocks_of(self, chunk: int, tail_tokens: int = 0) -> range:
        """The indices, in the group's block table, of the blocks in the record of this chunk, or of its tail of
        `tail_tokens`."""
        if tail_tokens:
            return range(
                chunk * self.chunk_blocks, chunk * self.chunk_blocks + tail_tokens // self.block_tokens
            )
        end = (chunk + 1) * self.chunk_blocks
        return range(end - self.record_blocks, end)

    def facts(self) -> dict[str, Any]:
        """The layout facts that the rule adds; none for PREFIX."""
        if self.rule is Rule.PREFIX:
            return {}
        window = [self.window_tokens] if self.rule is Rule.LAST_WINDOW else []
        return {"rule": [self.rule.value, *window], "record_blocks": self.record_blocks, SPAN_FACT: self.span}


def whole_group(block_tokens: int, chunk_tokens: int, number: int = 0) -> CacheGroup:
    """A group of full attention. `chunk_tokens` is a multiple of `block_tokens`."""
    chunk_blocks = chunk_tokens // block_tokens
    return CacheGroup(number, Rule.PREFIX, block_tokens, chunk_blocks, chunk_blocks, 0)


def whole_hits(groups: Sequence[CacheGroup]) -> bool:
    """Whether a hit is useful only as a whole: it must end with a chunk, and if a part cannot be loaded, none is used.

    A partial hit is useful only if all KV is in one group with full attention.  In other engines vLLM accepts failures
    of whole requests, not of blocks, and only of asynchronous loads.
    """
    return len(groups) > 1 or groups[0].rule is not Rule.PREFIX


def layer_specs(group: Any) -> list[Any]:
    """The description of each layer of a group: vLLM gives one for all, or one for each."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(each.values()) if each else [group.kv_cache_spec] * len(group.layer_names)


def read_groups(groups: Sequence[Any], chunk_tokens: int, default_tokens: int) -> list[CacheGroup]:
    """The groups of `KVCacheConfig.kv_cache_groups`. Raises ConfigError for a group that is not supported.

    `chunk_tokens` is the configured size of a chunk.  If it does not fit all groups, and is the default
    (`default_tokens`), another size is chosen; otherwise ConfigError names possible sizes.
    """
    if not groups:
        raise ConfigError("kv_cache_groups: vLLM announces no KV cache", field="kv_cache_groups")
    kinds = [_rule(number, group) for number, group in enumerate(groups)]
    blocks = [int(group.kv_cache_spec.block_size) for group in groups]
    chunk_tokens = suitable_chunk(
        chunk_tokens, default_tokens, blocks, exact=any(rule is Rule.STATE_AT for rule, _ in kinds)
    )
    return [
        _group(number, rule, window, block_tokens, chunk_tokens)
        for number, ((rule, window), block_tokens) in enumerate(zip(kinds, blocks, strict=True))
    ]


def _rule(number: int, group: Any) -> tuple[Rule, int]:
    """The rule of a group, and the tokens of its window."""
    found: set[tuple[Rule, int]] = set()
    for spec in layer_specs(group):
        kind = type(spec).__name__
        _check_layer(number, kind, spec)
        if kind in FULL:
            found.add((Rule.PREFIX, 0))
        elif kind in WINDOWS:
            # Draft layers that read several tokens back retain that many more tokens than the window.
            extra = int(getattr(spec, "extra_retained_tokens", 0))
            found.add((Rule.LAST_WINDOW, int(getattr(spec, WINDOWS[kind])) + extra))
        else:
            found.add((Rule.STATE_AT, 0))
    if len(found) != 1:
        rules = ", ".join(sorted(f"{rule} {tokens}" if tokens else str(rule) for rule, tokens in found))
        raise ConfigError(
            f"kv_cache_groups[{number}]: its layers follow different rules ({rules}), which is not supported; run this "
            "model without this connector",
            field="kv_cache_groups",
        )
    return found.pop()


def _check_layer(number: int, kind: str, spec: Any) -> None:
    where = f"kv_cache_groups[{number}]"
    if kind not in (*FULL, *WINDOWS, *STATES):
        raise ConfigError(
            f"{where}: {kind} is not supported so far (supported: {', '.join((*FULL, *WINDOWS, *STATES))}), so run "
            "this model without this connector",
            field="kv_cache_groups",
        )
    if getattr(spec, "non_causal", False):
        raise ConfigError(
            f"{where}: attention is not causal (prefix-LM), so the KV of a token depends on later tokens and must not "
            "be reused; run this model without this connector",
            field="kv_cache_groups",
        )
    if kind in STATES:
        if spec.mamba_cache_mode != "align":
            raise ConfigError(
                f"{where}: vLLM keeps no states at block boundaries (mamba_cache_mode is {spec.mamba_cache_mode!r}); "
                "start vLLM with --enable-prefix-caching, or run this model without this connector",
                field="kv_cache_groups",
            )
        return
    per_state = getattr(spec, "tokens_per_state", 1)
    if per_state != 1:
        raise ConfigError(
            f"{where}: {per_state} tokens per stored state are not supported so far, only 1",
            field="kv_cache_groups",
        )


def suitable_chunk(chunk_tokens: int, default_tokens: int, blocks: Sequence[int], *, exact: bool) -> int:
    """The size of a chunk: a multiple of every group's block; with `exact`, the smallest one.

    `chunk_tokens` is the configured size.  If it does not fit and is the default, another size is chosen, else
    ConfigError names a possible one.  vLLM keeps states at multiples of the smallest size, and a hit must end at a kept
    state.
    """
    smallest = math.lcm(*blocks)
    if not chunk_tokens % smallest and not (exact and chunk_tokens != smallest):
        return chunk_tokens
    better = smallest if exact else -(-chunk_tokens // smallest) * smallest
    if chunk_tokens == default_tokens:
        return better
    sizes = f"block_size of {blocks[0]} tokens" if len(set(blocks)) == 1 else f"block sizes {blocks}"
    if exact:
        raise ConfigError(
            f"chunk_size: {chunk_tokens} tokens, but vLLM keeps the states of this model every {smallest} tokens; set "
            f"chunk_size to {smallest}, or leave it out",
            field="chunk_size",
        )
    raise ConfigError(
        f"chunk_size: {chunk_tokens} tokens is not a multiple of vLLM's {sizes}; set chunk_size to {better}, or "
        f"give vLLM a --block-size that divides {chunk_tokens}",
        field="chunk_size",
    )


def _group(number: int, rule: Rule, window: int, block_tokens: int, chunk_tokens: int) -> CacheGroup:
    chunk_blocks = chunk_tokens // block_tokens
    if rule is Rule.PREFIX:
        return whole_group(block_tokens, chunk_tokens, number)
    if rule is Rule.STATE_AT:
        return CacheGroup(number, rule, block_tokens, chunk_blocks, 1, 1)
    if window >= chunk_tokens:
        span, record_blocks = -(-window // chunk_tokens), chunk_blocks
    else:
        span, record_blocks = 1, min(chunk_blocks, -(-window // block_tokens))
    return CacheGroup(number, rule, block_tokens, chunk_blocks, record_blocks, span, window)
