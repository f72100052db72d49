"""Named points in the server's protocol at which a test can kill or freeze the process.

Armed only by `arm()` from KVSTRATA_FAILPOINTS, and only where the testing extra is installed; otherwise `hit`
is one comparison.  The variable holds `name=action` pairs separated by commas; action is `kill` (SIGKILL) or
`stop` (SIGSTOP), with `@n` for the n-th time the point is reached: `lookup.done=stop@2`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Mapping

from kvstrata.errors import ConfigError

VARIABLE = "KVSTRATA_FAILPOINTS"

OPERATIONS = (
    "hello",
    "identify",
    "ping",
    "lookup",
    "release",
    "reserve",
    "commit",
    "abort",
    "cancel",
    "retrieve",
    "prefetch",
    "status",
    "clear",
    "explain",
    "quiesced",
    "corrupt",
)
_PHASES = {
    "received": "the message was read, nothing has been done",
    "done": "its effects are in the pool, the reply has not been sent",
    "replied": "the reply was handed to the socket",
}

POINTS: dict[str, str] = {
    **{f"{op}.{phase}": says for op in OPERATIONS for phase, says in _PHASES.items()},
    "attach.received": "a process asked to attach, it has no row",
    "attach.accepted": "its row is claimed and the descriptors were sent",
    "attach.locked": "its row's byte is locked, it has been told so",
    "load.reserved": "extents for chunks from L2 are reserved, nothing was read",
    "load.read": "the adapter answered, nothing is committed",
    "load.committed": "the loaded chunks are visible, nobody was told",
    "put.started": "a chunk is held for a put, the adapter has not been asked",
    "put.stored": "the adapter answered, the hold is dropped",
}
"""Every point and what holds when it is reached."""

_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_armed: dict[str, tuple[signal.Signals, int]] = {}
_reached: dict[str, int] = {}


def arm(environment: Mapping[str, str]) -> None:
    """Read the variable. Raises ConfigError for an unknown point or action, or without the testing extra."""
    _armed.clear()
    _reached.clear()
    text = environment.get(VARIABLE, "")
    if not text:
        return
    if importlib.util.find_spec("hypothesis") is None:
        raise ConfigError(f"{VARIABLE}: needs the testing extra: pip install kvstrata[test]", field=VARIABLE)
    for pair in text.split(","):
        name, _, action = pair.partition("=")
        action, _, nth = action.partition("@")
        if name not in POINTS or action not in _ACTIONS or not (nth or "1").isdigit():
            raise ConfigError(
                f"{VARIABLE}: {pair!r} is not POINT=kill|stop[@n] with a known point", field=VARIABLE
            )
        _armed[name] = (_ACTIONS[action], int(nth or 1))


def hit(name: str, phase: str = "") -> None:
    """The process has come to point `name` (or `name.phase`)."""
    if not _armed:
        return
    point = f"{name}.{phase}" if phase else name
    assert point in POINTS, point
    if point in _armed:
        _reached[point] = _reached.get(point, 0) + 1
        action, nth = _armed[point]
        if _reached[point] == nth:
            os.kill(os.getpid(), action)
