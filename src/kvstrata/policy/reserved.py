"""Bytes of open reservations by process and by token, with a bound for each.

A pool bounds each session by a share of its bytes, but a process may have many sessions, and a token many processes.

1. A process has at most as many bytes reserved as one session may have; all processes with one token at most
   1/TOKEN_SHARE of their pool.  An owner without any reservation may reserve one chunk, however long it is, as in the
   pool.
2. The bytes that a reserve asks for count from its beginning; when its outcome is known, those that it got.
3. Bytes end with their chunk: by commit, abort, undoing, or the death of the process.

Bytes are whole GRANULE_BYTES, as the pool counts them.  What an earlier epoch left behind is counted by the pool alone.
"""

from __future__ import annotations

from collections.abc import Hashable

from kvstrata.policy.processes import Owner

TOKEN_SHARE = 2
"""Processes with one token may have 1/TOKEN_SHARE of their pool reserved."""
GRANULE_BYTES = 4_096


class Share:
    """The chunks of one reserve that are counted. Begins with as many as the bounds allow."""

    __slots__ = ("_bytes_each", "_owners", "_reserved", "n_chunks")

    def __init__(
        self, reserved: dict[Hashable, int], owners: tuple[Hashable, ...], bytes_each: int, n_chunks: int
    ) -> None:
        self._reserved = reserved
        self._owners = owners
        self._bytes_each = bytes_each
        self.n_chunks = 0
        self.keep(n_chunks)

    def keep(self, n_chunks: int) -> None:
        """Count this many chunks from now on."""
        change = (n_chunks - self.n_chunks) * self._bytes_each
        self.n_chunks = n_chunks
        for owner in self._owners:
            held = self._reserved.get(owner, 0) + change
            if held:
                self._reserved[owner] = held
            else:
                self._reserved.pop(owner, None)

    def end(self, n_chunks: int) -> None:
        """Some of its chunks have ended."""
        self.keep(self.n_chunks - n_chunks)


class ReservedBytes:
    """What processes and tokens have reserved. Single-threaded."""

    def __init__(self, session_share: int) -> None:
        """`session_share`: a session may have 1/`session_share` of its pool reserved."""
        self._session_share = session_share
        self._reserved: dict[Hashable, int] = {}

    def begin(self, owner: Owner, pool_bytes: int, record_bytes: int, n_chunks: int) -> Share:
        """The share of a reserve of `n_chunks` records; fewer of them, down to none, where a bound is reached.

        `pool_bytes`: what the pool in which they are reserved may have.
        """
        bytes_each = -(-record_bytes // GRANULE_BYTES) * GRANULE_BYTES
        n_chunks = min(n_chunks, self._room(owner.process, bytes_each, pool_bytes // self._session_share))
        if owner.token is None:
            return Share(self._reserved, (owner.process,), bytes_each, n_chunks)
        n_chunks = min(n_chunks, self._room(owner.token, bytes_each, pool_bytes // TOKEN_SHARE))
        return Share(self._reserved, owner, bytes_each, n_chunks)

    def of(self, owner: Hashable) -> int:
        """Bytes that a process or a token (`Owner`) has reserved or asked for."""
        return self._reserved.get(owner, 0)

    def __len__(self) -> int:
        """Number of processes and tokens with reserved bytes."""
        return len(self._reserved)

    def _room(self, owner: Hashable, bytes_each: int, most_bytes: int) -> int:
        held = self.of(owner)
        return max(0, (most_bytes - held) // bytes_each, not held)
