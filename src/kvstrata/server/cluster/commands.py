"""The commands of controllers: their arguments, what each kind does in this instance, and what became of each.

A command is carried out once by its number, and its result is sent until the controller has it.  Nothing here waits for
a controller, and each command uses a bounded share of the instance.  `argument_of` ignores unknown fields, so that a
newer controller may send them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvstrata.config.demands import problems
from kvstrata.config.load import shown_environment
from kvstrata.errors import BadRequest, KvstrataError
from kvstrata.keys.batch import count
from kvstrata.keys.spans import peek
from kvstrata.observability.logging import EventLog
from kvstrata.p2p.serving import PeerServer
from kvstrata.process.operations import MAX_CLAIM_S, MAX_KEYS, Claiming
from kvstrata.rpc.cluster_wire import (
    MAX_COMMANDS,
    MAX_PEER_KEYS,
    Command,
    CommandKind,
    CommandResult,
    Owner,
    encode,
)
from kvstrata.rpc.wire import MAX_SLICES
from kvstrata.server.processes import tenant_number
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

MAX_FREEZE_MS = 5_000
MAX_DONE = 1_024
PULL_S = 30.0

# --- arguments: the maps in `Command.argument`, see CommandKind ---


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


class Resync(msgspec.Struct):
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
    CommandKind.RESYNC: Resync,
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


def argument_of(command: Command) -> Any:
    """The checked argument of a command. Raises BadRequest, which names the wrong field and says what it must be."""
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
    """Carries out the commands of all controllers. Belongs to the event loop."""

    def __init__(self, parts: Parts, peer_server: PeerServer) -> None:
        self._pool, self._lane, self._clock = parts.pool, parts.own_lane, parts.clock
        self._prefetch = parts.prefetch
        self._clearing, self._board, self._claims = parts.clearing, parts.board, parts.claims
        self._peer_server = peer_server
        self.leader = (0, 0)
        """The latest leadership that any controller has shown: (cluster id, token); the greatest is the latest."""
        self._lag_s = 0.0
        """How late the event loop has been recently."""

    def obeys(self, cluster_id: int, token: int) -> bool:
        """Whether a command with this cluster id and token comes from the latest known leader; notes a later one."""
        self.leader = max(self.leader, (cluster_id, token))
        return (cluster_id, token) == self.leader

    def note_lag(self, late_s: float) -> None:
        """Note how late a timer fired; greater values of earlier timers fade."""
        self._lag_s = max(late_s, self._lag_s * 0.99)

    async def do(self, argument: Any) -> dict[str, Any]:
        """Carry out any command but RESYNC. Returns the content of its result. Raises KvstrataError."""
        leases = self._peer_server.leases
        match argument:
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
                leases.draining = argument.on
                return {"leases": len(leases)}
            case Runtime():
                return self._runtime()
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

    def _runtime(self) -> dict[str, Any]:
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
            "loop_lag_ms": round(1000 * self._lag_s, 3),
            "tasks": len(asyncio.all_tasks()),
            "open_files": len(os.listdir("/proc/self/fd")),
            "environment": shown_environment(os.environ),
        }


# --- what became of them ---


class CommandTable:
    """The commands of one controller and their results. Belongs to the event loop."""

    def __init__(
        self, actions: Actions, resync: Callable[[int], Awaitable[None]], ended: Callable[[], None]
    ) -> None:
        """`resync(freeze_ms)` returns when a full sync has ended; `ended` is called when a result is ready to send."""
        self._actions = actions
        self._resync = resync
        self._ended = ended
        self._running: dict[int, asyncio.Task[None]] = {}
        self._done: OrderedDict[int, CommandResult] = OrderedDict()
        self._unacknowledged: OrderedDict[int, CommandResult] = OrderedDict()
        self._log = EventLog("cluster")

    def __len__(self) -> int:
        return len(self._running) + len(self._unacknowledged)

    def take(self, command: Command) -> None:
        """Begin a command unless its number is known. If its result was acknowledged before, send the result again.

        While MAX_COMMANDS commands run or wait for the acknowledgement, the command is ignored: the controller sends
        it again.
        """
        number = command.number
        if number in self._running or number in self._unacknowledged:
            return
        if number in self._done:
            self._unacknowledged[number] = self._done[number]
            self._ended()
        elif len(self) < MAX_COMMANDS:
            self._running[number] = asyncio.create_task(
                self._carry_out(command), name=f"command-{command.kind}"
            )

    def refuse(self, command: Command, why: str) -> None:
        """Answer a command with an error instead of carrying it out."""
        self._unacknowledged[command.number] = CommandResult(command.number, False, why)
        self._ended()

    def results(self) -> list[CommandResult]:
        """Results that the controller has not acknowledged."""
        return list(self._unacknowledged.values())[:MAX_COMMANDS]

    def acknowledged(self, results: Sequence[CommandResult]) -> None:
        """Send these results no more: the controller has them."""
        for result in results:
            self._unacknowledged.pop(result.number, None)

    async def stop(self) -> None:
        """Cancel the running commands, and wait until they have ended."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, command: Command) -> None:
        number, kind = command.number, str(command.kind)
        result = CommandResult(number, False, "the instance failed to carry out the command; see its log")
        try:
            done = CommandResult(number, True, "", await self._do(command))
            encode(done)  # a result that cannot be encoded would end the task that sends heartbeats
            result = done
            self._log.debug("command", kind=kind)
        except KvstrataError as error:
            result = CommandResult(number, False, error.message[:2000])
            self._log.repeated(
                logging.WARNING, f"command {kind}", "command_refused", command=kind, message=result.message
            )
        except Exception as error:
            # A boundary like the one of requests: our own mistake in one command is answered and logged.
            self._log.error("command_failed", kind=kind, error=repr(error))
        finally:  # a command that a stop cancels is not answered any more
            del self._running[number]
            self._unacknowledged[number] = self._done[number] = result
            if len(self._done) > MAX_DONE:
                self._done.popitem(last=False)
            self._ended()

    async def _do(self, command: Command) -> dict[str, Any]:
        argument = argument_of(command)
        if isinstance(argument, Resync):
            await self._resync(argument.freeze_ms)
            return {}
        return await self._actions.do(argument)
