"""Storage media in C++, as Python objects. Their blocking calls run in `native.lanes`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

class NativeConnector:
    """A storage medium in C++ (ext/core/include/kvstrata/connector.h), taken out of the capsule that its module made.

    This object and the jobs that use the medium own it together.  Raises ValueError for anything but an unused
    capsule of this version.
    """

    def __init__(self, capsule: object) -> None: ...

    capabilities: dict[str, Any]
    """The fields of `kvstrata::ConnectorCapabilities` by name, without `items_per_piece`."""

    ready: bool
    """Whether the connector has read its medium's index, so that `exists_now` answers at once and
    `NativeLanes.submit_list` may be called."""

    def exists_now(self, keys: Sequence[bytes], found: Callable[[int, int, str], T]) -> list[T] | None:
        """`found(presence, record_bytes, reason)` for each key; keys with equal answers may share one result.

        Asks in the calling thread, without the GIL; returns None if the connector would have to wait.  Raises
        ValueError for a key that does not have 32 bytes.
        """

    def counts(self) -> dict[str, int]:
        """The connector's counters, by name."""

    def take_notes(self) -> list[tuple[bool, str]]:
        """Notes for the log since the last call: (is a warning, sentence)."""
