"""Requests name their tenants: which identity each gets, what it shares in vLLM's own cache, what is refused."""

from __future__ import annotations

import logging

import pytest

from kvstrata.types import RequestIdentity
from tests.harness.scheduler_side import FakeClient, arrive, ask, make_request, make_side, step

MAY_NAME = {"tenant": "blue", "request_tenants": ["green", "a b", "größe"]}
HOSTILE = [
    ("red", "tenant_refused"),
    ("", "tenant_refused"),
    ("green ", "tenant_refused"),
    ("\x1b[2Jgreen\n", "tenant_refused"),
    ("\ud800", "tenant_refused"),
    ("g" * 256, "tenant_refused"),
    ("g" * 257, "tenant_invalid"),
    (None, "tenant_invalid"),
    (["green"], "tenant_invalid"),
]


def named(tenant, n_tokens=40, **changes):
    return make_request(n_tokens, kv_transfer_params={"kvstrata.tenant": tenant}, **changes)


def stored(side, request):
    """The stores of a new request; vLLM gives its blocks back."""
    side.on_new_request(request)
    assert ask(side, request)[0] == 0
    return step(side, [(request, 0, request.num_tokens)]).stores


def test_a_request_has_the_tenant_that_it_names_or_else_the_engines_own():
    for params, tenant in (
        (None, "blue"),
        ("no mapping", "blue"),
        ({"kvstrata.tenant": "green", "do_remote_prefill": False}, "green"),
        ({"kvstrata.tenant": "größe"}, "größe"),
    ):
        side = make_side(settings=MAY_NAME)
        (store,) = stored(side, make_request(40, kv_transfer_params=params))
        assert store.identity == RequestIdentity(tenant=tenant)


@pytest.mark.parametrize(("tenant", "reason"), HOSTILE)
def test_a_refused_name_is_served_without_the_cache_and_under_no_tenant(tenant, reason, caplog):
    client = FakeClient(hits=3)
    side = make_side(client, settings=MAY_NAME)
    declared = list(client.identities)
    request = named(tenant)
    with caplog.at_level(logging.WARNING, "vllm.kvstrata"):
        assert stored(side, request) == []
    assert side.finished(request, [list(range(1, 100))]) is False
    assert step(side).stores == []
    assert client.identities == declared and client.calls == [] and client.leases == []
    assert side.take_counts() == {f"skipped_{reason}": 1}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.isprintable() and line.isascii() and len(line) < 2000 and request.request_id in line


def test_hostile_names_write_one_line_a_minute_and_are_all_counted(caplog):
    side = make_side(settings=MAY_NAME)
    with caplog.at_level(logging.WARNING, "vllm.kvstrata"):
        for number in range(50):
            side.on_new_request(named(f"nobody-{number}"))
    assert len(caplog.records) == 1
    assert side.take_counts() == {"skipped_tenant_refused": 50}


def test_no_client_can_make_the_salt_of_another_tenant():
    side, other = make_side(settings=MAY_NAME), make_side(settings=MAY_NAME)
    first = named("green")
    side.on_new_request(first)
    elsewhere = named("green")
    other.on_new_request(elsewhere)
    assert first.cache_salt != elsewhere.cache_salt, "another engine's salts tell nothing"
    guess = arrive(side, 40, cache_salt=elsewhere.cache_salt)
    assert guess.block_hashes[0] != first.block_hashes[0]


def test_a_tenant_that_the_server_refuses_is_counted_and_stored_under_no_other():
    client = FakeClient(hits=3)
    client.forbidden = {"green"}
    side = make_side(client, settings=MAY_NAME)
    assert stored(side, named("green")) == []
    assert side.take_counts() == {"skipped_tenant_refused": 1}
    assert client.calls == [] and client.leases == []
    side.on_new_request(request := named("blue"))
    assert ask(side, request) == (24, False)


def test_an_engine_of_one_tenant_touches_no_request_and_declares_one_identity():
    client = FakeClient()
    side = make_side(client)
    request = make_request(40, cache_salt="pepper")
    hashes = list(request.block_hashes)
    request.update_block_hashes = None
    side.on_new_request(request)
    assert (request.cache_salt, request.block_hashes) == ("pepper", hashes)
    assert client.identities[0] == RequestIdentity() and len(client.identities) == 2
