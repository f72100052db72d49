"""process/sd_notify.py: what is sent where, and that trouble with the socket is nobody's trouble."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvstrata.process.sd_notify import Systemd


@pytest.fixture
def systemd(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def told(systemd: socket.socket) -> list[str]:
    return systemd.recv(4096).decode().splitlines()


def test_states_are_sent_as_sd_notify_has_them(systemd: socket.socket) -> None:
    service = Systemd({"NOTIFY_SOCKET": systemd.getsockname()})
    service.status("starting")
    assert told(systemd) == ["STATUS=starting"]
    service.ready("serving")
    assert told(systemd) == ["READY=1", "STATUS=serving"]
    service.reloading()
    first, second, third = told(systemd)
    assert (first, third) == ("RELOADING=1", "STATUS=reloading")
    assert second.startswith("MONOTONIC_USEC=") and second.partition("=")[2].isdigit()
    service.stopping("stopping", 1.5)
    assert told(systemd) == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=1500000", "STATUS=stopping"]
    service.alive()
    assert told(systemd) == ["WATCHDOG=1"]
    service.close()
    service.close()
    service.alive()
    with pytest.raises(BlockingIOError):
        told(systemd)


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
