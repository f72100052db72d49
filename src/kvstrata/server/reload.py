"""What a server changes while it runs, when SIGHUP has it read its settings and token files again.

Everything is read and checked before anything changes.  The changes themselves take one turn of the loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from kvstrata.config.changes import Changes, sorted_out
from kvstrata.config.model import ServerSettings
from kvstrata.observability.logging import current_level, set_level
from kvstrata.server.instance import Instance
from kvstrata.server.plan import Plan, plan
from kvstrata.server.processes import tenant_number
from kvstrata.types import GB

LIVE = ("log_level", "quotas_gb", "l2.drain_s")
HTTP_TOKEN, TENANTS = "http.token_file", "security.tenants_file"
NO_QUOTA = -1


class Reload:
    """The settings in force, and how others come into force. `apply` belongs to the event loop."""

    def __init__(self, checked: Plan, reread: Callable[[], ServerSettings], instance: Instance) -> None:
        """`reread` reads the settings from where they came from, and raises ConfigError."""
        self.settings = checked.settings
        self._reread = reread
        self._tokens = checked.tokens
        self._instance = instance

    def read(self) -> Plan:
        """Read and check settings and token files, on any thread. Raises ConfigError."""
        return plan(self._reread(), os.environ)

    def apply(self, newer: Plan) -> Changes[ServerSettings]:
        """Change what can change now. Raises ConfigError; then nothing has changed."""
        instance = self._instance
        before = msgspec.structs.replace(self.settings, log_level=current_level())
        pool = instance.parts.pool
        found = sorted_out(before, newer.settings, LIVE, (HTTP_TOKEN, TENANTS))
        self._apply_tokens(newer, found)
        self.settings = after = found.in_force
        set_level(after.log_level)
        for tenant in before.quotas_gb.keys() - after.quotas_gb.keys():
            pool.set_quota(tenant_number(tenant), NO_QUOTA)
        for tenant, gigabytes in after.quotas_gb.items():
            pool.set_quota(tenant_number(tenant), int(gigabytes * GB))
        instance.parts.tenants.name(after)
        return found

    def _apply_tokens(self, newer: Plan, found: Changes[ServerSettings]) -> None:
        """Replace tokens whose files have other ones. A file that is new, or not named any more, needs a restart."""
        served, given = self._instance.http_token, newer.settings
        has_token = HTTP_TOKEN not in found.restart and bool(given.http.token_file)
        if served is not None and has_token and served.replace(newer.http_token):
            found.applied.add(HTTP_TOKEN)
        has_tenants = TENANTS not in found.restart and bool(given.security.tenants_file)
        if has_tenants and self._tokens.replace(newer.tokens):
            found.applied.add(TENANTS)
