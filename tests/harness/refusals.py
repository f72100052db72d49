"""Settings that stop the start of a server, checked as a start checks them, in this process and with nothing opened."""

from __future__ import annotations

import os

import pytest

from kvstrata.config.command_line import server_settings
from kvstrata.errors import KvstrataError
from kvstrata.server.plan import plan


def refusal(*flags: str, **environment: str) -> str:
    """Return the lines that a server with these flags and variables prints instead of starting."""
    variables = {**os.environ, **environment}
    with pytest.raises(KvstrataError) as refused:
        _, read = server_settings(flags, variables)
        plan(read(), variables)
    return "\n".join(refused.value.lines)
