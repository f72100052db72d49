"""A tenant's tokens: how many it may use a second on average, and at once.

    take(estimate) ─▶ settle(estimate, used)        settle comes once after each take that was not refused

What is used drains at `tokens_per_s`; a request comes in if its estimate fits below `tokens_burst` beside what is used,
or if nothing is used.  The estimate is the prompt, and what the tenant's answers had on average lately; `settle` puts
what the answer told in its place, so `used_tokens` may exceed the burst, and then the tenant waits for it to drain.

1. `used_tokens` is at least 0, and 0 some time after the last request.
2. Changed settings change what may be used, not what is used.
"""

from __future__ import annotations

import math

from kvstrata.config.gateway_model import GatewayTenantSettings
from kvstrata.gateway.errors import Failure

NEWEST = 0.1
"""Weight of the newest answer in the average."""


class Quota:
    """See the module. Belongs to the event loop."""

    def __init__(self, now_s: float) -> None:
        self._used = 0.0
        self._at_s = now_s
        self._generated = 0.0
        """Tokens of the tenant's answers on average."""

    def used_tokens(self, settings: GatewayTenantSettings, now_s: float) -> float:
        """Return what is used now. A clock that steps back waits."""
        self._drain(settings, now_s)
        return self._used

    def take(self, settings: GatewayTenantSettings, prompt_tokens: int, now_s: float) -> float | Failure:
        """Use the estimate of a request, which is returned; or the refusal. Without a limit nothing is used."""
        if not settings.tokens_per_s:
            return 0.0
        self._drain(settings, now_s)
        estimate = prompt_tokens + self._generated
        excess = self._used + min(estimate, settings.tokens_burst) - settings.tokens_burst
        if excess > 0.0:
            wait_s = max(1, math.ceil(excess / settings.tokens_per_s))
            says = (
                f"tenant {settings.name} may use {settings.tokens_per_s:g} tokens a second, "
                f"{settings.tokens_burst} at once; this request takes about {estimate:.0f}: come again in {wait_s} s"
            )
            return Failure(429, "tenant_tokens", says, retry_after_s=wait_s)
        self._used += estimate
        return estimate

    def settle(self, estimate: float, prompt_tokens: int, generated_tokens: int) -> None:
        """A request has ended, having used so many tokens; none of both if no engine has answered it."""
        if generated_tokens:
            self._generated += NEWEST * (generated_tokens - self._generated)
        if estimate:
            self._used = max(0.0, self._used - estimate + prompt_tokens + generated_tokens)

    def _drain(self, settings: GatewayTenantSettings, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(now_s, self._at_s)
        self._used = max(0.0, self._used - passed_s * settings.tokens_per_s)
