"""Tells systemd how a service stands: sd_notify(3), over the unix datagram socket that NOTIFY_SOCKET names.

Without this variable nothing is sent.  A message that cannot be sent is dropped: systemd's trouble is no reason to stop
serving.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping

SOCKET, WATCHDOG, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


class Systemd:
    """What this process tells systemd, if systemd started it.

    The variables are taken out of `environment`, so that no child speaks for us.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        path = environment.pop(SOCKET, "")
        watchdog, pid = environment.pop(WATCHDOG, ""), environment.pop(WATCHDOG_PID, "")
        # "@" stands for the zero byte that begins an abstract address.
        self._address = path.replace("@", "\0", 1) if path.startswith("@") else path
        self._socket: socket.socket | None = None
        if path.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        self.watchdog_s: float | None = None
        """systemd ends this process if it hears nothing for this long; None: it does not watch."""
        if (
            self._socket is not None
            and pid in ("", str(os.getpid()))
            and watchdog.isascii()
            and watchdog.isdigit()
        ):
            self.watchdog_s = int(watchdog) / 1e6 or None

    def ready(self, status: str) -> None:
        """The start, or a reload, is complete. `status`: one line for `systemctl status`."""
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Settings are read again; `ready` follows."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading")

    def stopping(self, status: str, budget_s: float) -> None:
        """The process ends within `budget_s`, which may be longer than TimeoutStopSec of its unit."""
        self._tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(budget_s * 1e6)}", f"STATUS={status}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._tell(f"STATUS={status}")

    def alive(self) -> None:
        """The event loop runs."""
        self._tell("WATCHDOG=1")

    def close(self) -> None:
        """Send nothing from now on. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, *lines: str) -> None:
        if self._socket is not None:
            try:
                self._socket.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                pass  # see the module
