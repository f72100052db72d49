"""`kvstrata bench`: the speed that a running server on this host gives an engine, beside a plain memcpy.

The command attaches as an engine does, with two sets of blocks and without a model.  In a round it copies the chunks
from the first set to the second by memcpy, stores them from the first set under fresh keys, wipes the second set, looks
the chunks up, loads them into the second set, and compares every byte.  Between rounds the chunks are cleared (unless
the user named the tenant), and a round is no larger than the free part of L1.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvstrata import __version__
from kvstrata.cli.asking import Ask, ask, read_token, usual_url
from kvstrata.cli.bench import whole
from kvstrata.cli.boundary import guarded
from kvstrata.cli.table import table
from kvstrata.client import CacheClient, LoadItem, StoreOutcome
from kvstrata.client.client import COPY_THREADS
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.model import HttpSettings
from kvstrata.errors import InternalError, KvstrataError, Refused, Unavailable
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.measure.figures import chain_of, machine, median_spread, percentile
from kvstrata.memory.paths import socket_dirs
from kvstrata.native.core import CopyEngine
from kvstrata.rpc.wire import SESSION_BYTES
from kvstrata.server.processes import tenant_number
from kvstrata.types import (
    KEY_BYTES,
    LayoutIdentity,
    LeaseName,
    MissReason,
    RequestIdentity,
    Role,
    unpack_extents,
)

MB = 1 << 20
L1_SHARE = 0.75
"""Share of L1 that may be filled; eviction ahead of need begins above it (at 0.8 by default)."""
LEASED_SHARE = 0.45
"""Share of L1 for one round, whose chunks are all leased together; leases may keep half of L1."""
LOOKUPS = 300
ANSWER_S = 9.0
"""Limit for the server to answer."""
WAIT_S = 60.0
"""Limit for a step, which takes milliseconds on an idle machine."""
SETTLE_S = 10.0
"""Limit for leases and puts to L2 to end, after which chunks can be cleared."""
LAYERS, BLOCKS, BLOCK_TOKENS = 32, 16, 16
"""Layers and blocks of a chunk, which is copied in LAYERS × BLOCKS pieces, and tokens of a block."""
UNANSWERED = {StoreOutcome.UNAVAILABLE, StoreOutcome.FAILED}
"""Outcomes of a store to which the server did not answer in time."""


class SimulatedEngine:
    """One attached process with two sets of blocks for the chunks of a round: one to store from, one to load into."""

    def __init__(
        self, settings: ClientSettings, block_bytes: int, chunks: int, threads: int, request: RequestIdentity
    ) -> None:
        """Raises Refused without memory for the blocks, and another KvstrataError if the server cannot be used."""
        self._chunks, self._chunk_bytes = chunks, LAYERS * BLOCKS * block_bytes
        self._bytes = chunks * self._chunk_bytes
        try:
            self._source, self._target = (
                PagedBlocks(
                    layers=LAYERS, num_blocks=chunks * BLOCKS, block_bytes=block_bytes, chunk_blocks=BLOCKS
                )
                for _ in range(2)
            )
        except (OSError, OverflowError) as error:
            raise Refused(f"--chunks: no memory for {chunks} chunks ({error}); give fewer") from None
        self._source.fill(range(self._source.num_blocks), request.salt)
        self._target.touch()
        self._memcmp = ctypes.CDLL(None).memcmp
        self._memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._threads = ThreadPoolExecutor(threads)
        self.client = CacheClient(
            settings,
            role=Role.CLIENT,
            layout=LayoutIdentity(
                model=f"kvstrata bench of {block_bytes}", kv_dtype="bytes", chunk_tokens=settings.chunk_size
            ),
            group=secrets.token_bytes(SESSION_BYTES),
            engine_slices=1,
            slice=self._source.slice(),
            engine=CopyEngine(threads=threads),
            facts=self._source.facts,
        )
        self.client.start()
        self._identity = self.client.identity(request)
        self._chain = b""

    def connect(self, mapped_bytes: int) -> bool:
        """Wait until the client can use the cache; returns whether it has also mapped `mapped_bytes` of the pool ahead.

        Raises Refused if the server refuses the tenant, Unavailable if it does not answer.
        """
        identity = self._identity
        wait_until(lambda: identity.ready or bool(identity.error) or "refused" in self.client.error, ANSWER_S)
        if identity.error:
            raise Refused(
                f"the server refuses to store for tenant {identity.request.tenant!r}: {identity.error}; "
                "give --tenant and --token-file"
            )
        if not identity.ready:
            raise Unavailable(self.client.error or "the server does not answer")
        return wait_until(lambda: int(self.client.stats()["mapped_ahead_bytes"]) >= mapped_bytes, SETTLE_S)

    def memcpy(self) -> float:
        """Copy the bytes of a round from the first set to the second, on as many threads as the client copies with.

        Returns GB/s, as `store` and `retrieve` do.
        """
        size = self._chunk_bytes
        source, target = self._source.bases[0], self._target.bases[0]
        begun_s = time.monotonic()
        places = range(0, self._bytes, size)
        list(self._threads.map(lambda at: ctypes.memmove(target + at, source + at, size), places))
        return self._bytes / (time.monotonic() - begun_s) / 1e9

    def store(self, prompt: int) -> float:
        """Store a prompt's chunks.

        Raises Refused if one was not stored, Unavailable if the server did not answer in time.
        """
        self._chain = chain_of(self._identity.root, prompt, self._chunks)
        begun_s = time.monotonic()
        job = self.client.store(self._identity, b"", self._chain, self._source.plan, self._blocks())
        if not job.done.wait(WAIT_S):
            raise Unavailable(f"a store did not end within {WAIT_S:.0f} s")
        seconds = time.monotonic() - begun_s
        refused = Counter(str(outcome) for outcome in job.outcomes if outcome is not StoreOutcome.STORED)
        if refused:
            reasons = ", ".join(f"{count} × {word}" for word, count in refused.items())
            text = f"{sum(refused.values())} of {self._chunks} chunks were not stored: {reasons}"
            raise Unavailable(text) if refused.keys() & UNANSWERED else Refused(text)
        return job.bytes / seconds / 1e9

    def retrieve(self) -> float:
        """Look up the chunks that were stored last, load them, and compare every byte.

        Raises InternalError for a chunk that failed to load and for a wrong byte, otherwise as `lookups`.
        """
        ctypes.memset(self._target.bases[0], 0xA5, self._bytes)
        begun_s = time.monotonic()
        lease, extents = self._look_up()
        items = [
            LoadItem(self._chain[at : at + KEY_BYTES], extent.offset_bytes, extent.length_bytes, blocks)
            for at, extent, blocks in zip(
                range(0, len(self._chain), KEY_BYTES), unpack_extents(extents), self._blocks(), strict=True
            )
        ]
        job = self.client.load(self._identity, lease, items, self._target.plan, sync=False)
        if not job.wait(WAIT_S):
            raise Unavailable(f"a load did not end within {WAIT_S:.0f} s")
        seconds = time.monotonic() - begun_s
        if job.failed:
            raise InternalError(
                f"chunks {sorted(job.failed)} of {self._chunks} failed to load; see the server's log"
            )
        if self._memcmp(self._source.bases[0], self._target.bases[0], self._bytes):
            raise InternalError("chunks came back with other bytes than were stored")
        return job.bytes / seconds / 1e9

    def lookups(self, count: int) -> list[float]:
        """Look up the chunks that were stored last, `count` times; returns the microseconds of each.

        Raises Refused if a chunk is gone, Unavailable if the server did not answer in time.
        """
        taken = []
        for _ in range(count):
            begun_s = time.monotonic()
            lease, _ = self._look_up()
            taken.append(1e6 * (time.monotonic() - begun_s))
            self.client.release([lease])
        return taken

    def close(self) -> None:
        """Leave the server, which then keeps nothing of this process but its committed chunks."""
        self.client.close()
        self._threads.shutdown()
        if self.client.stats()["copies_running"] == 0:
            self._source.close()
            self._target.close()

    def _look_up(self) -> tuple[LeaseName, bytes]:
        """Lease the chunks that were stored last; returns the lease and their packed extents. Raises as `lookups`."""
        call = self.client.lookup(
            self._identity, self._chain, request_id="kvstrata bench", deadline_ms=30_000
        )
        if not call.wait(WAIT_S):
            raise Unavailable(f"a lookup was not answered within {WAIT_S:.0f} s")
        result = call.result
        if result.lease is not None and result.n_chunks == self._chunks:
            return result.lease, result.extents
        if result.lease is not None:
            self.client.release([result.lease])
        text = f"only {result.n_chunks} of the {self._chunks} stored chunks are found: {result.reason}"
        if result.reason in (MissReason.BREAKER_OPEN, MissReason.DEADLINE):
            raise Unavailable(text)
        raise Refused(f"{text}; check whether another process fills or clears L1")

    def _blocks(self) -> list[list[int]]:
        """The numbers of the blocks of each chunk."""
        return [list(range(at, at + BLOCKS)) for at in range(0, self._chunks * BLOCKS, BLOCKS)]


class RunningServer:
    """The server behind an admin port, which has its sockets in one of `places`."""

    def __init__(self, url: str, token: str, places: Sequence[Path]) -> None:
        """Raises Unavailable, which says what to start, or what other server answers; or ConfigError."""
        self._url, self._token = url, token
        try:
            status = self.fresh()
        except Unavailable as error:
            raise Unavailable(
                f"no server answers: {error.message} Start one with `lmcache-server`, or give the --url of another",
                field="--url",
            ) from None
        self.directory = Path(status["instance"]["socket_dir"])
        if self.directory not in places:
            raise Unavailable(
                f"--url: the server at {url} has its sockets in {self.directory}, not in "
                f"{', '.join(map(str, places))}; give its --port or --socket-dir too",
                field="--url",
            )

    def fresh(self) -> dict[str, Any]:
        """Fetch the status document. Raises KvstrataError."""
        found: dict[str, Any] = ask(self._url, Ask("/v1/status"), token=self._token)
        return found

    def clear(self, tenant: str) -> int:
        """Drop a tenant's chunks from L1; returns the bytes left in L1 after `SETTLE_S`. Raises KvstrataError."""
        names = {tenant, f"#{tenant_number(tenant):08x}"}

        def left() -> int:
            ask(self._url, Ask("/v1/clear", {"tier": "l1", "tenant": tenant}), token=self._token)
            return sum(row["bytes"] for row in self.fresh()["tenants"] if row["tenant"] in names)

        wait_until(lambda: left() == 0, SETTLE_S)
        return left()


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Check a condition every few milliseconds; returns whether it held before the time limit."""
    ends_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.005)
    return True


# --- the command ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata bench`."""
    top = argparse.ArgumentParser(
        prog="kvstrata bench",
        description="Measure a running server on this host with the load of an engine.",
        epilog="`kvstrata bench l2` measures one storage adapter without a server, `kvstrata bench serve` measures "
        "engines over HTTP: see their --help.",
    )
    add = top.add_argument
    add("--port", type=int, default=ClientSettings().port,
        help="port number in the names of the server's sockets (%(default)s)")  # fmt: skip
    for name, metavar, meaning in (
        ("socket-dir", "DIR", "directory of the server's sockets (derived from the port)"),
        ("url", "URL", "URL of the server's admin port (the default of `kvstrata ctl`)"),
        ("admin-token-file", "FILE", "file with the admin port's token (the token of this user's server)"),
        ("tenant", "NAME", "tenant to store for, if the server has a tenants file (a fresh name)"),
        ("token-file", "FILE", "file with that tenant's token (none)"),
    ):
        add(f"--{name}", default="", metavar=metavar, help=meaning)
    for name, most, default, what in (
        ("chunks", 4096, 8, "chunks in a round"),
        ("rounds", 1000, 5, "measured rounds, after one warm-up round"),
        ("threads", 64, COPY_THREADS, "copy threads, also for memcpy"),
    ):
        add(f"--{name}", type=whole(1, most), default=default, metavar="N", help=f"{what} (%(default)s)")
    add(
        "--chunk-mb",
        type=_block_bytes,
        default="32",
        metavar="MIB",
        help="size of a chunk's KV in MiB (%(default)s)",
    )
    add("--json", action="store_true", help="print JSON")
    return top


def _block_bytes(text: str) -> int:
    """The bytes of a block, from a flag with the chunk's size in MiB."""
    try:
        block_bytes = float(text) * MB / (LAYERS * BLOCKS)
    except ValueError:
        block_bytes = 0.0
    if not 1 <= block_bytes < (1 << 32) // (LAYERS * BLOCKS) or not block_bytes.is_integer():
        raise argparse.ArgumentTypeError(
            f"must be MiB below 4096, a whole number of {LAYERS * BLOCKS} bytes, found {text!r}"
        )
    return int(block_bytes)


@guarded("kvstrata bench")
def main(arguments: Sequence[str] | None) -> int:
    """Run the benchmark; returns 0. Raises KvstrataError."""
    options = parser().parse_args(arguments)
    report = run(options)
    print(json.dumps(report, indent=1, ensure_ascii=False) if options.json else shown(report))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; returns the report. Raises KvstrataError; in any case chunks are cleared.

    Chunks of a tenant that the user named stay, because the tenant may have others.
    """
    block_bytes: int = options.chunk_mb
    chunk_bytes = LAYERS * BLOCKS * block_bytes
    url, token = (
        options.url or usual_url(HttpSettings()),
        read_token("--admin-token-file", options.admin_token_file),
    )
    server = RunningServer(url, token, socket_dirs(options.socket_dir, options.port))
    salt = secrets.token_hex(16)
    tenant = options.tenant or f"kvstrata-bench-{salt[:16]}"
    engine: SimulatedEngine | None = None
    notes: list[str] = []
    left_bytes = 0
    try:
        before = server.fresh()
        chunks = _bounded(options, chunk_bytes, before["pool"], notes)
        if before["l2_store"]["adapters"]:
            notes.append(
                "chunks of this run may also be put to L2, and stay there until the adapter's cap evicts them"
            )
        settings = ClientSettings(
            socket_dir=str(server.directory),
            port=options.port,
            chunk_size=BLOCKS * BLOCK_TOKENS,
            token_file=options.token_file,
        )
        engine = SimulatedEngine(
            settings, block_bytes, chunks, options.threads, RequestIdentity(tenant=tenant, salt=salt)
        )
        l1_bytes = before["pool"]["extents_bytes"]
        faulted = wait_until(lambda: server.fresh()["pool"]["prefaulted_bytes"] >= l1_bytes, WAIT_S)
        if not engine.connect(l1_bytes) or not faulted:
            notes.append("some pages of L1 were not faulted in and mapped yet; a later run is faster")
        taken: dict[str, list[float]] = {"memcpy": [], "store": [], "retrieve": [], "lookup": []}
        for number in range(options.rounds + 1):
            if number == 1:  # the first round warms up
                taken = {name: [] for name in taken}
            taken["memcpy"].append(engine.memcpy())
            taken["store"].append(engine.store(number))
            taken["retrieve"].append(engine.retrieve())
            taken["lookup"] += engine.lookups(-(-LOOKUPS // options.rounds))
            if not options.tenant:
                server.clear(tenant)
        if evicted := server.fresh()["pool"]["evicted_entries"] - before["pool"]["evicted_entries"]:
            notes.append(f"{evicted} chunks were evicted from L1 during the run, by it or by other engines")
    finally:
        if engine is not None:
            engine.close()
        if not options.tenant:
            with contextlib.suppress(KvstrataError):  # the run itself has already failed for this reason
                left_bytes = server.clear(tenant)
    if options.tenant:
        notes.append(
            f"chunks of tenant {tenant!r} stay in L1 until they are evicted, because the tenant may have other chunks"
        )
    elif left_bytes:
        notes.append(
            f"{left_bytes / MB:.0f} MiB could not be cleared from L1 and stay until they are evicted"
        )
    moved = options.rounds * chunks * chunk_bytes
    instance = before["instance"]
    return {
        "server": f"{instance['instance_id']}, version {instance['version']}, L1 {l1_bytes / MB:,.0f} MiB",
        "client": __version__,
        "machine": machine(),
        "chunk": f"{chunk_bytes / MB:.4g} MiB in {LAYERS} layers of {BLOCKS} blocks",
        "run": f"{chunks} chunks, {options.rounds} rounds, {options.threads} copy threads",
        "verified": f"{moved / MB:,.0f} MiB came back byte for byte",
        "verified_bytes": moved,
        "chunks": chunks,
        "figures": _figures(taken),
        "notes": notes,
    }


def _bounded(options: argparse.Namespace, chunk_bytes: int, pool: dict[str, Any], notes: list[str]) -> int:
    """Chunks that may be stored in a round without an eviction. Raises Refused if none fits."""
    l1_bytes = pool["extents_bytes"]
    room = min(
        int(L1_SHARE * l1_bytes) - pool["used_bytes"], int(LEASED_SHARE * l1_bytes) - pool["leased_bytes"]
    )
    record_bytes = chunk_bytes + (64 << 10)  # header and section table
    fit = max(0, room) // record_bytes
    may = f"a run may use {max(0, room) / MB:,.0f} of the {l1_bytes / MB:,.0f} MiB of L1 without evicting"
    if fit == 0:
        raise Refused(
            f"{may}, and a chunk takes {record_bytes / MB:,.0f} MiB: give a smaller --chunk-mb, `kvstrata ctl clear`, "
            "or start the server with a larger --l1-size-gb"
        )
    if fit < options.chunks:
        notes.append(f"{fit} chunks a round instead of {options.chunks}: {may}")
    return min(int(fit), int(options.chunks))


def _figures(taken: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The figures of all rounds together; a value is the median unless the figure's name says otherwise."""
    figures = []

    def figure(name: str, unit: str, values: Sequence[float], share: float | None = None) -> None:
        value, (least, greatest) = median_spread(values)
        value = value if share is None else percentile(values, share)
        figures.append({"name": name, "value": value, "least": least, "greatest": greatest, "unit": unit})

    for name in ("store", "retrieve", "memcpy"):
        figure(name, "GB/s", taken[name])
    for name in ("store", "retrieve"):
        shares = [rate / beside for rate, beside in zip(taken[name], taken["memcpy"], strict=True)]
        figure(f"{name} / memcpy", "", shares)
    for share in (0.5, 0.99):
        figure(f"lookup p{100 * share:.0f}", "µs", taken["lookup"], share)
    return figures


def shown(report: dict[str, Any]) -> str:
    """The report as text."""
    numbers = ("value", "least", "greatest")
    figures = [
        {"figure": one["name"]} | {name: f"{one[name]:.4g}" for name in numbers} | {"unit": one["unit"]}
        for one in report["figures"]
    ]
    heads = {name: report[name] for name in ("server", "machine", "chunk", "run", "verified")}
    notes = "".join(f"\nnote: {note}" for note in report["notes"])
    return f"{table(heads)}\n\n{table(figures)}{notes}"
