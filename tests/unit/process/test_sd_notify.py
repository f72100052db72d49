"""process/lifecycle.py: what is sent where, and that trouble with the socket is nobody's trouble."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvstrata.process.lifecycle import Systemd


@pytest.fixture
def systemd(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


@pytest.mark.parametrize("path", ["", "relative", "/no/such/socket"])
def test_without_systemd_nothing_happens(path: str) -> None:
    service = Systemd({"NOTIFY_SOCKET": path})
    service.ready("serving")
    service.close()


@pytest.mark.parametrize(
    ("usec", "pid", "expected_s"),
    [
        ("3000000", "ours", 3.0),
        ("3000000", "", 3.0),
        ("3000000", "1", None),
        ("0", "", None),
        ("", "", None),
        ("soon", "", None),
    ],
)
def test_the_watchdog_is_fed_only_if_it_watches_this_process(
    systemd: socket.socket, usec: str, pid: str, expected_s: float | None
) -> None:
    environment = {
        "NOTIFY_SOCKET": systemd.getsockname(),
        "WATCHDOG_USEC": usec,
        "WATCHDOG_PID": str(os.getpid()) if pid == "ours" else pid,
        "PATH": "/bin",
    }
    service = Systemd(environment)
    assert service.watchdog_s == expected_s
    assert environment == {"PATH": "/bin"}, "children do not speak for us"
    service.close()
