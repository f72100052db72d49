"""The payload kinds that an adapter host knows, for its codecs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstrata.storage.base import PayloadKind
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold

KNOWN_KINDS = 4_096
IDENTITY_AND_SLICE = slice(320, 320 + 2 * KEY_BYTES)
"""Identity root and slice digest in a record's header."""


class KnownKinds:
    """The payload kinds that a host was told.

    Both sides hold such an object, the host its own and the server one for each host.  Both learn the same kinds in the
    same order, so both forget the same kinds.  `learn` is called on one thread, `of` on any.
    """

    def __init__(self) -> None:
        self._kinds: dict[bytes, PayloadKind] = {}

    def of(self, identity: bytes, slice_digest: bytes) -> PayloadKind | None:
        """The kind of the payloads of an identity root and a slice digest; None: not known."""
        return self._kinds.get(identity + slice_digest)

    def learn(self, kinds: Sequence[tuple[bytes, PayloadKind | None]]) -> None:
        """Take in the kinds of a KINDS frame that was sent or received."""
        for whose, kind in kinds:
            if kind is None:
                self._kinds.pop(whose, None)
                continue
            self._kinds[whose] = kind
            if len(self._kinds) > KNOWN_KINDS:
                del self._kinds[next(iter(self._kinds))]

    def news(
        self, holds: Sequence[Hold], payload_kind: Callable[[bytes, bytes], PayloadKind | None]
    ) -> list[tuple[bytes, PayloadKind | None]]:
        """The kinds that must be sent before these records are put; from now on they count as sent."""
        news = []
        for whose in dict.fromkeys(bytes(hold.view()[IDENTITY_AND_SLICE]) for hold in holds):
            identity, slice_digest = whose[:KEY_BYTES], whose[KEY_BYTES:]
            kind = payload_kind(identity, slice_digest)
            if kind != self.of(identity, slice_digest):
                news.append((whose, kind))
        self.learn(news)
        return news
