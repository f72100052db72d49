"""Access control and rate limits of the gateway's port.

1. On loopback, where a client needs no key, `Host` must be a name of this port, and a web page that sends a request
   must come from the port itself, as on all HTTP ports (process/http_gate.py).  Otherwise any web page that a user of
   this machine opens could use the engines.
2. If the settings list tenants, each request must carry a tenant's key.
3. A tenant's request beyond its limits (requests a second, tokens a second, requests under way) gets 429 with
   Retry-After.  The bytes of its arriving long bodies are bounded too, since Envoy collects whole bodies in memory.
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
from kvstrata.gateway.picker.taskless import in_task
from kvstrata.patience import patience
from kvstrata.process.http_gate import Access

if TYPE_CHECKING:
    from kvstrata.gateway.request import Request

BEARER = b"bearer "
IN_FLIGHT = "tenant_in_flight"
MAX_KEY_BYTES = 4_096
GRACE_S = 0.1
NEWEST = 0.1
"""Weight of the newest answer in the moving average of answers' lengths."""

Headers = Mapping[bytes, bytes]


class ArrivingBodies:
    """Long bodies of tenants that Envoy is collecting, until it asks for an engine or reports the request's end.

    The sum of their announced lengths may reach a quarter of Envoy's heap limit, and half of that for one tenant.
    """

    def __init__(self) -> None:
        self._most = heap_bytes() // 4
        self._bodies: dict[str, tuple[str, int]] = {}
        """Tenant and bytes by Envoy's id of the request."""
        self._bytes: collections.Counter[str] = collections.Counter()
        """Sum of bytes by tenant; "": of all tenants."""

    def begin(self, stream: str, tenant: str, n_bytes: int) -> Failure | None:
        """Count a body that begins to arrive, or return the refusal."""
        room = min(self._most - self._bytes[""], self._most // 2 - self._bytes[tenant])
        if n_bytes > room:
            says = f"too many long bodies are arriving, {self._bytes[tenant] >> 20} MiB of yours; try again later"
            return Failure(503, "overloaded", says, retry_after_s=1)
        self._bodies[stream] = tenant, n_bytes
        self._add(tenant, n_bytes)
        return None

    def end(self, stream: str) -> None:
        """Stop counting a body that has arrived, or whose request has ended; no effect on an unknown one."""
        if (body := self._bodies.pop(stream, None)) is not None:
            self._add(body[0], -body[1])

    def clear(self) -> None:
        """Forget all bodies, since Envoy has no requests."""
        self._bodies.clear()
        self._bytes.clear()

    def _add(self, tenant: str, n_bytes: int) -> None:
        for name in (tenant, ""):
            self._bytes[name] += n_bytes
            if not self._bytes[name]:
                del self._bytes[name]


class Bucket:
    """A leaky bucket: a tenant's use of requests or tokens, which drains at a rate and may reach a maximum.

    The use is never negative. Changed limits apply from the next call; the use stays.
    """

    def __init__(self, now_s: float) -> None:
        self.used = 0.0
        self._at_s = now_s

    def take(self, amount: float, rate: float, most: int, now_s: float) -> int:
        """Add `amount` and return 0; or, if it does not fit, add nothing and return the whole seconds until it fits.

        An amount above `most` fits into an empty bucket.
        """
        excess = self.drained(rate, now_s) + min(amount, most) - most
        if excess > 0.0:
            return max(1, math.ceil(excess / rate))
        self.used += amount
        return 0

    def drained(self, rate: float, now_s: float) -> float:
        """The use now. While the clock is behind the last call, nothing drains."""
        passed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        self.used = max(0.0, self.used - passed_s * rate)
        return self.used


class TenantUse(NamedTuple):
    """A tenant's current use."""

    in_flight: int
    used_tokens: float


class Tenant:
    """One tenant: its settings and its current use.

    A request is charged an estimate at first: its prompt and the average length of the tenant's answers. `settle`
    replaces the estimate by the real use, which can exceed `tokens_burst`; then the tenant waits until it has drained.
    """

    def __init__(self, settings: GatewayTenantSettings, now_s: float) -> None:
        self.settings = settings
        self.in_flight = 0
        self._left = asyncio.Event()
        """Set when one of its requests has ended."""
        self._requests, self._tokens = Bucket(now_s), Bucket(now_s)
        self._generated = 0.0
        """Moving average of the tokens in the tenant's answers."""

    @property
    def name(self) -> str:
        """The tenant's name in settings, logs and metrics."""
        return self.settings.name

    def enter(self, now_s: float) -> Failure | None:
        """Count a request as under way until `leave`, or return the refusal."""
        most, rate = self.settings.max_in_flight, self.settings.requests_per_s
        if most and self.in_flight >= most:
            says = f"tenant {self.name} has {self.in_flight} requests under way, of at most {most}; wait for one to end"
            return Failure(429, IN_FLIGHT, says, retry_after_s=1)
        if rate and (wait_s := self._requests.take(1.0, rate, self.settings.burst, now_s)):
            says = f"tenant {self.name} may send {rate:g} requests a second; try again in {wait_s} s"
            return Failure(429, "tenant_rate", says, retry_after_s=wait_s)
        self.in_flight += 1
        return None

    def leave(self) -> None:
        """Count a request that `enter` has let in as ended, whatever its outcome."""
        self.in_flight -= 1
        self._left.set()

    def take(self, prompt_tokens: int, now_s: float) -> float | Failure:
        """Charge a request's estimated tokens and return the estimate for `settle` (0: no limit), or the refusal."""
        rate, most, estimate = self.settings.tokens_per_s, self.settings.tokens_burst, 0.0
        if rate:
            estimate = prompt_tokens + self._generated
            if wait_s := self._tokens.take(estimate, rate, most, now_s):
                says = (
                    f"tenant {self.name} may use {rate:g} tokens a second, {most} at once; this request takes about "
                    f"{estimate:.0f}: try again in {wait_s} s"
                )
                return Failure(429, "tenant_tokens", says, retry_after_s=wait_s)
        return estimate

    def settle(self, request: Request) -> None:
        """Replace an ended request's estimate by the tokens of its prompt and answer; no effect without `take`.

        The prompt is charged at least as in the estimate, whatever the answer's `usage` reports.
        """
        estimate, counted = request.taken, request.events or "completion" in request.tokens
        if estimate is None or (request.outcome == CANCELLED and request.engine and not counted):
            return  # Cancelled before any token was counted: the engine's work is unknown, so the estimate stays.
        used = generated = 0
        failed = request.failed_inside and not counted
        if request.first_s and request.outcome in (OK, CANCELLED, BROKE_OFF) and not failed:
            generated = request.tokens.get("completion", request.events)
            prompt = request.tokens.get("prompt", request.charged_tokens)
            used = max(request.charged_tokens, prompt + generated)
        if generated:
            self._generated += NEWEST * (generated - self._generated)
        if estimate:
            self._tokens.used = max(0.0, self._tokens.used - estimate + used)

    def uses(self, now_s: float) -> TenantUse:
        """The tenant's current use."""
        return TenantUse(self.in_flight, self._tokens.drained(self.settings.tokens_per_s, now_s))

    async def leaving(self) -> None:
        """Wait up to GRACE_S until one of the tenant's requests has ended.

        A client sees the end of its answer a moment before Envoy's log reports it to this process.
        """
        self._left.clear()
        await in_task()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience(GRACE_S)):
                await self._left.wait()


class Door:
    """Belongs to the event loop."""

    def __init__(self, access: Access, now_s: Callable[[], float], *, loopback: bool) -> None:
        """`loopback`: the port is reachable from this machine only."""
        self.access = access
        self.arriving = ArrivingBodies()
        self._loopback = loopback
        self._now_s = now_s
        self._known_host: bytes | None = None
        """The last accepted `Host`, so that the same one need not be checked again."""
        self._tenants: dict[bytes, Tenant] = {}
        """By digest of the API key, so that the time of a look-up reveals nothing about keys."""

    @property
    def needs_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self._tenants)

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants."""
        return list(self._tenants.values())

    def uses(self) -> dict[str, TenantUse]:
        """Each tenant's current use, by name."""
        now_s = self._now_s()
        return {tenant.name: tenant.uses(now_s) for tenant in self.tenants}

    def set_tenants(self, tenants: Iterable[tuple[GatewayTenantSettings, str]]) -> None:
        """Replace the tenants by these, each with its key; a tenant whose name stays keeps its use."""
        before = {tenant.name: tenant for tenant in self._tenants.values()}
        self._tenants = {}
        for settings, key in tenants:
            tenant = before.get(settings.name) or Tenant(settings, self._now_s())
            tenant.settings = settings
            self._tenants[_digest(key.encode())] = tenant

    def origin_failure(self, headers: Headers, path: str) -> Failure | None:
        """The refusal by rule 1; None: the sender is allowed, or rule 2 applies."""
        if not self._loopback or self._tenants:
            return None
        host = headers.get(b"host", b"")
        if host != self._known_host and not self.access.knows_host(host.decode("latin-1")):
            says = "Host: not a name of this port; add it to the gateway's http.allowed_hosts"
            return Failure(403, "unknown_host", says)
        self._known_host = host
        if not self.access.knows_origin(headers, path):
            says = "Origin: pages of other sites may not use this port; add the site to http.allowed_hosts"
            return Failure(403, "unknown_origin", says)
        return None

    def body_failure(self, headers: Headers) -> Failure | None:
        """Authenticate the sender of a long body, and count the body; None: Envoy may receive it, else the refusal."""
        tenant, length = self.tenant_of(headers), headers.get(LENGTH.encode(), b"")
        if not isinstance(tenant, Tenant):
            return tenant
        n_bytes = min(int(length[:20]), MAX_BODY_BYTES) if length.isdigit() else UNSIZED_BYTES
        return self.arriving.begin(headers.get(STREAM.encode(), b"").decode("latin-1"), tenant.name, n_bytes)

    def tenant_of(self, headers: Headers) -> Tenant | Failure | None:
        """The tenant of a request, or the refusal; None if clients need no key."""
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
