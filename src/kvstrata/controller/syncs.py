"""Keeps the controller's knowledge of its members' chunks exact, by events and full syncs.  No I/O, no clock.

1. Batches of events are applied once, in order.  After a gap the knowledge of a member is inexact: the member is asked
   for a full sync, and its chunks are served as unconfirmed meanwhile.
2. A full sync counts only if all of its parts have arrived, with the counts that its SyncEnd names.
3. If a heartbeat names events that have not arrived, and no further event arrives within LOST_EVENTS_S, they are lost.
4. The number of parts that arrive before an earlier part is bounded.
"""

from __future__ import annotations

from typing import Any

from kvstrata.controller.commands import Commands
from kvstrata.controller.member import (
    SYNC_AGAIN_S,
    Member,
    MemberState,
    Outbox,
    Sync,
    SyncEvent,
    SyncState,
)
from kvstrata.errors import BadSync, SyncAgain
from kvstrata.native.core import crc32c
from kvstrata.observability.numbers import Numbers, counter
from kvstrata.patience import patience
from kvstrata.rpc.cluster_wire import (
    TAG_BYTES,
    Change,
    CommandKind,
    Events,
    SyncBegin,
    SyncEnd,
    SyncPart,
)

MAX_PARTS = 1 << 20
MAX_PARTS_AHEAD = 4_096
"""Most parts of a sync that may arrive before an earlier part."""
LOST_EVENTS_S = 2.0


class Syncs(Numbers):
    """Events and full syncs of all members."""

    dropped = counter("Batches of events that were not applied.", "reason", name="dropped_batches")

    def __init__(self, commands: Commands, outbox: Outbox) -> None:
        self._commands = commands
        self._outbox = outbox

    # --- events ---------------------------------------------------------------------------------------------

    def events(self, member: Member | None, told: Events, key: str) -> bool:
        """Decide whether a batch that came with this key is to be applied to the placements of `member`.

        If not, the reason is counted.
        """
        dropped = "wrong_key" if member is not None and member.key != key else self._take(member, told)
        if dropped:
            self.dropped[dropped] += 1
        return not dropped

    def _take(self, member: Member | None, told: Events) -> str:
        """The reason for dropping the batch; empty if it is to be applied."""
        if member is None:
            return "unknown_instance"
        if told.incarnation != member.incarnation:
            return "superseded"
        if member.state is not MemberState.LIVE:
            return f"{member.state}_instance"
        if any(len(run.tags) % TAG_BYTES or (run.change is Change.CLEAR and run.tags) for run in told.runs):
            self.want(member, "bad_events")
            return "bad_tags"
        if any(run.tier not in member.told.tiers for run in told.runs):
            self.want(member, "bad_events")
            return "unknown_tier"
        if told.seq <= member.applied_seq:
            return "repeated"
        sync = member.sync
        if sync is not None and (sync.state is SyncState.PUBLISHING or told.seq > sync.events_seq):
            # The sync contains these events, or the instance sent them too early and the sync is followed by a gap.
            return "during_sync"
        if told.seq > member.applied_seq + 1:
            self.want(member, "gap", expected=member.applied_seq + 1, got=told.seq)
        member.applied_seq = told.seq
        member.lacking_since_s = None
        member.event_batches += 1
        return ""

    def look_for_lost_events(self, member: Member, told_seq: int, now_s: float) -> None:
        """A heartbeat names the last events that the instance has sent: ask for a sync if they are lost."""
        if told_seq <= member.applied_seq or member.sync is not None or not member.confirmed:
            member.lacking_since_s = None
        elif member.lacking_since_s is None:
            member.lacking_since_s = now_s
        elif now_s - member.lacking_since_s >= patience(LOST_EVENTS_S):
            self.want(member, "lost_events", expected=told_seq, got=member.applied_seq)
            member.lacking_since_s = None

    # --- requests for a sync --------------------------------------------------------------------------------

    def want(self, member: Member, reason: str, **facts: Any) -> None:
        """The knowledge of a member's chunks is no longer exact: want a full sync, for this reason."""
        if member.confirmed or not member.sync_wanted:
            self._outbox.say("resync", member, reason=reason, **facts)
        member.confirmed = False
        member.sync_wanted = reason

    def ask(self, member: Member, now_s: float) -> None:
        """Command the instance to begin a full sync, if one is wanted and was not asked for lately."""
        if not member.sync_wanted or member.sync is not None or now_s - member.sync_asked_s < SYNC_AGAIN_S:
            return
        if member.sync_wanted in ("registered", "restored") and now_s - member.joined_s < SYNC_AGAIN_S:
            return  # the answer to its registration has asked for it
        if self._commands.room(member, CommandKind.RESYNC):
            member.sync_asked_s = now_s
            self._commands.issue(member, CommandKind.RESYNC, {"freeze_ms": 0}, now_s)

    def registered_again(self, member: Member) -> None:
        """A member registers again, over a new connection or after a restart of the controller: drop its sync."""
        self._abandon(member)

    def lost(self, member: Member) -> None:
        """The member is dead or gone: drop its sync; nothing is known of its chunks any more."""
        self._abandon(member)
        member.confirmed = False

    # --- one sync -------------------------------------------------------------------------------------------

    def begin(self, member: Member, told: SyncBegin, now_s: float) -> Sync | None:
        """A SyncBegin arrives; returns the new sync, None for a repeated message. Raises BadSync, SyncAgain."""
        sync = member.sync
        if sync is not None and sync.number == told.sync:
            if sync.events_seq != told.events_seq:
                raise BadSync(
                    f"events_seq: sync {told.sync} began at {sync.events_seq}, not at {told.events_seq}; "
                    "begin another sync",
                    field="events_seq",
                )
            return None
        if sync is not None and sync.state is SyncState.PUBLISHING:
            raise SyncAgain(
                f"sync: {sync.number} is being published; begin another after the answer to its SyncEnd",
                field="sync",
                retry_after_s=0.1,
            )
        if told.sync <= member.synced_number:
            raise BadSync(
                f"sync: {told.sync} is not greater than {member.synced_number}, the last that was published; begin "
                "one with a greater number",
                field="sync",
            )
        self._abandon(member)
        member.sync = Sync(told.sync, told.events_seq, now_s)
        return member.sync

    def part(self, member: Member, told: SyncPart) -> tuple[Sync, bool]:
        """A part arrives; returns its sync, and whether the part is new. Raises BadSync, SyncAgain."""
        sync = self._running(member, told.sync)
        if sync.has(told.index):
            return sync, False
        if told.tier not in member.told.tiers:
            raise BadSync(
                f"tier: {told.tier!r:.80} is not one of {', '.join(member.told.tiers)}", field="tier"
            )
        if len(told.tags) % TAG_BYTES:
            raise BadSync(f"tags: {len(told.tags)} bytes are not a multiple of {TAG_BYTES}", field="tags")
        if (crc := crc32c(told.tags)) != told.crc:
            raise SyncAgain(
                f"crc: part {told.index} has {crc}, its message says {told.crc}; send the part again",
                field="crc",
            )
        if sync.state is SyncState.PUBLISHING:
            raise BadSync(f"index: sync {told.sync} has ended without part {told.index}", field="index")
        if told.index >= MAX_PARTS or sync.ahead >= MAX_PARTS_AHEAD:
            raise BadSync(
                f"index: part {told.index} is too far ahead: part {sync.parts} is missing", field="index"
            )
        sync.take(told)
        return sync, True

    def end(self, member: Member, told: SyncEnd) -> Sync | None:
        """A SyncEnd arrives; returns the sync to publish, None for a repeated message. Raises SyncAgain."""
        if told.sync == member.synced_number:
            return None
        sync = self._running(member, told.sync)
        if sync.state is SyncState.PUBLISHING:
            return None
        tags = {tier: count for tier, count in told.tags.items() if count}
        ours = {tier: count for tier, count in sync.tags.items() if count}
        if sync.ahead or sync.parts != told.parts or ours != tags:
            sync.happened(SyncEvent.MISCOUNTED)
            member.sync = None
            self.want(member, "bad_counts")
            raise SyncAgain(
                f"parts: the first {sync.parts} of {told.parts} parts have arrived, with {ours} tags for {tags}; "
                "begin again",
                field="parts",
            )
        sync.happened(SyncEvent.ENDED)
        return sync

    def done(self, member: Member, sync: Sync, now_s: float) -> bool:
        """The directory has published a sync; returns False if the member has abandoned it meanwhile."""
        if member.sync is not sync:
            return False
        sync.happened(SyncEvent.PUBLISHED)
        member.sync = None
        member.synced_number = sync.number
        member.synced_s = now_s
        member.sync_took_s = now_s - sync.begun_s
        member.sync_count += 1
        member.applied_seq = sync.events_seq
        member.lacking_since_s = None
        member.confirmed = True
        member.sync_wanted = ""
        self._commands.synced(member, sync.begun_s)
        self._outbox.say("synced", member, tags=dict(sync.tags), took_s=round(member.sync_took_s, 3))
        return True

    def failed(self, member: Member, sync: Sync, reason: str) -> None:
        """The directory had no room for a sync: want another."""
        if member.sync is sync:
            sync.happened(SyncEvent.BROKEN)
            member.sync = None
            self.want(member, reason)

    def _running(self, member: Member, number: int) -> Sync:
        if member.sync is None or member.sync.number != number:
            raise SyncAgain(f"sync: {number} is not under way; begin one", field="sync")
        return member.sync

    def _abandon(self, member: Member) -> None:
        if member.sync is not None:
            member.sync.happened(SyncEvent.ABANDONED)
            member.sync = None
