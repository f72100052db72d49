"""How browsers log in to the dashboard: what the process and the routes of the HTTP API share for it."""

from __future__ import annotations

from typing import NamedTuple

from kvstrata.process.http_gate import Access
from kvstrata.process.http_login import Logins

LOGIN = "/v1/login"
"""Path of the request that turns a code into a session; it needs no token."""
LOGINS = frozenset({LOGIN, "/v1/dashboard-link", "/v1/logout"})
"""The paths of routes/login.py, which use nothing else of the controller."""


class Door(NamedTuple):
    """Who may use the port, who has logged in, and where users reach it."""

    access: Access
    logins: Logins
    url: str
    """URL of the port; empty for a unix socket, which browsers cannot open."""

    def link(self) -> str:
        """A link that opens the dashboard and logs in once, within CODE_S; on an open port a link without a code.

        The code stands in the fragment, which browsers send to no server: it gets into no log of a proxy, and no
        program that looks at links in advance uses it up.
        """
        return f"{self.url}/" if self.access.is_open else f"{self.url}/#/login/{self.logins.new_code()}"
