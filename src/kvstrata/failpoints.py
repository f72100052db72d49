"""Named points in the server's protocol at which a test can kill, freeze or disturb the process.

Only `arm()` activates points, from KVSTRATA_FAILPOINTS, and only in an environment with KVSTRATA_TESTING=1; otherwise
`hit` costs one comparison.  KVSTRATA_FAILPOINTS holds `name=action` pairs separated by commas.  The action is `kill`
(SIGKILL), `stop` (SIGSTOP) or `crash` (RuntimeError, as a mistake of ours would raise), and `@n` delays it to the n-th
time that the point is reached: `lookup.done=stop@2`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from kvstrata.errors import ConfigError

VARIABLE = "KVSTRATA_FAILPOINTS"
TESTING_VARIABLE = "KVSTRATA_TESTING"
"""Set to `1`, it allows two things that only tests want: this module's points, and adapters that fail on purpose."""

OPERATIONS = (
    "identify",
    "ping",
    "lookup",
    "release",
    "reserve",
    "commit",
    "abort",
    "cancel",
    "retrieve",
    "quiesced",
    "corrupt",
)
_PHASES = {
    "received": "the message was read, nothing has been done",
    "done": "its effects are in the pool, the reply has not been sent",
    "replied": "the socket has the reply",
}

POINTS: dict[str, str] = {
    **{f"{op}.{phase}": says for op in OPERATIONS for phase, says in _PHASES.items()},
    "attach.received": "a process asked to attach, it has no row",
    "attach.accepted": "the process's row is claimed and the descriptors were sent",
    "attach.locked": "the byte of the process's row is locked, and the process has been told so",
    "load.reserved": "extents for chunks from L2 are reserved, the adapter has not been asked",
    "load.read": "the adapter answered, nothing is committed",
    "load.committed": "the loaded chunks are visible, the fetch has not been told",
    "put.started": "a chunk is held for a put, the adapter has not been asked",
    "put.stored": "the adapter answered, the hold is dropped",
    "recut.made": "a chunk's records of another geometry are written, none is committed",
}
"""Every point, and the state of the server when the point is reached."""

_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": None}
_armed: dict[str, tuple[signal.Signals | None, int]] = {}
"""By point: the signal (None: an exception), and at which time."""
_reached: dict[str, int] = {}


def is_testing(environment: Mapping[str, str]) -> bool:
    """Whether TESTING_VARIABLE is `1` in this environment."""
    return environment.get(TESTING_VARIABLE) == "1"


def arm(environment: Mapping[str, str]) -> None:
    """Arm the points that VARIABLE names. Raises ConfigError for an unknown point or action, and outside tests."""
    _armed.clear()
    _reached.clear()
    text = environment.get(VARIABLE, "")
    if not text:
        return
    if not is_testing(environment):
        raise ConfigError(
            f"{VARIABLE}: kills or stops this process at named points, for tests; remove it, or set "
            f"{TESTING_VARIABLE}=1 too",
            field=VARIABLE,
        )
    for pair in text.split(","):
        name, _, action = pair.partition("=")
        action, _, nth = action.partition("@")
        if name not in POINTS or action not in _ACTIONS or not (nth or "1").isdigit():
            raise ConfigError(
                f"{VARIABLE}: {pair!r} is not POINT=kill|stop|crash[@n] with a known point", field=VARIABLE
            )
        _armed[name] = (_ACTIONS[action], int(nth or 1))


def hit(name: str, phase: str = "") -> None:
    """Called when the process reaches the point `name` (or `name.phase`): acts if the point is armed."""
    if not _armed:
        return
    point = f"{name}.{phase}" if phase else name
    assert point in POINTS, point
    if point in _armed:
        _reached[point] = _reached.get(point, 0) + 1
        action, nth = _armed[point]
        if _reached[point] == nth:
            if action is None:
                raise RuntimeError(f"failpoint {point}")
            os.kill(os.getpid(), action)
