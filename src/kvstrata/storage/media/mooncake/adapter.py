"""Records in a Mooncake Store cluster: its own Python client over the pool's memory, no byte copied on the way.

The client (`mooncake.store.MooncakeDistributedStore` of the wheel mooncake-transfer-engine-non-cuda, 0.3.13 is what
this was measured with) can block for minutes with the GIL held, has no time limit of its own, and crashes when it is
used after `close`.  So this adapter runs in a process of its own unless it is told otherwise, and killing that is what
ends a stuck transfer.

Invariants
1. Every call of the client but setup, register and close is made by a lane, straight from or into the extents; none
   is made before `open` has returned or after `close` has begun to close it.
2. The store keeps the first value of a key and says that it stored the second, so what is there is asked before each
   put, and two puts of a key here at the same time are one.
3. A value that is no record of its key, of the length that the store says, is removed: only then can a put heal it.
   What another instance has put under the key meanwhile may go with it, which costs a miss.
4. `_known` says how long the records are that this process has put or found.  It is a hint: presence is asked of the
   store each time, and a length that has become wrong is found out by the load.
5. The hold of a transfer that Mooncake may go on with after its answer is never dropped here: the end of this process
   frees its bytes, which an adapter host comes to by `quiesce` "never".

Not here: what a Mooncake option means.  Whatever is not one of our fields goes to `setup` as it is.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from kvstrata.errors import StorageError
from kvstrata.native.batches import names_of
from kvstrata.native.copying import CopyOutcome, RecordError, Verifier, record_header
from kvstrata.storage.base import (
    HEAD_BYTES,
    AdapterContext,
    Capabilities,
    Found,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
    Usage,
)
from kvstrata.storage.lanes import Lane, Lanes
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold

log = logging.getLogger(__name__)

T = TypeVar("T")

SETUP_KEYS = (
    "local_hostname", "metadata_server", "global_segment_size", "local_buffer_size", "protocol", "rdma_devices",
    "master_server_addr", "ipc_socket_path", "enable_ssd_offload", "ssd_offload_path", "tenant_id",
    "enable_client_http_server", "client_http_port",
)  # fmt: skip
"""What Mooncake's setup of the version above reads. Others are passed on as well, and said to be."""
DEFAULT_MASTER = "127.0.0.1:50051"
KEY_PREFIX = "kvstrata-"
"""All instances of a cluster share it."""
PROBE_S = 1.5
"""Longest wait for a connection, or for the answer on it, before the client is set up."""
GIVEN_UP_S = 10.0
"""A call that fails (`transfer`) sooner has heard from the other side that it is over.  After 60 s Mooncake answers
by itself, and writes the bytes all the same when a holder that was stopped goes on (seen over tcp)."""
KNOWN_LENGTHS = 1 << 17
LARGEST_RECORD_BYTES = (1 << 32) - 1
VERIFIERS = 4
"""Threads that check the records of a batch, that of its lane included."""
CLOSED, BAD_ITEM, QUEUE_FULL, RAISED = "closed", "bad_item", "queue_full", "raised"

_NICS = Path("/sys/class/infiniband")
_APT = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4", "libnl-3": "libnl-3-200"}

_OK = 0
_FULL, _NO_REPLICA_YET, _NO_OBJECT, _EXISTS, _REPLICA_GONE = -200, -703, -704, -705, -712
_PARAMETERS, _TRANSFER = -600, -800
_REASONS = {
    -101: "no_segment", _FULL: "full", _PARAMETERS: "parameters", -707: "lease_expired", _TRANSFER: "transfer",
    -900: "rpc",
}  # fmt: skip
"""Of Mooncake's ErrorCode (mooncake-store/include/types.h)."""

# A request of Mooncake's RPC (coro_rpc): magic, version, serialisation, kind, sequence, function, body and attachment
# length. The function is ServiceReady, which takes nothing and answers with the store's version.
_ASK_READY = struct.pack("<BBBBIIII", 21, 0, 0, 0, 1, 0x7B81BB56, 0, 0)
_REPLY = struct.Struct("<BBBBIII")
MOST_REPLY_BYTES = 4096
_MAGIC = 21


class MooncakeSettings(NamedTuple):
    """Checked fields of an entry."""

    setup: Mapping[str, str | float | bool]
    """For Mooncake's `setup`, as they were given."""
    replicate: Mapping[str, Any] = {}
    """Attributes of the ReplicateConfig of every put."""
    preregister: bool = True
    num_workers: int = 4
    per_op_workers: Mapping[Lane, int] = {}


class MooncakeAdapter(StorageAdapter):
    """See the module. Nothing is reserved, connected or imported before `open`."""

    def __init__(self, settings: MooncakeSettings, *, name: str = "mooncake_store") -> None:
        self.name = name
        self.settings = settings
        self.capabilities = Capabilities(
            persistent=False, shared=True, wants_registered_memory=settings.preregister, quiesce="never"
        )
        self._lanes = Lanes(name, num_workers=settings.num_workers, per_op_workers=settings.per_op_workers)
        self._verifier = Verifier(min(VERIFIERS, os.cpu_count() or 1) - 1)
        self._store: Any = None
        self._replicate: Any = None
        self._largest_bytes = LARGEST_RECORD_BYTES
        self._known: dict[bytes, Found] = {}
        self._known_bytes = 0
        self._known_lock = threading.Lock()
        self._kept: dict[int, Hold] = {}
        """Holds that are never dropped, by their id."""
        self._putting: dict[bytes, asyncio.Future[PutStatus]] = {}
        self._running: set[asyncio.Future[Any]] = set()
        self._opened = False
        self._closed = False

    # --- life --------------------------------------------------------------------------------------------

    async def open(self, context: AdapterContext) -> None:
        """Look whether the servers answer, set the client up and register the pool. Raises StorageError."""
        try:
            await self._in_lane(Lane.DELETE, lambda: self._set_up(context))
        except StorageError:
            self._closed = True
            await self._lanes.close()
            raise
        self._largest_bytes = min(LARGEST_RECORD_BYTES, context.region_bytes)
        self._opened = True

    async def close(self) -> None:
        """Wait for what is in flight, close the client, end the threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        while self._running:
            await asyncio.wait(set(self._running))
        if self._opened:
            code = await self._in_lane(Lane.DELETE, self._store.close)
            if code:
                log.warning("%s: Mooncake's close answered %d", self.name, code)
        await self._lanes.close()

    def _set_up(self, context: AdapterContext) -> None:
        setup = self.settings.setup
        check_nics(self.name, str(setup.get("protocol", "tcp")), str(setup.get("rdma_devices", "")))
        module = import_store(self.name)
        self._replicate = self._replicate_config(module)
        master = str(setup.get("master_server_addr") or DEFAULT_MASTER)
        version = ""
        if "://" not in master:  # else it is named by the cluster's etcd, redis or Kubernetes
            version = ask_master(self.name, master)
        metadata_server = urlsplit(str(setup.get("metadata_server", "")))
        if metadata_server.scheme in ("http", "https"):
            port = metadata_server.port or (443 if metadata_server.scheme == "https" else 80)
            connect(self.name, "metadata_server", f"{metadata_server.hostname}:{port}").close()
        store = module.MooncakeDistributedStore()
        code = store.setup(dict(setup))
        if code:
            raise self._wrong(
                f"Mooncake's setup answered {code}; what it says about that stands in the log above. Its options are"
                f" {dict(setup)}" + (f"; the master's version is {version}" if version else "")
            )
        if self.settings.preregister and (
            code := store.register_buffer(context.region_address, context.region_bytes)
        ):
            store.close()
            raise self._wrong(
                f"preregister_l1_memory: the pool of {context.region_bytes} bytes could not be registered, Mooncake"
                f" answered {code}; raise the limit of locked memory (ulimit -l), or set it to false"
            )
        self._store = store
        log.info("%s: connected to the master at %s, version %s", self.name, master, version or "unknown")

    def _replicate_config(self, module: Any) -> Any:
        config = module.ReplicateConfig()
        known = [name for name in dir(config) if not name.startswith("_")]
        for name, value in self.settings.replicate.items():
            if name not in known:
                raise self._wrong(f"replicate.{name}: this Mooncake has {', '.join(known)}")
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

    def _wrong(self, what: str) -> StorageError:
        return StorageError(f"{self.name}: {what}", field=self.name)

    # --- the contract ------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """One call of the store, and another for keys whose length is not known here."""
        if reason := self._not_ready():
            return [Found(Presence.UNKNOWN, 0, reason)] * len(keys)
        try:
            names = names_of(KEY_PREFIX, keys)
        except ValueError:  # a key of another length
            return [Found(Presence.UNKNOWN, 0, BAD_ITEM)] * len(keys)
        if not names:
            return []
        asked = self._lanes.submit(Lane.LOOKUP, lambda: self._store.batch_is_exist(names))
        if asked is None:
            return [Found(Presence.UNKNOWN, 0, "throttled")] * len(keys)
        known = [*map(self._known.get, keys)]  # takes no time: the lane's thread wakes and asks meanwhile
        codes: list[int] = await self._own(asked)
        if codes.count(1) == len(keys) and all(known):
            return cast("list[Found]", known)
        found = [_found(code, there) for code, there in zip(codes, known, strict=True)]
        places = [place for place, answer in enumerate(found) if answer is None]
        gone = [key for key, code, there in zip(keys, codes, known, strict=True) if there and code == 0]
        if places or gone:
            lengths = await self._own(self._look_closer([keys[place] for place in places], gone))
            for place, answer in zip(places, lengths, strict=True):
                found[place] = answer
        return cast("list[Found]", found)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """One call of the store for what it does not have. A cancelled wait lets the batch go on to its end."""
        return await self._own(self._put_batch(list(items)))

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """One call of the store. A cancelled wait lets the batch go on to its end."""
        outcomes = [LoadOutcome(LoadStatus.FAILED, self._not_ready() or BAD_ITEM)] * len(items)
        places = self._acceptable(items)
        if not places:
            return outcomes
        batch = [items[place] for place in places]
        future = self._lanes.submit(Lane.LOAD, lambda: self._read(batch))
        if future is None:
            self._drop(batch)
            loaded = [LoadOutcome(LoadStatus.FAILED, "throttled")] * len(batch)
        else:
            loaded = await self._own(future)
        for place, outcome in zip(places, loaded, strict=True):
            outcomes[place] = outcome
        return outcomes

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Remove records, also such as somebody has a lease on."""
        keys = [key for key in keys if len(key) == KEY_BYTES]
        if self._not_ready() or not keys:
            return 0
        return await self._own(self._in_lane(Lane.DELETE, lambda: self._remove(keys).count(_OK)))

    async def clear(self) -> int:
        """Remove the records of all instances. Raises StorageError where the store does not."""
        if self._not_ready():
            return 0
        removed = await self._own(self._in_lane(Lane.DELETE, self._remove_all))
        if removed < 0:
            raise self._wrong(f"not cleared: {_reason(removed)}")
        return removed

    async def usage(self) -> Usage:
        """What this process has put or found there: the store does not tell what belongs to us."""
        with self._known_lock:
            return Usage(self._known_bytes, 0, len(self._known))

    # --- on the event loop -------------------------------------------------------------------------------

    async def _put_batch(self, items: list[PutItem]) -> list[PutOutcome]:
        outcomes = [PutOutcome(PutStatus.FAILED, self._not_ready() or BAD_ITEM)] * len(items)
        loop = asyncio.get_running_loop()
        firsts: list[int] = []
        others: list[tuple[int, asyncio.Future[PutStatus]]] = []
        for place in self._acceptable(items):
            key = items[place].key
            if key in self._putting:
                items[place].hold.drop()
                others.append((place, self._putting[key]))
            else:
                self._putting[key] = loop.create_future()
                firsts.append(place)
        batch = [items[place] for place in firsts]
        stored = [PutOutcome(PutStatus.FAILED, RAISED)] * len(batch)
        try:
            future = self._lanes.submit(Lane.PUT, lambda: self._write(batch)) if batch else None
            if future is not None:
                stored = await future
            elif batch:
                self._drop(batch)
                stored = [PutOutcome(PutStatus.THROTTLED, QUEUE_FULL)] * len(batch)
        finally:  # also when Mooncake's client raises: puts that wait for these keys go on
            for place, outcome in zip(firsts, stored, strict=True):
                outcomes[place] = outcome
                self._putting.pop(items[place].key).set_result(outcome.status)
        for place, first in others:
            there = await first in (PutStatus.STORED, PutStatus.EXISTS)
            outcomes[place] = (
                PutOutcome(PutStatus.EXISTS) if there else PutOutcome(PutStatus.THROTTLED, "throttled")
            )
        return outcomes

    def _acceptable(self, items: Sequence[PutItem | LoadItem]) -> list[int]:
        """Places of the items that the store gets; the holds of the others are dropped."""
        ready = not self._not_ready()
        places = [place for place, item in enumerate(items) if ready and len(item.key) == KEY_BYTES]
        for place in set(range(len(items))).difference(places):
            items[place].hold.drop()
        return places

    def _not_ready(self) -> str:
        return "" if self._opened and not self._closed else CLOSED

    async def _own(self, work: Awaitable[T]) -> T:
        """Cancelling the call ends the wait, not the work."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _in_lane(self, lane: Lane, work: Callable[[], T]) -> T:
        future = self._lanes.submit(lane, work, beyond_limit=True)
        assert future is not None
        return await future

    async def _look_closer(self, there: list[bytes], gone: list[bytes]) -> list[Found]:
        """Of keys that are there and whose length is not known; forget that of others."""
        if reason := self._not_ready():
            return [Found(Presence.UNKNOWN, 0, reason)] * len(there)

        def ask() -> None:
            self._ask_lengths(there)
            self._forget(gone)

        await self._in_lane(Lane.LOOKUP, ask)
        return [self._known.get(key, _ABSENT) for key in there]

    # --- in threads of the lanes -------------------------------------------------------------------------

    def _ask_lengths(self, keys: list[bytes]) -> None:
        """Of values that are there; what is too short to be a record is removed."""
        if not keys:
            return
        replicas = self._store.batch_get_replica_desc([_name(key) for key in keys])
        lengths = {key: self._length(_name(key), replicas.get(_name(key), [])) for key in keys}
        foreign = [key for key, length in lengths.items() if 0 < length < HEAD_BYTES]
        if foreign:
            log.warning("%s: removes %d values that are no records", self.name, len(foreign))
            self._remove(foreign)
        self._learn({key: length for key, length in lengths.items() if length >= HEAD_BYTES})

    def _length(self, name: str, replicas: Sequence[Any]) -> int:
        for replica in replicas:
            if replica.is_memory_replica():
                return int(replica.get_memory_descriptor().buffer_descriptor.size)
            if replica.is_disk_replica():
                return int(replica.get_disk_descriptor().object_size)
        return max(0, self._store.get_size(name)) if replicas else 0

    def _write(self, items: list[PutItem]) -> list[PutOutcome]:
        """Puts of different keys."""
        try:
            there = self._store.batch_is_exist([_name(item.key) for item in items])
            absent = [item for item, code in zip(items, there, strict=True) if code != 1]
            codes = self._transfer(self._store.batch_put_from, absent, self._replicate)
            stored = {item.key: code for item, code in zip(absent, codes, strict=True)}
            self._learn({item.key: item.hold.length for item in absent if stored[item.key] == _OK})
            return [_put_outcome(stored.get(item.key, _EXISTS)) for item in items]
        finally:
            self._drop(items)

    def _read(self, items: list[LoadItem]) -> list[LoadOutcome]:
        try:
            keys = [item.key for item in items]
            # Of a key that comes twice in a call the store fills one place only, and answers well for both.
            batches = [items] if len(set(keys)) == len(keys) else [[item] for item in items]
            codes = [code for batch in batches for code in self._transfer(self._store.batch_get_into, batch)]
            sound = self._sound(items, codes)
            return [
                _LOADED if place in sound else self._not_loaded(items[place].key, items[place].hold, code)
                for place, code in enumerate(codes)
            ]
        finally:
            self._drop(items)

    def _transfer(self, call: Any, items: Sequence[PutItem | LoadItem], *more: Any) -> list[int]:
        """The answers of one call. Bytes that may still be read or written after it are held for good."""
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
                what = "%s: Mooncake gave up %d transfers that may still go on, their bytes stay until its host ends"
                log.warning(what, self.name, len(late))
                self._kept.update((id(hold), hold) for hold in late)
        return codes

    def _drop(self, items: Sequence[PutItem | LoadItem]) -> None:
        for item in items:
            if id(item.hold) not in self._kept:
                item.hold.drop()

    def _sound(self, items: list[LoadItem], codes: list[int]) -> set[int]:
        """Places of the items that were read whole and are sound records of their keys."""
        read = [place for place, code in enumerate(codes) if code == items[place].hold.length]
        records = [(items[place].hold.address, items[place].hold.length, items[place].key) for place in read]
        outcomes = self._verifier.verify_stored(records)
        return {place for place, outcome in zip(read, outcomes, strict=True) if outcome == CopyOutcome.OK}

    def _not_loaded(self, key: bytes, hold: Hold, code: int) -> LoadOutcome:
        """What became of an item that is not there or not sound; `code` is the bytes read, or an error."""
        if code in (_NO_OBJECT, _NO_REPLICA_YET, _REPLICA_GONE):
            self._forget([key])
            return LoadOutcome(LoadStatus.ABSENT)
        if code < 0 and code != _PARAMETERS:
            return LoadOutcome(LoadStatus.FAILED, _reason(code))
        if code != hold.length and self._is_record_of_another_length(key, hold):
            self._forget([key])
            return LoadOutcome(LoadStatus.FAILED, "length")
        [removed] = self._remove([key])
        if removed == _NO_OBJECT:  # it was removed while it was read
            return LoadOutcome(LoadStatus.ABSENT)
        return LoadOutcome(LoadStatus.CORRUPT)

    def _is_record_of_another_length(self, key: bytes, hold: Hold) -> bool:
        """Whether the stored value is a record of that key as its headers say; overwrites the extent's beginning."""
        name = _name(key)
        stored_bytes = self._store.get_size(name)
        if hold.length < HEAD_BYTES or stored_bytes < HEAD_BYTES or stored_bytes == hold.length:
            return False
        ranges = ([hold.address], [[name]], [[[0]]], [[[0]]], [[[HEAD_BYTES]]])
        if self._store.get_into_ranges(*ranges) != [[[HEAD_BYTES]]]:
            return False
        try:
            header = record_header(hold.address, stored_bytes)
        except RecordError:
            return False
        return header.key == key and header.header_bytes + header.stored_bytes == stored_bytes

    def _remove(self, keys: Sequence[bytes]) -> list[int]:
        self._forget(keys)
        return list(self._store.batch_remove([_name(key) for key in keys], True))

    def _remove_all(self) -> int:
        with self._known_lock:
            self._known.clear()
            self._known_bytes = 0
        return int(self._store.remove_by_regex(f"^{KEY_PREFIX}.*", True))

    def _learn(self, lengths: Mapping[bytes, int]) -> None:
        """Lengths of records that are there; one that this pool cannot hold is not."""
        with self._known_lock:
            for key, length in lengths.items():
                self._drop_known(key)
                if length <= self._largest_bytes:
                    self._known[key] = _present(length)
                    self._known_bytes += length
            if len(self._known) > KNOWN_LENGTHS:
                # Some more than must, at once: each look for the oldest passes over the places of those that went.
                too_many = len(self._known) - KNOWN_LENGTHS + KNOWN_LENGTHS // 16
                for key in list(itertools.islice(self._known, too_many)):
                    self._drop_known(key)

    def _forget(self, keys: Sequence[bytes]) -> None:
        with self._known_lock:
            for key in keys:
                self._drop_known(key)

    def _drop_known(self, key: bytes) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._known_bytes -= known.record_bytes


_ABSENT = Found(Presence.ABSENT)
_LOADED = LoadOutcome(LoadStatus.LOADED)


@functools.lru_cache(maxsize=64)
def _present(record_bytes: int) -> Found:
    """One for all records of a length, which nearly all have."""
    return Found(Presence.PRESENT, record_bytes)


def _found(code: int, known: Found | None) -> Found | None:
    """What the answer of `batch_is_exist` means; None: there, of unknown length."""
    if code == 1:
        return known
    return _ABSENT if code == 0 else Found(Presence.UNKNOWN, 0, _reason(code))


def _put_outcome(code: int) -> PutOutcome:
    if code == _OK:
        return PutOutcome(PutStatus.STORED)
    if code == _EXISTS:
        return PutOutcome(PutStatus.EXISTS)
    return PutOutcome(PutStatus.THROTTLED if code == _FULL else PutStatus.FAILED, _reason(code))


def _reason(code: int) -> str:
    return _REASONS.get(code) or f"code_{-code}"


def _name(key: bytes) -> str:
    return KEY_PREFIX + key.hex()


# --- before the client is set up ---------------------------------------------------------------------------


def import_store(name: str) -> Any:
    """The module `mooncake.store`. Raises StorageError with the line that installs what is missing."""
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mooncake":
            raise
        what = "mooncake_store needs Mooncake's client: pip install 'kvstrata[mooncake]'"
        raise StorageError(f"{name}: {what}", field=name) from None
    except ImportError as error:
        library = re.search(r"(lib[\w+.-]*?)\.so[.\d]*: cannot open shared object file", str(error))
        if library is None:
            advice = "reinstall it: pip install --force-reinstall 'kvstrata[mooncake]'"
        elif library[1] == "libcuda":
            advice = "the wheel for CUDA is installed, without a GPU: pip install 'kvstrata[mooncake]'"
        else:
            advice = f"on Debian or Ubuntu: apt-get install {_APT.get(library[1], library[1])}"
        raise StorageError(
            f"{name}: Mooncake's client cannot be loaded: {error}; {advice}", field=name
        ) from None


def check_nics(name: str, protocol: str, rdma_devices: str) -> None:
    """Raise StorageError for `rdma` without the network cards that it names; Mooncake would accept that."""
    if protocol != "rdma":
        return
    present = sorted(nic.name for nic in _NICS.iterdir()) if _NICS.is_dir() else []
    if not present:
        raise StorageError(
            f"{name}: protocol: 'rdma' needs an RDMA network card and {_NICS} has none; use 'tcp'", field=name
        )
    missing = [nic for nic in rdma_devices.replace(",", " ").split() if nic not in present]
    if missing:
        raise StorageError(
            f"{name}: rdma_devices: {', '.join(missing)} not found here, there are {', '.join(present)}",
            field=name,
        )


def connect(name: str, field: str, address: str) -> socket.socket:
    """A connection to `host:port`. Raises StorageError naming field and address."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S)
    except ValueError:
        raise StorageError(f"{name}: {field}: must be host:port, found {address!r}", field=name) from None
    except OSError as error:
        what = f"nothing can be reached at {address}: {error}; start it or correct the address"
        raise StorageError(f"{name}: {field}: {what}", field=name) from None


def ask_master(name: str, address: str) -> str:
    """The version that the master there says it has. Raises StorageError where none answers."""
    field = "master_server_addr"
    with connect(name, field, address) as connection:
        try:
            connection.sendall(_ASK_READY)
            reply = b""
            while not reply or (reply[0] == _MAGIC and len(reply) < _reply_bytes(reply)):
                part = connection.recv(MOST_REPLY_BYTES)
                if not part or len(reply) > MOST_REPLY_BYTES:
                    break
                reply += part
        except TimeoutError:
            what = "accepts connections and says nothing; it is frozen, overloaded or no Mooncake master"
            raise StorageError(f"{name}: {field}: {address} {what}", field=name) from None
        except OSError as error:
            raise StorageError(f"{name}: {field}: {address} hangs up: {error}", field=name) from None
    if len(reply) < _REPLY.size or reply[0] != _MAGIC or _REPLY.unpack_from(reply)[2] != 0:
        what = f"is no Mooncake master, it answered {reply!r:.60}"
        raise StorageError(f"{name}: {field}: {address} {what}", field=name)
    version = re.search(rb"\d+(\.\d+)+$", reply)
    return version[0].decode() if version else ""


def _reply_bytes(reply: bytes) -> int:
    """Of the whole one, as far as its beginning tells."""
    return _REPLY.size + (_REPLY.unpack_from(reply)[5] if len(reply) >= _REPLY.size else 0)
