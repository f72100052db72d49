"""The commands' entry points: what they print and how they end."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from kvstrata import __version__
from kvstrata.cli import main
from tests.harness import own_commands


def test_kvstrata_without_arguments_lists_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "server" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_an_unknown_subcommand_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sever"]) == 2
    assert "'sever'" in capsys.readouterr().err


def check(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return own_commands.run(
        "kvstrata", "server", "--check", *flags, environment={"PATH": os.environ["PATH"], **environment}
    )


def test_check_works_without_a_home_or_a_runtime_dir() -> None:
    ran = check()
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["port"] is None
    assert "up to 1023 engine processes" in ran.stderr


def test_check_takes_settings_from_the_environment_and_flags_win() -> None:
    ran = check("--port", "6000", KVSTRATA_PORT="5000", KVSTRATA_L1_SIZE_GB="0.25")
    assert ran.returncode == 0, ran.stderr
    settings = json.loads(ran.stdout)
    assert (settings["port"], settings["l1"]["size_gb"]) == (6000, 0.25)


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        ((), {"KVSTRATA_PROT": "1"}, "KVSTRATA_PORT"),
        ((), {"XDG_RUNTIME_DIR": "relative/dir"}, "XDG_RUNTIME_DIR"),
        (("--socket-dir", "/" + "d" * 200), {}, "socket_dir"),
        (("--l1-size-gb", "0.0001"), {}, "l1_size_gb"),
        (("--l1-size-gb", "-1"), {}, "--l1-size-gb: must be a number above 0"),
        (("--eviction-policy", "FIFO"), {}, "--eviction-policy: must be one of LRU, ARC, S3FIFO, noop"),
        (("--l2-adapter", "{"), {}, "l2_adapters[0]"),
        (("--config", "/nonexistent.yaml"), {}, "/nonexistent.yaml"),
        (("--http-host", "0.0.0.0"), {}, "http.host"),
    ],
)
def test_check_names_the_wrong_setting(
    flags: tuple[str, ...], environment: dict[str, str], says: str
) -> None:
    ran = check(*flags, **environment)
    assert ran.returncode == 2
    assert says in ran.stderr, ran.stderr
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
