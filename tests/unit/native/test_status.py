"""What the native modules raise for a Status, cell by cell, and the reasons of the core beside those of Python."""

from __future__ import annotations

import itertools

from kvstrata.native.pool import PoolError
from kvstrata.native.record import RecordError
from kvstrata.native.registry import RegistryError
from kvstrata.native.status import CODES, SITES, error_of, reasons
from kvstrata.policy.reasons import blames_medium

FAILURES = [code for code in CODES if code != "ok"]
OTHERS = {
    "call": ValueError,
    "items": ValueError,
    "lanes": ValueError,
    "record": RecordError,
    "pool": PoolError,
    "registry": RegistryError,
}
"""By site: the class for every code that `CELLS` does not name."""
CELLS = {
    ("call", "os_error"): OSError,
    ("lanes", "os_error"): OSError,
    ("pool", "os_error"): OSError,
    ("call", "no_space"): MemoryError,
    ("items", "no_space"): MemoryError,
    ("lanes", "no_space"): MemoryError,
    ("lanes", "closed"): RuntimeError,
    ("pool", "bad_argument"): ValueError,
    ("registry", "bad_argument"): ValueError,
}


def test_each_code_of_each_site_is_raised_as_its_class() -> None:
    assert set(OTHERS) == set(SITES)
    for site, code in itertools.product(SITES, FAILURES):
        assert type(error_of(code, site)) is CELLS.get((site, code), OTHERS[site]), (site, code)


def test_errors_have_the_words_of_their_reasons() -> None:
    for code in FAILURES:
        error = error_of(code, "pool")
        if isinstance(error, PoolError):
            assert error.reason == code
            assert error_of(code, "pool", reason="sessions_full").reason == "sessions_full"  # type: ignore[attr-defined]
        error = error_of(code, "registry")
        word = "no_space" if code == "no_space" else "bad_slot"
        assert isinstance(error, ValueError) or error.reason == word  # type: ignore[attr-defined]


def test_a_message_has_the_value_the_limit_and_the_index() -> None:
    assert str(error_of("bad_argument", "call")) == "field: wrong"
    assert (
        str(error_of("bad_argument", "call", details=(5, 4, 3)))
        == "field: wrong (got 5, limit 4, at index 3)"
    )
    assert (
        str(error_of("bad_argument", "items", details=(5, 4, 3))) == "items[3].field: wrong (got 5, limit 4)"
    )
    assert str(error_of("bad_argument", "items", details=(5, 4, -1))) == "field: wrong (got 5, limit 4)"
    assert str(error_of("internal", "pool", details=(5, 4, 0))) == "field: wrong (5, 4)"
    record = error_of("corrupt", "record")
    assert isinstance(record, RecordError)
    assert record.field == "field"


def test_a_system_error_has_its_number_and_text() -> None:
    for site in SITES:
        error = error_of("os_error", site, details=(2, 0, 0))
        if isinstance(error, OSError):
            assert error.errno == 2
            assert "field: wrong: No such file or directory" in str(error)


def test_each_reason_of_an_adapter_blames_what_the_policy_blames() -> None:
    for row in reasons():
        if row.word != "sessions_full":  # the pool's, which no policy hears
            assert row.blames_medium == blames_medium(row.word), row.word
