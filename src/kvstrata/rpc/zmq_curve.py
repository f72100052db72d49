"""CURVE keys (RFC 26) and their files.

Each line of a key file has a word and a key; lines that begin with `#` are comments.  A file that anybody but its owner
can read is refused.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq

from kvstrata.config.private_file import read_private_file
from kvstrata.errors import ConfigError
from kvstrata.text import remember_secret

Z85_CHARS = 40
"""Characters of a key in Z85."""


class CurveKeys(NamedTuple):
    """The server's secret key and the public keys of clients that may connect, all in Z85."""

    secret: bytes
    clients: frozenset[bytes]


class ClusterKeys(NamedTuple):
    """Keys of one member of a cluster, all in Z85: its own, those of its servers, and those of its clients."""

    secret: bytes
    server: bytes
    """Public key of the processes that the member connects to."""
    clients: frozenset[bytes]
    """Public keys of the processes that may connect to the member."""

    @property
    def curve(self) -> CurveKeys:
        """The keys for the sockets on which the member listens."""
        return CurveKeys(self.secret, self.clients)


def read_curve_file(path: str) -> CurveKeys:
    """Read a server's keys: one line `secret KEY`, and a line `client KEY` for each client. Raises ConfigError."""
    field = "security.curve_secret_file"
    keys = _key_lines(path, field, ("secret", "client"))
    if not keys["client"]:
        raise ConfigError(
            f"{field}: {path}: has no line `client KEY`, so no client could connect; add clients' public keys",
            field=field,
        )
    return CurveKeys(keys["secret"][-1], frozenset(keys["client"]))


def read_cluster_keys(path: str, field: str) -> ClusterKeys:
    """Read the keys of a cluster's member: `secret KEY`, and `server KEY` and `client KEY` lines for other keys.

    With only `secret KEY` all members share the secret, and each may connect to every other.  Raises ConfigError, which
    names `field`.
    """
    keys = _key_lines(path, field, ("secret", "server", "client"))
    secret = keys["secret"][-1]
    remember_secret(secret.decode())
    try:
        own = zmq.curve_public(secret)
    except (zmq.ZMQError, ValueError):
        raise ConfigError(
            f"{field}: {path}: the secret is not a CURVE key; make one with zmq.curve_keypair()", field=field
        ) from None
    return ClusterKeys(secret, (keys["server"] or [own])[-1], frozenset(keys["client"] or [own]))


def _key_lines(path: str, field: str, words: tuple[str, ...]) -> dict[str, list[bytes]]:
    """Read the lines of a key file; returns the keys of each word, in order. Raises ConfigError without a `secret`."""
    keys: dict[str, list[bytes]] = {word: [] for word in words}
    for number, line in enumerate(read_private_file(path, field).splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):  # within a line, # is a character of Z85
            continue
        if len(parts) != 2 or parts[0] not in keys or len(parts[1]) != Z85_CHARS:
            shapes = " or ".join(f"`{word} KEY`" for word in words)
            raise ConfigError(
                f"{field}: {path}: line {number}: write {shapes} with a Z85 key of {Z85_CHARS} characters",
                field=field,
            )
        keys[parts[0]].append(parts[1].encode())
    if not keys["secret"]:
        raise ConfigError(f"{field}: {path}: has no line `secret KEY`", field=field)
    return keys
