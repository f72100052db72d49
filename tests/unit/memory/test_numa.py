"""`l1.numa`: the nodes that it means on a machine, and what the kernel is asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvstrata.config.load import load
from kvstrata.config.model import ServerSettings
from kvstrata.errors import ConfigError, MachineLacks, SegmentError
from kvstrata.memory import linux, numa
from kvstrata.memory.numa import nodes_of


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for name in ("node0", "node1", "node10", "possible"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_each_setting_means_nodes_of_this_machine(nodes: Path) -> None:
    assert nodes_of("interleave", nodes) == [0, 1, 10]
    assert nodes_of("10", nodes) == [10]


def test_a_kernel_without_nodes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MachineLacks, match="nodes are: none; leave --l1-numa out"):
        nodes_of("interleave", tmp_path)


@pytest.mark.parametrize("value", ["gpu", "0,1", "0-1", "-1", ""])
def test_unknown_settings_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"l1\.numa"):
        load(ServerSettings, flags={"l1": {"numa": value}})


def test_a_refusal_of_the_kernel_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(policy: int, nodes: list[int]) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(numa, "nodes_of", lambda setting: [0])
    monkeypatch.setattr(linux, "set_memory_policy", refuse)
    numa.place("default")
    with pytest.raises(SegmentError, match=r"l1\.numa: '0': the kernel refuses.*--cap-add SYS_NICE"):
        numa.place("0")
