"""`l1.numa`: the nodes that it means on a machine, and what the kernel is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.config.load import load
from kvstrata.config.model import ServerSettings
from kvstrata.errors import ConfigError
from kvstrata.memory.numa import nodes_of


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for name in ("node0", "node1", "node10", "possible"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_each_setting_means_nodes_of_this_machine(nodes: Path) -> None:
    assert nodes_of("interleave", nodes) == [0, 1, 10]
    assert nodes_of("10", nodes) == [10]


@pytest.mark.parametrize("value", ["gpu", "0,1", "0-1", "-1", ""])
def test_unknown_settings_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"l1\.numa"):
        load(ServerSettings, flags={"l1": {"numa": value}})
