"""The files and Python calls that a store, a lookup and a release take in the server must not grow.

Counted in process and without a transport, from the frame of each request to its reply.  A change that makes a walk
shorter lowers its numbers here.
"""

from __future__ import annotations

import sys
from types import FrameType

import kvstrata
from kvstrata.native.core import RecordSpec, seal_record, storage_keys
from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES, unpack_extents
from tests.harness.instance_in_process import InstanceInProcess, Said, said
from tests.harness.rpc_client import CHUNK_TOKENS, RECORD_BYTES, SECTIONS, chain_of, keys_of, part

SOURCES = str(kvstrata.__path__[0])
SESSION = b"one engine".ljust(16, b".")
CHUNKS = 4
LIMITS = {"store": (10, 47), "lookup": (11, 45), "release": (6, 17)}
"""Files and calls of each walk."""


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


def walks() -> dict[str, Walk]:
    """Do each walk three times, and return those of the last time."""
    server = InstanceInProcess()
    server.attach(SESSION, b"group".ljust(16, b"."))
    [identity] = server.feed(said(SESSION, wire.Identify(1, wire.RequestIdentity())))
    assert isinstance(identity, wire.IdentifyReply)
    number, digest = identity.identity_id, part().digest()
    for turn in range(3):
        found = {name: Walk() for name in LIMITS}
        seq = 10 * (turn + 1)
        chain = chain_of(identity.root, CHUNKS, 1000 * turn)
        reserve = said(SESSION, wire.Reserve(seq, 1000, number, b"", chain, RECORD_BYTES))
        reply = answered(server, reserve, found["store"])
        assert isinstance(reply, wire.ReserveReply), reply
        parent = bytes(KEY_BYTES)
        for key, extent in zip(keys_of(chain), unpack_extents(reply.extents), strict=True):
            spec = RecordSpec(
                storage_keys(identity.root, key, digest), identity.root, digest, parent, CHUNK_TOKENS
            )
            seal_record(
                server.pool.extents_address + extent.offset_bytes, extent.length_bytes, spec, SECTIONS
            )
            parent = spec.key
        commit = said(SESSION, wire.Commit(seq + 1, seq, list(range(CHUNKS))))
        done = answered(server, commit, found["store"])
        assert isinstance(done, wire.CommitReply) and not any(done.outcomes), done
        groups = [wire.KeyGroup(wire.Rule.PREFIX, chain)]
        lookup = said(SESSION, wire.Lookup(seq + 2, 1000, number, "request", groups))
        hit = answered(server, lookup, found["lookup"])
        assert isinstance(hit, wire.LookupReply) and hit.n_chunks == CHUNKS, hit
        release = said(SESSION, wire.Release(seq + 3, [(SESSION, seq + 2)]))
        ended = answered(server, release, found["release"])
        assert isinstance(ended, wire.Ok) and ended.count == 1, ended
    server.close()
    return found


def test_no_walk_takes_more_files_or_calls_than_before() -> None:
    found = {name: (len(walk.files), walk.calls) for name, walk in walks().items()}
    grown = {
        name: taken
        for name, taken in found.items()
        if taken[0] > LIMITS[name][0] or taken[1] > LIMITS[name][1]
    }
    assert not grown, f"{found}, limits {LIMITS}"
