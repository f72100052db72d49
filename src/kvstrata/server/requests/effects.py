"""The effects of requests (leases, reservations), from the outcome that creates them to their end.

    outcome with an effect ─▶ finish ─┬─▶ released, committed, aborted
                                      ├─▶ undone: its request was cancelled, or is not named by a ping
                                      └─▶ process_gone

Three parts know an effect: the pool by its ticket, `Leases` or `InFlight` by its name (leases.py), and `Sessions` by
the request that owns it (rpc/session.py).  This object changes the three together, so that they always agree.  Only
commit and abort, which end single items of a reservation, change them in reserve.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.errors import BadRequest
from kvstrata.native.pool import Pool
from kvstrata.observability.metrics import ServerCounters
from kvstrata.policy.processes import AttachedProcess
from kvstrata.rpc.session import Address, Call, Effect, Sessions, Undoing
from kvstrata.rpc.wire import Pong, encode
from kvstrata.server.requests.leases import InFlight, Lease, Leases, Reservation


class Effects:
    """Creates and ends the effects of requests. Belongs to the event loop."""

    def __init__(
        self,
        pool: Pool,
        sessions: Sessions,
        leases: Leases,
        in_flight: InFlight,
        counters: ServerCounters,
        epoch: int,
    ) -> None:
        self._pool = pool
        self._sessions = sessions
        self._leases = leases
        self._in_flight = in_flight
        self._counters = counters
        self._epoch = epoch

    def check_new(self, call: Call) -> None:
        """Raises BadRequest if a lease has the name of this lookup already: that of an earlier process of the session,
        whose group still holds it."""
        if self._leases.get((call.session.name, call.seq)) is not None:
            raise BadRequest(
                f"seq: {call.seq} names a lease that this group still holds; go on with higher numbers after attaching "
                "again, or attach with a new session",
                field="seq",
            )

    def finish(self, call: Call, reply: bytes, effect: Effect | None) -> list[Address]:
        """End a request: keep its reply and its effect, or undo the effect if the request was cancelled.

        Returns the connections that get the reply.
        """
        waiters, undo = self._sessions.finish(call, reply, effect)
        if undo is not None:
            self._undo(undo, kept=False)
        elif isinstance(effect, Lease):
            self._leases.add(effect)
        elif isinstance(effect, Reservation):
            self._in_flight.add(effect.open_keys.values())
        return waiters

    def _undo(self, effect: Effect, *, kept: bool = True) -> None:
        """Give back what a request did. `kept`: `finish` has kept its effect."""
        if isinstance(effect, Lease):
            self._pool.release(effect.ticket, -1)
            self._leases.drop(effect)
        elif isinstance(effect, Reservation):
            self._pool.abort(effect.ticket, None)
            if kept:
                self._in_flight.remove(effect.open_keys.values())
            effect.over()

    def carry_out(self, undoing: Undoing) -> int:
        """Carry out what a cancel or a ping decided. Returns how many requests it ended."""
        for effect in undoing.effects:
            self._undo(effect)
        for call in undoing.stopped:
            if call.stop is not None:
                call.stop()
        for address, reply in undoing.replies:
            address.send(reply)
        return len(undoing.effects) + len(undoing.stopped)

    def release_share(self, lease: Lease, row: int, own: bool) -> bool:
        """End one row's share. False if it had none. `own`: the row belongs to the process that looked up."""
        if row not in lease.rows:
            return False
        self._pool.release(lease.ticket, row)
        self._leases.begun(lease)
        if own:
            lease.wanted_by_ping = False
        if self._leases.drop_share(lease, row):
            self._settle(lease)
        return True

    def release_all(self, lease: Lease) -> None:
        """End every share."""
        self._pool.release(lease.ticket, -1)
        self._leases.drop(lease)
        self._settle(lease)

    def revoke(self, need_bytes: int) -> int:
        """Revoke the oldest unused leases, as many as it takes to lease `need_bytes` more. Returns how many.

        The processes that looked up are told at once, and again in each answer to their pings.  Nothing waits for
        them, and only what they release becomes free.
        """
        chosen = self._leases.revoke(lambda tickets: self._pool.leases_to_end(tickets, need_bytes))
        self._counters.revoked_leases += len(chosen)
        for session, address in {lease.name[0]: lease.address for lease in chosen}.items():
            if address is not None:
                address.send(encode(Pong(0, self._epoch, [], self._leases.revoked(session))))
        return len(chosen)

    def process_gone(self, process: AttachedProcess, left: Sequence[Effect]) -> None:
        """End the shares of a process that has ended, and account for the effects that it left behind.

        Its reservations end in the pool, with its row.  Leases of which other processes of its group hold a share go
        on, as orphans.
        """
        for effect in left:
            if isinstance(effect, Reservation):
                self._in_flight.remove(effect.open_keys.values())
                effect.over()
        for lease in self._leases.process_gone(process.group.name, process.row):
            self._settle(lease)
        for effect in left:
            if isinstance(effect, Lease) and effect.rows:
                self._leases.orphan(effect)

    def _settle(self, lease: Lease) -> None:
        self._sessions.settle(*lease.name)
