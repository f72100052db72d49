"""`kvstrata bench`: the speed that a running server on this host gives an engine, beside a plain memcpy.

The command attaches as an engine does, with two sets of blocks and without a model.  In a round it copies the chunks
from the first set to the second by memcpy, stores them from the first set under fresh keys, wipes the second set, looks
the chunks up, loads them into the second set, and compares every byte.  Between rounds the chunks are cleared (unless
the user named the tenant), and a round is no larger than the free part of L1.  If the server is silent for longer than
engines wait, the round is measured again, up to `TRIES` times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from kvstrata.cli.asking import default_url, find_url, read_token
from kvstrata.cli.bench.flags import whole
from kvstrata.cli.bench.report import MB, report_of, shown
from kvstrata.cli.bench.running import RunningServer
from kvstrata.cli.boundary import guarded
from kvstrata.client.client import COPY_THREADS
from kvstrata.config.client_model import ClientSettings
from kvstrata.errors import BadRequest, KvstrataError, Refused, Unavailable
from kvstrata.measure.engine import WAIT_S, Plan, Shape, Silent, SimulatedEngine, Timed, wait_until
from kvstrata.memory.paths import socket_dirs

L1_SHARE = 0.75
"""Share of L1 that may be filled; eviction ahead of need begins above it (at 0.8 by default)."""
LEASED_SHARE = 0.45
"""Share of L1 for one round, whose chunks are all leased together; leases may keep half of L1."""
TRIES = 5
"""Attempts at one round, after which the run fails."""
PINGS = 500
LOOKUPS = 300


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata bench`."""
    settings = ClientSettings()
    top = argparse.ArgumentParser(
        prog="kvstrata bench",
        description="Measure a running server on this host, used as engines use it.",
        epilog="`kvstrata bench l2` measures one storage adapter without a server, `kvstrata bench serve` engines "
        "as their users see them: see their --help.",
    )
    add = top.add_argument
    add(
        "--port",
        type=int,
        default=settings.port,
        help="number after which the server's sockets are named (%(default)s)",
    )
    add(
        "--socket-dir",
        default="",
        metavar="DIR",
        help="directory of the server's sockets (derived from the port)",
    )
    add("--url", default="", metavar="URL", help="its admin port (as `kvstrata ctl` finds it)")
    add(
        "--admin-token-file",
        default="",
        metavar="FILE",
        help="file with the admin port's token (the published one)",
    )
    add(
        "--chunks",
        type=whole(1, 4096),
        default=8,
        metavar="N",
        help="chunks in a round (%(default)s)",
    )
    add("--rounds", type=whole(1, 1000), default=5, help="measured rounds; one more warms up (%(default)s)")
    add("--threads", type=whole(1, 64), default=COPY_THREADS,
        help="copy threads, also for memcpy (%(default)s)")  # fmt: skip
    for name, default, meaning in (
        ("layers", 32, "layers of the model"),
        ("kv-heads", 8, "kv heads"),
        ("head-dim", 128, "numbers in a head"),
        ("element-bytes", 2, "bytes of a number"),
        ("chunk-tokens", 256, "tokens in a chunk"),
        ("block-tokens", 16, "tokens in a block"),
    ):
        add(f"--{name}", type=whole(1, 65_536), default=default, metavar="N", help=f"{meaning} (%(default)s)")
    add(
        "--tenant",
        default="",
        metavar="NAME",
        help="tenant to store for, if the server has a tenants file (a fresh name)",
    )
    add("--token-file", default="", metavar="FILE", help="file with that tenant's token (none)")
    add("--json", action="store_true", help="print JSON")
    return top


@guarded("kvstrata bench")
def main(arguments: Sequence[str] | None) -> int:
    """Run the benchmark; returns 0. Raises KvstrataError."""
    options = parser().parse_args(arguments)
    with _ctrl_c_on_sigterm():
        report = run(options)
    print(json.dumps(report, indent=1, ensure_ascii=False) if options.json else shown(report))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; returns the report. Raises KvstrataError; in any case chunks are cleared.

    Chunks of a tenant that the user named stay, because the tenant may have others.
    """
    shape = _shape(options)
    url = options.url or find_url(default_url(), "server")
    token = read_token("--admin-token-file", options.admin_token_file)
    server = RunningServer(url, token, socket_dirs(options.socket_dir, options.port))
    salt = secrets.token_hex(16)
    tenant = options.tenant or f"kvstrata-bench-{salt[:16]}"
    engine: SimulatedEngine | None = None
    notes: list[str] = []
    try:
        chunks = _bounded(options, shape, server.status, notes)
        l2 = bool(server.status["l2_store"]["adapters"])
        if l2:
            notes.append(
                "the server has L2 adapters: chunks of this run may be put there too, and stay until the adapter's "
                "cap evicts them"
            )
        before = server.status
        plan = Plan(
            str(server.directory),
            options.port,
            shape,
            chunks,
            options.threads,
            tenant,
            salt,
            options.token_file,
        )
        engine = SimulatedEngine(plan)
        extents_bytes = server.status["pool"]["extents_bytes"]
        if not wait_until(lambda: _faulted(server.fresh()), WAIT_S) or not engine.connect(extents_bytes):
            notes.append("not all pages of L1 were faulted in and mapped yet; a later run is faster")
        rounds = _rounds(options, server, engine, tenant, notes)
        pings = server.ping_seconds(PINGS)
        evicted = server.fresh()["pool"]["evicted_entries"] - before["pool"]["evicted_entries"]
        if evicted:
            notes.append(f"{evicted} chunks were evicted from L1 meanwhile, by this run or by other engines")
    finally:
        with _no_signals():
            if engine is not None:
                engine.close()
            left_bytes = _left(server, tenant, options.tenant)
    if options.tenant:
        notes.append(
            f"chunks of tenant {tenant!r} stay in L1 until they are evicted: the tenant has others too"
        )
    elif left_bytes:
        notes.append(
            f"{left_bytes / MB:.0f} MiB could not be cleared from L1 and stay until they are evicted"
        )
    return report_of(options, shape, chunks, server.status, rounds, pings, notes)


def _rounds(
    options: argparse.Namespace,
    server: RunningServer,
    engine: SimulatedEngine,
    tenant: str,
    notes: list[str],
) -> dict[str, list[Any]]:
    """Measure all rounds; returns the measurements of each step, without those of the first round, which warms up."""
    taken: dict[str, list[Any]] = {"memcpy": [], "store": [], "retrieve": [], "lookup": []}
    begun = 0
    for number in range(options.rounds + 1):
        measured: dict[str, list[Any]] | None = None
        tries_left = TRIES
        while measured is None:
            tries_left -= 1
            begun += 1
            try:
                measured = _round(options, engine, begun)
            except Silent as error:
                if not tries_left:
                    raise Unavailable(
                        f"the server was silent in {TRIES} attempts at one round: {error.message}"
                    ) from None
                engine.reconnect()
            if not options.tenant:
                server.clear(tenant)
        if number:
            for name, values in measured.items():
                taken[name] += values
    repeats = begun - options.rounds - 1
    if repeats:
        notes.append(f"{repeats} rounds were measured again, because the server did not answer for a while")
    return taken


def _round(options: argparse.Namespace, engine: SimulatedEngine, prompt: int) -> dict[str, list[Any]]:
    """Measure one round, step by step. Raises Silent; the engine can then begin another round."""
    return {
        "memcpy": [_rate(engine.memcpy())],
        "store": [_rate(engine.store(prompt))],
        "retrieve": [_rate(engine.retrieve())],
        "lookup": engine.lookups(-(-LOOKUPS // options.rounds)),
    }


def _rate(step: Timed) -> float:
    """GB/s of a step."""
    return step.moved_bytes / step.seconds / 1e9


def _shape(options: argparse.Namespace) -> Shape:
    if options.chunk_tokens % options.block_tokens:
        raise BadRequest(
            f"--chunk-tokens: {options.chunk_tokens} is not a multiple of --block-tokens {options.block_tokens}"
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
            f"a chunk of {shape} takes {shape.chunk_bytes / MB:,.0f} MiB; a record has less than 4096: shrink the shape"
        )
    return shape


def _bounded(options: argparse.Namespace, shape: Shape, status: dict[str, Any], notes: list[str]) -> int:
    """Chunks that may be stored in a round without an eviction. Raises Refused if none fits."""
    pool = status["pool"]
    room = min(
        int(L1_SHARE * pool["extents_bytes"]) - pool["used_bytes"],
        int(LEASED_SHARE * pool["extents_bytes"]) - pool["leased_bytes"],
    )
    record_bytes = shape.chunk_bytes + (64 << 10)  # header and section table
    fit = max(0, room) // record_bytes
    may = f"a run may use {max(0, room) / MB:,.0f} of the {pool['extents_bytes'] / MB:,.0f} MiB of L1 without evicting"
    if fit == 0:
        raise Refused(
            f"{may}, and a chunk takes {record_bytes / MB:,.0f} MiB: give a smaller shape, `kvstrata ctl clear`, or "
            "start the server with a larger --l1-size-gb"
        )
    if fit < options.chunks:
        notes.append(f"{fit} chunks a round instead of {options.chunks}: {may}")
    return min(int(fit), int(options.chunks))


def _left(server: RunningServer, tenant: str, given: str) -> int:
    """Clear the chunks of this run, unless the user named the tenant, which may have others.

    Returns the bytes that could not be cleared; 0 if the server does not answer.
    """
    try:
        return 0 if given else server.clear(tenant)
    except KvstrataError:
        return 0  # the run itself has already failed for this reason


def _faulted(status: dict[str, Any]) -> bool:
    return bool(status["pool"]["prefaulted_bytes"] >= status["pool"]["extents_bytes"])


@contextlib.contextmanager
def _ctrl_c_on_sigterm() -> Iterator[None]:
    """Make SIGTERM end the run as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM during the clean-up, which takes seconds at most."""
    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(name, signal.SIG_IGN) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
