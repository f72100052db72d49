"""`make chaos MINUTES=`: a small cluster whose parts are killed, stopped and restarted at random while engines use it.

Two real servers with the embedded disk log, a controller, and engines without a model as processes of their own that
store and load prompts. Servers, controller and engines get SIGKILL, or SIGSTOP and later SIGCONT; pools are removed
from shared memory while their server is down. Each loaded byte is compared with the stored one. The run fails

- when one byte is wrong;
- when a record that the disk log reported as stored is missing after SIGKILL and the loss of the pool;
- when a request never ends, or an engine or a server that nobody killed dies;
- when nothing was hit at all, since nothing was tested then.

All random choices follow from the seed, but which fault meets which request depends on timing.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.harness.cache_engine import eventually
from tests.harness.child import Child, ChildEnded, ChildError
from tests.harness.cluster import Cluster
from tests.harness.server_process import ServerProcess
from tests.tools.ordeal import Journal, command

ENGINES = 3
MOST_CHUNKS = 24
KNOWN_PROMPTS = 60
"""Newest prompts that are asked for again: more than L1 holds."""
L1_MB = 8
OUTAGE_S = (0.05, 2.0)
CALM_S = (0.2, 2.0)
DURABLE_EVERY_S = 20.0
DURABLE_PROMPTS = 8
SERVERS = 2
SEEDS, DURABLE_SEEDS = range(4000), range(4000, 4290)
"""Seeds of prompts, used in turn (`cache_engine.prompt` takes no larger ones); durability checks have their own."""


class Prompts:
    """The prompts that were stored lately, by all engines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[tuple[int, int]] = []
        self._seeds = itertools.cycle(SEEDS)

    def new(self, draw: random.Random) -> tuple[int, int]:
        """Return the number of chunks and the seed of a new prompt."""
        with self._lock:
            return draw.randint(1, MOST_CHUNKS), next(self._seeds)

    def stored(self, prompt: tuple[int, int]) -> None:
        with self._lock:
            self._known = [*self._known[1 - KNOWN_PROMPTS :], prompt]

    def any(self, draw: random.Random) -> tuple[int, int] | None:
        with self._lock:
            return draw.choice(self._known) if self._known else None


class Engine:
    """An engine's process and the thread that drives it; a killed process is replaced by a new one."""

    def __init__(self, chaos: Chaos, number: int, seed: int) -> None:
        self.lock = threading.Lock()
        """Held during each request. Another thread that holds the lock keeps the engine from beginning one."""
        self._chaos = chaos
        self._number = number
        self._draw = random.Random(seed)
        self._child: Child | None = None
        self._killed = False
        self._thread = threading.Thread(target=self._run, name=f"engine {number}")

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def kill(self) -> None:
        """Send SIGKILL to the process, also in the middle of a request."""
        child = self._child
        if child is not None:
            self._killed = True
            child.kill()

    def _run(self) -> None:
        journal = self._chaos.journal
        while not journal.over:
            try:
                with self.lock:
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
        journal, draw = self._chaos.journal, self._draw
        if self._child is None:
            self._child = self._chaos.attached(draw.randrange(SERVERS), f"engine-{self._number}")
        known = self._chaos.prompts.any(draw)
        if known is None or draw.random() < 0.4:
            prompt = self._chaos.prompts.new(draw)
            outcomes = self._child.ask("store", n_chunks=prompt[0], seed=prompt[1])
            journal.add("chunks stored", sum(outcome == "stored" for outcome in outcomes))
            self._chaos.prompts.stored(prompt)
        else:
            hit = self._child.ask("hit", n_chunks=known[0], seed=known[1])
            journal.add("requests that hit" if hit else "requests that missed", 1)
            journal.add("chunks verified", hit)

    def _drop(self) -> None:
        if self._child is not None:
            self._child.__exit__(None, None, None)
            self._child = None


class Chaos:
    """The cluster, its engines, and the thread that makes faults."""

    def __init__(self, journal: Journal, draw: random.Random, cluster: Cluster, folder: Path) -> None:
        self.journal = journal
        self.prompts = Prompts()
        self._draw = draw
        self._cluster = cluster
        self._folder = folder
        self._engines = [Engine(self, number, draw.getrandbits(32)) for number in range(ENGINES)]
        self._durable_seeds = itertools.cycle(DURABLE_SEEDS)
        self._durable_due_s = time.monotonic() + DURABLE_EVERY_S / 4

    def attached(self, server: int, name: str) -> Child:
        child = Child("tests.harness.cache_engine", log=self._folder / f"{name}.log")
        try:
            # An engine of a server that is down begins without it, and uses it as soon as it is back.
            child.ask("start", socket_dir=str(self._cluster.servers[server].socket_dir), group=f"{name:<16}")
        except BaseException:
            child.__exit__(None, None, None)
            raise
        self.journal.note("engine started", server=server)
        return child

    def run(self) -> None:
        """Make faults until the journal says that the time is over."""
        self.journal.begin()
        for engine in self._engines:
            engine.start()
        try:
            while not self.journal.over:
                self._pause(CALM_S)
                self._draw.choice(self._faults())()
                self._still_there()
                if time.monotonic() >= self._durable_due_s and not self.journal.over:
                    self._check_durable()
                    self._durable_due_s = time.monotonic() + DURABLE_EVERY_S
        except Exception as error:
            self.journal.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            for engine in self._engines:
                engine.join()
        if not self.journal.counts["chunks verified"]:
            self.journal.fail("nothing was hit, so nothing was tested")

    def _pause(self, bounds: tuple[float, float]) -> None:
        time.sleep(self._draw.uniform(*bounds))

    def _faults(self) -> list[Callable[[], None]]:
        server = self._draw.choice(self._cluster.servers)
        controller = self._cluster.controller
        return [
            lambda: self._stop_for_a_while("server stopped", server),
            lambda: self._stop_for_a_while("controller stopped", controller),
            lambda: self._restart_server(server, lose_pool=False),
            lambda: self._restart_server(server, lose_pool=True),
            self._restart_controller,
            self._kill_engine,
        ]

    def _stop_for_a_while(self, what: str, process: object) -> None:
        self.journal.note(what)
        process.freeze()  # type: ignore[attr-defined]
        try:
            self._pause(OUTAGE_S)
        finally:
            process.thaw()  # type: ignore[attr-defined]

    def _restart_server(self, server: ServerProcess, *, lose_pool: bool) -> None:
        self.journal.note("server killed, pool lost" if lose_pool else "server killed")
        server.kill()
        if lose_pool:
            server.wipe_segment()
        self._pause(OUTAGE_S)
        server.start()

    def _restart_controller(self) -> None:
        self.journal.note("controller killed")
        self._cluster.controller.kill()
        self._pause(OUTAGE_S)
        self._cluster.controller.start()

    def _kill_engine(self) -> None:
        self.journal.note("engine killed")
        self._draw.choice(self._engines).kill()

    def _still_there(self) -> None:
        for number, server in enumerate(self._cluster.servers):
            if server.halted():
                self.journal.fail(f"server {number} died by itself:\n{server.log_tail()}")

    def _check_durable(self) -> None:
        """Check that records which the disk log reported as stored survive SIGKILL and the loss of the pool.

        The engines rest meanwhile.
        """
        held = [engine.lock for engine in self._engines]
        for lock in held:
            lock.acquire()
        try:
            server = self._draw.choice(self._cluster.servers)
            prompts = [
                (self._draw.randint(1, MOST_CHUNKS), next(self._durable_seeds))
                for _ in range(DURABLE_PROMPTS)
            ]
            with self.attached(self._cluster.servers.index(server), "durable") as child:
                child.ask("connect")
                for n_chunks, seed in prompts:
                    before = self._put_outcomes(server)
                    outcomes = child.ask("store", n_chunks=n_chunks, seed=seed)
                    stored = sum(outcome == "stored" for outcome in outcomes)
                    eventually("the puts end", lambda b=before, s=stored: self._put_outcomes(server) >= b + s)
            self.journal.note("durability checked")
            server.kill()
            server.wipe_segment()
            server.start()
            with self.attached(self._cluster.servers.index(server), "durable") as child:
                child.ask("connect")
                for n_chunks, seed in prompts:
                    hit = child.ask("hit", n_chunks=n_chunks, seed=seed)
                    self.journal.add("durable chunks verified", hit)
                    if hit < n_chunks:
                        self.journal.fail(
                            f"{n_chunks - hit} of {n_chunks} durable chunks of prompt {seed} are lost"
                        )
        finally:
            for lock in held:
                lock.release()

    @staticmethod
    def _put_outcomes(server: ServerProcess) -> int:
        """Return how many puts of the disk log have ended well since the server's start."""
        adapters = server.get("/v1/status")["l2_store"]["adapters"]
        return sum(
            int(count)
            for name, adapter in adapters.items()
            if name.startswith("disk")
            for outcome, count in adapter["outcomes"].items()
            if outcome in ("stored", "exists")
        )


def run(journal: Journal, draw: random.Random) -> None:
    with tempfile.TemporaryDirectory(prefix="kvstrata-chaos-") as name:
        folder = Path(name)
        with Cluster(folder, l1_mb=L1_MB, n_servers=SERVERS, chunk_tokens=16, l2="embedded") as cluster:
            Chaos(journal, draw, cluster, folder).run()


if __name__ == "__main__":
    sys.exit(command("chaos", __doc__, run))
