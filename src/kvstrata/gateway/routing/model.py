"""The inputs of a routing decision, and the decision. All of them encode to JSON, so a decision can be replayed.

Times are seconds of the caller's monotonic clock; token counts are of the prompt, from its start.  `EngineState` is
changed in place by its owner, which is `queues.Queue`; `choose` only reads.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Tier = Literal["l0", "l1", "l2", "peer"]
"""Where KV lies, seen from an engine: in its own cache, in its host's pool, behind an adapter, at another host."""

Certainty = Literal["exact", "degraded", "predicted", "unconfirmed"]
"""How a copy is known: by an event; by an event that others may have followed unheard; because a request in flight
computes it; because a request was sent there and no event has come yet."""

Reason = Literal["lowest_cost", "near_tie", "only_eligible", "none_eligible"]
"""Why this engine: its cost; its hash among engines whose costs hardly differ; nothing else was eligible."""


Role = Literal["both", "prefill", "decode"]
"""What an engine does: both; compute prompts whose answers come from others; answer, and compute only its own."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `number` counts the requests of a gateway; the id decides near-ties."""

    id: str
    tokens: int
    """Of the prompt; at least 1."""
    number: int = 0
    session: str = ""
    """Name of the conversation, where the client gave one."""
    answer_tokens: float = 0.0
    """Expected length of the answer; 0: not known."""
    short_tokens: float = 0.0
    """The harmonic mean of answers' lengths: what a stall of one adds to its time per token goes by 1 / length."""
    sharing: int = 0
    """Requests in flight whose prompts begin as far as any engine has this one's."""
    within_s: float = 0.0
    """In which its first token must come, by its class of service; 0: any time is good."""
    token_within_s: float = 0.0
    """In which each further token must come; 0: any time is good."""


class LoadPath(msgspec.Struct, kw_only=True):
    """How fast an engine gets tokens from one tier, as measured: `latency_s + tokens / tokens_s` for a single load."""

    latency_s: float
    tokens_s: float
    free_s: float = 0.0
    """When the loads that go on over the same link should have ended."""


SLOW_DOUBT = 0.1
"""Standard deviation of the seconds of an answer's token, beside its class's limit."""
SQRT_HALF = math.sqrt(0.5)
NEVER_S = 1e18
"""A time that does not come; JSON knows no infinity."""


class EngineState(msgspec.Struct, kw_only=True):
    """One engine. Counters are the router's own, not polled ones."""

    name: str
    prefill_tokens_s: float
    """Measured; more than 0. `rates.PrefillRates` gives one for engines that were not measured yet."""
    token_s: float = 0.0
    """Measured seconds of an answer's token, once one more request is in flight."""
    pace_s: float = 0.0
    """The same, with the prompts that stall it meanwhile, of about the last seconds."""
    jitter_s: float = 0.0
    """Prompts of unlike lengths stall it at random times. The seconds of n tokens have a standard deviation of √n times
    this, beside SLOW_DOUBT."""
    drained_s: float = 0.0
    """When it should have computed what was sent to it."""
    behind_s: float = 0.0
    """Seconds of the waiting requests behind the oldest: as long as that has no first token, these are not computed,
    whatever the estimate says."""
    late_s: float = NEVER_S
    """When it should have computed all that waits, counted from the last first token."""
    prefill_tokens: int = 0
    """Uncached tokens of all requests whose first token has not come, undrained."""
    inflight_tokens: int = 0
    """Uncached tokens of all requests in flight, also of those whose first token has come."""
    requests: int = 0
    """In flight: sent and not ended."""
    waiting: int = 0
    """Of these, the requests whose first token has not come."""
    running: int = 0
    """The others."""
    role: Role = "both"
    instance: str = ""
    """The instance (`lmcache-server`) that it is attached to; empty: not known."""
    limited: int = 0
    """Requests in flight whose class of service limits the time of a token. Each as if it had the mean limit,"""
    missed: float = 0.0
    """so many are expected to miss it once one more is in flight,"""
    crowded: float = 0.0
    """so many of them for that one,"""
    spare: float = 0.0
    strain: float = 0.0
    """and beside a prompt of s seconds `limited` · ½ erfc(`spare` - `strain` · s)."""
    paths: dict[Tier, LoadPath] = {}
    """Tiers without a path cannot be loaded from."""

    def queue_s(self, now_s: float) -> float:
        """Return the seconds until the engine has computed what was sent to it before.

        An engine that should have computed all of it, and has not, is expected to need as long again as it is late.
        """
        return max(self.drained_s - now_s, self.behind_s) + max(0.0, now_s - self.late_s)

    def expect(
        self, each_s: float, stalls: float, prompt_size_s: float, limit_s: float, answer_tokens: float
    ) -> None:
        """Note what stalls answers, and how likely those in flight are to miss their limit for it.

        `each_s`: what one more request adds to `token_s`. `stalls`: seconds in which it computes prompts for each in
        which it answers, in prompts of about `prompt_size_s`. `answer_tokens`: of the answers; 0: nothing is known.
        """
        self.pace_s = self.token_s * (1.0 + stalls)
        self.jitter_s = math.sqrt(self.token_s * stalls * prompt_size_s)
        self.missed = self.crowded = self.strain = 0.0
        self.spare = NEVER_S
        if not self.limited or not answer_tokens:
            return
        before_s = max(0.0, self.token_s - each_s)
        jitter_s = math.sqrt(before_s * stalls * prompt_size_s)
        self.spare, self.strain = spare(answer_tokens, limit_s, self.pace_s, self.jitter_s)
        before, _ = spare(answer_tokens, limit_s, before_s * (1.0 + stalls), jitter_s)
        self.missed = 0.5 * self.limited * math.erfc(self.spare)
        self.crowded = self.missed - 0.5 * self.limited * math.erfc(before)


def spare(tokens: float, limit_s: float, pace_s: float, jitter_s: float) -> tuple[float, float]:
    """Return by how much an answer is within its limit, as ½ erfc of it is how likely it is not, and per second."""
    each = SQRT_HALF / (SLOW_DOUBT * tokens * limit_s + math.sqrt(tokens) * jitter_s + 1e-9)
    return each * tokens * (limit_s - pace_s), each


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix of the request's prompt that one engine can have from one tier."""

    engine: str
    """Empty: any engine that has a path to the tier."""
    tier: Tier
    tokens: int
    """Length of the prefix from the prompt's start, what nearer tiers hold of it included."""
    certainty: Certainty = "exact"
    age_s: float = 0.0
    """`degraded`: since the last event of the engine; `unconfirmed`: since the request was sent."""
    ready_at_s: float = 0.0
    """`predicted`: when the request in flight is expected to have computed it."""
    source: str = ""
    """Who gives it: instance or tier, for the decision to name."""


class Knowledge(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the prompt's KV, already looked up."""

    cached: dict[str, int] = {}
    """Tokens that an engine has in its own cache for certain, by its name; the same as an exact copy in `l0`."""
    copies: list[Copy] = []
    """All else."""
    busy: dict[str, float] = {}
    """When the loads from a peer should have ended, by its name (`Copy.source`)."""
    block_life_s: float = 300.0
    """Measured life of a block in an engine's cache."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine should get the prefix: out of its own cache and, unless `load_tokens` is 0, by a load."""

    cached_tokens: int
    """The prefix that need not be computed if all goes as expected."""
    tier: Tier = "l0"
    source: str = ""
    load_tokens: int = 0
    load_s: float = 0.0
    compute_s: float = 0.0
    spared_s: float = 0.0
    """What a further copy of the prefix is worth."""
    ttft_s: float = 0.0
    """Expected, by the measured rates."""


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """Another engine computes the prompt, and the one that answers loads it from there."""

    engine: str
    way: Way
    """How it gets the prompt's prefix; `ttft_s` is when it will have computed the prompt."""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that was not chosen, and what it would have cost at least."""

    engine: str
    cost: float


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes and why. Costs are in the unit of the policy and compare only within one decision."""

    policy: str
    engine: str
    """Empty if no engine is eligible."""
    reason: Reason
    cost: float = 0.0
    terms: dict[str, float] = {}
    """Parts of the cost, by the policy's own names."""
    way: Way | None = None
    """Only policies that plan loads give one."""
    prefill: Leg | None = None
    """None: the engine computes the prompt itself."""
    alternatives: list[Alternative] = []
    """The cheapest of the others, best first."""
    eligible: int = 0
