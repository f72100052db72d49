"""The kernel's count of processes that it killed in our control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.process.keeper import oom_kills

V1 = (
    "memory:/a/b",
    "sys/fs/cgroup/memory/a/b/memory.oom_control",
    "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
)
V2 = ":/a/b", "sys/fs/cgroup/a/b/memory.events", "low 0\noom 9\noom_kill 7\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("group", "path", "text", "count"),
    [
        (*V1, 7),
        (*V2, 7),
        ("cpu,memory:/", "sys/fs/cgroup/memory/memory.oom_control", "oom_kill 3\n", 3),
        ("memory:/of/the/host", "sys/fs/cgroup/memory/memory.oom_control", "oom_kill 2\n", 2),
        (":/", "sys/fs/cgroup/unified/memory.events", "oom_kill 1\n", 1),
        ("cpu:/a/b", *V1[1:], 0),
        (*V1[:2], "under_oom 0\n", 0),
        (*V1[:2], "oom_kill many\n", 0),
        ("memory:/a/b", "elsewhere", "oom_kill 7\n", 0),
    ],
)
def test_the_count_is_that_of_our_group(tmp_path: Path, group: str, path: str, text: str, count: int) -> None:
    for name, content in (("proc/self/cgroup", f"4:{group}\n"), (path, text)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert oom_kills(f"{tmp_path}/") == count


def test_without_control_groups_nothing_is_counted(tmp_path: Path) -> None:
    assert oom_kills(f"{tmp_path}/") == 0
