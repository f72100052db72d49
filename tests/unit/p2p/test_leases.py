"""p2p/leases.py: each leased key is given out once, and the owner of every lease hears of its end."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata.p2p.leases import Lease, LeaseBook, LeaseState
from kvstrata.testing.strategies import key_of
from kvstrata.types import Extent

KEYS = [key_of(n) for n in range(8)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.sampled_from(KEYS), min_size=1, unique=True)),
        st.tuples(st.just("take"), st.lists(st.sampled_from(KEYS), min_size=1)),
        st.tuples(st.just("read"), st.integers(0, 5)),
        st.tuples(st.just("lost"), st.integers(0, 5)),
        st.tuples(st.just("unused"), st.integers(0, 3)),
        st.tuples(st.just("released"), st.integers(0, 5)),
    )
)


@given(steps)
@example([("add", KEYS[:1]), ("take", KEYS[:1]), ("lost", 0), ("read", 0)])
def test_each_leased_key_is_given_out_once_and_each_lease_ends_once(history: list) -> None:
    book = LeaseBook()
    model: dict[bytes, Lease] = {}
    over: list[Lease] = []
    told: set[Lease] = set()
    gone: set[Lease] = set()
    reading: list[tuple[Lease, int]] = []
    granted: list[Lease] = []
    now_s = 0.0
    for word, what in history:
        now_s += 1.0
        if word == "add":
            extents = {key: Extent(0, 100, 0, 0) for key in what}
            lease = Lease("a", len(granted) + 1, 1, extents, now_s + 4.0, now_s)
            granted.append(lease)
            replaced = book.add(lease)
            model.update(dict.fromkeys(what, lease))
            for older in replaced:
                assert older not in model.values()
                assert all(one is not older for one, _ in reading)
            over += replaced
        elif word == "take":
            taken = book.take(what, now_s)
            for lease, extents in taken.items():
                for place, _ in extents:
                    assert model.pop(what[place]) is lease
                reading.append((lease, 100 * len(extents)))
            missing = set(range(len(what))) - {place for extents in taken.values() for place, _ in extents}
            for place in missing:
                lease = model.get(what[place])
                assert lease is None or lease.until_s <= now_s
        elif word == "read" and reading:
            lease, n_bytes = reading.pop(what % len(reading))
            if book.read(lease, n_bytes, now_s):
                assert lease not in gone and lease not in model.values()
                assert all(one is not lease for one, _ in reading)
                over.append(lease)
        elif word == "lost" and granted:
            lease = granted[what % len(granted)]
            book.lost(lease)
            gone.add(lease)
            model = {key: one for key, one in model.items() if one is not lease}
        elif word == "unused":
            for lease in book.unused(now_s, float(what)):
                model = {key: one for key, one in model.items() if one is not lease}
                over.append(lease)
        elif word == "released" and over:
            lease = over[what % len(over)]
            if lease not in told:
                told.add(lease)
                gone.add(lease)
                book.released(lease)
        assert len(over) == len(set(over)), "a lease is over twice"
        assert len(book) == sum(lease not in gone for lease in granted)
        assert book.under_way_bytes("a") == 100 * len(model) + sum(n for _, n in reading)
        standing = book.leading(KEYS, now_s)
        expected = 0
        for key in KEYS:
            if key not in model or model[key].until_s < now_s:
                break
            expected += 1
        assert len(standing) == expected
    for lease, n_bytes in reading:
        over += [lease] if book.read(lease, n_bytes, now_s) else []
    over += book.end_all()
    assert len(over) == len(set(over))
    for lease in set(over) - told:
        book.released(lease)
    assert {lease.state for lease in granted} <= {LeaseState.GONE}
    assert (len(book), book.under_way_bytes("a"), book.leading(KEYS, 0.0)) == (0, 0, [])
