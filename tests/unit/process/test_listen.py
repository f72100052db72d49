"""process/listen.py: what a port that other machines reach needs, and what is said of it."""

from __future__ import annotations

import logging

import pytest

from kvstrata.config.common_model import ListenSettings
from kvstrata.errors import ConfigError
from kvstrata.observability.logging import EventLog
from kvstrata.process.listen import read_token, warn_if_plain

NEAR = ("127.0.0.1", "127.1.2.3", "::1", "localhost")
FAR = ("0.0.0.0", "::", "10.0.0.1", "cache.example")


def test_a_port_off_loopback_is_opened_with_a_token_file_or_insecure_only() -> None:
    for host in NEAR:
        assert len(read_token(ListenSettings(host=host), insecure=False)) > 20
    for host in FAR:
        with pytest.raises(ConfigError, match=r"is not loopback: set http\.token_file") as refused:
            read_token(ListenSettings(host=host), insecure=False)
        assert refused.value.field == "http.host"
        assert read_token(ListenSettings(host=host), insecure=True) == ""


def test_a_port_off_loopback_is_said_to_have_no_tls(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog("test")
    with caplog.at_level(logging.WARNING):
        for host in NEAR:
            warn_if_plain(host, 8080, log)
        warn_if_plain("unix:/run/kvstrata/admin.sock", 0, log)
        assert caplog.records == []
        for host in FAR:
            warn_if_plain(host, 8080, log)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["port_without_tls"] * len(FAR)
