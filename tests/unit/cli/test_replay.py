"""`kvstrata replay` draws what it prints; tests/integration has replays of what a server recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvstrata.cli import replay


def replayed(folder: Path, *words: str) -> int:
    """Replay ten turns of a conversation that grows; return the exit status."""
    trace = folder / "trace.jsonl"
    turns = [{"timestamp": 1_000 * turn, "hash_ids": [*range(4 * turn)]} for turn in range(1, 11)]
    trace.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return replay.main([str(trace), "--chunk-mb", "1", *words])


def test_the_plot_has_a_curve_for_each_column(tmp_path, capsys):
    path = tmp_path / "curves.svg"
    assert replayed(tmp_path, "--l1-size-gb", "0.05", "0.01", "--json", "--plot", str(path)) == 0
    large, small = json.loads(capsys.readouterr().out)["sizes"]
    curves = ElementTree.parse(path).getroot().findall("{*}polyline")
    assert len(curves) == 4
    for curve, name in zip(curves, [name for name in large if re.match("hits|seconds", name)], strict=True):
        (left, low), (right, high) = (map(float, point.split(",")) for point in curve.get("points").split())
        assert (left, right) == (60, 500), "the smaller size stands to the left"
        assert (300 - low, 300 - high) == pytest.approx((270 * small[name], 270 * large[name]), abs=0.1)


def test_a_plot_that_cannot_be_written_is_an_error(tmp_path, capsys):
    assert replayed(tmp_path, "--plot", str(tmp_path / "missing" / "curves.svg")) != 0
    assert f"--plot: {tmp_path}/missing/curves.svg: No such file or directory" in capsys.readouterr().err


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
