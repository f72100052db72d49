"""One-sided reads over UCX (ext/ucx/engine.h). Built where UCX's headers were found; libucp is loaded at run time.

Each command ends with exactly one event `(ticket, end, text)`, whatever happens.  `end` is one of the constants of
kvstrata.p2p.engines.ucx; `text` gives details.
"""

from collections.abc import Mapping, Sequence

class UcxEngine:
    """A transfer engine with one thread, which loads `library` and registers `region` (address, length).

    The event of ticket 0 says when that has ended.  `config` holds UCX's settings without their prefix UCX_; they
    override those of the environment.
    """

    def __init__(self, library: str, config: Mapping[str, str], region: tuple[int, int]) -> None: ...
    @property
    def event_fd(self) -> int:
        """Readable while events wait."""

    def take_events(self) -> list[tuple[int, int, bytes]]:
        """The events since the last call."""

    def connect(self, ticket: int, connection: int, packed: bytes, region_bytes: int) -> None:
        """Connect to a peer. `packed`: the text of the peer's event of ticket 0; `region_bytes`: the length of the
        peer's memory, as its metadata names it.

        The text of the event names the transports, or says what is wrong with `packed`.
        """

    def read(self, ticket: int, connection: int, items: Sequence[tuple[int, int, int]]) -> None:
        """Read `items`, each a base.ReadItem; if one lies outside the memory of either side, nothing is read.

        After the read's event no byte is written any more.
        """

    def cancel(self, read_ticket: int) -> None:
        """Begin no further transfers of a read. Has no event of its own."""

    def disconnect(self, ticket: int, connection: int) -> None:
        """End a connection; this command's event comes after those of the connection's reads."""

    def begin_close(self, ticket: int) -> None:
        """End all connections and reads; this command's event is the last."""

    def close(self) -> None:
        """End the thread and wait for it. Idempotent; nothing may be called after it."""
