"""Sessions and requests write no line at level INFO: a server of many clients must not fill a disk with its log."""

from __future__ import annotations

import logging
import weakref

import pytest

from kvstrata.rpc import wire
from kvstrata.storage.base import log_broken_contract
from kvstrata.types import RequestIdentity
from tests.harness.instance_in_process import InstanceInProcess, said
from tests.harness.rpc_client import chain_of


def test_a_hundred_sessions_and_their_requests_write_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvstrata"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kvstrata")
    server = InstanceInProcess()
    for number in range(100):
        session = number.to_bytes(16, "big")
        session = b"s" + session[1:]
        server.attach(session, b"g" * 16)
        [identity] = server.feed(said(session, wire.Identify(1, RequestIdentity(salt=str(number)))))
        assert isinstance(identity, wire.IdentifyReply)
        chain = chain_of(identity.root, 2)
        server.store(session, 2, identity, chain)
        groups = [wire.KeyGroup(wire.Rule.PREFIX, chain)]
        server.feed(
            said(session, wire.Lookup(4, 1000, identity.identity_id, f"r{number}", groups)),
            said(session, wire.Release(5, [(session, 4)])),
        )
        server.gone(session)
    server.close()
    assert not caplog.records


def test_an_adapter_that_raises_repeatedly_fills_no_log_and_keeps_nothing_alive(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
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
