"""`kvstrata bench`: the speed that a running server on this host gives an engine, beside a plain memcpy.

The command attaches as an engine does, with two sets of blocks and without a model.  In a round it copies the chunks
from the first set to the second by memcpy, stores them from the first set under fresh keys, wipes the second set, looks
the chunks up, loads them into the second set, and compares every byte.  Between rounds the chunks are cleared (unless
the user named the tenant), and a round is no larger than the free part of L1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstrata import __version__
from kvstrata.cli.asking import Ask, ask, read_token, usual_url
from kvstrata.cli.bench.flags import whole
from kvstrata.cli.boundary import guarded
from kvstrata.cli.table import table
from kvstrata.client.client import COPY_THREADS
from kvstrata.config.client_model import ClientSettings
from kvstrata.config.model import HttpSettings
from kvstrata.errors import BadRequest, KvstrataError, Refused, Unavailable
from kvstrata.measure.engine import (
    ANSWER_S,
    SETTLE_S,
    WAIT_S,
    Plan,
    Shape,
    SimulatedEngine,
    Timed,
    wait_until,
)
from kvstrata.measure.figures import machine, median_spread, percentile
from kvstrata.memory.paths import RPC_SOCKET, socket_dirs
from kvstrata.rpc import wire
from kvstrata.server.processes import tenant_number
from kvstrata.session.plain import PlainConnection

MB = 1 << 20
L1_SHARE = 0.75
"""Share of L1 that may be filled; eviction ahead of need begins above it (at 0.8 by default)."""
LEASED_SHARE = 0.45
"""Share of L1 for one round, whose chunks are all leased together; leases may keep half of L1."""
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
    add("--port", type=int, default=settings.port,
        help="number after which the server's sockets are named (%(default)s)")  # fmt: skip
    for name, metavar, meaning in (
        ("socket-dir", "DIR", "directory of the server's sockets (derived from the port)"),
        ("url", "URL", "its admin port (as `kvstrata ctl` finds it)"),
        ("admin-token-file", "FILE", "file with the admin port's token (the published one)"),
        ("tenant", "NAME", "tenant to store for, if the server has a tenants file (a fresh name)"),
        ("token-file", "FILE", "file with that tenant's token (none)"),
    ):
        add(f"--{name}", default="", metavar=metavar, help=meaning)
    add("--chunks", type=whole(1, 4096), default=8, metavar="N", help="chunks in a round (%(default)s)")
    add("--rounds", type=whole(1, 1000), default=5, help="measured rounds; one more warms up (%(default)s)")
    add("--threads", type=whole(1, 64), default=COPY_THREADS,
        help="copy threads, also for memcpy (%(default)s)")  # fmt: skip
    for name, default, what in (
        ("layers", 32, "layers of the model"),
        ("kv-heads", 8, "kv heads"),
        ("head-dim", 128, "numbers in a head"),
        ("element-bytes", 2, "bytes of a number"),
        ("chunk-tokens", 256, "tokens in a chunk"),
        ("block-tokens", 16, "tokens in a block"),
    ):
        add(f"--{name}", type=whole(1, 65_536), default=default, metavar="N", help=f"{what} (%(default)s)")
    add("--json", action="store_true", help="print JSON")
    return top


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
    shape = _shape(options)
    url = options.url or usual_url(HttpSettings())
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
        faulted = wait_until(lambda: server.fresh()["pool"]["prefaulted_bytes"] >= extents_bytes, WAIT_S)
        if not faulted or not engine.connect(extents_bytes):
            notes.append("not all pages of L1 were faulted in and mapped yet; a later run is faster")
        rounds = _rounds(options, server, engine, tenant)
        pings = server.ping_seconds(PINGS)
        evicted = server.fresh()["pool"]["evicted_entries"] - before["pool"]["evicted_entries"]
        if evicted:
            notes.append(f"{evicted} chunks were evicted from L1 meanwhile, by this run or by other engines")
    finally:
        if engine is not None:
            engine.close()
        left_bytes = 0
        if not options.tenant:
            with contextlib.suppress(KvstrataError):  # the run itself has already failed for this reason
                left_bytes = server.clear(tenant)
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
) -> dict[str, list[Any]]:
    """Measure all rounds; returns the measurements of each step, without those of the first round, which warms up."""
    taken: dict[str, list[Any]] = {"memcpy": [], "store": [], "retrieve": [], "lookup": []}
    for number in range(options.rounds + 1):
        measured: dict[str, list[Any]] = {
            "memcpy": [_rate(engine.memcpy())],
            "store": [_rate(engine.store(number))],
            "retrieve": [_rate(engine.retrieve())],
            "lookup": engine.lookups(-(-LOOKUPS // options.rounds)),
        }
        if not options.tenant:
            server.clear(tenant)
        for name, values in measured.items() if number else ():
            taken[name] += values
    return taken


def _rate(step: Timed) -> float:
    """GB/s of a step."""
    return step.moved_bytes / step.seconds / 1e9


def _shape(options: argparse.Namespace) -> Shape:
    if options.chunk_tokens % options.block_tokens:
        raise BadRequest(
            f"--chunk-tokens: {options.chunk_tokens} is not a multiple of --block-tokens {options.block_tokens}"
        )
    shape = Shape(*(getattr(options, name) for name in Shape._fields))
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


class RunningServer:
    """The server behind an admin port, which has its sockets in one of `places`."""

    def __init__(self, url: str, token: str, places: Sequence[Path]) -> None:
        """Raises Unavailable, which says what to start, or what other server answers; or ConfigError."""
        self._url = url
        self._token = token
        try:
            self.status: dict[str, Any] = self.fresh()
        except Unavailable as error:
            raise Unavailable(
                f"no server answers: {error.message} Start one with `lmcache-server`, or give the --url of another",
                field="--url",
            ) from None
        self.directory = Path(self.status["instance"]["socket_dir"])
        if self.directory not in places:
            raise Unavailable(
                f"--url: the server at {url} has its sockets in {self.directory}, not in "
                f"{', '.join(map(str, places))}; give its --port or --socket-dir too",
                field="--url",
            )

    def fresh(self) -> dict[str, Any]:
        """Fetch the status document anew; `status` keeps it. Raises KvstrataError."""
        self.status = ask(self._url, Ask("/v1/status"), token=self._token)
        return self.status

    def ping_seconds(self, count: int) -> list[float]:
        """Send `count` pings one after the other; returns the seconds of each. Raises Unavailable."""
        connection = PlainConnection(self.directory / RPC_SOCKET, ANSWER_S)
        try:
            taken = []
            for _ in range(count):
                begun_s = time.monotonic()
                connection.ask(wire.Ping(connection.next_seq()))
                taken.append(time.monotonic() - begun_s)
            return taken
        finally:
            connection.close()

    def clear(self, tenant: str) -> int:
        """Drop a tenant's chunks from L1; returns the bytes left in L1 after `SETTLE_S`. Raises KvstrataError."""
        names = {tenant, f"#{tenant_number(tenant):08x}"}

        def left() -> int:
            ask(self._url, Ask("/v1/clear", {"tier": "l1", "tenant": tenant}), token=self._token)
            return sum(row["bytes"] for row in self.fresh()["tenants"] if row["tenant"] in names)

        wait_until(lambda: left() == 0, SETTLE_S)
        return left()


def report_of(
    options: argparse.Namespace,
    shape: Shape,
    chunks: int,
    status: dict[str, Any],
    rounds: dict[str, list[Any]],
    pings: list[float],
    notes: list[str],
) -> dict[str, Any]:
    """The figures of all rounds together, with the machine, the server and the shape of the chunks."""
    figures = []

    def figure(name: str, unit: str, values: Sequence[float], share: float | None = None) -> None:
        value, (least, greatest) = median_spread(values)
        value = value if share is None else percentile(values, share)
        figures.append({"name": name, "unit": unit, "value": value, "least": least, "greatest": greatest})

    for name in ("store", "retrieve", "memcpy"):
        figure(name, "GB/s", rounds[name])
    for name in ("store", "retrieve"):
        shares = [rate / beside for rate, beside in zip(rounds[name], rounds["memcpy"], strict=True)]
        figure(f"{name} / memcpy", "", shares)
    lookups = [1e6 * seconds for seconds in rounds["lookup"]]
    for share in (0.5, 0.99):
        figure(f"lookup p{100 * share:.0f}", "µs", lookups, share)
    figure("ping p50", "µs", [1e6 * seconds for seconds in pings])
    instance, pool = status["instance"], status["pool"]
    moved = options.rounds * chunks * shape.chunk_bytes
    return {
        "server": f"{instance['instance_id']}, version {instance['version']}, "
        f"L1 {pool['extents_bytes'] / MB:,.0f} MiB",
        "client": __version__,
        "machine": machine(),
        "chunk": f"{shape.chunk_bytes / MB:.4g} MiB: {shape}",
        "run": f"{chunks} chunks, {options.rounds} rounds, {options.threads} copy threads",
        "verified": f"{moved / MB:,.0f} MiB came back byte for byte",
        "verified_bytes": moved,
        "chunks": chunks,
        "figures": figures,
        "notes": notes,
    }


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
