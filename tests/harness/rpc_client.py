"""A bare client of the protocol: it attaches, and sends and receives messages when a test says so.

Blocking, one thread, no retries and no breaker: tests decide which messages are sent, lost or repeated.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.native.core import ExtentsMap, RecordSpec, chain_keys, record_bytes, seal_record, storage_keys
from kvstrata.rpc import wire
from kvstrata.session.attach import Attachment, attach, process_locks
from kvstrata.session.zmtp import Connection
from kvstrata.types import (
    KEY_BYTES,
    Extent,
    LayoutIdentity,
    RequestIdentity,
    Role,
    Slice,
    facts_digest,
    unpack_extents,
)
from tests.harness.server_process import ServerProcess

R = TypeVar("R", bound=wire.Reply)

HANG_S = 120.0
"""A reply that has not come within this time counts as lost."""
CHUNK_TOKENS = 16
PAYLOAD_BYTES = 60_000
SECTIONS = [20_000, 40_000]
RECORD_BYTES = record_bytes(len(SECTIONS), PAYLOAD_BYTES)


class RpcError(Exception):
    """The server answered with an error."""

    def __init__(self, reply: wire.Error) -> None:
        super().__init__(f"{reply.code}: {reply.message}")
        self.code = reply.code
        self.field = reply.field
        self.message = reply.message
        self.retryable = reply.retryable
        self.seq = reply.seq


def layout(model: str = "tiny", **fields: Any) -> LayoutIdentity:
    return LayoutIdentity(model=model, kv_dtype="bf16", chunk_tokens=CHUNK_TOKENS, **fields)


FACTS: dict[str, Any] = {"payload_bytes": PAYLOAD_BYTES, "sections": SECTIONS}


def part(first_head: int = 0, end_head: int = 8, facts: dict[str, Any] = FACTS) -> Slice:
    return Slice(layers=(0, 2), kv_heads=(first_head, end_head), layout=facts_digest(facts))


class RpcClient:
    """One session; with `group` None it belongs to an engine of its own."""

    def __init__(
        self,
        socket_dir: Path,
        *,
        role: Role = Role.CLIENT,
        group: bytes | None = None,
        slice_held: Slice | None = None,
        engine_slices: int = 1,
        identity: LayoutIdentity | None = None,
        token: str = "",
        facts: dict[str, Any] | None = None,
        registers_memory: bool = False,
    ) -> None:
        self.socket_dir = socket_dir
        self.facts = facts or FACTS
        self.session = secrets.token_bytes(16)
        self.group = group or secrets.token_bytes(16)
        self.role = role
        self.slice = None if role is Role.SCHEDULER else slice_held or part(facts=self.facts)
        self.layout = identity or layout()
        self.engine_slices = engine_slices
        self.token = token
        self.registers_memory = registers_memory
        self.seq = 0
        self.epoch = 0
        self.attachment: Attachment | None = None
        self.extents: ExtentsMap | None = None
        self._link: Connection | None = None
        self._arrived: list[bytes] = []
        self._early: dict[int, wire.AnyReply] = {}

    # --- connections -------------------------------------------------------------------------------------

    def attach_request(self) -> wire.AttachRequest:
        return wire.AttachRequest(
            protocol=wire.PROTOCOL_VERSION,
            session=self.session,
            group=self.group,
            role=self.role,
            layout=self.layout,
            engine_slices=self.engine_slices,
            slice=self.slice,
            facts=None if self.slice is None else self.facts,
            old_epoch=self.epoch,
            registers_memory=self.registers_memory,
            token=self.token,
        )

    def attach(self, timeout_s: float = HANG_S) -> Attachment:
        """Attach (again) and map the pool."""
        self.detach()
        self.attachment = attach(self.socket_dir, self.attach_request(), process_locks(), timeout_s)
        self.extents = ExtentsMap(
            self.attachment.extents_fd, self.attachment.extents_bytes, writable=self.slice is not None
        )
        self.epoch = self.attachment.epoch
        self._link = self.attachment.link
        return self.attachment

    def detach(self) -> None:
        """Unmap the pool and close the attach connection, as a detached process does."""
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None
        if self._link is not None:
            self._link.close()
            self._link = None
        self._arrived.clear()
        if self.extents is not None:
            self.extents.close()
            self.extents = None

    def connect(self) -> None:
        """Open a connection without an attach, unless the session is attached."""
        if self.attachment is None:
            self.detach()
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(HANG_S)
            sock.connect(str(self.socket_dir / RPC_SOCKET))
            self._link = Connection(sock, b"DEALER", max_frame_bytes=64 << 20, max_unsent_bytes=64 << 20)

    def close(self) -> None:
        """Detach and disconnect. The session keeps its leases and reservations, since the process lives."""
        self.detach()

    def goodbye(self) -> None:
        """End the session, then close."""
        assert self.attachment is not None
        if self.extents is not None:
            self.extents.close()
            self.extents = None
        assert self.attachment.goodbye(HANG_S)
        self.attachment = None
        self.close()

    def replace(self) -> None:
        """Begin a new session after `goodbye`, as another process of the engine would."""
        self.session = secrets.token_bytes(16)
        self.seq = self.epoch = 0
        self.attach()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.attachment is not None:
            with contextlib.suppress(AssertionError):
                self.goodbye()
                return
        self.close()

    # --- frames ------------------------------------------------------------------------------------------

    def send_bytes(self, message: bytes) -> None:
        assert self._link is not None
        self._link.socket.settimeout(HANG_S)
        self._link.send(message)
        while self._link.unsent_bytes:
            self._link.flush()

    def receive_bytes(self, timeout_s: float = HANG_S) -> bytes:
        """Return the next message. Raises TimeoutError, or ConnectionError when the server has closed its end."""
        assert self._link is not None
        ends_s = time.monotonic() + timeout_s
        while not self._arrived:
            self._link.socket.settimeout(max(0.001, ends_s - time.monotonic()))
            self._arrived += self._link.receive()
        return self._arrived.pop(0)

    def next_seq(self) -> int:
        """Return the number of a new request."""
        self.seq += 1
        return self.seq

    def send(self, request: wire.Request) -> int:
        self.send_bytes(wire.encode(request))
        return request.seq

    def receive(self, seq: int | None = None, timeout_s: float = HANG_S) -> wire.AnyReply:
        """Return the reply to request `seq` and keep other replies for later; with None, return the next reply."""
        if seq is not None and seq in self._early:
            return self._early.pop(seq)
        while True:
            reply = wire.decode_reply(self.receive_bytes(timeout_s))
            if seq is None or reply.seq == seq:
                return reply
            self._early[reply.seq] = reply

    def ask(self, request: wire.Request, expected: type[R]) -> R:
        """Send a request and wait for its reply. Raises RpcError for an error."""
        return self.expect(self.send(request), expected)

    def expect(self, seq: int, expected: type[R]) -> R:
        """Wait for the reply to a request that was sent before. Raises RpcError for an error."""
        reply = self.receive(seq)
        if isinstance(reply, wire.Error):
            raise RpcError(reply)
        assert isinstance(reply, expected), reply
        return reply

    # --- operations --------------------------------------------------------------------------------------

    def identify(self, **fields: str) -> wire.IdentifyReply:
        """Declare a request identity."""
        return self.ask(wire.Identify(self.next_seq(), RequestIdentity(**fields)), wire.IdentifyReply)

    def ping(self) -> wire.Pong:
        return self.ask(wire.Ping(self.next_seq()), wire.Pong)

    def resume(self, live: list[int]) -> int:
        """Name the lookups and reserves that this session still has; returns how many others have ended."""
        return self.ask(wire.Resume(self.next_seq(), live), wire.Ok).count

    def lookup_request(
        self,
        identity: int,
        chain: bytes,
        *,
        deadline_ms: int = 20_000,
        request_id: str = "",
        probe: bytes = b"",
        traceparent: str = "",
    ) -> wire.Lookup:
        return wire.Lookup(
            self.next_seq(), deadline_ms, identity, request_id, chain, probe, traceparent=traceparent
        )

    def lookup(self, identity: int, chain: bytes, **more: Any) -> wire.LookupReply:
        """Look a chain up."""
        return self.ask(self.lookup_request(identity, chain, **more), wire.LookupReply)

    def release(self, leases: Sequence[tuple[bytes, int]], *, group: bool = False) -> int:
        """Release leases; return how many shares ended."""
        request = wire.Release(self.next_seq(), list(leases), group)
        return self.ask(request, wire.Ok).count

    def cancel(self, target: int) -> int:
        """Cancel a request; return how many requests were undone or stopped."""
        return self.ask(wire.Cancel(self.next_seq(), target), wire.Ok).count

    def reserve(
        self,
        identity: int,
        chain: bytes,
        *,
        parent: bytes = b"",
        record: int = RECORD_BYTES,
        probe: bytes = b"",
        traceparent: str = "",
    ) -> tuple[int, wire.ReserveReply]:
        """Reserve extents; return the seq of the request and its reply."""
        seq = self.next_seq()
        request = wire.Reserve(seq, 5_000, identity, parent, chain, record, probe, traceparent=traceparent)
        return seq, self.ask(request, wire.ReserveReply)

    def commit(self, reservation: int, indices: list[int]) -> bytes:
        """Commit extents; return one `wire.CommitOutcome` per index."""
        request = wire.Commit(self.next_seq(), reservation, indices)
        return self.ask(request, wire.CommitReply).outcomes

    def abort(self, reservation: int, indices: list[int] | None = None) -> int:
        """Abort a reservation, or these extents of it; return how many extents were given back."""
        return self.ask(wire.Abort(self.next_seq(), reservation, indices), wire.Ok).count

    def status(self) -> dict[str, Any]:
        """The status document of the server, over its admin port."""
        document: dict[str, Any] = ServerProcess.of[self.socket_dir].get("/v1/status")
        return document

    def explain(self, request_id: str) -> dict[str, Any]:
        """Ask the admin port what a request hit, and why it missed."""
        document: dict[str, Any] = ServerProcess.of[self.socket_dir].get(f"/v1/explain/{quote(request_id)}")
        return document

    # --- bytes -------------------------------------------------------------------------------------------

    def write(self, extent: Extent, root: bytes, chain_key: bytes, parent: bytes, fill: bytes) -> None:
        """Write a sealed record whose payload repeats `fill` (payload first, then the header)."""
        assert self.extents is not None and self.slice is not None
        digest = self.slice.digest()
        view = self.extents.view(extent.offset_bytes, extent.length_bytes)
        header = RECORD_BYTES - PAYLOAD_BYTES
        view[header:RECORD_BYTES] = payload(fill)
        spec = RecordSpec(
            storage_keys(root, chain_key, digest),
            root,
            digest,
            storage_keys(root, parent, digest) if parent else bytes(KEY_BYTES),
            CHUNK_TOKENS,
        )
        seal_record(self.extents.address + extent.offset_bytes, extent.length_bytes, spec, SECTIONS)

    def read(self, extent: Extent) -> bytes:
        assert self.extents is not None
        view = self.extents.view(extent.offset_bytes, extent.length_bytes)
        return bytes(view[RECORD_BYTES - PAYLOAD_BYTES : RECORD_BYTES])

    def store(self, identity: wire.IdentifyReply, chain: bytes, *, parent: bytes = b"", **more: Any) -> bytes:
        """Reserve, write and commit chunks, whose payloads repeat their chain keys; return the reserve's outcomes."""
        seq, reply = self.reserve(identity.identity_id, chain, parent=parent, **more)
        written = []
        before = parent
        for index, extent in enumerate(unpack_extents(reply.extents)):
            key = chain[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            if reply.outcomes[index] == wire.ReserveOutcome.RESERVED:
                self.write(extent, identity.root, key, before, key)
                written.append(index)
            before = key
        if written:
            assert set(self.commit(seq, written)) == {wire.CommitOutcome.COMMITTED}
        return reply.outcomes


def until(client: RpcClient, happened: Callable[[dict[str, Any]], bool]) -> None:
    """Ask for the status until `happened` accepts it: work that a request began may end a little after its reply."""
    end_s = time.monotonic() + HANG_S
    while not happened(status := client.status()):
        assert time.monotonic() < end_s, status


def payload(fill: bytes) -> bytes:
    return (fill * (PAYLOAD_BYTES // len(fill) + 1))[:PAYLOAD_BYTES]


def chain_of(root: bytes, n_chunks: int, first_token: int = 0) -> bytes:
    """Return the chain keys of a prompt of consecutive token numbers."""
    tokens = list(range(first_token, first_token + n_chunks * CHUNK_TOKENS))
    return chain_keys(root, tokens, CHUNK_TOKENS)


def keys_of(chain: bytes) -> Iterator[bytes]:
    """Split a chain into its keys."""
    return (chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES))


def new_prompt(client: RpcClient, n_chunks: int = 4) -> tuple[wire.IdentifyReply, bytes]:
    """Declare a new identity; return it and the chain keys of a prompt under it."""
    identity = client.identify(salt=secrets.token_hex(8))
    return identity, chain_of(identity.root, n_chunks)


def assert_held(client: RpcClient, *, leases: int, reservations: int) -> None:
    """Assert how many leases and reservations of all clients the server holds."""
    status = client.status()
    assert (status["sessions"]["leases"], status["pool"]["leases"]) == (leases, leases)
    assert status["pool"]["reservations"] == reservations


def assert_nothing_held(socket_dir: Path) -> None:
    """Assert that the server of a socket directory holds no lease and no reservation."""
    with RpcClient(socket_dir) as observer:
        status = observer.status()
    held = {
        name: status["pool"][name] for name in ("leases", "reservations", "leased_bytes", "reserved_bytes")
    }
    assert not any(held.values()), held
    assert status["sessions"]["leases"] == status["sessions"]["extents_being_written"] == 0
