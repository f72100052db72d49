"""Holds in an adapter host, on extents that the pool's owner holds for the host."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvstrata.native.index import ExtentsMap

class LentHold:
    """A hold in an adapter host: the pool's owner keeps its own hold until it is told that this one was dropped.

    Has the members of `native.pool.Hold`, except `tenant`.  The hold is dropped by `drop()`, by leaving a `with`
    block, or with the object; `dropped` is called once, in the thread that drops it, and must not raise.
    """

    key: bytes
    offset: int
    length: int
    address: int
    def __init__(
        self,
        extents: ExtentsMap,
        key: bytes,
        offset: int,
        length: int,
        *,
        writable: bool,
        dropped: Callable[[], None],
    ) -> None:
        """Raises ValueError when the extent leaves the map."""
    @property
    def generation(self) -> int:
        """Always 0: an adapter host does not know the entry's generation."""
    def drop(self) -> None:
        """Idempotent."""
    def view(self) -> memoryview:
        """The record's bytes; writable only for a load. Raises PoolError after `drop()`."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
