"""Coverage-guided fuzzing of the RPC boundary: frames made of the fuzzer's bytes against an engine in this process.

python -m tests.fuzz.atheris_rpc [libFuzzer options] [corpus folder]
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["kvstrata"]):
    from kvstrata.rpc import wire
    from tests.harness.engine_in_process import EngineInProcess

SESSION = b"fuzzed session.."
engine = EngineInProcess()
engine.attach(SESSION, b"fuzzed engine...")


def one_input(data: bytes) -> None:
    """Some frames, each after a length byte; a frame may borrow the attached session's name."""
    frames = []
    while data and len(frames) < 8:
        length = 1 + data[0] % 80
        frames.append(data[1 : 1 + length].replace(b"$", SESSION))
        data = data[1 + length :]
    replies = engine.feed(*frames)
    assert len(replies) == len(frames)
    assert not any(isinstance(reply, wire.Error) and reply.code == "internal" for reply in replies)
    engine.check()


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
