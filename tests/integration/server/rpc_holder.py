"""A process with registered memory that reserves extents when a test asks for it, and holds them until it is killed."""

from __future__ import annotations

from pathlib import Path

from kvstrata.types import shown_name
from tests.harness.child import serve
from tests.harness.rpc_client import RpcClient, chain_of

_held: list[RpcClient] = []


def reserve(socket_dir: str, n_chunks: int) -> str:
    """Attach and reserve; returns the session's name."""
    client = RpcClient(Path(socket_dir), registers_memory=True)
    _held.append(client)
    client.attach()
    identity = client.identify()
    client.reserve(identity.identity_id, chain_of(identity.root, n_chunks))
    return shown_name(client.session)


if __name__ == "__main__":
    serve({"reserve": reserve})
