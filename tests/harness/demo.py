"""`make demo`: the main job on real input, in two acts, and a table of what came out.

Act 1 needs only the clone's `.venv`: a server on embedded defaults, several client processes that store and retrieve KV
of a Llama-8B shape, SIGKILL, restart; every retrieved byte is compared.
Act 2 is real vLLM on the CPU with a small random-weight Llama, the engine in a process of its own.
With `REMOTE=mooncake` there is one act only: two servers that share a remote tier and nothing else, with real vLLM
where act 2 would have it.  With `CLUSTER=1` it is another one: a controller, two servers and two vLLM processes, of
which the second one hits what the first one computed; `KEEP=1` leaves all of it running, dashboard included, until
Ctrl-C.

All state lies in a fresh folder under `build/`, the sockets under /tmp and the pool under /dev/shm, all named after
this process; they are removed at the end, also after Ctrl-C, and at the next start after worse.  Exit status: 0 when
every row that ran is right, 1 when bytes or tokens differ or a hit is missing, 2 when something did not start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.harness import remotes, vllm_env, vllm_model
from tests.harness.child import Child, ChildEnded, ChildError
from tests.harness.cluster import Cluster
from tests.harness.daemon import Unavailable
from tests.harness.server_process import ServerFailed, ServerProcess, sweep
from tests.harness.vllm_run import VllmFailed, VllmProcess

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "build" / "demo.json"
MB = 1 << 20
MAX_SHM_MB = 480
"""Below the 512 MB that the demo may take, with room for the index."""
CLIENTS = 3
L1_MB_ACT_2 = 256
MODEL, PROMPT_TOKENS, CHUNK_TOKENS, NEW_TOKENS = "160m", 3_000, 256, 16
HIT_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
WAIT_S = 60.0
RECOVERY_S = 20.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Row = dict[str, Any]


class Wrong(Exception):
    """A result that must not be: the demo goes on to the next act and ends with status 1."""


class Table:
    """Rows as they come, on the screen and for the file."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, case: str, act: int, *, run: bool = True, ok: bool = True, **values: Any) -> None:
        """One row; printed at once."""
        row: Row = {
            "case": case, "act": act, "run": run, "ok": ok,
            "ttft_s": None, "cached_tokens": None, "tokens_equal": None, "bytes_equal": None, "gb_per_s": None,
            **values,
        }  # fmt: skip
        self.rows.append(row)

    def print(self, act: int, columns: list[tuple[str, str, Callable[[Any], str]]]) -> None:
        """The rows of one act."""
        lines = [["case", *(title for _, title, _ in columns)]]
        for row in self.rows:
            if row["act"] == act:
                cells = [show(row[key]) if row[key] is not None else "-" for key, _, show in columns]
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
        """Whether every row that ran is right."""
        return all(row["ok"] for row in self.rows)


def yes_no(value: bool) -> str:
    return "yes" if value else "NO"


def say(text: str) -> None:
    print(text, flush=True)


def fitting_l1_mb(wanted_mb: int, least_mb: int) -> int:
    """Pool size that fits memory. Raises Wrong when even the least does not."""
    available = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    available_mb = int(available[1]) // 1024 if available else wanted_mb * 3
    size_mb = min(wanted_mb, MAX_SHM_MB, available_mb // 3)
    if size_mb < least_mb:
        raise Wrong(f"{available_mb} MB of memory are free; the demo needs {3 * least_mb}")
    return size_mb


# -- act 1 ---------------------------------------------------------------------------------------------------------


def act_1(folder: Path, table: Table) -> None:
    """Server and clients without an engine."""
    # All clients hold leases at once, and leases may cover half of the pool.
    l1_mb = fitting_l1_mb(pool_mb(2), pool_mb(1))
    each = 2 if l1_mb >= pool_mb(2) else 1
    say(
        f"Act 1: lmcache-server with {l1_mb} MB of shared memory, {CLIENTS} client processes, "
        f"KV of a Llama-8B shape (32 MiB a chunk of 256 tokens)"
    )
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(folder / "act1", l1_mb=l1_mb, l2="embedded"))
        ready = server.start()
        say(f"  server ready in {ready['ready_s']} s, pid {ready['pid']}")
        clients = [
            stack.enter_context(
                Child(
                    "tests.harness.load_client", str(server.socket_dir), str(each), str(number),
                    log=folder / f"client-{number}.log",
                )
            )
            for number in range(1, CLIENTS + 1)
        ]  # fmt: skip
        for client in clients:
            wait_for(lambda client=client: client.ask("connected"), "a client did not attach")
        stores = together(clients, lambda client, at: client.ask("store", seed=at, chunks=each))
        row_of_copies(table, f"store, {CLIENTS} processes", each, stores, equal=None)
        problem = [s["outcomes"] for s in stores if set(s["outcomes"]) != {"stored"}]
        if problem:
            raise Wrong(f"a store was refused: {problem}")

        def of_neighbour(client: Child, at: int) -> Any:
            return client.ask("retrieve", seed=(at + 1) % CLIENTS, chunks=each)

        row_of_copies(table, "retrieve what another process stored", each, together(clients, of_neighbour))
        server.kill()
        say("  server killed (SIGKILL)")
        ready = server.start()
        say(f"  server back in {ready['ready_s']} s, pool {'adopted' if ready['adopted'] else 'NEW'}")
        for client in clients:
            wait_for(lambda client=client: client.ask("connected"), "a client did not attach again")
        row_of_copies(table, "retrieve after SIGKILL and restart", each, together(clients, of_neighbour))


def pool_mb(chunks_each: int) -> int:
    """Pool for so many chunks of 32 MiB a client, and a little."""
    return 2 * 32 * CLIENTS * chunks_each + 32


def together(clients: list[Child], ask: Callable[[Child, int], Any]) -> list[Any]:
    """The same of all clients at once."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(ask, clients, range(len(clients))))


def row_of_copies(table: Table, case: str, each: int, results: list[Any], equal: bool | None = True) -> None:
    """One row of act 1 out of all clients' results."""
    chunks = sum(r.get("chunks", each) for r in results)
    complete = chunks == CLIENTS * each
    if equal is not None:
        equal = complete and all(r["equal"] for r in results)
    rates = [r["bytes"] / r["seconds"] / 1e9 for r in results if r["seconds"]]
    table.add(
        case,
        1,
        ok=complete and equal is not False,
        cached_tokens=chunks * CHUNK_TOKENS,
        bytes_equal=equal,
        gb_per_s=round(statistics.median(rates), 2) if rates else None,
    )


def wait_for(condition: Callable[[], Any], failure: str, timeout_s: float = WAIT_S) -> None:
    """Until `condition` holds. Raises Wrong."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise Wrong(f"{failure} within {timeout_s:.0f} s")
        time.sleep(0.02)


# -- act 2 ---------------------------------------------------------------------------------------------------------

CASES_2 = (
    "cold",
    "vLLM's own prefix cache (the floor)",
    "hit in a fresh vLLM process",
    "hit after SIGKILL of the server and restart",
    "hit from L2 after /dev/shm was wiped",
    "server stopped (SIGSTOP), computed",
    "hit after the server goes on (SIGCONT)",
)


def act_2(folder: Path, table: Table, size: str) -> None:
    """Real vLLM."""
    l1_mb = fitting_l1_mb(L1_MB_ACT_2, 160)
    say(
        f"Act 2: real vLLM on the CPU, {PROMPT_TOKENS} tokens of prompt, a random-weight Llama of {size} parameters"
    )
    prompt, warm_up = prompts()
    model = vllm_model.ensure_model(size)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(folder / "act2", l1_mb=l1_mb, l2="embedded"))
        server.start()
        expected: list[int] = []

        def row(
            case: int, result: dict[str, Any], least: int, most: int = PROMPT_TOKENS, *, ok: bool = True
        ) -> None:
            equal = not expected or result["tokens"] == expected
            cached = result["cached_tokens"] or 0
            table.add(
                CASES_2[case],
                2,
                ok=ok and equal and least <= cached <= most,
                ttft_s=round(result["ttft_s"], 3),
                cached_tokens=cached,
                tokens_equal=equal,
            )
            say(
                f"  {CASES_2[case]}: first token after {result['ttft_s']:.3f} s, {cached} tokens from a cache"
            )

        def begin(name: str) -> VllmProcess:
            return stack.enter_context(begin_vllm(model, folder / name, server, warm_up))

        first = begin("vllm-1")
        cold = first.generate(prompt, max_tokens=NEW_TOKENS)
        expected = cold["tokens"]
        row(0, cold, 0, 0)
        row(1, first.generate(prompt, max_tokens=NEW_TOKENS), HIT_TOKENS)
        wait_for(lambda: stored_chunks(server) >= HIT_TOKENS // CHUNK_TOKENS, "the prompt was not stored")
        first.quit()
        second = begin("vllm-2")
        row(2, second.generate(prompt, max_tokens=NEW_TOKENS), HIT_TOKENS)
        server.kill()
        server.start()
        row(3, after_recovery(server, second, prompt), HIT_TOKENS)
        server.stop()  # in order: what waits for L2 is written
        server.wipe_segment()
        server.start()
        from_l2 = after_recovery(server, second, prompt)
        row(4, from_l2, HIT_TOKENS, ok=loaded_chunks(server) >= HIT_TOKENS // CHUNK_TOKENS)
        server.freeze()
        second.ask("reset_prefix_cache")
        row(5, second.generate(prompt, max_tokens=NEW_TOKENS), 0, 0)
        server.thaw()
        row(6, after_recovery(server, second, prompt), HIT_TOKENS)


def prompts() -> tuple[list[int], list[int]]:
    """The prompt, and one to warm up with."""
    draw = random.Random(7)
    prompt, warm_up = ([draw.randrange(3, 32_000) for _ in range(n)] for n in (PROMPT_TOKENS, 300))
    return prompt, warm_up


@contextlib.contextmanager
def begin_vllm(
    model: Path, folder: Path, server: ServerProcess, warm_up: list[int], **settings: Any
) -> Iterator[VllmProcess]:
    """vLLM that was warmed up."""
    # bfloat16 takes five times as long as float32 where the CPU has neither AVX-512-BF16 nor AMX.
    options = {"dtype": "float32", "max_num_batched_tokens": HIT_TOKENS}
    with VllmProcess(
        model, folder, extra=server.connector_config(**settings), options=options, processes=True
    ) as vllm:
        say(f"  vLLM started in {vllm.start_s:.0f} s")
        vllm.generate(warm_up, max_tokens=4)
        yield vllm


def after_recovery(server: ServerProcess, vllm: VllmProcess, prompt: list[int]) -> dict[str, Any]:
    """The prompt with vLLM's own cache emptied, once both sides of the connector are attached and answer again."""

    def attached() -> bool:
        return int(server.get("/v1/status")["sessions"]["attached"]) >= 2

    wait_for(attached, "vLLM did not attach again", RECOVERY_S)
    begun_s = time.monotonic()
    while True:
        vllm.ask("reset_prefix_cache")
        result = vllm.generate(prompt, max_tokens=NEW_TOKENS)
        if result["cached_tokens"] or time.monotonic() - begun_s > RECOVERY_S:
            return result


def stored_chunks(server: ServerProcess) -> int:
    """Chunks that are READY in L1."""
    return int(server.get("/v1/status")["pool"]["entries"]["ready"])


def loaded_chunks(server: ServerProcess) -> int:
    """Chunks that this server has loaded from L2."""
    return int(server.get("/v1/status")["l2_prefetch"]["counts"].get("loaded", 0))


# -- act 3 ---------------------------------------------------------------------------------------------------------

CASES_3 = ("first server, cold", "second server, which never computed it")


def act_3(folder: Path, table: Table, size: str, name: str, *, with_vllm: bool) -> None:
    """Two servers, one after the other, that have nothing in common but a remote tier."""
    say(f"Two servers that share {name} and nothing else: each has an L1 of its own, and the first is gone before "
        "the second starts")  # fmt: skip
    l1_mb = fitting_l1_mb(L1_MB_ACT_2, 160)
    with remotes.tier(name, folder) as tier:
        for number in (0, 1):
            with ServerProcess(
                folder / f"server-{number}",
                l1_mb=l1_mb,
                l2="embedded",
                flags=("--l2-adapter", json.dumps(tier.entry)),
                environment=tier.environment,
            ) as server:
                server.start()
                play = _remote_vllm if with_vllm else _remote_client
                play(folder, table, server, number, size)
                loaded = loaded_chunks(server)
                table.rows[-1]["ok"] &= loaded > 0 if number else loaded == 0
                if number == 0:
                    wait_for(lambda server=server: _put_chunks(server) >= stored_chunks(server) > 0,
                             f"not everything was put to {name}")  # fmt: skip
                server.stop()


def _remote_vllm(folder: Path, table: Table, server: ServerProcess, number: int, size: str) -> None:
    prompt, warm_up = prompts()
    model = vllm_model.ensure_model(size)
    # What is loaded by then is a hit; a slow machine gets the time for all of it.
    settings = {"kvstrata.lookup_timeout_ms": 30_000}
    with begin_vllm(model, folder / f"vllm-{number}", server, warm_up, **settings) as vllm:
        result = vllm.generate(prompt, max_tokens=NEW_TOKENS)
        cached = result["cached_tokens"] or 0
        first = next((row for row in table.rows if row["case"] == CASES_3[0]), None)
        equal = first is None or result["tokens"] == first["tokens"]
        table.add(
            CASES_3[number],
            3,
            ok=equal and cached == (HIT_TOKENS if number else 0),
            ttft_s=round(result["ttft_s"], 3),
            cached_tokens=cached,
            tokens_equal=equal,
            tokens=result["tokens"],
        )
        if number == 0:
            wait_for(lambda: stored_chunks(server) >= HIT_TOKENS // CHUNK_TOKENS, "the prompt was not stored")
        vllm.quit()


def _remote_client(folder: Path, table: Table, server: ServerProcess, number: int, size: str) -> None:
    chunks = 2
    with Child(
        "tests.harness.load_client",
        str(server.socket_dir),
        str(chunks),
        "1",
        log=folder / f"client-{number}.log",
    ) as client:
        wait_for(lambda: client.ask("connected"), "a client did not attach")
        if number == 0:
            stored = client.ask("store", seed=3, chunks=chunks)
            table.add(CASES_3[0], 3, ok=set(stored["outcomes"]) == {"stored"}, cached_tokens=0)
        else:
            found = client.ask("retrieve", seed=3, chunks=chunks)
            whole = found.get("chunks") == chunks and found["equal"]
            table.add(CASES_3[1], 3, ok=whole, cached_tokens=chunks * CHUNK_TOKENS, bytes_equal=whole)


def _put_chunks(server: ServerProcess) -> int:
    (adapter,) = server.get("/v1/status")["l2_store"]["adapters"].values()
    return int(adapter["outcomes"].get("stored", 0))


# -- act 4 ---------------------------------------------------------------------------------------------------------

CASES_4 = (
    "first instance, cold",
    "second instance, which never computed it",
    "second instance again, from its own L1",
    "first instance killed (SIGKILL): another prompt of it, computed",
)


def act_4(folder: Path, table: Table, size: str, *, with_vllm: bool, keep: bool) -> None:
    """A cluster: what one instance has, the others hit."""
    say("A controller and two instances: the first one's L1 serves the second one")
    l1_mb = fitting_l1_mb(L1_MB_ACT_2, 160)
    # As for vLLM's lookups below: an owner that gets no core for a moment is no miss.
    settings = {"KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": "3000"}
    with Cluster(folder, l1_mb=l1_mb, n_servers=2, settings=settings) as cluster:
        say(f"  controller ready, dashboard at {cluster.controller.url}/")
        if with_vllm:
            _cluster_vllm(folder, table, cluster, size)
        else:
            _cluster_clients(folder, table, cluster)
        if keep:
            if with_vllm:
                cluster.servers[0].start()  # it was killed; its L1 is still there
            say(f"  The dashboard stays at {cluster.controller.url}/ until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()


def _cluster_vllm(folder: Path, table: Table, cluster: Cluster, size: str) -> None:
    prompt, warm_up = prompts()
    other = list(reversed(prompt))
    model = vllm_model.ensure_model(size)
    first_server, second_server = cluster.servers
    chunks = HIT_TOKENS // CHUNK_TOKENS
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                # What is loaded by then is a hit; a slow machine gets the time for all of it.
                begin_vllm(
                    model, folder / f"vllm-{at}", server, warm, **{"kvstrata.lookup_timeout_ms": 30_000}
                )
            )
            for at, (server, warm) in enumerate(
                ((first_server, warm_up), (second_server, list(reversed(warm_up))))
            )
        )
        expected: list[int] = []

        def row(case: int, result: dict[str, Any], cached_tokens: int, *, ok: bool = True) -> None:
            cached = result["cached_tokens"] or 0
            equal = not expected or result["tokens"] == expected
            table.add(
                CASES_4[case],
                4,
                ok=ok and equal and cached == cached_tokens,
                ttft_s=round(result["ttft_s"], 3),
                cached_tokens=cached,
                tokens_equal=equal,
            )
            say(
                f"  {CASES_4[case]}: first token after {result['ttft_s']:.3f} s, {cached} tokens from a cache"
            )

        cold = first.generate(prompt, max_tokens=NEW_TOKENS)
        expected = cold["tokens"]
        row(0, cold, 0)
        of_other = first.generate(other, max_tokens=NEW_TOKENS)
        wait_for(lambda: stored_chunks(first_server) >= 2 * chunks, "the prompts were not stored")
        cluster.until_known(0)
        read = second.generate(prompt, max_tokens=NEW_TOKENS)
        row(1, read, HIT_TOKENS, ok=cluster.peer_records(1) >= chunks)
        second.ask("reset_prefix_cache")
        row(2, second.generate(prompt, max_tokens=NEW_TOKENS), HIT_TOKENS)
        first_server.kill()
        expected = of_other["tokens"]
        row(3, second.generate(other, max_tokens=NEW_TOKENS), 0)
        for vllm in (first, second):
            vllm.quit()


def _cluster_clients(folder: Path, table: Table, cluster: Cluster) -> None:
    chunks = 2
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                Child(
                    "tests.harness.load_client", str(server.socket_dir), str(chunks), str(number),
                    log=folder / f"client-{number}.log",
                )
            )
            for number, server in enumerate(cluster.servers)
        ]  # fmt: skip
        for client in clients:
            wait_for(lambda client=client: client.ask("connected"), "a client did not attach")
        stored = clients[0].ask("store", seed=3, chunks=chunks)
        table.add(CASES_4[0], 4, ok=set(stored["outcomes"]) == {"stored"}, cached_tokens=0)
        cluster.until_known(0)
        for case in (1, 2):
            found = clients[1].ask("retrieve", seed=3, chunks=chunks)
            whole = found.get("chunks") == chunks and found["equal"]
            read = cluster.peer_records(1) == chunks
            table.add(
                CASES_4[case], 4, ok=whole and read, cached_tokens=chunks * CHUNK_TOKENS, bytes_equal=whole
            )


def vllm_wanted(answer: str) -> str:
    """Why act 2 is not run; empty when it is. Prepares the environment where that is small or asked for."""
    if answer == "0":
        return "VLLM=0"
    if answer == "1":
        os.environ["KVSTRATA_VLLM"] = "1"
    try:
        if vllm_env.find() is None:
            size = vllm_env.download_size().download_bytes
            if size > vllm_env.SMALL_BYTES and answer != "1":
                return f"real vLLM would be a download of {size / 1e9:.1f} GB; to run it: make demo VLLM=1"
            say(f"Act 2 needs real vLLM: a download of {size / 1e9:.1f} GB, once")
            vllm_env.ensure()
    except vllm_env.Unavailable as reason:
        return str(reason)
    return ""


# -- all -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fresh_folder() -> Iterator[Path]:
    """A folder under build/ that is gone afterwards; what killed demos left is removed first."""
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    sweep()
    for left in build.glob("demo-*"):
        owner = re.fullmatch(r"demo-(\d+)-.*", left.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"demo-{os.getpid()}-", dir=build))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_result(table: Table) -> None:
    """build/demo.json, in one piece: two demos at once both leave a whole file."""
    fd, name = tempfile.mkstemp(dir=RESULT.parent, prefix=".demo-")
    with os.fdopen(fd, "w") as file:
        json.dump({"rows": table.rows, "ok": table.ok}, file, indent=2)
    os.chmod(name, 0o644)
    os.replace(name, RESULT)


def stop_on_signal(number: int, frame: Any) -> None:
    for again in STOP_SIGNALS:
        signal.signal(again, signal.SIG_IGN)  # the clean-up is not interrupted
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description="the main job on real input; see the top of this file")
    wish = os.environ.get("VLLM", os.environ.get("KVSTRATA_VLLM", ""))
    parser.add_argument("--vllm", default=wish, choices=("", "0", "1"))
    parser.add_argument("--remote", default=os.environ.get("REMOTE", ""), choices=("", *remotes.NAMES),
                        help="only that: two servers with this remote tier")  # fmt: skip
    cluster = os.environ.get("CLUSTER", "") not in ("", "0")
    parser.add_argument("--cluster", action="store_true", default=cluster,
                        help="only that: a controller and two instances that read from each other")  # fmt: skip
    keep = os.environ.get("KEEP", "") not in ("", "0")
    parser.add_argument("--keep", action="store_true", default=keep,
                        help="with --cluster: leave it running until Ctrl-C")  # fmt: skip
    parser.add_argument("--act", type=int, choices=(1, 2), help="only this act")
    parser.add_argument("--model", default=MODEL, choices=tuple(vllm_model.SIZES), help="of act 2")
    arguments = parser.parse_args()
    for number in STOP_SIGNALS:
        signal.signal(number, stop_on_signal)
    table = Table()
    status = 0
    begun_s = time.monotonic()
    with fresh_folder() as folder:
        try:
            if arguments.remote or arguments.cluster:
                reason = vllm_wanted(arguments.vllm)
                if reason:
                    say(f"Without vLLM: {reason}")
                if arguments.cluster:
                    act_4(folder, table, arguments.model, with_vllm=not reason, keep=arguments.keep)
                else:
                    act_3(folder, table, arguments.model, arguments.remote, with_vllm=not reason)
                table.print(
                    4 if arguments.cluster else 3,
                    [
                        ("ttft_s", "first token, s", lambda s: f"{s:.3f}"),
                        ("cached_tokens", "cached tokens", str),
                        ("tokens_equal", "tokens equal", yes_no),
                        ("bytes_equal", "bytes equal", yes_no),
                    ],
                )
            elif arguments.act != 2:
                act_1(folder, table)
                table.print(
                    1,
                    [
                        ("cached_tokens", "tokens", str),
                        ("gb_per_s", "GB/s a process", str),
                        ("bytes_equal", "bytes equal", yes_no),
                    ],
                )
                say(f"  Act 1 took {time.monotonic() - begun_s:.0f} s")
            if arguments.act != 1 and not arguments.remote and not arguments.cluster:
                reason = vllm_wanted(arguments.vllm)
                if reason:
                    say(f"Act 2 is not run: {reason}")
                    for case in CASES_2:
                        table.add(case, 2, run=False)
                else:
                    act_2(folder, table, arguments.model)
                table.print(
                    2,
                    [
                        ("ttft_s", "first token, s", lambda s: f"{s:.3f}"),
                        ("cached_tokens", "cached tokens", str),
                        ("tokens_equal", "tokens equal", yes_no),
                    ],
                )
        except KeyboardInterrupt:
            say("interrupted; everything is removed")
            return 130
        except Wrong as wrong:
            say(f"WRONG: {wrong}")
            status = 1
        except (
            ServerFailed, VllmFailed, ChildEnded, ChildError, vllm_env.Unavailable, Unavailable
        ) as error:  # fmt: skip
            say(f"FAILED: {error}")
            status = 2
    if not table.ok:
        for row in table.rows:
            if not row["ok"]:
                say(f"WRONG: {row['case']}: {json.dumps(row)}")
        status = status or 1
    if status:
        table.rows.append({"case": "the demo itself", "run": True, "ok": False})
    write_result(table)
    say(f"{'all right' if not status else 'NOT all right'}; {RESULT.relative_to(ROOT)} has the rows")
    return status


if __name__ == "__main__":
    sys.exit(main())
