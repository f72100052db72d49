"""The server process: the order in which it starts its parts, and how it ends.

    settings ─▶ plan ─▶ instance open ─▶ socket ─▶ heartbeat ─▶ membership ─▶ HTTP ─▶ ready ─▶ stop

Rules:

1. Any wrong setting, port or file stops the start with one line that says what to change.
2. No port is read before the instance can answer: `open_instance` binds the ports, and `start` begins to read them.
3. SIGTERM and SIGINT stop in order: not ready, no new processes, puts and loads get `l2.drain_s`, sockets close, the
   pool stays in shared memory for the next server (unless `l1.forget_on_exit` is set); the last line of the log says
   so.
4. After a crash, which process/lifecycle.py describes, the next server adopts the pool; if the kernel killed it for
   lack of memory, the next one makes a smaller pool instead.
"""

from __future__ import annotations

import gc
import os
import shlex
import time
from collections.abc import Callable
from typing import Any

from kvstrata import __version__
from kvstrata.config.model import ServerSettings
from kvstrata.memory.pools import pool_at
from kvstrata.observability.logging import EventLog
from kvstrata.observability.logging import set_up as set_up_logging
from kvstrata.process.keeper import NOT_RESTARTED, Restarts
from kvstrata.process.lifecycle import Process, set_up, tell_ready
from kvstrata.process.lifecycle import run as run_process
from kvstrata.server.housekeeping import heartbeat
from kvstrata.server.instance import Instance, Shell, open_instance
from kvstrata.server.own_files import OwnFiles
from kvstrata.server.plan import Plan, after_out_of_memory, plan
from kvstrata.server.reload import Reload
from kvstrata.types import GB

PREFAULT_THREADS = 2
"""They fault in the pool at the start, beside the first requests."""


def run(
    settings: ServerSettings,
    *,
    notes: list[str],
    exposed: list[str],
    reread: Callable[[], ServerSettings],
    ready_fd: int = -1,
    restarts: Restarts = NOT_RESTARTED,
) -> int:
    """Run a server until it is told to stop. Returns the exit status. Raises KvstrataError if it cannot start.

    `reread` reads the settings again for SIGHUP.
    """
    set_up_logging(settings.log_level, settings.log_format)
    set_up()
    checked = plan(settings, os.environ)
    log = EventLog("server")
    if (
        restarts.out_of_memory
        and (smaller := after_out_of_memory(checked, restarts.out_of_memory)) != checked
    ):
        advice = "lower --l1-size-gb or raise the memory limit; L1 has its whole size again when it is started anew"
        log.error(
            "l1_smaller", out_of_memory=restarts.out_of_memory, l1_bytes=smaller.extents_bytes,
            was_bytes=checked.extents_bytes, advice=advice,
        )  # fmt: skip
        checked = smaller
    for note in notes:
        log.warning("setting_noted", note=note)
    for field in exposed:
        advice = "every user of this machine can read it there; name a file that holds it, or use --config"
        log.warning("secret_on_the_command_line", field=field, advice=advice)
    return run_process(Server(checked, reread, ready_fd, restarts))


class Server(Process):
    """One server process."""

    def __init__(
        self,
        checked: Plan,
        reread: Callable[[], ServerSettings],
        ready_fd: int = -1,
        restarts: Restarts = NOT_RESTARTED,
    ) -> None:
        super().__init__("server")
        self._plan = checked
        self._reread = reread
        self._ready_fd = ready_fd
        self._restarts = restarts
        self._started_s = time.monotonic()

    async def start(self) -> None:
        """Open the instance and begin to answer. Raises KvstrataError; the closers then undo what was opened."""
        shell = Shell(self.loop, self.supervisor, self.closers, self.log, self._restarts, self._started_s)
        self._instance = instance = await open_instance(self._plan, shell)
        self._reload = Reload(self._plan, self._reread, instance)
        pool = instance.parts.pool
        if instance.peer_server is not None:
            instance.peer_server.start()
        await instance.attach.start(instance.parts.requests.on_frame)
        pool.heartbeat()
        self.supervisor.spawn(heartbeat(pool, instance.parts.events), "heartbeat")
        self.supervisor.spawn(instance.housekeeping.run(), "housekeeping")
        self.supervisor.spawn(instance.parts.trend.run(), "trend")
        self.supervisor.spawn(instance.parts.tiers.watch_folders(), "media")
        folder, segment = instance.parts.facts.socket_dir, instance.segment
        own_files = OwnFiles(folder, instance.parts.facts.port, segment, instance.attach)
        self.supervisor.spawn(own_files.run(), "own-files")
        pool.prefault_start(PREFAULT_THREADS)
        if instance.membership is not None:
            instance.membership.start()
        if instance.http is not None:
            listener, port = instance.http
            self.supervisor.spawn(port.serve(listener), "http")
        if instance.http_token is not None:
            self.supervisor.spawn(instance.http_token.keep(), "token")
        instance.parts.readiness.set()
        gc.collect()
        gc.freeze()
        self._announce(instance)

    @property
    def drain_s(self) -> float:
        """`l2.drain_s`."""
        return self._reload.settings.l2.drain_s

    async def drain(self, drain_s: float) -> None:
        """Take no new processes, and let L2 finish its puts and loads."""
        instance, ends_s = self._instance, self.loop.time() + drain_s
        instance.parts.readiness.set("stopping")
        self._held = self._in_use()
        if instance.membership is not None:
            await instance.membership.stop()
        await instance.parts.tails.stop()
        await instance.parts.store.stop(max(0.0, ends_s - self.loop.time()))
        await instance.parts.prefetch.stop(max(0.0, ends_s - self.loop.time()))

    def under_way(self) -> dict[str, object]:
        """Puts and loads that a stop waits for."""
        parts = self._instance.parts
        return {"puts": parts.store.undone, "fetches": parts.prefetch.stats()["fetches_running"]}

    def given_up(self) -> dict[str, object]:
        """Puts that were given up, and what the engines held when the stop began; they keep it over the restart."""
        return {"puts_given_up": self._instance.parts.store.undone, **self._held}

    def standing(self) -> str:
        """Where engines find the server, and how large L1 is."""
        size_gb = self._instance.parts.pool.extents_bytes / GB
        return f"serving at {self._instance.parts.facts.socket_dir}, L1 of {size_gb:.1f} GB"

    def left_behind(self) -> tuple[str, dict[str, object]] | None:
        """The pool that stays in memory, and how to free it; or that it was removed (`l1.forget_on_exit`)."""
        segment = self._instance.segment
        pool = None if segment.backing == "memfd" else pool_at(segment.place)
        if pool is not None:
            command = shlex.join(["kvstrata", "ctl", "pool", "free", str(pool.place)])
            return "pool_kept", {"place": pool.place, "bytes": pool.memory_bytes, "to_free": command}
        if segment.backing == "memfd" or self._plan.settings.l1.forget_on_exit:
            # Engines map it until they attach to another server or end, and its memory stays as long.
            place = "memfd" if segment.backing == "memfd" else segment.place
            return "pool_removed", {"place": place, "engines": self._held["engines"]}
        return None

    async def reload(self) -> dict[str, object]:
        """See server/reload.py. Raises ConfigError."""
        newer = await self.loop.run_in_executor(None, self._reload.read)
        return self._reload.apply(newer).shown()

    def _in_use(self) -> dict[str, object]:
        parts = self._instance.parts
        return {"engines": len(parts.processes.groups), "leases": parts.grants.n_leases}

    def _announce(self, instance: Instance) -> None:
        facts = instance.parts.facts
        ready: dict[str, Any] = {
            "pid": os.getpid(),
            "instance_id": facts.instance_id,
            "epoch": facts.epoch,
            "port": facts.port,
            "http_port": facts.http_port,
            "http_socket": str(instance.http[0].path or "") if instance.http is not None else "",
            "http_token_file": instance.http_token.path if instance.http_token is not None else "",
            "socket_dir": str(facts.socket_dir),
            "l1_bytes": instance.parts.pool.extents_bytes,
            "adopted": instance.adopted,
            "adopted_chunks": instance.parts.pool.stats()["adopted_entries"],
            "tiers": [tier.name for tier in instance.parts.tiers],
            "ready_s": round(time.monotonic() - self._started_s, 3),
        }
        self.log.info("ready", version=__version__, **ready | {"tiers": ",".join(ready["tiers"]) or "none"})
        tell_ready(self._ready_fd, ready)
