"""Draws the figures of `kvstrata bench` l2, serve and cluster as SVGs with matplotlib (the extra `bench`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kvstrata.errors import ConfigError, install

_RATES = (
    ("put", "value", "put", "#1f5fa8"),
    ("put", "raw", "raw write + fdatasync", "#a9c6e8"),
    ("load", "value", "load", "#b35900"),
    ("load", "raw", "raw read", "#f2c493"),
)
_TIMES = (("put", "o", "#1f5fa8"), ("load", "s", "#b35900"), ("exists", "^", "#3a7d34"))


def check_plot(flag: str) -> None:
    """Raise ConfigError, which names the flag and what to install, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{flag}: needs the Python package 'matplotlib', which is not installed: {install('bench')}",
            field=flag,
        )


def draw_l2(report: dict[str, Any], path: Path) -> None:
    """Draw the rates of the adapter and of raw I/O, and percentiles of the times of batches. Raises OSError."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    sizes = report["sizes"]
    names = [f"{size['chunk_mb']:g} MiB" for size in sizes]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvstrata", "font.size": 9}):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        rates, times = figure.subplots(1, 2)
        shown = [bar for bar in _RATES if bar[1] == "value" or sizes[0][bar[0]]["raw_gb_per_s"]]
        width = 0.8 / len(shown)
        for place, (operation, whose, label, colour) in enumerate(shown):
            found = [size[operation]["gb_per_s" if whose == "value" else "raw_gb_per_s"] for size in sizes]
            values = [each["median"] for each in found]
            at = [number + (place - (len(shown) - 1) / 2) * width for number in range(len(sizes))]
            spread = [
                [each["median"] - each["least"] for each in found],
                [each["greatest"] - each["median"] for each in found],
            ]
            rates.bar(at, values, width * 0.92, label=label, color=colour, yerr=spread, capsize=2,
                      error_kw={"elinewidth": 0.8})  # fmt: skip
            for x, size, each in zip(at, sizes, found, strict=True):
                ratio = size[operation]["ratio"]
                if whose == "value" and ratio:
                    text = f"{ratio['median']:.2f}×"
                    rates.annotate(
                        text, (x, each["greatest"]), (0, 3), textcoords="offset points", ha="center"
                    )
        rates.set_xticks(range(len(sizes)), names)
        rates.set_ylabel("GB/s (median of passes; least to greatest)")
        rates.set_title("Rates; × is the ratio to raw O_DIRECT I/O" if len(shown) == 4 else "Rates")
        rates.margins(y=0.12)
        rates.legend(loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=4, frameon=False)
        for place, (operation, mark, colour) in enumerate(_TIMES):
            for number, size in enumerate(sizes):
                ms = size[operation]["ms"]
                x = number + (place - 1) * 0.22
                label = operation if number == 0 else "_"  # one entry in the legend
                times.plot([x, x], [ms["p50"], ms["p99"]], color=colour, linewidth=1)
                times.plot([x], [ms["p50"]], mark, color=colour, label=label)
                times.plot([x, x], [ms["p95"], ms["p99"]], "_", color=colour, markersize=9)
        times.set_yscale("log")
        times.set_xticks(range(len(sizes)), names)
        times.set_xlim(-0.5, len(sizes) - 0.5)
        times.set_ylabel("ms per batch (log)")
        times.set_title("Batches: median (mark), p95 and p99 (dashes)")
        times.grid(axis="y", which="major", linewidth=0.4)
        times.legend(loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=3, frameon=False)
        figure.suptitle(f"{report['adapter']}: {report['run']}\n{report['machine']}", fontsize=9)
        figure.savefig(path, format="svg", metadata={"Date": None})


_SOURCES = ("#1f5fa8", "#b35900", "#3a7d34", "#7a4f9a", "#8c8c8c")


def draw_serve(report: dict[str, Any], path: Path) -> None:
    """Draw the distribution of each round's TTFT, and the sources of its prompts' tokens. Raises OSError."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rounds = report["rounds"]
    names = [f"round {number}" for number in range(1, len(rounds) + 1)]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvstrata", "font.size": 9}):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        times, tokens = figure.subplots(1, 2)
        for number, (name, found) in enumerate(zip(names, rounds, strict=True)):
            ms = sorted(found["ttfts_ms"])
            if not ms:
                continue
            # The first round is darkest, the last lightest.
            shade = (0.12, 0.37, 0.66, 1.0 - 0.75 * number / len(rounds))
            times.step([ms[0], *ms], [100 * place / len(ms) for place in range(len(ms) + 1)], where="post",
                       color=shade, label=f"{name}: median {found['ttft_ms']['median']:.0f} ms")  # fmt: skip
        times.set_xscale("log")
        times.set_xlabel("TTFT, ms (log)")
        times.set_ylabel("requests at least as fast, %")
        times.set_title("Time to the first token")
        times.grid(which="major", linewidth=0.4)
        times.legend(loc="upper left", frameon=False)
        sources = sorted({name for found in rounds for name in found["sources"] if "chunks" not in name})
        computed = [
            max(0, f["input_tokens"] - sum(f["sources"].get(name, 0) for name in sources)) for f in rounds
        ]
        below = [0] * len(rounds)
        for name, colour in zip([*sources, "computed"], [*_SOURCES[: len(sources)], "#d9d9d9"], strict=True):
            values = computed if name == "computed" else [found["sources"].get(name, 0) for found in rounds]
            if any(values):
                tokens.bar(range(len(rounds)), values, 0.7, bottom=below, color=colour, label=name)
            below = [a + b for a, b in zip(below, values, strict=True)]
        tokens.set_xticks(range(len(rounds)), names)
        tokens.set_ylabel("tokens of prompts")
        tokens.set_title(
            "Sources of prompts' tokens" if sources else "Prompts (the endpoint reports no sources)"
        )
        if any(below):
            tokens.legend(loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=4, frameon=False)
        label = f"{report['label']}: " if report["label"] else ""
        figure.suptitle(f"{label}{report['workload']}, {report['meaning']}\n{report['machine']}", fontsize=9)
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw_cluster(report: dict[str, Any], path: Path) -> None:
    """Draw the offered and the taken changes, and the times of lookups with and without changes. Raises OSError."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    events, lookups = report["events"], report["lookups"]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvstrata", "font.size": 9}):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        rates, times = figure.subplots(1, 2)
        offered = [one["offered_keys_per_s"] for one in events]
        rates.plot(offered, offered, "--", color="#8c8c8c", linewidth=1, label="offered")
        rates.plot(offered, [one["taken_keys_per_s"] for one in events], "-o", color="#1f5fa8", label="taken")
        rates.set_xscale("log")
        rates.set_yscale("log")
        rates.set_xlabel("changes/s offered (log)")
        rates.set_ylabel("changes/s (log)")
        rates.set_title(f"Events of {report['instances']} instances")
        rates.grid(which="major", linewidth=0.4)
        rates.legend(loc="upper left", frameon=False)
        latency = rates.twinx()
        latency.plot(
            offered,
            [one["p99_ms"] for one in events],
            ":s",
            color="#b35900",
            label="lookups beside them: p99",
        )
        latency.set_ylabel("ms", color="#b35900")
        latency.set_ylim(bottom=0)
        latency.legend(loc="lower right", frameon=False)
        for key, mark, colour in (("p50_ms", "o", "#3a7d34"), ("p99_ms", "s", "#b35900")):
            label = key[:-3]
            times.plot([one["per_s"] for one in lookups], [one[key] for one in lookups], f"-{mark}", color=colour,
                       label=label)  # fmt: skip
        for one in lookups:
            times.annotate(
                f"{one['at_a_time']}", (one["per_s"], one["p99_ms"]), (4, 4), textcoords="offset points"
            )
        times.set_yscale("log")
        times.set_xlabel("lookups/s")
        times.set_ylabel("ms (log)")
        times.set_title(f"Lookups of {report['lookup_chunks']} chunks; numbers: at a time")
        times.grid(which="major", linewidth=0.4)
        times.legend(loc="upper left", frameon=False)
        figure.suptitle(
            f"{report['controller']}: {report['chunks_each']} chunks each\n{report['machine']}", fontsize=9
        )
        figure.savefig(path, format="svg", metadata={"Date": None})
