"""Adapters come and go while the server runs: add, drain, resume, remove, list.

    add      checked and made on a thread ─▶ open, at most OPEN_S ─▶ in the set
    drain    nothing new ─▶ what waited is put, what is under way ends ─▶ drained
    resume   draining or drained ─▶ active, as if it had been added just now
    remove   drain, at most as long as asked ─▶ the rest is skipped or looks elsewhere ─▶ close ─▶ out of the set

Rules:

1. An `add` that fails changes nothing: not the set, not a policy, not a counter.  One that hangs is answered after
   OPEN_S; what it began is closed when it ends, and until then counts among MAX_L2_ADAPTERS.
2. Every wait is bounded.  An adapter that does not let go is closed all the same (storage/wrap/deadline.py bounds
   that too); while operations of it run it stays listed as `removing` with the bytes that they keep stuck.
3. What is done is a task owned here: it goes on when the caller goes away, and ends with the server.
4. Records stay on the medium: removing an adapter deletes nothing, and adding it again finds them.

What the states mean is in server/l2/tiers.py.  Nothing here decides about chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvstrata.errors import (
    BadRequest,
    DeadlineExceeded,
    KvstrataError,
    NotPermitted,
    Refused,
    StorageError,
    Unavailable,
)
from kvstrata.observability.logging import EventLog
from kvstrata.server.l2.tiers import AdapterState, Member
from kvstrata.storage.registry import AdapterConfig, ConfiguredAdapter, configure_adapter
from kvstrata.types import MAX_L2_ADAPTERS

if TYPE_CHECKING:
    from kvstrata.native.pool import Pool
    from kvstrata.process.supervisor import PoolLane
    from kvstrata.server.l2.prefetch import PrefetchController
    from kvstrata.server.l2.store import StoreController
    from kvstrata.server.l2.tiers import AdapterSet
    from kvstrata.storage.base import AdapterContext

T = TypeVar("T")

OPEN_S = 30.0
"""For an adapter to be made and opened."""
FIELD = "adapter"
"""What error messages call the JSON of an adapter that is added."""
ANSWER_S = 1.0
"""For the answer to a remove, after the time that what is under way was given."""
BACKFILL_KEYS = 8
"""Chunks of L1 offered to an added adapter at a time."""
SECRET = re.compile(
    r"pass(word|wd|phrase)|secret|token|credential|(api|access|private)_?key|key(_base64)?$", re.IGNORECASE
)
"""Fields whose text is not shown."""
SECRET_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]*@")
"""Nor is a URL with a password."""
REFERENCE = re.compile(r"_(file|path|env)$")
"""Fields that say where a secret is."""
SECRET_LEFT_OUT = "*** left out ***"
CODE_TYPES = frozenset({"plugin"})
"""Types whose fields name the code to run."""


class AdapterControl:
    """See the module. All methods belong to the event loop."""

    def __init__(
        self,
        adapters: AdapterSet,
        pool: Pool,
        lane: PoolLane,
        store: StoreController,
        prefetch: PrefetchController,
        *,
        build: Callable[[AdapterConfig], ConfiguredAdapter],
        context: Callable[[str], AdapterContext],
        forget: Callable[[str], None],
        open_s: float = OPEN_S,
    ) -> None:
        """`build` wraps a configured adapter, `context(name)` is what the server lends it, `forget(name)` hears of
        members that have left for good."""
        self._adapters = adapters
        self._pool = pool
        self._lane = lane
        self._store = store
        self._prefetch = prefetch
        self._build = build
        self._context = context
        self._forget = forget
        self._open_s = open_s
        self._next_number = 0
        self._opening = 0
        self._settings: dict[str, dict[str, Any]] = {}
        """Entries of the adapters that the settings named when the server started, by name."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._puts_skipped: dict[str, int] = {}
        self._backfills: dict[str, asyncio.Task[None]] = {}
        self._backfill_left: dict[str, int] = {}
        self._closed = False
        self._log = EventLog("adapters")
        self._changed()

    # -- the start and the end -----------------------------------------------------------------------------

    async def open(self, config: AdapterConfig) -> None:
        """Open an adapter of the settings and take it in as the last. Raises ConfigError or StorageError."""
        configured = self._build(config)
        await configured.adapter.open(self._context(config.name))
        self._next_number = max(self._next_number, config.number + 1)
        self._settings[config.name] = config.entry
        self._join(configured, config.entry, len(self._adapters.placed))

    async def close(self) -> None:
        """End what is under way here, then close every adapter, all at the same time. Idempotent."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.stop(0.0)
        await self._prefetch.stop(0.0)
        members = list(self._adapters)
        for member in members:
            self._adapters.discard(member)
        await asyncio.gather(*(member.adapter.close() for member in members))

    # -- what an admin may ask -----------------------------------------------------------------------------

    async def rows(self) -> list[dict[str, Any]]:
        """A row for each member, nearest first."""
        members = list(self._adapters)
        usages = await asyncio.gather(*(self._usage(member) for member in members))
        rows = zip(members, usages, strict=True)
        return [{**self._row(member), "usage": usage} for member, usage in rows]

    def missing(self) -> list[str]:
        """Names of adapters of the settings that are not in the set any more: a restart brings them back."""
        there = [member.entry for member in self._adapters.placed]
        return [name for name, entry in self._settings.items() if entry not in there]

    async def add(
        self, entry: Mapping[str, Any], *, position: int | None, backfill: bool, may_name_code: bool
    ) -> dict[str, Any]:
        """Open an adapter by the JSON of `--l2-adapter` and take it in at `position`, by default as the last; its row.

        It gets what its policy chooses from now on: of what is in L1 already `on_evict` puts what is about to leave,
        `second_touch` what is used twice, `through` nothing.  With `backfill` all of it is offered once.

        Raises ConfigError, StorageError, BadRequest, Refused, DeadlineExceeded, NotPermitted or Unavailable; nothing
        has changed then.
        """
        self._check_open()
        placed = len(self._adapters.placed)
        if position is not None and not 0 <= position <= placed:
            raise BadRequest(
                f"position: must be from 0 to {placed}, the end, found {position}", field="position"
            )
        if not may_name_code and (kind := _code_type(entry)):
            raise NotPermitted(
                f"{FIELD}.type: {kind!r} runs code that the request names, and this admin port asks for no token; set "
                "http.token_file, or name the adapter when the server starts",
                field=f"{FIELD}.type",
            )
        if len(self._adapters) + self._opening >= MAX_L2_ADAPTERS:
            raise Refused(
                f"a server has at most {MAX_L2_ADAPTERS} L2 adapters, being opened or removed ones included; "
                "remove one first",
                field=FIELD,
            )
        return await asyncio.shield(
            self._own(self._add(dict(entry), position, backfill), "add-adapter", answers=True)
        )

    async def drain(self, name: str, *, loads: bool, wait_s: float) -> dict[str, Any] | None:
        """Give a member nothing new, and without `loads` ask it nothing; its row once that is done or after `wait_s`.

        What waits for it is put, what is under way ends, also after `wait_s`. None: there is no such member.
        """
        self._check_open()
        member = self._adapters.get(name)
        if member is None:
            return None
        if member.state is not AdapterState.REMOVING:
            self._begin_drain(member, loads)
            await asyncio.wait({self._drains[name]}, timeout=wait_s)
        return self._row(member)

    async def resume(self, name: str, *, backfill: bool) -> dict[str, Any] | None:
        """Use a draining or drained member as before, from now on; its row. None: there is no such member.

        What was skipped meanwhile is not put, unless `backfill` offers it all of L1 once.  Raises BadRequest for one
        that is being removed.
        """
        self._check_open()
        member = self._adapters.get(name)
        if member is None:
            return None
        if member.state is AdapterState.REMOVING:
            raise BadRequest(f"name: {name} is being removed; add it again once it has left", field="name")
        if (draining := self._drains.pop(name, None)) is not None:
            draining.cancel()
            member.state = AdapterState.ACTIVE
            member.takes_loads = True
            self._changed()
            self._log.info("l2_adapter_resumed", adapter=name)
        if backfill:
            self._begin_backfill(member)
        return self._row(member)

    async def remove(self, name: str, *, wait_s: float) -> dict[str, Any] | None:
        """Drain a member for at most `wait_s`, close it and take it out of the set; what came of it so far.

        The answer comes at most `ANSWER_S` after that time; what does not let go by then stays `removing`, and leaves
        the set by itself.  None: there is no such member.
        """
        self._check_open()
        member = self._adapters.get(name)
        if member is None:
            return None
        if name not in self._removals:
            self._puts_skipped[name] = 0
            self._removals[name] = self._own(self._remove(member, wait_s), f"remove-{name}")
        removal = self._removals[name]
        await asyncio.wait({removal}, timeout=wait_s + ANSWER_S)
        skipped = self._puts_skipped.get(name, 0)
        if removal.done():
            self._puts_skipped.pop(name, None)
        return {
            "name": name,
            "state": "removed" if self._adapters.get(name) is None else str(member.state),
            "puts_skipped": skipped,
            "stuck_bytes": member.configured.guard.stuck_bytes,
        }

    def names(self) -> list[str]:
        """Names of all members."""
        return [member.name for member in self._adapters]

    def status(self) -> dict[str, Any]:
        """For the status document, by name."""
        return {
            member.name: {
                "state": str(member.state),
                "takes_loads": member.takes_loads,
                **member.configured.status(),
            }
            for member in self._adapters
        }

    # -- add -----------------------------------------------------------------------------------------------

    async def _add(self, entry: dict[str, Any], position: int | None, backfill: bool) -> dict[str, Any]:
        number = self._next_number
        self._next_number += 1
        self._opening += 1
        opening = self._own(self._open(entry, number), "open-adapter", answers=True)
        try:
            done, _ = await asyncio.wait({opening}, timeout=self._open_s)
        except asyncio.CancelledError:
            opening.add_done_callback(self._opened_late)
            raise
        if not done:
            opening.add_done_callback(self._opened_late)
            raise DeadlineExceeded(
                f"{FIELD}: was not open after {self._open_s:.0f} s; it is closed as soon as it is",
                field=FIELD,
            )
        self._opening -= 1
        configured = opening.result()
        if self._closed:
            await configured.adapter.close()
            self._check_open()
        placed = len(self._adapters.placed)
        member = self._join(configured, entry, placed if position is None else min(position, placed))
        self._log.info("l2_adapter_added", adapter=member.name, policy=str(member.policy))
        if backfill:
            self._begin_backfill(member)
        return self._row(member)

    async def _open(self, entry: dict[str, Any], number: int) -> ConfiguredAdapter:
        """Raises KvstrataError; nothing is left open then."""

        def make() -> ConfiguredAdapter:
            return self._build(configure_adapter(entry, number, path=FIELD))

        configured = await _on_a_thread(make)  # a plugin is imported there, and may take its time
        try:
            await configured.adapter.open(self._context(configured.name))
        except KvstrataError as error:  # a process of its own has read the entry as one of the settings
            place, field = f"l2_adapters[{number}]", error.field
            raise type(error)(
                error.message.replace(place, FIELD), field=field.replace(place, FIELD)
            ) from None
        except Exception as error:  # the plugin boundary
            raise StorageError(
                f"{FIELD}: {configured.name} could not be opened: {type(error).__name__}: {error}",
                field=FIELD,
            ) from error
        return configured

    def _opened_late(self, opening: asyncio.Task[ConfiguredAdapter]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._opening -= 1
            return
        self._own(self._close_late(opening.result()), "close-adapter")

    async def _close_late(self, configured: ConfiguredAdapter) -> None:
        self._log.warning("l2_adapter_opened_too_late", adapter=configured.name)
        await configured.adapter.close()
        await configured.guard.ended()
        self._opening -= 1

    def _join(self, configured: ConfiguredAdapter, entry: dict[str, Any], position: int) -> Member:
        member = Member(configured, entry)
        if configured.host is None and member.adapter.capabilities.quiesce == "never":
            advice = 'its calls may never end; with "isolation": "process" they do, with their process'
            self._log.warning("l2_adapter_may_hang", adapter=member.name, advice=advice)
        self._adapters.insert(member, position)
        self._store.join(member)
        self._prefetch.join(member)
        self._changed()
        return member

    def _begin_backfill(self, member: Member) -> None:
        self._end_backfill(member)
        self._backfill_left[member.name] = 0
        self._backfills[member.name] = self._own(self._backfill(member), f"backfill-{member.name}")

    async def _backfill(self, member: Member) -> None:
        """Offer what L1 has now, a part at a time, so that it fills no backlog; leased chunks are left out."""
        pool = self._pool
        keys: Sequence[bytes] = await asyncio.shield(self._lane.run(pool.victims_preview, pool.extents_bytes))
        for at in range(0, len(keys), BACKFILL_KEYS):
            self._backfill_left[member.name] = len(keys) - at
            await self._store.idle_of(member.name)
            self._store.offer(member.name, keys[at : at + BACKFILL_KEYS])
        del self._backfill_left[member.name]
        self._log.info("l2_adapter_backfilled", adapter=member.name, chunks=len(keys))

    # -- drain and remove ----------------------------------------------------------------------------------

    def _begin_drain(self, member: Member, loads: bool) -> None:
        running = self._drains.get(member.name)
        if running is not None:
            if loads or not member.takes_loads:
                return
            running.cancel()
        self._end_backfill(member)
        member.state = AdapterState.DRAINING
        self._store.draining(member.name)
        if not loads:
            self._shut(member)
        self._drains[member.name] = self._own(self._until_drained(member), f"drain-{member.name}")
        self._log.info("l2_adapter_draining", adapter=member.name, loads=member.takes_loads)

    async def _until_drained(self, member: Member) -> None:
        await self._idle_of(member)
        member.state = AdapterState.DRAINED
        self._log.info("l2_adapter_drained", adapter=member.name)

    async def _remove(self, member: Member, wait_s: float) -> None:
        name, guard = member.name, member.configured.guard
        if (draining := self._drains.pop(name, None)) is not None:
            draining.cancel()
        self._end_backfill(member)
        member.state = AdapterState.REMOVING
        self._store.draining(name)
        self._shut(member)
        self._log.info("l2_adapter_removing", adapter=name)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle_of(member), wait_s)
        self._puts_skipped[name] = await self._store.leave(name)
        await self._prefetch.leave(name)
        await member.adapter.close()
        if guard.running:
            self._log.warning("l2_adapter_does_not_let_go", adapter=name, stuck_bytes=guard.stuck_bytes)
            await guard.ended()
        self._adapters.discard(member)
        del self._removals[name]
        self._forget(name)
        self._log.info("l2_adapter_removed", adapter=name, puts_skipped=self._puts_skipped[name])

    def _shut(self, member: Member) -> None:
        member.takes_loads = False
        self._prefetch.shut(member.name)
        self._changed()

    async def _idle_of(self, member: Member) -> None:
        await self._store.idle_of(member.name)
        if not member.takes_loads:
            await self._prefetch.idle_of(member.name)

    def _end_backfill(self, member: Member) -> None:
        self._backfill_left.pop(member.name, None)
        if (running := self._backfills.pop(member.name, None)) is not None:
            running.cancel()

    # -- common --------------------------------------------------------------------------------------------

    def _row(self, member: Member) -> dict[str, Any]:
        placed = self._adapters.placed
        capabilities = member.adapter.capabilities
        entry, left_out = shown(member.entry)
        return {
            "name": member.name,
            "type": member.name.rpartition("-")[0],
            "position": placed.index(member) if member in placed else None,
            "state": str(member.state),
            "policy": str(member.policy),
            "takes_loads": member.takes_loads,
            "persistent": capabilities.persistent,
            "shared": capabilities.shared,
            "entry": entry,
            "secrets_left_out": left_out,
            "in_settings": member.entry in self._settings.values(),
            "backfill_left": self._backfill_left.get(member.name, 0),
            **member.configured.status(),
            "puts": self._store.stats_of(member.name),
            "loads": self._prefetch.stats_of(member.name),
        }

    async def _usage(self, member: Member) -> dict[str, int] | None:
        if member.state is AdapterState.REMOVING:
            return None
        return (await member.adapter.usage())._asdict()

    def _changed(self) -> None:
        self._pool.set_has_l2(self._adapters.take_loads)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("this server is stopping")

    def _own(self, work: Coroutine[Any, Any, T], name: str, *, answers: bool = False) -> asyncio.Task[T]:
        """`answers`: a caller waits for the result, so a KvstrataError is told there and not logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, answers))
        return task

    def _ended(self, answers: bool, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        if answers and isinstance(task.exception(), KvstrataError):
            return
        self._log.error("adapter_task_failed", task=task.get_name(), error=repr(task.exception()))


def shown(entry: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """An entry without the secrets that it spells out, and the paths of their fields."""
    left_out: list[str] = []

    def public(value: Any, name: str, path: str) -> Any:
        if isinstance(value, Mapping):
            return {
                key: public(one, str(key), f"{path}.{key}" if path else str(key))
                for key, one in value.items()
            }
        if isinstance(value, list):
            return [public(one, name, f"{path}[{i}]") for i, one in enumerate(value)]
        if not isinstance(value, str):
            return value
        if (value and SECRET.search(name) and not REFERENCE.search(name)) or SECRET_IN_URL.search(value):
            left_out.append(path)
            return SECRET_LEFT_OUT
        return value

    return public(entry, "", ""), left_out


def _code_type(entry: object) -> str:
    """The type in this entry, or in one inside it, whose fields name code; empty for none."""
    if not isinstance(entry, Mapping):
        return ""
    kind = entry.get("type")
    return str(kind) if isinstance(kind, str) and kind in CODE_TYPES else _code_type(entry.get("inner"))


def _on_a_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of work that may never end: its thread does not keep the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def body() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=body, name="make-adapter", daemon=True).start()
    return future
