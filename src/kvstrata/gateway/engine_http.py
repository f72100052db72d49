"""The gateway's own requests to engines, Envoy and Kubernetes: each is small and has a connection of its own.

Envoy (envoy/) carries the requests of clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Mapping
from typing import NamedTuple

from kvstrata.patience import patience

CONNECT_S = 2.0
MAX_HEAD_BYTES = 64 << 10


class Unreachable(Exception):
    """The connection failed, so the server has not seen the request."""


class LinkBroken(Exception):
    """The connection ended before the response did, or the response is not HTTP."""


class Address(NamedTuple):
    """Address of a server."""

    host: str
    """Host or IP address, or the path of a unix socket."""
    port: int
    tls: bool
    name: str = ""
    """The name from which `host` was resolved, for the TLS certificate and the header Host; empty: `host` itself."""


class HttpClient:
    """An HTTP/1.1 client. Belongs to the event loop."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: verifies servers' certificates; None: by the CA certificates that this host trusts."""
        self._tls = tls

    async def ask(
        self,
        address: Address,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        most_bytes: int,
    ) -> tuple[int, bytes]:
        """Status and up to `most_bytes` of its body; no time limit. Raises Unreachable and LinkBroken."""
        reader, writer = await self._connect(address)
        name = address.name or address.host
        lines = [
            f"{method} {target} HTTP/1.1",
            f"host: {f'[{name}]' if ':' in name else name}:{address.port}",
        ]
        lines += [f"{key}: {value}" for key, value in headers.items()]
        lines += [f"content-length: {len(body)}", "connection: close", "", ""]
        try:
            writer.write("\r\n".join(lines).encode("latin-1") + body)
            return await _answer(reader, most_bytes)
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            raise LinkBroken(str(error) or "the connection was closed") from None
        finally:
            writer.transport.abort()

    async def _connect(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if address.tls and self._tls is None:
            self._tls = await asyncio.get_running_loop().run_in_executor(None, ssl.create_default_context)
        try:
            async with asyncio.timeout(patience(CONNECT_S)):
                if address.host.startswith("/"):
                    return await asyncio.open_unix_connection(address.host, limit=MAX_HEAD_BYTES)
                return await asyncio.open_connection(
                    address.host,
                    address.port,
                    limit=MAX_HEAD_BYTES,
                    ssl=self._tls if address.tls else None,
                    server_hostname=(address.name or address.host) if address.tls else None,
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {patience(CONNECT_S):g} s") from None
        except OSError as error:  # TLS errors too
            raise Unreachable(str(error.strerror or error)) from None
        except UnicodeError as error:
            raise Unreachable(f"invalid host name: {error}") from None


async def addresses_of(host: str, port: int) -> list[str]:
    """All IP addresses of a host name, sorted. Raises OSError, and UnicodeError if the name is invalid."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


async def _answer(reader: asyncio.StreamReader, most_bytes: int) -> tuple[int, bytes]:
    """Read the status and up to `most_bytes` of its body. Raises LinkBroken, EOFError and LimitOverrunError."""
    status = 100
    while 100 <= status < 200:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise LinkBroken(f"not HTTP: {first!a:.80}")
        status = int(rest[:3])
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (one.partition(b":") for one in lines)
    }
    length = headers.get(b"content-length")
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        return status, await _chunked(reader, most_bytes)
    if length is not None:
        if not length.isdigit() or len(length) > 15:
            raise LinkBroken(f"not HTTP: content-length {length!a:.80}")
        return status, await reader.readexactly(min(int(length), most_bytes))
    parts = bytearray()
    while len(parts) < most_bytes and (part := await reader.read(64 << 10)):
        parts += part
    return status, bytes(parts[:most_bytes])


async def _chunked(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    body = bytearray()
    while len(body) < most_bytes:
        line = await reader.readuntil(b"\n")
        with contextlib.suppress(ValueError):
            size = int(line.partition(b";")[0], 16)
            if size == 0:
                break
            if size > 0:
                body += await reader.readexactly(min(size, most_bytes - len(body)))
                if len(body) < most_bytes:
                    await reader.readuntil(b"\n")
                continue
        raise LinkBroken(f"not HTTP: the chunk {line!a:.40}")
    return bytes(body)
