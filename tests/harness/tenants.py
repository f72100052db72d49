"""Tenants of a server: their tokens, its settings, and a client that asks in the name of one of them."""

from __future__ import annotations

from pathlib import Path

from kvstrata.rpc import wire
from kvstrata.types import KEY_BYTES, Extent, unpack_extents
from tests.harness.rpc_client import RECORD_BYTES, RpcClient, keys_of, payload
from tests.harness.server_process import ServerProcess

BLUE, GREEN, BOTH = "secret-of-blue-0123456", "secret-of-green-012345", "secret-of-blue-and-green-01"


def tenant_settings(folder: Path, text: str) -> tuple[str, ...]:
    """Flags that give a server the tokens of blue (also for azure), green and both, and further settings in YAML."""
    tenants, config = folder / "tenants", folder / "server.yaml"
    tenants.write_text(f"{BLUE} blue azure\n{GREEN} green\n{BOTH} blue green\n")
    tenants.chmod(0o600)
    config.write_text(f"security: {{tenants_file: {tenants}}}\n{text}")
    return ("--config", str(config))


class Tenant(RpcClient):
    """A client with a tenant's token, and that tenant's identity of this test."""

    def __init__(self, server: ServerProcess, name: str, token: str, salt: str) -> None:
        super().__init__(server.socket_dir, token=token)
        self.name, self.salt = name, salt

    def begin(self) -> None:
        self.identity = self.identify(tenant=self.name, salt=self.salt)

    @property
    def root(self) -> bytes:
        return self.identity.root

    def looks_up(self, chain: bytes, request_id: str = "") -> wire.LookupReply:
        """Look a chain up under the own identity, and give the lease back."""
        reply = self.lookup(self.identity.identity_id, chain, request_id=request_id)
        self.release([(self.session, reply.seq)], group=True)
        return reply

    def retrieves(self, key: bytes) -> wire.RetrieveReply:
        """Ask for the bytes of a chunk of the own slice."""
        assert self.slice is not None
        return self.ask(
            wire.Retrieve(self.next_seq(), self.identity.identity_id, key, self.slice.digest(), 0, RECORD_BYTES
            ),
            wire.RetrieveReply,
        )  # fmt: skip

    def reports_corrupt(self, keys: bytes) -> int:
        number = self.identity.identity_id
        return self.ask(wire.Corrupt(self.next_seq(), number, keys), wire.Ok).count

    def cleared(self) -> int:
        """Have an admin clear L1 of the own tenant's chunks; how many went."""
        done = ServerProcess.of[self.socket_dir].post("/v1/clear", {"tier": "l1", "tenant": self.name})
        count: int = done["cleared"]["l1"]
        return count

    def extent_of(self, key: bytes) -> Extent:
        """Where an own chunk lies in L1."""
        reply = self.looks_up(key)
        assert reply.n_chunks == 1
        return unpack_extents(reply.extents)[0]

    def reads_its_own(self, chain: bytes) -> None:
        """Assert that it finds all chunks of its prompt, with the bytes that it stored."""
        reply = self.lookup(self.identity.identity_id, chain)
        try:
            assert reply.n_chunks == len(chain) // KEY_BYTES, reply
            for key, extent in zip(keys_of(chain), unpack_extents(reply.extents), strict=True):
                assert self.read(extent) == payload(key)
        finally:
            self.release([(self.session, reply.seq)], group=True)
