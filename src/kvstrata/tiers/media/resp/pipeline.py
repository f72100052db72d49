"""Commands about many keys, over connections to their servers, with a bounded number of bytes under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kvstrata.native.core import CopyOutcome
from kvstrata.tiers.media.resp.connection import Buffer, Link, LinkLost, Reply, ServerError, command
from kvstrata.tiers.media.resp.replies import port_of
from kvstrata.tiers.media.resp.servers import Address, Servers
from kvstrata.types import KEY_BYTES

WINDOW_BYTES = 2 << 20
"""Maximum bytes that are requested or sent and not answered yet, unless a single record is larger."""
BYTES_PER_TIMEOUT = 64 << 20
"""Number of payload bytes for which a request's time limit is extended by as much again."""
SHORT_BYTES = 200
"""Rough size of a command without a payload, together with its answer."""
MAX_TURNS = 4
"""Maximum number of servers asked for one key when each redirects to another one."""


class BadValue:
    """The answer if the value that was read is not the requested record."""

    def __init__(self, why: CopyOutcome | None = None) -> None:
        self.why = why


Answer = Reply | LinkLost | BadValue


class Pipelines:
    """Sends commands and reads answers for one adapter. The threads of its lanes use it."""

    def __init__(self, servers: Servers, prefix: bytes, *, clustered: bool, timeout_s: float) -> None:
        """A request may take `timeout_s`, and as much again for every BYTES_PER_TIMEOUT bytes."""
        self._servers = servers
        self._prefix = prefix
        self._clustered = clustered
        self._timeout_s = timeout_s
        self.redirections = 0
        """Number of times that a node of a cluster answered that another one has the key."""

    def name_of(self, key: bytes) -> bytes:
        """The name of the record's key at the servers."""
        return self._prefix + key.hex().encode()

    def about(self, verb: bytes, *after: bytes) -> Callable[[int, bytes], Sequence[Buffer]]:
        """A function that encodes this command for one name; all names have the same length."""
        gap = b"?" * (len(self._prefix) + 2 * KEY_BYTES)
        before, _, behind = command(verb, gap, *after).partition(gap)
        return lambda i, name: (before + name + behind,)

    def deadline_s(self, payload_bytes: int) -> float:
        """The time at which a request that begins now must have ended."""
        return time.monotonic() + self._timeout_s * (1 + payload_bytes / BYTES_PER_TIMEOUT)

    def exchange(
        self,
        keys: Sequence[bytes],
        write: Callable[[int, bytes], Sequence[Buffer]],
        weights: Sequence[int] | None = None,
        read: Callable[[Link, int], Answer] | None = None,
    ) -> list[Answer]:
        """Send `write(i, name)` for each key to its server and read the answers, following redirections of a cluster.

        `weights`: roughly how many bytes each command and its answer have.  A command without an answer gets LinkLost.
        """
        answers: list[Answer] = [LinkLost("lost", "not asked")] * len(keys)
        clustered = self._clustered
        names = [self.name_of(key) for key in keys]
        weights = weights or [SHORT_BYTES] * len(keys)
        deadline_s = self.deadline_s(sum(weights))
        try:
            groups: Mapping[tuple[Address, bool], Sequence[int]] = {
                (address, False): places for address, places in self._servers.group(names).items()
            }
        except LinkLost as lost:
            return [lost] * len(keys)
        for _ in range(MAX_TURNS):
            directed: dict[tuple[Address, bool], list[int]] = {}
            for (address, asking), places in groups.items():
                pipeline = _Pipeline(names, places, write, weights, read, answers, asking)
                try:
                    with self._servers.link(address, deadline_s) as link:
                        pipeline.run(link)
                except LinkLost as lost:
                    for i in places[pipeline.answered :]:
                        answers[i] = lost
                for i in places:
                    answer = answers[i]
                    # Without a cluster a redirection is not followed: the password is for the named server only.
                    if (
                        clustered
                        and isinstance(answer, ServerError)
                        and (target := _directed(answer, address))
                    ):
                        directed.setdefault(target, []).append(i)
            for (address, asking), places in directed.items():
                self.redirections += len(places)
                if not asking:
                    self._servers.moved([names[i] for i in places], address)
            if not directed:
                break
            groups = directed
        return answers


class _Pipeline:
    """Commands about some keys over one connection, with at most WINDOW_BYTES not answered."""

    def __init__(
        self,
        names: Sequence[bytes],
        places: Sequence[int],
        write: Callable[[int, bytes], Sequence[Buffer]],
        weights: Sequence[int],
        read: Callable[[Link, int], Answer] | None,
        answers: list[Answer],
        asking: bool,
    ) -> None:
        self._names, self._places, self._write, self._weights = names, places, write, weights
        self._read, self._answers, self._asking = read, answers, asking
        self.answered = 0

    def run(self, link: Link) -> None:
        """Send all commands, read the answers. Raises LinkLost; only the first `answered` places then have answers."""
        places, weights, count = self._places, self._weights, len(self._places)
        sent = open_bytes = 0
        while self.answered < count:
            buffers: list[Buffer] = []
            while sent < count and (
                sent == self.answered or open_bytes + weights[places[sent]] <= WINDOW_BYTES
            ):
                if self._asking:
                    buffers.append(command(b"ASKING"))
                buffers.extend(self._write(places[sent], self._names[places[sent]]))
                open_bytes += weights[places[sent]]
                sent += 1
            if buffers:
                link.send(buffers)
            i = places[self.answered]
            if self._asking:
                link.reply()
            answer = link.reply() if self._read is None else self._read(link, i)
            if isinstance(answer, ServerError) and answer.code == "READONLY":
                raise LinkLost("read_only", "the server accepts no writes")
            self._answers[i] = answer
            open_bytes -= weights[i]
            self.answered += 1


def _directed(answer: ServerError, by: Address) -> tuple[Address, bool] | None:
    """The address to which a node of a cluster redirects, and whether for this one command only (ASK)."""
    host, colon, port = answer.rest.partition(" ")[2].rpartition(":")
    if answer.code not in ("MOVED", "ASK") or not colon or not port_of(port):
        return None
    # As in CLUSTER SLOTS, an empty host, or "?", means the node that answered.
    return Address(by.host if host in ("", "?") else host, port_of(port)), answer.code == "ASK"
