"""Keeps a segment's memfds over the death of a server, for hosts whose /dev/shm is too small for files.

The holder is a process of its own session with no parent of ours: SIGKILL of the server, or of its whole
process group, leaves it.  It holds at most one set of descriptors and maps nothing.  On `holder.sock`
(0600, our uid only) it answers one message per connection:

    get            → "held" + descriptors, or "empty"
    put + fds      → "ok"; replaces what was held
    pid            → its process number, for `doctor` and for who waits for its end
    exit           → "ok", then the process ends

1. A peer costs only itself: sockets never block, silent ones are dropped after 2 s, at most 8 are served at
   a time.
2. The holder ends when told, when a holder is not needed any more (its socket's path is gone or is
   another's), and on SIGTERM; the memory then lives as long as attached processes map it.
3. It touches no byte of the pool and takes no lock: a descriptor it hands out is reopened by the server
   before that locks it (see `segment`).

Only the standard library and `memory.linux` are imported here, and it starts without `site`: it costs some
10 MB.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time

from kvstrata.memory import linux

HELD_COUNT = 3
"""Descriptors of one segment: index, extents, sessions.lock, in this order."""

MAX_MESSAGE_BYTES = 64
MAX_PEERS = 8
_PEER_TIMEOUT_S = 2.0
_CHECK_INTERVAL_S = 1.0


class Holder:
    """The loop of the holder process. Owns the listener, its peers and the held descriptors."""

    def __init__(self, listener: socket.socket, path: str) -> None:
        self._listener = listener
        self._path = path
        self._socket_id = self._path_id()
        self._peers: dict[int, tuple[socket.socket, float]] = {}
        self._held: list[int] = []
        self._told_to_end = False

    def run(self) -> None:
        """Serves until told to end or until nobody can reach the socket any more."""
        self._listener.setblocking(False)
        while not self._told_to_end and self._path_id() == self._socket_id:
            poller = select.poll()
            if len(self._peers) < MAX_PEERS:
                poller.register(self._listener, select.POLLIN)
            for fd in self._peers:
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll(_CHECK_INTERVAL_S * 1000):
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._serve(self._peers.pop(fd)[0])
            self._drop_silent_peers()

    def _path_id(self) -> tuple[int, int] | None:
        try:
            status = os.lstat(self._path)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if linux.peer_of(sock).uid != os.geteuid():
            sock.close()
            return
        sock.setblocking(False)
        self._peers[sock.fileno()] = (sock, time.monotonic() + _PEER_TIMEOUT_S)

    def _drop_silent_peers(self) -> None:
        now = time.monotonic()
        for fd, (sock, deadline) in list(self._peers.items()):
            if now > deadline:
                sock.close()
                del self._peers[fd]

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                received = linux.receive(sock, MAX_MESSAGE_BYTES, HELD_COUNT)
            except OSError:
                return
            answer, fds = self._answer(received)
            try:
                linux.send(sock, answer, fds)
            except OSError:
                pass  # the peer is gone; what it put stays

    def _answer(self, received: linux.Received) -> tuple[bytes, list[int]]:
        if received.data == b"put" and len(received.fds) == HELD_COUNT and not received.fds_lost:
            linux.close_all(self._held)
            self._held = received.fds
            return b"ok", []
        linux.close_all(received.fds)
        if received.data == b"get":
            return (b"held", self._held) if self._held else (b"empty", [])
        if received.data == b"pid":
            return str(os.getpid()).encode(), []
        if received.data == b"exit":
            self._told_to_end = True
            return b"ok", []
        return b"bad", []


def main() -> None:
    """Entry of the process: `argv` = import root, listening descriptor, path of its socket."""
    listener, path = socket.socket(fileno=int(sys.argv[2])), sys.argv[3]
    if os.fork():
        os._exit(0)  # the starter reaps this one; init adopts the holder
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    Holder(listener, path).run()


if __name__ == "__main__":
    main()
