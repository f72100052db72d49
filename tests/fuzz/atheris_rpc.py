"""Coverage-guided fuzzing of the RPC boundary: frames made of the fuzzer's bytes against an engine in this process.

python -m tests.fuzz.atheris_rpc [libFuzzer options] [corpus folder]
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvstrata"]):
    from kvstrata.rpc import wire
    from tests.harness.engine_in_process import EngineInProcess

SESSION = b"fuzzed session.."
engine = EngineInProcess()
engine.attach(SESSION, b"fuzzed engine...")
[identity] = engine.feed(wire.encode(wire.Identify(SESSION, 1, wire.RequestIdentity())))
assert isinstance(identity, wire.IdentifyReply)


def one_input(data: bytes) -> None:
    """Some frames, each after a length byte; a frame may borrow the attached session's name."""
    frames = []
    while data and len(frames) < 8:
        length = 1 + data[0]
        frames.append(data[1 : 1 + length].replace(b"$", SESSION))
        data = data[1 + length :]
    replies = engine.feed(*frames)
    assert len(replies) == len(frames)
    assert not any(isinstance(reply, wire.Error) and reply.code == "internal" for reply in replies)
    engine.check()


def write_seeds(folder: Path) -> None:
    """One sound request of each operation, for the fuzzer to start from."""
    key = bytes(range(32))
    groups = [wire.Group(wire.Rule.PREFIX, key)]
    requests: list[wire.Request] = [
        wire.Hello(SESSION, 17, 1, "x"),
        wire.Identify(SESSION, 2, wire.RequestIdentity(salt="s")),
        wire.Ping(SESSION, 3, [1]),
        wire.Lookup(SESSION, 4, 5, identity.identity_id, "r", groups),
        wire.Release(SESSION, 5, [(SESSION, 4)]),
        wire.Reserve(SESSION, 6, 5, identity.identity_id, b"", key, 8192),
        wire.Commit(SESSION, 7, 6, [0]),
        wire.Abort(SESSION, 8, 6),
        wire.Cancel(SESSION, 9, 4),
        wire.Retrieve(SESSION, 10, identity.identity_id, key, key, 0, 9),
        wire.Prefetch(SESSION, 11, identity.identity_id, key, 0, 5),
        wire.Status(SESSION, 12),
        wire.Clear(SESSION, 13, wire.Tier.L1),
        wire.Explain(SESSION, 14, "r"),
        wire.Quiesced(SESSION, 15),
        wire.Corrupt(SESSION, 16, key),
    ]
    for request in requests:
        frame = wire.encode(request).replace(SESSION, b"$")
        (folder / f"seed-{request.seq}").write_bytes(bytes([len(frame) - 1]) + frame)


if __name__ == "__main__":
    if Path(sys.argv[-1]).is_dir():
        write_seeds(Path(sys.argv[-1]))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
