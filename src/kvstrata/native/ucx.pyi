"""One-sided reads over UCX (ext/ucx/ucx_engine.h). Built where UCX's headers were found; libucp is loaded at run time.

Each command ends with one event `(ticket, end, text)`, whatever happens.  `end` is one of the constants of
kvstrata.p2p.engines.ucx; `text` says more.
"""

from collections.abc import Mapping, Sequence

class UcxEngine:
    """Starts its thread, which loads `library` and registers `regions` (address, length): the event of ticket 0.

    `config` are UCX's settings without their prefix UCX_, over those of the environment.
    """

    def __init__(
        self, library: str, config: Mapping[str, str], regions: Sequence[tuple[int, int]]
    ) -> None: ...
    @property
    def event_fd(self) -> int:
        """Readable while events wait."""

    def take_events(self) -> list[tuple[int, int, bytes]]:
        """What came to an end since the last call."""

    def connect(self, ticket: int, connection: int, packed: bytes, region_bytes: Sequence[int]) -> None:
        """`packed`: the text of the peer's ticket 0; `region_bytes`: the lengths of its regions, by its metadata.

        The text of the event names the transports, or says what is wrong with `packed`.
        """

    def read(self, ticket: int, connection: int, items: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Items as base.ReadItem; one outside the regions of either side fails the read before it begins.

        Its event: no byte is written any more.
        """

    def cancel(self, read_ticket: int) -> None:
        """Begin no more of a read; has no event of its own."""

    def disconnect(self, ticket: int, connection: int) -> None:
        """Its event comes after those of the connection's reads."""

    def begin_close(self, ticket: int) -> None:
        """End everything; its event is the last."""

    def close(self) -> None:
        """End the thread and wait for it. Idempotent; nothing may be called after it."""
