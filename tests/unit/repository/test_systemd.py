"""The units that ship: systemd takes them, and the command lines in them are ours."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kvstrata.config.flags import parser_of
from kvstrata.config.private_dir import UNITS_RUN
from kvstrata.process.keeper import NO_SUPERVISE

UNITS = sorted((Path(__file__).parents[3] / "configs" / "systemd").glob("*.service"))
pytestmark = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser


def test_the_command_line_of_each_unit_is_valid(path: Path) -> None:
    program, command, *arguments = shlex.split(unit(path)["Service"]["ExecStart"])
    assert (program, command) == ("/usr/bin/env", path.stem.rstrip("@"))
    assert NO_SUPERVISE in arguments
    parser_of(command).parse_args(arguments)


def test_no_other_user_can_take_a_units_names_and_the_unit_can_change_nothing_of_the_system(path):
    service = unit(path)["Service"]
    folder = f"{UNITS_RUN.name}-%i" if path.stem.endswith("@") else UNITS_RUN.name
    assert (service["RuntimeDirectory"], service["RuntimeDirectoryMode"]) == (folder, "0700")
    assert service["RuntimeDirectoryPreserve"] == "yes", "the other units still use it"
    assert f"XDG_RUNTIME_DIR={UNITS_RUN.parent / folder}" in service["Environment"].split()
    assert [service[name] for name in ("PrivateTmp", "NoNewPrivileges")] == ["yes", "yes"]
    assert service["ProtectSystem"] == "full"


def test_systemd_analyze_finds_no_fault_in_the_units(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (apt-get install systemd)")
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False
    )
    assert [line for line in checked.stderr.splitlines() if path.name in line] == []
