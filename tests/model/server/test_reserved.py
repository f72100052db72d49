"""What processes and tokens have reserved, over a real server core: no more than their share, and all of it comes back.

Five processes, two of them with one token, have several sessions each.  They reserve, commit, abort and cancel, ping,
and die.  The model knows what each reserve was granted; the pool knows what is reserved (`InstanceInProcess.check`).
"""

from __future__ import annotations

import asyncio
import threading

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.rpc import wire
from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.server.plan import MAX_SESSION_SHARE
from kvstrata.server.requests.reserve import GRANULE_BYTES, KEYS_ON_LOOP, TOKEN_SHARE
from kvstrata.types import RequestIdentity
from tests.harness.instance_in_process import InstanceInProcess, said
from tests.harness.rpc_client import RECORD_BYTES, chain_of

L1_BYTES = 4 << 20
OF_PROCESS = L1_BYTES // MAX_SESSION_SHARE
OF_TOKEN = L1_BYTES // TOKEN_SHARE
EACH_BYTES = -(-RECORD_BYTES // GRANULE_BYTES) * GRANULE_BYTES
BLUE = frozenset({"blue"})
TOKENS = {101: None, 102: None, **dict.fromkeys(range(103, 111), BLUE)}
"""Token of each pid; eight processes of one token could reserve all of L1."""


class Session:
    """A session of a process, and the open items of its reservations: seq → indices."""

    def __init__(self, name: bytes, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.seq = 0
        self.identity: wire.IdentifyReply | None = None
        self.open: dict[int, set[int]] = {}

    def next(self) -> int:
        self.seq += 1
        return self.seq


class Reserves(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.server = InstanceInProcess(L1_BYTES)
        self.sessions: list[Session] = []
        self.made = self.chains = 0
        for pid in TOKENS:
            self.attach(pid)

    def attach(self, pid: int) -> None:
        self.made += 1
        session = Session(self.made.to_bytes(16, "big"), pid)
        token = TOKENS[pid]
        self.server.attach(session.name, session.name, pid=pid, tenants=token)
        request = RequestIdentity(tenant="blue" if token else "")
        [identity] = self.server.feed(said(session.name, wire.Identify(session.next(), request)))
        assert isinstance(identity, wire.IdentifyReply)
        session.identity = identity
        self.sessions.append(session)

    def let_lane_end(self) -> None:
        """Wait until no thread of the lane works on an earlier request."""
        both = threading.Barrier(2)

        async def run() -> None:
            await asyncio.gather(*(self.server.lane.run(both.wait) for _ in range(2)))

        self.server.loop.run_until_complete(run())

    def of(self, pid: int) -> int:
        return EACH_BYTES * sum(
            len(open_) for one in self.sessions if one.pid == pid for open_ in one.open.values()
        )

    def of_token(self) -> int:
        return sum(self.of(pid) for pid, token in TOKENS.items() if token is BLUE)

    @rule(pid=st.sampled_from(list(TOKENS)))
    def another_session(self, pid: int) -> None:
        if len(self.sessions) < 30:
            self.attach(pid)

    @rule(
        data=st.data(), n_chunks=st.sampled_from([1, 2, 7, 8, 9, KEYS_ON_LOOP + 1]), cancelled=st.booleans()
    )
    def reserve(self, data: st.DataObject, n_chunks: int, cancelled: bool) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        assert session.identity is not None
        seq = session.next()
        self.chains += 1
        chain = chain_of(session.identity.root, n_chunks, 1_000 * self.chains)
        number = session.identity.identity_id
        message = said(session.name, wire.Reserve(seq, 1_000, number, b"", chain, RECORD_BYTES))
        if cancelled:
            cancel = said(session.name, wire.Cancel(session.next(), seq))
            self.server.feed(message, cancel)
            self.let_lane_end()
            return
        room = (OF_PROCESS - self.of(session.pid)) // EACH_BYTES
        if TOKENS[session.pid] is BLUE:
            room = min(room, (OF_TOKEN - self.of_token()) // EACH_BYTES)
        [reply] = self.server.feed(message)
        assert isinstance(reply, wire.ReserveReply)
        granted = {index for index, code in enumerate(reply.outcomes) if code == ReserveOutcome.RESERVED}
        assert len(granted) <= room
        assert len(reply.outcomes) == n_chunks
        refused = set(reply.outcomes) - {ReserveOutcome.RESERVED}
        if len(granted) < min(n_chunks, room):
            assert ReserveOutcome.SESSION_LIMIT not in refused, "refused though its share has room"
        elif len(granted) < n_chunks:
            assert refused == {ReserveOutcome.SESSION_LIMIT}
        if granted:
            session.open[seq] = granted

    @rule(data=st.data())
    @precondition(lambda self: any(one.open for one in self.sessions))
    def end_some(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from([one for one in self.sessions if one.open]))
        seq = data.draw(st.sampled_from(sorted(session.open)))
        items = sorted(data.draw(st.sets(st.sampled_from(sorted(session.open[seq])), min_size=1)))
        how = data.draw(st.sampled_from(["commit", "abort", "abort all", "twice"]))
        number = session.next()
        if how == "commit":  # nothing was written, so no record is good; the reservation ends all the same
            self.server.feed(said(session.name, wire.Commit(number, seq, items)))
        else:
            of_these = None if how == "abort all" else items
            abort = said(session.name, wire.Abort(number, seq, of_these))
            self.server.feed(abort)
            if how == "twice":
                self.server.feed(said(session.name, wire.Abort(session.next(), seq, of_these)))
        session.open[seq] -= session.open[seq] if how == "abort all" else set(items)
        if not session.open[seq]:
            del session.open[seq]

    @rule(data=st.data())
    def ping(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.server.feed(said(session.name, wire.Ping(session.next())))

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        pid = data.draw(st.sampled_from(list(TOKENS)))
        for session in [one for one in self.sessions if one.pid == pid]:
            self.server.gone(session.name)
            self.sessions.remove(session)
        self.attach(pid)

    @invariant()
    def counted_exactly_and_bounded(self) -> None:
        if not hasattr(self, "server"):
            return
        self.server.check()
        for process in self.server.parts.processes:
            of_process, *of_token = process.uses
            assert of_process.reserved_bytes == self.of(process.pid) <= OF_PROCESS
            assert all(use.reserved_bytes == self.of_token() <= OF_TOKEN for use in of_token)

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.server.close()


TestReserves = Reserves.TestCase
TestReserves.settings = settings(max_examples=30, stateful_step_count=40)
