"""A tier: one medium in service.

    UNREACHABLE ─opened─▶ ACTIVE ─pause─▶ PAUSED ─resume─▶ ACTIVE        (a pause ends with the server)

A tier whose storage cannot be reached at the start stops no start: it is UNREACHABLE, and is opened again and again.

Every operation goes through `_bounded`, the only place with a deadline, a breaker and counters.  Only `clear` raises:
in other operations an exception of the medium becomes outcomes.

Invariants
1. A deadline ends the *wait*: every item of the batch is answered FAILED('deadline') (exists: UNKNOWN), while the
   medium's operation goes on and its items keep their holds until the medium has finished with them.  The bytes of such
   operations count as stuck until the operations end; while `max_stuck_bytes` or more bytes are stuck, nothing more is
   put or loaded.
2. Each operation has a breaker (tiers/breaker.py).  If an operation succeeds after its deadline, the breaker admits a
   try at once.  An operation failed if it hit the deadline, raised, or all its items are FAILED or UNKNOWN for reasons
   that blame the medium (tiers/reasons.py; a full queue does not).  A miss, a corrupt record or a full disk is an
   answer, not a failure.  While the breaker of loads is open, `exists` answers UNKNOWN too, since a record that cannot
   be loaded is not a hit.
3. A medium is not called before it is open or after its close began, nor while its tier is paused or its directory is
   gone.  A medium whose directory is not writable serves its records and gets no new ones.

The log has a line when a breaker opens (`tier_down`) and when it closes again (`tier_up`), none for probes that fail;
when the medium has no room for a put (`tier_full`), and when it has stored again (`tier_has_room`); and for each change
of the directory's state (`medium_…`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import ctypes
import enum
import functools
import logging
import operator
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvstrata.clock import Clock
from kvstrata.config.secrets import scrubbed, shown
from kvstrata.errors import ConfigError, KvstrataError, StorageError
from kvstrata.observability.load_line import LoadTimes
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers
from kvstrata.patience import patience
from kvstrata.process.supervisor import on_a_thread
from kvstrata.tiers import folder
from kvstrata.tiers.base import (
    MORE_KEYS,
    AdapterContext,
    Ask,
    Capabilities,
    Counts,
    Item,
    KeyPage,
    Outcome,
    Presence,
    ReadsPeers,
    Remarks,
    StorageAdapter,
    Usage,
    failed,
    log_broken_contract,
    read_checked,
)
from kvstrata.tiers.breaker import Breaker, BreakerState
from kvstrata.tiers.codec import Codec
from kvstrata.tiers.config import TierConfig
from kvstrata.tiers.folder import FolderState, WatchedFolder
from kvstrata.tiers.host.parent import HostedAdapter
from kvstrata.tiers.numbers import TierNumbers
from kvstrata.tiers.reasons import (
    BREAKER_OPEN,
    CLOSED,
    DEADLINE,
    ENCODED,
    FULL,
    MEDIUM_GONE,
    PAUSED,
    RAISED,
    READ_ONLY,
    blames_medium,
)
from kvstrata.types import KEY_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")

MB = 1 << 20
STUCK_SHARE = 16
"""Default of `max_stuck_mb`: L1 divided by this."""
DEADLINE_MS = 5_000
"""Default of an entry's `deadline_ms`."""
KILL_DEADLINES = 3
"""Default of `host_kill_ms`, in deadlines."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Shortest and longest pause between attempts to open an unreachable tier; each is twice the one before."""
ANSWER_S = 3.0
"""Time after which a file system that has not answered a probe counts as unreachable."""
FULL_REASONS = frozenset({FULL, "capacity", "disk_full", "no_room"})
"""Reasons of puts that say that the medium is full."""
CODECS_AT = 80
"""Offset in a record's header of the numbers of the (up to eight) codecs that encoded its payload; zero: no codec."""
_CANCELLED = "cancelled"
MEANINGS = {
    "exists": "lookups count its chunks as absent",
    "put": "it gets no new chunks",
    "load": "lookups count its chunks as absent",
    "delete": "records that should be deleted stay on it",
}
"""The consequence of an operation's open breaker, for the log."""


_OUTCOMES = {
    "put": {Outcome.STORED, Outcome.EXISTS, Outcome.THROTTLED, Outcome.FAILED},
    "load": {Outcome.LOADED, Outcome.ABSENT, Outcome.CORRUPT, Outcome.FAILED},
}
_MOVED = {"put": Outcome.STORED, "load": Outcome.LOADED}
_ENDED = operator.attrgetter("outcome", "reason")
_MISANSWERED = "misanswered"
"""Reason for an answer that the storage contract forbids."""


class TierState(enum.StrEnum):
    """The state of a tier: only an active one gets chunks and answers lookups."""

    UNREACHABLE = "unreachable"
    """Its adapter could not be opened yet; attempts are repeated."""
    ACTIVE = "active"
    PAUSED = "paused"
    """An admin has paused it: its medium is not called."""


class TierLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times and bounds of one tier."""

    deadline_ms: int = DEADLINE_MS
    """Time limit of one operation, extended by as much for every `bytes_per_deadline` of its payload."""
    bytes_per_deadline: int = 64 << 20
    max_stuck_bytes: int
    failures: int = 3
    open_s: float = 1.0
    max_open_s: float = 30.0
    """Shortest and longest time for which a breaker is open, see tiers/breaker.py."""
    opening_s: float = 30.0
    """Time after which the server starts without a medium that is not open yet."""
    close_s: float = 10.0
    """Maximum time that `close` waits for the medium's close and for operations past their deadline."""


def limits_of(config: TierConfig, l1_bytes: int) -> TierLimits:
    """The limits of a tier: those of its entry, or the defaults."""
    return TierLimits(
        deadline_ms=config.common.deadline_ms or round(patience(DEADLINE_MS)),
        max_stuck_bytes=int((config.common.max_stuck_mb or 0) * MB) or l1_bytes // STUCK_SHARE,
    )


class Tier(TierNumbers):
    """One tier, as the module describes. All methods belong to the event loop."""

    def __init__(self, config: TierConfig, limits: TierLimits, clock: Clock) -> None:
        """Make the medium, not open. Raises ConfigError if a plugin does."""
        super().__init__()
        self.config = config
        self.name = config.name
        self.limits = limits
        self.is_open = False
        self.reason = ""
        """Why the last attempt to open it failed."""
        self.paused = False
        self.load_times = LoadTimes()
        """Measured times of fetches from it (tiers/loads.py)."""
        self.users: dict[str, Numbers] = {}
        """While it is open: its `puts`, if it accepts any, and the `loads` from it."""
        self.folder = WatchedFolder(config.folder) if config.folder else None
        """The directory of the medium; None: the medium has no directory."""
        self._clock = clock
        self._log = EventLog("adapters", clock.monotonic_s)
        self._misanswered: set[str] = set()
        """Operations whose invalid answers were logged."""
        self._is_full = False
        """Whether the medium was full at its last put."""
        self._probe: asyncio.Future[FolderState] | None = None
        """A probe of the directory that has not ended."""
        self._opening: set[asyncio.Task[None]] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._breakers = {
            operation: Breaker(limits.failures, limits.open_s, limits.max_open_s) for operation in MEANINGS
        }
        self.host: HostedAdapter | None
        """The adapter host of an isolated tier."""
        self.codec: Codec | None
        self.medium, self.host, self.codec = self._make()

    def _make(self) -> tuple[StorageAdapter, HostedAdapter | None, Codec | None]:
        config, limits = self.config, self.limits
        host = codec = None
        if config.isolated:
            host = HostedAdapter(
                config,
                kill_ms=config.common.host_kill_ms or KILL_DEADLINES * limits.deadline_ms,
                bytes_per_kill=limits.bytes_per_deadline,
            )
        medium = host or config.make()
        medium.name = self.name
        if config.chain.encodes:
            staging_bytes = int(config.common.codec_staging_mb * MB)
            codec = Codec(
                self.name, config.chain, staging_bytes=staging_bytes, workers=config.common.codec_workers
            )
        return medium, host, codec

    @property
    def capabilities(self) -> Capabilities:
        """The medium's capabilities; valid once the tier is open."""
        return self.medium.capabilities

    @property
    def peers(self) -> ReadsPeers | None:
        """The medium if it reads other instances, or the host of any isolated medium; None for all other media."""
        return self.medium if self.is_open and isinstance(self.medium, ReadsPeers) else None

    # -- open and close ------------------------------------------------------------------------------------

    async def open(
        self, context: AdapterContext, in_use: Callable[[], None] = lambda: None, *, must: bool = False
    ) -> None:
        """Open the medium; `in_use` is called when it is open, perhaps later.

        Raises ConfigError.  A medium that cannot be reached, or is not open after `opening_s`, is opened in the
        background; with `must` this raises StorageError instead.
        """
        opening = self._begin(self._open_medium(context))
        await asyncio.wait({opening}, timeout=self.limits.opening_s)
        if opening.done() and (must or not isinstance(opening.exception(), StorageError)):
            opening.result()
        if opening.done() and opening.exception() is None:
            self._use(in_use)
        else:
            self._begin(self._reach(context, in_use, opening))

    async def _reach(
        self, context: AdapterContext, in_use: Callable[[], None], opening: asyncio.Task[None]
    ) -> None:
        """Try to open the medium again, after growing pauses."""
        pause_s = FIRST_PAUSE_S
        while True:
            if not opening.done():
                self.reason = f"{self.name}: it does not answer"
            else:
                error = opening.exception()
                self.reason = error.message if isinstance(error, KvstrataError) else repr(error)
            self._log.repeated(
                logging.WARNING, f"unreachable {self.name}", "tier_unreachable", adapter=self.name, reason=self.reason,
                meaning="lookups count its chunks as absent, and it gets no new ones; it is retried automatically",
            )  # fmt: skip
            if opening.done():
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                opening = self._begin(self._open_anew(context))
            await asyncio.wait({opening})
            if opening.exception() is None:
                break
        self.reason = ""
        self._use(in_use)
        self._log.info("tier_reached", adapter=self.name)

    async def _open_anew(self, context: AdapterContext) -> None:
        self.medium, self.host, self.codec = await on_a_thread(self._make, "make-adapter")
        await self._open_medium(context)

    async def _open_medium(self, context: AdapterContext) -> None:
        """Raises ConfigError; StorageError for every other failure. Nothing is left open then."""
        try:
            await self.medium.open(context)
            if self.codec is not None:
                self.codec.element_bytes_of = context.element_bytes_of
                if self.capabilities.wants_registered_memory:
                    await self._close_medium()
                    what = "this kind of storage moves bytes of L1 only; remove codec"
                    raise ConfigError(f"{self.name}: codec: {what}", field="codec")
            if self.folder is not None:
                try:
                    await on_a_thread(self.folder.mark, "mark-folder")
                except OSError:
                    await self._close_medium()
                    raise
        except (ConfigError, StorageError):
            raise
        except asyncio.CancelledError:
            await self._close_medium()
            raise
        except Exception as error:  # the plugin boundary
            message = f"{self.name} could not be opened: {type(error).__name__}: {scrubbed(error)}"
            raise StorageError(message, field=self.name) from error

    def _use(self, in_use: Callable[[], None]) -> None:
        self.is_open = True
        if self.host is None and self.capabilities.quiesce == "never":
            advice = 'its calls may never end; set "isolation": "process", so that its process can be killed'
            self._log.warning("l2_adapter_may_hang", adapter=self.name, advice=advice)
        in_use()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part of the opening, whose KvstrataError another task reads, until it ends or `close` cancels it."""
        task = asyncio.create_task(work, name=f"open-{self.name}")
        self._opening.add(task)
        task.add_done_callback(self._opening_ended)
        return task

    def _opening_ended(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and not isinstance(task.exception(), KvstrataError | None):
            self._log.error("adapter_task_failed", task=task.get_name(), error=repr(task.exception()))

    async def close(self) -> None:
        """End the opening, and close the medium. Idempotent.

        It waits at most `close_s` for the medium and its running operations; the rest continues, and is logged.
        """
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        if self.is_open:
            self.is_open = False
            await self._close_medium()
        if self.folder is not None:
            self.folder.close()

    async def _close_medium(self) -> None:
        closing = asyncio.create_task(self.medium.close(), name=f"{self.name}-close")
        self._running.add(closing)
        closing.add_done_callback(self._closed)
        _, pending = await asyncio.wait(set(self._running), timeout=self.limits.close_s)
        if pending:
            log.error(
                "%s: still busy %.0f s after close with %d stuck bytes; they stay pinned",
                self.name, self.limits.close_s, self.stuck_bytes,
            )  # fmt: skip
        elif self.codec is not None:
            await self.codec.close()

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._running.discard(closing)
        if not closing.cancelled() and closing.exception() is not None:
            log.error("%s: close: %r", self.name, closing.exception())

    @property
    def running(self) -> int:
        """Number of operations that have not ended, even if no caller waits for them; the close counts as one."""
        return len(self._running)

    async def ended(self) -> None:
        """Wait until no operation runs any more."""
        while self._running:
            await asyncio.wait(set(self._running))

    # -- what an admin sees --------------------------------------------------------------------------------

    @property
    def state(self) -> TierState:
        if not self.is_open:
            return TierState.UNREACHABLE
        return TierState.PAUSED if self.paused else TierState.ACTIVE

    @property
    def shown_state(self) -> str:
        """The state shown to admins: that of the directory if an active tier's directory is not WELL."""
        state = self.state
        if (
            state is TierState.ACTIVE
            and self.folder is not None
            and self.folder.state is not FolderState.WELL
        ):
            return str(self.folder.state)
        return str(state)

    def breaker_states(self) -> dict[str, str]:
        """State of each operation's breaker."""
        return {operation: breaker.state.value for operation, breaker in self._breakers.items()}

    @property
    def medium_state(self) -> FolderState | None:
        """The state of the medium's directory; None: the medium has none."""
        if not self.is_open:
            return FolderState.UNREACHABLE
        return None if self.folder is None else self.folder.state

    def medium_numbers(self) -> dict[str, int]:
        """The medium's own numbers; empty if it breaks its contract."""
        return read_checked(self.name, "numbers", self.medium.numbers, Counts) if self.is_open else {}

    def codec_stats(self) -> dict[str, int]:
        """The codec's numbers; empty without one."""
        return {} if self.codec is None else self.codec.stats()

    def document(self) -> dict[str, Any]:
        """The tier's numbers and its condition."""
        remarks = read_checked(self.name, "remarks", self.medium.remarks, Remarks)
        found = {
            **super().document(),
            "state": self.shown_state,
            "breakers": self.breaker_states(),
            "codec": self.codec_stats(),
            "numbers": self.medium_numbers(),
        }
        if self.medium_state is not None:
            found["medium"] = str(self.medium_state)
        if remarks:
            found["remarks"] = remarks
        if self.host is not None:
            found["host"] = self.host.host_status()
        if not self.is_open:
            found["reason"] = self.reason
        return found

    def row(self) -> dict[str, Any]:
        """The tier's row for an admin, without its secrets."""
        return {
            "name": self.name,
            "type": self.name.rpartition("-")[0],
            "policy": str(self.config.common.policy),
            "persistent": self.capabilities.persistent,
            "shared": self.capabilities.shared,
            "entry": shown(self.config.entry)[0],
            **self.document(),
            "under_way": self.running,
            **{name: self.users[name].document() if name in self.users else {} for name in ("puts", "loads")},
        }

    # -- the directory -------------------------------------------------------------------------------------

    async def look_at_folder(self) -> None:
        """Probe the directory of an open tier once, for ANSWER_S at most, and act on a change of its state.

        The probe runs on a thread of its own, since a file system may never answer; a directory whose probe has not
        ended is not probed again.
        """
        if self.folder is None or not self.is_open:
            return
        if self._probe is None or self._probe.done():
            self._probe = on_a_thread(self.folder.look, "probe-folder")
        await asyncio.wait({self._probe}, timeout=patience(ANSWER_S))
        before, now = self.folder.state, FolderState.UNREACHABLE
        if self._probe.done():
            now = self._probe.result()
        if now is before:
            return
        self.folder.state = now
        event, fields = folder.event_of(now, stays_read_only=bool(self.medium_numbers().get("read_only")))
        level = logging.ERROR if now is not FolderState.WELL else logging.WARNING if fields else logging.INFO
        self._log.repeated(
            level, f"{event} {self.name}", event, adapter=self.name, path=self.folder.path, **fields
        )

    # -- operations ----------------------------------------------------------------------------------------

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """As the medium; UNKNOWN at the deadline, while a breaker is open and while the medium is not called."""
        n_keys = len(keys) // KEY_BYTES
        own = copy.copy(ask)  # the medium may still answer after the deadline

        async def work() -> tuple[bytes, str]:
            return await self.medium.exists(keys, own), own.reason

        begun_s, outcomes = self._clock.monotonic_s(), {_CANCELLED: n_keys}
        try:
            try:
                if not self._breakers["load"].would_admit(begun_s):
                    raise _Failed(self._refusal("exists") or BREAKER_OPEN)
                why = functools.partial(_why_unknown, n_keys)
                answer: tuple[bytes, str] = await self._bounded("exists", work, why)
                found, ask.reason = answer
            except _Failed as failure:
                found = ask.unknown(keys, failure.reason)
            outcomes = {
                _word(presence.name, ask.reason if presence is Presence.UNKNOWN else ""): count
                for presence in Presence
                if (count := found.count(presence))
            }
        finally:
            self._count("exists", begun_s, 0, outcomes)
        return found

    async def put(self, items: Sequence[Item]) -> Sequence[Item]:
        """As the medium; returns settled items, FAILED at the deadline or if the medium accepts no puts now."""
        work = self.medium.put if self.codec is None else functools.partial(self.codec.put, self.medium)
        return await self._move("put", work, items)

    async def load(self, items: Sequence[Item]) -> Sequence[Item]:
        """As `put`. The extents must still be reserved: without a codec, an encoded record is FAILED."""
        work = self.medium.load if self.codec is None else functools.partial(self.codec.load, self.medium)
        return await self._move("load", work, items)

    async def _move(
        self,
        operation: str,
        work: Callable[[Sequence[Item]], Coroutine[Any, Any, None]],
        items: Sequence[Item],
    ) -> Sequence[Item]:
        settled, words, moved_bytes = items, {_CANCELLED: len(items)}, 0
        payload_bytes, begun_s = sum([item.hold.length for item in items]), self._clock.monotonic_s()
        try:
            try:
                why = functools.partial(_why_failed, operation, items)
                await self._bounded(operation, functools.partial(work, items), why, payload_bytes)
                if operation == "load" and self.codec is None:
                    _refuse_encoded(items)
            except _Failed as failure:
                if isinstance(failure, _Refused):
                    for item in items:
                        item.hold.drop()
                settled = failed(items, failure.reason)
            counts = collections.Counter(map(_ENDED, settled))
            words = {_word(outcome.name, reason): n for (outcome, reason), n in counts.items()}
            moved_bytes = sum([item.hold.length for item in settled if item.outcome is _MOVED[operation]])
        finally:
            self._count(operation, begun_s, moved_bytes, words)
        return settled

    async def delete(self, keys: bytes) -> int:
        """As the medium; 0 at the deadline, while the breaker is open and while the medium accepts no puts."""
        count, n_keys = 0, len(keys) // KEY_BYTES
        begun_s, outcomes = self._clock.monotonic_s(), {_CANCELLED: n_keys}
        try:
            with contextlib.suppress(_Failed):
                answer = await self._bounded("delete", lambda: self.medium.delete(keys))
                count = answer if self._is_answer("delete", answer, _is_count(answer)) else 0
            outcomes = {"deleted": count, "absent": n_keys - count}
        finally:
            self._count("delete", begun_s, 0, outcomes)
        return count

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the medium; None if it does not answer in time, its answer is not a page, or it is not called."""
        page: KeyPage | None = None
        with contextlib.suppress(_Failed):
            page = await self._bounded("list_keys", lambda: self.medium.list_keys(cursor, most))
        if page is None or _is_page(page, most):
            return page
        log.error("%s: list_keys answered %.200r, which is not a page of %d keys", self.name, page, most)
        return None

    async def usage(self) -> Usage:
        """As the medium; all zero if it is paused or does not answer in time, or its answer is not a usage."""
        with contextlib.suppress(_Failed):
            usage = await self._bounded("usage", self.medium.usage)
            counts = (
                isinstance(usage, tuple) and len(usage) == len(Usage._fields) and all(map(_is_count, usage))
            )
            if self._is_answer("usage", usage, counts):
                return Usage(*usage)
        return Usage(0, 0, 0)

    async def clear(self) -> int:
        """As the medium, without a deadline, since an admin waits for the answer. Raises StorageError."""
        if self.paused:
            raise self._not_cleared("it is paused; resume it first")
        try:
            count = await self.medium.clear()
        except StorageError:
            raise
        except Exception as error:  # the plugin boundary
            log_broken_contract(self.name, "clear", error)
            raise self._not_cleared(f"{type(error).__name__}: {scrubbed(error)}") from None
        if not self._is_answer("clear", count, _is_count(count)):
            raise self._not_cleared(f"it answered {count!r:.80}, which is not a number of records")
        return count

    def _not_cleared(self, why: str) -> StorageError:
        return StorageError(f"{self.name}: not cleared: {why}", field=self.name)

    def _is_answer(self, operation: str, answer: object, is_one: bool) -> bool:
        """Return `is_one`; if it is false, log the answer, once for each operation."""
        if not is_one and operation not in self._misanswered:
            self._misanswered.add(operation)
            log.error(
                "%s: %s answered %.200r, which the storage contract forbids", self.name, operation, answer
            )
        return is_one

    # -- all calls of the medium ---------------------------------------------------------------------------

    def _refusal(self, operation: str) -> str:
        """Why the medium is not called for this operation; empty: it is called."""
        if not self.is_open:
            return CLOSED
        if self.paused:
            return PAUSED
        state = FolderState.WELL if self.folder is None else self.folder.state
        if state is FolderState.WELL or operation == "usage":
            return ""
        if state is not FolderState.READ_ONLY:
            return MEDIUM_GONE
        return READ_ONLY if operation in ("put", "delete") else ""

    async def _bounded(
        self,
        operation: str,
        work: Callable[[], Coroutine[Any, Any, T]],
        why_failed: Callable[[T], str] = lambda answer: "",
        payload_bytes: int = 0,
    ) -> T:
        """The result of `work` if it comes in time. Raises _Refused if `work` was not started, _Failed otherwise.

        `why_failed(result)`: why a result means that the medium failed ("": it does not); _MISANSWERED: the storage
        contract forbids it, which is logged.  An operation without a breaker always goes through.

        After the deadline, and when the caller is cancelled, the work continues and its bytes count as stuck until it
        ends.  In any case the breaker is told how the work ended, or that its deadline passed.
        """
        if refusal := self._refusal(operation):
            raise _Refused(refusal)
        breaker = self._breakers.get(operation)
        is_stuck = payload_bytes and self.stuck_bytes >= self.limits.max_stuck_bytes
        if breaker is not None and (is_stuck or not breaker.admit(self._clock.monotonic_s())):
            raise _Refused(BREAKER_OPEN)
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(work())
        late = loop.create_future()

        reason = ""

        def judge(reason: str) -> None:
            if not late.done():
                late.set_result(None)
                if breaker is not None:
                    self._judge(operation, breaker, reason)

        def ended(task: asyncio.Task[T]) -> None:
            nonlocal reason
            self._running.discard(task)
            timer.cancel()
            raised = task.cancelled() or task.exception() is not None
            reason = RAISED if raised else why_failed(task.result())
            if not reason and late.done() and breaker is not None:
                breaker.late_but_well(self._clock.monotonic_s())
            judge(RAISED if reason is _MISANSWERED else reason)

        limits = self.limits
        timeout_s = limits.deadline_ms / 1000 * (1 + payload_bytes / limits.bytes_per_deadline)
        timer = loop.call_later(timeout_s, judge, DEADLINE)
        self._running.add(task)
        task.add_done_callback(ended)
        try:
            await asyncio.wait({task, late}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                self._count_stuck(task, payload_bytes)
        if not task.done():
            raise _Failed(DEADLINE)
        if (error := task.exception()) is not None:
            log_broken_contract(self.name, operation, error)
            raise _Failed(RAISED)
        if reason is _MISANSWERED:
            what = "%s: %s did not give every key or item an answer of its kind, which the storage contract demands"
            log.error(what, self.name, operation)
            raise _Failed(RAISED)
        return task.result()

    def _judge(self, operation: str, breaker: Breaker, reason: str) -> None:
        """Report an operation's end to the breaker (`reason` "": it succeeded), and log a change of its state."""
        before = breaker.state
        breaker.ended(not reason, self._clock.monotonic_s())
        is_well, was_well = breaker.state is BreakerState.CLOSED, before is BreakerState.CLOSED
        if was_well and not is_well:
            self._log.repeated(
                logging.WARNING, f"down {self.name} {operation}", "tier_down", adapter=self.name, operation=operation,
                reason=reason, meaning=f"{MEANINGS[operation]}; it is retried automatically",
            )  # fmt: skip
        elif is_well and not was_well:
            self._log.repeated(
                logging.INFO, f"up {self.name} {operation}", "tier_up", adapter=self.name, operation=operation
            )

    def _count_stuck(self, task: asyncio.Task[Any], payload_bytes: int) -> None:
        self.stuck_bytes += payload_bytes

        def unstick(ended: asyncio.Task[Any]) -> None:
            self.stuck_bytes -= payload_bytes
            error = None if ended.cancelled() else ended.exception()
            if error is not None:
                log_broken_contract(self.name, "an operation past its deadline", error)

        task.add_done_callback(unstick)

    def _count(self, operation: str, begun_s: float, moved_bytes: int, outcomes: Mapping[str, int]) -> None:
        """Count a batch that has ended; log it if the medium has become full, or has free space again.

        `outcomes`: number of items by outcome in lower case (`stored`, `absent`, …), with a reason `status:reason`;
        _CANCELLED if the caller was cancelled.
        """
        seconds = self._clock.monotonic_s() - begun_s
        counted = self.by_operation[operation]
        counted.seconds.add(seconds)
        counted.bytes += moved_bytes
        for word, count in outcomes.items():
            counted.items.add_foreign(word, count)
        if operation != "put":
            return
        reason = next((word for _, _, word in map(_parted, outcomes) if word in FULL_REASONS), "")
        if reason and not self._is_full:
            self._is_full = True
            self._log.repeated(
                logging.WARNING, f"full {self.name}", "tier_full", adapter=self.name, reason=reason,
                meaning="it gets no new chunks until it has room; its records are served",
            )  # fmt: skip
        elif not reason and self._is_full and moved_bytes:
            self._is_full = False
            self._log.repeated(logging.INFO, f"room {self.name}", "tier_has_room", adapter=self.name)


class _Failed(Exception):
    """The operation failed, or did not end within its deadline."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Refused(_Failed):
    """The medium was not called."""


def _refuse_encoded(items: Sequence[Item]) -> None:
    """After a load without a codec: an encoded record is a miss. REQUIRES: the items' extents are still reserved."""
    for item in items:
        if item.outcome is Outcome.LOADED and any(ctypes.string_at(item.hold.address + CODECS_AT, 8)):
            item.outcome, item.reason = Outcome.FAILED, ENCODED


def _word(status: str, reason: str) -> str:
    return f"{status.lower()}:{reason}" if reason else status.lower()


def _parted(word: str) -> tuple[str, str, str]:
    return word.partition(":")


def _why_unknown(n_keys: int, answer: tuple[bytes, str]) -> str:
    """Why an answer of `exists` means that the medium failed; "" if it does not."""
    found, reason = answer
    if not isinstance(found, bytes) or len(found) != n_keys or found.translate(None, bytes(Presence)):
        return _MISANSWERED
    all_unknown = n_keys and found.count(Presence.UNKNOWN) == n_keys and blames_medium(reason)
    return (reason or "failed") if all_unknown else ""


def _why_failed(operation: str, items: Sequence[Item], answer: None) -> str:
    """Why the outcomes of these items mean that the medium failed; "" if they do not."""
    ends, first = set(map(_ENDED, items)), ""
    for outcome, _ in ends:
        if type(outcome) is not Outcome or outcome not in _OUTCOMES[operation]:
            return _MISANSWERED
    for outcome, reason in ends:
        if outcome is not Outcome.FAILED or not blames_medium(reason):
            return ""
        first = first or reason or "failed"
    return first


def _is_count(count: object) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 1 << 63


def _is_page(page: object, most: int) -> bool:
    return (
        isinstance(page, KeyPage)
        and isinstance(page.cursor, int)
        and 0 <= page.cursor < 1 << 64
        and len(page.keys) <= most + MORE_KEYS
        and all(isinstance(key, bytes) and len(key) == KEY_BYTES for key in page.keys)
    )
