"""A real controller's HTTP API: commands to instances, explanations, claims and copies, and wrong requests."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvstrata.native.core import chain_keys, storage_keys
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.cluster_wire import KvKind
from kvstrata.types import LayoutIdentity, RequestIdentity, Slice, identity_root
from tests.harness.cache_engine import eventually
from tests.harness.cluster_instance import Refused, key_of, tags_of

pytestmark = pytest.mark.integration


def ended(controller: Any, number: int) -> dict[str, Any] | None:
    """The facts of the event that tells how a command has ended; None until then."""
    rows = controller.ask("/v1/events")["events"]
    return next((row["facts"] for row in rows if row["facts"].get("number") == number), None)


def test_an_http_request_waits_for_a_document_that_an_instance_sends(controller, instance):
    a = instance("a").join({})
    answered: dict[str, Any] = {}

    def ask() -> None:
        answered.update(controller.ask("/v1/instances/a/status?wait_s=30"))

    thread = threading.Thread(target=ask)
    thread.start()
    asked = a.operation()
    a.answer(asked, {"pool": {"entries": 3}})
    thread.join()
    assert asked.operation == wire.AskStatus()
    assert answered["done"] and answered["ok"] and answered["document"] == {"pool": {"entries": 3}}


def test_a_command_whose_connection_ends_is_not_sent_again_and_says_what_is_not_known(controller, instance):
    a = instance("a").join({})
    number = controller.ask("/v1/clear", {"wait_s": 0})["commands"][0]["number"]
    a.operation()
    a.reopen()

    told = eventually("the command has ended", lambda: ended(controller, number))
    assert not told["ok"] and "may have been carried out" in told["message"]
    a.until_followed()
    assert not a.has_operation()


def test_the_dashboards_state_agrees_with_the_lists_of_the_api(controller, instance):
    instance("a").join({"l1": tags_of(range(5)), "disk-0": tags_of(range(9))})
    whole, listed = controller.ask("/v1/state"), controller.ask("/v1/instances")
    ([row], [other]) = whole["instances"], listed["instances"]
    assert row["keys"] == whole["cluster"]["keys"] == {"l1": 5, "disk-0": 9}
    times = {"heard_ago_s", "joined_ago_s", "following"}
    assert {**row, **dict.fromkeys(times)} == {**other, **dict.fromkeys(times)}


def test_draining_and_removing_an_instance(controller, instance):
    a, b = instance("a").join({"l1": tags_of([1])}), instance("b").join({})
    assert controller.ask("/v1/instances/a/drain", {"wait_s": 0})["commands"][0]["kind"] == "drain"
    assert b.where(tags_of([1])) == []
    assert controller.ask("/v1/lookup", {"keys": [key_of(1)]})["chunks"][0]["places"]
    controller.ask("/v1/instances/a/undrain", {"wait_s": 0})
    assert b.where(tags_of([1]))
    assert controller.ask("/v1/instances/a", method="DELETE") == {"id": "a", "was": "live", "barred": True}
    assert b.where(tags_of([1])) == []
    with pytest.raises(Refused) as refused:
        a.register()
    assert refused.value.code == "not_permitted"
    controller.ask("/v1/instances/a/allow", {})
    a.join({"l1": tags_of([1])})
    assert b.where(tags_of([1]))


def test_a_prompt_is_found_by_its_tokens(controller, instance):
    layout = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=16)
    slices = sorted(Slice(layers=(0, 2), kv_heads=(n, n + 1), layout="x").digest() for n in range(2))
    root = identity_root(layout, RequestIdentity(tenant="t"))
    keys = storage_keys(root, chain_keys(root, list(range(64)), 16), b"".join(slices))
    a = instance("a").join({"l1": wire.tags_of(keys[: 3 * 64 + 32]), "disk-0": wire.tags_of(keys)})
    asked = {"tokens": list(range(70)), "tenant": "t"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        controller.ask("/v1/lookup", asked)
    assert refused.value.code == 400 and "no engine has" in json.load(refused.value)["message"]
    a.tell(models=[KvKind(layout, slices)])
    found = controller.ask("/v1/lookup", asked)
    assert (found["n_chunks"], found["n_slices"], found["held_chunks"]) == (4, 2, 4)
    assert found["longest"] == [{"instance": "a", "chunks": 3, "tokens": 48, "confirmed": True}]
    assert [[place["tier"] for place in chunk["places"]] for chunk in found["chunks"]] == [
        *[["l1", "disk-0"]] * 3,
        ["disk-0"],
    ]
    assert controller.ask("/v1/lookup", {**asked, "tenant": "other"})["held_chunks"] == 0
    assert controller.ask("/v1/models")["models"][0]["instances"] == ["a"]


def test_claim_replicate_move_and_evict_ask_the_right_instances(controller, instance):
    a, b = instance("a").join({"l1": tags_of(range(4))}), instance("b").join({})
    keys = [key_of(number) for number in range(4)]
    asked = {"keys": keys[:2], "instance": "a", "ttl_s": 60, "wait_s": 0}
    answer = controller.ask("/v1/claims", asked)
    assert not answer["done"] and answer["commands"][0]["state"] == "under_way"
    number = answer["commands"][0]["number"]
    claim = a.operation()
    assert claim.operation == wire.Claim(bytes.fromhex("".join(keys[:2])), 60)
    a.answer(claim, refused="no_room: 0 bytes may still be claimed")
    told = eventually("it has failed", lambda: ended(controller, number))
    assert (told["ok"], told["message"].partition(":")[0]) == (False, "no_room")

    with ThreadPoolExecutor(1) as threads:
        listed = threads.submit(controller.ask, "/v1/claims?wait_s=30")
        for one, rows in ((a, [{"claim": "c"}]), (b, [])):
            one.answer(one.operation(), {"claims": rows})
        assert listed.result() == {"claims": [{"instance": "a", "claim": "c"}], "unanswered": []}
    assert sorted(controller.ask("/v1/claims?wait_s=0")["unanswered"]) == ["a", "b"]
    for one in (a, b):
        one.answer(one.operation(), {"claims": []})

    controller.ask("/v1/claims/c/release", {"wait_s": 0})
    for one in (a, b):
        release = one.operation()
        assert release.operation == wire.Release("c")
        one.answer(release, {"count": int(one is a)})

    moved = controller.ask("/v1/move", {"keys": [keys[0]], "to": "b", "wait_s": 0})
    assert not moved["done"]
    pull = b.operation()
    assert isinstance(pull.operation, wire.Pull) and pull.operation.owner.instance == "a"
    assert not a.has_operation()
    b.answer(pull, {"count": 1})
    drop = a.operation()
    assert drop.operation == wire.Evict(bytes.fromhex(keys[0]))
    a.answer(drop, {"count": 1})

    controller.ask("/v1/move", {"keys": keys[:2], "to": "b", "source": "a", "wait_s": 0})
    b.answer(b.operation(), {"count": 1, "reason": "evicted"})
    eventually(
        "the incomplete move is announced",
        lambda: "move_incomplete" in {row["kind"] for row in controller.ask("/v1/events")["events"]},
    )
    assert not a.has_operation(), "chunks that did not arrive stay at their source"

    controller.ask("/v1/replicate", {"keys": [keys[1]], "to": "b", "source": "a", "wait_s": 0})
    b.answer(b.operation(), refused="absent")
    assert not a.has_operation()

    controller.ask("/v1/instances/a/freeze", {"seconds": 5, "wait_s": 0})
    freeze = a.operation()
    assert freeze.operation == wire.Freeze(5_000)
    a.answer(freeze)

    told = controller.ask("/v1/evict", {"keys": [keys[3]], "wait_s": 0})
    assert [row["instance"] for row in told["commands"]] == ["a"]


def test_events_are_read_by_cursor_and_by_long_poll(controller, instance):
    cursor = controller.ask("/v1/events")["next_after"]
    told: list[dict[str, Any]] = []
    thread = threading.Thread(
        target=lambda: told.append(controller.ask(f"/v1/events?after={cursor}&wait_s=30"))
    )
    thread.start()
    instance("a").register()
    thread.join()
    assert told[0]["events"][0]["kind"] == "joined"
    assert controller.ask(f"/v1/events?after={cursor}&limit=1")["events"] == told[0]["events"][:1]
    assert controller.ask("/v1/events?after=0")["lost"]
