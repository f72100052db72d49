"""Claims: accepted promises to keep chunks in L1 until a time, each with a reported end.

    asked ─┬─▶ refused: with the reason and what would be possible; nothing is kept
           └─▶ kept ─┬─▶ released  an operator has ended it
                     ├─▶ expired   its time is over; time also passes while no server runs
                     └─▶ broken    `corrupt`: a record was found corrupt; after a restart `pool_lost`: L1 is a new one,
                                   `absent`: a record was not adopted, `no_room`: the claims no longer fit

Invariants
1. While a claim is kept, the pool leases all of its records to the server itself, so no eviction, command or clear
   removes them.  Only a record that is found corrupt leaves L1, and breaks the claim.
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
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

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
from kvstrata.types import EXTENT, KEY_BYTES, SERVER_ROW

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

CLAIMED_SHARE = 1 / 4
MAX_CLAIMS, MAX_ENDED = 1_024, 256
MAX_CLAIMED_KEYS = 4 * MAX_KEYS
"""Maximum number of keys of all claims together, 8 MiB."""
MAX_FILE_BYTES = 16 << 20
VERSION = 1
_PREWARM = "prewarm the prompt first (`kvstrata prewarm`)"
State = Literal["kept", "broken", "released", "expired"]
T = TypeVar("T")
ABSENT, LIMIT = "absent", "limit"


class Claim(msgspec.Struct, frozen=True):
    """One claim, as it is stored in the file."""

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
    state: State = "kept"
    reason: str = ""
    """Why it was broken."""
    ended_unix_ms: int = 0

    def document(self) -> dict[str, Any]:
        """The claim as operators see it."""
        inner = {"keys", "n_slices", "spans", "identity"}
        found = msgspec.structs.asdict(self).items()
        return {name.removeprefix("n_"): value for name, value in found if name not in inner}


class _File(msgspec.Struct, frozen=True):
    version: int
    claims: list[Claim]


class Taken(NamedTuple):
    """Records that the pool keeps until `Kept.give_back`."""

    ticket: int
    """The pool's number of this lease."""
    entries: list[int]
    extents: bytes
    n_bytes: int


class Kept:
    """The records that claims keep, and their bytes. One thread at a time uses it."""

    def __init__(self, pool: Pool, share: float) -> None:
        """`share` of the pool may be kept."""
        self.n_bytes = 0
        """Total bytes of the kept records, each counted once."""
        self._pool = pool
        self.limit_bytes = int(pool.extents_bytes * share)
        """Maximum number of bytes that may be kept."""
        self._shares: dict[int, list[int]] = {}
        """Pool entry → [number of claims on it, its bytes]."""

    def take(
        self, keys: bytes, n_slices: int, identity: bytes = b"", spans: Sequence[int] = ()
    ) -> tuple[Taken | None, str, int]:
        """Keep these chunks, all or none.

        Returns the kept records (None: refused), the reason, and the number of leading chunks that are in L1 and can be
        leased.  The arguments are those of `Pool.lease`.  Unverified chunks are kept too, since a claim reads none.
        """
        ticket, n_chunks, extents, _, short_bytes = self._pool.lease(
            keys, n_slices, [SERVER_ROW], identity, spans, again=True, unread=True
        )
        records = [(entry, length) for _, length, entry, _, _ in EXTENT.iter_unpack(extents) if length]
        more_bytes = sum(length for entry, length in records if entry not in self._shares)
        reason = LIMIT if self.n_bytes + more_bytes > self.limit_bytes else ""
        if n_chunks < count(keys, n_slices):
            reason = LIMIT if short_bytes else ABSENT
        if reason:
            if ticket:
                self._pool.release(ticket)
            return None, reason, n_chunks
        self.n_bytes += more_bytes
        for entry, length in records:
            self._shares.setdefault(entry, [0, length])[0] += 1
        entries = [entry for entry, _ in records]
        return Taken(ticket, entries, extents, sum(length for _, length in records)), "", n_chunks

    def give_back(self, taken: Taken) -> None:
        """Allow the pool to evict these records again. Called once for each `take`."""
        self._pool.release(taken.ticket)
        for entry in taken.entries:
            share = self._shares[entry]
            share[0] -= 1
            if not share[0]:
                self.n_bytes -= share[1]
                del self._shares[entry]


class Claims(Numbers):
    """The claims of one instance."""

    kept = gauge("Claims in force.", lambda self: len(self._kept))
    kept_bytes = gauge("Bytes of L1 that claims keep, each record once.", lambda self: self._lent.n_bytes)
    limit_bytes = gauge(
        "Maximum number of bytes of L1 that all claims together may keep.",
        lambda self: self._lent.limit_bytes,
    )
    accepted = counter("Claims accepted.")
    refused = counter("Claims refused, by reason.", "reason")
    ended = counter("Claims that have ended, by state.", "state")

    def __init__(self, parts: Parts) -> None:
        self._pool, self._lane, self._clock = parts.pool, parts.own_lane, parts.clock
        self._prewarms, self._supervisor = parts.prewarms, parts.supervisor
        self._path = parts.facts.socket_dir / CLAIMS
        self._lent = Kept(parts.pool, CLAIMED_SHARE)
        self._kept: dict[str, tuple[Claim, Taken]] = {}
        """Kept claims by name, in the order of their acceptance."""
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
        """Keep the chunks with these storage keys, and without an `identity` also all chunks before them.

        Returns the claim once the file has it.  Raises BadRequest, and Refused with a code for the reason and what
        would be possible; then nothing is kept.
        """
        now_ms = self._clock.unix_ms()
        left_s = asked.left_s(now_ms / 1000)
        if not 0 < left_s <= MAX_CLAIM_S:
            what = f"{asked.until_unix_s} is {left_s:g} s from now"
            raise BadRequest(
                f"until_unix_s: {what}; name a time within {MAX_CLAIM_S} s", field="until_unix_s"
            )
        if not keys:
            raise BadRequest(
                "tokens: must fill at least one chunk; give more tokens, or keys", field="tokens"
            )
        claim = Claim(
            secrets.token_hex(8), asked.tenant, keys, n_slices, list(spans), identity, count(keys, n_slices),
            now_ms, now_ms + round(1000 * left_s),
        )  # fmt: skip
        try:
            return await self._run(self._accept, claim, asked.bytes)
        except Refused as refused:
            self.refused[_reason(refused)] += 1
            raise

    async def release(self, name: str) -> Claim | None:
        """End a claim; returns it once the file has its end, None if no such claim is kept."""
        return next(iter(await self._run(self._end, [name], "released")), None)

    async def expire(self) -> None:
        """End the claims whose time is over, and rewrite the file if it was removed; called once a second."""
        if self._kept:
            await self._run(self._expire)

    def break_damaged(self) -> None:
        """Break the claims that have lost a record; called when one was found corrupt or changes of L1 were lost."""
        if not self._doubtful:
            self._doubtful = True
            self._supervisor.job(self._run(self._check), "check of claims")

    async def restore(self, *, adopted: bool) -> None:
        """Keep the claims of the file again. `adopted`: L1 is that of the last server; else its chunks are lost."""
        await self._run(self._restore, adopted)

    def listed(self) -> dict[str, Any]:
        """The kept claims and the last ended ones, the latest first."""
        claims = [*list(self._ended), *(claim for claim, _ in list(self._kept.values()))]
        rows = [claim.document() for claim in reversed(claims)]
        return {"claims": rows, "kept_bytes": self.kept_bytes, "limit_bytes": self.limit_bytes}

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
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
        taken, reason, n_chunks = self._take(claim)
        if taken is None and reason == ABSENT:
            raise Refused(
                f"absent: the first {n_chunks} of its {claim.chunks} chunks are in L1; claim these, or {_PREWARM}"
            )
        if taken is None:
            raise Refused(
                f"no_room: claims keep {self.kept_bytes} bytes, and at most {self.limit_bytes} (a quarter of L1); "
                "leases half of L1; claim fewer chunks, or release other claims"
            )
        if max_bytes is not None and taken.n_bytes > max_bytes:
            self._lent.give_back(taken)
            raise Refused(
                f"over_bytes: its chunks have {taken.n_bytes} bytes, more than `bytes` ({max_bytes}) allows"
            )
        claim = msgspec.structs.replace(claim, n_bytes=taken.n_bytes)
        self._kept[claim.claim] = claim, taken
        return claim

    def _take(self, claim: Claim) -> tuple[Taken | None, str, int]:
        return self._lent.take(claim.keys, claim.n_slices, claim.identity, claim.spans)

    def _let_go(self, name: str) -> Claim:
        claim, taken = self._kept.pop(name)
        self._lent.give_back(taken)
        return claim

    def _end(self, names: Sequence[str], state: str, reason: str = "") -> list[Claim]:
        """End those of these claims that are kept."""
        return self._note([(self._let_go(name), state, reason) for name in names if name in self._kept])

    def _note(self, ends: list[tuple[Claim, str, str]]) -> list[Claim]:
        """Move claims to the list of ended ones, with state and reason, write the file, and log it."""
        change, now_ms = msgspec.structs.replace, self._clock.unix_ms()
        ended = [
            change(claim, keys=b"", spans=[], state=state, reason=reason, ended_unix_ms=now_ms)
            for claim, state, reason in ends
        ]
        self._ended.extend(ended)
        if ended:
            self._save()
        for claim in ended:
            self.ended[claim.state] += 1
            if claim.state == "broken":
                self._log.warning("claim_broken", **claim.document())
            else:
                self._log.info("claim_ended", **claim.document())
        return ended

    def _expire(self) -> None:
        now_ms = self._clock.unix_ms()
        self._end(
            [name for name, (claim, _) in self._kept.items() if claim.until_unix_ms <= now_ms], "expired"
        )
        if self._kept and not self._path.exists():
            self._save()

    def _check(self) -> None:
        self._doubtful = False
        lost = []
        for name, (claim, taken) in self._kept.items():
            again, *_ = self._take(claim)
            if again is not None:
                self._lent.give_back(again)
            if again is None or again.extents != taken.extents:
                lost.append(name)
        self._end(lost, "broken", "corrupt")

    def _restore(self, adopted: bool) -> None:
        ends: list[tuple[Claim, str, str]] = []
        for claim in self._read():
            if claim.state != "kept":
                self._ended.append(claim)
            elif claim.until_unix_ms <= self._clock.unix_ms():
                ends.append((claim, "expired", ""))
            elif not adopted:
                ends.append((claim, "broken", "pool_lost"))
            else:
                try:
                    self._keep(claim)
                except Refused as refused:
                    ends.append((claim, "broken", _reason(refused)))
                except ValueError:
                    ends.append((claim, "broken", "damaged"))
        self._note(ends)
        if self._kept:
            self._log.info("claims_kept_again", claims=len(self._kept), bytes=self.kept_bytes)

    def _save(self) -> None:
        try:
            self._write()
        except OSError as error:
            self._log.error("claims_not_written", path=self._path, reason=error)

    def _write(self) -> None:
        claims = [*self._ended, *(claim for claim, _ in self._kept.values())]
        content = msgspec.msgpack.encode(_File(VERSION, claims))
        if len(content) > MAX_FILE_BYTES:
            raise OSError(f"{len(content)} bytes, at most {MAX_FILE_BYTES} are read again")
        write_private_file(self._path, content, overwrite=True)

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
        self._log.error("claims_ignored", path=self._path, reason=why)
        return []


def _reason(refused: Refused) -> str:
    """The reason code with which the message begins."""
    return refused.message.partition(":")[0]


def _with_ancestors(pool: Pool, keys: bytes, tenant: str) -> bytes:
    """The keys with the keys of all chunks before them; each chunk comes after the one that it continues.

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
