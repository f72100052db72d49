"""The connection on which an owner sends records to a reader: authentication, frames and encryption.

    reader ─▶ owner   hello {magic, ticket, nonce}             the ticket came over CURVE and is used once
    owner  ─▶ reader  {nonce, proof}                           both prove that they know the ticket's secret
    reader ─▶ owner   {proof}
    reader ─▶ owner   ask {kind, count, number} keys           one at a time
    owner  ─▶ reader  table {count, number} lengths            for the next keys, in their order, until all are answered
                      GET: the bytes of these records, back to back · GRANT: the offset of each record in the region

    GET    sends records out of L1, under the owner's holds
    HAVE   tells which keys are in L1; a record's length is then PRESENT
    GRANT  keeps records in place until DONE or the end of the connection, for a reader that reads them one-sidedly
    DONE   the last byte of the granted records has arrived; the answer, an empty table, says that the grant stood

Invariants
1. Whatever the other side sends, this side reads and writes at most what it expects: counts and lengths are checked,
   and every byte of a record goes where the reader's own table says.  An invalid frame raises FrameError, and its
   receiver closes the connection.
2. Neither side waits for the other without limit: the owner's socket times out after STALL_S, the reader closes the
   connection at its deadline.
3. With `p2p.seal`, each run of parts is encrypted and authenticated by AES-256-GCM in pieces, under a key of this
   connection and direction; the nonce counts the pieces.  So a piece that was changed, repeated, left out or moved does
   not authenticate.  Without it, an attacker who can write to the link can change bytes together with their checksums.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.patience import patience
from kvstrata.tiers.base import MIN_RECORD_BYTES
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

MAGIC = b"kvpeer2\0"
TICKET_BYTES = NONCE_BYTES = 16
SECRET_BYTES = PROOF_BYTES = 32
MAX_KEYS = 1024
"""Maximum number of keys of one ask."""
MAX_TABLE = 64
"""Maximum number of keys in one table."""
GET, HAVE, GRANT, DONE = 1, 2, 3, 4
ABSENT, BUSY, PRESENT = 0, 0xFFFF_FFFF, 1
"""Values in place of a record's length, which is at least MIN_RECORD_BYTES: the record is not in L1; too many bytes are
being sent already; the record is in L1 (HAVE)."""
STALL_S = 5.0
"""A reader that reads fewer than STALL_BYTES in this time is disconnected, as is one that stops within an ask."""
STALL_BYTES = 64 << 10
PIECE_BYTES = 1 << 20
"""Bytes that are sealed at a time.  With fewer, the overhead of ciphers, tags and calls grows; more have no benefit."""
SEAL_BYTES = 16
MAX_IOV = 1024
HELLO = struct.Struct(f"<8s{TICKET_BYTES}s{NONCE_BYTES}s")
ASK = struct.Struct("<BxHI")
TABLE = struct.Struct("<HxxI")


class FrameError(Exception):
    """The other side sent an invalid frame, or stopped in the middle of one; the connection is unusable."""


class Ticket(NamedTuple):
    """The right to open one connection, issued by the owner to a reader over CURVE."""

    name: bytes
    secret: bytes
    seal: bool
    reader: str = ""
    """Public key of the reader's member; empty in an open cluster."""


def new_ticket(*, seal: bool, reader: str) -> Ticket:
    """A new ticket with a random secret."""
    return Ticket(secrets.token_bytes(TICKET_BYTES), secrets.token_bytes(SECRET_BYTES), seal, reader)


# --- bytes ------------------------------------------------------------------------------------------------------


class Stream:
    """Parts of known length on a connected stream socket, which belongs to the stream's user. For one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def send(self, *runs: bytes | Sequence[bytes | memoryview]) -> None:
        """Send runs, each of one part or several. Raises OSError, and FrameError if the other side does not read them.

        One call of the other side receives one run.
        """
        _send(self.socket, [part for run in runs for part in _views(run)])

    def receive(self, length: int) -> bytes:
        """The next part, which has this length. Raises OSError and FrameError."""
        part = bytearray(length)
        self.receive_into([memoryview(part)])
        return bytes(part)

    def receive_into(self, rooms: list[memoryview]) -> None:
        """Fill these buffers with the next parts, one each. Raises as `receive`; some bytes may be written then."""
        _receive(self.socket, rooms)


class SealedStream(Stream):
    """A stream with encrypted and authenticated parts: a run is sealed in pieces of PIECE_BYTES."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.algorithms import AES

        super().__init__(sock)
        self._keys = AES(send_key), AES(receive_key)
        self._sent = self._received = 0
        self._staged = memoryview(bytearray(PIECE_BYTES + SEAL_BYTES))

    def send(self, *runs: bytes | Sequence[bytes | memoryview]) -> None:
        """See Stream."""
        for piece in itertools.chain.from_iterable(_pieces(_views(run)) for run in runs):
            seal, size = _cipher(self._keys[0], self._sent).encryptor(), 0
            self._sent += 1
            for part in piece:
                seal.update_into(part, self._staged[size : size + len(part)])
                size += len(part)
            seal.finalize()
            self._staged[size : size + SEAL_BYTES] = seal.tag
            _send(self.socket, [self._staged[: size + SEAL_BYTES]])

    def receive_into(self, rooms: list[memoryview]) -> None:
        """See Stream. The buffers may hold wrong bytes when FrameError is raised."""
        from cryptography.exceptions import InvalidTag

        for piece in _pieces(rooms):
            size, at = sum(map(len, piece)), 0
            _receive(self.socket, [self._staged[: size + SEAL_BYTES]])
            seal = _cipher(self._keys[1], self._received).decryptor()
            self._received += 1
            for room in piece:
                seal.update_into(self._staged[at : at + len(room)], room)
                at += len(room)
            try:
                seal.finalize_with_tag(bytes(self._staged[size : size + SEAL_BYTES]))
            except InvalidTag:
                raise FrameError("a sealed frame was changed, repeated or left out") from None


def _views(run: bytes | Sequence[bytes | memoryview]) -> list[memoryview]:
    return [memoryview(run)] if isinstance(run, bytes) else [memoryview(part) for part in run]


def _pieces(run: list[memoryview]) -> Iterator[list[memoryview]]:
    """Cut the bytes of a run's parts into pieces of PIECE_BYTES; the last one may have fewer."""
    piece: list[memoryview] = []
    left = PIECE_BYTES
    for part in run:
        at = 0
        while at < len(part):
            piece.append(part[at : at + left])
            at += len(piece[-1])
            left -= len(piece[-1])
            if not left:
                yield piece
                piece, left = [], PIECE_BYTES
    if piece:
        yield piece


def _cipher(key: AES, number: int) -> Cipher[GCM]:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    return Cipher(key, GCM(number.to_bytes(12, "little")))


def _send(sock: socket.socket, parts: list[memoryview]) -> None:
    first = 0
    while first < len(parts):
        batch = parts[first : first + MAX_IOV]
        try:
            sent = sock.sendmsg(batch)
        except BlockingIOError:
            raise FrameError("the other side does not read") from None
        if sent < STALL_BYTES and sent < sum(map(len, batch)):
            # The call returns before it has sent everything only when its time is over.
            raise FrameError("the other side reads too slowly")
        while first < len(parts) and sent >= len(parts[first]):
            sent -= len(parts[first])
            first += 1
        if sent:
            parts[first] = parts[first][sent:]


def _receive(sock: socket.socket, rooms: list[memoryview]) -> None:
    rooms = [room for room in rooms if len(room)]
    first = 0
    while first < len(rooms):
        try:
            received = sock.recvmsg_into(rooms[first : first + MAX_IOV], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise FrameError("the other side stopped in the middle of a frame") from None
        if not received:
            raise FrameError("the other side has closed the connection")
        while first < len(rooms) and received >= len(rooms[first]):
            received -= len(rooms[first])
            first += 1
        if received:
            rooms[first] = rooms[first][received:]


def set_stall(sock: socket.socket) -> None:
    """Limit each wait for the other side to STALL_S."""
    time_limit = struct.pack("@ll", *divmod(round(patience(STALL_S) * 1_000_000), 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, time_limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time_limit)


def set_tcp(sock: socket.socket) -> None:
    """Send small frames at once, and detect a host that is gone."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


# --- the proof --------------------------------------------------------------------------------------------------


def prove_as_reader(sock: socket.socket, ticket: Ticket) -> Stream:
    """Prove the right to read, and verify the owner's proof. Raises OSError, FrameError."""
    plain, nonce = Stream(sock), secrets.token_bytes(NONCE_BYTES)
    plain.send(HELLO.pack(MAGIC, ticket.name, nonce))
    answer = plain.receive(NONCE_BYTES + PROOF_BYTES)
    said = ticket.name + nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _digest(ticket, b"owner proof", said)):
        raise FrameError("another process than the owner answers at its address")
    plain.send(_digest(ticket, b"reader proof", said))
    return _stream(sock, ticket, said, b"reader", b"owner")


def admit_reader(sock: socket.socket, take: Callable[[bytes], Ticket | None]) -> tuple[Stream, Ticket]:
    """Verify a reader's proof. `take(name)`: the ticket of this name, once. Raises OSError, FrameError."""
    plain = Stream(sock)
    magic, name, nonce = HELLO.unpack(plain.receive(HELLO.size))
    ticket = take(name) if magic == MAGIC else None
    if ticket is None:
        raise FrameError("no ticket of this instance")
    own = secrets.token_bytes(NONCE_BYTES)
    said = name + nonce + own
    plain.send(own + _digest(ticket, b"owner proof", said))
    if not hmac.compare_digest(plain.receive(PROOF_BYTES), _digest(ticket, b"reader proof", said)):
        raise FrameError("a wrong proof")
    return _stream(sock, ticket, said, b"owner", b"reader"), ticket


def _digest(ticket: Ticket, what: bytes, said: bytes) -> bytes:
    return hmac.digest(ticket.secret, what + b"\0" + said, "sha256")


def _stream(sock: socket.socket, ticket: Ticket, said: bytes, ours: bytes, theirs: bytes) -> Stream:
    if not ticket.seal:
        return Stream(sock)
    send_key, receive_key = (_digest(ticket, side + b" seal", said) for side in (ours, theirs))
    return SealedStream(sock, send_key, receive_key)


# --- the owner's side of one ask --------------------------------------------------------------------------------


class Asked(NamedTuple):
    """One ask of a reader."""

    kind: int
    number: int
    keys: list[bytes]


def receive_ask(stream: Stream) -> Asked:
    """The next ask. Raises OSError, FrameError."""
    kind, count, number = ASK.unpack(stream.receive(ASK.size))
    if not GET <= kind <= DONE or count > MAX_KEYS or (count == 0) != (kind == DONE):
        raise FrameError(f"an ask of kind {kind} for {count} keys")
    keys = stream.receive(count * KEY_BYTES)
    return Asked(kind, number, [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)])


def send_table(stream: Stream, number: int, lengths: Sequence[int], *more: bytes | memoryview) -> None:
    """Answer the next keys: their lengths, then `more` (records or offsets). Raises OSError, FrameError."""
    stream.send(TABLE.pack(len(lengths), number), struct.pack(f"<{len(lengths)}I", *lengths), more)


# --- the reader's side of one ask -------------------------------------------------------------------------------


def get(stream: Stream, number: int, keys: Sequence[bytes], rooms: Sequence[memoryview]) -> list[int]:
    """Fill these buffers with records; returns each record's length, or ABSENT or BUSY. Raises OSError, FrameError.

    The record of key i is written to `rooms[i]`; nothing else is written.
    """

    def take(first: int, table: Sequence[int]) -> None:
        stream.receive_into(
            [rooms[at][:length] for at, length in enumerate(table, first) if length not in (ABSENT, BUSY)]
        )

    return _answers(stream, GET, number, keys, [len(room) for room in rooms], take)


def have(stream: Stream, number: int, keys: Sequence[bytes]) -> bytes:
    """For each key 1 if the owner has it, else 0. Raises OSError, FrameError."""
    return bytes(_answers(stream, HAVE, number, keys, [], lambda first, table: None))


def grant(stream: Stream, number: int, keys: Sequence[bytes], rooms: Sequence[int]) -> list[tuple[int, int]]:
    """(offset, length) of each record, which the owner now keeps in place; the length may be ABSENT or BUSY.

    `rooms`: the greatest length that each may have.  Raises OSError, FrameError.
    """
    offsets: list[int] = []

    def take(first: int, table: Sequence[int]) -> None:
        offsets.extend(struct.unpack(f"<{len(table)}Q", stream.receive(8 * len(table))))

    return list(zip(offsets, _answers(stream, GRANT, number, keys, rooms, take), strict=True))


def done(stream: Stream, number: int) -> None:
    """Return if the grant with this number was valid until now. Raises OSError, FrameError otherwise."""
    stream.send(ASK.pack(DONE, 0, number))
    if TABLE.unpack(stream.receive(TABLE.size)) != (0, number):
        raise FrameError("an answer to another question")


def _answers(
    stream: Stream,
    kind: int,
    number: int,
    keys: Sequence[bytes],
    rooms: Sequence[int],
    take: Callable[[int, Sequence[int]], None],
) -> list[int]:
    stream.send(ASK.pack(kind, len(keys), number), b"".join(keys))
    lengths: list[int] = []
    while len(lengths) < len(keys):
        count, of = TABLE.unpack(stream.receive(TABLE.size))
        if of != number or not 0 < count <= min(MAX_TABLE, len(keys) - len(lengths)):
            raise FrameError(f"a table of {count} keys, when {len(keys) - len(lengths)} are not answered")
        table = struct.unpack(f"<{count}I", stream.receive(4 * count))
        for at, length in enumerate(table, len(lengths)):
            most = PRESENT if kind == HAVE else rooms[at]
            least = PRESENT if kind == HAVE else MIN_RECORD_BYTES
            if not (least <= length <= most or length == ABSENT or (length == BUSY and kind != HAVE)):
                raise FrameError(f"a record of {length} bytes, with room for {most}")
        take(len(lengths), table)
        lengths.extend(table)
    return lengths
