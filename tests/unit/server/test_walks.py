"""The files and Python calls that a store, a lookup and a release take in the server must not grow.

Counted in process and without a transport, from the frame of each request to its reply; a store with a disk tier, until
the chunks are on the disk.  A change that makes a walk shorter lowers its numbers here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import kvstrata
from kvstrata.native.core import RecordSpec, seal_record, storage_keys
from kvstrata.rpc import wire
from kvstrata.tiers.base import AdapterContext
from kvstrata.tiers.config import configure_tier
from kvstrata.tiers.tier import Tier, limits_of
from kvstrata.types import KEY_BYTES, unpack_extents
from tests.harness.instance_in_process import InstanceInProcess, Said, said
from tests.harness.rpc_client import CHUNK_TOKENS, RECORD_BYTES, SECTIONS, chain_of, keys_of, part

SOURCES = str(kvstrata.__path__[0])
SESSION = b"one engine".ljust(16, b".")
CHUNKS = 4
LIMITS = {"store": (10, 43), "lookup": (11, 29), "release": (5, 16)}
"""Files and calls of each walk."""
DISK_LIMITS = {"store": (17, 131), "lookup": (24, 249)}
"""The same with a disk tier: a store that is put to it, and a lookup that loads from it."""


class Walk:
    """Counts calls of functions of kvstrata, and the files that they are in, while it is entered."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.calls = 0

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            self.files.add(frame.f_code.co_filename.removeprefix(SOURCES))
            self.calls += 1

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        sys.setprofile(self._called)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)


def answered(server: InstanceInProcess, message: Said, walk: Walk) -> wire.AnyReply:
    """The reply to a message that is answered at once; its walk goes from the frame to the reply's frame."""
    server.sent.clear()
    line = server.line(message.session)
    with walk:
        server.requests.on_frame(line, message.message)
    [(_, frame)] = server.sent
    return wire.decode_reply(frame)


def store(server: InstanceInProcess, turn: int, identity: wire.IdentifyReply, walk: Walk) -> bytes:
    """Store CHUNKS chunks; returns their chain keys."""
    number, digest, seq = identity.identity_id, part().digest(), 10 * (turn + 1)
    chain = chain_of(identity.root, CHUNKS, 1000 * turn)
    reserve = said(SESSION, wire.Reserve(seq, 1000, number, b"", chain, RECORD_BYTES))
    reply = answered(server, reserve, walk)
    assert isinstance(reply, wire.ReserveReply), reply
    parent = bytes(KEY_BYTES)
    for key, extent in zip(keys_of(chain), unpack_extents(reply.extents), strict=True):
        spec = RecordSpec(
            storage_keys(identity.root, key, digest), identity.root, digest, parent, CHUNK_TOKENS
        )
        seal_record(server.pool.extents_address + extent.offset_bytes, extent.length_bytes, spec, SECTIONS)
        parent = spec.key
    return chain


def commit(turn: int) -> Said:
    seq = 10 * (turn + 1)
    return said(SESSION, wire.Commit(seq + 1, seq, list(range(CHUNKS))))


def attached() -> tuple[InstanceInProcess, wire.IdentifyReply]:
    """An instance with one engine, and the engine's identity."""
    server = InstanceInProcess()
    server.attach(SESSION, b"group".ljust(16, b"."))
    [identity] = server.feed(said(SESSION, wire.Identify(1, wire.RequestIdentity())))
    assert isinstance(identity, wire.IdentifyReply)
    return server, identity


def walks() -> dict[str, Walk]:
    """Do each walk three times, and return those of the last time."""
    server, identity = attached()
    for turn in range(3):
        found, seq = {name: Walk() for name in LIMITS}, 10 * (turn + 1)
        chain = store(server, turn, identity, found["store"])
        done = answered(server, commit(turn), found["store"])
        assert isinstance(done, wire.CommitReply) and not any(done.outcomes), done
        lookup = said(SESSION, wire.Lookup(seq + 2, 1000, identity.identity_id, "request", chain))
        hit = answered(server, lookup, found["lookup"])
        assert isinstance(hit, wire.LookupReply) and hit.n_chunks == CHUNKS, hit
        release = said(SESSION, wire.Release(seq + 3, [(SESSION, seq + 2)]))
        ended = answered(server, release, found["release"])
        assert isinstance(ended, wire.Ok) and ended.count == 1, ended
    server.close()
    return found


def disk_walks(folder: Path) -> dict[str, Walk]:
    """As `walks`, with a disk tier: each store is put to it, and each lookup finds its chunks there only."""
    server, identity = attached()
    parts, run = server.parts, server.loop.run_until_complete
    config = configure_tier({"type": "disk", "base_path": str(folder), "capacity_gb": 1}, 0)
    tier = Tier(config, limits_of(config, server.pool.extents_bytes), parts.clock)
    context = AdapterContext(
        "walks", parts.clock, server.pool.extents_address, server.pool.extents_bytes, lambda key: None
    )
    run(parts.tiers.open(tier, context, must=True))
    for turn in range(3):
        found = {name: Walk() for name in DISK_LIMITS}
        chain = store(server, turn, identity, found["store"])
        with found["store"]:
            [done] = server.feed(commit(turn))
            run(parts.store.idle())
        assert isinstance(done, wire.CommitReply) and not any(done.outcomes), done
        keys = storage_keys(identity.root, chain, part().digest())
        assert run(tier.usage()).records == CHUNKS * (turn + 1)
        for key in reversed(list(keys_of(keys))):
            assert server.pool.remove(key)
        lookup = wire.Lookup(10 * turn + 12, 60_000, identity.identity_id, "request", chain)
        with found["lookup"]:
            [hit] = server.feed(said(SESSION, lookup))
        assert isinstance(hit, wire.LookupReply) and hit.n_chunks == CHUNKS, hit
    run(parts.prefetch.idle())
    run(parts.tiers.close())
    server.close()
    return found


def grown(found: dict[str, Walk], limits: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The walks that take more than their limits."""
    taken = {name: (len(walk.files), walk.calls) for name, walk in found.items()}
    return {
        name: (files, calls)
        for name, (files, calls) in taken.items()
        if files > limits[name][0] or calls > limits[name][1]
    }


def test_no_walk_takes_more_files_or_calls_than_before() -> None:
    assert not grown(walks(), LIMITS)


def test_no_walk_to_a_disk_tier_takes_more_files_or_calls_than_before(tmp_path: Path) -> None:
    assert not grown(disk_walks(tmp_path), DISK_LIMITS)
