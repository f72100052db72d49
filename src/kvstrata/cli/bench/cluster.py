"""`kvstrata bench cluster`: the load that one controller bears, from simulated instances that speak its protocol.

kvstrata bench cluster --controller tcp://localhost:8400 --instances 100 --chunks 10000
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Sequence
from typing import Any

from kvstrata import __version__
from kvstrata.cli.bench.flags import add_report_flags, progress, run_and_report, whole
from kvstrata.cli.boundary import guarded
from kvstrata.cli.table import table
from kvstrata.measure.cluster import LookupStep, SimulatedCluster, Step, figures_of
from kvstrata.measure.figures import machine
from kvstrata.measure.plot import draw_cluster
from kvstrata.rpc.cluster_fields import MAX_TAGS
from kvstrata.rpc.shared_key import SharedKey
from kvstrata.rpc.zmq_curve import new_secret, open_keys, read_cluster_keys

FIRST_KEYS_PER_S = 50_000
MOST_STEPS = 14


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata bench cluster`."""
    top = argparse.ArgumentParser(
        prog="kvstrata bench cluster",
        description="Measure a controller with simulated instances: the real protocol, no KV bytes.",
        epilog="The instances leave at the end. Meanwhile the controller serves its real cluster more slowly.",
    )
    add = top.add_argument
    add("--controller", type=_endpoint, default="tcp://localhost:8400", metavar="URL",
        help="reply port of the controller (%(default)s)")  # fmt: skip
    add(
        "--curve-file",
        default="",
        metavar="FILE",
        help="CURVE keys, as in a server's controller.curve_file (the key that this user's processes share)",
    )
    add("--insecure", action="store_true", help="the controller was started with --insecure")
    add(
        "--instances", type=whole(2, 1_000), default=16, metavar="N", help="simulated instances (%(default)s)"
    )
    add("--chunks", type=whole(1, 10_000_000), default=10_000, metavar="N",
        help="chunks that each instance holds (%(default)s)")  # fmt: skip
    add("--seconds", type=whole(1, 3_600), default=3, metavar="S", help="length of each step (%(default)s)")
    add("--batch", type=whole(8, MAX_TAGS // 2), default=2_048, metavar="N",
        help="changes in one message (%(default)s)")  # fmt: skip
    add("--lookups-per-s", type=whole(1, 10_000), default=100, metavar="N",
        help="lookups sent beside the events (%(default)s)")  # fmt: skip
    add(
        "--lookup-chunks",
        type=whole(1, 4_096),
        default=64,
        metavar="N",
        help="chunks of a lookup (%(default)s)",
    )
    add("--most-keys-per-s", type=whole(1_000, 100_000_000), default=10_000_000, metavar="N",
        help="highest rate of changes that is tried (%(default)s)")  # fmt: skip
    add("--most-at-a-time", type=whole(1, 1_024), default=64, metavar="N",
        help="concurrent lookups in the last step (%(default)s)")  # fmt: skip
    add_report_flags(top)
    return top


@guarded("kvstrata bench cluster")
def main(arguments: Sequence[str] | None) -> int:
    """Run the benchmark; returns 0. Raises KvstrataError."""
    return run_and_report(parser().parse_args(arguments), run, shown=shown, draw=draw_cluster)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; returns the report. Raises KvstrataError; the simulated instances have left in any case."""
    return asyncio.run(_measure(options))


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.curve_file:
        keys = read_cluster_keys(options.curve_file, "--curve-file")
    elif options.insecure:
        keys = open_keys()
    else:  # an id belongs to the key that registers it, which the shared key never does
        keys = SharedKey("--curve-file").of_member(new_secret())
    tags = min(options.lookup_chunks, options.chunks)
    events: list[Step] = []
    lookups: list[LookupStep] = []
    notes: list[str] = []
    cluster = SimulatedCluster(
        options.controller, instances=options.instances, chunks=options.chunks, keys=keys
    )
    async with cluster:
        with progress(MOST_STEPS + options.most_at_a_time.bit_length(), "step", notes) as step:
            rate = float(min(FIRST_KEYS_PER_S, options.most_keys_per_s))
            while len(events) < MOST_STEPS:
                events.append(
                    await cluster.events(
                        rate,
                        options.seconds,
                        batch=options.batch,
                        lookups_per_s=options.lookups_per_s,
                        tags=tags,
                    )
                )
                step(1)
                if not events[-1].kept_up or rate >= options.most_keys_per_s:
                    break
                rate = min(2 * rate, options.most_keys_per_s)
            at_a_time = 1
            while at_a_time <= options.most_at_a_time:
                lookups.append(await cluster.lookups(at_a_time, options.seconds, tags=tags))
                step(1)
                at_a_time *= 2
    kept_up = [one for one in events if one.kept_up]
    if not kept_up:
        notes.append(
            "the controller did not keep up with the lowest rate: give fewer --lookups-per-s, or use a quieter machine"
        )
    elif len(kept_up) == len(events):
        notes.append("the controller kept up with every rate: its limit lies higher")
    return {
        "kvstrata": __version__,
        "controller": options.controller,
        "instances": options.instances,
        "chunks_each": options.chunks,
        "batch": options.batch,
        "lookup_chunks": tags,
        "machine": machine(),
        "join": {
            "seconds": round(cluster.join_s, 3),
            "keys_per_s": round(options.instances * options.chunks / cluster.join_s),
        },
        "events": [figures_of(one) for one in events],
        "lookups": [figures_of(one) for one in lookups],
        "limit": {
            "keys_per_s": round(kept_up[-1].taken_keys_per_s) if kept_up else 0,
            "lookup_p99_ms": round(kept_up[-1].p99_ms, 3) if kept_up else 0.0,
            "lookups_per_s": round(max(one.per_s for one in lookups)),
        },
        "notes": notes,
    }


def shown(report: dict[str, Any]) -> str:
    """The report as text."""
    heads = {name: report[name] for name in ("controller", "instances", "chunks_each", "batch", "machine")}
    join, limit = report["join"], report["limit"]
    heads["joined"] = f"in {join['seconds']:.2f} s, {join['keys_per_s']:,} chunks/s"
    heads["limit"] = (
        f"{limit['keys_per_s']:,} changes/s with lookups' p99 at {limit['lookup_p99_ms']:.1f} ms; "
        f"{limit['lookups_per_s']:,} lookups/s"
    )
    events = [
        {
            "changes/s offered": f"{one['offered_keys_per_s']:,.0f}",
            "taken": f"{one['taken_keys_per_s']:,.0f}",
            "kept up": "yes" if one["kept_up"] else "no",
            "lag, ms": f"{one['lag_ms']:.0f}",
            "lookups": str(one["lookups"]),
            "p50, ms": f"{one['p50_ms']:.2f}",
            "p99, ms": f"{one['p99_ms']:.2f}",
        }
        for one in report["events"]
    ]
    lookups = [
        {
            f"lookups of {report['lookup_chunks']} chunks at a time": str(one["at_a_time"]),
            "lookups/s": f"{one['per_s']:,.0f}",
            "p50, ms": f"{one['p50_ms']:.2f}",
            "p99, ms": f"{one['p99_ms']:.2f}",
        }
        for one in report["lookups"]
    ]
    notes = "".join(f"\nnote: {note}" for note in report["notes"])
    return "\n\n".join((table(heads), table(events), table(lookups))) + notes


def _endpoint(text: str) -> str:
    if not re.fullmatch(r"tcp://[^\s/,]+:\d{1,5}", text):
        raise argparse.ArgumentTypeError(f"must be tcp://HOST:PORT, found {text!r:.200}")
    return text
