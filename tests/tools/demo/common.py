"""What the acts of the demo share: their table, servers that fit memory, waits, prompts, and the vLLM for these."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.harness import vllm_model
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_run import VllmProcess
from tests.tools import provision

Row = dict[str, Any]


class Wrong(Exception):
    """A wrong result, which ends the demo with status 1."""


def yes_no(value: bool) -> str:
    return "yes" if value else "NO"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "engine": ("engine", str),
    "ttft_s": ("first token, s", "{:.3f}".format),
    "cached_tokens": ("cached tokens", str),
    "tokens_equal": ("tokens equal", yes_no),
    "bytes_equal": ("bytes equal", yes_no),
    "gb_per_s": ("GB/s a process", str),
}
"""Title and format of each column."""


class Table:
    """The rows, for the screen and for the file."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, case: str, act: int, *, run: bool = True, ok: bool = True, **values: Any) -> None:
        row: Row = {"case": case, "act": act, "run": run, "ok": ok, **dict.fromkeys(COLUMNS), **values}
        self.rows.append(row)

    def print(self, act: int) -> None:
        """Print the rows of an act, with the columns in which one of them has a value."""
        rows = [row for row in self.rows if row["act"] == act]
        columns = [key for key in COLUMNS if any(row[key] is not None for row in rows)] or ["ttft_s"]
        lines = [["case", *(COLUMNS[key][0] for key in columns)]]
        for row in rows:
            cells = [COLUMNS[key][1](row[key]) if row[key] is not None else "-" for key in columns]
            lines.append([row["case"], *(cells if row["run"] else ["not run"] + [""] * (len(cells) - 1))])
        widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
        print()
        for number, line in enumerate(lines):
            print(
                "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            )
            if number == 0:
                print("  " + "  ".join("-" * width for width in widths))
        print(flush=True)

    @property
    def ok(self) -> bool:
        return all(row["ok"] for row in self.rows)


def say(text: str) -> None:
    print(text, flush=True)


MAX_SHM_MB = 480
"""Below the 512 MB that the demo may take, with room for the index."""
L1_MB = 256
"""Size of L1 in all acts but the first."""
CHUNK_TOKENS = 256
WAIT_S = 60.0


def fitting_l1_mb(wanted_mb: int, least_mb: int) -> int:
    """Returns a pool size that fits memory. Raises Wrong if even the least size does not."""
    available = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    available_mb = int(available[1]) // 1024 if available else wanted_mb * 3
    size_mb = min(wanted_mb, MAX_SHM_MB, available_mb // 3)
    if size_mb < least_mb:
        raise Wrong(f"{available_mb} MB of memory are free; the demo needs {3 * least_mb}")
    return size_mb


def wait_for(condition: Callable[[], Any], failure: str, timeout_s: float = WAIT_S) -> None:
    """Waits until `condition()` is true. Raises Wrong."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise Wrong(f"{failure} within {timeout_s:.0f} s")
        time.sleep(0.02)


def stored_chunks(server: ServerProcess) -> int:
    """Chunks that are READY in L1."""
    return int(server.get("/v1/status")["pool"]["entries"]["ready"])


def loaded_chunks(server: ServerProcess) -> int:
    """Chunks that this server has loaded from L2."""
    return int(server.get("/v1/status")["l2_prefetch"]["counts"].get("loaded", 0))


MODEL, PROMPT_TOKENS, NEW_TOKENS = "160m", 3_000, 16
HIT_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
ENGINE_BYTES = 4 << 30


def prompts() -> tuple[list[int], list[int]]:
    """The prompt, and one to warm up with."""
    draw = random.Random(7)
    prompt, warm_up = ([draw.randrange(3, 32_000) for _ in range(n)] for n in (PROMPT_TOKENS, 300))
    return prompt, warm_up


@contextlib.contextmanager
def begin_vllm(
    name: str, folder: Path, server: ServerProcess, warm_up: list[int], **settings: Any
) -> Iterator[VllmProcess]:
    """vLLM with the model of this name, warmed up."""
    model = vllm_model.ensure_model(name)
    options = {"dtype": vllm_model.dtype_of(name), "max_num_batched_tokens": HIT_TOKENS}
    with VllmProcess(
        model, folder, extra=server.connector_config(**settings), options=options, processes=True
    ) as vllm:
        say(f"  vLLM started in {vllm.start_s:.0f} s")
        vllm.generate(warm_up, max_tokens=4)
        yield vllm


@contextlib.contextmanager
def begin_all(
    name: str, folders: Sequence[Path], server: ServerProcess, warm_up: list[int]
) -> Iterator[list[VllmProcess]]:
    """One such vLLM for each folder. They start at the same time if there is memory for that."""
    at_once = len(folders) if provision.available_memory_bytes() >= ENGINE_BYTES * len(folders) else 1
    with contextlib.ExitStack() as stack:

        def enter(folder: Path) -> VllmProcess:
            begun = begin_vllm(name, folder, server, warm_up)
            vllm = begun.__enter__()
            stack.push(begun.__exit__)
            return vllm

        with ThreadPoolExecutor(at_once) as pool:
            engines = list(pool.map(enter, folders))
        yield engines
