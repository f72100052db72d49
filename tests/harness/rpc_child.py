"""A process with clients of the protocol (`RpcClient`), which do what a test says until it kills the process.

Sessions travel as hex.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from tests.harness.child import serve
from tests.harness.raw_line import lock_files, raw_attach
from tests.harness.rpc_client import RpcClient, chain_of

_clients: dict[str, RpcClient] = {}


def attach(socket_dir: str, session: str = "", registers_memory: bool = False) -> tuple[str, int]:
    """Attach a new session, or this one (again); return it and its row."""
    client = _clients.get(session) or RpcClient(Path(socket_dir), registers_memory=registers_memory)
    if session:
        client.session = bytes.fromhex(session)
    row = client.attach().row
    _clients[client.session.hex()] = client
    return client.session.hex(), row


def reserve(session: str, n_chunks: int) -> None:
    identity = _clients[session].identify()
    _clients[session].reserve(identity.identity_id, chain_of(identity.root, n_chunks))


def store(session: str, n_chunks: int) -> None:
    identity = _clients[session].identify()
    _clients[session].store(identity, chain_of(identity.root, n_chunks))


def goodbye(session: str) -> None:
    _clients.pop(session).goodbye()


def raw(socket_dir: str, session: str, fds: list[str]) -> tuple[str, str, int]:
    """Ask for the row of a session and hang up before it is locked; return the reply's code, field and row."""
    client = _clients.get(session) or RpcClient(Path(socket_dir))
    reply = raw_attach(Path(socket_dir), [msgspec.msgpack.encode(client.attach_request())], fds)
    return reply.code, reply.field, reply.row


def fork() -> int:
    """Fork a child that stays alive; return its pid."""
    if (pid := os.fork()) == 0:
        while True:
            signal.pause()
    return pid


if __name__ == "__main__":
    serve({each.__name__: each for each in (attach, reserve, store, goodbye, raw, fork, lock_files)})
