"""Two engines that share a remote tier and nothing else, and the examples with such a tier."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstrata.cli import asking
from kvstrata.memory.paths import segment_dir
from tests.harness import mooncake, redis_server, vllm_env
from tests.harness.cache_engine import eventually
from tests.harness.daemon import Unavailable, free_port, free_ports
from tests.harness.server_process import ServerProcess
from tests.tools import remotes
from tests.vllm.conftest import EXACT, Rig, rig_of, until
from tests.vllm.test_degraded import check_calls

pytestmark = [pytest.mark.vllm, pytest.mark.long]


class Scene(NamedTuple):
    """Two engines whose servers have the same remote tiers, all of them paused."""

    rigs: list[Rig]
    tiers: dict[str, remotes.Tier]
    """The tiers that this machine can run, by name."""


@pytest.fixture(scope="module")
def scene(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    environment = dict(os.environ)
    with contextlib.suppress(Unavailable):
        environment |= mooncake.environment()
    with contextlib.ExitStack() as stack:
        tiers = {}
        for name in remotes.NAMES:
            with contextlib.suppress(Unavailable):
                tiers[name] = stack.enter_context(remotes.tier(name, tmp_path_factory.mktemp(name)))
        flags = [word for tier in tiers.values() for word in ("--l2-adapter", json.dumps(tier.entry))]
        rigs = []
        for _ in range(2):
            folder = tmp_path_factory.mktemp("remote")
            server = ServerProcess(
                folder / "server", l1_mb=64, l2="embedded", flags=flags, environment=environment
            )
            stack.enter_context(server).start()
            rigs.append(stack.enter_context(rig_of(server, small_model, folder / "vllm")))
        scene = Scene(rigs, tiers)
        for name in tiers:
            change(scene, name, "pause")
        yield scene


def adapter_of(scene: Scene, name: str) -> str:
    return f"{scene.tiers[name].entry['type']}-{list(scene.tiers).index(name)}"


def change(scene: Scene, name: str, action: str) -> None:
    """Pause or resume a tier of both servers."""
    for rig in scene.rigs:
        path = f"/v1/l2/adapters/{adapter_of(scene, name)}/{action}"
        asking.ask(rig.server.url, asking.Ask(path, {}, timeout_s=60))


def put_chunks(rig: Rig, adapter: str) -> int:
    outcomes = rig.server.get("/v1/status")["l2_store"]["adapters"][adapter]["outcomes"]
    return int(outcomes.get("stored", 0))


@pytest.mark.parametrize("name", remotes.NAMES)
def test_another_engine_hits_with_the_same_tokens_and_computes_when_the_tier_is_killed(scene, name):
    if name not in scene.tiers:
        pytest.skip(f"this machine cannot run {name}")
    one, other = scene.rigs
    change(scene, name, "resume")
    prompt, later = one.fresh_prompt(1_400), one.fresh_prompt(1_400)
    cold, cold_later = one.stored(prompt), one.stored(later)
    assert cold["cached_tokens"] == cold_later["cached_tokens"] == 0
    until(lambda: put_chunks(one, adapter_of(scene, name)) == 10, "putting all chunks")
    warm = other.vllm.generate(prompt)
    assert (warm["cached_tokens"], warm["tokens"]) == (1_280, cold["tokens"])
    other.vllm.ask("take_calls")
    scene.tiers[name].server.kill()
    without = other.vllm.generate(later)
    assert (without["cached_tokens"], without["tokens"]) == (0, cold_later["tokens"])
    check_calls(other)
    in_l1 = other.again(prompt)
    assert (in_l1["cached_tokens"], in_l1["tokens"]) == (1_280, cold["tokens"])
    change(scene, name, "pause")


ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS, DOCUMENT_TOKENS = 2, 1_100


def left_of(group: int) -> list[int]:
    found = subprocess.run(["pgrep", "-g", str(group)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def test_the_second_engine_hits_what_the_first_put_to_redis(redis_folder, small_model, tmp_path, vllm_python):
    program, variables = redis_server.ensure()
    # The environment that tests use has vLLM without its metadata, which its command asks for.
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    serve = tmp_path / "serve.py"
    serve.write_text(
        f"import runpy, sys\nsys.path.append({str(ROOT)!r})\n"
        "from tests.harness.forks import fork_children\nfork_children()\n"
        'runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)\n'
    )
    command.write_text(
        f'#!/bin/sh\n[ "$1" = serve ] && model=$2 && shift 2 &&\n'
        f'exec {vllm_python} {serve} --model "$model" "$@"\n'
    )
    command.chmod(0o755)
    path = [
        str(Path(program).parent),
        str(Path(sys.executable).parent),
        str(command.parent),
        os.environ["PATH"],
    ]
    ports = range(first_port := free_ports(6), first_port + 6)
    environment = {
        **vllm_env.environment(tmp_path),
        **{name: value for name, value in variables.items() if name == "LD_LIBRARY_PATH"},
        "PATH": ":".join(path),
        "FIRST_PORT": str(first_port),
        "REDIS_PORT": str(free_port()),
        "L1_GB": "0.1",
        "DOCUMENTS": str(DOCUMENTS),
        "DOCUMENT_TOKENS": str(DOCUMENT_TOKENS),
        "BENCH_ARGUMENTS": '--extra-body {"detokenize":false} --question-tokens 8 --output-tokens 4',
    }
    script = subprocess.Popen(
        [
            str(ROOT / "examples/redis/run.sh"), str(small_model), "--skip-tokenizer-init", "--enforce-eager",
            "--dtype", EXACT,
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        output = script.communicate(timeout=900)[0]
        # vLLM's own processes end a little after it.
        eventually("everything that it started has ended", lambda: not left_of(script.pid))
    finally:
        for pid in left_of(script.pid):
            os.kill(pid, signal.SIGKILL)
        for port in ports:  # the pools, which a server leaves to its successor
            shutil.rmtree(segment_dir(port), ignore_errors=True)
    assert script.returncode == 0, output
    rows = dict(re.findall(r"^(from .*?)  +(.*)$", output, re.MULTILINE))
    chunks = DOCUMENTS * (DOCUMENT_TOKENS // 256)
    assert rows["from L2 chunks"].split() == ["0", str(chunks), str(chunks)], output


def test_each_example_is_a_script_that_a_shell_can_read():
    for script in sorted(ROOT.glob("examples/*/*.sh")):
        assert os.access(script, os.X_OK), script
        shell = shutil.which("dash") or shutil.which("sh")
        subprocess.run([shell, "-n", str(script)], check=True)
