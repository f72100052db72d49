"""A process of a tenant that looks for bytes of others in all that it maps and has open, and overwrites what it can."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from tests.harness.child import serve
from tests.harness.rpc_client import RpcClient, chain_of

BLOCK_BYTES = 1 << 20
INVERSE = bytes(255 - value for value in range(256))
"""Patterns come and are sought inverted, so that this process has none of them in its memory by itself."""

_clients: list[RpcClient] = []


def store(socket_dir: str, token: str, tenant: str) -> str:
    """Attach and store chunks; returns their chain keys."""
    client = RpcClient(Path(socket_dir), token=token)
    _clients.append(client)
    client.attach()
    identity = client.identify(tenant=tenant)
    chain = chain_of(identity.root, 4)
    client.store(identity, chain)
    return chain.hex()


def hold(socket_dir: str, token: str, tenant: str) -> None:
    """As `store`; then hold a lease of these chunks, and a reservation of others."""
    chain = bytes.fromhex(store(socket_dir, token, tenant))
    client = _clients[-1]
    identity = client.identify(tenant=tenant)
    client.lookup(identity.identity_id, chain)
    client.reserve(identity.identity_id, chain_of(identity.root, 2, first_token=1_000))


def readable() -> Iterator[tuple[str, int, int, int]]:
    """(what, descriptor, offset, bytes) of each mapping that can be read, and of each regular file that is open."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        first, end = (int(text, 16) for text in fields[0].split("-"))
        name = fields[5] if len(fields) > 5 else "anonymous"
        if fields[1][0] == "r" and name not in ("[vvar]", "[vvar_vclock]", "[vsyscall]"):
            yield f"mapping of {name}", memory, first, end - first
    os.close(memory)
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            status = os.fstat(fd)
        except OSError:
            continue  # the descriptor of the listing
        if stat.S_ISREG(status.st_mode) and status.st_size:
            yield f"descriptor of {os.readlink(f'/proc/self/fd/{fd}')}", fd, 0, status.st_size


def scan(inverted: list[str]) -> list[list[str]]:
    """For each pattern (hex, inverted) where it was found."""
    patterns = [bytes.fromhex(text) for text in inverted]
    found: list[list[str]] = [[] for _ in patterns]
    overlap = max(map(len, patterns))
    for what, fd, offset, size in readable():
        for at in range(0, size, BLOCK_BYTES):
            try:
                block = os.pread(fd, min(BLOCK_BYTES + overlap, size - at), offset + at).translate(INVERSE)
            except OSError:
                continue
            for number, pattern in enumerate(patterns):
                if pattern in block and what not in found[number]:
                    found[number].append(what)
    return found


def scribble() -> int:
    """Overwrite all shared memory that this process can write, by its mappings and descriptors; returns the bytes."""
    done = 0
    memory = os.open("/proc/self/mem", os.O_RDWR)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if re.search(r"^\S+ rw.s ", line):
            first, end = (int(text, 16) for text in line.split()[0].split("-"))
            done += os.pwrite(memory, b"\xa5" * (end - first), first)
    os.close(memory)
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            path, flags = os.readlink(f"/proc/self/fd/{fd}"), fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:
            continue  # the descriptor of the listing
        if flags & os.O_ACCMODE != os.O_RDONLY and path.startswith(("/dev/shm/", "/memfd:kvstrata")):
            done += os.pwrite(fd, b"\xa5" * os.fstat(fd).st_size, 0)
    return done


if __name__ == "__main__":
    serve({"store": store, "hold": hold, "scan": scan, "scribble": scribble})
