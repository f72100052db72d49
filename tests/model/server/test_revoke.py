"""Who may read which bytes while leases are revoked: a real server core, real clients, and connections that break.

Two engines, each with a scheduler and a worker, want more than half of a small L1.  The schedulers are real
`CacheClient`s without their threads: every frame goes through this machine, which delivers it late or to a dead
process, cuts connections with what they carry, and kills and freezes processes between any two steps.  Workers speak
the protocol by hand.

The model knows only the promises: a lease that is claimed, handed on or copied stays with whoever needs it; leases
never exceed half of L1; and when no process is frozen or waits for a copy, another one that asks for room gets it.
"""

from __future__ import annotations

import random
import time
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.client import CacheClient
from kvstrata.client.handles import LookupCall
from kvstrata.client.link import Step
from kvstrata.client.requests import Kind
from kvstrata.config.client_model import ClientSettings
from kvstrata.errors import Unavailable
from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES, LeaseName, RequestIdentity, Role
from tests.harness.amount import amount
from tests.harness.instance_in_process import InstanceInProcess, Line, said
from tests.harness.rpc_client import CHUNK_TOKENS, chain_of, layout

PROMPTS, CHUNKS = 6, 8
"""Four of these prompts fit into half of L1."""
L1_BYTES = 4 << 20
ENGINES = range(2)
ROUNDS = 12


class Frame(NamedTuple):
    """A frame under way, and the session that sends or receives it."""

    session: bytes
    content: bytes


class Worker:
    """The other process of an engine. It ends its share of a lease when its copies under the lease have ended."""

    def __init__(self, session: bytes) -> None:
        self.session = session
        self.alive = True
        self.seq = 100
        self.queued: set[LeaseName] = set()
        self.copying: set[LeaseName] = set()
        self.ended: set[LeaseName] = set()
        """Leases to release, until the server has answered."""
        self.releasing: dict[int, list[LeaseName]] = {}


class Scheduler:
    """A client, and the state of its caller."""

    def __init__(self, client: CacheClient) -> None:
        self.client = client
        self.alive = True
        self.frozen = False
        self.waiting: list[LookupCall] = []
        self.claimed: list[LookupCall] = []


def next_of(bag: list[Frame], session: bytes) -> Frame:
    """Take the first frame of a session: a connection keeps the order."""
    return bag.pop(next(i for i, frame in enumerate(bag) if frame.session == session))


class Revokes(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.server = InstanceInProcess(L1_BYTES)
        self.server.send = lambda address, frame: self.to_clients.append(Frame(address.session, frame))
        self.to_server: list[Frame] = []
        self.to_clients: list[Frame] = []
        self.now_s = time.monotonic()
        self.schedulers: list[Scheduler] = []
        self.workers: list[Worker] = []
        for number in ENGINES:
            group = bytes([number + 1]) * 16
            worker = Worker(bytes([number + 101]) * 16)
            self.workers.append(worker)
            self.server.attach(worker.session, group, Role.WORKER)
            self.schedulers.append(Scheduler(self.start_scheduler(group)))
        self.prompts = [chain_of(self.root, CHUNKS, 1000 * number) for number in range(PROMPTS)]
        self.store_all()
        self.deliver_everything()

    def start_scheduler(self, group: bytes) -> CacheClient:
        client = CacheClient(
            ClientSettings(socket_dir="/nowhere", chunk_size=CHUNK_TOKENS),
            role=Role.SCHEDULER,
            layout=layout(),
            group=group,
            engine_slices=1,
        )
        self.server.attach(client.session, group, Role.SCHEDULER)
        link = client._link
        link._owner = client._upkeep  # no thread runs; this machine calls the link
        link._move(Step.ATTACHED)
        link.epoch = self.server.epoch
        link.silence.heard()
        identity = client.identity(RequestIdentity())
        self.pump(client)
        self.root = identity.root
        return client

    def store_all(self) -> None:
        """Fill L1 by a third engine."""
        session = b"w" * 16
        self.server.attach(session, b"g" * 16)
        sent, self.server.send = self.server.send, self.keep_sent
        [identity] = self.server.feed(said(session, wire.Identify(1, RequestIdentity())))
        assert isinstance(identity, wire.IdentifyReply)
        for number, chain in enumerate(self.prompts):
            self.server.store(session, 2 + 2 * number, identity, chain)
        self.server.send = sent
        self.server.gone(session)

    def keep_sent(self, address: Line, frame: bytes) -> None:
        self.server.sent.append((address, frame))

    # --- the network -------------------------------------------------------------------------------------

    def pump(self, client: CacheClient) -> None:
        """Do the work of the client's thread, up to handing frames to the socket."""
        link = client._link
        link._drain()
        client._releases.tick(self.now_s)
        for frame in link.table.to_send(self.now_s):
            self.to_server.append(Frame(client.session, frame))

    def arrive(self, frame: Frame) -> None:
        async def arrive() -> None:
            line = self.server.line(frame.session)
            if line.session:  # else its process is dead, and its connection with it
                self.server.requests.on_frame(line, frame.content)
            await self.server.supervisor.idle()

        self.server.loop.run_until_complete(arrive())

    def hear(self, frame: Frame) -> None:
        """Deliver a reply or notice to its process, unless that is dead."""
        for scheduler in self.schedulers:
            if scheduler.client.session == frame.session and scheduler.alive:
                scheduler.client._link._handle([frame.content])
                self.pump(scheduler.client)
        for worker in self.workers:
            if worker.session == frame.session and worker.alive:
                self.worker_hears(worker, wire.decode_reply(frame.content))

    def frozen(self, session: bytes) -> bool:
        return any(s.frozen for s in self.schedulers if s.client.session == session)

    @rule(at=st.integers(0, 200))
    def server_receives(self, at: int) -> None:
        if self.to_server:
            self.arrive(next_of(self.to_server, self.to_server[at % len(self.to_server)].session))

    @rule(at=st.integers(0, 200))
    def client_receives(self, at: int) -> None:
        reachable = [frame.session for frame in self.to_clients if not self.frozen(frame.session)]
        if reachable:
            self.hear(next_of(self.to_clients, reachable[at % len(reachable)]))

    @rule(engine=st.sampled_from(ENGINES), of_worker=st.booleans())
    def cut(self, engine: int, of_worker: bool) -> None:
        """A connection ends with all that it carries, and its process attaches again."""
        scheduler = self.well(engine)
        if of_worker or scheduler is None:
            self.lose(self.workers[engine].session)
            return
        link = scheduler.client._link
        self.lose(link.session)
        link.table.fail_all(Unavailable("cut"), *Kind)
        link.tell(scheduler.client._upkeep._resume)
        self.pump(scheduler.client)

    def lose(self, session: bytes) -> None:
        self.to_server = [frame for frame in self.to_server if frame.session != session]
        self.to_clients = [frame for frame in self.to_clients if frame.session != session]

    @rule()
    def deliver_everything(self) -> None:
        """Deliver all frames in their order."""
        for _ in range(50):
            to_server, self.to_server = self.to_server, []
            for frame in to_server:
                self.arrive(frame)
            to_clients, self.to_clients = self.to_clients, []
            for frame in to_clients:
                if self.frozen(frame.session):
                    self.to_clients.append(frame)
                else:
                    self.hear(frame)
            if not self.to_server:
                return
        raise AssertionError("messages without end")

    @rule(engine=st.sampled_from(ENGINES))
    def ping(self, engine: int) -> None:
        scheduler, worker = self.schedulers[engine], self.workers[engine]
        if scheduler.alive and not scheduler.frozen:
            client = scheduler.client
            ping = wire.Ping(client._link.table.next_seq())
            self.to_server.append(Frame(client.session, wire.encode(ping)))
        if worker.alive:
            worker.seq += 1
            self.to_server.append(Frame(worker.session, wire.encode(wire.Ping(worker.seq))))

    # --- schedulers --------------------------------------------------------------------------------------

    def well(self, engine: int) -> Scheduler | None:
        scheduler = self.schedulers[engine]
        return scheduler if scheduler.alive and not scheduler.frozen else None

    @rule(engine=st.sampled_from(ENGINES), prompt=st.integers(0, PROMPTS - 1), n=st.integers(1, CHUNKS))
    def look_up(self, engine: int, prompt: int, n: int) -> None:
        scheduler = self.well(engine)
        if scheduler is None:
            return
        client = scheduler.client
        keys = self.prompts[prompt][: n * KEY_BYTES]
        call = client.lookup(client.identity(RequestIdentity()), keys, request_id="r", deadline_ms=60_000)
        scheduler.waiting.append(call)
        self.pump(client)

    @rule(
        engine=st.sampled_from(ENGINES),
        n=st.integers(1, PROMPTS),
        claimed=st.integers(0, 3),
        handed_on=st.integers(0, 2),
    )
    def requests_without_faults(self, engine: int, n: int, claimed: int, handed_on: int) -> None:
        """Look some requests up, claim some of them, and begin some of these, with a network that loses nothing."""
        for prompt in range(n):
            self.look_up(engine, (prompt + 2 * engine) % PROMPTS, CHUNKS)
            self.deliver_everything()
        for _ in range(claimed):
            self.claim(engine, 0)
        for _ in range(handed_on):
            self.hand_on(engine, 0)
        self.copy_begins(engine)

    @rule(engine=st.sampled_from(ENGINES), at=st.integers(0, 50))
    def claim(self, engine: int, at: int) -> None:
        scheduler = self.well(engine)
        ready = [c for c in scheduler.waiting if c.done and c.result.lease] if scheduler else []
        if scheduler is None or not ready:
            return
        call = ready[at % len(ready)]
        scheduler.waiting.remove(call)
        if call.claim():
            scheduler.claimed.append(call)
        else:
            assert call.revoked
            # A caller may not know that the lease was revoked.
            scheduler.client.release([call.result.lease], group=True)
            self.pump(scheduler.client)

    @rule(engine=st.sampled_from(ENGINES), at=st.integers(0, 50))
    def unclaim(self, engine: int, at: int) -> None:
        scheduler = self.well(engine)
        if scheduler is not None and scheduler.claimed:
            call = scheduler.claimed.pop(at % len(scheduler.claimed))
            call.unclaim()
            scheduler.waiting.append(call)

    @rule(engine=st.sampled_from(ENGINES), at=st.integers(0, 50))
    def hand_on(self, engine: int, at: int) -> None:
        """Hand the claimed lease to the worker and end the scheduler's share."""
        scheduler, worker = self.well(engine), self.workers[engine]
        if scheduler is None or not scheduler.claimed:
            return
        call = scheduler.claimed.pop(at % len(scheduler.claimed))
        assert call.result.lease is not None
        if worker.alive:
            worker.queued.add(call.result.lease)
        scheduler.client.release([call.result.lease])
        self.pump(scheduler.client)

    @rule(engine=st.sampled_from(ENGINES), at=st.integers(0, 50), cancels=st.booleans())
    def request_ends(self, engine: int, at: int, cancels: bool) -> None:
        scheduler = self.well(engine)
        if scheduler is None or not scheduler.waiting + scheduler.claimed:
            return
        both = scheduler.waiting + scheduler.claimed
        call = both[at % len(both)]
        (scheduler.waiting if call in scheduler.waiting else scheduler.claimed).remove(call)
        if cancels or not call.done or not call.result.lease:
            call.cancel()
        else:
            scheduler.client.release([call.result.lease], group=True)
        self.pump(scheduler.client)

    @rule(engine=st.sampled_from(ENGINES), frozen=st.booleans())
    def freeze_or_thaw(self, engine: int, frozen: bool) -> None:
        self.schedulers[engine].frozen = frozen

    @rule(
        engine=st.sampled_from(ENGINES),
        which=st.sampled_from(["scheduler", "worker"]),
        really=st.integers(0, 9),
    )
    def die(self, engine: int, which: str, really: int) -> None:
        scheduler, worker = self.schedulers[engine], self.workers[engine]
        if really:
            return  # deaths should be rare
        if which == "scheduler" and scheduler.alive:
            scheduler.alive = False
            self.server.gone(scheduler.client.session)
        elif which == "worker" and worker.alive:
            worker.alive = False
            self.server.gone(worker.session)

    # --- workers -----------------------------------------------------------------------------------------

    @rule(engine=st.sampled_from(ENGINES))
    def copy_begins(self, engine: int) -> None:
        worker = self.workers[engine]
        if worker.alive and worker.queued:
            worker.copying.add(worker.queued.pop())

    @rule(engine=st.sampled_from(ENGINES))
    def copy_ends(self, engine: int) -> None:
        worker = self.workers[engine]
        if worker.alive and worker.copying:
            worker.ended.add(worker.copying.pop())
            self.worker_releases(engine)

    @rule(engine=st.sampled_from(ENGINES))
    def worker_releases(self, engine: int) -> None:
        worker = self.workers[engine]
        if worker.alive and worker.ended:
            leases = sorted(worker.ended)
            worker.seq += 1
            worker.releasing[worker.seq] = leases
            names = [(lease.session, lease.seq) for lease in leases]
            message = wire.Release(worker.seq, names)
            self.to_server.append(Frame(worker.session, wire.encode(message)))

    def worker_hears(self, worker: Worker, reply: wire.AnyReply) -> None:
        if isinstance(reply, wire.Ok):
            worker.ended.difference_update(worker.releasing.pop(reply.seq, ()))
        elif isinstance(reply, wire.Pong):
            assert reply.revoked == [], "workers look nothing up, so nothing of theirs can be revoked"
            for session, seq in reply.orphaned:
                lease = LeaseName(session, seq, reply.epoch)
                worker.queued.discard(lease)
                if lease not in worker.copying:
                    worker.ended.add(lease)

    # --- promises ----------------------------------------------------------------------------------------

    @invariant()
    def the_server_is_whole(self) -> None:
        if not hasattr(self, "schedulers"):
            return
        self.server.check()
        stats = self.server.pool.stats()
        assert stats["leased_bytes"] <= stats["extents_bytes"] // 2

    @invariant()
    def needed_leases_last(self) -> None:
        if not hasattr(self, "schedulers"):
            return
        rows = {session: row.row for session, row in self.server._rows.items()}
        for scheduler, worker in zip(self.schedulers, self.workers, strict=True):
            for call in scheduler.claimed if scheduler.alive else ():
                assert not call.revoked
                name = (call.result.lease.session, call.result.lease.seq)
                lease = self.server.parts.grants.find(name)
                assert lease is not None, "a claimed lease has ended"
                group = [scheduler.client.session, *([worker.session] if worker.alive else [])]
                assert lease.rows.issuperset(rows[session] for session in group)
            for handed in worker.queued | worker.copying if worker.alive else ():
                lease = self.server.parts.grants.find((handed.session, handed.seq))
                assert lease is not None and rows[worker.session] in lease.rows, "a copy has lost its bytes"

    def teardown(self) -> None:
        if not hasattr(self, "schedulers"):
            return
        self.all_processes_recover_and_wait()
        self.newcomer_gets_room()
        for scheduler in self.schedulers:
            scheduler.client._link.abandon()
            scheduler.client.close()
        self.server.close()

    def all_processes_recover_and_wait(self) -> None:
        for engine in ENGINES:
            scheduler, worker = self.schedulers[engine], self.workers[engine]
            scheduler.frozen = False
            while scheduler.alive and scheduler.claimed:
                self.unclaim(engine, 0)
            while worker.alive and worker.queued | worker.copying:
                self.copy_begins(engine)
                self.copy_ends(engine)

    def newcomer_gets_room(self) -> None:
        """A newcomer gets the room after some requests: waiting leases are revoked one after another."""
        group, session = b"n" * 16, b"N" * 16
        self.server.attach(session, group)
        self.newcomer_asks(session, wire.Identify(1, RequestIdentity()))
        [identity] = self.newcomer_hears(session, wire.IdentifyReply)
        self.newcomer_identity, self.newcomer_seq = identity.identity_id, 1
        for prompt in random.Random(0).sample(range(PROMPTS), 3):
            for _ in range(ROUNDS):
                for engine in ENGINES:
                    self.ping(engine)
                    self.worker_releases(engine)
                self.deliver_everything()
                if self.newcomer_looks_up(session, prompt) == CHUNKS:
                    break
            else:
                raise AssertionError("leases that wait kept another engine out")
        self.server.gone(session)

    def newcomer_asks(self, session: bytes, request: wire.Request) -> None:
        self.arrive(Frame(session, wire.encode(request)))

    def newcomer_hears(self, session: bytes, kind: type[wire.Reply]) -> list[Any]:
        mine = [wire.decode_reply(frame.content) for frame in self.to_clients if frame.session == session]
        self.to_clients = [frame for frame in self.to_clients if frame.session != session]
        return [reply for reply in mine if isinstance(reply, kind)]

    def newcomer_looks_up(self, session: bytes, prompt: int) -> int:
        """Look a prompt up; return how many chunks the newcomer gets. It gives a lease on fewer chunks back at once."""
        self.newcomer_seq += 2
        seq, groups = self.newcomer_seq, [wire.KeyGroup(wire.Rule.PREFIX, self.prompts[prompt])]
        self.newcomer_asks(session, wire.Lookup(seq, 1000, self.newcomer_identity, "new", groups))
        [reply] = self.newcomer_hears(session, wire.LookupReply)
        if 0 < reply.n_chunks < CHUNKS:
            self.newcomer_asks(session, wire.Release(seq + 1, [(session, seq)], True))
        return int(reply.n_chunks)


TestRevokes = Revokes.TestCase
TestRevokes.settings = settings(max_examples=amount(66, 200), stateful_step_count=60)
