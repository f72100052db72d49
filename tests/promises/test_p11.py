"""P11: each miss has a reason out of a closed list, which is true, counted, and explained."""

from __future__ import annotations

import collections

from kvstrata.client import LookupResult
from kvstrata.types import MissReason
from tests.promises.caller import Caller, Lookup, disturb, holds_nothing, prompts, relieve
from tests.world import Engine, Server, World, tell

BLOCK_BYTES = 4096
UNREACHED = {MissReason.DEADLINE, MissReason.BREAKER_OPEN, MissReason.L2_FAILED, MissReason.REFUSED}
"""Reasons for which nothing is known of what a tier has."""


def test_each_miss_is_told_its_true_reason():
    tell(reasons)


class Known:
    """What the story knows of chunks, by storage key."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stored: set[bytes] = set()
        self.storing: collections.Counter[bytes] = collections.Counter()
        self.refused: set[bytes] = set()
        self.damaged: set[bytes] = set()
        self.first_chunks: dict[tuple[int, ...], set[str]] = collections.defaultdict(set)
        """Tokens of a first chunk → the adapters of the identities under which it was stored."""
        self.counted: collections.Counter[str] = collections.Counter()

    def leased_share(self) -> float:
        stats = self.server.parts.pool.stats()
        return stats["leased_bytes"] / stats["extents_bytes"]


class Asker(Caller):
    """A caller that checks the reasons it is told."""

    def __init__(self, engine: Engine, shared: list[list[int]], known: Known, adapter: str) -> None:
        super().__init__(engine, shared)
        self.known = known
        engine.adapter = adapter
        engine.copies.takes_s = lambda: self.random.choice([0.0, 0.0, 0.02])
        self.tier_was_disturbed = False
        self.begun: dict[int, tuple[int, set[bytes], set[bytes], bool]] = {}
        """By lookup: its request, the keys stored and being stored before, whether another identity has its start."""

    def act(self) -> None:
        self.random.choices([self.store, self.look_up, self.load, self.release], [4, 7, 3, 4])[0]()

    def store(self, tokens: list[int] | None = None, first: int = 0) -> None:
        tokens = tokens or self.some_prompt()
        keys = self.engine.keys(tokens)
        self.known.storing.update(keys)
        self.known.first_chunks[tuple(tokens[:16])].add(self.engine.adapter)
        job = super().store(tokens)
        if job is None or job.done.is_set():
            self.known.storing.subtract(keys)
            return

        def look() -> None:
            if job.done.is_set():
                self.world.watchers.remove(look)
                self.known.storing.subtract(keys)
                for key, outcome in zip(keys, job.outcomes, strict=True):
                    (self.known.stored if outcome in ("stored", "present") else self.known.refused).add(key)

        self.world.watchers.append(look)

    def look_up(self, tokens: list[int] | None = None, deadline_ms: int | None = None) -> Lookup:
        tokens = tokens or self.some_prompt()
        number = next(self.engine.requests)
        self.engine._requests = iter([number])
        storing = {key for key, count in self.known.storing.items() if count > 0}
        others = self.known.first_chunks[tuple(tokens[:16])] - {self.engine.adapter}
        lookup = super().look_up(tokens, 2000)
        self.begun[id(lookup.call)] = number, set(self.known.stored), storing, bool(others)
        return lookup

    def answered(self, lookup: Lookup) -> None:
        known, (number, stored, storing, others) = self.known, self.begun.pop(id(lookup.call))
        result, n_asked = lookup.call.result, len(lookup.tokens) // 16
        n, reason = result.n_chunks, result.reason
        known.counted[reason] += 1
        assert (n == n_asked) == (reason == ""), result
        self.check_explained(number, result)
        if n == n_asked:
            return
        key = self.engine.keys(lookup.tokens)[n]
        storing |= {key for key, count in known.storing.items() if count > 0}
        was_there = key in stored or key in storing or key in known.stored
        match reason:
            case MissReason.NEVER_STORED | MissReason.UNKNOWN_KEY:
                assert key not in stored, "a chunk that was stored is said never to have been stored"
                assert n or not others or storing, "the other identity is not named"
            case MissReason.IDENTITY_DIFFERS:
                assert n == 0 and key not in stored, "another identity is named for a chunk that was stored"
                assert known.first_chunks[tuple(lookup.tokens[:16])] - {self.engine.adapter}
            case MissReason.EVICTED | MissReason.PUT_SKIPPED:
                assert was_there, f"{reason}, and was never stored"
            case MissReason.CORRUPT:
                assert key in known.damaged, "a sound chunk is said to be damaged"
            case MissReason.IN_FLIGHT:
                # A load that hangs outlives the record.
                held = any(key in shelf.records for shelf in self.world.shelves)
                assert key in storing or held or self.tier_was_disturbed
            case MissReason.REFUSED:
                assert key in known.refused or known.leased_share() > 0.3 or self.tier_was_disturbed
            case _:
                assert reason in UNREACHED and self.tier_was_disturbed, f"{reason}, though the tier is well"

    def check_explained(self, number: int, result: LookupResult) -> None:
        """The explanation of a request says what its caller was told."""
        [told] = self.known.server.parts.explainer.explain(f"request-{number}")["lookups"]
        reason = told["first_miss"]["reason"] if told["first_miss"] else ""
        found = told["hits"]["served"], told["hits"]["l2"], reason
        assert found == (result.n_chunks, result.l2_chunks, result.reason), (told, result)


def reasons(world: World) -> None:
    rng = world.random
    server = world.server(tiers=1)
    [shelf] = world.shelves
    known, shared = Known(server), prompts(world, 8, 6)
    askers = [
        Asker(world.engine(server, group=bytes([n]) * 16, block_bytes=BLOCK_BYTES), shared, known, adapter)
        for n, adapter in ((1, ""), (2, ""), (3, "other"))
    ]
    world.run(lambda: all(one.engine.identity().ready for one in askers), "all engines are ready")
    for _ in range(60):
        match rng.randrange(16):
            case 0:
                disturb(world, shelf)
                for asker in askers:
                    asker.tier_was_disturbed = True
            case 1:
                relieve(shelf)
            case 2 if rng.random() < 0.5:
                world.note("L1 is cleared")
                server.run(server.parts.clearing.clear("l1", None))
            case 3 if rng.random() < 0.3:
                world.note("the tier is emptied")
                shelf.records.clear()
            case 4 if shelf.records:
                key = rng.choice(list(shelf.records))
                record = bytearray(shelf.records[key])
                record[rng.randrange(len(record))] ^= 1
                shelf.records[key] = bytes(record)
                known.damaged.add(key)
            case _:
                rng.choice(askers).act()
        if rng.random() < 0.4:
            world.sleep(rng.choice([0.001, 0.05, 0.3]))
    relieve(shelf)
    world.run(lambda: not any(asker.waits for asker in askers), "all calls are answered")
    counted = server.parts.counters.first_miss_reasons
    assert counted == {reason: n for reason, n in known.counted.items() if reason}, (counted, known.counted)
    for asker in askers:
        while asker.held:
            asker.release()
    world.run(lambda: not server.parts.store.undone, "puts end")
    holds_nothing(server)
