"""`gateway_*`: what the gateway adds to an engine's answers, on one core, beside other routers and a bare Envoy.

A stand-in for an engine streams 50 events to each request, all streams in steps of 20 ms.  Clients send prompts of
8,000 tokens as a Poisson process, straight to it, through an Envoy that asks nobody, through the gateway, and
through vllm-router 0.1.17 and smg 1.13.0 from PyPI, in turns; those that have no turn are stopped.  Engine and clients
share one core, what is between them has another.

- `gateway_added_p50`, `gateway_added_p99`: time to the first event through the gateway, less the same straight, at
  300 requests/s
- `gateway_core_share`: share of its core that the gateway takes at 300 requests/s, which are 15,000 events/s
- `gateway_picker_cpu`: CPU of the picker, which chooses and counts, for each of these requests
- `gateway_streams`: memory of the gateway with 10,000 open streams, or as many as it takes by `ulimit -Hn`

Sketch: the bare Envoy does all but ask the picker and watch the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, figure, median_spread, sized, wait_until
from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.gateway.envoy.configuration import connections
from tests.harness import envoy_program
from tests.harness.daemon import free_port

ROUNDS = sized(3, 1)
LOAD = {
    "rate": sized(300, 50),
    "seconds": sized(8, 1),
    "tokens": sized(50, 5),
    "prompt_tokens": sized(8_000, 100),
    "seed": int(os.environ.get("BENCH_SEED", "2026")),
}
STREAMS = sized(10_000, 50)
RIVALS = {"vllm-router": "0.1.17", "smg": "1.13.0"}
NEEDED = {
    "vllm-router": ("setproctitle", "uvicorn", "fastapi", "aiohttp", "requests", "orjson"),
    "smg": ("setproctitle",),
}
"""What a router's command imports; its declared requirements are many more."""
BETWEEN, OUTSIDE = 0, 1
"""Cores: of what is between engine and clients, and of these."""


def rival(name: str) -> str | None:
    """The program of a router, fetched into the cache folder; None with `--small`."""
    if not sized(full=True, small=False):
        return None
    cache = Path(os.environ.get("KVSTRATA_CACHE", "~/.cache/kvstrata")).expanduser()
    folder = cache / f"{name}-{RIVALS[name]}"
    if not (folder / "whole").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "pip", "install", "--quiet", "--quiet"]
        subprocess.run([*pip, "--no-deps", f"{name}=={RIVALS[name]}"], check=True)
        subprocess.run([*pip, *NEEDED[name]], check=True)
        (folder / "whole").touch()
    return str(folder / "bin" / name)


class Run:
    """The processes of this benchmark, each on its core."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.engine_port = free_port()
        self.ports = {"straight": self.engine_port}
        self.pids: dict[str, int] = {}
        self.spawn(["-m", "benchmarks.gateway_engine", str(self.engine_port)], OUTSIDE)

    def spawn(self, words: Sequence[str], core: int, **more: Any) -> subprocess.Popen[bytes]:
        """Start a Python command, or with a path as its first word a program, and wait for its first line."""
        command = [sys.executable, *words] if words[0] == "-m" else list(words)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            start_new_session=True,
            preexec_fn=lambda: _on_core(core),
            **more,
        )
        self._stack.callback(_end, process)
        return process

    def between(self, name: str, words: Sequence[str], port: int) -> None:
        """Start what is between, and wait until it serves."""
        process = self.spawn(words, BETWEEN)
        self.ports[name], self.pids[name] = port, process.pid
        wait_until(lambda: _answers(port), f"{name} serves")

    def load(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        """What clients see through `name`, and the CPU seconds that it takes (`cpu_s`)."""
        for other, pid in self.pids.items():
            for each in _family(pid):  # the gateway's Envoy has a group of its own
                os.kill(each, signal.SIGCONT if other == name else signal.SIGSTOP)
        before_s, own_before_s = self._cpu_s(name)
        words = ["-m", "benchmarks.gateway_load", str(self.ports[name]), json.dumps(asked)]
        process = self.spawn(words, OUTSIDE)
        output, _ = process.communicate(timeout=120)
        seen: dict[str, Any] = json.loads(output)
        after_s, own_after_s = self._cpu_s(name)
        seen["cpu_s"], seen["own_cpu_s"] = after_s - before_s, own_after_s - own_before_s
        return seen

    def _cpu_s(self, name: str) -> tuple[float, float]:
        """CPU seconds of a process that is between and its children, and of the process alone."""
        pid = self.pids.get(name)
        return (sum(map(_cpu_s, _family(pid))), _cpu_s(pid)) if pid is not None else (0.0, 0.0)


def _on_core(core: int) -> None:
    with contextlib.suppress(OSError):  # this machine has one core
        os.sched_setaffinity(0, {core})


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process, not in ticks of 10 ms as /proc has them: its clock of clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def _answers(port: int) -> bool:
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 1}
    )
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return b"[DONE]" in response.read()
    except OSError:
        return False


def bare_envoy(folder: Path, port: int, engine_port: int) -> list[str]:
    """The command of an Envoy on this port that sends all to the engine."""
    options = "type.googleapis.com/envoy.extensions"
    router = {"@type": f"{options}.filters.http.router.v3.Router"}
    manager = {
        "@type": f"{options}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}],
                }
            ]
        },
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    many = {"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}

    def at(number: int) -> dict[str, Any]:
        return {"address": {"socket_address": {"address": "127.0.0.1", "port_value": number}}}

    places = [{"lb_endpoints": [{"endpoint": at(engine_port)}]}]
    engine = {
        "name": "engine",
        "circuit_breakers": {"thresholds": [many]},
        "load_assignment": {"cluster_name": "engine", "endpoints": places},
    }
    listener = {"name": "clients", **at(port), "filter_chains": [{"filters": filters}]}
    file = folder / "envoy.json"
    file.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [engine]}}))
    return [str(envoy_program.program()), "-c", str(file), "--concurrency", "1", "--disable-hot-restart"]


def run() -> list[dict[str, Any]]:
    """Return the figures."""
    with contextlib.ExitStack() as stack:
        measured = Run(stack)
        engine = f"http://127.0.0.1:{measured.engine_port}"
        wait_until(lambda: _answers(measured.engine_port), "the engine's stand-in serves")
        port = free_port()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        measured.between("envoy", bare_envoy(folder, port, measured.engine_port), port)
        port = free_port()
        words = ["-m", "kvstrata.cli.gateway", "--no-supervise", "--engine", engine, "--port", str(port)]
        words += ["--envoy", str(envoy_program.program())]
        measured.between("gateway", words, port)
        for name in RIVALS:
            program = rival(name)
            if program is not None:
                port, metrics = free_port(), free_port()
                words = [program, *(["launch"] if name == "smg" else []), "--worker-urls", engine]
                words += ["--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)]
                measured.between(name, [*words, "--prometheus-port", str(metrics)], port)
        seen: dict[str, list[dict[str, Any]]] = {name: [] for name in measured.ports}
        for number in range(ROUNDS):
            names = list(measured.ports)
            for name in names if number % 2 else reversed(names):
                seen[name].append(measured.load(name, LOAD))
        return [*_added(seen), _core_share(seen), _picker_cpu(seen), _streams(measured)]


def _added(seen: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    def added(name: str, part: str) -> list[float]:
        pairs = zip(seen[name], seen["straight"], strict=True)
        return [one["ttft_ms"][part] - straight["ttft_ms"][part] for one, straight in pairs]

    others = [name for name in seen if name not in ("straight", "gateway")]
    for part, limit_ms in (("p50", 1.0), ("p99", 5.0)):
        value, spread = median_spread(added("gateway", part))
        beside = {name: median_spread(added(name, part))[0] for name in others}
        best = min((ms for name, ms in beside.items() if name in RIVALS), default=value)
        yield figure(
            f"gateway_added_{part}",
            value=value,
            unit="ms",
            ratio=value / best if best > 0 else float("inf"),
            ratio_to="the best of the other routers",
            target=f"<= {limit_ms:g} ms, and no more than theirs",
            ok=value <= limit_ms and value <= best,
            spread=spread,
            beside_ms=beside,
            straight_ms=median_spread([one["ttft_ms"][part] for one in seen["straight"]])[0],
            refused=sum(one["failed"] + one["refused"] for one in seen["gateway"]),
        )


def _core_share(seen: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def share(name: str) -> float:
        return median_spread([one["cpu_s"] / LOAD["seconds"] for one in seen[name]])[0]

    events = seen["gateway"][-1]["events"]
    floor, value = share("envoy"), share("gateway")
    return figure(
        "gateway_core_share",
        value=value,
        unit="cores",
        ratio=value / floor if floor else 0.0,
        ratio_to="a bare Envoy",
        target="<= 1.6 x a bare Envoy",
        ok=value <= 1.6 * floor,
        spread=median_spread([one["cpu_s"] / LOAD["seconds"] for one in seen["gateway"]])[1],
        beside_cores={name: share(name) for name in seen if name not in ("straight", "gateway")},
        events_per_s=events / LOAD["seconds"],
    )


def _picker_cpu(seen: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    value, spread = median_spread([1_000 * one["own_cpu_s"] / one["requests"] for one in seen["gateway"]])
    return figure(
        "gateway_picker_cpu",
        value=value,
        unit="ms",
        ratio=value / 0.25,
        ratio_to="its limit",
        target="<= 0.25 ms a request",
        ok=value <= 0.25,
        spread=spread,
    )


def _streams(measured: Run) -> dict[str, Any]:
    """Memory with many open streams."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    pid = measured.pids["gateway"]
    for each in _family(pid):
        os.kill(each, signal.SIGCONT)
    before_mb = _resident_mb(pid)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # as the gateway has done
    count = min(STREAMS, connections(GatewaySettings()))
    asked = {**LOAD, "streams": count, "tokens": 0, "prompt_tokens": 200}
    words = ["-m", "benchmarks.gateway_load", str(measured.ports["gateway"]), json.dumps(asked)]
    try:
        process = measured.spawn(words, OUTSIDE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.stdout is not None
    opened = json.loads(process.stdout.readline())
    value = _resident_mb(pid)
    limit_mb = 1_536 * count / 10_000
    return figure(
        "gateway_streams",
        value=value,
        unit="MB",
        ratio=value / limit_mb,
        ratio_to="its limit",
        target=f"<= {limit_mb:.0f} MB for {count} streams (1.5 GB for 10,000)",
        ok=value <= limit_mb and opened["open"] == count,
        before_mb=before_mb,
        **opened,
    )


def _resident_mb(pid: int) -> float:
    """Of a process and its children."""
    texts = [Path(f"/proc/{each}/status").read_text() for each in _family(pid)]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("VmRSS")]
    return sum(int(line.split()[1]) for line in lines) / 1024
