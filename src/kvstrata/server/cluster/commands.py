"""What the controller may ask of this instance, each once, each with one result.

Nothing here waits for the controller; nothing that it asks takes more than a bounded part of this instance.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata.errors import BadRequest, KvstrataError
from kvstrata.observability.logging import EventLog
from kvstrata.policy.processes import tenant_number
from kvstrata.rpc.cluster_wire import (
    MAX_COMMANDS,
    MAX_EXPLAINED_KEYS,
    MAX_PEER_KEYS,
    Command,
    CommandKind,
    CommandResult,
    Owner,
    encode,
)
from kvstrata.rpc.wire import Tier
from kvstrata.server.l2.tier_control import REFERENCE, SECRET, SECRET_IN_URL, SECRET_LEFT_OUT
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.p2p.lender import PeerServer
    from kvstrata.server.engine import Engine

MAX_DONE = 1_024
MAX_PIN_S = 86_400.0
PULL_S = 30.0
SHOWN_ENVIRONMENT = re.compile(r"(KVSTRATA|LMCACHE|UCX|NIXL|VLLM)_\w+|LANG|TZ|MALLOC_\w+|OMP_NUM_THREADS")
"""Variables that the runtime page shows."""


class Commands:
    """See the module. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        peers: PeerServer,
        ended: Callable[[], None],
        resync: Callable[[int], Awaitable[None]],
    ) -> None:
        """`ended` is called when there is a result to tell; `resync(freeze_ms)` returns when a full sync has ended."""
        self._engine = engine
        self._peers = peers
        self._ended = ended
        self._resync = resync
        self._running: dict[int, asyncio.Task[None]] = {}
        self._done: OrderedDict[int, CommandResult] = OrderedDict()
        self._untold: OrderedDict[int, CommandResult] = OrderedDict()
        self._log = EventLog("cluster")
        self.lag_s = 0.0
        """How late the loop was lately."""

    def __len__(self) -> int:
        return len(self._running) + len(self._untold)

    def take(self, command: Command) -> None:
        """Begin it, unless it is known; when too many run, the controller will say it again."""
        number = command.number
        if number in self._running or number in self._untold:
            return
        if number in self._done:
            self._untold[number] = self._done[number]
            self._ended()
        elif len(self._running) + len(self._untold) < MAX_COMMANDS:
            self._running[number] = asyncio.create_task(
                self._carry_out(command), name=f"command-{command.kind}"
            )

    def refuse(self, command: Command, why: str) -> None:
        """Do not carry it out, and say so."""
        self._untold[command.number] = CommandResult(command.number, False, why)
        self._ended()

    def results(self) -> list[CommandResult]:
        """Those that the controller has not acknowledged."""
        return list(self._untold.values())[:MAX_COMMANDS]

    def told(self, results: Sequence[CommandResult]) -> None:
        """It has these now."""
        for result in results:
            self._untold.pop(result.number, None)

    async def stop(self) -> None:
        """End what runs."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, command: Command) -> None:
        result = CommandResult(command.number, False, "the instance failed; see its log")
        try:
            done = CommandResult(command.number, True, "", await self._do(command.kind, command.argument))
            encode(done)  # what cannot be told would end the task that tells it
            result = done
        except KvstrataError as error:
            result = CommandResult(command.number, False, error.message[:2000])
        except asyncio.CancelledError:
            result = CommandResult(command.number, False, "the instance is stopping")
            raise
        except Exception as error:
            # The RPC boundary: a mistake of ours in one command is answered and logged.
            self._log.error("command_failed", kind=str(command.kind), error=repr(error))
        finally:
            del self._running[command.number]
            self._untold[command.number] = self._done[command.number] = result
            while len(self._done) > MAX_DONE:
                self._done.popitem(last=False)
            if result.ok:
                self._log.debug("command", kind=str(command.kind))
            else:
                kind = str(command.kind)
                self._log.repeated(
                    logging.WARNING,
                    f"command {kind}",
                    "command_refused",
                    command=kind,
                    message=result.message,
                )
            self._ended()

    async def _do(self, kind: CommandKind, argument: dict[str, Any]) -> dict[str, Any]:
        engine, leases = self._engine, self._peers.leases
        match kind:
            case CommandKind.RESYNC:
                await self._resync(_whole(argument, "freeze_ms", most=5_000))
                return {}
            case CommandKind.CLEAR:
                tier, tenant = argument.get("tier"), argument.get("tenant")
                if tier not in list(Tier) or not isinstance(tenant, str | None):
                    raise BadRequest(f"tier: must be l1, l2 or all, found {tier!r}", field="tier")
                done = await engine.clear(Tier(tier), tenant)
                return {
                    "count": done.n_chunks,
                    **done.tiers,
                    "pending": done.held + done.leased,
                    "kept": done.kept,
                }
            case CommandKind.EVICT:
                return {"count": await self._evict(argument)}
            case CommandKind.PIN:
                ttl_s = _whole(argument, "ttl_ms", most=int(1000 * MAX_PIN_S)) / 1000
                return {"count": self._peers.pin(_text(argument, "claim"), _keys(argument), ttl_s)}
            case CommandKind.UNPIN:
                return {"count": leases.unpin(_text(argument, "claim"))}
            case CommandKind.PULL:
                return await self._pull(argument)
            case CommandKind.DRAIN:
                leases.draining = bool(argument.get("on", True))
                return {"leases": len(leases)}
            case CommandKind.EXPLAIN if "keys" in argument:
                return {"keys": engine.explain_keys(_keys(argument, MAX_EXPLAINED_KEYS))}
            case CommandKind.EXPLAIN:
                return engine.explain(_text(argument, "request_id")) or {"known": False}
            case CommandKind.RUNTIME:
                return self._runtime()
            case CommandKind.STATUS:
                return engine.status()

    async def _evict(self, argument: dict[str, Any]) -> int:
        pool, lane = self._engine.pool, self._engine.own_lane
        identity = argument.get("identity", b"")
        if not identity:
            return await asyncio.shield(lane.run(pool.remove, _keys(argument)))
        if not isinstance(identity, bytes) or len(identity) != KEY_BYTES:
            raise BadRequest(f"identity: must be {KEY_BYTES} bytes", field="identity")
        dropped, _ = await asyncio.shield(lane.run(pool.clear, -1, identity))
        return dropped

    async def _pull(self, argument: dict[str, Any]) -> dict[str, Any]:
        """Load these chunks, as a prewarm does: what L1 lacks comes from the named owner, or else from whoever has it.

        They stay here, also where what is read from peers does not.
        """
        engine = self._engine
        keys, n_slices = _keys(argument), _whole(argument, "n_slices", least=1, most=4_096)
        identity = argument.get("identity")
        if not isinstance(identity, bytes) or len(identity) != KEY_BYTES:
            raise BadRequest(f"identity: must be {KEY_BYTES} bytes", field="identity")
        if len(keys) % (n_slices * KEY_BYTES):
            raise BadRequest(f"keys: their number must be a multiple of {n_slices}", field="keys")
        owner = _owner(argument)
        names = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        step = n_slices * KEY_BYTES
        reason, loaded = "", 0
        async with engine.borrowed.keeping(names):
            n_there = engine.pool.peek(keys, n_slices)
            if n_there * step < len(keys) and engine.prefetch is not None:
                engine.prefer_peer(names, owner)
                try:
                    fetched = await engine.prefetch.fetch(
                        keys[n_there * step :],
                        n_slices,
                        identity=identity,
                        tenant=tenant_number(str(argument.get("tenant", ""))),
                        parent=keys[(n_there - 1) * step : n_there * step] if n_there else b"",
                        deadline_s=engine.clock.monotonic_s() + PULL_S,
                    )
                finally:
                    engine.prefer_peer(names, None)
                loaded, reason = fetched.l2_chunks, str(fetched.reason)
        # Counted in the end: a move drops the chunks at their source because of this number.
        return {"count": engine.pool.peek(keys, n_slices), "loaded": loaded, "reason": reason}

    def _runtime(self) -> dict[str, Any]:
        status = dict(
            line.split(":\t", 1)
            for line in Path("/proc/self/status").read_text().splitlines()
            if ":\t" in line
        )
        environment = {
            name: _masked(name, value)
            for name, value in sorted(os.environ.items())
            if SHOWN_ENVIRONMENT.fullmatch(name)
        }
        return {
            "pid": os.getpid(),
            "threads": int(status.get("Threads", "0")),
            "python_threads": [thread.name for thread in threading.enumerate()],
            "rss_bytes": int(status.get("VmRSS", "0 kB").split()[0]) * 1024,
            "gc_count": list(gc.get_count()),
            "gc_collections": [generation["collections"] for generation in gc.get_stats()],
            "gc_frozen": gc.get_freeze_count(),
            "loop_lag_ms": round(1000 * self.lag_s, 3),
            "tasks": len(asyncio.all_tasks()),
            "open_files": len(os.listdir("/proc/self/fd")),
            "environment": environment,
        }


def _masked(name: str, value: str) -> str:
    if SECRET.search(name) and not REFERENCE.search(name.lower()):
        return SECRET_LEFT_OUT
    return SECRET_IN_URL.sub(f"://{SECRET_LEFT_OUT}@", value)[:2000]


def _keys(argument: dict[str, Any], most: int = MAX_PEER_KEYS) -> bytes:
    keys = argument.get("keys")
    if not isinstance(keys, bytes) or not keys or len(keys) % KEY_BYTES or len(keys) > most * KEY_BYTES:
        raise BadRequest(f"keys: must be 1 to {most} keys of {KEY_BYTES} bytes", field="keys")
    return keys


def _owner(argument: dict[str, Any]) -> Owner | None:
    told = argument.get("owner")
    if told is None:
        return None
    try:
        owner = Owner(**told)
        return msgspec.convert(msgspec.to_builtins(owner), Owner)
    except (TypeError, msgspec.ValidationError) as error:
        raise BadRequest(f"owner: must be an Owner: {error}", field="owner") from None


def _text(argument: dict[str, Any], field: str) -> str:
    value = argument.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise BadRequest(f"{field}: must be a text of 1 to 200 characters, found {value!r:.80}", field=field)
    return value


def _whole(argument: dict[str, Any], field: str, *, least: int = 0, most: int) -> int:
    value = argument.get(field, least)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(
            f"{field}: must be a number from {least} to {most}, found {value!r:.80}", field=field
        )
    return value
