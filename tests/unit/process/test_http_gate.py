"""Which `Host` headers name a port, and what a port that other machines reach needs."""

from __future__ import annotations

import pytest

from kvstrata.config.common_model import ListenSettings
from kvstrata.process.http_gate import Access


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:8080", True),
        ("LOCALHOST", True),
        ("[::1]:1", True),
        ("node.example", True),
        ("evil.example", False),
        ("10.0.0.1", False),
        ("localhost@evil.example", False),
        ("", False),
    ],
)
def test_a_host_is_judged_by_its_name(host: str, known: bool) -> None:
    access = Access(ListenSettings(host="127.0.0.1", allowed_hosts=["node.example"]), "token")
    assert access.knows_host(host) == known
