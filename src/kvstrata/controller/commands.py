"""Commands of a controller to its instances: each is repeated until it ends, and ends once.  No I/O, no clock.

1. Every answer to a heartbeat of the member carries the command, until its result arrives, it expires, the member is
   gone, or this controller no longer leads.
2. At most MAX_WAITING commands of a member have not ended.  The last MAX_ENDED commands of all members are remembered.
3. One answer carries at most MAX_COMMANDS commands with at most MAX_BEAT_BYTES of keys, but always one; the next answer
   carries the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from kvstrata.controller.member import Issued, Member, MemberState, Outbox
from kvstrata.errors import Refused, Unavailable
from kvstrata.rpc.cluster_wire import (
    MAX_CLUSTER_MESSAGE_BYTES,
    MAX_COMMANDS,
    Command,
    CommandKind,
    CommandResult,
)

MAX_WAITING = 256
"""Most commands of one member that have not ended."""
MAX_ENDED = 1_024
MAX_BEAT_BYTES = MAX_CLUSTER_MESSAGE_BYTES // 2
"""Most bytes of keys in the commands of one answer."""
COMMAND_TTL_S = 600.0


class Commands:
    """The commands to all members."""

    def __init__(self, outbox: Outbox, first_number: int) -> None:
        """`first_number` must be greater than the number of any earlier command."""
        self._outbox = outbox
        self._next_number = first_number
        self._recent: OrderedDict[int, Issued] = OrderedDict()

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
        """Make a command, for the next heartbeat's answer. Raises Unavailable or Refused as `check_room`."""
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

    def due(self, member: Member) -> list[Command]:
        """The commands for the answer to a heartbeat."""
        commands: list[Command] = []
        n_bytes = 0
        for issued in list(member.waiting.values())[:MAX_COMMANDS]:
            n_bytes += sum(
                len(value) for value in issued.command.argument.values() if isinstance(value, bytes)
            )
            if commands and n_bytes > MAX_BEAT_BYTES:
                break
            issued.is_sent = True
            commands.append(issued.command)
        return commands

    # --- how they end ---------------------------------------------------------------------------------------

    def answered(self, member: Member, results: Sequence[CommandResult]) -> None:
        """A heartbeat brings results; results of commands that have ended are ignored."""
        for result in results:
            issued = member.waiting.get(result.number)
            if issued is not None:
                self._end(member, issued, result)

    def synced(self, member: Member, begun_s: float) -> None:
        """A full sync that began at `begun_s` has ended: it answers the RESYNC commands that were issued before."""
        for issued in list(member.waiting.values()):
            if issued.kind is CommandKind.RESYNC and issued.issued_s <= begun_s:
                self._end(member, issued, CommandResult(issued.number, True, ""))

    def expire(self, member: Member, now_s: float) -> None:
        """End the member's expired commands."""
        over = [issued for issued in member.waiting.values() if now_s >= issued.expires_s]
        self._drop(member, over, "no answer before it expired")

    def lost(self, member: Member, why: str) -> None:
        """End all commands of a member that is dead or gone."""
        self._drop(member, list(member.waiting.values()), why)

    def give_up(self, members: Iterable[Member], why: str, *, keep: frozenset[CommandKind]) -> None:
        """End all commands of these members, except those of the kinds in `keep`."""
        for member in members:
            self._drop(member, [one for one in member.waiting.values() if one.kind not in keep], why)

    def _drop(self, member: Member, commands: list[Issued], why: str) -> None:
        for issued in commands:
            self._end(member, issued, CommandResult(issued.number, False, why))

    def _end(self, member: Member, issued: Issued, result: CommandResult) -> None:
        issued.result = result
        del member.waiting[issued.number]
        self._outbox.ended.append(issued)
