"""A ZMTP 3 peer without libzmq: it sends any bytes, and ends its connection as abruptly as a test wants."""

from __future__ import annotations

import socket
import struct

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
COMMAND, MORE = 4, 1


def greeting(mechanism: bytes) -> bytes:
    """The greeting of a peer with this security mechanism."""
    return SIGNATURE + bytes((3, 1)) + mechanism.ljust(20, b"\0") + bytes(32)


GREETING = greeting(b"NULL")


def frame(body: bytes, flags: int = 0) -> bytes:
    """Make a frame, short or long according to the length of its body."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def command(name: bytes, body: bytes = b"") -> bytes:
    return frame(bytes([len(name)]) + name + body, COMMAND)


def ready(kind: bytes, identity: bytes = b"") -> bytes:
    """Make the READY command of a socket of this kind."""
    properties = ((b"Socket-Type", kind), (b"Identity", identity))
    return command(
        b"READY",
        b"".join(
            bytes([len(name)]) + name + struct.pack(">I", len(text)) + text for name, text in properties
        ),
    )


PING = command(b"PING", bytes(2))


class ZmtpPeer:
    """One connection to a tcp port or a unix socket's path, past the handshake."""

    def __init__(self, where: int | str, kind: bytes = b"DEALER", identity: bytes = b"") -> None:
        """Connect and shake hands. Raises ConnectionError when the other side refuses."""
        self.socket = socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET)
        self.socket.settimeout(30)
        self.socket.connect(where if isinstance(where, str) else ("127.0.0.1", where))
        self.socket.sendall(GREETING)
        self._receive(64)
        self.socket.sendall(ready(kind, identity))
        _, length = self._receive(2)
        self._receive(length)

    def send(self, data: bytes) -> None:
        """Send bytes. Raises OSError when the other side has hung up."""
        self.socket.sendall(data)

    def reset(self) -> None:
        """End the connection with RST where possible, even if data is under way."""
        if self.socket.family == socket.AF_INET:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise ConnectionError("the other side hung up during the handshake")
            data += part
        return data


class CurvePeer(ZmtpPeer):
    """One connection that has greeted as a client with CURVE keys, and has not sent its HELLO yet."""

    def __init__(self, port: int | str) -> None:
        """Connect and greet. Raises ConnectionError when the other side refuses."""
        self.socket = socket.create_connection(("127.0.0.1", int(port)), timeout=30)
        self.socket.sendall(greeting(b"CURVE"))
        self._receive(64)
