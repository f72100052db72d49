"""Commands of a controller to its instances; each is sent once, to the instance's control port, and ends once.

1. A command that was sent may have been carried out although no reply came, because its connection ended, it expired,
   the member left, or this controller no longer leads.  No command is sent again.
2. At most MAX_SENT (member.py) commands of a member are sent at a time; at most MAX_WAITING have not ended.
3. The outcome of a command is published as an event (cluster.py) and kept nowhere else.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kvstrata.controller.member import Member, MemberState
from kvstrata.errors import ClusterFailure, Refused, Unavailable
from kvstrata.rpc.cluster_wire import Do, Operation, Outcome

MAX_WAITING = 256
COMMAND_TTL_S = 600.0
ANSWER_S = 2.0
"""Additional time for the reply to arrive, beyond the command's own."""


class Result(NamedTuple):
    """The outcome of a command."""

    ok: bool
    message: str
    """Why the command failed; empty if it succeeded."""
    body: Mapping[str, Any] = MappingProxyType({})
    """The `count` of changed items, or the requested document."""


class Command:
    """An operation for an instance, and its outcome."""

    def __init__(
        self, number: int, member: Member, operation: Operation, now_s: float, *, quiet: bool
    ) -> None:
        """`quiet`: its success is not recorded as an event."""
        self.number, self.member, self.operation, self.issued_s = number, member, operation, now_s
        self.quiet = quiet
        self.result: Result | None = None
        """Set once: the instance's reply, or the reason why there is none."""
        self.ended = asyncio.Event()
        """Set with `result`."""
        self.task: asyncio.Task[None] | None = None


class Commands:
    """The commands to all members. Belongs to the event loop."""

    def __init__(
        self, first_number: int, proof: Callable[[], tuple[int, int]], ended: Callable[[Command], None]
    ) -> None:
        """`first_number` must be greater than the number of any earlier command.

        `proof()`: token and cluster id of this controller's leadership.  `ended` is called when a command has ended.
        """
        self._numbers = itertools.count(first_number)
        self._proof = proof
        self._ended = ended

    def issue(
        self, member: Member, operation: Operation, now_s: float, ttl_s: float, *, quiet: bool
    ) -> Command:
        """Create a command, which is sent when fewer than MAX_SENT are under way. Raises as `check_room`."""
        self.check_room(member, 1)
        command = Command(next(self._numbers), member, operation, now_s, quiet=quiet)
        member.waiting[command.number] = command
        command.task = asyncio.create_task(self._send(command, ttl_s), name=f"command-{operation.kind}")
        return command

    def check_room(self, member: Member, count: int) -> None:
        """Raise Unavailable if the member is not live, Refused if `count` more commands are too many."""
        if member.state is not MemberState.LIVE:
            raise Unavailable(
                f"instance: {member.id} is {member.state}; only a live instance takes commands",
                field="instance",
            )
        if len(member.waiting) + count > MAX_WAITING:
            raise Refused(
                f"instance: {len(member.waiting)} commands wait for {member.id}, and {count} more would exceed "
                f"{MAX_WAITING}; name fewer chunks, or try again later",
                field="instance",
            )

    def end_all(self, member: Member, why: str) -> None:
        """End all of a member's commands as failed; `why`: the message."""
        for command in list(member.waiting.values()):
            if command.task is not None:
                command.task.cancel()
            self._end(command, Result(False, why))

    async def _send(self, command: Command, ttl_s: float) -> None:
        follower = command.member.follower
        assert follower is not None, "a live member is followed"
        async with command.member.sending:
            token, cluster_id = self._proof()
            asked = Do(0, command.operation, round(1000 * ttl_s), token, cluster_id)
            try:
                outcome = await follower.link.ask(asked, Outcome, ttl_s + ANSWER_S)
                result = Result(True, "", outcome.body)
            except ClusterFailure as refused:
                result = Result(False, refused.message)
            except Unavailable as silent:
                result = Result(False, f"{silent.message}; it may have been carried out")
        self._end(command, result)

    def _end(self, command: Command, result: Result) -> None:
        command.result = result
        command.ended.set()
        del command.member.waiting[command.number]
        self._ended(command)
