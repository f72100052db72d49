"""Stores prompts in a server with one L2 adapter and checks the bytes of all chunks that the server gives back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstrata.rpc import wire
from kvstrata.types import unpack_extents
from tests.harness.rpc_client import RpcClient, chain_of, keys_of, payload, until
from tests.harness.server_process import ServerProcess

N_CHUNKS = 3
"""Chunks of each prompt of a `Load`."""


def until_stored(client: RpcClient) -> None:
    """Wait until no chunk is queued for a put, in flight, or to be put again."""

    def quiet(status: dict[str, Any]) -> bool:
        [adapter] = status["l2_store"]["adapters"].values()
        return not (adapter["queued"] or adapter["in_flight"] or adapter["retrying"])

    until(client, quiet)


def clear_l1(client: RpcClient) -> int:
    cleared: int = ServerProcess.of[client.socket_dir].post("/v1/clear", {"tier": "l1"})["cleared"]["l1"]
    return cleared


def check_bytes(client: RpcClient, reply: wire.LookupReply, chain: bytes) -> None:
    for extent, key in zip(unpack_extents(reply.extents), keys_of(chain), strict=False):
        assert client.read(extent) == payload(key)


def check_and_release(client: RpcClient, reply: wire.LookupReply, chain: bytes) -> None:
    check_bytes(client, reply, chain)
    client.release([(client.session, reply.seq)])


def served(
    client: RpcClient, identity: wire.IdentifyReply, chain: bytes, deadline_ms: int = 20_000
) -> tuple[int, int]:
    """Look a prompt up; return how many chunks came from L1 and how many from L2, once their bytes were checked."""
    reply = client.lookup(identity.identity_id, chain, deadline_ms=deadline_ms)
    check_and_release(client, reply, chain)
    return reply.l1_chunks, reply.l2_chunks


def stored(client: RpcClient, n_chunks: int) -> tuple[wire.IdentifyReply, bytes]:
    """Store a prompt in L1, from where the server puts it to L2; return its identity and its chain."""
    identity = client.identify()
    chain = chain_of(identity.root, n_chunks)
    client.store(identity, chain)
    return identity, chain


def assert_shared(one: ServerProcess, other: ServerProcess) -> None:
    """Assert that each of two servers is served by their medium what the first one has stored."""
    with RpcClient(one.socket_dir) as writer, RpcClient(other.socket_dir) as reader:
        _, chain = stored(writer, 6)
        until_stored(writer)
        assert served(reader, reader.identify(), chain) == (0, 6)
        clear_l1(writer)
        assert served(writer, writer.identify(), chain) == (0, 6)


class Load:
    """Stores one prompt after the other and looks it up; asserts that all served bytes are right."""

    def __init__(self, client: RpcClient) -> None:
        self.client = client
        self.identity = client.identify()
        self.number = 0

    def prompt(self) -> bytes:
        self.number += 1
        chain = chain_of(self.identity.root, N_CHUNKS, first_token=self.number * 10_000)
        self.client.store(self.identity, chain)
        return chain

    def served(self, chain: bytes) -> tuple[int, int]:
        found = served(self.client, self.identity, chain, deadline_ms=5_000)
        self.client.resume([])
        return found

    def step(self) -> int:
        """Store a prompt, look it up in L1, clear L1, and look the prompt up again; return how many chunks L2 gave."""
        chain = self.prompt()
        assert self.served(chain) == (N_CHUNKS, 0), "chunks in L1 are served whatever L2 does"
        until_stored(self.client)
        clear_l1(self.client)
        return self.served(chain)[1]

    def until_served(self) -> None:
        """Repeat `step` until L2 serves a whole prompt (again)."""
        until(self.client, lambda status: self.step() == N_CHUNKS)

    def outlives(self, fails: Callable[[], object], comes_back: Callable[[], object]) -> None:
        """Assert that a medium that fails costs misses, and serves whole prompts again once it has come back."""
        self.until_served()
        fails()
        try:
            for _ in range(4):
                assert self.step() == 0
        finally:
            comes_back()
        self.until_served()
