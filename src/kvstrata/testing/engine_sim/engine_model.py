"""The capacity of a simulated engine, and how long its steps take.

A step takes

    step_us + prefill_token_us × prefill tokens + prefill_pair_us × (prefill token, token that it attends to) pairs
            + decode_sequence_us × decoding sequences + decode_context_token_us × tokens that these attend to

Prefill and decode share one step, so each delays the other.  Times are rounded to whole picoseconds before they are
added, so that adding many steps at once gives exactly the same sum as adding them one by one.
"""

from __future__ import annotations

import msgspec

from kvstrata.errors import ConfigError

PS_PER_US = 1_000_000
PS_PER_NS = 1_000
PS_PER_S = 1_000_000_000_000


class EngineModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's limits and speeds. The defaults are computed, not measured: an 8B model in bf16 on one H100.

    Raises ConfigError with the field's name for a value out of range.
    """

    block_tokens: int = 16
    """Tokens of one KV block."""
    kv_blocks: int = 24_576
    """Blocks that requests can use."""
    max_model_tokens: int = 131_072
    """Most tokens of a request, prompt and answer together."""
    max_num_seqs: int = 256
    """Most requests that run at a time."""
    max_num_batched_tokens: int = 8192
    """Most tokens that one step computes."""
    prefix_caching: bool = True
    """Whether requests find blocks that others computed."""
    kv_events: bool = True
    """Whether stored and removed blocks are told."""
    answer_tokens: int = 256
    """Length of an answer that the request's own limit does not cut."""
    step_us: float = 5_500.0
    """What every step takes: weights are read once."""
    prefill_token_us: float = 40.0
    """For each prompt token that is computed."""
    prefill_pair_us: float = 0.0013
    """For each prompt token and each token that it attends to, itself included."""
    decode_sequence_us: float = 20.0
    """For each sequence that computes a single token."""
    decode_context_token_us: float = 0.04
    """For each token that such a sequence attends to."""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "kv_blocks", "max_model_tokens", "max_num_seqs",
                     "max_num_batched_tokens", "answer_tokens"):  # fmt: skip
            _check(name, getattr(self, name), 1, 1 << 31)
        _check("step_us", self.step_us, 1, 1e9)
        for name in (
            "prefill_token_us",
            "prefill_pair_us",
            "decode_sequence_us",
            "decode_context_token_us",
        ):
            _check(name, getattr(self, name), 0, 1e9)
        if self.max_model_tokens > self.kv_blocks * self.block_tokens:
            raise ConfigError(
                f"kv_blocks: {self.kv_blocks} blocks of {self.block_tokens} tokens do not hold one request of "
                f"{self.max_model_tokens} tokens; raise kv_blocks or lower max_model_tokens",
                field="kv_blocks",
            )


class StepCosts:
    """The times of a model in whole picoseconds."""

    def __init__(self, model: EngineModel) -> None:
        self.step = round(model.step_us * PS_PER_US)
        self.prefill_token = round(model.prefill_token_us * PS_PER_US)
        self.prefill_pair = round(model.prefill_pair_us * PS_PER_US)
        self.decode_sequence = round(model.decode_sequence_us * PS_PER_US)
        self.decode_context_token = round(model.decode_context_token_us * PS_PER_US)

    def prefill(self, computed: int, tokens: int) -> int:
        """Time for `tokens` more tokens of a prompt of which `computed` are there."""
        pairs = tokens * computed + tokens * (tokens + 1) // 2
        return tokens * self.prefill_token + pairs * self.prefill_pair

    def decodes(self, sequences: int, context_tokens: int) -> int:
        """Time for one token each of `sequences` that attend to `context_tokens` together."""
        return sequences * self.decode_sequence + context_tokens * self.decode_context_token


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name}: must be from {least:g} to {most:g}, found {value!r}", field=name)
