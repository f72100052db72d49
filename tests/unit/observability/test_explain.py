"""explain.py: every reason of the closed list, what each tenant may see, what is saved, the bounds, and the trend."""

from __future__ import annotations

import pytest

from kvstrata.errors import BadRequest
from kvstrata.observability import explain
from kvstrata.observability.explain import (
    MAX_IDENTITIES_PER_PROBE,
    MAX_LISTED_IDS,
    SAMPLE_S,
    EngineUse,
    Explained,
    Explainer,
    ServerNumbers,
    Trend,
)
from kvstrata.types import LayoutIdentity, MissReason, PoolChange, RequestIdentity, identity_root

LAYOUT = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=256)
REQUEST = RequestIdentity()
PROBE = b"firstone"


class Scene:
    """The explainer of a server, its numbers and their trend, on a clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 1_234.567
        self.counters = ServerNumbers()
        self.explainer = Explainer(self.counters, self, "ARC")
        self.trend = Trend(self.counters, self.explainer, self)

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return int(1_000 * self.now_s)

    def why(
        self,
        number: int = 1,
        *,
        first: bool = True,
        probe: bytes = PROBE,
        in_flight: bool = False,
    ) -> tuple[str, str]:
        root = identity_root(LAYOUT, REQUEST)
        return self.explainer.why(
            key(number), first=first, probe=probe, root=root, layout=LAYOUT, request=REQUEST, in_flight=in_flight
        )  # fmt: skip

    def committed(self, engine: EngineUse, *numbers: int) -> None:
        self.explainer.committed(engine, [key(number) for number in numbers])


@pytest.fixture
def scene() -> Scene:
    return Scene()


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(24)


def explained(request_id: str, tenant: str = "") -> Explained:
    return Explained(request_id, tenant, bytes(32), 0, 1.5, 10, 3, 2, 5, "evicted", "by LRU", key(5))


def test_the_last_event_of_a_key_is_its_reason_with_the_detail(scene: Scene) -> None:
    told = scene.explainer
    assert scene.why()[0] == MissReason.UNKNOWN_KEY, "nobody has named it"
    assert scene.why()[0] == MissReason.NEVER_STORED
    told.left_l1(key(1), PoolChange.EVICTED, 1_234_567)
    assert scene.why() == (MissReason.EVICTED, "by ARC at 1234567 (unix ms)")
    told.left_l1(key(1), PoolChange.CLEARED, 1_234_567)
    assert scene.why() == (MissReason.EVICTED, "by clear at 1234567 (unix ms)")
    told.dropped("fs-0", key(1))
    assert scene.why() == (MissReason.EVICTED, "by the cap of fs-0 at 1234567 (unix ms)")
    assert scene.why(in_flight=True)[0] == MissReason.IN_FLIGHT, "whatever happened before"
    told.refused(key(1), "quota")
    assert scene.why() == (
        MissReason.REFUSED,
        "quota: quotas protect all that could be evicted for it; raise its tenant's in quotas_gb, or lower others",
    )
    told.corrupt(key(1), 5)
    assert scene.why()[0] == scene.why()[0] == MissReason.CORRUPT, "to ask again does not replace it"
    told.put_skipped(key(1), "backlog")
    told.left_l1(key(1), PoolChange.EVICTED, 6)
    told.inserted(key(1))
    assert scene.why() == (MissReason.PUT_SKIPPED, "backlog"), "with the put it would be in L2"
    scene.committed(EngineUse(), 1)
    assert scene.why()[0] == MissReason.UNKNOWN_KEY


def test_once_notes_were_dropped_or_lost_unknown_keys_are_forgotten(scene, monkeypatch):
    monkeypatch.setattr(explain, "MAX_NOTES", 3)
    for number in range(10, 14):
        assert scene.why(number)[0] == MissReason.UNKNOWN_KEY
    assert len(scene.explainer.notes) == 3
    assert scene.why(10)[0] == MissReason.FORGOTTEN
    assert scene.why(13)[0] == MissReason.NEVER_STORED
    other = Scene()
    other.explainer.changes_lost()
    assert other.why()[0] == MissReason.FORGOTTEN


def stored_under(request: RequestIdentity, layout: LayoutIdentity = LAYOUT, probe: bytes = PROBE) -> Scene:
    """The same tokens were stored under this identity."""
    scene = Scene()
    scene.explainer.stored_under(probe, identity_root(layout, request), layout, request)
    return scene


@pytest.mark.parametrize(
    ("field", "layout", "request_identity"),
    [
        ("kv_dtype", LayoutIdentity(model="m", kv_dtype="fp8", chunk_tokens=256), REQUEST),
        ("adapter", LAYOUT, RequestIdentity(adapter="sql-lora")),
    ],
)
def test_the_same_tokens_under_another_identity_name_the_field_that_differs(field, layout, request_identity):
    scene = stored_under(request_identity, layout)
    assert scene.why(first=False)[0] == MissReason.UNKNOWN_KEY, "only the first chunk is compared"
    reason, detail = scene.why()
    assert reason == MissReason.IDENTITY_DIFFERS and detail.startswith(f"{field}: stored with ")


def test_a_difference_tells_no_salt_nothing_of_another_tenant_and_not_the_own_identity() -> None:
    salted = stored_under(RequestIdentity(salt="secret of another user"))
    assert salted.why() == (MissReason.IDENTITY_DIFFERS, "salt")
    assert stored_under(RequestIdentity(tenant="other")).why()[0] == MissReason.UNKNOWN_KEY
    assert stored_under(REQUEST).why()[0] == MissReason.UNKNOWN_KEY
    assert stored_under(RequestIdentity(adapter="x"), probe=b"").why(probe=b"")[0] == MissReason.UNKNOWN_KEY


def test_the_newest_identities_are_compared(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MAX_PROBES", 2)
    for number in range(3 + MAX_IDENTITIES_PER_PROBE):
        request = RequestIdentity(adapter=str(number))
        probe = b"p%d" % min(number, 2)
        scene.explainer.stored_under(probe, identity_root(LAYOUT, request), LAYOUT, request)
    assert scene.why(1, probe=b"p0")[0] == MissReason.UNKNOWN_KEY
    newest = str(2 + MAX_IDENTITIES_PER_PROBE)
    assert scene.why(2, probe=b"p2") == (MissReason.IDENTITY_DIFFERS, f"adapter: stored with '{newest}'")


def test_a_recent_request_is_explained_and_an_old_one_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MAX_LOOKUPS", 3)
    explainer = Scene().explainer
    for number in range(5):
        explainer.lookups.append(explained(f"r{number}"))
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


@pytest.mark.parametrize("of_engine", ["cmpl-7-1f2e3d4c", "cmpl-7-0-1f2e3d4c", "cmpl-7"])
def test_the_id_that_the_client_of_the_api_saw_names_the_lookups_of_the_engine_oldest_first(scene, of_engine):
    told = scene.explainer
    told.lookups.append(explained(of_engine)._replace(unix_ms=1))
    told.lookups.append(explained("cmpl-71-0a0b0c0d"))
    if of_engine == "cmpl-7":
        told.lookups.append(explained("cmpl-7-1-1f2e3d4c"))
    told.lookups.append(explained(of_engine)._replace(unix_ms=2, reason=""))
    document = told.explain("cmpl-7")
    assert document["known"] and document["request_id"] == of_engine
    assert [entry["unix_ms"] for entry in document["lookups"]] == [1, 2]
    assert document["lookups"][1]["first_miss"] is None
    assert not told.explain("cmpl-7-")["known"]


@pytest.mark.parametrize("of_engine", ["cmpl-7-1f2e3d4c", "cmpl-7-0-1f2e3d4c", "cmpl-7"])
def test_the_newest_lookup_is_found_by_either_id_until_it_is_forgotten(scene, monkeypatch, of_engine):
    monkeypatch.setattr(explain, "MAX_LOOKUPS", 3)
    told = explain.Explainer(scene.explainer._counters, scene.explainer._clock, "LRU")

    def looked_up(request_id: str, unix_ms: int) -> None:
        found = explained(request_id)._replace(unix_ms=unix_ms)
        told.looked_up(explain.EngineUse(), 0, found)

    for number in (1, 2):
        looked_up(of_engine, number)
    for name in {of_engine, "cmpl-7"}:
        assert told.newest(name).unix_ms == 2
    for number in range(9):
        looked_up(f"other{number}", 3)
    assert told.newest("cmpl-7") is told.newest(of_engine) is None
    assert len(told._newest) == 3 * 3


def test_an_id_that_several_requests_begin_with_is_refused_and_lists_them(scene: Scene) -> None:
    told = scene.explainer
    for number in range(2):
        told.lookups.append(explained(f"cmpl-7-{number}-1f2e3d4c"))
    listed = "cmpl-7-0-1f2e3d4c, cmpl-7-1-1f2e3d4c"
    with pytest.raises(
        BadRequest, match=f"2 recent requests begin with 'cmpl-7': {listed}; give one"
    ) as refused:
        told.explain("cmpl-7")
    assert refused.value.field == "request_id"
    for number in range(MAX_LISTED_IDS):
        told.lookups.append(explained(f"cmpl-7-{number}-2f2e3d4c"))
    with pytest.raises(BadRequest, match=r"10 recent requests .*-1f2e3d4c, .* and 2 more; give one"):
        told.explain("cmpl-7")


def test_what_lookups_save_counts_for_their_engine_and_in_all(scene: Scene) -> None:
    engine, other = EngineUse(), EngineUse()
    for use, saved_s in ((engine, 0.0), (engine, 1.5), (other, 2.0)):
        scene.explainer.looked_up(use, 0, explained("r")._replace(chunks=10, served_chunks=5), saved_s)
    scene.committed(engine, 7, 1)
    assert (engine.avoided_s, other.avoided_s, scene.explainer.avoided_s) == (1.5, 2.0, 3.5)
    assert (engine.lookups, engine.lookup_chunks, engine.hit_chunks, engine.stored_records) == (2, 20, 10, 2)


def test_the_windows_of_the_trend_are_differences_of_totals_of_a_known_length(scene: Scene) -> None:
    def lookup(chunks: int, hits: int, reason: str) -> None:
        scene.counters.lookup.add(0.001)
        found = explained("r")._replace(chunks=chunks, l1_chunks=hits, l2_chunks=0, served_chunks=hits)
        scene.explainer.looked_up(EngineUse(), 0, found._replace(reason=reason))

    def passes(samples: int) -> None:
        for _ in range(samples):
            scene.now_s += SAMPLE_S
            scene.trend.sample()

    lookup(10, 6, "evicted")
    scene.now_s += 2.0
    section = scene.trend.section()
    for name in ("minute", "hour", "start"):
        assert section[name] == {
            "seconds": 2.0, "lookups": 1, "lookup_chunks": 10, "l1_hit_chunks": 6, "l2_hit_chunks": 0,
            "lookup_s": 0.001, "avoided_s": 0.0, "first_misses": {"evicted": 1},
        }, "it reaches back to the start"  # fmt: skip
    passes(24)
    lookup(5, 0, "never_stored")
    section = scene.trend.section()
    assert section["minute"]["lookup_chunks"] == 5
    assert section["minute"]["first_misses"] == {"never_stored": 1}
    assert section["hour"]["lookup_chunks"] == section["start"]["lookup_chunks"] == 15
    assert 60 <= section["minute"]["seconds"] < 60 + SAMPLE_S
    passes(744)
    section = scene.trend.section()
    assert section["minute"]["lookups"] == section["hour"]["lookups"] == 0
    assert section["start"]["lookups"] == 2
    assert 3_600 <= section["hour"]["seconds"] < 3_600 + SAMPLE_S
