"""`kvstrata bench`: what a running server on this host gives one engine or several, beside a plain memcpy.

Each client process attaches as an engine does, with blocks of its own, twice, and no model.  A round is: memcpy of the
chunks from the one to the other; store them from the one under keys that nobody else has; look them up and load them
into the other, wiped before; compare every byte.  All clients do each step at the same time.  Between rounds the chunks
are cleared, so no more of L1 is used than one round needs, and that is bounded by what is free.  A round in which the
server was silent for longer than engines wait is measured again, a few times at most.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import multiprocessing
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from kvstrata import __version__
from kvstrata.cli.ctl import table
from kvstrata.client import CacheClient, LoadItem, StoreOutcome
from kvstrata.config.model import ClientSettings
from kvstrata.errors import BadRequest, InternalError, KvstrataError, Refused, Unavailable
from kvstrata.measure.blocks import PagedBlocks
from kvstrata.measure.figures import chain_of, machine, median_spread, percentile
from kvstrata.memory.paths import RPC_SOCKET, socket_dir
from kvstrata.policy.processes import tenant_number
from kvstrata.rpc import wire
from kvstrata.rpc.zmq_plain import PlainConnection
from kvstrata.types import (
    KEY_BYTES,
    LayoutIdentity,
    LeaseName,
    MissReason,
    RequestIdentity,
    Role,
    unpack_extents,
)

ANSWER_S = 3.0
"""A server that runs answers its status in milliseconds."""
WAIT_S = 60.0
"""For anything that takes milliseconds on an idle machine."""
SETTLE_S = 10.0
"""For leases to end and puts to L2 to let go, before chunks can be cleared."""
UNANSWERED = frozenset({StoreOutcome.UNAVAILABLE, StoreOutcome.FAILED})
"""Outcomes of chunks when the server did not answer in time."""
L1_SHARE = 0.75
"""L1 is filled up to here at most: eviction ahead of need begins above (0.8 by default)."""
LEASED_SHARE = 0.45
"""Leases may keep half of L1; the whole of a round is leased at a time."""
TRIES = 5
"""Of one round."""
PINGS = 500
LOOKUPS = 300
MB = 1 << 20


class Shape(NamedTuple):
    """Of a chunk."""

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    chunk_tokens: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        """Blocks in a chunk."""
        return self.chunk_tokens // self.block_tokens

    @property
    def block_bytes(self) -> int:
        """K and V of one block in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes * self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        """Payload of one chunk."""
        return self.layers * self.blocks * self.block_bytes

    def __str__(self) -> str:
        return (
            f"{self.layers} layers × {self.kv_heads} kv heads × {self.head_dim}, {self.element_bytes} bytes, "
            f"{self.chunk_tokens} tokens in blocks of {self.block_tokens}"
        )


class Plan(NamedTuple):
    """What one client process is told. All of it can be sent to another process."""

    directory: str
    port: int
    shape: Shape
    chunks: int
    threads: int
    tenant: str
    salt: str
    token_file: str


class Timed(NamedTuple):
    """When a step of one process ran (`time.monotonic`, the same clock in all) and how much it moved."""

    begun_s: float
    ended_s: float
    moved_bytes: int


class Silent(Unavailable):
    """The server did not answer a step in time, as on a machine that stands still; the round may be repeated."""


# --- one client process -----------------------------------------------------------------------------------------


class Engine:
    """One attached process with blocks for the chunks of a round, twice: to store from and to load into."""

    def __init__(self, plan: Plan, number: int) -> None:
        """Raises KvstrataError where the server cannot be used, naming why."""
        shape = self._shape = plan.shape
        self._chunks = plan.chunks
        self._bytes = plan.chunks * shape.chunk_bytes
        try:
            self._source, self._target = (
                PagedBlocks(
                    layers=shape.layers,
                    num_blocks=plan.chunks * shape.blocks,
                    block_bytes=shape.block_bytes,
                )
                for _ in range(2)
            )
        except (OSError, OverflowError) as error:
            raise Refused(f"--chunks: no memory for {plan.chunks} chunks in blocks ({error})") from None
        self._source.fill(range(self._source.num_blocks), (plan.salt, number))
        self._target.touch()
        self._libc = ctypes.CDLL(None)
        self._libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._threads = ThreadPoolExecutor(plan.threads)
        self.client = CacheClient(
            ClientSettings(
                socket_dir=plan.directory,
                port=plan.port,
                chunk_size=shape.chunk_tokens,
                copy_threads=plan.threads,
                max_store_backlog_gb=1 + plan.chunks * shape.chunk_bytes / (1 << 30),
                token_file=plan.token_file,
            ),
            role=Role.CLIENT,
            layout=LayoutIdentity(
                model=f"kvstrata bench of {shape}", kv_dtype="bytes", chunk_tokens=shape.chunk_tokens
            ),
            group=secrets.token_bytes(wire.SESSION_BYTES),
            engine_slices=1,
            slice=self._source.slice(kv_heads=(0, shape.kv_heads)),
            facts=self._source.facts,
        )
        self.client.start()
        self._identity = self.client.identity(
            RequestIdentity(tenant=plan.tenant, salt=f"{plan.salt} {number}")
        )
        self._chain = b""

    def connect(self, mapped_bytes: int) -> bool:
        """Wait until the cache is in use; whether the pool's pages are mapped here as well by then."""
        identity = self._identity
        _wait(lambda: identity.ready or bool(identity.error) or "refused" in self.client.error, ANSWER_S * 3)
        if identity.error:
            raise Refused(
                f"the server refuses to store for tenant {identity.request.tenant!r}: {identity.error}; "
                "give --tenant and --token-file"
            )
        if not identity.ready:
            raise Unavailable(self.client.error or "the server does not answer")
        return _wait(lambda: int(self.client.stats()["mapped_ahead_bytes"]) >= mapped_bytes, SETTLE_S)

    def memcpy(self) -> Timed:
        """Copy as many bytes as a round moves, with as many threads as the cache's copies have."""
        chunk_bytes = self._shape.chunk_bytes
        source, target = self._source.bases[0], self._target.bases[0]

        def copy(chunk: int) -> None:
            self._libc.memcpy(target + chunk * chunk_bytes, source + chunk * chunk_bytes, chunk_bytes)

        begun_s = time.monotonic()
        list(self._threads.map(copy, range(self._chunks)))
        return Timed(begun_s, time.monotonic(), self._bytes)

    def store(self, prompt: int) -> Timed:
        """Store a prompt's chunks. Raises Refused when one of them was not stored, Silent when nobody answered."""
        self._chain = chain_of(self._identity.root, prompt, self._chunks)
        blocks = [self._blocks_of(chunk) for chunk in range(self._chunks)]
        begun_s = time.monotonic()
        job = self.client.store(self._identity, b"", self._chain, self._source.plan, blocks)
        if not job.done.wait(WAIT_S):
            raise Unavailable(f"a store did not end within {WAIT_S:.0f} s")
        ended_s = time.monotonic()
        refused = Counter(str(outcome) for outcome in job.outcomes if outcome is not StoreOutcome.STORED)
        if refused:
            reasons = ", ".join(f"{count} × {word}" for word, count in refused.items())
            text = f"{sum(refused.values())} of {self._chunks} chunks were not stored: {reasons}"
            raise Silent(text) if refused.keys() & UNANSWERED else Refused(text)
        return Timed(begun_s, ended_s, job.bytes)

    def retrieve(self) -> Timed:
        """Look up what was stored last, load it, and compare every byte.

        Raises InternalError for a wrong one, otherwise as `lookups`.
        """
        self._libc.memset(self._target.bases[0], 0xA5, self._bytes)
        begun_s = time.monotonic()
        lease, extents = self._look_up()
        items = [
            LoadItem(
                self._chain[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES],
                extent.offset_bytes,
                extent.length_bytes,
                self._blocks_of(chunk),
            )
            for chunk, extent in enumerate(unpack_extents(extents))
        ]
        job = self.client.load(lease, items, self._target.plan, sync=False)
        if not job.wait(WAIT_S):
            raise Unavailable(f"a load did not end within {WAIT_S:.0f} s")
        ended_s = time.monotonic()
        if job.failed:
            raise InternalError(
                f"chunks {sorted(job.failed)} of {self._chunks} failed to load; see the server's log"
            )
        if self._libc.memcmp(self._source.bases[0], self._target.bases[0], self._bytes):
            raise InternalError("chunks came back with other bytes than were stored")
        return Timed(begun_s, ended_s, job.bytes)

    def lookups(self, count: int) -> list[float]:
        """Seconds of so many lookups of what was stored last, each a hit that leases and releases all chunks.

        Raises Refused when a chunk is gone, Silent when nobody answered.
        """
        taken = []
        for _ in range(count):
            begun_s = time.monotonic()
            lease, _ = self._look_up()
            taken.append(time.monotonic() - begun_s)
            self.client.release([lease])
        return taken

    def reconnect(self) -> None:
        """Wait until the server answers again. Raises Unavailable when it does not."""
        if not _wait(lambda: self.client.connected, ANSWER_S * 3):
            raise Unavailable(self.client.error or "the server does not answer any more")

    def close(self) -> None:
        """Leave the server; nothing of this process is left there but committed chunks."""
        self.client.close()
        self._threads.shutdown()
        if self.client.stats()["copies_running"] == 0:
            self._source.close()
            self._target.close()

    def _look_up(self) -> tuple[LeaseName, bytes]:
        """Lease and extents of all chunks that were stored last."""
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
        text = f"only {result.n_chunks} of {self._chunks} chunks are there after they were stored: {result.reason}"
        if result.reason in (MissReason.BREAKER_OPEN, MissReason.DEADLINE):
            raise Silent(text)
        raise Refused(f"{text}; is something else filling or clearing L1?")

    def _blocks_of(self, chunk: int) -> list[int]:
        return list(range(chunk * self._shape.blocks, (chunk + 1) * self._shape.blocks))


def serve(connection: Connection, plan: Plan, number: int) -> None:
    """Body of a client process: does what the parent names, until the connection closes."""
    logging.basicConfig(level=logging.CRITICAL)  # what matters is told as an error
    engine: Engine | None = None
    try:
        engine = Engine(plan, number)
        connection.send((True, None))
        while True:
            name, arguments = connection.recv()
            try:
                answer = (True, getattr(engine, name)(*arguments))
            except Silent as error:
                answer = (False, error)
            connection.send(answer)
    except (EOFError, ConnectionError):
        pass  # the parent is done, or gone
    except KvstrataError as error:
        with contextlib.suppress(ConnectionError):
            connection.send((False, error))
    finally:
        if engine is not None:
            engine.close()


# --- the parent -------------------------------------------------------------------------------------------------


class Team:
    """The client processes. SIGINT from the terminal does not reach them: the parent ends them."""

    def __init__(self, plan: Plan, processes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._members: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        resource_tracker.ensure_running()  # it would unblock SIGINT while it starts
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for number in range(processes):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=serve, args=(theirs, plan, number), daemon=True)
                process.start()
                theirs.close()
                self._members.append((process, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def started(self) -> None:
        """Wait until all are there."""
        self._answers(self._members)

    def all(self, name: str, *arguments: Any) -> list[Any]:
        """All do it at once; their answers. Raises what any of them raised; after Silent they can go on."""
        return self._ask(self._members, name, arguments)

    def first(self, name: str, *arguments: Any) -> Any:
        """The first does it while the others rest."""
        return self._ask(self._members[:1], name, arguments)[0]

    def close(self) -> None:
        """End them all, by force if they do not by themselves."""
        for _, connection in self._members:
            connection.close()
        for process, _ in self._members:
            process.join(SETTLE_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _ask(self, members: Sequence[Any], name: str, arguments: tuple[Any, ...]) -> list[Any]:
        for process, connection in members:
            try:
                connection.send((name, arguments))
            except ConnectionError:
                raise self._ended(process) from None
        return self._answers(members)

    def _answers(self, members: Sequence[Any]) -> list[Any]:
        answers = []
        silent: Silent | None = None
        for process, connection in members:
            if not connection.poll(3 * WAIT_S):
                raise Unavailable("a client process does not answer")
            try:
                fine, answer = connection.recv()
            except (EOFError, ConnectionError):
                raise self._ended(process) from None
            if isinstance(answer, Silent):
                silent = answer
            elif not fine:
                raise answer
            answers.append(answer)
        if silent is not None:
            raise silent
        return answers

    def _ended(self, process: Any) -> KvstrataError:
        process.join(1)
        return InternalError(f"a client process ended by itself, exit status {process.exitcode}")


class Server:
    """The running server, asked without attaching."""

    def __init__(self, directory: Path) -> None:
        """Raises Unavailable naming what to start."""
        self._connection = PlainConnection(directory / RPC_SOCKET, ANSWER_S)
        try:
            self.status: dict[str, Any] = self._connection.status()
        except Unavailable:
            self._connection.close()
            raise Unavailable(
                f"no server answers in {directory}; start one with `lmcache-server`, "
                "or name its --port or --socket-dir",
                field="socket_dir",
            ) from None

    def fresh(self) -> dict[str, Any]:
        """The status document now."""
        self.status = self._connection.status()
        return self.status

    def ping_seconds(self, count: int) -> list[float]:
        """Times of so many pings, one after another."""
        taken = []
        for _ in range(count):
            begun_s = time.monotonic()
            self._connection.ask(wire.Ping(wire.NO_SESSION, self._connection.next_seq()))
            taken.append(time.monotonic() - begun_s)
        return taken

    def clear(self, tenant: str) -> int:
        """Drop a tenant's chunks from L1; the bytes that stay after `SETTLE_S`."""
        names = {tenant, f"#{tenant_number(tenant):08x}"}

        def left() -> int:
            self._connection.ask(
                wire.Clear(wire.NO_SESSION, self._connection.next_seq(), wire.Tier.L1, tenant)
            )
            return sum(row["bytes"] for row in self.fresh()["tenants"] if row["tenant"] in names)

        _wait(lambda: left() == 0, SETTLE_S)
        return left()

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata bench`."""
    settings = ClientSettings()
    top = argparse.ArgumentParser(
        prog="kvstrata bench",
        description="Measure a running server on this host, as engines use it.",
        epilog="`kvstrata bench l2` measures one storage adapter without a server, `kvstrata bench serve` what users "
        "of engines see, `kvstrata bench cluster` a controller: see their --help.",
    )
    add = top.add_argument
    add("--port", type=int, default=settings.port, help="RPC port of the server (%(default)s)")
    add("--socket-dir", default="", metavar="DIR", help="directory of its sockets (derived from the port)")
    add("--processes", type=_count(64), default=1, help="client processes (%(default)s)")
    add("--chunks", type=_count(4096), default=8, help="chunks that each stores in a round (%(default)s)")
    add("--rounds", type=_count(1000), default=5, help="measured rounds; one more warms up (%(default)s)")
    add("--threads", type=_count(64), default=settings.copy_threads,
        help="copy threads of each process, and of memcpy beside it (%(default)s)")  # fmt: skip
    for name, default, meaning in (
        ("layers", 32, "layers of the model"),
        ("kv-heads", 8, "kv heads"),
        ("head-dim", 128, "numbers in a head"),
        ("element-bytes", 2, "bytes of a number"),
        ("chunk-tokens", 256, "tokens in a chunk"),
        ("block-tokens", 16, "tokens in a block"),
    ):
        add(f"--{name}", type=_count(65_536), default=default, metavar="N", help=f"{meaning} (%(default)s)")
    add(
        "--tenant",
        default="",
        help="tenant to store for, where the server has a tenants file (one of its own)",
    )
    add("--token-file", default="", metavar="FILE", help="file with that tenant's token")
    add("--json", action="store_true", help="print JSON")
    return top


def main(arguments: Sequence[str]) -> int:
    """Exit status 0, 1 with one line on standard error, or 130 after Ctrl-C."""
    if arguments[:1] == ["l2"]:
        from kvstrata.cli.bench_l2 import main as bench_l2

        return bench_l2(arguments[1:])
    if arguments[:1] == ["serve"]:
        from kvstrata.cli.bench_serve import main as bench_serve

        return bench_serve(arguments[1:])
    if arguments[:1] == ["cluster"]:
        from kvstrata.cli.bench_cluster import main as bench_cluster

        return bench_cluster(arguments[1:])
    options = parser().parse_args(arguments)
    try:
        with _ctrl_c_on_sigterm():
            report = run(options)
    except KvstrataError as error:
        print(f"kvstrata bench: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvstrata bench: interrupted", file=sys.stderr)
        return 130
    print(json.dumps(report, indent=1, ensure_ascii=False) if options.json else shown(report))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure. Raises KvstrataError; in any case no process is left, and no chunk that can be cleared."""
    shape = _shape(options)
    directory = socket_dir(options.socket_dir, options.port)
    server = Server(directory)
    salt = secrets.token_hex(16)
    tenant = options.tenant or f"kvstrata-bench-{salt[:16]}"
    team: Team | None = None
    notes: list[str] = []
    try:
        chunks = _bounded(options, shape, server.status, notes)
        l2 = bool(server.status["l2_store"]["adapters"])
        if l2:
            notes.append(
                "the server has L2: what is stored here may be put there too, and leaves it by the adapter's cap only"
            )
        before = server.status
        plan = Plan(
            str(directory), options.port, shape, chunks, options.threads, tenant, salt, options.token_file
        )
        team = Team(plan, options.processes)
        team.started()
        pool = server.status["pool"]
        if not _wait(lambda: _faulted(server.fresh()), WAIT_S) or not all(
            team.all("connect", pool["extents_bytes"])
        ):
            notes.append("L1's pages were not all faulted in and mapped yet; a later run is faster")
        rounds = _rounds(options, server, team, tenant, notes)
        pings = server.ping_seconds(PINGS)
        evicted = server.fresh()["pool"]["evicted_entries"] - before["pool"]["evicted_entries"]
        if evicted:
            notes.append(f"{evicted} chunks were evicted from L1 meanwhile, by this run or by other engines")
    finally:
        with _no_signals():
            if team is not None:
                team.close()
            left_bytes = _left(server, tenant, options.tenant)
            server.close()
    if options.tenant:
        notes.append(
            f"chunks of tenant {tenant!r} stay in L1 until they are evicted: the tenant has others too"
        )
    elif left_bytes:
        notes.append(
            f"{left_bytes / MB:.0f} MiB could not be cleared from L1 and stay until they are evicted"
        )
    return _report(options, shape, chunks, server.status, rounds, pings, notes)


def shown(report: dict[str, Any]) -> str:
    """The report as text; a figure's value is the median of its rounds unless its name says otherwise."""
    figures = [
        {
            "figure": figure["name"],
            "value": f"{figure['value']:.4g}",
            "least": f"{figure['least']:.4g}",
            "greatest": f"{figure['greatest']:.4g}",
            "unit": figure["unit"],
        }
        for figure in report["figures"]
    ]
    heads = {name: report[name] for name in ("server", "machine", "chunk", "run", "verified")}
    notes = "".join(f"\nnote: {note}" for note in report["notes"])
    return f"{table(heads)}\n\n{table(figures)}{notes}"


def _rounds(
    options: argparse.Namespace, server: Server, team: Team, tenant: str, notes: list[str]
) -> dict[str, list[Any]]:
    """What each step gave in each round; the first round warms up and is left out."""
    taken: dict[str, list[Any]] = {"memcpy": [], "store": [], "retrieve": [], "lookup": []}
    begun = 0
    for number in range(options.rounds + 1):
        measured: dict[str, list[Any]] | None = None
        tries_left = TRIES
        while measured is None:
            tries_left -= 1
            begun += 1
            try:
                measured = _round(options, team, begun)
            except Silent as error:
                if not tries_left:
                    raise Unavailable(
                        f"the server was silent in {TRIES} tries of a round: {error.message}"
                    ) from None
                team.all("reconnect")
            if not options.tenant:
                server.clear(tenant)
        if number:
            for name, values in measured.items():
                taken[name] += values
    repeats = begun - options.rounds - 1
    if repeats:
        notes.append(
            f"{repeats} rounds were measured again: the server did not answer for a while in the middle"
        )
    return taken


def _round(options: argparse.Namespace, team: Team, prompt: int) -> dict[str, list[Any]]:
    """What each step gave. Raises Silent, after which all can go on."""
    return {
        "memcpy": [_rate(team.all("memcpy"))],
        "store": [_rate(team.all("store", prompt))],
        "retrieve": [_rate(team.all("retrieve"))],
        "lookup": team.first("lookups", -(-LOOKUPS // options.rounds)),
    }


def _rate(parts: Sequence[Timed]) -> float:
    """GB/s of all processes together, from the first begin to the last end."""
    seconds = max(part.ended_s for part in parts) - min(part.begun_s for part in parts)
    return sum(part.moved_bytes for part in parts) / seconds / 1e9


def _report(
    options: argparse.Namespace,
    shape: Shape,
    chunks: int,
    status: dict[str, Any],
    rounds: dict[str, list[Any]],
    pings: list[float],
    notes: list[str],
) -> dict[str, Any]:
    figures = []

    def figure(name: str, unit: str, values: Sequence[float]) -> None:
        value, (least, greatest) = median_spread(values)
        figures.append({"name": name, "unit": unit, "value": value, "least": least, "greatest": greatest})

    for name in ("store", "retrieve", "memcpy"):
        figure(name, "GB/s", rounds[name])
    for name in ("store", "retrieve"):
        shares = [rate / beside for rate, beside in zip(rounds[name], rounds["memcpy"], strict=True)]
        figure(f"{name} / memcpy", "", shares)
    lookups = [1e6 * seconds for seconds in rounds["lookup"]]
    for share in (0.5, 0.99):
        figures.append(
            {
                "name": f"lookup p{100 * share:.0f}",
                "unit": "µs",
                "value": percentile(lookups, share),
                "least": min(lookups),
                "greatest": max(lookups),
            }
        )
    figure("ping p50", "µs", [1e6 * seconds for seconds in pings])
    instance, pool = status["instance"], status["pool"]
    moved = options.rounds * options.processes * chunks * shape.chunk_bytes
    return {
        "server": f"{instance['instance_id']}, version {instance['version']}, "
        f"L1 {pool['extents_bytes'] / MB:,.0f} MiB",
        "client": __version__,
        "machine": machine(),
        "chunk": f"{shape.chunk_bytes / MB:.4g} MiB: {shape}",
        "run": f"{options.processes} × {chunks} chunks, {options.rounds} rounds, {options.threads} copy threads",
        "verified": f"{moved / MB:,.0f} MiB came back byte for byte",
        "verified_bytes": moved,
        "chunks": chunks,
        "figures": figures,
        "notes": notes,
    }


def _shape(options: argparse.Namespace) -> Shape:
    if options.chunk_tokens % options.block_tokens:
        raise BadRequest(
            f"--chunk-tokens: {options.chunk_tokens} is no multiple of --block-tokens {options.block_tokens}"
        )
    shape = Shape(
        options.layers,
        options.kv_heads,
        options.head_dim,
        options.element_bytes,
        options.chunk_tokens,
        options.block_tokens,
    )
    if shape.chunk_bytes >= 1 << 32:
        raise BadRequest(
            f"a chunk of {shape} has {shape.chunk_bytes / MB:,.0f} MiB; a record has less than 4096"
        )
    return shape


def _bounded(options: argparse.Namespace, shape: Shape, status: dict[str, Any], notes: list[str]) -> int:
    """Chunks each process may store in a round without anything being evicted. Raises Refused for none."""
    pool = status["pool"]
    room = min(
        int(L1_SHARE * pool["extents_bytes"]) - pool["used_bytes"],
        int(LEASED_SHARE * pool["extents_bytes"]) - pool["leased_bytes"],
    )
    record_bytes = shape.chunk_bytes + (64 << 10)  # header and section table
    fit = max(0, room) // record_bytes // options.processes
    may = f"a run may use {max(0, room) / MB:,.0f} of the {pool['extents_bytes'] / MB:,.0f} MiB of L1 without evicting"
    if fit == 0:
        raise Refused(
            f"{may}, and {options.processes} × one chunk take {options.processes * record_bytes / MB:,.0f} MiB: give "
            "a smaller shape or fewer --processes, `kvstrata ctl clear`, or start the server with "
            "a larger --l1-size-gb"
        )
    if fit < options.chunks:
        notes.append(f"{fit} chunks a round instead of {options.chunks}: {may}")
    return min(int(fit), int(options.chunks))


def _left(server: Server, tenant: str, given: str) -> int:
    """Clear what this run stored, unless the tenant has other chunks too; bytes that stay. 0 when nobody answers."""
    try:
        return 0 if given else server.clear(tenant)
    except KvstrataError:
        return 0  # the server is gone, and says so elsewhere


def _faulted(status: dict[str, Any]) -> bool:
    return bool(status["pool"]["prefaulted_bytes"] >= status["pool"]["extents_bytes"])


def _wait(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Look every few milliseconds until it holds; whether it did in time."""
    ends_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.005)
    return True


def _count(most: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {most}, found {text!r}")
        return int(text)

    return count


@contextlib.contextmanager
def _ctrl_c_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    """Cleaning up is not interrupted; it takes seconds at most."""
    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(name, signal.SIG_IGN) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
