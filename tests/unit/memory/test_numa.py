"""`l1.numa`: the nodes that it means on a machine, and what the kernel is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.memory.segment_settings import nodes_of


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for name in ("node0", "node1", "node10", "possible"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_each_setting_means_nodes_of_this_machine(nodes: Path) -> None:
    assert nodes_of("interleave", nodes) == [0, 1, 10]
    assert nodes_of("10", nodes) == [10]
