"""What the benchmarks share: the form of a figure, medians, scratch folders, CPU time, one client of a real server."""

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
from typing import Any, TypeVar

from kvstrata.measure.figures import chain_of, machine, median_spread, percentile

__all__ = [
    "NotHere",
    "chain_of",
    "chains",
    "commit",
    "cpu_seconds",
    "engine_client",
    "figure",
    "machine",
    "median_spread",
    "percentile",
    "scratch",
    "sized",
    "wait_until",
]

ROOT = Path(__file__).resolve().parents[1]
SMALL = "BENCH_SMALL"
"""Environment variable that `benchmarks.run --small` sets to 1; processes that a benchmark starts inherit it."""
WAIT_S = 60.0
"""Longest wait for anything that the product should do in milliseconds; beyond it the benchmark has failed."""


Size = TypeVar("Size")


def sized(full: Size, small: Size) -> Size:
    """One size of a benchmark: `full` to measure, `small` to show within seconds that the benchmark works."""
    return small if os.environ.get(SMALL) == "1" else full


class NotHere(Exception):
    """This machine lacks what a benchmark needs; the message says what, and where it comes from."""


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
    """One figure for build/bench.json.

    `ratio` is to the hardware's limit or to a bare library, measured in the same run; `spread` is the least and the
    greatest of the repeats whose median is `value`; `more` is kept as it is (what the ratio is to, percentiles, parts).
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


@functools.cache
def commit() -> str:
    """The commit that is measured, with `+` when tracked files differ from it; empty outside a clone."""

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
    """A fresh folder below build/, removed in the end."""
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-", dir=ROOT / "build"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process that live now, to the nanosecond."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Look every millisecond until it holds. Raises RuntimeError naming `what` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.001)


def engine_client(socket_dir: Path, port: int, blocks: Any, **more: Any) -> Any:
    """A started and attached `CacheClient` that is both sides of an engine with one slice, that of these PagedBlocks.

    `more` goes to its settings; `model`, `chunk_tokens` (256) to its layout identity.
    """
    from kvstrata.client import CacheClient
    from kvstrata.config.model import ClientSettings
    from kvstrata.types import LayoutIdentity, Role

    chunk_tokens = more.pop("chunk_tokens", 256)
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
    )
    client.start()
    try:
        wait_until(lambda: client.connected, "the client attaches")
    except RuntimeError as error:
        client.close()
        raise RuntimeError(f"{error}: {client.error}") from None
    return client


def chains(root: bytes, n_prompts: int, n_chunks: int) -> list[bytes]:
    """`chain_of` prompts 0, 1, …"""
    return [chain_of(root, prompt, n_chunks) for prompt in range(n_prompts)]
