"""A key file that is read again once it has changed, so that members come and go without a restart."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvstrata.errors import ConfigError
from kvstrata.observability.logging import EventLog
from kvstrata.rpc.zmq_curve import CurveKeys


class _Keys(Protocol):
    @property
    def curve(self) -> CurveKeys:
        """The keys for listening sockets."""


K = TypeVar("K", bound=_Keys)


class KeyFile(Generic[K]):
    """The keys of one file. Belongs to the event loop, on which a changed file is read, of a line for each member."""

    def __init__(self, path: str, read: Callable[[str], K]) -> None:
        """`read` raises ConfigError for a wrong file; so does this."""
        self._path = path
        self._read = read
        self._stamp = _stamp(path)
        self._keys = read(path)
        self._log = EventLog("zmq")

    def now(self) -> K:
        """The keys as the file has them now.

        A file that is missing or wrong, or has another secret, changes nothing, and that is logged: sockets keep the
        secret with which they were bound.
        """
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return self._keys
        self._stamp = stamp
        try:
            keys = self._read(self._path)
            if keys.curve.secret != self._keys.curve.secret:
                raise ConfigError("its secret is another one, which takes a restart")
        except ConfigError as error:
            self._log.repeated(
                logging.WARNING, self._path, "key_file_ignored", path=self._path, why=error.message
            )
        else:
            self._keys = keys
            self._log.info("key_file_read", path=self._path, clients=len(keys.curve.clients or ()))
        return self._keys

    def clients(self) -> frozenset[bytes] | None:
        """The public keys of clients that may connect, as the file has them now."""
        return self.now().curve.clients


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
