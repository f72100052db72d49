"""All wrong fields of the entries of `--l2-adapter` are said at once, each with its value."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstrata.config.model import ServerSettings
from kvstrata.errors import AllWrong, ConfigError, MachineLacks
from kvstrata.server.plan import plan
from kvstrata.storage.entry import configure_tier

FS = {"type": "fs", "base_path": "/data/kv"}


def said(entry: dict[str, Any]) -> dict[str, str]:
    """What is said about an entry, by field."""
    with pytest.raises(ConfigError) as raised:
        configure_tier(entry, 2)
    found = [line.partition(": ") for line in raised.value.lines]
    assert all(field.startswith("l2_adapters[2].") for field, _, _ in found)
    return {field.removeprefix("l2_adapters[2]."): says for field, _, says in found}


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ({"type": "fss", "deadline_ms": 0, "isolation": "no"}, ["type", "deadline_ms", "isolation"]),
        ({**FS, "per_op_workers": {"store": 0, "retreive": 1}}, ["per_op_workers.store", "per_op_workers.retreive"]),
        ({**FS, "num_workers": 0, "capacity_gb": "1", "codec": "zip"}, ["codec", "capacity_gb", "num_workers"]),
        ({**FS, "codec": ["zip", {"name": "zstd", "level": "x", "planes": 3, "lvl": 1}]},
         ["codec[0]", "codec[1].level", "codec[1].planes", "codec[1].lvl"]),
        # Rules about fields are checked once all of them are right by themselves.
        ({**FS, "host_kill_ms": 500, "num_workers": 0, "relative_tmp_dir": "/tmp"}, ["host_kill_ms", "num_workers"]),
        ({**FS, "host_kill_ms": 500, "relative_tmp_dir": "/tmp"}, ["host_kill_ms", "relative_tmp_dir"]),
    ],
)  # fmt: skip
def test_all_wrong_fields_of_an_entry_are_named(entry: dict[str, Any], wrong: list[str]) -> None:
    assert list(said(entry)) == wrong


def test_all_entries_are_looked_at(tmp_path: Path) -> None:
    entries = [{**FS, "num_workers": 0}, FS, {"type": "fss"}, {"type": "disk", "base_path": str(tmp_path)}]
    with pytest.raises(ConfigError) as raised:
        plan(ServerSettings(l2_adapters=entries), {"HOME": str(tmp_path)})
    fields = [line.partition(": ")[0] for line in raised.value.lines]
    assert fields == ["l2_adapters[0].num_workers", "l2_adapters[2].type", "l2_adapters[3].capacity_gb"]


def test_a_server_prints_a_line_for_each(tmp_path: Path) -> None:
    flags = []
    for entry in (
        '{"type": "fs", "base_path": "/x", "num_workers": 0, "polcy": "through"}',
        '{"type": "fss"}',
    ):
        flags += ["--l2-adapter", entry]
    command = [sys.executable, "-m", "kvstrata.cli.server", "--check", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "l2_adapters[0].num_workers",
        "l2_adapters[0].polcy",
        "l2_adapters[1].type",
    ]
    assert "must be a whole number from 1 to 256, found 0" in lines[0]


def test_what_several_entries_lack_on_this_machine_is_no_error_of_a_check(tmp_path: Path) -> None:
    entries = [{**FS, "codec": [{"name": "mac", "key_file": f"/no/such/{n}"}]} for n in range(2)]
    lacking: list[str] = []
    plan(ServerSettings(l2_adapters=entries), {"HOME": str(tmp_path)}, lacking)
    assert [lack.partition(": ")[0] for lack in lacking] == [
        "l2_adapters[0].codec[0].key_file",
        "l2_adapters[1].codec[0].key_file",
    ]
    with pytest.raises(MachineLacks):
        plan(ServerSettings(l2_adapters=entries), {"HOME": str(tmp_path)})


def test_other_errors_are_not_collected() -> None:
    wrong = AllWrong()
    with pytest.raises(KeyError), wrong:
        {}["x"]
    wrong.tell()
    with wrong:
        raise ConfigError("port: wrong", field="port")
    with pytest.raises(ConfigError, match="port: wrong"):
        wrong.tell()
