"""The server process: the order in which its parts start, and how it ends.

    settings ─▶ plan ─▶ instance open ─▶ socket ─▶ heartbeat ─▶ membership ─▶ HTTP ─▶ ready ─▶ stop

Rules:

1. Any wrong setting, port or file stops the start with one line that says what to change.
2. No port is read before the instance can answer: `open_instance` binds the ports, and `start` begins to read them.
3. SIGTERM and SIGINT cause an orderly stop: not ready, no new processes, puts and loads get `l2.drain_s`, sockets
   close, the pool stays in shared memory for the next server (unless `l1.forget_on_exit` is set), as the last log line
   says.
4. After a crash, which process/lifecycle.py describes, the next server adopts the pool.
"""

from __future__ import annotations

import gc
import os
import shlex
import time
from typing import Any

import msgspec

from kvstrata import __version__
from kvstrata.config.load import sorted_out
from kvstrata.config.model import ServerSettings
from kvstrata.memory.pools import pool_at
from kvstrata.observability.logging import current_level, set_level
from kvstrata.process.lifecycle import Process, tell_ready
from kvstrata.server.housekeeping import OwnFiles, heartbeat
from kvstrata.server.instance import Instance, open_instance
from kvstrata.server.plan import Plan, plan
from kvstrata.types import GB

LIVE = ("log_level", "quotas_gb", "l2.drain_s")
HTTP_TOKEN, TENANTS = "http.token_file", "security.tenants_file"
PREFAULT_THREADS = 2
"""Number of threads that fault in the pool at the start, while the first requests are served."""


class Server(Process):
    """One server process."""

    _plan: Plan
    _settings: ServerSettings

    async def start(self) -> None:
        """Open the instance and begin to answer. Raises KvstrataError; the closers then undo what was opened."""
        self._instance = instance = await open_instance(
            self._plan, self.supervisor, self.closers, self._restarts, self._started_s
        )
        pool = instance.parts.pool
        if instance.control is not None:
            instance.control.start()
        await instance.attach.start(instance.parts.requests)
        pool.heartbeat()
        self.supervisor.spawn(heartbeat(pool, instance.parts.events), "heartbeat")
        self.supervisor.spawn(instance.housekeeping.run(), "housekeeping")
        self.supervisor.spawn(instance.parts.trend.run(), "trend")
        self.supervisor.spawn(instance.parts.tiers.watch_folders(), "media")
        own_files = OwnFiles(instance.parts.facts, instance.segment, instance.attach)
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
        return self._settings.l2.drain_s

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
        """The puts and loads that a stop waits for."""
        parts = self._instance.parts
        return {"puts": parts.store.undone, "fetches": parts.prefetch.fetches_running}

    def given_up(self) -> dict[str, object]:
        """Abandoned puts, and the grants that engines held when the stop began and keep over the restart."""
        return {"puts_given_up": self._instance.parts.store.undone, **self._held}

    def standing(self) -> str:
        """One line with the socket directory and the size of L1."""
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
            # Engines map it until they attach to another server or end; its memory stays until then.
            place = "memfd" if segment.backing == "memfd" else segment.place
            return "pool_removed", {"place": place, "engines": self._held["engines"]}
        return None

    async def reload(self) -> dict[str, object]:
        """Read settings and token files again, and apply those that can change at run time. Raises ConfigError."""
        newer = await self.loop.run_in_executor(None, lambda: plan(self._reread(), os.environ))
        before = msgspec.structs.replace(self._settings, log_level=current_level())
        found = sorted_out(before, newer.settings, LIVE, (HTTP_TOKEN, TENANTS))
        # Adding or removing the setting of a token file needs a restart.
        served, given, parts = self._instance.http_token, newer.settings, self._instance.parts
        has_token = HTTP_TOKEN not in found.restart and bool(given.http.token_file)
        if served is not None and has_token and served.replace(newer.http_token):
            found.applied.add(HTTP_TOKEN)
        has_tenants = TENANTS not in found.restart and bool(given.security.tenants_file)
        if has_tenants and self._plan.tokens.replace(newer.tokens):
            found.applied.add(TENANTS)
        self._settings = after = found.in_force
        set_level(after.log_level)
        for tenant in before.quotas_gb.keys() - after.quotas_gb.keys():
            parts.set_quota(tenant, -1)
        for tenant, gigabytes in after.quotas_gb.items():
            if not parts.set_quota(tenant, int(gigabytes * GB)):
                self.log.error("too_many_quotas", left_out=tenant)
        parts.tenants.name(after)
        return found.shown()

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
            "http_token_file": instance.http_token.path if instance.http_token is not None else "",
            "socket_dir": str(facts.socket_dir),
            "l1_bytes": instance.parts.pool.extents_bytes,
            "adopted": instance.segment.adopted,
            "adopted_chunks": instance.parts.pool.stats()["adopted_entries"],
            "tiers": [tier.name for tier in instance.parts.tiers],
            "ready_s": round(time.monotonic() - self._started_s, 3),
        }
        self.log.info("ready", version=__version__, **ready | {"tiers": ",".join(ready["tiers"]) or "none"})
        tell_ready(self._ready_fd, ready)
