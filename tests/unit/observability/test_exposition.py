"""observability/exposition.py and families.py: the page /metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from kvstrata.observability.exposition import FRESH_S, Pages, ServerCollector
from kvstrata.observability.families import FAMILIES, PATHS, place_of
from kvstrata.observability.metrics import ServerCounters


def places(path: str) -> tuple[str, ...]:
    """The path with an adapter and a word whose names have other characters than letters and digits."""
    return tuple(part.replace("ADAPTER", "fs-0.x").replace("WORD", "skipped:a.b") for part in path.split("."))


def document_of_all_paths() -> dict[str, Any]:
    """A status document with the number 1 at each path."""
    document: dict[str, Any] = {}
    for path in PATHS:
        *above, last = places(path)
        at = document
        for part in above:
            at = at.setdefault(part, {})
        at[last] = 1
    return document


def test_every_path_has_its_family_and_its_labels() -> None:
    for path, name in PATHS.items():
        labels = ["fs-0.x"] * path.count("ADAPTER") + ["skipped:a.b"] * path.count("WORD")
        assert place_of(places(path)) == (name, labels), path
    assert place_of(("l2_adapters", "a", "numbers", "read_bytes")) == (
        "kvstrata_l2_adapter_bytes", ["a", "read"],
    )  # fmt: skip
    assert place_of(("l2_adapters", "a", "numbers", "segments_bytes")) == (
        "kvstrata_l2_segments_bytes",
        ["a"],
    )
    assert place_of(("pool", "no_such_number")) is None


def test_a_page_is_valid_and_has_every_family() -> None:
    pages = Pages(ServerCollector("i1", ServerCounters(), document_of_all_paths))
    families = list(parse_plain(pages.page().decode()))
    assert {family.name for family in families} == set(FAMILIES)
    for family in families:
        assert (family.type, family.documentation) == (
            FAMILIES[family.name].kind,
            FAMILIES[family.name].meaning,
        )


def test_further_readers_get_the_same_page_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTRATA_TESTING")
    counters, now_s = ServerCounters(), [100.0]
    made = Pages(ServerCollector("i1", counters, dict), lambda: now_s[0])
    first = made.page()
    counters.lookup_chunks = 7
    assert made.page() is first
    now_s[0] += FRESH_S
    assert b"kvstrata_lookup_chunks_total 7.0" in made.page()
