"""The commands' entry points: what they print and how they end."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from kvstrata import __version__
from kvstrata.cli import main, sim
from kvstrata.config.secrets import SECRET_LEFT_OUT, shown


def test_kvstrata_without_arguments_lists_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "server" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("command", ["server", "controller", "ctl", "bench", "cluster", "l2", "doctor"])
def test_every_subcommand_tells_the_version(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--version"]) == 0
    assert capsys.readouterr().out == f"kvstrata {__version__}\n"


def test_an_unknown_subcommand_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sever"]) == 2
    assert "'sever'" in capsys.readouterr().err


def test_secrets_are_masked_and_paths_of_secret_files_are_not() -> None:
    settings = {
        "security": {"curve_secret_file": "/etc/keys", "tenants_file": "/etc/tenants"},
        "l2_adapters": [
            {"type": "resp", "password": "hunter2", "username": "u", "auth": {"secret_access_key": "abc"}}
        ],
        "http": {"token_file": ""},
    }
    public, left_out = shown(settings)
    text = json.dumps(public)
    assert "hunter2" not in text and "abc" not in text
    assert "/etc/keys" in text and "/etc/tenants" in text
    assert public["l2_adapters"][0]["password"] == SECRET_LEFT_OUT
    assert public["l2_adapters"][0]["username"] == "u"
    assert left_out == ["l2_adapters[0].password", "l2_adapters[0].auth.secret_access_key"]


def check(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstrata", "server", "--check", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], **environment},
        check=False,
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


def test_the_line_of_a_simulated_engine_stays_whole_beside_other_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Stream())
    sim.say("serving m")
    assert written == ["kvstrata sim: serving m\n"]
