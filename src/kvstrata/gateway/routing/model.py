"""The inputs of a routing decision, and the decision. All of them encode to JSON, so a decision can be replayed.

Times are seconds of the caller's monotonic clock; token counts of prefixes count from the prompt's start.  An
`EngineState` is changed in place by its owner, `queues.Queue`; `choose` only reads it.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Tier = Literal["l0", "l1", "l2", "peer"]
"""Where KV is, seen from an engine: its own cache, its instance's L1, its instance's L2, another instance."""

Certainty = Literal["exact", "degraded", "predicted", "unconfirmed"]
"""Evidence of a copy: an event; an event after which others may have been lost; a request in flight that computes it;
a request that was sent there, whose event has not come yet."""

Reason = Literal["lowest_cost", "near_tie", "only_eligible", "none_eligible"]
"""Reason of a choice: the lowest cost; a hash among engines with nearly equal costs; one candidate; no candidate."""


Role = Literal["both", "prefill", "decode"]
"""An engine's role: both; only compute prompts that others answer; answer, and compute prompts only for itself."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `number` counts the requests of a gateway; the id decides near-ties."""

    id: str
    tokens: int
    """Number of the prompt's tokens; at least 1."""
    number: int = 0
    session: str = ""
    """Name of the conversation; empty: the client gave none."""
    answer_tokens: float = 0.0
    """Expected length of the answer; 0: unknown."""
    short_tokens: float = 0.0
    """Harmonic mean of answers' lengths: a stall adds to an answer's time per token in proportion to 1 / length."""
    sharing: int = 0
    """Number of requests in flight that share the longest prefix of this prompt that an engine has."""
    within_s: float = 0.0
    """Time left until its first token is due, by its class of service; 0: no limit."""
    token_within_s: float = 0.0
    """Limit of its class on the time per further token; 0: no limit."""


class LoadPath(msgspec.Struct, kw_only=True):
    """Measured speed of an engine's loads from one tier: a single load takes `latency_s + tokens / tokens_s`."""

    latency_s: float
    tokens_s: float
    free_s: float = 0.0
    """Time at which the loads under way over the same link are expected to have ended."""


SLOW_DOUBT = 0.1
"""Assumed standard deviation of an answer's time per token, as a share of its class's limit."""
SQRT_HALF = math.sqrt(0.5)
NEVER_S = 1e18
"""A time that never comes; JSON has no infinity."""


class EngineState(msgspec.Struct, kw_only=True):
    """One engine or rank. The counters are the gateway's own; the engine is not polled for them."""

    name: str
    prefill_tokens_s: float
    """Prefill rate, measured or assumed (`rates.PrefillRates`); more than 0."""
    token_s: float = 0.0
    """Measured time per token of an answer, with one more request in flight than now."""
    pace_s: float = 0.0
    """`token_s` with the stalls by prompts computed beside answers, at the rate of the last SHARE_S."""
    jitter_s: float = 0.0
    """Prompts of different lengths stall answers at random times, so the time of n tokens has the standard deviation
    √n times this, besides SLOW_DOUBT."""
    drained_s: float = 0.0
    """Time at which it is expected to have computed all prompts sent to it."""
    behind_s: float = 0.0
    """Prefill seconds of all waiting requests but the oldest: until that has its first token, the others are not
    computed, whatever `drained_s` says."""
    late_s: float = NEVER_S
    """Time at which it is expected to have computed all waiting prompts, counted from the last first token."""
    prefill_tokens: int = 0
    """Sum of uncached tokens over the waiting requests."""
    inflight_tokens: int = 0
    """Sum of uncached tokens over all requests in flight."""
    requests: int = 0
    """Number of requests in flight: sent and not ended."""
    waiting: int = 0
    """Number of requests in flight without a first token."""
    running: int = 0
    """Number of requests in flight that have their first token."""
    role: Role = "both"
    instance: str = ""
    """The instance (`lmcache-server`) that it is attached to; empty: unknown."""
    limited: int = 0
    """Number of requests in flight whose class limits the time per token; below, each counts with their mean limit."""
    missed: float = 0.0
    """How many of them are expected to miss the limit once one more request is in flight."""
    crowded: float = 0.0
    """The part of `missed` that the one more request causes."""
    spare: float = 0.0
    strain: float = 0.0
    """Beside a prompt of s seconds, `limited` · ½ erfc(`spare` - `strain` · s) of them are expected to miss it."""
    paths: dict[Tier, LoadPath] = {}
    """Speed of loads by tier; the engine cannot load from a tier that is missing."""

    def queue_s(self, now_s: float) -> float:
        """Return the expected time until the engine has computed all prompts sent to it.

        An engine that is late with all of them is expected to need as long again as it is late.
        """
        return max(self.drained_s - now_s, self.behind_s) + max(0.0, now_s - self.late_s)

    def expect(
        self, each_s: float, stalls: float, prompt_size_s: float, limit_s: float, answer_tokens: float
    ) -> None:
        """Update the expected pace of answers, and how many requests in flight are expected to miss their limit.

        `each_s`: what one more request adds to `token_s`. `stalls`: ratio of the time for prompts to the time for
        answers; `prompt_size_s`: mean time of such a prompt. `answer_tokens`: mean length of answers; 0: unknown.
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
    """Return x such that ½ erfc(x) is the probability that an answer misses its limit, and x's change per second."""
    each = SQRT_HALF / (SLOW_DOUBT * tokens * limit_s + math.sqrt(tokens) * jitter_s + 1e-9)
    return each * tokens * (limit_s - pace_s), each


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix of the request's prompt that one engine can have from one tier."""

    engine: str
    """Name of the engine; empty: any engine that has a path to the tier."""
    tier: Tier
    tokens: int
    """Length of the prefix from the prompt's start, including the parts in nearer tiers."""
    certainty: Certainty = "exact"
    age_s: float = 0.0
    """Time since the engine's last event (`degraded`), or since the request's first token (`unconfirmed`)."""
    ready_at_s: float = 0.0
    """`predicted`: time at which the request in flight is expected to have computed it."""
    source: str = ""
    """Name of the instance or tier that provides it, for the decision's record."""


class Knowledge(msgspec.Struct, frozen=True, kw_only=True):
    """The known copies of the prompt's KV."""

    cached: dict[str, int] = {}
    """Exact copies in engines' own caches: length of the prefix by engine."""
    copies: list[Copy] = []
    """All other copies."""
    busy: dict[str, float] = {}
    """By peer (`Copy.source`): time at which the planned loads from it are expected to have ended."""
    block_life_s: float = 300.0
    """Measured mean life of a block in an engine's cache."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is to get the prefix: from its own cache and, unless `load_tokens` is 0, by a load."""

    cached_tokens: int
    """Expected length of the prefix that need not be computed."""
    tier: Tier = "l0"
    source: str = ""
    load_tokens: int = 0
    load_s: float = 0.0
    compute_s: float = 0.0
    spared_s: float = 0.0
    """Value of a further copy of the prefix for the next requests, as seconds of prefill."""
    ttft_s: float = 0.0
    """Expected time to first token, by the measured rates."""


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a split at the engine that computes the prompt, from which the answering engine loads it."""

    engine: str
    way: Way
    """How it gets the prompt's prefix; `ttft_s`: expected time until it has computed the prompt."""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that was not chosen, and a lower bound of its cost."""

    engine: str
    cost: float


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of a request, and the reasons. Costs have the policy's unit and compare only within one decision."""

    policy: str
    engine: str
    """Empty: no engine is eligible."""
    reason: Reason
    cost: float = 0.0
    terms: dict[str, float] = {}
    """Parts of the cost, under the policy's own names."""
    way: Way | None = None
    """None: the policy plans no loads."""
    prefill: Leg | None = None
    """None: the engine computes the prompt itself."""
    alternatives: list[Alternative] = []
    """The cheapest other engines, best first."""
    eligible: int = 0
