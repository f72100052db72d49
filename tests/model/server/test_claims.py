"""Claims over a real pool against a model that knows only what was promised.

An engine stores prompts and junk, operators claim and release, records are damaged, removed and cleared, time passes,
and servers end without a word.  The next one adopts the pool, or finds a new one, and its file of claims is there,
missing or damaged.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstrata.errors import Refused
from kvstrata.memory.paths import CLAIMS
from kvstrata.native.core import Pool
from kvstrata.process.operations import Claiming
from kvstrata.process.supervisor import PoolLane, Supervisor
from kvstrata.server import claims as module
from kvstrata.server.claims import Claims
from kvstrata.types import PoolChange
from tests.harness.amount import amount
from tests.harness.l1 import IDENTITY, L1, L1_BYTES, RECORD, chain
from tests.harness.validation import validate
from tests.harness.virtual import VirtualLoop

LENGTH = 8
PROMPTS = [chain(f"prompt {number}", LENGTH) for number in range(4)]
PROMPT = st.integers(0, 3)


class KeptL1(L1):
    """A pool whose files stay when its server ends."""

    def __init__(self, fds: list[int], *, adopt: bool) -> None:
        if adopt:
            self.pool = Pool.adopt(*fds, policy="LRU")
        else:
            self.pool = Pool.create(*fds, policy="LRU", extents_bytes=L1_BYTES, entry_capacity=1024)
        self.row = self.pool.claim_row(b"s" * 16, b"g" * 16, os.getpid())


class ClaimsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop, self.folder = VirtualLoop(), Path(tempfile.mkdtemp())
        self.junk = 0
        self.kept: dict[str, tuple[list[bytes], int]] = {}
        """Keys and end of the claims that must be kept, in the order of their acceptance."""
        self.over: dict[str, tuple[str, str]] = {}
        """State and reason of those that have ended."""
        self.fds = [os.memfd_create(name) for name in ("index", "extents")]
        self.open(adopt=False, share=1 / 4)

    def open(self, *, adopt: bool, share: float) -> None:
        self.l1 = KeptL1(self.fds, adopt=adopt)
        self.cursor = 0
        self.supervisor, self.lane = Supervisor(self.loop), PoolLane(self.loop, threads=1, queue=None)
        parts: Any = SimpleNamespace(
            pool=self.l1.pool, own_lane=self.lane, clock=self.loop.clock, prewarms=None,
            supervisor=self.supervisor, facts=SimpleNamespace(socket_dir=self.folder),
        )  # fmt: skip
        with mock.patch.object(module, "CLAIMED_SHARE", share):
            self.claims = Claims(parts)
        self.limit_bytes, self.told = int(L1_BYTES * share), 0
        self.loop.run_until_complete(self.claims.restore(adopted=adopt))

    def end(self, name: str, state: str, reason: str = "") -> None:
        del self.kept[name]
        self.over[name] = state, reason
        self.told += 1

    def expire(self) -> None:
        now_ms = self.loop.clock.unix_ms()
        for name in [name for name, (_, until_ms) in self.kept.items() if until_ms <= now_ms]:
            self.end(name, "expired")

    def hear(self) -> None:
        """Read what became of chunks in L1, as the instance does at each heartbeat."""
        told = self.l1.pool.l1_changes(self.cursor, 1 << 20)
        assert told is not None
        self.cursor, changes = told
        if any(change == PoolChange.CORRUPT for change, _ in changes):
            self.claims.break_damaged()
            self.loop.run_until_complete(self.supervisor.idle())

    def damage(self, key: bytes) -> bool:
        """Change a byte of a record; returns whether it is there."""
        hold = self.l1.pool.hold(key)
        if hold is None:
            return False
        with hold:
            (ctypes.c_ubyte * 1).from_address(hold.address + hold.length - 1)[0] ^= 0xFF
        return True

    def broken(self, key: bytes) -> None:
        for name in [name for name, (keys, _) in self.kept.items() if key in keys]:
            self.end(name, "broken", "corrupt")

    # --- what happens -----------------------------------------------------------------------------------------

    @rule(by=st.sampled_from(["pressure", "clear", "remove"]), prompt=PROMPT)
    def chunks_leave(self, by: str, prompt: int) -> None:
        """Twice as much as L1 holds is stored, or operators drop chunks."""
        if by == "clear":
            self.l1.pool.clear()
        elif by == "remove":
            self.l1.pool.remove(b"".join(PROMPTS[prompt]))
        for _ in range(16 if by == "pressure" else 0):
            self.junk += 1
            self.l1.store(chain(f"junk {self.junk}", LENGTH))

    @rule(
        prompt=PROMPT,
        n_chunks=st.sampled_from([2, 7, 8, 8]),
        ttl_s=st.integers(1, 400),
        most=st.sampled_from([None, None, None, 3]),
        is_stored=st.sampled_from([True, True, True, False]),
    )
    def claim(self, prompt: int, n_chunks: int, ttl_s: int, most: int | None, is_stored: bool) -> None:
        keys = PROMPTS[prompt][:n_chunks]
        if is_stored:
            self.l1.store(keys)
        n_there = self.l1.pool.peek(b"".join(keys))
        others = {key for kept, _ in self.kept.values() for key in kept}
        reasons = {
            "absent": n_there < n_chunks,
            "no_room": len(others.union(keys)) * RECORD > self.limit_bytes,
            "over_bytes": most is not None and n_chunks > most,
        }
        asked = Claiming(ttl_s=ttl_s, bytes=None if most is None else most * RECORD)
        try:
            claim = self.loop.run_until_complete(self.claims.claim(b"".join(keys), 1, (), IDENTITY, asked))
        except Refused as refused:
            assert reasons[refused.message.partition(":")[0]], (refused.message, reasons)
            if refused.message.startswith("absent"):
                assert f"first {n_there} of its {n_chunks}" in refused.message
            return
        assert not any(reasons.values()), reasons
        assert (claim.chunks, claim.n_bytes, claim.state) == (n_chunks, n_chunks * RECORD, "kept")
        self.kept[claim.claim] = keys, claim.until_unix_ms
        assert (self.folder / CLAIMS).read_bytes().count(claim.claim.encode()) == 1

    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        name = list(self.kept)[which] if which < len(self.kept) else next(iter(self.over), "unknown")
        released = self.loop.run_until_complete(self.claims.release(name))
        assert (released is not None) == (name in self.kept)
        if released is not None:
            self.end(name, "released")

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds: int) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.loop.run_until_complete(self.claims.expire())
        self.expire()

    @rule(which=st.integers(0, 15), is_claimed=st.booleans())
    def a_record_is_found_corrupt(self, which: int, is_claimed: bool) -> None:
        claimed = [key for keys, _ in self.kept.values() for key in keys] if is_claimed else []
        keys = claimed or [key for prompt in PROMPTS for key in prompt]
        key = keys[which % len(keys)]
        if self.damage(key):
            assert self.l1.pool.mark_bad(key)
            self.broken(key)
        self.hear()

    @rule(
        file=st.sampled_from(["kept", "kept", "kept", "kept", "missing", "damaged"]),
        adopt=st.sampled_from([True, True, True, False]),
        share=st.sampled_from([1 / 4, 1 / 4, 1 / 8]),
        seconds=st.integers(0, 30),
        damaged=st.none() | PROMPT,
    )
    def the_server_ends_without_a_word(
        self, file: str, adopt: bool, share: float, seconds: int, damaged: int | None
    ) -> None:
        bad = PROMPTS[damaged][0] if damaged is not None and self.damage(PROMPTS[damaged][0]) else b""
        self.l1.pool.close()
        self.lane.close()
        if not adopt:
            self.drop_files()
            self.fds = [os.memfd_create(name) for name in ("index", "extents")]
        path = self.folder / CLAIMS
        if file == "missing":
            path.unlink(missing_ok=True)
        elif file == "damaged":
            path.write_bytes(b"\x92" + os.urandom(20))
        self.loop.run_until_complete(asyncio.sleep(seconds))
        if file != "kept":
            self.kept, self.over = {}, {}
        self.open(adopt=adopt, share=share)
        self.expire()
        used: set[bytes] = set()
        for name, (keys, _) in list(self.kept.items()):
            if not adopt:
                self.end(name, "broken", "pool_lost")
            elif len(used.union(keys)) * RECORD > self.limit_bytes:
                self.end(name, "broken", "no_room")
            else:
                used.update(keys)
        self.broken(bad)
        while self.l1.pool.verify_next(1 << 40):
            pass
        self.hear()

    # --- what must hold ---------------------------------------------------------------------------------------

    @invariant()
    def claims_are_kept_or_ended_as_promised(self) -> None:
        listed = self.claims.listed()
        states = {row["claim"]: (row["state"], row["reason"]) for row in listed["claims"]}
        assert states == dict.fromkeys(self.kept, ("kept", "")) | self.over
        assert all(row["ended_unix_ms"] > 0 for row in listed["claims"] if row["state"] != "kept")
        keys = {key for kept, _ in self.kept.values() for key in kept}
        assert self.l1.has(*keys)
        assert listed["kept_bytes"] == len(keys) * RECORD <= self.limit_bytes
        assert sum(self.claims.ended.values()) == self.told
        validate(self.l1.pool)

    def drop_files(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def teardown(self) -> None:
        for name in list(self.kept):
            self.loop.run_until_complete(self.claims.release(name))
        assert self.claims.kept_bytes == self.l1.pool.stats()["leased_bytes"] == 0
        self.l1.nothing_in_use()
        self.l1.pool.close()
        self.lane.close()
        self.drop_files()
        self.loop.close()
        shutil.rmtree(self.folder)


TestClaims = ClaimsMachine.TestCase
TestClaims.settings = settings(max_examples=amount(40, 300), stateful_step_count=30)
