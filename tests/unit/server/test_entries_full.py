"""A full index is explained by the setting that bounds it."""

from __future__ import annotations

from kvstrata.rpc import wire
from kvstrata.types import RequestIdentity
from tests.harness.instance_in_process import InstanceInProcess, said
from tests.harness.rpc_client import RECORD_BYTES, chain_of


def test_a_refusal_for_lack_of_index_entries_names_the_setting() -> None:
    server = InstanceInProcess(l1_bytes=64 << 20, entries=64)
    session = b"s" * 16
    server.attach(session, b"g" * 16)
    [identity] = server.feed(said(session, wire.Identify(1, RequestIdentity())))
    assert isinstance(identity, wire.IdentifyReply)
    chain = chain_of(identity.root, 120)
    reserve = wire.Reserve(2, 1000, identity.identity_id, b"", chain, RECORD_BYTES)
    [reply] = server.feed(said(session, reserve))
    assert isinstance(reply, wire.ReserveReply) and wire.ReserveOutcome.ENTRIES_FULL in reply.outcomes
    groups = [
        wire.KeyGroup(wire.Rule.PREFIX, chain[32 * reply.outcomes.index(wire.ReserveOutcome.ENTRIES_FULL) :])
    ]
    server.feed(said(session, wire.Lookup(3, 1000, identity.identity_id, "request", groups)))
    [lookup] = server.parts.explainer.explain("request")["lookups"]
    assert lookup["first_miss"]["reason"] == "refused"
    assert (
        lookup["first_miss"]["detail"]
        == "entries_full: every entry of L1's index is in use; raise l1.entries"
    )
    server.close()
