"""Tells a test that waits for a log line that there is a new one, so that it need not look again and again.

In an environment with KVSTRATA_TESTING=1, KVSTRATA_TEST_EVENTS names a datagram socket, which gets an empty message
after each line that was written.  A message that finds the socket's queue full is dropped: the messages in the queue
already tell the test to look.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping

from kvstrata.failpoints import is_testing

VARIABLE = "KVSTRATA_TEST_EVENTS"


def waker(environment: Mapping[str, str]) -> Callable[[], None] | None:
    """Tells the test of a new line; None: no test wants to be told."""
    path = environment.get(VARIABLE)
    if not path or not is_testing(environment):
        return None
    wakes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    wakes.setblocking(False)

    def wake() -> None:
        with contextlib.suppress(OSError):
            wakes.sendto(b"", path)

    return wake
