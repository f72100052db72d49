"""Each command is inside the boundary of errors, and `--check` prints notes and what this machine lacks."""

from __future__ import annotations

import errno
import json
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
from kvstrata.process.ports import Listening, refuse_port_twice
from tests.harness import own_commands

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
        (KeyError("x"), Exit.CRASHED, "a defect of kvstrata: KeyError: 'x' (at test_commands.py:"),
        (RuntimeError(), Exit.CRASHED, "a defect of kvstrata: RuntimeError (at test_commands.py:"),
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


HERE = "not on this machine: "
MOONCAKE = {
    "type": "mooncake_store",
    "local_hostname": "a",
    "metadata_server": "P2PHANDSHAKE",
    "protocol": "rdma",
}


def check(*flags: str, command: str = "server", **environment: str) -> tuple[int, list[str]]:
    """Exit status and lines of standard error."""
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith(("KVSTRATA_", "LMCACHE_"))
    }
    done = own_commands.run("kvstrata", command, "--check", *flags, environment=ours | environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [line.partition(": ")[2] for line in done.stderr.splitlines()]


def test_check_works_without_a_home_or_a_runtime_dir() -> None:
    ran = own_commands.run("kvstrata", "server", "--check", environment={"PATH": os.environ["PATH"]})
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["port"] is None


def test_every_note_is_printed() -> None:
    status, said = check("--max-workers", "4", KVSTRATA_L1_EVICTION_POLICY="noop")
    assert status == 0
    notes = [line for line in said if line.startswith("note: ")]
    assert any("--max-workers" in note for note in notes)
    assert any("l1.eviction_policy is noop" in note for note in notes)


def test_a_path_that_the_locale_cannot_spell_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text('l2_adapters: [{type: fs, base_path: "/data/\\u00e9"}]\n')
    old_c = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    status, said = check("--config", str(file), **old_c)
    assert status == 2
    assert said == [
        f"{file}: l2_adapters[0].base_path: must be text that the locale can spell (ascii); start with LC_ALL=C.UTF-8, "
        "found '/data/\\xe9'"
    ]


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        (("--l1-size-gb", "500000"), {}, "l1_size_gb: L1 of 500000.00 GB"),
        (("--l1-numa", "999"), {}, "l1.numa: '999'"),
        (("--http-host", "0.0.0.0"), {"KVSTRATA_HTTP_TOKEN_FILE": "/no/such/token"}, "http.token_file: /no/such"),
        ((), {"KVSTRATA_SECURITY_TENANTS_FILE": "/no/such/tenants"}, "security.tenants_file: /no/such/tenants"),
        (("--cluster-curve-file", "/no/such/keys"), {}, "controller.curve_file: /no/such/keys"),
        (("--l2-adapter", json.dumps(MOONCAKE)), {}, "l2_adapters[0]: mooncake_store-0: "),
    ],
)  # fmt: skip
def test_what_only_this_machine_lacks_has_a_status_of_its_own(flags, environment, says):
    elsewhere = () if "--l2-adapter" in flags else ("--l2-adapter", "none")
    status, said = check(*flags, *elsewhere, "--http-port", "0", **environment)
    assert status == 75, said
    [lack] = [line for line in said if line.startswith(HERE)]
    assert lack.startswith(HERE + says)
    assert said[-1].startswith(
        "these settings can be used on a machine that has what this machine lacks: L1 of "
    )


def test_plugins_are_imported(tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text("raise ValueError('not today')\n")
    adapter = {"type": "plugin", "module_path": "broken_plugin", "class_name": "Adapter"}
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    status, said = check("--l2-adapter", json.dumps(adapter), PYTHONPATH=path)
    assert status == 2
    assert "not today" in said[-1]
    status, said = check("--l2-adapter", json.dumps(adapter | {"module_path": "absent_plugin"}))
    assert status == 75, said
    assert any(line.startswith(HERE) and "absent_plugin" in line for line in said)


@pytest.mark.parametrize(
    ("first", "second", "clash"),
    [
        ("localhost", "127.0.0.1", True),
        ("localhost", "::1", True),
        ("127.0.0.1", "::1", False),
        ("0.0.0.0", "10.0.0.1", True),
        ("*", "::1", False),
        ("::", "127.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
def test_one_port_of_one_address_is_refused_twice(first: str, second: str, clash: bool) -> None:
    ports = [Listening("port", first, 5555), Listening("http.port", second, 5555)]
    if clash:
        with pytest.raises(
            ConfigError, match=f"^http.port: {second}:5555 is also the port of port".replace("*", r"\*")
        ):
            refuse_port_twice(ports)
    else:
        refuse_port_twice(ports)
    refuse_port_twice([one._replace(port=0) for one in ports])
