"""A stand-in for the controller's directory: answers over a real socket with the owners that a test has named."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence
from typing import Any

from kvstrata.rpc.cluster_wire import (
    TO_CONTROLLER,
    ClusterReply,
    Failure,
    Owner,
    Where,
    WhereReply,
    encode,
    tags_of,
)
from kvstrata.rpc.zmq_curve import OPEN, ClusterKeys
from kvstrata.rpc.zmq_server import Address, ZmqServer


class Endpoint:
    """A ROUTER socket that answers each request with the return value of `answer`; None: no answer."""

    def __init__(self, decoder: Any, keys: ClusterKeys = OPEN) -> None:
        self._decoder = decoder
        self._server = ZmqServer(asyncio.get_running_loop())
        port = self._server.bind_tcp("127.0.0.1", 0, keys=keys, anywhere=False)
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.asked: collections.Counter[str] = collections.Counter()
        """Requests by the name of their type."""
        self.silent = False
        """Whether all requests stay without an answer."""
        self._server.start(self._take, lambda address, frames: b"")

    def _take(self, address: Address, frame: bytes) -> None:
        request = self._decoder.decode(frame)
        self.asked[type(request).__name__] += 1
        reply = None if self.silent else self.answer(request)
        if reply is not None:
            self._server.send(address, encode(reply))

    def answer(self, request: Any) -> ClusterReply | None:
        raise NotImplementedError

    def close(self) -> None:
        self._server.close()


class Directory(Endpoint):
    """Answers `Where` with the owners that hold a leading part of the keys, the longest part first."""

    def __init__(self) -> None:
        super().__init__(TO_CONTROLLER)
        self.holds: dict[str, tuple[Owner, set[bytes]]] = {}
        """Instance → owner, and the tags that it holds."""
        self.failure: Failure | None = None
        """The answer to every request, unless it is None."""

    def tell(self, owner: Owner, keys: Sequence[bytes]) -> None:
        """Set the keys that an owner holds."""
        self.holds[owner.instance] = (owner, {tags_of(key) for key in keys})

    def answer(self, request: Any) -> ClusterReply | None:
        assert isinstance(request, Where)
        if self.failure is not None:
            return Failure(request.seq, 1, self.failure.code, self.failure.message, "", True)
        tags = [request.tags[at : at + 8] for at in range(0, len(request.tags), 8)]
        owners = []
        for entry, held in self.holds.values():
            if request.each:
                n_keys = len(tags) - next((i for i, tag in enumerate(tags) if tag in held), len(tags))
            else:
                n_keys = next((i for i, tag in enumerate(tags) if tag not in held), len(tags))
            if n_keys:
                owners.append(
                    Owner(
                        entry.instance,
                        entry.incarnation,
                        entry.peer_endpoint,
                        n_keys,
                        entry.confirmed,
                        entry.peer_key,
                    )
                )
        owners.sort(key=lambda owner: -owner.n_keys)
        return WhereReply(request.seq, 7, owners[: request.max_owners])
