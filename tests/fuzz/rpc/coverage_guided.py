"""Coverage-guided fuzzing, in this process, of frames on the RPC port or of messages on the attach socket.

    python -m tests.fuzz.rpc.coverage_guided rpc|attach [libFuzzer options] [corpus folder]

Without `-max_total_time` or `-runs` it runs until it is stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import atheris
import msgspec

with atheris.instrument_imports(include=["kvstrata"]):
    from kvstrata.errors import WIRE_ERRORS, KvstrataError
    from kvstrata.rpc import wire
    from kvstrata.server.attach_checks import check_company, check_resumed, parse_request
    from kvstrata.session.attach import _decode as decode_attach_reply
    from kvstrata.types import Role
    from tests.harness.instance_in_process import InstanceInProcess, Said, said
    from tests.harness.rpc_client import FACTS, layout, part

SESSION = b"fuzzed session.."
GROUP = b"fuzzed engine..."


class RpcPort:
    """Frames against a real instance with one session attached."""

    def __init__(self) -> None:
        self.instance = InstanceInProcess()
        self.instance.attach(SESSION, GROUP)
        [identity] = self.instance.feed(said(SESSION, wire.Identify(1, wire.RequestIdentity())))
        assert isinstance(identity, wire.IdentifyReply)
        self.identity_id = identity.identity_id

    def one_input(self, data: bytes) -> None:
        """Receive the frames of an input, each after a length byte; a frame may use the attached session's name."""
        frames = []
        while data and len(frames) < 8:
            length = 1 + data[0]
            frames.append(data[1 : 1 + length].replace(b"$", SESSION))
            data = data[1 + length :]
        replies = self.instance.feed(*(Said(SESSION, frame) for frame in frames))
        assert len(replies) == len(frames)
        for reply in replies:
            assert not isinstance(reply, wire.Error) or (
                reply.code in WIRE_ERRORS and reply.code != "internal"
            )
        self.instance.check()

    def seeds(self) -> list[bytes]:
        """Return one valid request of each operation."""
        key = bytes(range(32))
        groups = [wire.KeyGroup(wire.Rule.PREFIX, key)]
        requests: list[wire.Request] = [
            wire.Identify(2, wire.RequestIdentity(salt="s")),
            wire.Ping(3),
            wire.Resume(4, [1]),
            wire.Lookup(4, 5, self.identity_id, "r", groups),
            wire.Release(5, [(SESSION, 4)]),
            wire.Reserve(6, 5, self.identity_id, b"", key, 8192),
            wire.Commit(7, 6, [0]),
            wire.Abort(8, 6),
            wire.Cancel(9, 4),
            wire.Retrieve(10, self.identity_id, key, key, 0, 9),
            wire.Quiesced(15),
            wire.Corrupt(16, self.identity_id, key),
        ]
        frames = [wire.encode(request).replace(SESSION, b"$") for request in requests]
        return [bytes([len(frame) - 1]) + frame for frame in frames]


class AttachSocket:
    """Messages of both directions: requests as the server reads and checks them, replies as the client reads them."""

    def __init__(self) -> None:
        self.instance = InstanceInProcess()
        self.other = self._request(Role.CLIENT)

    def one_input(self, data: bytes) -> None:
        """Check that each message is accepted, or refused with an error for its sender, and that nothing is kept."""
        try:
            request = parse_request(data)
            assert repr(request)
            check_company(request, [self.other])
            check_resumed(request, self.other)
        except KvstrataError as error:
            assert error.code in WIRE_ERRORS and error.code != "internal" and error.message
        else:
            again = parse_request(msgspec.msgpack.encode(request))
            assert again == request
        try:
            assert isinstance(decode_attach_reply(data), wire.AttachReply)
        except KvstrataError as error:
            assert error.message
        assert not list(self.instance.parts.processes)

    def seeds(self) -> list[bytes]:
        """Return valid requests and replies."""
        requests = [self._request(role) for role in Role]
        named = msgspec.structs.replace(self.other, token="secret", old_epoch=3, held_locks=[(1, 2)])
        replies = [
            wire.AttachReply(row=1, epoch=2, pool_id=bytes(16), extents_bytes=4096, lock_file=(1, 2)),
            wire.AttachReply(code="refused", message="later", field="x"),
        ]
        return [msgspec.msgpack.encode(message) for message in (*requests, named, *replies)]

    @staticmethod
    def _request(role: Role) -> wire.AttachRequest:
        reads = role is not Role.SCHEDULER
        return wire.AttachRequest(
            protocol=wire.PROTOCOL_VERSION,
            session=SESSION,
            group=GROUP,
            role=role,
            layout=layout(),
            engine_slices=1,
            slice=part() if reads else None,
            facts=FACTS if reads else None,
        )


TARGETS: dict[str, Callable[[], RpcPort | AttachSocket]] = {"rpc": RpcPort, "attach": AttachSocket}


def main() -> None:
    """Command line."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"say what to fuzz: {' or '.join(TARGETS)}")
    target = TARGETS[sys.argv.pop(1)]()
    folder = Path(sys.argv[-1])
    if folder.is_dir():
        for number, seed in enumerate(target.seeds()):
            target.one_input(seed)  # a valid message must raise nothing
            (folder / f"seed-{number}").write_bytes(seed)
    atheris.Setup(sys.argv, target.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
