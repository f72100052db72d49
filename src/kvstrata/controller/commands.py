"""Commands of a controller to its instances: each is sent once, to the instance's control port, and ends once.

1. A command that was sent may have been carried out although no answer came: its connection ended, it expired, the
   member is gone, or this controller no longer leads.  Nothing is sent again.
2. At most MAX_SENT commands of a member are under way; at most MAX_WAITING have not ended.  The last MAX_ENDED commands
   of all members are remembered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from kvstrata.controller.member import Issued, Member, MemberState, Result
from kvstrata.errors import ClusterFailure, Refused, Unavailable
from kvstrata.rpc.cluster_wire import CommandKind, Do, Outcome

MAX_SENT = 16
MAX_WAITING = 256
MAX_ENDED = 1_024
COMMAND_TTL_S = 600.0
ANSWER_S = 2.0
"""Time for the answer to arrive, beyond the command's own."""


class Commands:
    """The commands to all members. Belongs to the event loop."""

    def __init__(
        self,
        first_number: int,
        proof: Callable[[], tuple[int, int]] = lambda: (0, 0),
        ended: Callable[[Issued], None] = lambda issued: None,
    ) -> None:
        """`first_number` must be greater than the number of any earlier command.

        `proof()`: token and cluster id of this controller's leadership.  `ended` is called for each that has ended.
        """
        self._next_number = first_number
        self._proof = proof
        self._ended = ended
        self._recent: OrderedDict[int, Issued] = OrderedDict()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def get(self, number: int) -> Issued | None:
        """The recent command with this number; None if there is none."""
        return self._recent.get(number)

    def recent(self) -> list[Issued]:
        """Recent commands, oldest first."""
        return list(self._recent.values())

    def issue(
        self,
        member: Member,
        kind: CommandKind,
        argument: dict[str, Any],
        now_s: float,
        *,
        ttl_s: float = COMMAND_TTL_S,
    ) -> Issued:
        """Make a command, and send it as soon as fewer than MAX_SENT are under way. Raises as `check_room`."""
        self.check_room(member, 1)
        issued = Issued(self._next_number, member.id, kind, argument, now_s, ttl_s)
        self._next_number += 1
        member.waiting[issued.number] = issued
        self._recent[issued.number] = issued
        while len(self._recent) > MAX_ENDED:
            oldest = next((number for number, old in self._recent.items() if old.result is not None), None)
            if oldest is None:
                break
            del self._recent[oldest]
        self._send_next(member)
        return issued

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

    def room(self, member: Member, kind: CommandKind) -> bool:
        """Whether the controller may issue a command of its own: none of this kind waits, and there is room."""
        return len(member.waiting) < MAX_WAITING and not any(
            issued.kind is kind for issued in member.waiting.values()
        )

    def end_all(self, member: Member, why: str) -> None:
        """End all commands of a member."""
        for issued in list(member.waiting.values()):
            self._end(member, issued, Result(False, why))

    def give_up(self, members: Iterable[Member], why: str) -> None:
        """End all commands of these members."""
        for member in members:
            self.end_all(member, why)

    def _send_next(self, member: Member) -> None:
        sent = sum(issued.is_sent for issued in member.waiting.values())
        for issued in list(member.waiting.values()):
            if sent >= MAX_SENT:
                return
            if not issued.is_sent:
                issued.is_sent, sent = True, sent + 1
                name = f"command-{issued.kind}"
                self._tasks[issued.number] = asyncio.create_task(self._send(member, issued), name=name)

    async def _send(self, member: Member, issued: Issued) -> None:
        assert member.follower is not None, "a live member is followed"
        token, cluster_id = self._proof()
        asked = Do(0, issued.kind, issued.argument, round(1000 * issued.ttl_s), token, cluster_id)
        try:
            outcome = await member.follower.link.ask(asked, Outcome, issued.ttl_s + ANSWER_S)
            result = Result(True, "", outcome.body)
        except ClusterFailure as refused:
            result = Result(False, refused.message)
        except Unavailable as silent:
            result = Result(False, f"{silent.message}; it may have been carried out")
        del self._tasks[issued.number]
        self._end(member, issued, result)

    def _end(self, member: Member, issued: Issued, result: Result) -> None:
        task = self._tasks.pop(issued.number, None)
        if task is not None:
            task.cancel()
        issued.result = result
        issued.ended.set()
        del member.waiting[issued.number]
        self._ended(issued)
        if member.state is MemberState.LIVE and member.waiting:
            self._send_next(member)
