"""policy/misses.py: every reason of the closed list, the bounds of each memory, and what each tenant may see."""

from __future__ import annotations

import pytest

from kvstrata.errors import BadRequest
from kvstrata.policy.misses import (
    MAX_IDENTITIES_PER_PROBE,
    MAX_LISTED_IDS,
    Explained,
    Explainer,
    IdentityMemory,
    KeyMemory,
    RequestMemory,
)
from kvstrata.types import LayoutIdentity, MissReason, RequestIdentity, identity_root

LAYOUT = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=256)
REQUEST = RequestIdentity()
PROBE = b"firstone"


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(24)


def why(
    explainer: Explainer,
    number: int = 1,
    *,
    first: bool = True,
    probe: bytes = PROBE,
    layout: LayoutIdentity = LAYOUT,
    request: RequestIdentity = REQUEST,
    in_flight: bool = False,
) -> tuple[str, str]:
    return explainer.why(
        key(number),
        first=first,
        probe=probe,
        root=identity_root(layout, request),
        layout=layout,
        request=request,
        in_flight=in_flight,
        policy="LRU",
    )


def explained(request_id: str, tenant: str = "") -> Explained:
    return Explained(request_id, tenant, bytes(32), 0, 1.5, 10, 3, 2, 5, "evicted", "by LRU", key(5))


def test_the_last_event_of_a_key_is_its_reason_with_the_detail() -> None:
    explainer = Explainer()
    keys = explainer.keys
    assert why(explainer)[0] == MissReason.UNKNOWN_KEY, "nobody has named it"
    keys.missed(key(1), 5)
    assert why(explainer)[0] == MissReason.NEVER_STORED
    keys.note(key(1), MissReason.EVICTED, "ARC", 1_234_567)
    assert why(explainer) == (MissReason.EVICTED, "by ARC at 1234567 (unix ms)")
    assert why(explainer, in_flight=True)[0] == MissReason.IN_FLIGHT, "whatever happened before"
    for reason in (MissReason.REFUSED, MissReason.PUT_SKIPPED, MissReason.CORRUPT):
        keys.note(key(1), reason, "quota", 5)
        assert why(explainer) == (reason, "quota")
    keys.missed(key(1), 6)
    assert why(explainer)[0] == MissReason.CORRUPT, "to ask again does not replace it"
    keys.stored([key(1)])
    assert why(explainer)[0] == MissReason.UNKNOWN_KEY


def test_once_the_memory_overflowed_unknown_keys_are_forgotten() -> None:
    explainer = Explainer()
    explainer.keys = KeyMemory(max_keys=3)
    for number in range(10, 14):
        explainer.keys.missed(key(number), 0)
    assert len(explainer.keys) == 3
    assert why(explainer, 10)[0] == MissReason.FORGOTTEN
    assert why(explainer, 13)[0] == MissReason.NEVER_STORED


def test_lost_events_make_unknown_keys_forgotten() -> None:
    explainer = Explainer()
    explainer.keys.lost_events()
    assert why(explainer)[0] == MissReason.FORGOTTEN


def stored_under(
    request: RequestIdentity, layout: LayoutIdentity = LAYOUT, probe: bytes = PROBE
) -> Explainer:
    """The same tokens were stored under this identity."""
    explainer = Explainer()
    explainer.identities.stored(probe, identity_root(layout, request), layout, request)
    return explainer


@pytest.mark.parametrize(
    ("field", "layout", "request_identity"),
    [
        ("kv_dtype", LayoutIdentity(model="m", kv_dtype="fp8", chunk_tokens=256), REQUEST),
        ("adapter", LAYOUT, RequestIdentity(adapter="sql-lora")),
    ],
)
def test_the_same_tokens_under_another_identity_name_the_field_that_differs(
    field: str, layout: LayoutIdentity, request_identity: RequestIdentity
) -> None:
    explainer = stored_under(request_identity, layout)
    reason, detail = why(explainer)
    assert reason == MissReason.IDENTITY_DIFFERS and detail.startswith(field)
    assert why(explainer, first=False)[0] == MissReason.UNKNOWN_KEY, "only the first chunk is compared"


def test_a_difference_tells_no_salt_nothing_of_another_tenant_and_not_the_own_identity() -> None:
    salted = stored_under(RequestIdentity(salt="secret of another user"))
    assert why(salted) == (MissReason.IDENTITY_DIFFERS, "salt")
    assert why(stored_under(RequestIdentity(tenant="other")))[0] == MissReason.UNKNOWN_KEY
    assert why(stored_under(REQUEST))[0] == MissReason.UNKNOWN_KEY
    without_probe = stored_under(RequestIdentity(adapter="x"), probe=b"")
    assert why(without_probe, probe=b"")[0] == MissReason.UNKNOWN_KEY


def test_the_identity_memory_keeps_the_newest() -> None:
    memory = IdentityMemory(max_probes=2)
    for number in range(3):
        request = RequestIdentity(adapter=str(number))
        memory.stored(b"p%d" % number, identity_root(LAYOUT, request), LAYOUT, request)
    root = identity_root(LAYOUT, REQUEST)
    assert memory.difference(b"p0", root, LAYOUT, REQUEST) is None
    assert memory.difference(b"p2", root, LAYOUT, REQUEST) == ("adapter", "2")
    for number in range(MAX_IDENTITIES_PER_PROBE + 5):
        request = RequestIdentity(adapter=f"many{number}")
        memory.stored(b"p2", identity_root(LAYOUT, request), LAYOUT, request)
    newest = f"many{MAX_IDENTITIES_PER_PROBE + 4}"
    assert memory.difference(b"p2", root, LAYOUT, REQUEST) == ("adapter", newest)


def test_a_recent_request_is_explained_and_an_old_one_is_not_known() -> None:
    explainer = Explainer()
    explainer.requests = RequestMemory(max_requests=3)
    for number in range(5):
        explainer.requests.add(explained(f"r{number}"))
    assert explainer.explain("r1") == {"request_id": "r1", "known": False, "lookups": []}
    document = explainer.explain("r4")
    assert document["known"]
    assert document["lookups"][0]["hits"] == {"l1": 3, "l2": 2, "served": 5}
    assert document["lookups"][0]["first_miss"] == {
        "chunk": 5,
        "reason": "evicted",
        "detail": "by LRU",
        "storage_key": key(5).hex(),
    }
    assert [entry["request_id"] for entry in explainer.recent(2)] == ["r4", "r3"]


def test_all_lookups_of_a_request_are_told_oldest_first() -> None:
    explainer = Explainer()
    explainer.requests.add(explained("r")._replace(unix_ms=1))
    explainer.requests.add(explained("other"))
    explainer.requests.add(explained("r")._replace(unix_ms=2, reason=""))
    lookups = explainer.explain("r")["lookups"]
    assert [entry["unix_ms"] for entry in lookups] == [1, 2]
    assert lookups[1]["first_miss"] is None


@pytest.mark.parametrize("of_engine", ["cmpl-7-1f2e3d4c", "cmpl-7-0-1f2e3d4c"])
def test_the_id_that_the_client_of_the_api_saw_names_the_request_of_the_engine(of_engine: str) -> None:
    explainer = Explainer()
    explainer.requests.add(explained(of_engine)._replace(unix_ms=1))
    explainer.requests.add(explained("cmpl-71-0a0b0c0d"))
    explainer.requests.add(explained(of_engine)._replace(unix_ms=2))
    document = explainer.explain("cmpl-7")
    assert document["known"] and document["request_id"] == of_engine
    assert [entry["unix_ms"] for entry in document["lookups"]] == [1, 2]
    assert not explainer.explain("cmpl-7-")["known"]


def test_an_id_that_several_requests_begin_with_is_refused_and_lists_them() -> None:
    explainer = Explainer()
    for number in range(2):
        explainer.requests.add(explained(f"cmpl-7-{number}-1f2e3d4c"))
    listed = "cmpl-7-0-1f2e3d4c, cmpl-7-1-1f2e3d4c"
    with pytest.raises(
        BadRequest, match=f"2 recent requests begin with 'cmpl-7': {listed}; give one"
    ) as refused:
        explainer.explain("cmpl-7")
    assert refused.value.field == "request_id"
    for number in range(MAX_LISTED_IDS):
        explainer.requests.add(explained(f"cmpl-7-{number}-2f2e3d4c"))
    with pytest.raises(BadRequest, match=r"10 recent requests .*-1f2e3d4c, .* and 2 more; give one"):
        explainer.explain("cmpl-7")


def test_the_exact_id_is_explained_though_others_begin_with_it() -> None:
    explainer = Explainer()
    for request_id in ("cmpl-7-0-1f2e3d4c", "cmpl-7", "cmpl-7-1-1f2e3d4c"):
        explainer.requests.add(explained(request_id))
    document = explainer.explain("cmpl-7")
    assert [entry["request_id"] for entry in document["lookups"]] == ["cmpl-7"]
