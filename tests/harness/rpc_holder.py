"""A process with registered memory that reserves extents and holds them: asked by a test, and then killed."""

from __future__ import annotations

from pathlib import Path

from tests.harness.child import serve
from tests.harness.rpc_client import RpcClient, chain_of

_held: list[RpcClient] = []


def reserve(socket_dir: str, n_chunks: int) -> str:
    """Attaches and reserves; the session's name."""
    client = RpcClient(Path(socket_dir), registers_memory=True)
    _held.append(client)
    client.attach()
    client.connect()
    identity = client.identify()
    client.reserve(identity.identity_id, chain_of(identity.root, n_chunks))
    return client.session.hex()


if __name__ == "__main__":
    serve({"reserve": reserve})
