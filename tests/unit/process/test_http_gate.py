"""Which `Host` headers name a port, and what a port that other machines reach needs."""

from __future__ import annotations

import pytest

from kvstrata.config.common_model import ListenSettings
from kvstrata.errors import ConfigError
from kvstrata.process.http_gate import Access
from kvstrata.process.listen import read_token


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


def test_a_port_off_loopback_is_opened_with_a_token_file_or_insecure_only() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert len(read_token(ListenSettings(host=host), insecure=False)) > 20
    for host in ("0.0.0.0", "::", "10.0.0.1", "cache.example"):
        with pytest.raises(ConfigError, match=r"is not loopback: set http\.token_file") as refused:
            read_token(ListenSettings(host=host), insecure=False)
        assert refused.value.field == "http.host"
        assert read_token(ListenSettings(host=host), insecure=True) == ""
