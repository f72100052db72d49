"""The boundary of commands: every command is inside it, and each kind of error has its status."""

from __future__ import annotations

import errno
import os
import re
import socket
import tomllib
from importlib import import_module
from pathlib import Path

import httpx
import pytest

from kvstrata import __version__, cli
from kvstrata.cli.boundary import Exit, guarded
from kvstrata.errors import (
    BadRequest,
    ConfigError,
    Unavailable,
)

ROOT = Path(__file__).resolve().parents[3]
BENCHES = ("engine", "l2", "serve")


def inside(main: object) -> bool:
    return hasattr(main, "__wrapped__")


def test_every_command_is_inside_the_boundary() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for place in scripts.values():
        module, _, name = place.partition(":")
        assert inside(getattr(import_module(module), name)), place
    for command in re.findall(r"^  (\w+)  ", cli.USAGE, re.MULTILINE):
        assert inside(cli._command(command)), command
    for bench in BENCHES:
        assert inside(import_module(f"kvstrata.cli.bench.{bench}").main), bench


def test_a_command_is_asked_for_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for words, status, says in (
        (["--help"], 0, "server"),
        (["--version"], 0, __version__),
        (["sever"], 2, "'sever'"),
    ):
        assert cli.main(words) == status
        out, err = capsys.readouterr()
        assert says in (err if status else out)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ConfigError("--url: 'foo' must be http://HOST:PORT"), Exit.CONFIG, "--url: 'foo' must be http://HOST:PORT"),
        (BadRequest("no such job"), Exit.FAILED, "no such job"),
        (Unavailable("no answer"), Exit.FAILED, "no answer"),
        (KeyboardInterrupt(), Exit.INTERRUPTED, "interrupted"),
        (OSError(errno.EMFILE, "Too many"), Exit.CONFIG, "too many open files: this process may have"),
        (PermissionError(errno.EACCES, "Permission denied", "/a\nb"), Exit.FAILED, "/a\\nb: Permission denied"),
        (KeyError("x"), Exit.CRASHED, "a defect of kvstrata: KeyError: 'x' (at test_boundary.py:"),
        (RuntimeError(), Exit.CRASHED, "a defect of kvstrata: RuntimeError (at test_boundary.py:"),
        (SystemExit(2), 2, None),
        (SystemExit(None), Exit.DONE, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)  # fmt: skip
def test_an_error_is_one_line_with_the_command_and_has_its_status(error, status, says, capsys):
    @guarded("kvstrata x")
    def main(arguments: object) -> int:
        raise error

    assert main() == status
    told = capsys.readouterr().err
    if says is None:
        assert told == ""
    else:
        assert told.startswith(f"kvstrata x: {says}") and told.count("\n") == 1, told


def test_the_path_in_an_error_may_be_any_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")

    @guarded("kvstrata x")
    def main(arguments: object) -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    assert main() == Exit.FAILED
    assert "\\udcff: No such file or directory" in capsys.readouterr().err


def test_no_request_to_this_machine_goes_through_a_proxy(monkeypatch, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        for name in ("http_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "somewhere.example")
        monkeypatch.setenv("no_proxy", "")
        for host in ("127.0.0.1", "localhost", "[::1]"):
            assert cli.main(["ctl", "status", "--url", f"http://{host}:9"]) == Exit.FAILED
        with pytest.raises(BlockingIOError):
            proxy.accept()
        assert "somewhere.example" in os.environ["no_proxy"]
        httpx.Client().close()  # it can read these variables
