"""Code that benchmarks share: the form of a figure, medians, scratch folders, CPU time, a client of a real server."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvstrata.cli import asking
from kvstrata.measure.figures import chain_of, machine, median_spread, percentile

if TYPE_CHECKING:
    from tests.harness.server_process import ServerProcess

__all__ = [
    "NotHere",
    "chain_of",
    "chains",
    "clear_l1",
    "commit",
    "compared",
    "cpu_seconds",
    "engine_client",
    "figure",
    "fill_tier",
    "is_faulted",
    "machine",
    "median_spread",
    "percentile",
    "scratch",
    "sized",
    "start_faulted",
    "store_ended",
    "wait_until",
]

ROOT = Path(__file__).resolve().parents[1]
SMALL = "BENCH_SMALL"
"""Environment variable that `benchmarks.run --small` sets to 1; processes that a benchmark starts inherit it."""
WAIT_S = 60.0
"""Longest wait for something that should take milliseconds; after this time the benchmark has failed."""
FILLS = 4
"""Rounds in which an engine fills a tier, at most."""
STORES = 5
"""Stores of the same chunks, at most."""


Size = TypeVar("Size")


def sized(full: Size, small: Size) -> Size:
    """Choose a size: `full` to measure, `small` with `--small`, to show within seconds that the benchmark works."""
    return small if os.environ.get(SMALL) == "1" else full


class NotHere(Exception):
    """This machine lacks something that a benchmark needs; the message says what, and how to get it."""


def figure(
    name: str,
    *,
    value: float,
    unit: str,
    ratio: float,
    target: str,
    ok: bool,
    spread: Sequence[float] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Make one figure for build/bench.json.

    `ratio` compares with the hardware's limit or with a bare library, measured in the same run; `spread` is the least
    and the greatest of the repeats whose median is `value`; `more` is kept as it is (`ratio_to`, percentiles, parts).
    """
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "ratio": ratio,
        "target": target,
        "ok": bool(ok),
        "spread": list(spread) if spread is not None else None,
        "machine": machine(),
        "commit": commit(),
        **more,
    }


def compared(
    name: str,
    ours: float | Sequence[float],
    unit: str,
    to: str,
    beside: float | Sequence[float],
    *,
    least: float | None = None,
    most: float | None = None,
    most_value: float | None = None,
    inverse: bool = False,
    ok: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Make the figure of repeats `ours` and of `beside`, what the same run measured of `to`.

    The ratio, ours ÷ beside (`inverse`: beside ÷ ours), is the median over the rounds where both have as many repeats,
    else that of the medians.  It must be `least` at least and `most` at most, the value `most_value`; without a bound
    the figure is reported only.  `ok` is a further condition.
    """
    ours, beside = ([one] if isinstance(one, int | float) else list(one) for one in (ours, beside))
    value, spread = median_spread(ours)
    floor, floor_spread = median_spread(beside)
    pairs = list(zip(ours, beside, strict=True)) if len(ours) == len(beside) else [(value, floor)]
    ratio, ratio_spread = median_spread([b / a if inverse else a / b for a, b in pairs])
    bounds = [
        (least is None or ratio >= least, f"≥ {least} ×"),
        (most is None or ratio <= most, f"≤ {most} ×"),
        (most_value is None or value <= most_value, f"≤ {most_value} {unit}"),
    ]
    wanted = [
        text for (_, text), bound in zip(bounds, (least, most, most_value), strict=True) if bound is not None
    ]
    return figure(
        name,
        value=value,
        unit=unit,
        ratio=ratio,
        target=", ".join(wanted) or "reported",
        ok=ok and all(met for met, _ in bounds),
        spread=spread if len(ours) > 1 else None,
        ratio_to=to,
        beside=floor,
        beside_spread=floor_spread,
        ratio_spread=ratio_spread,
        **more,
    )


@functools.cache
def commit() -> str:
    """Return the measured commit, with `+` when tracked files differ from it; empty outside a clone."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short", "HEAD")
        changed = git(
            "status", "--porcelain", "--untracked-files=no", "--", "src", "ext", "benchmarks", "setup.py"
        )
    except FileNotFoundError:
        return ""
    return head + ("+" if changed else "")


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """Make a folder below build/ and remove it at the end of the block."""
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-", dir=ROOT / "build"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time in seconds of all threads that a process has now."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait until `condition()` holds, asking every millisecond. Raises RuntimeError naming `what` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.001)


def start_faulted(server: ServerProcess) -> None:
    """Start a server and wait until its pool is faulted in."""
    server.start()
    wait_until(lambda: is_faulted(server.get("/v1/status")), "the pool is faulted in", 120)


def is_faulted(found: dict[str, Any]) -> bool:
    """Whether a status says that the whole pool is faulted in."""
    return bool(found["pool"]["prefaulted_bytes"] >= found["pool"]["extents_bytes"])


def clear_l1(server: ServerProcess) -> None:
    """Empty L1, so that a chunk is found in a tier or nowhere."""
    asking.ask(server.url, asking.Ask("/v1/clear", {"tier": "l1"}))


def fill_tier(server: ServerProcess, tier: str, compute: Callable[[], None], n_chunks: int) -> None:
    """Let an engine `compute` until this tier was given `n_chunks`, and empty L1. Raises RuntimeError.

    An engine stores nothing while the server is silent for a moment: what lacks then is computed again.
    """

    def put() -> int:
        outcomes = server.get("/v1/status")["l2_store"]["adapters"][tier]["outcomes"]
        return int(outcomes.get("stored", 0))

    for left in reversed(range(FILLS)):
        compute()
        try:
            wait_until(lambda: put() >= n_chunks, "the tier has all chunks", timeout_s=20.0)
        except RuntimeError:
            if not left:
                raise
        clear_l1(server)
        if put() >= n_chunks:
            return


def store_ended(client: Any, job: Any, again: Callable[[], Any]) -> None:
    """Wait until a store of a `CacheClient` has ended with all chunks in L1. Raises RuntimeError if it never does.

    A server that is silent for a moment, as on a busy machine, takes no chunks: they are then stored `again`.
    """
    for _ in range(STORES):
        if job.done.wait(WAIT_S) and set(job.outcomes) <= {"stored", "present"}:
            return
        wait_until(lambda: client.connected, "the server answers again")
        job = again()
    raise RuntimeError(f"a prompt could not be stored: {sorted(set(job.outcomes))}")


def engine_client(socket_dir: Path, port: int, blocks: Any, **more: Any) -> Any:
    """Start and attach a `CacheClient` for both sides of an engine whose only slice is that of these PagedBlocks.

    `more` goes to the client's settings, except `model` and `chunk_tokens` (256), which go to its layout identity, and
    `threads` (2), those that copy.  The caller closes the client.  Raises RuntimeError if it does not attach in WAIT_S.
    """
    from kvstrata.client import CacheClient
    from kvstrata.config.client_model import ClientSettings
    from kvstrata.native.core import CopyEngine
    from kvstrata.types import LayoutIdentity, Role

    engine, chunk_tokens = CopyEngine(threads=more.pop("threads", 2)), more.pop("chunk_tokens", 256)
    layout = LayoutIdentity(model=more.pop("model", "bench"), kv_dtype="bf16", chunk_tokens=chunk_tokens)
    settings = ClientSettings(socket_dir=str(socket_dir), port=port, chunk_size=chunk_tokens, **more)
    client = CacheClient(
        settings,
        role=Role.CLIENT,
        layout=layout,
        group=secrets.token_bytes(16),
        engine_slices=1,
        slice=blocks.slice(),
        facts=blocks.facts,
        engine=engine,
    )
    client.start()
    try:
        wait_until(lambda: client.connected, "the client attaches")
    except RuntimeError as error:
        client.close()
        raise RuntimeError(f"{error}: {client.error}") from None
    return client


def chains(root: bytes, n_prompts: int, n_chunks: int) -> list[bytes]:
    """Return the chain keys (see `chain_of`) of each of the prompts 0, 1, …"""
    return [chain_of(root, prompt, n_chunks) for prompt in range(n_prompts)]
