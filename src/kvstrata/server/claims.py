"""Claims: accepted promises to keep chunks in L1 until a time, each with a reported end.

    asked ─┬─▶ refused: why, and what would be possible; nothing is kept
           └─▶ kept ─┬─▶ released  an operator has ended it
                     ├─▶ expired   its time is over; time counts while no server runs, too
                     └─▶ broken    `corrupt`: a record was found corrupt; after a restart `pool_lost`: L1 is a new one,
                                   `absent`: a record was not adopted, `no_room`: the claims no longer fit

Invariants
1. While a claim is kept, the pool leases all of its records to the server itself.  So no eviction, command or clear
   takes them.  Only a record that is found corrupt leaves L1, and breaks the claim.
2. A claim names its chunks from the first one of the prompt on, with the slices that a hit of them needs.  It keeps all
   of them, or it is refused.
3. All claims together keep at most CLAIMED_SHARE of L1, each record counted once.
4. The file `claims` in the socket directory has a claim before its acceptance is answered, and its end before that is
   logged.  The next server leases the claims of the file, the oldest first, before anything can be evicted.
5. An accepted claim ends once.  The last MAX_ENDED ends are listed, over restarts too.

Each change is one call on the server's own lane, which has one thread; the event loop only reads.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, TypeVarTuple

import msgspec
from msgspec import Meta

from kvstrata.config.private_file import write_private_file
from kvstrata.errors import BadRequest, Refused
from kvstrata.keys.batch import count, split
from kvstrata.memory.paths import CLAIMS
from kvstrata.native.core import Pool, record_header
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.process.operations import MAX_CLAIM_S, MAX_KEYS, Claiming, keys_of
from kvstrata.server.processes import tenant_number
from kvstrata.server.requests.reserve import GRANULE_BYTES
from kvstrata.types import EXTENT, KEY_BYTES, SERVER_ROW

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

CLAIMED_SHARE = 1 / 4
MAX_CLAIMS, MAX_ENDED = 1_024, 256
MAX_CLAIMED_KEYS = 4 * MAX_KEYS
"""Keys of all claims together, 8 MiB."""
MAX_FILE_BYTES = 16 << 20
VERSION = 1
_PREWARM = "prewarm the prompt (`kvstrata prewarm`) before"
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Claim(msgspec.Struct, frozen=True):
    """One claim, as the file has it."""

    claim: str
    tenant: str
    keys: bytes
    """Storage keys, chunk by chunk; empty once the claim has ended."""
    n_slices: Annotated[int, Meta(ge=0, lt=1 << 32)]
    spans: list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
    """As EngineGroup.spans."""
    identity: bytes
    """Root of the identity; empty if the claim named keys."""
    chunks: int
    accepted_unix_ms: int
    until_unix_ms: int
    n_bytes: int = 0
    state: Literal["kept", "broken", "released", "expired"] = "kept"
    reason: str = ""
    """Why it is broken."""
    ended_unix_ms: int = 0

    def document(self) -> dict[str, Any]:
        """The claim as operators see it."""
        names = [
            "claim",
            "tenant",
            "state",
            "reason",
            "chunks",
            "accepted_unix_ms",
            "until_unix_ms",
            "ended_unix_ms",
        ]
        return {**{name: getattr(self, name) for name in names}, "bytes": self.n_bytes}


class _File(msgspec.Struct, frozen=True):
    version: int
    claims: list[Claim]


class _Leased(NamedTuple):
    ticket: int
    extents: bytes
    sizes: dict[bytes, int]
    """Bytes of each leased record, by its key."""


class Claims(Numbers):
    """The claims of one instance."""

    kept = gauge("Claims that are kept now.", lambda self: len(self._kept))
    kept_bytes = gauge("Bytes of L1 that claims keep, each record once.")
    limit_bytes = gauge("Maximum number of bytes of L1 that all claims together may keep.")
    accepted = counter("Claims accepted.")
    refused = counter("Claims refused, by reason.", "reason")
    ended = counter("Claims that have ended, by state.", "state")

    def __init__(self, parts: Parts) -> None:
        self._pool, self._lane, self._clock = parts.pool, parts.own_lane, parts.clock
        self._prewarms, self._supervisor = parts.prewarms, parts.supervisor
        self._path = parts.facts.socket_dir / CLAIMS
        self.limit_bytes = int(parts.pool.extents_bytes * CLAIMED_SHARE)
        self._kept: dict[str, tuple[Claim, _Leased]] = {}
        """In the order of their acceptance."""
        self._uses: collections.Counter[bytes] = collections.Counter()
        """By key of a record, how many claims keep it."""
        self._ended: collections.deque[Claim] = collections.deque(maxlen=MAX_ENDED)
        self._doubtful = False
        self._log = EventLog("claims")

    async def claim_prompt(self, asked: Claiming) -> Claim:
        """Keep the chunks that a request names; returns and raises as `claim`."""
        if (asked.tokens is None) == (asked.keys is None):
            raise BadRequest("tokens: give either tokens or keys", field="tokens")
        if asked.tokens is None:
            return await self.claim(keys_of(asked.keys or ()), 1, (), b"", asked)
        work = self._prewarms.work(asked)
        keys = await self._run(work.derive, asked.tokens)
        return await self.claim(keys, len(work.limits), work.spans, work.root, asked)

    async def claim(
        self, keys: bytes, n_slices: int, spans: Sequence[int], identity: bytes, asked: Claiming
    ) -> Claim:
        """Keep the chunks with these storage keys, and without an `identity` also the records that they continue.

        Returns the claim once the file has it.  Raises BadRequest, and Refused with a word for the reason and what
        would be possible; then nothing is kept.
        """
        now_ms = self._clock.unix_ms()
        until_ms = (
            round(1000 * asked.until_unix_s) if asked.until_unix_s else now_ms + round(1000 * asked.ttl_s)
        )
        if not now_ms < until_ms <= now_ms + 1000 * MAX_CLAIM_S:
            raise BadRequest(
                f"until_unix_s: found {asked.until_unix_s}, and it is {now_ms / 1000} now; name a later time within "
                f"the next {MAX_CLAIM_S} s",
                field="until_unix_s",
            )
        if not keys:
            raise BadRequest("tokens: they make no whole chunk; give more tokens, or keys", field="tokens")
        claim = Claim(
            secrets.token_hex(8), asked.tenant, keys, n_slices, list(spans), identity, count(keys, n_slices),
            now_ms, until_ms,
        )  # fmt: skip
        try:
            return await self._run(self._accept, claim, asked.bytes)
        except Refused as refused:
            self.refused[_reason(refused)] += 1
            raise

    async def release(self, name: str) -> Claim | None:
        """End a claim; returns it once the file has its end, None if no such claim is kept."""
        ended = await self._run(self._end, [name], "released")
        return ended[0] if ended else None

    async def expire(self) -> None:
        """End the claims whose time is over; called once a second."""
        now_ms = self._clock.unix_ms()
        if over := [name for name, (claim, _) in list(self._kept.items()) if claim.until_unix_ms <= now_ms]:
            await self._run(self._end, over, "expired")

    def doubt(self) -> None:
        """A record was found corrupt, or events of the pool were lost: break the claims that have lost a record."""
        if not self._doubtful:
            self._doubtful = True
            self._supervisor.job(self._run(self._check), "check of claims")

    async def restore(self, *, adopted: bool) -> None:
        """Keep the claims of the file again. `adopted`: L1 is that of the last server, else nothing of it is left."""
        await self._run(self._restore, adopted)

    def listed(self) -> dict[str, Any]:
        """The claims that are kept, and those that have ended last; the latest first."""
        claims = [*list(self._ended), *(claim for claim, _ in list(self._kept.values()))]
        rows = [claim.document() for claim in reversed(claims)]
        return {"claims": rows, "kept_bytes": self.kept_bytes, "limit_bytes": self.limit_bytes}

    async def _run(self, work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        return await asyncio.shield(self._lane.run(work, *arguments))

    # --- on the lane ------------------------------------------------------------------------------------------

    def _accept(self, claim: Claim, max_bytes: int | None) -> Claim:
        """Keep a new claim. Raises Refused."""
        if not claim.identity:
            keys = _with_ancestors(self._pool, claim.keys, claim.tenant)
            claim = msgspec.structs.replace(claim, keys=keys, chunks=count(keys))
        left = MAX_CLAIMED_KEYS * KEY_BYTES - sum(len(kept.keys) for kept, _ in self._kept.values())
        if len(self._kept) >= MAX_CLAIMS or len(claim.keys) > left:
            raise Refused(
                f"too_many: {MAX_CLAIMS - len(self._kept)} more claims with {left // KEY_BYTES} records together are "
                f"possible, and this one has {len(claim.keys) // KEY_BYTES} records; release some first"
            )
        claim = self._keep(claim, max_bytes)
        try:
            self._write()
        except OSError as error:
            self._let_go(claim.claim)
            raise Refused(f"not_durable: {self._path} cannot be written: {error}; free space there") from None
        self.accepted += 1
        self._log.info("claim_accepted", **claim.document())
        return claim

    def _keep(self, claim: Claim, max_bytes: int | None = None) -> Claim:
        """Lease all records of a claim. Raises Refused; then none is leased."""
        leased, n_chunks, is_short = _lease(self._pool, claim)
        claim = msgspec.structs.replace(claim, n_bytes=sum(leased.sizes.values()))
        more = sum(size for key, size in leased.sizes.items() if not self._uses[key])
        room = self.limit_bytes - self.kept_bytes
        why = ""
        if more > room:
            why = (
                f"no_room: it needs {more} bytes more of L1, and {room} of {self.limit_bytes} bytes (a quarter of L1) "
                "may still be claimed; claim fewer chunks, or release a claim"
            )
        elif n_chunks < claim.chunks and is_short:
            why = "leased: engines and peers lease half of L1 now; try again when some leases have ended"
        elif n_chunks < claim.chunks:
            why = f"absent: the first {n_chunks} of its {claim.chunks} chunks are in L1; claim these, or {_PREWARM}"
        elif max_bytes is not None and claim.n_bytes > max_bytes:
            why = f"over_bytes: its chunks have {claim.n_bytes} bytes, more than `bytes` ({max_bytes}) allows"
        if why:
            self._pool.release(leased.ticket)
            raise Refused(why)
        self._uses.update(leased.sizes.keys())
        self.kept_bytes += more
        self._kept[claim.claim] = claim, leased
        return claim

    def _let_go(self, name: str) -> Claim:
        claim, leased = self._kept.pop(name)
        self._pool.release(leased.ticket)
        self._uses.subtract(leased.sizes.keys())
        self.kept_bytes -= sum(size for key, size in leased.sizes.items() if not self._uses[key])
        self._uses = +self._uses
        return claim

    def _end(self, names: Sequence[str], state: str, reason: str = "") -> list[Claim]:
        """End those of these claims that are kept."""
        kept = [self._let_go(name) for name in names if name in self._kept]
        return self._note([self._over(claim, state, reason) for claim in kept])

    def _over(self, claim: Claim, state: str, reason: str) -> Claim:
        now_ms = self._clock.unix_ms()
        return msgspec.structs.replace(
            claim, keys=b"", spans=[], state=state, reason=reason, ended_unix_ms=now_ms
        )  # fmt: skip

    def _note(self, ended: list[Claim]) -> list[Claim]:
        """List claims that have ended, write that, and tell it."""
        if ended:
            self._ended.extend(ended)
            try:
                self._write()
            except OSError as error:
                self._log.error("claims_not_written", path=self._path, reason=error)
        for claim in ended:
            self.ended[claim.state] += 1
            if claim.state == "broken":
                self._log.warning("claim_broken", **claim.document())
            else:
                self._log.info("claim_ended", **claim.document())
        return ended

    def _check(self) -> None:
        self._doubtful = False
        lost = []
        for name, (claim, leased) in self._kept.items():
            again, _, _ = _lease(self._pool, claim)
            self._pool.release(again.ticket)
            if again.extents != leased.extents:
                lost.append(name)
        self._end(lost, "broken", "corrupt")

    def _restore(self, adopted: bool) -> None:
        ended = []
        for claim in self._read():
            if claim.state != "kept":
                self._ended.append(claim)
            elif claim.until_unix_ms <= self._clock.unix_ms():
                ended.append(self._over(claim, "expired", ""))
            elif not adopted:
                ended.append(self._over(claim, "broken", "pool_lost"))
            else:
                try:
                    self._keep(claim)
                except Refused as refused:
                    ended.append(self._over(claim, "broken", _reason(refused)))
                except ValueError:
                    ended.append(self._over(claim, "broken", "damaged"))
        self._note(ended)

    def _write(self) -> None:
        claims = [*self._ended, *(claim for claim, _ in self._kept.values())]
        write_private_file(self._path, msgspec.msgpack.encode(_File(VERSION, claims)), overwrite=True)

    def _read(self) -> list[Claim]:
        """The claims of the file; none if it is missing or damaged."""
        try:
            with self._path.open("rb") as file:
                found = msgspec.msgpack.decode(file.read(MAX_FILE_BYTES), type=_File)
            if found.version == VERSION:
                return found.claims
            why: object = f"its version is {found.version}, not {VERSION}"
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            why = error
        self._log.error(
            "claims_ignored", path=self._path, reason=why, note="no claim of the last server holds"
        )
        return []


def _reason(refused: Refused) -> str:
    """The word with which the message begins."""
    return refused.message.partition(":")[0]


def _lease(pool: Pool, claim: Claim) -> tuple[_Leased, int, bool]:
    """Lease the leading chunks of a claim to the server itself; how many, and whether other leases left no room."""
    ticket, n_chunks, extents, _, short_bytes = pool.lease(
        claim.keys, claim.n_slices, [SERVER_ROW], claim.identity, claim.spans, again=True, unread=True
    )
    records = zip(split(claim.keys), EXTENT.iter_unpack(extents), strict=False)
    sizes = {key: -(-length // GRANULE_BYTES) * GRANULE_BYTES for key, (_, length, *_) in records if length}
    return _Leased(ticket, extents, sizes), n_chunks, short_bytes > 0


def _with_ancestors(pool: Pool, keys: bytes, tenant: str) -> bytes:
    """The keys and those of all records that theirs continue, each record after the one that it continues.

    Raises Refused if a record is not in L1, or is another tenant's.
    """
    found: dict[bytes, None] = {}
    for key in split(keys):
        line, at = [], key
        while at not in found:
            line.append(at)
            pool.verify(at)
            with pool.hold(at) or contextlib.nullcontext() as hold:
                if hold is None or hold.tenant != tenant_number(tenant) or len(found) + len(line) > MAX_KEYS:
                    raise Refused(
                        f"absent: {at.hex()}, which is or precedes {key.hex()}, is not in L1 among the tenant's "
                        f"chunks; {_PREWARM}"
                    )
                at = record_header(hold.address, hold.length).parent_key
            if not at.strip(b"\0"):
                break
        found.update(dict.fromkeys(reversed(line)))
    return b"".join(found)
