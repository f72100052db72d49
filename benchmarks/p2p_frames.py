"""One end of `p2p_frames`: an owner that sends the records of a pool, or a reader of it, as a child process.

Each path is measured by frames of ours (kvstrata/p2p/frames.py), asked for as many records at a time as a load names,
and by a bare loop over the same records with the same vectors: `sendmsg` from the extents, `recvmsg_into` into the
reader's.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import threading
import time
from pathlib import Path
from typing import Any

from kvstrata.p2p import frames
from kvstrata.p2p.frames import MAX_TABLE, Stream, Ticket
from kvstrata.p2p.serving import RecordServer
from kvstrata.p2p.tier import MAX_BATCH
from tests.harness import child
from tests.harness.l1 import L1, chain

GO = b"!"


class Owner:
    """Sends `count` records of about `size` bytes."""

    def open(self, folder: str, host: str, count: int, size: int) -> dict[str, Any]:
        """Store the records and listen; return where, the keys, and the length of a record."""
        self.l1 = L1(4 * count * (size + (64 << 10)))
        self.keys = self.l1.store(chain("bench", count), size=size)
        assert len(self.keys) == count
        self.server = RecordServer(self.l1.pool, socket_path=Path(folder) / "peers.sock", host=host, port=0)
        self.server.start()
        self.holds = [self.l1.pool.hold(key) for key in self.keys]
        paths = [socket.socket(socket.AF_UNIX), socket.create_server((host, 0))]
        paths[0].bind(f"{folder}/bare.sock")
        for listener in paths:
            listener.listen()
            threading.Thread(target=self._bare, args=(listener,), daemon=True).start()
        return {
            "frames": {"unix": self.server.path, "tcp": [host, self.server.port]},
            "bare": {"unix": f"{folder}/bare.sock", "tcp": [host, paths[1].getsockname()[1]]},
            "keys": [key.hex() for key in self.keys],
            "length": self.holds[0].length,
        }

    def ticket(self, seal: bool) -> list[str]:
        """Return a ticket's name and secret."""
        ticket = self.server.ticket(seal=seal, reader="")
        return [ticket.name.hex(), ticket.secret.hex()]

    def _bare(self, listener: socket.socket) -> None:
        views = [hold.view() for hold in self.holds]
        while True:
            sock, _ = listener.accept()
            frames.set_tcp(sock)
            stream = Stream(sock)
            while sock.recv(1) == GO:
                for at in range(0, len(views), MAX_TABLE):
                    stream.send(views[at : at + MAX_TABLE])


class Reader:
    """Reads into shared memory of its own, at scattered places."""

    def open(self, keys: list[str], length: int) -> None:
        """Map room for the records."""
        self.keys = [bytes.fromhex(key) for key in keys]
        stride = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = mmap.mmap(-1, 2 * stride * len(keys))
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(whole)), 1, len(whole))
        self.rooms = [memoryview(whole)[2 * at * stride :][:length] for at in range(len(keys))]

    def read(self, where: Any, ticket: list[str], seal: bool, times: int) -> tuple[list[float], float]:
        """Return the seconds of each read of all records, and the CPU time; without a ticket by the bare loop."""
        with socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET) as sock:
            sock.connect(where if isinstance(where, str) else tuple(where))
            frames.set_tcp(sock)
            stream = Stream(sock)
            if ticket:
                name, secret = map(bytes.fromhex, ticket)
                stream = frames.prove_as_reader(sock, Ticket(name, secret, seal))
            took, cpu_s = [], time.process_time()
            for _ in range(times):
                begun_s = time.perf_counter()
                if not ticket:
                    sock.send(GO)
                step = MAX_BATCH if ticket else MAX_TABLE
                for at in range(0, len(self.keys), step):
                    keys, rooms = self.keys[at : at + step], self.rooms[at : at + step]
                    if ticket:
                        assert frames.get(stream, 1, keys, rooms) == [len(rooms[0])] * len(keys)
                    else:
                        stream.receive_into(list(rooms))
                took.append(time.perf_counter() - begun_s)
            return took, time.process_time() - cpu_s

    def cpu(self) -> float:
        """Return the CPU time of this process."""
        return time.process_time()


def main() -> None:
    """Serve until stdin ends."""
    owner, reader = Owner(), Reader()
    child.serve({
        "own": owner.open, "ticket": owner.ticket, "map": reader.open, "read": reader.read, "cpu": reader.cpu,
    })  # fmt: skip


if __name__ == "__main__":
    main()
