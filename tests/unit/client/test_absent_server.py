"""An engine without a server says so once, however many requests come, and then as a summary from time to time."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.client import link
from kvstrata.types import Role
from tests.harness.cache_engine import CacheEngine, eventually

ABSENT = "no cache server answers"


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """(Level, text) of the lines about an absent server."""
    return [
        (record.levelname, record.getMessage()) for record in caplog.records if ABSENT in record.getMessage()
    ]


def test_the_workers_of_an_engine_leave_the_warning_to_its_scheduler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="kvstrata")
    for role, level in ((Role.WORKER, "INFO"), (Role.SCHEDULER, "WARNING")):
        caplog.clear()
        with CacheEngine(tmp_path / "none", role=role):
            eventually("it has looked", lambda: said(caplog))
        assert said(caplog)[0][0] == level


def test_an_absence_that_lasts_is_summed_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "REPEATED_S", 0.3)
    with CacheEngine(tmp_path / "none"):
        eventually("a summary", lambda: len(said(caplog)) > 1)
    assert "more like this were left out" in said(caplog)[1][1]


def test_a_mistake_of_ours_does_not_end_the_tries_to_attach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    def fails(*arguments: object) -> None:
        tries.append(arguments)
        raise ZeroDivisionError

    monkeypatch.setattr(link, "attach_in", fails)
    monkeypatch.setattr(link, "ATTACH_REFUSED_RETRY_S", 0.0)
    with CacheEngine(tmp_path / "none") as engine:
        eventually("it goes on", lambda: len(tries) > 2)
        assert "ZeroDivisionError" in engine.client.error
