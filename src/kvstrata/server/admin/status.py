"""The status document: sections by name, each supplied by the part of the instance that it describes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvstrata import __version__
from kvstrata.clock import Clock
from kvstrata.config.model import ServerSettings
from kvstrata.native.core import Pool
from kvstrata.server.plan import InstanceFacts
from kvstrata.server.processes import EngineGroup, ProcessTable, Readiness, tenant_number
from kvstrata.server.requests.grants import Grants
from kvstrata.types import shown_name

Section = Callable[[], Any]


class StatusBoard:
    """The sections of the status document. It is read only once the instance is ready."""

    def __init__(self) -> None:
        self._sections: dict[str, Section] = {}
        self._served: list[str] = []
        """Sections whose numbers are metrics too."""

    def put(self, name: str, section: Section, *, metrics: bool = True) -> None:
        """Add a section. `metrics`: its numbers are served as gauges, too."""
        assert name not in self._sections, name
        self._sections[name] = section
        if metrics:
            self._served.append(name)

    def document(self) -> dict[str, Any]:
        """All sections, read now."""
        return {name: section() for name, section in self._sections.items()}

    def numbers(self) -> dict[str, Any]:
        """The sections whose numbers are metrics, read now."""
        return {name: self._sections[name]() for name in self._served}


def instance_section(facts: InstanceFacts, readiness: Readiness, clock: Clock) -> dict[str, Any]:
    """The section `instance`: name, ports, age, readiness."""
    return {
        "instance_id": facts.instance_id,
        "version": __version__,
        "epoch": facts.epoch,
        "pid": os.getpid(),
        "port": facts.port,
        "http_port": facts.http_port,
        "socket_dir": str(facts.socket_dir),
        "ready": readiness.ready,
        "uptime_s": round(clock.monotonic_s() - facts.started_s, 3),
        "unix_s": time.time(),
    }


def pool_section(pool: Pool) -> dict[str, Any]:
    """The section about L1, without its tenants, which have a section of their own."""
    return {name: value for name, value in pool.stats().items() if name != "tenants"}


def processes_section(processes: ProcessTable) -> list[dict[str, Any]]:
    """A row for each attached process."""
    return [
        {
            "session": shown_name(process.session),
            "group": shown_name(process.group.name),
            "role": str(process.role),
            "pid": process.pid,
            "row": process.row,
            "detached": process.detached,
            "model": process.group.layout.model,
            "complete": process.group.complete,
            "copies": process.copies,
            "load_rate": process.load_rate
            and dict(zip(("latency_s", "bytes_s"), process.load_rate, strict=True)),
        }
        for process in processes
    ]


def engines_section(processes: ProcessTable, grants: Grants) -> list[dict[str, Any]]:
    """A row for each engine; its totals are since it attached, a record is one slice of a chunk."""
    held = Counter(lease.owner.group.name for lease in grants.leases())
    now_s = time.monotonic()
    return [
        {
            "engine": shown_name(group.name),
            "url": next((one.engine_url for one in group.members.values() if one.engine_url), ""),
            "pids": sorted({one.pid for one in group.members.values()}),
            "model": group.layout.model,
            "leases": held[group.name],
            "pinged_ago_s": _longest_ago_s(group, now_s),
            "processes": len(group.members),
            "complete": group.complete,
            "lookups": group.use.lookups,
            "lookup_chunks": group.use.lookup_chunks,
            "hit_chunks": group.use.hit_chunks,
            "stored_records": group.use.stored_records,
            "avoided_s": round(group.use.avoided_s, 3),
        }
        for group in processes.groups
    ]


def _longest_ago_s(group: EngineGroup, now_s: float) -> float | None:
    """Time since the last ping of the process that has been silent longest; None: one has sent none yet."""
    first_s = min(one.pinged_s for one in group.members.values())
    return round(now_s - first_s, 3) if first_s else None


class TenantRows:
    """Bytes by tenant. A tenant is shown by its name if a quota or an attached process tells it, else by its number."""

    def __init__(
        self,
        settings: ServerSettings,
        processes: ProcessTable,
        pool: Pool,
    ) -> None:
        self._named: dict[int, str] = {}
        self.name(settings)
        self._processes = processes
        self._pool = pool

    def name(self, settings: ServerSettings) -> None:
        """Show the tenants that have a quota in these settings by their names."""
        self._named |= {tenant_number(name): name for name in settings.quotas_gb}

    def in_l1(self) -> list[dict[str, Any]]:
        """Bytes of L1."""
        names = self._names()
        return [
            {"tenant": names.get(number, f"#{number:08x}"), **numbers}
            for number, numbers in self._pool.stats()["tenants"].items()
        ]

    def _names(self) -> dict[int, str]:
        names = dict(self._named)
        for process in self._processes:
            names.update((i.tenant, i.request.tenant) for i in process.identities.values())
        return names
