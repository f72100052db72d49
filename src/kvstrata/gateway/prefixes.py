"""The gateway's memory of prompts: which prefixes were sent to each engine, and when.

This is an approximation that needs neither tokenizers nor KV events.  A prompt is the JSON text of its messages, cut
into pieces of PIECE_BYTES; a piece's key is a hash of it, of all pieces before it, and of everything else on which the
prompt's KV depends (model, tenant, tools, system prompt, cache salt).  A conversation's next turn begins with the same
text, so its first pieces have the same keys.

1. Only whole pieces have keys.  Keys reveal nothing without the secret, which only this process has, or all gateways
   that share (sharing/).
2. An engine is remembered together with its generation: after it was down, its cache is assumed to be empty.
3. At most MAX_KEYS keys are kept; the least recently used one is forgotten first.
4. An engine's reported hits correct the memory (`mistaken`).
"""

from __future__ import annotations

import collections
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvstrata.gateway.residency.cache import Cache
from kvstrata.gateway.routing.model import Certainty, Copy
from kvstrata.native.core import chain_keys

PIECE_BYTES = 1_024
TOKEN_BYTES = 4
"""Approximate bytes of text per token."""
PIECE_TOKENS = PIECE_BYTES // TOKEN_BYTES
MAX_PIECES = 4_096
"""Maximum number of pieces of one prompt, from its start, that are remembered."""
KEY_BYTES = 16
MAX_KEYS = 1 << 18
_SECRET = secrets.token_bytes(32)


class Pieces:
    """Pieces of one prompt that were sent to an engine."""

    __slots__ = ("at_s", "computed", "generation", "losses", "ready_at_s")

    def __init__(
        self, generation: int, at_s: float, ready_at_s: float, losses: int, *, computed: bool
    ) -> None:
        self.generation, self.at_s = generation, at_s
        self.computed = computed
        """Whether the request's first token has come."""
        self.ready_at_s = ready_at_s
        """Expected time of the first token."""
        self.losses = losses
        """`Prefixes._losses` at the time of sending; -1: some pieces belong to another request under way."""


def keys_of(context: Iterable[bytes], text: bytes, secret: bytes = _SECRET) -> list[bytes]:
    """The keys of a prompt's pieces. `context`: everything but the text on which its KV depends. `secret`: 32 bytes."""
    start = hashlib.blake2b(key=secret, digest_size=32)
    for part in context:
        start.update(len(part).to_bytes(8, "big") + part)
    end = min(len(text) // PIECE_BYTES, MAX_PIECES) * PIECE_BYTES
    chain = chain_keys(start.digest(), text[:end], PIECE_BYTES // 4)  # as if four bytes were a token's id
    return [chain[at : at + KEY_BYTES] for at in range(0, len(chain), 32)]


class Prefixes:
    """The memory of prompts. Belongs to the event loop."""

    def __init__(self) -> None:
        self._sent: collections.OrderedDict[bytes, dict[str, Pieces]] = collections.OrderedDict()
        self._losses = 0

    def __len__(self) -> int:
        """Number of remembered keys."""
        return len(self._sent)

    def note(
        self,
        keys: Sequence[bytes],
        engine: str,
        generation: int,
        now_s: float,
        ready_at_s: float = 0.0,
        *,
        computed: bool = False,
    ) -> Pieces:
        """Remember pieces that were sent to an engine, expected to be computed at `ready_at_s`, or already `computed`.

        Returns the record for `Prefixes.computed`.
        """
        sent = again = Pieces(generation, now_s, ready_at_s, self._losses, computed=computed)
        last: Pieces | None = None
        known = self._sent
        for key in reversed(keys):  # so that a prompt's end is forgotten first
            if (engines := known.get(key)) is None:
                known[key] = {engine: sent}
                continue
            before = engines.get(engine)
            if before is None or before.generation != generation or computed:
                engines[engine] = sent
            elif before.computed:
                if before is not last:  # pieces that were sent together share a record
                    last = before
                    again = Pieces(generation, now_s, before.ready_at_s, self._losses, computed=True)
                engines[engine] = again
            else:
                sent.losses = -1  # another request may still fail to compute it
            known.move_to_end(key)
        while len(known) > MAX_KEYS:
            known.popitem(last=False)
        return sent

    def computed(self, sent: Pieces, keys: Sequence[bytes], engine: str, now_s: float) -> None:
        """Mark pieces as computed; `sent`: returned by `note` for them."""
        sent.computed, sent.at_s = True, now_s
        if sent.losses != self._losses:  # some pieces have another record, or were forgotten
            self.note(keys, engine, sent.generation, now_s, computed=True)

    def take_back(self, keys: Sequence[bytes], engine: str) -> None:
        """Forget those pieces of a request without a first token that no other request has computed."""
        waiting = [
            key for key in keys if engine in (found := self._sent.get(key, {})) and not found[engine].computed
        ]
        self.forget(waiting, engine)

    def forget(self, keys: Sequence[bytes], engine: str) -> None:
        """Forget that an engine has these pieces."""
        self._losses += 1
        for key in keys:
            engines = self._sent.get(key)
            if engines is not None and engines.pop(engine, None) is not None and not engines:
                del self._sent[key]

    def copies(
        self,
        keys: Sequence[bytes],
        generations: Mapping[str, int],
        now_s: float,
        heard: Callable[[str], Cache | None] = lambda name: None,
    ) -> list[Copy]:
        """The longest prefix that was sent to each engine, for engines with these generations.

        `heard`: the cache known from an engine's KV events; None: no events.  With events, pieces that the engine has
        computed are `unconfirmed`, or `degraded` if events were lost since, and absent if its cache was emptied since.
        """

        def has(sent: Pieces | None, name: str) -> bool:
            if sent is None or sent.generation != generations.get(name):
                return False
            told = heard(name) if sent.computed else None
            return told is None or sent.at_s >= told.emptied_s

        def certainty(sent: Pieces, name: str) -> Certainty:
            if not sent.computed:
                return "predicted"
            # Without events, or if these pieces' event may be among the lost ones, no confirmation will come.
            told = heard(name)
            return "degraded" if told is None or told.missed_s >= sent.at_s else "unconfirmed"

        counts: dict[str, tuple[int, Pieces]] = {}
        alive: dict[str, Pieces] = {}
        before = None
        for number, key in enumerate((*keys, b"")):
            engines = self._sent.get(key, {})
            if engines == before:  # the common case: all pieces were sent together
                continue
            counts.update((name, (number, sent)) for name, sent in alive.items())
            alive = {
                name: engines[name] for name in (alive if number else engines) if has(engines.get(name), name)
            }
            if not alive:
                break
            before = engines
        return [
            Copy(
                engine=name,
                tier="l0",
                tokens=count * PIECE_TOKENS,
                certainty=certainty(sent, name),
                age_s=max(0.0, now_s - sent.at_s),
                ready_at_s=sent.ready_at_s,
            )
            for name, (count, sent) in sorted(counts.items())
        ]

    def mistaken(
        self, keys: Sequence[bytes], engine: str, predicted_share: float, share: float
    ) -> Sequence[bytes] | None:
        """Compare the predicted cached share of a prompt with the share that the engine reports.

        If it is less than half of the predicted one, the keys beyond it are forgotten and returned; else None.
        """
        if predicted_share <= 0 or share >= predicted_share / 2:
            return None
        lacking = keys[int(share * len(keys)) :]
        self.forget(lacking, engine)
        return lacking
