"""Identities that a client declares to a server; the test gives the server's answers."""

from __future__ import annotations

import math
import time

import pytest

from kvstrata.client import identities
from kvstrata.client.identities import Declared, Identity, IdentityTable
from kvstrata.client.link import Kind, Pending
from kvstrata.errors import Refused, Unavailable
from kvstrata.rpc import wire
from kvstrata.types import LayoutIdentity, RequestIdentity
from tests.unit.client.link_double import EPOCH, Link

LAYOUT = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=16)


class Asking:
    """A lookup that needs its identity declared."""

    def __init__(self, table: IdentityTable, identity: Identity, link: Link) -> None:
        self.ends: list[object] = []

        def message(seq: int, remaining_ms: int) -> wire.Ping | None:
            return wire.Ping(seq) if table.declared(identity) else None

        link.ask(Pending(Kind.ASK, message, self.ends.append, self.ends.append))


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def table(link) -> IdentityTable:
    return IdentityTable(link, LAYOUT, (bytes(32),))


@pytest.fixture
def identity(table) -> Identity:
    return table.identity(RequestIdentity())


def refuse(link: Link, seq: int, code: str) -> None:
    link.table.reply(wire.Error(seq, EPOCH, code, f"it says {code}", "", False))


def accept(link: Link, seq: int, identity: Identity) -> None:
    link.table.reply(wire.IdentifyReply(seq, EPOCH, 5, identity.root, [bytes(32)], True))


@pytest.mark.parametrize("code", ["not_permitted", "layout_refused"])
def test_a_refused_identity_is_not_declared_to_the_same_server_again(link, table, identity, code):
    asking = Asking(table, identity, link)
    assert link.send_due() == []
    [seq] = link.send_due()
    refuse(link, seq, code)
    assert link.send_due() == []
    assert isinstance(asking.ends[0], Refused)
    assert identity.refused_until_s == math.inf
    with pytest.raises(Refused, match=f"it says {code}"):
        table.declared(identity)
    assert link.send_due() == []
    link.epoch += 1
    assert table.declared(identity) is None
    assert len(link.send_due()) == 1, "the identity is declared to another server"


@pytest.mark.parametrize("code", ["internal", "refused", "deadline"])
def test_after_an_error_that_may_pass_the_identity_is_declared_again_but_not_at_once(
    link, table, identity, monkeypatch, code
):
    monkeypatch.setattr(identities, "MISTAKE_RETRY_S", 3600.0)
    asking = Asking(table, identity, link)
    link.send_due()
    [seq] = link.send_due()
    refuse(link, seq, code)
    assert link.send_due() == []
    assert isinstance(asking.ends[0], Refused), "the lookup does not wait for the next declaration"
    with pytest.raises(Refused, match=f"it says {code}"):
        table.declared(identity)
    identity.refused_until_s = time.monotonic()
    assert table.declared(identity) is None
    [seq] = link.send_due()
    accept(link, seq, identity)
    assert table.declared(identity) == Declared(EPOCH, 5)
    assert identity.error == ""


def test_a_lost_connection_refuses_no_identity(link, table, identity):
    assert table.declared(identity) is None
    link.send_due()
    link.table.fail_all(Unavailable("gone"), Kind.TELL)
    assert identity.error == ""
    assert table.declared(identity) is None
    assert len(link.send_due()) == 1


@pytest.mark.parametrize("code", ["bad_request", "internal"])
def test_a_refused_identity_used_last_does_not_keep_the_slices_unknown(link, code, monkeypatch):
    monkeypatch.setattr(identities, "MISTAKE_RETRY_S", 3600.0)
    table = IdentityTable(link, LAYOUT, ())
    good = table.identity(RequestIdentity(tenant="t"))
    bad = table.identity(RequestIdentity(tenant="t", salt="too long"))
    table.declare(good)
    [seq] = link.send_due()
    # The engine's workers have not attached yet, so the server knows no slices.
    link.table.reply(wire.IdentifyReply(seq, EPOCH, 5, good.root, [], False))
    table.declare(bad)
    [seq] = link.send_due()
    refuse(link, seq, code)
    assert table.due_s() < math.inf
    table.tick(table.due_s())
    [seq] = link.send_due()
    accept(link, seq, good)
    assert table.slices == (bytes(32),)


def test_the_log_never_shows_a_salt(link, table, caplog):
    secret = table.identity(RequestIdentity(tenant="blue", salt="s3cret"))
    table.declare(secret)
    [seq] = link.send_due()
    refuse(link, seq, "not_permitted")
    assert "'blue'" in caplog.text and "it says not_permitted" in caplog.text
    assert "s3cret" not in caplog.text
