"""`make chaos MINUTES=`: a cluster whose parts are killed, stopped and cut off at random while engines use it.

Three controllers with an etcd on one host, and three servers on hosts of their own that read from each other.  Engines
without a model, as processes of their own, store and load prompts that all of them know.  Servers, controllers, etcd
and engines get SIGKILL, or SIGSTOP and later SIGCONT; links of servers are cut; a pool is removed while its server is
down.  Each loaded byte is compared with the stored one.  The run fails

- when one byte is wrong, or a request never ends;
- when an engine, a server or a controller that nobody killed dies;
- when, after the last fault is mended, a controller's knowledge of what the servers hold does not become exact;
- when nothing was hit, or nothing was read from a peer.

All random choices follow from the seed, but which fault meets which request depends on timing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.harness.cache_engine import eventually, prompt
from tests.harness.child import Child, ChildEnded, ChildError
from tests.harness.cluster import key_files
from tests.harness.controller_process import ControllerProcess
from tests.harness.daemon import Spawned
from tests.harness.etcd_server import EtcdServer
from tests.harness.network import Host, Network
from tests.harness.server_process import ServerProcess
from tests.tools.soak import Journal, command

SERVERS = CONTROLLERS = 3
ENGINES = 4
MOST_CHUNKS = 24
KNOWN_PROMPTS = 60
"""Newest prompts that are asked for again: more than one L1 holds."""
L1_MB = 8
SEEDS = range(4_000)
"""Used in turn: `prompt` takes no larger ones."""
OUTAGE_S = (0.05, 3.0)
CALM_S = (0.2, 2.0)


class EtcdOnHost(EtcdServer):
    """An etcd that runs on a host of the network."""

    def __init__(self, folder: Path, host: Host) -> None:
        self._host = host
        super().__init__(folder)

    def _command(self) -> tuple[Any, Any]:
        line, environment = super()._command()
        return [*self._host.under, *line], environment

    def _answers(self) -> bool:
        with contextlib.suppress(ChildError):
            return b'"true"' in self._host.http(f"{self.url}/health", token="")
        return False


class Prompts:
    """The prompts that were stored lately, by all engines, as (number of chunks, seed)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seeds = itertools.cycle(SEEDS)
        self.known: list[tuple[int, int]] = []

    def new(self, draw: random.Random) -> tuple[int, int]:
        with self._lock:
            return draw.randint(1, MOST_CHUNKS), next(self._seeds)

    def stored(self, one: tuple[int, int]) -> None:
        with self._lock:
            self.known = [*self.known[1 - KNOWN_PROMPTS :], one]


class Engine:
    """An engine's process and the thread that drives it; a killed process is replaced by a new one."""

    def __init__(self, chaos: Chaos, number: int, seed: int) -> None:
        self._chaos, self._number, self._draw = chaos, number, random.Random(seed)
        self._child: Child | None = None
        self._killed = False
        self._thread = threading.Thread(target=self._run, name=f"engine {number}")
        self.start, self.join = self._thread.start, self._thread.join

    def kill(self) -> None:
        """Send SIGKILL to the process, also in the middle of a request."""
        if (child := self._child) is not None:
            self._killed = True
            child.kill()

    def _run(self) -> None:
        journal = self._chaos.journal
        while not journal.over:
            try:
                self._one_request()
            except ChildEnded as error:
                self._drop()
                if not self._killed:
                    journal.fail(f"engine {self._number} died by itself: {error}")
                self._killed = False
            except ChildError as error:
                journal.fail(f"engine {self._number}: {error}")
        self._drop()

    def _one_request(self) -> None:
        chaos, draw, counts = self._chaos, self._draw, self._chaos.journal.counts
        if self._child is None:
            self._child = chaos.attached(draw.randrange(SERVERS), f"engine-{self._number}")
        known = chaos.prompts.known
        if not known or draw.random() < 0.3:
            n_chunks, seed = chaos.prompts.new(draw)
            outcomes = self._child.ask("store", n_chunks=n_chunks, seed=seed)
            counts["chunks stored"] += outcomes.count("stored")
            chaos.prompts.stored((n_chunks, seed))
        else:
            n_chunks, seed = draw.choice(known)
            hit = self._child.ask("hit", n_chunks=n_chunks, seed=seed)
            counts["requests that hit" if hit else "requests that missed"] += 1
            counts["chunks verified"] += hit

    def _drop(self) -> None:
        if self._child is not None:
            self._child.__exit__(None, None, None)
            self._child = None


class Chaos:
    """The cluster, its engines, and the faults, which the calling thread makes."""

    def __init__(self, journal: Journal, draw: random.Random, folder: Path, network: Network) -> None:
        self.journal, self.prompts = journal, Prompts()
        self._draw, self._folder, self._network = draw, folder, network
        self._engines = [Engine(self, number, draw.getrandbits(32)) for number in range(ENGINES)]
        self._peer_records = [0] * SERVERS

    @contextlib.contextmanager
    def cluster(self) -> Iterator[None]:
        """Everything but the engines."""
        hub, folder = self._network.hub, self._folder
        controllers, members = key_files(folder)
        with contextlib.ExitStack() as stack:
            self.etcd = stack.enter_context(EtcdOnHost(folder / "etcd", hub))
            config = folder / "controllers.yaml"
            config.write_text(json.dumps({"etcd": {"endpoints": [self.etcd.address], "ttl_s": 2}}))
            keys = (
                "--monitor-host",
                hub.address,
                "--curve-secret-file",
                str(controllers),
                "--heartbeat-s",
                "1",
                "--insecure",
            )
            self.controllers = [
                ControllerProcess(
                    folder / f"controller-{number}", host=hub,
                    flags=("--name", f"controller-{number}", "--config", str(config), *keys),
                )
                for number in range(CONTROLLERS)
            ]  # fmt: skip
            for controller in self.controllers:
                stack.enter_context(controller)
            urls = ",".join(f"tcp://{hub.address}:{one.ports['reply']}" for one in self.controllers)
            self.servers = [
                ServerProcess(
                    folder / f"server-{number}", l1_mb=L1_MB, chunk_tokens=16, host=host,
                    flags=(
                        *("--controller-url", urls, "--cluster-curve-file", str(members)),
                        *("--instance-id", f"server-{number}", "--p2p-listen", f"{host.address}:0"),
                    ),
                )
                for number, host in enumerate(self._network.hosts)
            ]  # fmt: skip
            for server in self.servers:
                stack.enter_context(server).start()
            eventually("all servers are members", lambda: self._live(self.controllers[0]) == SERVERS)
            yield

    def attached(self, server: int, name: str) -> Child:
        """An engine's process at a server, which may be down."""
        child = Child("tests.harness.cache_engine", log=self._folder / f"{name}.log")
        try:
            child.ask("start", socket_dir=str(self.servers[server].socket_dir), group=f"{name:<16}")
        except BaseException:
            child.__exit__(None, None, None)
            raise
        self.journal.note("engine started", server=server)
        return child

    def run(self) -> None:
        """Make faults until the time is over; then everything is mended and compared."""
        self.journal.begin()
        for engine in self._engines:
            engine.start()
        try:
            while not self.journal.over:
                time.sleep(self._draw.uniform(*CALM_S))
                self._draw.choice(self._faults())()
                for one in (*self.servers, *self.controllers):
                    if not Path(f"/proc/{one.pid}/fd").exists():
                        self.journal.fail(
                            f"{one.log.parent.name} died by itself:\n{one.log.read_text()[-4000:]}"
                        )
        finally:
            for engine in self._engines:
                engine.join()
        try:
            if not self.journal.failures:
                self._compare()
        except AssertionError as error:
            self.journal.fail(str(error))
        for what in ("chunks verified", "records read from peers"):
            if not self.journal.counts[what]:
                self.journal.fail(f"{what}: none, so nothing was tested")

    def _faults(self) -> list[Callable[[], None]]:
        number = self._draw.randrange(SERVERS)
        server, controller = self.servers[number], self._draw.choice(self.controllers)
        return [
            lambda: self._stopped("server", server),
            lambda: self._stopped("controller", controller),
            lambda: self._stopped("etcd", self.etcd),
            lambda: self._killed("server", server),
            lambda: self._killed("server, pool lost", server, server.wipe_segment),
            lambda: self._killed("controller", controller),
            lambda: self._killed("etcd", self.etcd),
            lambda: self._cut(self._network.hosts[number]),
            lambda: self._draw.choice(self._engines).kill(),
        ]

    def _outage(self) -> None:
        for number, server in enumerate(self.servers):
            with contextlib.suppress(Exception):
                self._note_reads(number, server)
        time.sleep(self._draw.uniform(*OUTAGE_S))

    def _note_reads(self, number: int, server: ServerProcess) -> None:
        loaded = int(server.get("/v1/status")["l2_prefetch"]["counts"].get("loaded", 0))
        before, self._peer_records[number] = self._peer_records[number], loaded
        self.journal.counts["records read from peers"] += loaded - before if loaded >= before else loaded

    def _stopped(self, what: str, process: Spawned) -> None:
        self.journal.note(f"{what} stopped")
        with process.frozen():
            time.sleep(self._draw.uniform(*OUTAGE_S))

    def _killed(self, what: str, process: Any, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._outage()
        self.journal.note(f"{what} killed")
        process.kill()
        meanwhile()
        time.sleep(self._draw.uniform(*OUTAGE_S))
        process.start()

    def _cut(self, host: Host) -> None:
        self.journal.note("link cut")
        host.cut()
        try:
            time.sleep(self._draw.uniform(*OUTAGE_S))
        finally:
            host.mend()

    # -- the directory, at the end ------------------------------------------------------------------------

    @staticmethod
    def _live(controller: ControllerProcess) -> int:
        return int(controller.ask("/v1/cluster")["instances"]["live"])

    def _compare(self) -> None:
        """Wait until each controller knows exactly what each server has in L1."""
        self._outage()
        prompts = self.prompts.known
        children = [self.attached(number, f"looks-{number}") for number in range(SERVERS)]
        try:
            for child in children:
                child.ask("connect")
            for controller in self.controllers:
                eventually(f"{controller.log.parent.name} knows all", lambda c=controller: self._knows(c))
                for n_chunks, seed in prompts:
                    held = [child.ask("peek", n_chunks=n_chunks, seed=seed) for child in children]
                    told = self._told(controller, prompt(n_chunks, seed))
                    assert told == held, (
                        f"prompt {seed}: the servers hold {held}, {controller.log} says {told}"
                    )
                    self.journal.counts["prompts compared"] += 1
        finally:
            for child in children:
                child.__exit__(None, None, None)

    def _knows(self, controller: ControllerProcess) -> bool:
        """Whether it knows as many chunks as there are, and the engines that name the prompts' keys."""
        rows = {
            row["id"]: row for row in controller.ask("/v1/instances")["instances"] if row["state"] != "dead"
        }
        held = {
            f"server-{number}": int(server.get("/v1/status")["pool"]["entries"]["ready"])
            for number, server in enumerate(self.servers)
        }
        known = {name: row["keys"].get("l1", 0) for name, row in rows.items() if row["confirmed"]}
        return held == known and len(controller.ask("/v1/models")["models"]) == 1

    def _told(self, controller: ControllerProcess, tokens: list[int]) -> list[int]:
        """How many leading chunks of a prompt each server has, as a controller says."""
        longest = controller.ask("/v1/lookup", {"tokens": tokens})["longest"]
        told = {row["instance"]: row["chunks"] for row in longest}
        return [told.get(f"server-{number}", 0) for number in range(SERVERS)]


def run(journal: Journal, draw: random.Random) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-chaos-") as name,
        Network(Path(name), SERVERS) as network,
    ):
        chaos = Chaos(journal, draw, Path(name), network)
        with chaos.cluster():
            chaos.run()


if __name__ == "__main__":
    sys.exit(command("chaos", __doc__, run))
