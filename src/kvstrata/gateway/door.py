"""Access control and rate limits of the gateway's port.

1. On loopback, where a client needs no key, `Host` must be a name of this port, and a web page that sends a request
   must be the port's own, as on all our ports (process/http_gate.py).  Otherwise any web page that a user of this
   machine opens could use the engines.
2. If the settings list tenants, each request must carry a tenant's key.
3. A tenant's request beyond its rate of requests or of tokens, or its number of requests under way, gets 429 with
   Retry-After.  The bytes of its long bodies are bounded too, since such bodies are collected before they are parsed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.config.gateway_model import GatewayTenantSettings
from kvstrata.gateway.envoy.configuration import LENGTH, STREAM, UNSIZED_BYTES, heap_bytes
from kvstrata.gateway.errors import MAX_BODY_BYTES, Failure
from kvstrata.gateway.marks import BROKE_OFF, CANCELLED, OK
from kvstrata.gateway.picker.at_once import in_task
from kvstrata.patience import patience
from kvstrata.process.http_gate import Access

if TYPE_CHECKING:
    from kvstrata.gateway.request import Request

BEARER = b"bearer "
IN_FLIGHT = "tenant_in_flight"
MAX_KEY_BYTES = 4_096
GRACE_S = 0.1
NEWEST = 0.1
"""Weight of the newest answer in the average."""

Headers = Mapping[bytes, bytes]


class Arriving:
    """Long bodies of tenants that Envoy gathers, until it asks for an engine or tells that the request has ended.

    By the lengths that their heads tell, they may take a quarter of Envoy's memory, and a tenant's half of that.
    """

    def __init__(self) -> None:
        self._most = heap_bytes() // 4
        self._bodies: dict[str, tuple[str, int]] = {}
        """Tenant and bytes by Envoy's name of the request."""
        self._bytes: collections.Counter[str] = collections.Counter()
        """By tenant; "": of all."""

    def begin(self, stream: str, tenant: str, n_bytes: int) -> Failure | None:
        """A body begins to arrive, or is refused."""
        room = min(self._most - self._bytes[""], self._most // 2 - self._bytes[tenant])
        if n_bytes > room:
            says = (
                f"long bodies arrive already, {self._bytes[tenant] >> 20} MiB of them yours; come again later"
            )
            return Failure(503, "overloaded", says, retry_after_s=1)
        self._bodies[stream] = tenant, n_bytes
        self._add(tenant, n_bytes)
        return None

    def end(self, stream: str) -> None:
        """It has arrived, or its request has ended."""
        if (body := self._bodies.pop(stream, None)) is not None:
            self._add(body[0], -body[1])

    def clear(self) -> None:
        """Envoy has no request."""
        self._bodies.clear()
        self._bytes.clear()

    def _add(self, tenant: str, n_bytes: int) -> None:
        for name in (tenant, ""):
            self._bytes[name] += n_bytes
            if not self._bytes[name]:
                del self._bytes[name]


class Bucket:
    """What a tenant has used of something; it drains at a rate, and there may be so much of it at once.

    It is at least 0, and 0 some time after the last use. Changed limits change what may be used, not what is used.
    """

    def __init__(self, now_s: float) -> None:
        self.used = 0.0
        self._at_s = now_s

    def take(self, amount: float, rate: float, most: int, now_s: float) -> int:
        """Use `amount`, and return 0; or return the whole seconds after which it fits, and use nothing.

        More than `most` fits when nothing is used.
        """
        excess = self.drained(rate, now_s) + min(amount, most) - most
        if excess > 0.0:
            return max(1, math.ceil(excess / rate))
        self.used += amount
        return 0

    def drained(self, rate: float, now_s: float) -> float:
        """What is used now. A clock that steps back waits."""
        passed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        self.used = max(0.0, self.used - passed_s * rate)
        return self.used


class Tenancy(NamedTuple):
    """What a tenant uses now."""

    in_flight: int
    used_tokens: float


class Tenant:
    """One tenant: its settings, and what it uses now.

    A request takes its estimate, which is its prompt and what the tenant's answers had on average lately; `settle` puts
    what was used in its place, so more than `tokens_burst` may be used, and then the tenant waits for it to drain.
    """

    def __init__(self, settings: GatewayTenantSettings, now_s: float) -> None:
        self.settings = settings
        self.in_flight = 0
        self._left = asyncio.Event()
        """Set when a request has ended."""
        self._requests, self._tokens = Bucket(now_s), Bucket(now_s)
        self._generated = 0.0
        """Tokens of the tenant's answers on average."""

    @property
    def name(self) -> str:
        """Its name in metrics."""
        return self.settings.name

    def enter(self, now_s: float) -> Failure | None:
        """Let a request in, which must `leave`; or the reason why not."""
        most, rate = self.settings.max_in_flight, self.settings.requests_per_s
        if most and self.in_flight >= most:
            says = f"tenant {self.name} has {self.in_flight} requests under way, of at most {most}; wait for one to end"
            return Failure(429, IN_FLIGHT, says, retry_after_s=1)
        if rate and (wait_s := self._requests.take(1.0, rate, self.settings.burst, now_s)):
            says = f"tenant {self.name} may send {rate:g} requests a second; come again in {wait_s} s"
            return Failure(429, "tenant_rate", says, retry_after_s=wait_s)
        self.in_flight += 1
        return None

    def leave(self) -> None:
        """A request that was let in has ended, however."""
        self.in_flight -= 1
        self._left.set()

    def take(self, prompt_tokens: int, now_s: float) -> float | Failure:
        """Use tokens for a request, by an estimate that is returned for `settle`; or the reason why not."""
        rate, most, estimate = self.settings.tokens_per_s, self.settings.tokens_burst, 0.0
        if rate:
            estimate = prompt_tokens + self._generated
            if wait_s := self._tokens.take(estimate, rate, most, now_s):
                says = (
                    f"tenant {self.name} may use {rate:g} tokens a second, {most} at once; this request takes about "
                    f"{estimate:.0f}: come again in {wait_s} s"
                )
                return Failure(429, "tenant_tokens", says, retry_after_s=wait_s)
        return estimate

    def settle(self, request: Request) -> None:
        """A request that may have taken tokens has ended: charge what its prompt and its answer had.

        The prompt counts at least what it counted for before, whatever the answer tells.
        """
        estimate = request.taken
        if estimate is None or (request.outcome == CANCELLED and request.engine and not request.first_s):
            return  # Of the second an engine has worked on it, nobody knows how long: the estimate stays.
        used = generated = 0
        if request.first_s and request.outcome in (OK, CANCELLED, BROKE_OFF) and not request.failed_inside:
            generated = request.tokens.get("completion", request.events)
            prompt = request.tokens.get("prompt", request.charged_tokens)
            used = max(request.charged_tokens, prompt + generated)
        if generated:
            self._generated += NEWEST * (generated - self._generated)
        if estimate:
            self._tokens.used = max(0.0, self._tokens.used - estimate + used)

    def uses(self, now_s: float) -> Tenancy:
        """What is used now."""
        return Tenancy(self.in_flight, self._tokens.drained(self.settings.tokens_per_s, now_s))

    async def leaving(self) -> None:
        """Wait for GRACE_S at most until a request has ended.

        A client sees the end of its answer a moment before Envoy's log tells of it here.
        """
        self._left.clear()
        await in_task()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience(GRACE_S)):
                await self._left.wait()


class Door:
    """Belongs to the event loop."""

    def __init__(self, access: Access, now_s: Callable[[], float], *, loopback: bool) -> None:
        """`loopback`: only this machine reaches the port."""
        self.access = access
        self.arriving = Arriving()
        self._loopback = loopback
        self._now_s = now_s
        self._known_host: bytes | None = None
        """The last one that is a name of this port."""
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
        host = headers.get(b"host", b"")
        if host != self._known_host and not self.access.knows_host(host.decode("latin-1")):
            says = "Host: this port does not have that name; add it to http.allowed_hosts of the gateway"
            return Failure(403, "unknown_host", says)
        self._known_host = host
        if not self.access.knows_origin(headers, path):
            says = "Origin: pages of other sites may not use this port; add the site to http.allowed_hosts"
            return Failure(403, "unknown_origin", says)
        return None

    def lets_in(self, headers: Headers) -> Failure | None:
        """Why a long body is not to come; None: it may."""
        tenant, length = self.tenant_of(headers), headers.get(LENGTH.encode(), b"")
        if not isinstance(tenant, Tenant):
            return tenant
        n_bytes = min(int(length[:20]), MAX_BODY_BYTES) if length.isdigit() else UNSIZED_BYTES
        return self.arriving.begin(headers.get(STREAM.encode(), b"").decode("latin-1"), tenant.name, n_bytes)

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
