"""A thread that passes answers on: the chunked body from an engine's socket goes to a client's socket.

Both sockets belong to the splicer from `start` until `take_ended` has returned the splice: meanwhile nobody else may
read, write or close them.  The splicer closes neither.  A client that does not read holds up its own engine: at most
one read of 64 KiB waits in memory.

| `end` | why | what the client has |
|---|---|---|
| `done` | the body has ended | the whole body |
| `engine_closed`, `engine_failed`, `not_chunked`, `silent` | the engine | whole chunks; another may follow |
| `client_gone`, `stalled`, `stopped` | the client, or `stop` | a piece: cut the connection |
"""

from collections.abc import Iterable

class Splice:
    """One answer. All but `number` and `is_over` has a meaning only once it is over."""

    is_over: bool
    """Whether it has ended, and `take_ended` has returned it if it was under way."""

    @property
    def number(self) -> int:
        """A number that no other splice of the splicer has."""

    @property
    def end(self) -> str:
        """A word of the table."""

    @property
    def exact(self) -> bool:
        """Whether it is `done` and the engine sent nothing after the body."""

    @property
    def body_bytes(self) -> int:
        """Bytes of the body, without the coding."""

    @property
    def events(self) -> int:
        """Events (`data:`) in the body, but for those that `early` had."""

    @property
    def last_s(self) -> float:
        """When the last part came (time.monotonic)."""

    @property
    def gaps(self) -> list[int]:
        """How many times between two parts with events fell into each bucket."""

    @property
    def gaps_s(self) -> float:
        """The sum of these times."""

    @property
    def tail(self) -> bytes:
        """The last bytes of the body: at least 4,096 of them."""

class Splicer:
    """Belongs to one thread, whose event loop watches `event_fd`."""

    def __init__(self, bounds_s: Iterable[float]) -> None:
        """`bounds_s`: upper bounds of the buckets of `gaps`, ascending. Raises OSError, MemoryError."""

    @property
    def event_fd(self) -> int:
        """Readable when splices have ended."""

    def __len__(self) -> int:
        """Splices that were started and not taken."""

    def start(
        self,
        engine_fd: int,
        client_fd: int,
        head: bytes,
        early: bytes,
        *,
        silence_s: float,
        stalled_s: float,
        events: bool,
    ) -> Splice:
        """Send `head` and the body in `early`, the first bytes of the coded body, and pass on what follows.

        A splice that is over at once is not returned by `take_ended`.  `silence_s`: how long the engine may send
        nothing.  `stalled_s`: how long the client may read nothing.  `events`: count and time events.  Raises
        ValueError after `close`, MemoryError; then the sockets are as they were.
        """

    def stop(self, splice: Splice) -> None:
        """End a splice soon, unless it has ended."""

    def take_ended(self) -> list[Splice]:
        """Splices that have ended since the last call."""

    def close(self) -> None:
        """End all splices, which `take_ended` then returns. Idempotent."""

def decoded(coded: bytes) -> tuple[bytes, int, str]:
    """The body in chunked coding's first bytes, how many were read, and `more`, `done` or `broken`. For tests."""
