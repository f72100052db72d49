"""The report of `kvstrata bench`: the figures of all rounds, as JSON and as text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from kvstrata import __version__
from kvstrata.cli.table import table
from kvstrata.measure.engine import Shape
from kvstrata.measure.figures import machine, median_spread, percentile

MB = 1 << 20


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
