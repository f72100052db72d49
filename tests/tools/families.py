"""Serves small models with real vLLM and a real server, and compares their tokens with those of a run without cache.

    make families                    all families, 20 lengths drawn by a seed
    make families MODEL=gemma3       one of them; ARGS="--lengths 5 --seed 7"
    make families MODEL=gemma3 ARGS="--tensor-parallel 2"   engines of two workers, from L1
    make test-versions               every supported version of vLLM
    make test-versions VERSIONS="0.30.0 0.32.0"

An engine computes prompts and stores them.  Another process then loads them in four ways: from L1, from the pool that a
killed server left, from disk into an empty pool, and from a peer.  Each way must hit all whole chunks that leave a
token to compute, or, of a model of full attention alone, all whole blocks, and give the same tokens.

Versions that run for real use one server, one after another: each computes and stores prompts, hits them, hits them
again after a SIGKILL of the server, and then hits the prompts that the earlier versions have stored.  At the end, an
engine with blocks of another size, whose layout facts differ, must hit nothing.  Versions without a wheel for a CPU are
checked by their Python (`tests/vllm/test_versions.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.harness.cache_engine import eventually
from tests.harness.cluster import Cluster
from tests.harness.server_process import ServerProcess
from tests.harness.vllm_model import FAMILIES, dtype_of, ensure_model
from tests.harness.vllm_run import VllmProcess
from tests.tools import vllm_python
from tests.tools.provision import ROOT

MAX_TOKENS = 3_500
"""Longest prompt."""
OPTIONS = {"max_num_batched_tokens": 512, "max_model_len": 4_096, "num_gpu_blocks_override": 160}
"""Prompts are prefilled in pieces, so windows and states leave the engine's blocks while a request runs."""
MORE: dict[str, dict[str, Any]] = {
    # Blocks so small that a chunk has many tails.
    "19m": {"block_size": 32, "num_gpu_blocks_override": 640},
    "deepseek-v3": {"load_format": "dummy", "block_size": 32, "num_gpu_blocks_override": 640},
}
OUTPUT_TOKENS = 8
OTHER_BLOCKS = {"block_size": 64}
LOOKUP_MS = 30_000
"""Chunks that are loaded by this time are hits; so long a slow machine may take for all of them."""
PEER_SETTINGS = {"KVSTRATA_P2P_LOOKUP_TIMEOUT_MS": str(LOOKUP_MS // 2)}
"""The first lookup at a peer also connects to it, for which the default of 250 ms is too short on a busy machine."""


@dataclasses.dataclass
class Way:
    """One way for KV to reach an engine: how many prompts hit all they could, and how many gave the same tokens."""

    name: str
    prompts: int = 0
    whole_hits: int = 0
    same_tokens: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    """What was wrong, prompt by prompt."""

    def add(self, tokens: int, found: dict[str, Any], ends: set[int], cold: list[int]) -> None:
        """Count the answer to a prompt of so many tokens: its hit must be one of `ends`."""
        hits, same = found["cached_tokens"] in ends, found["tokens"] == cold
        self.prompts += 1
        self.whole_hits += hits
        self.same_tokens += same
        if not (hits and same):
            text = "the same tokens" if same else "other tokens"
            self.wrong.append(f"{tokens} tokens: {found['cached_tokens']} hit, {text}")

    @property
    def good(self) -> bool:
        return self.prompts == self.whole_hits == self.same_tokens > 0


class Family:
    """One family's model, its prompts, and what an engine without cache answers."""

    def __init__(
        self,
        name: str,
        lengths: Sequence[int],
        folder: Path,
        *,
        seed: str = "",
        in_front: Path | None = None,
        options: dict[str, Any] | None = None,
        processes: bool = False,
    ) -> None:
        """`seed` draws other prompts; `in_front` has another version of vLLM, `options` go to its `LLM`.

        With `processes` each engine has processes of its own.
        """
        self.name = name
        self._in_front, self._options, self._processes = in_front, options or {}, processes
        self.model = ensure_model(name)
        self.folder = folder
        draw = random.Random(name + seed)
        self.prompts = [[draw.randrange(3, 32_000) for _ in range(length)] for length in lengths]
        self.cold: list[list[int]] = []
        self._engines = 0

    @contextlib.contextmanager
    def engine(self, server: ServerProcess | None) -> Iterator[VllmProcess]:
        """An engine of its own process, with the connector if it has a server."""
        self._engines += 1
        more = {"kvstrata.lookup_timeout_ms": LOOKUP_MS}
        with VllmProcess(
            self.model,
            self.folder / f"engine-{self._engines}",
            extra=None if server is None else server.connector_config(**more),
            options={
                "dtype": dtype_of(self.name),
                "enable_prefix_caching": True,
                **OPTIONS,
                **MORE.get(self.name, {}),
                **self._options,
            },
            processes=self._processes,
            in_front=self._in_front,
        ) as vllm:
            yield vllm
            if self._processes:
                vllm.quit()

    def compute(self, vllm: VllmProcess) -> None:
        """Compute all prompts and wait until everything is stored.  The tokens must be those of a run without cache."""
        eventually("the engine is attached", lambda: vllm.ask("connected"))
        vllm.generate([5, 6, 7])  # the first request waits for a step in which the worker reports its weights
        for number, prompt in enumerate(self.prompts):
            found = vllm.generate(prompt, max_tokens=OUTPUT_TOKENS)
            if number == len(self.cold):
                self.cold.append(found["tokens"])
            assert not found["cached_tokens"], f"prompt {number} hits before it was stored: {found}"
            assert found["tokens"] == self.cold[number], f"prompt {number}: other tokens while it is stored"
        eventually("all stores have ended", lambda: stores_ended(vllm))
        counts = vllm.ask("stores")["outcomes"]
        assert set(counts) <= {"stored", "present"}, f"stores ended otherwise: {counts}"

    def load(self, vllm: VllmProcess, name: str) -> Way:
        eventually("the engine is attached", lambda: vllm.ask("connected"))
        way = Way(name)
        chunk, step = int(vllm.ask("chunk_tokens")), int(vllm.ask("hit_step_tokens"))
        for prompt, cold in zip(self.prompts, self.cold, strict=True):
            eventually("vLLM lets all blocks go", lambda: forgotten(vllm))
            found = vllm.generate(prompt, max_tokens=OUTPUT_TOKENS)
            # A model of full attention alone hits its whole blocks, but for one token.
            ends = {min(len(prompt) // step * step, len(prompt) - 1)}
            if step == chunk:
                ends.add((len(prompt) - 1) // chunk * chunk)
            way.add(len(prompt), found, ends, cold)
        return way


def stores_ended(vllm: VllmProcess) -> bool:
    vllm.ask("idle_steps", n=1)
    return not vllm.ask("stores")["in_flight"]


def forgotten(vllm: VllmProcess) -> bool:
    vllm.ask("idle_steps", n=1)
    return bool(vllm.ask("reset_prefix_cache"))


def on_one_host(family: Family, *, outages: bool) -> list[Way]:
    """From L1; with `outages` also after a kill of the server, and from disk."""
    ways = []
    environment = os.environ | {"KVSTRATA_L2_TAILS_AFTER_S": "0"}
    with ServerProcess(family.folder / "server", l1_mb=512, l2="fs", environment=environment) as server:
        server.start()
        with family.engine(server) as one:
            family.compute(one)
        with family.engine(server) as two:
            ways.append(family.load(two, "another process, from L1"))
            if not outages:
                return ways
            eventually("all records are put", lambda: all_put(server))
            server.kill()
            server.start()
            ways.append(family.load(two, "after a kill of the server"))
            server.stop()
            server.wipe_segment()
            server.start()
            ways.append(family.load(two, "from disk"))
    return ways


def all_put(server: ServerProcess) -> bool:
    status = server.get("/v1/status")
    (adapter,) = status["l2_store"]["adapters"].values()
    return int(adapter["outcomes"].get("stored", 0)) >= int(status["pool"]["entries"]["ready"])


def from_a_peer(family: Family) -> list[Way]:
    """From the L1 of another instance of the cluster."""
    with Cluster(family.folder / "cluster", l1_mb=256, settings=PEER_SETTINGS) as cluster:
        with family.engine(cluster.servers[0]) as one:
            family.compute(one)
        cluster.until_known(0)
        with family.engine(cluster.servers[1]) as other:
            return [family.load(other, "from a peer")]


def of_ranks(name: str, lengths: Sequence[int], folder: Path, ranks: int) -> list[Way]:
    """From L1, with engines of so many tensor-parallel workers, for models whose hits end with a chunk."""
    options = {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    family = cold_family(name, lengths, folder, options=options, processes=True)
    with ServerProcess(folder / "server", l1_mb=512) as server:
        server.start()
        with family.engine(server) as one:
            one.generate([5, 6, 7])
            for prompt in family.prompts:
                one.generate(prompt, max_tokens=OUTPUT_TOKENS)
            eventually(
                "all stores have ended", lambda: server.get("/v1/status")["pool"]["entries"]["reserved"] == 0
            )
        way = Way(f"{ranks} workers, from L1")
        with family.engine(server) as two:
            chosen = re.search(r"chunk_size is (\d+) tokens", two.log_text())
            chunk = int(chosen[1]) if chosen else 256
            two.generate([5, 6, 7])
            for prompt, cold in zip(family.prompts, family.cold, strict=True):
                found = two.generate(prompt, max_tokens=OUTPUT_TOKENS)
                way.add(len(prompt), found, {(len(prompt) - 1) // chunk * chunk}, cold)
    return [way]


def cold_family(name: str, lengths: Sequence[int], folder: Path, **more: Any) -> Family:
    """A family that knows what an engine without cache answers."""
    family = Family(name, lengths, folder, **more)
    with family.engine(None) as plain:
        family.cold = [
            plain.generate(prompt, max_tokens=OUTPUT_TOKENS)["tokens"] for prompt in family.prompts
        ]
    return family


def measure(
    name: str, lengths: Sequence[int], folder: Path, *, outages: bool = True, peer: bool = True
) -> list[Way]:
    """The ways of one family. Raises AssertionError if storing changes the tokens."""
    family = cold_family(name, lengths, folder)
    return on_one_host(family, outages=outages) + (from_a_peer(family) if peer else [])


def run_for_real(versions: Sequence[str], lengths: Sequence[int], folder: Path) -> Iterator[tuple[str, Way]]:
    """(version, how one way of hitting went), as each ends. Raises AssertionError if storing changes the tokens."""
    with ServerProcess(folder / "server", l1_mb=256).started() as server:
        stored: list[tuple[str, Family]] = []
        for version in versions:
            in_front = vllm_python.on_path(version)
            family = Family("19m", lengths, folder / version, seed=version, in_front=in_front)
            with family.engine(server) as vllm:
                family.compute(vllm)
                yield version, family.load(vllm, "its own records")
                server.kill()
                server.start()
                yield version, family.load(vllm, "after a SIGKILL of the server")
                for other, prompts in stored:
                    yield version, prompts.load(vllm, f"records of {other}")
            stored.append((version, family))
        last = versions[-1]
        family = Family(
            "19m", lengths, folder / "other", in_front=vllm_python.on_path(last), options=OTHER_BLOCKS
        )
        with family.engine(server) as vllm:
            for other, prompts in stored:
                yield last, prompts.load(vllm, f"records of {other}, with other facts")


def as_it_should(way: Way) -> bool:
    """Whether all prompts were hit with the same tokens; with other facts, whether none was hit at all."""
    if not way.name.endswith("with other facts"):
        return way.good
    return way.prompts == way.same_tokens == len(way.wrong) > 0 and all(
        ": 0 hit," in text for text in way.wrong
    )


def run_python(version: str) -> tuple[bool, str]:
    """Run the checks that need only this version's Python; returns whether all pass, and pytest's summary."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "tests/vllm/test_versions.py", "-k", version]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, vllm_python.EVERY: "all"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    return done.returncode == 0, lines[-1] if lines else done.stderr[-500:]


def draw_lengths(count: int, seed: int) -> list[int]:
    """Prompt lengths between 300 and MAX_TOKENS, and a multiple of the usual chunk, whose last chunk cannot be hit."""
    draw = random.Random(seed)
    return [draw.randrange(300, MAX_TOKENS) for _ in range(count - 1)] + [1_024]


def report(name: str, way: Way) -> bool:
    """Print a way; return whether it went as it should."""
    good = as_it_should(way)
    print(
        f"{name:12} {way.name:42} {way.prompts} prompts, {way.whole_hits} hit to the end, "
        f"{way.same_tokens} with the same tokens"
        + "".join(f"\n    {text}" for text in way.wrong if not good),
        flush=True,
    )
    return good


def run_versions(versions: Sequence[str], lengths: Sequence[int], folder: Path) -> int:
    """Check versions by their Python and, where that is possible, for real; return how many checks failed."""
    bad = 0
    for version in versions:
        good, summary = run_python(version)
        bad += not good
        print(f"{version:12} {'checks of its Python':42} {summary}", flush=True)
    if real := [version for version in vllm_python.CPU if version in versions]:
        bad += sum(not report(version, way) for version, way in run_for_real(real, lengths, folder))
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    versions = (*vllm_python.CPU, *vllm_python.PYTHON_ONLY)
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join(FAMILIES)} or, with --versions, of vLLM; default: all"
    )
    parser.add_argument("--versions", action="store_true", help="compare versions of vLLM, not families")
    parser.add_argument("--lengths", type=int, help="number of prompts; default: 20, of each version 3")
    parser.add_argument("--seed", type=int, default=None, help="of the lengths; default: drawn and printed")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="workers of each engine; default: 1")
    arguments = parser.parse_args()
    known = versions if arguments.versions else tuple(FAMILIES)
    if unknown := sorted(set(arguments.names) - {*known, *(() if arguments.versions else ("19m",))}):
        parser.error(f"{', '.join(unknown)}: must be of {', '.join(known)}")
    seed = random.randrange(10_000) if arguments.seed is None else arguments.seed
    lengths = draw_lengths(arguments.lengths or (3 if arguments.versions else 20), seed)
    print(f"seed {seed}, lengths {lengths}")
    bad = 0
    for name in ["versions"] if arguments.versions else arguments.names or FAMILIES:
        with tempfile.TemporaryDirectory(prefix="families-") as folder:
            if arguments.versions:
                bad += run_versions(arguments.names or versions, lengths, Path(folder))
                continue
            ranks = arguments.tensor_parallel
            ways = (
                measure(name, lengths, Path(folder))
                if ranks == 1
                else of_ranks(name, lengths, Path(folder), ranks)
            )
            bad += sum(not report(name, way) for way in ways)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
