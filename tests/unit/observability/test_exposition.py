"""observability/exposition.py and families.py: the page /metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from kvstrata.observability.exposition import FRESH_S, Pages, ServerCollector
from kvstrata.observability.families import FAMILIES, PATHS, place_of
from kvstrata.observability.metrics import MAX_TRACE_CHARS, ServerCounters

OPEN = "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"


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


def pages(numbers: dict[str, Any], *, counters: ServerCounters | None = None) -> Pages:
    return Pages(ServerCollector("i1", counters or ServerCounters(), lambda: numbers))


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


@pytest.mark.parametrize("accept", ["", "text/plain", OPEN])
def test_both_formats_are_valid_and_have_every_family(accept: str) -> None:
    page = pages(document_of_all_paths()).page(accept)
    families = list((parse_open if accept == OPEN else parse_plain)(page.text.decode()))
    assert page.media_type.startswith(
        "application/openmetrics-text" if accept == OPEN else "text/plain; version=0.0.4"
    )
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
    first = made.page("")
    counters.lookup_chunks = 7
    assert made.page("") is first
    assert "kvstrata_lookup_chunks_total 7.0" in made.page(OPEN).text.decode(), (
        "the other format is made by itself"
    )
    now_s[0] += FRESH_S
    assert "kvstrata_lookup_chunks_total 7.0" in made.page("").text.decode()


def exemplars_of(counters: ServerCounters) -> list[tuple[dict[str, str], float]]:
    counters.lookup.add(0.003, "r1")
    counters.lookup.add(0.004, "r2" + "x" * 500)
    counters.lookup.add(7.0)
    families = parse_open(pages({}, counters=counters).page(OPEN).text.decode())
    [lookups] = [family for family in families if family.name == "kvstrata_lookup_seconds"]
    return [(sample.exemplar.labels, sample.exemplar.value) for sample in lookups.samples if sample.exemplar]


def test_exemplars_name_the_last_request_of_a_bucket_where_they_are_wanted() -> None:
    assert exemplars_of(ServerCounters(exemplars=True)) == [
        ({"request_id": ("r2" + "x" * 500)[:MAX_TRACE_CHARS]}, 0.004)
    ]
    assert exemplars_of(ServerCounters()) == []
