"""`kvstrata ctl`: what it prints and how it fails; its pages have at most 40 lines of 80 columns, and are safe."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli import ctl, pages
from kvstrata.cli.pages import Seen
from kvstrata.cli.table import table

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def test_cells_of_a_table_are_words_and_never_literals_of_python():
    row = {"hits": {"l1": 3, "l2": 0}, "miss": None, "tenant": "", "layers": ["a", {"b": True}], "none": {}}
    assert table([row]).splitlines() == [
        "hits        miss  tenant  layers      none",
        "l1=3, l2=0  -     -       a, (b=yes)  -",
    ]


@given(JSON)
def test_any_json_can_be_shown_as_a_table(value):
    assert isinstance(table(value), str)


def test_an_absent_server_is_reported_in_one_line(capsys):
    assert ctl.main(["--url", "http://127.0.0.1:9", "status"]) == 1
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9 does not answer" in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["", "first-secret\nsecond-secret", "sécret"])
def test_a_file_that_holds_no_token_is_named_and_its_secret_is_not_told(capsys, tmp_path, text):
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(text)
    assert ctl.main(["--url", "http://127.0.0.1:9", "--token-file", str(file), "status"]) == 2
    error = capsys.readouterr().err
    assert f"--token-file: {file} must hold the token alone" in error and "secret" not in error


def test_no_text_of_an_engine_is_obeyed_by_the_terminal():
    hostile = "\x1b]0;owned\x07\x9b2J\n\u202e"
    for value in (
        hostile,
        {hostile: hostile},
        {"a": {hostile: 1}},
        [{hostile: hostile, "b": {hostile: hostile}}],
        [hostile],
        {"a": [hostile, {"b": hostile}]},
    ):
        text = table(value)
        assert all(line.isprintable() for line in text.splitlines()) and "\\x1b]0;owned" in text


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
                "forecast_seconds": {"0.5": 0.4693, "1": 0.731, "2": 0.9021, "4": 0.9468},
            },
            "attach": {"stranded_bytes": 0}, "process": {"restarts": 0, "last_end": ""},
            "sessions": {"leases_revoked": 0}, "log": {"dropped_lines": 0}, "l2_store": {"backlog_bytes": 0},
            "trend": {"minute": window(), "hour": window(), "start": window(), **trend},
            "engines": [
                {"engine": f"{number:032x}", "model": name, "processes": 2, "complete": True, "lookups": 7,
                 "lookup_chunks": 50, "hit_chunks": 25, "stored_records": 25, "avoided_s": 3.25,
                 "url": "http://10.0.0.1:8000", "pids": [1_234_567, 1_234_568, 1_234_569], "leases": 3,
                 "pinged_ago_s": 0.4}
                for number in range(rows)
            ],
            "tenants": [
                {"tenant": name, "bytes": GB, "quota_bytes": -1, "part": 0.25,
                 "seconds": {"0.5": 0.1, "1": 0.2, "2": 0.35, "4": 0.4} if number else {}}
                for number in range(rows)
            ],
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
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_40_lines_of_80_columns_and_no_escape_sequence(name: str) -> None:
    shown = PAGES[name]()
    assert len(shown) <= pages.LINES, "\n".join(shown)
    assert max(map(len, shown)) <= pages.COLUMNS
    assert all(line.isprintable() for line in shown)


def test_the_page_says_what_other_sizes_of_l1_would_save() -> None:
    assert "prefill saved by an L1 of 0.5 ×: 47 %, 1 ×: 73 %, 2 ×: 90 %, 4 ×: 95 %" in pages.server_page(
        seen()
    )


def test_the_page_says_what_other_shares_of_l1_would_save_when_there_are_several_tenants() -> None:
    row = next(line for line in pages.server_page(seen(2)) if "35 %" in line)
    assert row.split() == ["a", "1.00", "GB", "-", "25", "%", "10", "%", "20", "%", "35", "%", "40", "%"]
    assert not any("quota" in line for line in pages.server_page(seen(1)))


def test_instances_with_different_engines_for_peers_need_attention() -> None:
    cluster: dict[str, Any] = {
        "ready": True, "election": {"problem": "", "leader": "c"}, "restarts": 0,
        "directory": {"refused_keys_total": 0}, "peer_engines": {"tcp, as p2p.engine says": 1, "none": 2},
    }  # fmt: skip
    assert pages.cluster_warnings(cluster, []) == []
    cluster["peer_engines"]["tcp, since this host has no RDMA card"] = 1
    assert pages.cluster_warnings(cluster, []) == []
    cluster["peer_engines"]["nixl, since this host has an RDMA card"] = 1
    [warning] = pages.cluster_warnings(cluster, [])
    assert warning.startswith("instances use different transfer engines (nixl, tcp)")
