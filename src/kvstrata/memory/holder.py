"""Keeps a segment's memfds alive when a server dies, for hosts whose /dev/shm is too small for files.

The holder is a process in a session of its own, adopted by init, so it survives SIGKILL of the server and of the
server's process group.  It holds the descriptors of an instance's segment, and maps nothing.
On `holder.sock` (0600, our uid only) it answers one message per connection:

    get            → "held" + descriptors, or "empty"
    put + fds      → "ok"; replaces the descriptors held before
    exit           → "ok", and the process ends

1. A bad process harms only itself: sockets never block, silent connections are dropped after 2 s, at most 8 are
   served at a time.
2. The holder ends on `exit`, when it is not needed any more (its socket's path is gone or
   belongs to another holder), and on SIGTERM.  The memory then lives as long as attached processes map it.
3. It touches no byte of the pool and takes no lock: the server reopens a descriptor that it gets from here before it
   locks the file (see `segment`).

It imports only the standard library, `memory.linux` and `naming`, and starts without `site`, so it takes only some
10 MB.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time

from kvstrata.config.private_dir import path_id
from kvstrata.memory import linux
from kvstrata.naming import name_process
from kvstrata.patience import patience

HELD_COUNT = 3
"""Descriptors of one segment: index, extents, sessions.lock, in this order."""

MAX_MESSAGE_BYTES = 64
MAX_CONNECTIONS = 8
_SILENCE_S = 2.0
_CHECK_INTERVAL_S = 1.0


class Holder:
    """The loop of the holder process. Owns the listener, its connections and the held descriptors."""

    def __init__(self, listener: socket.socket, path: str) -> None:
        self._listener = listener
        self._path = path
        self._socket_id = path_id(self._path)
        self._connections: dict[int, tuple[socket.socket, float]] = {}
        self._held: list[int] = []
        self._told_to_end = False

    def run(self) -> None:
        """Serve until told to end, or until no process can reach the socket any more."""
        self._listener.setblocking(False)
        while not self._told_to_end and path_id(self._path) == self._socket_id:
            poller = select.poll()
            if len(self._connections) < MAX_CONNECTIONS:
                poller.register(self._listener, select.POLLIN)
            for fd in self._connections:
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll(_CHECK_INTERVAL_S * 1000):
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._serve(self._connections.pop(fd)[0])
            self._drop_silent()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if linux.credentials_of(sock).uid != os.geteuid():
            sock.close()
            return
        sock.setblocking(False)
        self._connections[sock.fileno()] = (sock, time.monotonic() + patience(_SILENCE_S))

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for fd, (sock, deadline) in list(self._connections.items()):
            if now > deadline:
                sock.close()
                del self._connections[fd]

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
                pass  # the process has disconnected; the descriptors that it put stay

    def _answer(self, received: linux.Received) -> tuple[bytes, list[int]]:
        if received.data == b"put" and len(received.fds) == HELD_COUNT and not received.fds_lost:
            linux.close_all(self._held)
            self._held = received.fds
            return b"ok", []
        linux.close_all(received.fds)
        if received.data == b"get":
            return (b"held", self._held) if self._held else (b"empty", [])
        if received.data == b"exit":
            self._told_to_end = True
            return b"ok", []
        return b"bad", []


def main() -> None:
    """Entry of the process: `argv` = import root, listening descriptor, path of its socket."""
    # Made before the starter goes on: a process that takes the path afterwards is recognized as another holder.
    holder = Holder(socket.socket(fileno=int(sys.argv[2])), sys.argv[3])
    if os.fork():
        os._exit(0)  # the starter reaps this process; init adopts its child, the holder
    name_process("kv-holder")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    holder.run()


if __name__ == "__main__":
    main()
