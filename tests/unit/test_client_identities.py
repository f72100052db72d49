"""Identities declared to a server that answers what a test tells it to."""

from __future__ import annotations

import math
import time

import pytest

from kvstrata.client import identities
from kvstrata.client.calls import Declared, Identity
from kvstrata.client.identities import IdentityTable
from kvstrata.client.requests import LAST_REPEAT_S, Kind, Pending, RequestTable
from kvstrata.errors import Refused, Unavailable
from kvstrata.rpc import wire
from kvstrata.types import LayoutIdentity, RequestIdentity

EPOCH = 7
LAYOUT = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=16)


class Link:
    """A connection that works."""

    def __init__(self) -> None:
        self.table = RequestTable()
        self.session, self.epoch, self.connected = bytes(16), EPOCH, True

    def ask(self, pending: Pending) -> None:
        self.table.add(pending)

    def said(self, now_s: float = 0.0) -> list[int]:
        """The numbers of what is sent now."""
        numbers = []
        for pending, frame in self.table.to_send(now_s):
            numbers.append(wire.decode_request(frame).seq)
            self.table.sent(pending, now_s)
        return numbers


class Asking:
    """A lookup that needs its identity declared."""

    def __init__(self, table: IdentityTable, identity: Identity, link: Link) -> None:
        self.ends: list[object] = []

        def message(seq: int, remaining_ms: int) -> wire.Ping | None:
            return wire.Ping(link.session, seq) if table.declared(identity) else None

        link.ask(Pending(Kind.ASK, message, self.ends.append, self.ends.append))


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def table(link) -> IdentityTable:
    return IdentityTable(link, (bytes(32),))


@pytest.fixture
def identity(table) -> Identity:
    return table.put(Identity(None, LAYOUT, RequestIdentity()))


def refuse(link: Link, seq: int, code: str) -> None:
    link.table.reply(wire.Error(seq, EPOCH, code, f"it says {code}", "", False))


def accept(link: Link, seq: int, identity: Identity) -> None:
    link.table.reply(wire.IdentifyReply(seq, EPOCH, 5, identity.root, [bytes(32)], True))


@pytest.mark.parametrize("code", ["not_permitted", "bad_request", "layout_refused"])
def test_what_the_server_will_not_have_is_not_declared_to_it_again(link, table, identity, code):
    asking = Asking(table, identity, link)
    assert link.said() == []
    [seq] = link.said()
    refuse(link, seq, code)
    assert link.said() == []
    assert isinstance(asking.ends[0], Refused)
    assert identity.refused_until_s == math.inf
    with pytest.raises(Refused, match=f"it says {code}"):
        table.declared(identity)
    assert link.said() == []
    link.epoch += 1
    assert table.declared(identity) is None
    assert len(link.said(LAST_REPEAT_S)) == 1, "another server is told"


def test_after_a_mistake_of_the_server_it_is_told_again_but_not_at_once(link, table, identity, monkeypatch):
    monkeypatch.setattr(identities, "MISTAKE_RETRY_S", 3600.0)
    waits = Asking(table, identity, link)
    link.said()
    [seq] = link.said()
    refuse(link, seq, "internal")
    assert link.said() == []
    assert isinstance(waits.ends[0], Refused), "nobody waits for that"
    with pytest.raises(Refused, match="it says internal"):
        table.declared(identity)
    identity.refused_until_s = time.monotonic()
    assert table.declared(identity) is None
    [seq] = link.said()
    accept(link, seq, identity)
    assert table.declared(identity) == Declared(EPOCH, 5)
    assert identity.error == ""


@pytest.mark.parametrize("code", ["refused", "unavailable", "deadline"])
def test_who_waits_gets_its_identity_after_a_refusal_for_now(link, table, identity, code):
    asking = Asking(table, identity, link)
    link.said()
    [seq] = link.said()
    refuse(link, seq, code)
    [seq] = link.said(LAST_REPEAT_S)
    accept(link, seq, identity)
    assert len(link.said(LAST_REPEAT_S)) == 1
    assert (asking.ends, identity.error) == ([], "")


@pytest.mark.parametrize("how", ["unknown session", "connection lost"])
def test_a_lost_connection_refuses_no_identity(link, table, identity, how):
    assert table.declared(identity) is None
    [seq] = link.said()
    if how == "unknown session":
        refuse(link, seq, "unknown_session")
    else:
        link.table.fail_all(Unavailable("gone"), Kind.SETUP)
    assert identity.error == ""
    assert table.declared(identity) is None
    assert len(link.said()) == 1


@pytest.mark.parametrize("code", ["bad_request", "internal"])
def test_a_refused_identity_used_last_does_not_keep_the_slices_unknown(link, code, monkeypatch):
    monkeypatch.setattr(identities, "MISTAKE_RETRY_S", 3600.0)
    table = IdentityTable(link, ())
    good = table.put(Identity(None, LAYOUT, RequestIdentity(tenant="t")))
    bad = table.put(Identity(None, LAYOUT, RequestIdentity(tenant="t", salt="too long")))
    table.declare(good)
    [seq] = link.said()
    # The engine's workers are not there yet.
    link.table.reply(wire.IdentifyReply(seq, EPOCH, 5, good.root, [], False))
    table.declare(bad)
    [seq] = link.said()
    refuse(link, seq, code)
    assert table.due_s() < math.inf
    table.tick(table.due_s())
    [seq] = link.said(LAST_REPEAT_S)
    accept(link, seq, good)
    assert table.slices == (bytes(32),)


def test_slices_are_asked_for_once_the_only_identity_is_not_refused_any_more(link, monkeypatch):
    monkeypatch.setattr(identities, "MISTAKE_RETRY_S", 3600.0)
    table = IdentityTable(link, ())
    only = table.put(Identity(None, LAYOUT, RequestIdentity()))
    table.declare(only)
    [seq] = link.said()
    refuse(link, seq, "internal")
    table.tick(table.due_s())
    assert link.said(LAST_REPEAT_S) == []
    only.refused_until_s = time.monotonic()
    table.tick(table.due_s())
    assert len(link.said(LAST_REPEAT_S)) == 1


def test_the_log_never_shows_a_salt(link, table, caplog):
    secret = table.put(Identity(None, LAYOUT, RequestIdentity(tenant="blue", salt="s3cret")))
    table.declare(secret)
    [seq] = link.said()
    refuse(link, seq, "not_permitted")
    assert "'blue'" in caplog.text and "it says not_permitted" in caplog.text
    assert "s3cret" not in caplog.text
