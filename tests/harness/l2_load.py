"""Prompts that are stored in a server with L2 behind it and come back, right byte for byte."""

from __future__ import annotations

from typing import Any

from kvstrata.rpc import wire
from kvstrata.types import unpack_extents
from tests.harness.rpc_client import RpcClient, chain_of, keys_of, payload, until

N_CHUNKS = 3
"""Of each prompt of a Load."""


def until_stored(client: RpcClient) -> None:
    """Until nothing waits for a put."""

    def quiet(status: dict[str, Any]) -> bool:
        [adapter] = status["l2_store"]["adapters"].values()
        return not (adapter["queued"] or adapter["in_flight"] or adapter["retrying"])

    until(client, quiet)


def clear_l1(client: RpcClient) -> int:
    return client.ask(wire.Clear(client.session, client.next_seq(), wire.Tier.L1), wire.Cleared).count


def check_bytes(client: RpcClient, reply: wire.LookupReply, chain: bytes) -> None:
    for extent, key in zip(unpack_extents(reply.extents), keys_of(chain), strict=False):
        assert client.read(extent) == payload(key)


def check_and_release(client: RpcClient, reply: wire.LookupReply, chain: bytes) -> None:
    check_bytes(client, reply, chain)
    client.release([(client.session, reply.seq)])


def stored(client: RpcClient, n_chunks: int) -> tuple[wire.IdentifyReply, bytes]:
    """A prompt that is in L1, and on its way to L2."""
    identity = client.identify()
    chain = chain_of(identity.root, n_chunks)
    client.store(identity, chain)
    return identity, chain


class Load:
    """One prompt after the other is stored and looked up; whatever is served must be right byte for byte."""

    def __init__(self, client: RpcClient) -> None:
        self.client = client
        self.identity = client.identify()
        self.number = 0

    def prompt(self) -> bytes:
        """Store a new one."""
        self.number += 1
        chain = chain_of(self.identity.root, N_CHUNKS, first_token=self.number * 10_000)
        self.client.store(self.identity, chain)
        return chain

    def served(self, chain: bytes) -> tuple[int, int]:
        """Its chunks that come from L1 and from L2."""
        reply = self.client.lookup(self.identity.identity_id, chain, deadline_ms=5_000)
        check_and_release(self.client, reply, chain)
        self.client.ping([])
        return reply.l1_chunks, reply.l2_chunks

    def step(self) -> int:
        """Store a prompt and ask for it in L1 and then in L2; the chunks that came from there."""
        chain = self.prompt()
        assert self.served(chain) == (N_CHUNKS, 0), "what L1 has is served whatever L2 does"
        until_stored(self.client)
        clear_l1(self.client)
        return self.served(chain)[1]

    def until_served(self) -> None:
        """The tier works (again)."""
        until(self.client, lambda status: self.step() == N_CHUNKS)
