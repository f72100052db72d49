"""Two engines that share a remote tier and nothing else, and the examples with such a tier."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.memory.paths import segment_dir
from tests.harness import redis_server, vllm_env
from tests.harness.cache_engine import eventually
from tests.harness.daemon import free_port, free_ports
from tests.vllm.conftest import EXACT

pytestmark = [pytest.mark.vllm, pytest.mark.long]


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
