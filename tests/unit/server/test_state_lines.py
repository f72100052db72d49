"""Lines of the log about states: one when a state changes, none for each event."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from kvstrata.observability.metrics import ServerCounters
from kvstrata.rpc import wire
from kvstrata.server.housekeeping import SUMMARY_S, EvictionSummary
from kvstrata.server.l2.reports import FULL_REASONS, TierReports
from kvstrata.storage.wrap.deadline import OpReport
from kvstrata.types import RequestIdentity
from tests.harness.instance_in_process import InstanceInProcess, said
from tests.harness.rpc_client import chain_of


@pytest.fixture(autouse=True)
def _seen(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("kvstrata"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kvstrata")


@pytest.fixture
def reports() -> TierReports:
    parts = (asyncio.new_event_loop(), None, None, ServerCounters())
    parts[0].close()
    return TierReports(*cast(Any, parts))


def put(outcome: str) -> OpReport:
    return OpReport("disk-0", "put", 4096 if outcome == "stored" else 0, 0.001, {outcome: 1})


@pytest.mark.parametrize("reason", sorted(FULL_REASONS))
def test_a_tier_that_is_full_is_said_once_and_once_when_it_has_room(
    reports: TierReports, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    for outcome in (f"throttled:{reason}", f"failed:{reason}", f"throttled:{reason}"):
        reports.operation(put(outcome))
    reports.operation(put("exists"))
    reports.operation(put("failed:io"))
    [full] = caplog.messages
    assert full.startswith(f"tier_full adapter=disk-0 reason={reason} meaning=")
    for _ in range(3):
        reports.operation(put("stored"))
    assert caplog.messages[1:] == ["tier_has_room adapter=disk-0"]


def test_other_failures_are_not_full(reports: TierReports, caplog: pytest.LogCaptureFixture) -> None:
    reports.operation(put("throttled:queue_full"))
    reports.operation(OpReport("disk-0", "load", 0, 0.001, {"failed:disk_full": 1}))
    assert caplog.messages == []


def test_a_minutes_evictions_are_one_line_and_a_minute_without_any_is_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = InstanceInProcess(l1_bytes=1 << 20)
    summary = EvictionSummary(server.pool, 0.0)
    session = b"s" * 16
    server.attach(session, b"g" * 16)
    [identity] = server.feed(said(session, wire.Identify(1, RequestIdentity())))
    assert isinstance(identity, wire.IdentifyReply)
    for number in range(40):
        server.store(session, 2 + 2 * number, identity, chain_of(identity.root, 1, number))
        summary.look(1.0)
    stats = server.pool.stats()
    assert stats["evicted_entries"] > 0
    assert caplog.messages == []
    summary.look(SUMMARY_S)
    summary.look(2 * SUMMARY_S)
    [line] = caplog.messages
    chunks, evicted_bytes = stats["evicted_entries"], stats["evicted_bytes"]
    assert line.startswith(f"evicted chunks={chunks} bytes={evicted_bytes} in_s=60 causes=")
    assert sum(stats["evictions"].values()) == stats["evicted_entries"]
    server.close()


def test_a_process_that_ends_with_leases_is_said_with_what_it_held(
    server: InstanceInProcess, identity: wire.IdentifyReply, caplog: pytest.LogCaptureFixture
) -> None:
    session = b"s" * 16
    chain = chain_of(identity.root, 2)
    server.store(session, 2, identity, chain)
    groups = [wire.KeyGroup(wire.Rule.PREFIX, chain)]
    server.feed(said(session, wire.Lookup(4, 1000, identity.identity_id, "r", groups)))
    server.gone(session)
    [line] = caplog.messages
    assert line.startswith("process_gone pid=") and " leases=1 reservations=0 " in line
