"""Whether a controller knows everything that the instance holds: the states of its full syncs.

Events that arise while the state is not IDLE are queued, and sent when it is IDLE again.
"""

from __future__ import annotations

import enum

from kvstrata.states import Machine


class SyncState(enum.Enum):
    """How much the controller knows."""

    IDLE = enum.auto()
    """Everything; new events are sent as they come."""
    WANTED = enum.auto()
    """Too little: a full sync begins with the next heartbeat."""
    RUNNING = enum.auto()
    """A full sync is under way."""
    AGAIN = enum.auto()
    """A full sync is under way, and another one became necessary after it began."""
    FAILED = enum.auto()
    """A full sync has failed; the next one is wanted after a pause."""


class SyncEvent(enum.Enum):
    """An event in the life of full syncs."""

    WANTED = enum.auto()
    """A registration, lost or overflowed events, a command, or the end of the pause requires a full sync."""
    BEGUN = enum.auto()
    """A full sync begins and queues events."""
    ENDED = enum.auto()
    """The controller has all parts and has acknowledged the end."""
    FAILED = enum.auto()
    """The controller has refused or not answered a step."""


MACHINE = Machine(
    "Full sync of a controller, as its instance runs it",
    SyncState,
    SyncEvent,
    SyncState.IDLE,
    {
        SyncState.IDLE: {SyncEvent.WANTED: SyncState.WANTED},
        SyncState.WANTED: {SyncEvent.WANTED: SyncState.WANTED, SyncEvent.BEGUN: SyncState.RUNNING},
        SyncState.RUNNING: {
            SyncEvent.WANTED: SyncState.AGAIN,
            SyncEvent.ENDED: SyncState.IDLE,
            SyncEvent.FAILED: SyncState.FAILED,
        },
        SyncState.AGAIN: {
            SyncEvent.WANTED: SyncState.AGAIN,
            SyncEvent.ENDED: SyncState.WANTED,
            SyncEvent.FAILED: SyncState.WANTED,
        },
        SyncState.FAILED: {SyncEvent.WANTED: SyncState.WANTED},
    },
)
