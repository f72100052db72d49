"""Sessions and requests write no line at level INFO: a server of many clients must not fill a disk with its log."""

from __future__ import annotations

import logging

import pytest

from kvstrata.rpc import wire
from kvstrata.types import RequestIdentity
from tests.harness.engine_in_process import EngineInProcess
from tests.harness.rpc_client import chain_of


def test_a_hundred_sessions_and_their_requests_write_nothing_but_the_first_clear(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvstrata"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kvstrata")
    server = EngineInProcess()
    for number in range(100):
        session = number.to_bytes(16, "big")
        session = b"s" + session[1:]
        server.attach(session, b"g" * 16)
        [identity] = server.feed(wire.encode(wire.Identify(session, 1, RequestIdentity(salt=str(number)))))
        assert isinstance(identity, wire.IdentifyReply)
        chain = chain_of(identity.root, 2)
        server.store(session, 2, identity, chain)
        groups = [wire.Group(wire.Rule.PREFIX, chain)]
        server.feed(
            wire.encode(wire.Lookup(session, 4, 1000, identity.identity_id, f"r{number}", groups)),
            wire.encode(wire.Release(session, 5, [(session, 4)])),
            wire.encode(wire.Clear(session, 6, wire.Tier.L1)),
        )
        server.gone(session)
    server.close()
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["cleared"]
