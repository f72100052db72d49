"""CURVE keys (RFC 26) and their files.

Each line of a key file has a word and a key; lines that begin with `#` are comments.  A file that anybody but its owner
can read is refused.

Controllers and instances always speak CURVE, also without key files, because it proves which key a message comes from:
a controller binds each instance id to the key of its instance (controller/instance_keys.py).  Without key files, the
processes of one user share a key (shared_key.py).  With --insecure a controller takes OPEN_SECRET, which everybody
knows.  Its clients cannot tell it from another such server, but it can tell its clients apart: a client's proof holds
for one connection only, so a server that receives it cannot use it elsewhere (docs/decisions/0017-instance-keys.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import zmq

from kvstrata.config.private_file import read_private_file
from kvstrata.errors import ConfigError
from kvstrata.text import remember_secret

Z85_CHARS = 40
"""Characters of a key in Z85."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}|[A-Za-z0-9._-]{1,62}-\*")
OPEN_PUBLIC = b"rsKOdP%u^YwbX]0@D&+Y)YbRB@QMS{q]s4%c$uOk"
OPEN_SECRET = b"x%H0c8CtzM(A=W0+1k(pWNv{5uM6dY>).VcG.{6<"
"""The key pair of controllers with --insecure; it is no secret."""


class CurveKeys(NamedTuple):
    """The server's secret key and the public keys of clients that may connect, all in Z85."""

    secret: bytes
    clients: frozenset[bytes] | None
    """None: any client may connect, and is known by its key."""


OPEN = CurveKeys(OPEN_SECRET, None)
"""For a controller with --insecure."""


class ClusterKeys(NamedTuple):
    """Keys of one member of a cluster, all in Z85: its own, those of its servers, and those of its clients."""

    secret: bytes
    server: bytes
    """Public key of the processes that the member connects to."""
    clients: frozenset[bytes] | None
    """Public keys of the processes that may connect to the member; None: any may."""

    @property
    def curve(self) -> CurveKeys:
        """The keys for the sockets on which the member listens."""
        return CurveKeys(self.secret, self.clients)

    def to(self, server: str) -> ClusterKeys:
        """The same keys for connections to the process with this public key (Z85)."""
        return self._replace(server=server.encode())


def new_secret() -> bytes:
    """A new secret key."""
    return zmq.curve_keypair()[1]


def public_of(secret: bytes) -> bytes:
    """The public key that belongs to a secret key. Raises ValueError for anything else."""
    try:
        return zmq.curve_public(secret)
    except zmq.ZMQError as error:
        raise ValueError(str(error)) from None


def open_keys(secret: bytes = b"") -> ClusterKeys:
    """Keys for a cluster with --insecure, with this secret key or a new one."""
    return ClusterKeys(secret or new_secret(), OPEN_PUBLIC, None)


class ControllerKeys(NamedTuple):
    """Keys of a controller."""

    curve: CurveKeys
    listed: Mapping[str, tuple[str, ...]]
    """Its clients' public keys, each with the instance ids that it may use (`NAME`, or `NAME-*`; empty: any)."""


def read_controller_keys(path: str, field: str = "security.curve_secret_file") -> ControllerKeys:
    """Read a controller's keys: one line `secret KEY`, and a line `client KEY [ID …]` for each client.

    Raises ConfigError, which names `field`.
    """
    ids: dict[bytes, tuple[str, ...]] = {}
    keys = _key_lines(path, field, ("secret", "client"), ids)
    _check_clients(keys["client"], path, field)
    curve = CurveKeys(keys["secret"][-1], frozenset(keys["client"]))
    return ControllerKeys(curve, {key.decode(): ids[key] for key in curve.clients or ()})


def _check_clients(clients: list[bytes], path: str, field: str) -> None:
    if not clients:
        raise ConfigError(
            f"{field}: {path}: has no line `client KEY`, so no client could connect; add clients' public keys",
            field=field,
        )


def read_cluster_keys(path: str, field: str) -> ClusterKeys:
    """Read the keys of a cluster's member: `secret KEY`, and `server KEY` and `client KEY` lines for other keys.

    With only `secret KEY` all members share the secret, and each may connect to every other.  Raises ConfigError, which
    names `field`.
    """
    keys = _key_lines(path, field, ("secret", "server", "client"))
    secret = keys["secret"][-1]
    remember_secret(secret.decode())
    try:
        own = public_of(secret)
    except ValueError:
        raise ConfigError(
            f"{field}: {path}: the secret is not a CURVE key; make one with zmq.curve_keypair()", field=field
        ) from None
    return ClusterKeys(secret, (keys["server"] or [own])[-1], frozenset(keys["client"] or [own]))


def _key_lines(
    path: str, field: str, words: tuple[str, ...], ids: dict[bytes, tuple[str, ...]] | None = None
) -> dict[str, list[bytes]]:
    """Read the lines of a key file; returns the keys of each word, in order. Raises ConfigError without a `secret`.

    With `ids`, instance ids may follow the keys of clients, and are put there by key.
    """
    keys: dict[str, list[bytes]] = {word: [] for word in words}
    for number, line in enumerate(read_private_file(path, field, mounted=True).splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):  # within a line, # is a character of Z85
            continue
        named = parts[2:] if ids is not None and parts[0] == "client" else []
        wrong = len(parts) != 2 + len(named) or parts[0] not in keys or len(parts[1]) != Z85_CHARS
        if wrong or not all(_ID.fullmatch(one) for one in named):
            shapes = " or ".join(f"`{word} KEY`" for word in words)
            shapes += " (or `client KEY ID …`, with ids as `NAME` or `NAME-*`)" if ids is not None else ""
            raise ConfigError(
                f"{field}: {path}: line {number}: write {shapes} with a Z85 key of {Z85_CHARS} characters",
                field=field,
            )
        keys[parts[0]].append(parts[1].encode())
        if ids is not None and parts[0] == "client":
            ids[parts[1].encode()] = (*ids.get(parts[1].encode(), ()), *named)
    if not keys["secret"]:
        raise ConfigError(f"{field}: {path}: has no line `secret KEY`", field=field)
    return keys
