"""The operations that a controller has this instance carry out: their arguments, and what each kind does.

Nothing here waits for a controller, and each operation uses a bounded share of the instance.  `argument_of` ignores
unknown fields, so that a newer controller may send them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvstrata.config.demands import problems
from kvstrata.config.load import shown_environment
from kvstrata.errors import BadRequest, KvstrataError, NotPermitted, Refused, Unavailable
from kvstrata.keys.batch import count
from kvstrata.keys.spans import peek
from kvstrata.observability.logging import EventLog
from kvstrata.p2p.serving import PeersServed
from kvstrata.process.operations import MAX_CLAIM_S, MAX_KEYS, Claiming
from kvstrata.rpc.cluster_wire import (
    MAX_PEER_KEYS,
    CommandKind,
    Do,
    Outcome,
    Owner,
)
from kvstrata.rpc.wire import MAX_SLICES
from kvstrata.server.processes import tenant_number
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

MAX_FREEZE_MS = 60_000
MAX_DOING = 64
"""Operations under way; further ones are refused."""
PULL_S = 30.0
LAG_S = 0.01
"""Sleep whose delay tells how late the event loop is."""

# --- arguments: the maps in `Do.argument`, see CommandKind ---


def _is(demand: str, **bounds: Any) -> Meta:
    return Meta(extra={"demand": f"must be {demand}"}, **bounds)


Keys = Annotated[
    bytes,
    _is(f"1 to {MAX_PEER_KEYS} keys of {KEY_BYTES} bytes", min_length=KEY_BYTES, max_length=MAX_PEER_KEYS * KEY_BYTES),
]  # fmt: skip
"""Storage keys, concatenated."""
ClaimedKeys = Annotated[
    bytes,
    _is(f"1 to {MAX_KEYS} keys of {KEY_BYTES} bytes", min_length=KEY_BYTES, max_length=MAX_KEYS * KEY_BYTES),
]  # fmt: skip
Spans = Annotated[list[Annotated[int, Meta(ge=0, le=2**32 - 1)]], Meta(max_length=MAX_SLICES)]
Root = Annotated[bytes, _is(f"{KEY_BYTES} bytes", min_length=KEY_BYTES, max_length=KEY_BYTES)]
"""The root of an identity."""


class Freeze(msgspec.Struct):
    freeze_ms: Annotated[int, Meta(ge=0, le=MAX_FREEZE_MS)] = 0


class Clear(msgspec.Struct):
    tier: Literal["l1", "l2", "all"]
    tenant: Annotated[str | None, _is("a string, or null for all tenants")] = None


class Evict(msgspec.Struct):
    keys: Keys


class Claim(msgspec.Struct):
    keys: ClaimedKeys
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_CLAIM_S)]
    n_slices: Annotated[int, Meta(ge=1, le=MAX_SLICES)] = 1
    spans: Spans = []
    identity: Root | None = None
    tenant: Annotated[str, Meta(max_length=256)] = ""
    max_bytes: Annotated[int, Meta(gt=0)] | None = None


class Claims(msgspec.Struct):
    pass


class Release(msgspec.Struct):
    claim: Annotated[str, Meta(min_length=1, max_length=200)]


class Pull(msgspec.Struct):
    keys: Keys
    identity: Root
    n_slices: Annotated[int, Meta(ge=1, le=MAX_SLICES)] = 1
    tenant: str = ""
    owner: dict[str, Any] | None = None
    """The fields of an Owner, by name."""
    spans: Spans = []
    record_bytes: Annotated[list[Annotated[int, Meta(ge=1, le=2**32 - 1)]], Meta(max_length=MAX_SLICES)] = []
    """For each slice the length of a whole chunk's record; empty: not known, and nothing can be loaded."""


class Drain(msgspec.Struct):
    on: bool = True


class Runtime(msgspec.Struct):
    pass


class Status(msgspec.Struct):
    pass


_NAMED_OWNER = msgspec.defstruct(
    "NamedOwner",
    [(field.name, field.type) for field in msgspec.structs.fields(Owner)],
    forbid_unknown_fields=True,
)
_KINDS: dict[CommandKind, type[msgspec.Struct]] = {
    CommandKind.FREEZE: Freeze,
    CommandKind.CLEAR: Clear,
    CommandKind.EVICT: Evict,
    CommandKind.CLAIM: Claim,
    CommandKind.CLAIMS: Claims,
    CommandKind.RELEASE: Release,
    CommandKind.PULL: Pull,
    CommandKind.DRAIN: Drain,
    CommandKind.RUNTIME: Runtime,
    CommandKind.STATUS: Status,
}


def argument_of(command: Do) -> Any:
    """The checked argument of an operation. Raises BadRequest, which names the wrong field and says what it must be."""
    kind = _KINDS[command.kind]
    owner = command.argument.get("owner") if kind is Pull else None
    wrong = [] if owner is None else problems(_NAMED_OWNER, owner, "owner")
    for path, says in (*problems(kind, command.argument), *wrong):
        raise BadRequest(f"{path}: {says}", field=path)
    argument: Any = msgspec.convert(command.argument, kind)
    n_slices = getattr(argument, "n_slices", 1)
    if len(keys := getattr(argument, "keys", b"")) % (n_slices * KEY_BYTES):
        raise BadRequest(
            f"keys: must be whole keys of {KEY_BYTES} bytes, and a multiple of n_slices ({n_slices}) of them, found "
            f"{len(keys)} bytes",
            field="keys",
        )
    for field in ("spans", "record_bytes"):
        if (numbers := getattr(argument, field, ())) and len(numbers) != n_slices:
            raise BadRequest(
                f"{field}: found {len(numbers)} for {n_slices} slices; send one for each", field=field
            )
    return argument


# --- what they do ---


class Actions:
    """Carries out the operations of all controllers. Belongs to the event loop."""

    def __init__(self, parts: Parts, peers: PeersServed) -> None:
        self._pool, self._lane, self._clock = parts.pool, parts.own_lane, parts.clock
        self._facts, self._loop, self._frozen_by = parts.facts, parts.loop, parts.frozen_by
        self._prefetch = parts.prefetch
        self._clearing, self._board, self._claims = parts.clearing, parts.board, parts.claims
        self._peers = peers
        self.leader = (0, 0)
        """The latest leadership that any controller has shown: (cluster id, token); the greatest is the latest."""
        self._doing = 0
        self._thaw: asyncio.TimerHandle | None = None
        self._log = EventLog("cluster")

    async def carry_out(self, asked: Do) -> Outcome:
        """Carry out an operation of the latest leader, within its deadline. Raises KvstrataError.

        What goes on after the deadline (a clear, a claim) goes on by itself.
        """
        self.leader = max(self.leader, (asked.cluster_id, asked.token))
        try:
            if (asked.cluster_id, asked.token) != self.leader:
                raise NotPermitted(
                    f"token: {asked.token} of cluster {asked.cluster_id} belongs to "
                    f"{'an earlier leader' if asked.token else 'no leader'} (seen: {self.leader[1]} of cluster "
                    f"{self.leader[0]}); ask the controllers who leads",
                    field="token",
                )
            if self._doing >= MAX_DOING:
                raise Refused(
                    f"{MAX_DOING} operations are under way here; ask again later", retry_after_s=1.0
                )
            argument = argument_of(asked)
            self._doing += 1
            try:
                async with asyncio.timeout(asked.deadline_ms / 1000):
                    body = await self._do(argument)
            except TimeoutError:
                raise Unavailable(f"{asked.kind} has not ended within {asked.deadline_ms} ms") from None
            finally:
                self._doing -= 1
        except KvstrataError as error:
            self._log.repeated(
                logging.WARNING, f"command {asked.kind}", "command_refused", command=str(asked.kind),
                message=error.message,
            )  # fmt: skip
            raise
        return Outcome(asked.seq, self._facts.epoch, body)

    def thaw(self) -> None:
        """Let stores be taken again. Idempotent."""
        if self._thaw is not None:
            self._thaw.cancel()
            self._thaw = None
        self._frozen_by.clear()

    def _freeze(self, seconds: float) -> None:
        self.thaw()
        if seconds:
            self._frozen_by.add("controller")
            self._thaw = self._loop.call_later(seconds, self.thaw)
            self._log.info("frozen", at_most_s=seconds)

    async def _do(self, argument: Any) -> dict[str, Any]:
        match argument:
            case Freeze():
                self._freeze(argument.freeze_ms / 1000)
                return {}
            case Clear():
                done = await self._clearing.clear(argument.tier, argument.tenant)
                pending = done.held + done.leased
                return {"count": done.n_chunks, **done.tiers, "pending": pending, "kept": done.kept}
            case Evict():
                return {"count": await asyncio.shield(self._lane.run(self._pool.remove, argument.keys))}
            case Claim():
                asked = Claiming(tenant=argument.tenant, ttl_s=argument.ttl_s, bytes=argument.max_bytes)
                root = argument.identity or b""
                claim = await self._claims.claim(
                    argument.keys, argument.n_slices, argument.spans, root, asked
                )
                return claim.document()
            case Claims():
                return self._claims.listed()
            case Release():
                return {"count": int(await self._claims.release(argument.claim) is not None)}
            case Pull():
                return await self._pull(argument)
            case Drain():
                self._peers.drain(argument.on)
                return {"sending_bytes": self._peers.sending()[0]}
            case Runtime():
                began_s = self._loop.time()
                await asyncio.sleep(LAG_S)
                return self._runtime(self._loop.time() - began_s - LAG_S)
        return self._board.document()

    async def _pull(self, pull: Pull) -> dict[str, Any]:
        """Load the chunks that L1 lacks, as a prewarm does: from the named owner, else from any tier that has them."""
        keys, n_slices, spans = pull.keys, pull.n_slices, pull.spans
        fetched = await self._prefetch.fetch(
            keys,
            n_slices,
            identity=pull.identity,
            tenant=tenant_number(pull.tenant),
            deadline_s=self._clock.monotonic_s() + PULL_S,
            limits=pull.record_bytes or [0] * n_slices,
            spans=spans,
            owner=b"" if pull.owner is None else msgspec.msgpack.encode(Owner(**pull.owner)),
        )
        # Counted at the very end: a move drops the chunks at their source only if this number covers them.
        n = peek(self._pool, keys, n_slices, spans)
        reason = "" if n == count(keys, n_slices) else str(fetched.reason)
        return {"count": n, "loaded": fetched.l2_chunks, "reason": reason}

    def _runtime(self, lag_s: float) -> dict[str, Any]:
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        return {
            "pid": os.getpid(),
            "threads": int(status.get("Threads", "0")),
            "python_threads": [thread.name for thread in threading.enumerate()],
            "rss_bytes": int(status.get("VmRSS", "0 kB").split()[0]) * 1024,
            "gc_count": list(gc.get_count()),
            "gc_collections": [generation["collections"] for generation in gc.get_stats()],
            "gc_frozen": gc.get_freeze_count(),
            "loop_lag_ms": round(1000 * max(0.0, lag_s), 3),
            "tasks": len(asyncio.all_tasks()),
            "open_files": len(os.listdir("/proc/self/fd")),
            "environment": shown_environment(os.environ),
        }
