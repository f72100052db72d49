"""Records in a Mooncake Store cluster: Mooncake's Python client transfers them straight from and into the pool.

The client is `mooncake.store.MooncakeDistributedStore` of the wheel mooncake-transfer-engine-non-cuda (measured with
0.3.13).  It can block for minutes with the GIL held, has no time limit of its own, and crashes when it is used after
`close`.  So this adapter runs in a process of its own by default, and killing that process ends a stuck transfer.

Invariants
1. Threads of the lanes make all calls of the client; the bytes go straight from and into the extents.  The client is
   set up before any other call of it, and closed after all other calls have ended.
2. The store keeps the first value of a key but says that it stored the second.  So each put first asks whether the key
   is there, and of two simultaneous puts of a key in this process only one reaches the store.
3. A value that is not a record of its key is removed when a load finds it, since only then can a put store the record.
   This may remove a value that another instance put meanwhile, which costs a miss.
4. If Mooncake may continue a transfer after its answer, the hold is never dropped here.  The end of this process frees
   its bytes; `quiesce` "never" tells the server to kill the adapter host for that.

Mooncake's options are not interpreted here: every field that is not ours goes to `setup` unchanged.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvstrata.errors import ConfigError, StorageError
from kvstrata.keys.batch import split
from kvstrata.native.core import CopyOutcome, Verifier
from kvstrata.observability.logging import Thinning
from kvstrata.tiers.base import (
    AdapterContext,
    Ask,
    Capabilities,
    Item,
    Outcome,
    Presence,
    StorageAdapter,
    Usage,
)
from kvstrata.tiers.lanes import Lane, Lanes
from kvstrata.tiers.media.mooncake.sdk import check_answers, check_nics, import_store
from kvstrata.tiers.media.shared import medium_name
from kvstrata.tiers.reasons import FULL, QUEUE_FULL, THROTTLED
from kvstrata.tiers.work import Work

if TYPE_CHECKING:
    from kvstrata.native.core import Hold
    from kvstrata.tiers.media.mooncake.config import MooncakeConfig

log = logging.getLogger(__name__)
_thinning = Thinning()

SETUP_KEYS = (
    "local_hostname", "metadata_server", "global_segment_size", "local_buffer_size", "protocol", "rdma_devices",
    "master_server_addr", "ipc_socket_path", "enable_ssd_offload", "ssd_offload_path", "tenant_id",
    "enable_client_http_server", "client_http_port",
)  # fmt: skip
"""Options that `setup` reads in the version of Mooncake named above. Other options are passed on with a warning."""
DEFAULT_MASTER = "127.0.0.1:50051"
KEY_PREFIX = "kvstrata-"
"""All instances of a Mooncake cluster use the same prefix."""
GIVEN_UP_S = 10.0
"""A transfer that fails sooner than this was reported as ended by the other side.  If it fails later, Mooncake has
abandoned it (after 60 s), and its bytes may still be written when a stopped process with the value continues (observed
over tcp)."""
MOST_COUNTED = 1 << 17
"""Maximum number of records that `usage` counts; beyond it the oldest are forgotten."""
VERIFIERS = 4
"""Number of threads that verify the records of a batch, including the lane's own thread."""

_OK = 0
_FULL, _NO_REPLICA_YET, _NO_OBJECT, _EXISTS, _REPLICA_GONE = -200, -703, -704, -705, -712
_PARAMETERS, _TRANSFER = -600, -800
_REASONS = {
    -101: "no_segment", _FULL: FULL, _PARAMETERS: "parameters", -707: "lease_expired", _TRANSFER: "transfer",
    -900: "rpc",
}  # fmt: skip
"""Reason codes by Mooncake's ErrorCode (mooncake-store/include/types.h)."""


class MooncakeAdapter(StorageAdapter):
    """The `mooncake_store` adapter. It reserves, connects and imports nothing before `open`.

    `config`: the checked fields of an entry, with Mooncake's own names of its options.
    """

    def __init__(self, config: MooncakeConfig, *, name: str = "mooncake_store") -> None:
        self.name = name
        self.config = config
        self.capabilities = Capabilities(
            persistent=False,
            shared=True,
            medium=medium_name(
                "mooncake", hosts=[str(config.setup.get("master_server_addr") or DEFAULT_MASTER)]
            ),
            wants_registered_memory=config.preregister_l1_memory,
            quiesce="never",
        )
        self._lanes = Lanes(name, num_workers=config.num_workers, per_op_workers=config.per_op_workers)
        self._verifier = Verifier(min(VERIFIERS, os.cpu_count() or 1) - 1)
        self._store: Any = None
        self._replicate: Any = None
        self._stored: dict[bytes, int] = {}
        """The lengths of the last records that this process has put, for `usage`."""
        self._counting = threading.Lock()
        self._kept: dict[int, Hold] = {}
        """Holds that are never dropped (invariant 4), by their `id()`."""
        self._putting: dict[bytes, asyncio.Future[Outcome]] = {}
        self._work = Work(name)
        self._opened = False
        self._closed = False

    # --- life --------------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Check that the servers answer, set the client up and register the pool. Raises StorageError, ConfigError."""
        try:
            await self._lanes.run(Lane.DELETE, lambda: self._set_up(context))
        except (StorageError, ConfigError):
            self._closed = True
            await self._lanes.close()
            raise
        self._opened = True

    async def close(self) -> None:
        """Wait for the operations in flight, close the client, end the threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._work.ended()
        if self._opened:
            code = await self._lanes.run(Lane.DELETE, self._store.close)
            if code:
                log.warning("%s: Mooncake's close answered %d", self.name, code)
        await self._lanes.close()

    def _set_up(self, context: AdapterContext) -> None:
        setup = self.config.setup
        check_nics(self.name, str(setup.get("protocol", "tcp")), str(setup.get("rdma_devices", "")))
        module = import_store(self.name)
        self._replicate = self._replicate_config(module)
        master = str(setup.get("master_server_addr") or DEFAULT_MASTER)
        if "://" not in master:  # with a scheme, an etcd, Redis or Kubernetes of the cluster names the master
            check_answers(self.name, "master_server_addr", master)
        metadata_server = urlsplit(str(setup.get("metadata_server", "")))
        if metadata_server.scheme in ("http", "https"):
            port = metadata_server.port or (443 if metadata_server.scheme == "https" else 80)
            check_answers(self.name, "metadata_server", f"{metadata_server.hostname}:{port}")
        store = module.MooncakeDistributedStore()
        code = store.setup(dict(setup))
        if code:
            raise StorageError(
                f"{self.name}: Mooncake's setup answered {code}; Mooncake's own lines say why. Its options are"
                f" {dict(setup)}",
                field=self.name,
            )
        if self.config.preregister_l1_memory and (
            code := store.register_buffer(context.region_address, context.region_bytes)
        ):
            store.close()
            raise self._wrong(
                f"preregister_l1_memory: the pool of {context.region_bytes} bytes could not be registered, Mooncake"
                f" answered {code}; raise the limit of locked memory (ulimit -l), or set preregister_l1_memory to false"
            )
        self._store = store
        log.info("%s: connected to the master at %s", self.name, master)

    def _replicate_config(self, module: Any) -> Any:
        config = module.ReplicateConfig()
        known = [name for name in dir(config) if not name.startswith("_")]
        for name, value in (self.config.replicate or {}).items():
            if name not in known:
                raise self._wrong(
                    f"replicate.{name}: not an option of this Mooncake, which has {', '.join(known)}"
                )
            members = getattr(type(getattr(config, name)), "__members__", None)  # of an enumeration
            if members is not None and value not in members:
                raise self._wrong(
                    f"replicate.{name}: must be one of {', '.join(members)}, found {value!r:.80}"
                )
            try:
                setattr(config, name, value if members is None else members[value])
            except TypeError:
                kind = type(getattr(config, name)).__name__
                raise self._wrong(f"replicate.{name}: must be of type {kind}, found {value!r:.80}") from None
        return config

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"{self.name}: {what}", field=self.name)

    # --- the contract ------------------------------------------------------------------------------------

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """Ask the store once for all keys."""
        names = [_name(key) for key in split(keys)]
        if not names:
            return b""
        asked = self._lanes.submit(Lane.LOOKUP, lambda: self._store.batch_is_exist(names))
        if asked is None:
            return ask.unknown(keys, THROTTLED)
        codes: list[int] = await self._work.own(asked)
        ask.reason = next((_reason(code) for code in codes if code not in (0, 1)), "")
        return bytes([code if code in (0, 1) else Presence.UNKNOWN for code in codes])

    async def put(self, items: Sequence[Item]) -> None:
        """Put the records that the store lacks, in one call. A cancelled wait lets the batch go on to its end."""
        await self._work.own(self._put_batch(items))

    async def load(self, items: Sequence[Item]) -> None:
        """Load all records in one call. A cancelled wait lets the batch go on to its end."""
        if items:
            await self._work.own(self._move(Lane.LOAD, self._read, items, (Outcome.FAILED, THROTTLED)))

    async def delete(self, keys: bytes) -> int:
        """Remove records, even those that the store has leased to readers."""
        return await self._work.own(
            self._lanes.run(Lane.DELETE, lambda: self._remove(split(keys)).count(_OK))
        )

    async def clear(self) -> int:
        """Remove the records of all instances. Raises StorageError if the store refuses."""
        removed = await self._work.own(self._lanes.run(Lane.DELETE, self._remove_all))
        if removed < 0:
            raise StorageError(f"{self.name}: not cleared: {_reason(removed)}", field=self.name)
        return removed

    async def usage(self) -> Usage:
        """The last records that this process has put: the store cannot tell which of its records are ours."""
        with self._counting:
            return Usage(sum(self._stored.values()), 0, len(self._stored))

    # --- on the event loop -------------------------------------------------------------------------------

    async def _put_batch(self, items: Sequence[Item]) -> None:
        loop = asyncio.get_running_loop()
        firsts: list[Item] = []
        others: list[tuple[Item, asyncio.Future[Outcome]]] = []
        for item in items:
            if item.key in self._putting:
                item.hold.drop()
                others.append((item, self._putting[item.key]))
            else:
                self._putting[item.key] = loop.create_future()
                firsts.append(item)
        try:
            if firsts:
                await self._move(Lane.PUT, self._write, firsts, (Outcome.THROTTLED, QUEUE_FULL))
        finally:  # also when Mooncake's client raises, since other puts wait for these keys
            for item in firsts:
                self._putting.pop(item.key).set_result(item.outcome)
        for item, first in others:
            there = await first in (Outcome.STORED, Outcome.EXISTS)
            item.outcome, item.reason = (Outcome.EXISTS, "") if there else (Outcome.THROTTLED, THROTTLED)

    async def _move(
        self,
        lane: Lane,
        work: Callable[[Sequence[Item]], None],
        items: Sequence[Item],
        full: tuple[Outcome, str],
    ) -> None:
        """Run `work`, which settles the items, in a lane; if the lane is full, they are settled as `full`."""
        future = self._lanes.submit(lane, lambda: work(items))
        if future is not None:
            await future
            return
        for item in items:
            item.settle(*full)

    # --- in threads of the lanes -------------------------------------------------------------------------

    def _write(self, items: Sequence[Item]) -> None:
        """Put records, whose keys must be distinct."""
        try:
            there = self._store.batch_is_exist([_name(item.key) for item in items])
            codes = dict.fromkeys([item.key for item in items], _EXISTS)
            absent = [item for item, code in zip(items, there, strict=True) if code != 1]
            put = self._transfer(self._store.batch_put_from, absent, self._replicate)
            codes.update(zip([item.key for item in absent], put, strict=True))
            with self._counting:
                self._stored.update({item.key: item.hold.length for item in absent if codes[item.key] == _OK})
                for key in list(itertools.islice(self._stored, max(0, len(self._stored) - MOST_COUNTED))):
                    del self._stored[key]
            for item in items:
                item.outcome, item.reason = _put_outcome(codes[item.key])
        finally:
            self._drop(items)

    def _read(self, items: Sequence[Item]) -> None:
        try:
            keys = [item.key for item in items]
            # If a key comes twice in one call, the store fills only one of the extents, and reports success for both.
            batches = [items] if len(set(keys)) == len(keys) else [[item] for item in items]
            codes = [code for batch in batches for code in self._transfer(self._store.batch_get_into, batch)]
            sound = self._sound(items, codes)
            for place, code in enumerate(codes):
                item = items[place]
                item.outcome, item.reason = (
                    (Outcome.LOADED, "") if place in sound else self._not_loaded(item.key, code)
                )
        finally:
            self._drop(items)

    def _transfer(self, call: Any, items: Sequence[Item], *more: Any) -> list[int]:
        """The codes of one call. Extents that Mooncake may still read or write after it stay held (invariant 4)."""
        holds = [item.hold for item in items]
        begun_s = time.monotonic()
        codes: list[int] = call(
            [_name(item.key) for item in items],
            [hold.address for hold in holds],
            [hold.length for hold in holds],
            *more,
        )
        if time.monotonic() - begun_s >= GIVEN_UP_S:
            late = [hold for hold, code in zip(holds, codes, strict=True) if code == _TRANSFER]
            if late:
                what = "%s: Mooncake gave up %d transfers that may still run; their bytes stay held until its host ends"
                _thinning.log(log, logging.WARNING, "late", what, self.name, len(late))
                self._kept.update((id(hold), hold) for hold in late)
        return codes

    def _drop(self, items: Sequence[Item]) -> None:
        for item in items:
            if id(item.hold) not in self._kept:
                item.hold.drop()

    def _sound(self, items: Sequence[Item], codes: list[int]) -> set[int]:
        """Indices of the items that were read completely and are sound records of their keys."""
        read = [place for place, code in enumerate(codes) if code > 0]
        records = [(items[place].hold.address, codes[place], items[place].key) for place in read]
        outcomes = self._verifier.verify_stored(records)
        return {place for place, outcome in zip(read, outcomes, strict=True) if outcome == CopyOutcome.OK}

    def _not_loaded(self, key: bytes, code: int) -> tuple[Outcome, str]:
        """The outcome of an item that is absent or not sound; `code` is the number of bytes read, or an error."""
        if code in (_NO_OBJECT, _NO_REPLICA_YET, _REPLICA_GONE):
            return Outcome.ABSENT, ""
        if code < 0 and code != _PARAMETERS:
            return Outcome.FAILED, _reason(code)
        [removed] = self._remove([key])
        if removed == _NO_OBJECT:  # another client removed the value while it was being read
            return Outcome.ABSENT, ""
        return Outcome.CORRUPT, ""

    def _remove(self, keys: Sequence[bytes]) -> list[int]:
        with self._counting:
            for key in keys:
                self._stored.pop(key, None)
        return list(self._store.batch_remove([_name(key) for key in keys], True))

    def _remove_all(self) -> int:
        with self._counting:
            self._stored.clear()
        return int(self._store.remove_by_regex(f"^{KEY_PREFIX}.*", True))


def _put_outcome(code: int) -> tuple[Outcome, str]:
    if code in (_OK, _EXISTS):
        return Outcome.STORED if code == _OK else Outcome.EXISTS, ""
    return Outcome.THROTTLED if code == _FULL else Outcome.FAILED, _reason(code)


def _reason(code: int) -> str:
    return _REASONS.get(code) or f"code_{-code}"


def _name(key: bytes) -> str:
    return KEY_PREFIX + key.hex()
