"""`kvstrata replay` of traces; tests/integration has replays of what a server recorded."""

from __future__ import annotations

import json

from kvstrata.cli import replay


def test_late_stores_add_to_the_engines_own_cache(tmp_path, capsys):
    trace = tmp_path / "turns.jsonl"
    turns = [
        {"timestamp": 1_000 * turn, "hash_ids": [*range(10 * (turn % 2), 10 * (turn % 2) + 10)]}
        for turn in range(20)
    ]
    trace.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    hits = {}
    for store in ("commit", "late"):
        words = [
            str(trace),
            "--chunk-mb",
            "1",
            "--l1-size-gb",
            "0.011",
            "--engine-gb",
            "0.011",
            "--l2",
            "--json",
        ]
        assert replay.main([*words, "--store", store]) == 0
        hits[store] = json.loads(capsys.readouterr().out)["sizes"][0]["hits_LRU"]
    assert hits == {"commit": 0.0, "late": 0.9}
    assert replay.main([str(trace), "--chunk-mb", "1", "--store", "late"]) != 0
    assert "--store late: needs --engine-gb" in capsys.readouterr().err
