"""Who may use the gateway's port, and how much at a time.

1. On loopback, where a client needs no key, `Host` must be a name of this port, and a web page that sends a request
   must be the port's own, as on all our ports (process/http_gate.py).  Otherwise any web page that a user of this
   machine opens could use the engines.
2. With tenants in the settings each request must carry a tenant's key.
3. A tenant's request beyond its rate of requests or of tokens, or its number of requests under way, gets 429 with
   Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kvstrata.config.gateway_model import GatewayTenantSettings
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.marks import BROKE_OFF, CANCELLED, OK
from kvstrata.gateway.metering import Meter
from kvstrata.patience import patience
from kvstrata.process.http_gate import Access

BEARER = b"bearer "
IN_FLIGHT = "tenant_in_flight"
MAX_KEY_BYTES = 4_096
GRACE_S = 0.1
NEWEST = 0.1
"""Weight of the newest answer in the average."""

Headers = Mapping[bytes, bytes]


class Quota:
    """A tenant's tokens: how many it may use a second on average, and at once.

        take(estimate) ─▶ settle(estimate, used)        settle comes once after each take that was not refused

    What is used drains at `tokens_per_s`; a request comes in if its estimate fits below `tokens_burst` beside what is
    used, or if nothing is used.  The estimate is the prompt, and what the tenant's answers had on average lately;
    `settle` puts what the answer told in its place, so `used_tokens` may exceed the burst, and then the tenant waits
    for it to drain.

    1. `used_tokens` is at least 0, and 0 some time after the last request.
    2. Changed settings change what may be used, not what is used.
    """

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


class Tenancy(NamedTuple):
    """What a tenant uses now."""

    in_flight: int
    used_tokens: float


class Tenant:
    """One tenant: its settings, and what it uses now."""

    def __init__(self, settings: GatewayTenantSettings, now_s: float) -> None:
        self.settings = settings
        self.in_flight = 0
        self._left = asyncio.Event()
        """Set when a request has ended."""
        self._tokens = float(settings.burst)
        self._filled_s = now_s
        self._quota = Quota(now_s)

    @property
    def name(self) -> str:
        """Its name in metrics."""
        return self.settings.name

    def enter(self, now_s: float) -> Failure | None:
        """Let a request in, which must `leave`; or the reason why not."""
        most = self.settings.max_in_flight
        if most and self.in_flight >= most:
            says = f"tenant {self.name} has {self.in_flight} requests under way, of at most {most}; wait for one to end"
            return Failure(429, IN_FLIGHT, says, retry_after_s=1)
        rate = self.settings.requests_per_s
        if rate:
            passed_s = max(0.0, now_s - self._filled_s)
            self._tokens = min(float(self.settings.burst), self._tokens + passed_s * rate)
            self._filled_s = now_s
            if self._tokens < 1:
                wait_s = math.ceil((1 - self._tokens) / rate)
                says = f"tenant {self.name} may send {rate:g} requests a second; come again in {wait_s} s"
                return Failure(429, "tenant_rate", says, retry_after_s=wait_s)
            self._tokens -= 1
        self.in_flight += 1
        return None

    def leave(self) -> None:
        """A request that was let in has ended, however."""
        self.in_flight -= 1
        self._left.set()

    def take(self, prompt_tokens: int, now_s: float) -> float | Failure:
        """Use tokens for a request, by an estimate that is returned for `settle`; or the reason why not."""
        return self._quota.take(self.settings, prompt_tokens, now_s)

    def settle(self, estimate: float, prompt_tokens: int, meter: Meter) -> None:
        """A request that took tokens has ended; `prompt_tokens`: of its prompt, if its answer does not tell."""
        if meter.outcome == CANCELLED and meter.engine and not meter.first_s:
            return  # An engine has worked on it, nobody knows how long: the estimate stays.
        told = meter.tokens
        answered = meter.first_s and meter.outcome in (OK, CANCELLED, BROKE_OFF) and not meter.failed_inside
        prompt = told.get("prompt", prompt_tokens) if answered else 0
        generated = told.get("completion", meter.events) if answered else 0
        self._quota.settle(estimate, prompt, generated)

    def uses(self, now_s: float) -> Tenancy:
        """What is used now."""
        return Tenancy(self.in_flight, self._quota.used_tokens(self.settings, now_s))

    async def leaving(self) -> None:
        """Wait for GRACE_S at most until a request has ended.

        A client sees the end of its answer a moment before Envoy's log tells of it here.
        """
        self._left.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience(GRACE_S)):
                await self._left.wait()


class Door:
    """Belongs to the event loop."""

    def __init__(self, access: Access, now_s: Callable[[], float], *, loopback: bool) -> None:
        """`loopback`: only this machine reaches the port."""
        self.access = access
        self._loopback = loopback
        self._now_s = now_s
        self._tenants: dict[bytes, Tenant] = {}
        """By the digest of the key, so that finding one takes the same time whatever is sent."""

    @property
    def knows_tenants(self) -> bool:
        """Whether clients need a key."""
        return bool(self._tenants)

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants."""
        return list(self._tenants.values())

    def uses(self) -> dict[str, Tenancy]:
        """What each tenant uses, by name."""
        now_s = self._now_s()
        return {tenant.name: tenant.uses(now_s) for tenant in self.tenants}

    def set_tenants(self, tenants: Iterable[tuple[GatewayTenantSettings, str]]) -> None:
        """Have exactly these tenants, each with its key; those that stay keep what they use."""
        before = {tenant.name: tenant for tenant in self._tenants.values()}
        self._tenants = {}
        for settings, key in tenants:
            tenant = before.get(settings.name) or Tenant(settings, self._now_s())
            tenant.settings = settings
            self._tenants[_digest(key.encode())] = tenant

    def knows_sender(self, headers: Headers, path: str) -> Failure | None:
        """Rule 1; None: the sender is known, or its key decides."""
        if not self._loopback or self._tenants:
            return None
        if not self.access.knows_host(headers.get(b"host", b"").decode("latin-1")):
            says = "Host: this port does not have that name; add it to http.allowed_hosts of the gateway"
            return Failure(403, "unknown_host", says)
        if not self.access.knows_origin(headers, path):
            says = "Origin: pages of other sites may not use this port; add the site to http.allowed_hosts"
            return Failure(403, "unknown_origin", says)
        return None

    def tenant_of(self, headers: Headers) -> Tenant | Failure | None:
        """The tenant of a request; None if clients need no key."""
        if not self._tenants:
            return None
        text = headers.get(b"authorization", b"")
        key = text[len(BEARER) :].strip() if text[: len(BEARER)].lower() == BEARER else b""
        key = key or headers.get(b"x-api-key", b"")
        if not key:
            return Failure(401, "missing_api_key", "Authorization: send your API key as `Bearer KEY`")
        tenant = self._tenants.get(_digest(key)) if len(key) <= MAX_KEY_BYTES else None
        return tenant or Failure(401, "invalid_api_key", "Authorization: this API key is not known here")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
