"""The tenant of each request: the engine's own, or one that the request names in `kv_transfer_params`.

A request names its tenant by `kv_transfer_params["kvstrata.tenant"]`.  It gets that tenant if the settings let this
engine name it (`request_tenants`); the server decides again, by the engine's token.  A request that names any other
tenant, or something that is no name, is computed without the cache and never as a request of another tenant.

vLLM's own prefix cache knows no tenants.  So a request that does not belong to the engine's own tenant gets a cache
salt that only this engine can make: one for each tenant and salt of the request, and a fresh one for each refused
request.  Without it, the time until the first token would tell one tenant which prompts another has sent.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable
from typing import Any

from kvstrata.observability.logging import Thinning
from kvstrata.types import canonical_json

logger = logging.getLogger("vllm.kvstrata")

TENANT = "kvstrata.tenant"
"""The key in `kv_transfer_params`."""
MAX_TENANT_CHARS = 256


class TenantRefused(Exception):
    """The request is computed without the cache; `reason` is one of lookup_table.SKIP_REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RequestTenants:
    """The tenants that requests of one engine may name. Belongs to the scheduler's thread."""

    def __init__(self, own: str, others: Iterable[str]) -> None:
        self.own = own
        """The tenant of requests that name none."""
        self._may_name = dict.fromkeys((own, *others))
        self._secret = secrets.token_bytes(32)
        self._thinning = Thinning()

    @property
    def first(self) -> list[str]:
        """The engine's own tenant, and one that requests may name: its token may open the latter alone."""
        return list(self._may_name)[:2]

    def of(self, request: Any) -> str:
        """The request's tenant. Raises TenantRefused, and logs why, at most once in a while for each reason."""
        params = request.kv_transfer_params
        if not isinstance(params, dict) or TENANT not in params:
            return self.own
        named = params[TENANT]
        if not isinstance(named, str) or len(named) > MAX_TENANT_CHARS:
            kind = f"{len(named)} characters" if isinstance(named, str) else type(named).__name__
            self._thinning.log(
                logger,
                logging.WARNING,
                "tenant_invalid",
                "request %r is computed without the cache: kv_transfer_params[%r] must be a text of at most %d "
                "characters, found %s",
                request.request_id,
                TENANT,
                MAX_TENANT_CHARS,
                kind,
            )
            raise TenantRefused("tenant_invalid")
        if named not in self._may_name:
            self._thinning.log(
                logger,
                logging.WARNING,
                "tenant_refused",
                "request %r is computed without the cache: this engine may not name its tenant %a; list the tenant in "
                "the engine's setting request_tenants if it may",
                request.request_id,
                named,
            )
            raise TenantRefused("tenant_refused")
        return named

    def separate(self, request: Any, tenant: str | None) -> None:
        """Let a request share blocks of vLLM's own cache only with requests of its tenant; None: with no request.

        Call it before vLLM has looked for the request's blocks.  vLLM hashes the blocks of the prompt once more.
        """
        if tenant == self.own:
            return
        shares = (
            [tenant, request.cache_salt] if tenant is not None else ["refused", secrets.token_hex(16), None]
        )
        salt = hmac.digest(self._secret, canonical_json(shares), hashlib.sha256).hex()
        request.cache_salt = f"kvstrata-{salt}"
        request.block_hashes.clear()
        request.update_block_hashes()
