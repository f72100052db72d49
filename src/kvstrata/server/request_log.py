"""The log of requests, for `kvstrata replay`: a ring of files in a folder.

A file holds HEADER and then requests as `Pool.take_requests` returns them (docs/internals/formats.md): the arrival time
of each, and for each chunk of its prompt eight bytes that are equal for equal chunks.  They are keys mixed with a
random number that is chosen at every start and kept nowhere, so a log reveals neither prompts nor keys, and the logs of
two starts cannot be matched.

Only the lane of housekeeping uses it.
"""

from __future__ import annotations

import logging
import secrets
import struct
import time
from pathlib import Path

from kvstrata.config.private_dir import make_private_dir
from kvstrata.native.core import Pool
from kvstrata.observability.logging import EventLog

MAGIC = b"KVREQS01"
HEADER = struct.Struct("<8sIIQ")
"""MAGIC, tokens of a chunk, 0, unix time in ms at which the file begins."""
FILE_BYTES = 64 << 20
FILES = 16


class RequestLog:
    """Writes the log of requests, as the module describes."""

    def __init__(self, pool: Pool, folder: Path, chunk_tokens: int) -> None:
        """Begin to log. Raises ConfigError if the folder cannot be made, or others may write to it."""
        make_private_dir(folder, "observability.record")
        self._pool, self._folder = pool, folder
        self._chunk_tokens = chunk_tokens
        self._path: Path | None = None
        self._log = EventLog("server")
        pool.log_requests(secrets.randbits(64))

    def write(self) -> None:
        """Write the requests since the last call. Blocks; errors of the folder are logged, and requests are lost."""
        requests = self._pool.take_requests()
        if not requests:
            return
        try:
            if self._path is None or self._path.stat().st_size > FILE_BYTES:
                unix_ms = time.time_ns() // 1_000_000
                self._path = self._folder / f"requests-{unix_ms}.kvr"
                for old in sorted(self._folder.glob("requests-*.kvr"))[: 1 - FILES]:
                    old.unlink(missing_ok=True)
                requests = HEADER.pack(MAGIC, self._chunk_tokens, 0, unix_ms) + requests
            with self._path.open("ab") as file:
                file.write(requests)
        except OSError as error:
            self._path = None
            self._log.repeated(
                logging.WARNING, "record", "requests_not_recorded", folder=self._folder, reason=error
            )
