"""The pages of `kvstrata ctl`: at most 40 lines of 80 columns whatever the server holds, warnings first, and safe."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.cli import pages
from kvstrata.cli.pages import Seen

HOSTILE = "\x1b]0;owned\x07\x9b2J\nx" + "y" * 200
GB = 1 << 30


def window(**more: Any) -> dict[str, Any]:
    return {
        "seconds": 60.0, "lookups": 10, "lookup_chunks": 100, "l1_hit_chunks": 70, "l2_hit_chunks": 10,
        "lookup_s": 0.5, "avoided_s": 41.5, "first_misses": {"never_stored": 5, "evicted": 1}, **more,
    }  # fmt: skip


def seen(rows: int = 1, name: str = "a", **trend: Any) -> Seen:
    return Seen(
        {
            "instance": {"instance_id": f"host-5555{name}", "ready": True, "uptime_s": 4_000.0, "version": "0.1.0"},
            "pool": {
                "used_bytes": 3 * GB, "extents_bytes": 4 * GB, "missing_bytes": 0, "corrupt_entries": 0,
                "entries": {"ready": 1_234_567}, "leased_bytes": GB, "evicted_entries": 10**9,
            },
            "attach": {"stranded_bytes": 0}, "process": {"restarts": 0, "last_end": ""},
            "sessions": {"leases_revoked": 0}, "log": {"dropped_lines": 0}, "l2_store": {"backlog_bytes": 0},
            "trend": {"minute": window(), "hour": window(), "start": window(), "computed_chunks": 3, **trend},
            "engines": [
                {"engine": f"{number:032x}", "model": name, "processes": 2, "complete": True, "lookups": 7,
                 "lookup_chunks": 50, "hit_chunks": 25, "stored_records": 25, "avoided_s": 3.25,
                 "url": "http://10.0.0.1:8000", "pids": [1_234_567, 1_234_568, 1_234_569], "leases": 3,
                 "pinged_ago_s": 0.4}
                for number in range(rows)
            ],
            "tenants": [{"tenant": name, "bytes": GB, "quota_bytes": -1} for _ in range(rows)],
        },
        [
            {"name": f"fs-{number}", "state": "active", "breakers": {"load": "closed"}, "numbers": {},
             "usage": {"used_bytes": GB, "capacity_bytes": 2 * GB, "records": 99}, "loads": {"loading_bytes": 5},
             "puts": {"queued": 2, "outcomes": {"stored": 9}, "stored_bytes": 1_000}}
            for number in range(rows)
        ],
    )  # fmt: skip


def troubled(rows: int) -> Seen:
    """A server about which there is much to say, in names that are too long and not printable."""
    found = seen(rows, HOSTILE)
    status = found.status
    status["instance"]["ready"] = False
    status["pool"]["missing_bytes"] = status["attach"]["stranded_bytes"] = GB
    status["process"] = {"restarts": 3, "last_end": HOSTILE}
    status["log"]["dropped_lines"] = status["sessions"]["leases_revoked"] = 7
    status["trend"]["hour"]["first_misses"] = {"breaker_open": 1, HOSTILE: 100}
    for tier in found.tiers:
        tier["state"], tier["breakers"] = "draining", {"load": "open", "put": HOSTILE}
    for engine in status["engines"]:
        engine["complete"] = False
    return found


PAGES = {
    "quiet": lambda: pages.server_page(seen(0)),
    "usual": lambda: pages.server_page(seen(2)),
    "crowded": lambda: pages.server_page(troubled(50)),
    "top": lambda: pages.Top().draw(troubled(50)),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_40_lines_of_80_columns_and_no_escape_sequence(name: str) -> None:
    shown = PAGES[name]()
    assert len(shown) <= pages.LINES, "\n".join(shown)
    assert max(map(len, shown)) <= pages.COLUMNS
    assert all(line.isprintable() for line in shown)


def test_rates_are_the_differences_between_two_looks() -> None:
    top, before, now = pages.Top(), seen(1), seen(1)
    now.status["instance"]["uptime_s"] += 10
    now.status["engines"][0]["lookups"] += 50
    top.draw(before)
    [row] = [line for line in top.draw(now) if line.startswith("00000000")]
    assert row.split()[2] == "5.0"
