"""Sessions that come and go leave nothing behind: no lines in the log, no memory."""

from __future__ import annotations

import gc
import logging
import tracemalloc
import weakref

from kvstrata.observability import explain
from kvstrata.rpc import wire
from kvstrata.tiers.base import log_broken_contract
from kvstrata.types import RequestIdentity
from tests.harness.alone import alone
from tests.harness.amount import amount
from tests.harness.instance_in_process import InstanceInProcess, said
from tests.harness.rpc_client import RECORD_BYTES, chain_of


def test_an_adapter_that_raises_repeatedly_fills_no_log_and_keeps_nothing_alive(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("kvstrata"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kvstrata")

    class Held:
        pass

    def load(held: Held) -> None:
        raise RuntimeError("broken")

    errors = []
    for _ in range(100):
        held = Held()
        there = weakref.ref(held)
        try:
            load(held)
        except RuntimeError as error:
            errors.append(error)
            del held
            log_broken_contract("an adapter of this test", "load", error)
        assert there() is None
    log_broken_contract("an adapter of this test", "put", RuntimeError("broken too"))
    first, second = [text for text in caplog.messages if "an adapter of this test" in text]
    assert "in load" in first and "put raised" in second


MEASURED = 600


def session_comes_and_goes(server: InstanceInProcess, number: int) -> None:
    """A session stores, aborts a store, looks up and ends, all under names that were not used before."""
    name = number.to_bytes(16, "big")[::-1]
    server.attach(name, name)
    [identity] = server.feed(said(name, wire.Identify(1, RequestIdentity(salt=f"salt {number}"))))
    assert isinstance(identity, wire.IdentifyReply)
    chain, probe = chain_of(identity.root, 2), number.to_bytes(8, "big")
    reserve = wire.Reserve(2, 1000, identity.identity_id, b"", chain, RECORD_BYTES, probe)
    server.feed(said(name, reserve), said(name, wire.Abort(3, 2)))
    server.store(name, 4, identity, chain)
    groups = [wire.KeyGroup(wire.Rule.PREFIX, chain)]
    server.feed(
        said(name, wire.Lookup(8, 1000, identity.identity_id, f"request {number}", groups, probe)),
        said(name, wire.Release(9, [(name, 8)])),
    )
    server.gone(name)


def bytes_a_session(server: InstanceInProcess, first: int) -> float:
    """What each of MEASURED sessions leaves behind."""
    tracemalloc.start()
    try:
        for number in range(first, first + MEASURED):
            # The first 300 sessions replace entries from before the tracing, and allocate what tracing itself needs.
            if number == first + 300:
                gc.collect()
                before_bytes, _ = tracemalloc.get_traced_memory()
            session_comes_and_goes(server, number)
        gc.collect()
        after_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after_bytes - before_bytes) / (MEASURED - 300)


@alone
def test_ended_sessions_leave_no_memory_behind() -> None:
    explain.MAX_NOTES = explain.MAX_PROBES = explain.MAX_LOOKUPS = 32  # in a process of its own
    server = InstanceInProcess()
    for number in range(1, 1 + MEASURED):
        session_comes_and_goes(server, number)
    rounds = [bytes_a_session(server, first * MEASURED + 1) for first in range(1, 1 + amount(1, 4))]
    assert max(rounds) < 64, rounds
    server.close()
