"""The states of an adapter host, as its server sees them."""

from __future__ import annotations

import enum

from kvstrata.states import Machine


class HostState(enum.StrEnum):
    """Whether a child can be asked."""

    CLOSED = "closed"
    """No child runs, and only `open` starts one."""
    STARTING = "starting"
    """A child was spawned; its adapter is not open yet."""
    UP = "up"
    """The child's adapter is open."""
    DOWN = "down"
    """The child has ended or is being killed; another is started after a pause."""


class HostEvent(enum.Enum):
    """What happens to an adapter host."""

    SPAWN = enum.auto()
    """A child is spawned: by `open`, or in place of one that was reaped."""
    OPENED = enum.auto()
    """The child says that its adapter is open."""
    BROKEN = enum.auto()
    """The child has closed the channel, sent an impossible frame, refused to open, or was silent for too long."""
    CLOSE = enum.auto()
    """`close` was called here, and the child was reaped."""


MACHINE = Machine(
    "Adapter host",
    HostState,
    HostEvent,
    HostState.CLOSED,
    {
        HostState.CLOSED: {HostEvent.SPAWN: HostState.STARTING, HostEvent.CLOSE: HostState.CLOSED},
        HostState.STARTING: {
            HostEvent.OPENED: HostState.UP,
            HostEvent.BROKEN: HostState.DOWN,
            HostEvent.CLOSE: HostState.CLOSED,
        },
        HostState.UP: {HostEvent.BROKEN: HostState.DOWN, HostEvent.CLOSE: HostState.CLOSED},
        HostState.DOWN: {HostEvent.SPAWN: HostState.STARTING, HostEvent.CLOSE: HostState.CLOSED},
    },
)
