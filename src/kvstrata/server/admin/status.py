"""The status document: sections by name, each made from the numbers of the parts that it describes."""

from __future__ import annotations

import functools
import operator
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvstrata import __version__
from kvstrata.config.model import ServerSettings
from kvstrata.native.core import POOL_NUMBERS, Pool
from kvstrata.observability.numbers import Number, Numbers, gauge
from kvstrata.server.processes import EngineGroup, Processes, tenant_number
from kvstrata.server.requests.grants import Grants, Reservation
from kvstrata.types import shown_name

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts

Section = Callable[[], Any]


class StatusBoard:
    """The sections of the status document, and their metrics. It is read only once the instance is ready."""

    def __init__(self) -> None:
        self._sections: dict[str, Section | tuple[Numbers, ...]] = {}

    def put(self, name: str, *numbers: Numbers) -> None:
        """Add a section that is made from the numbers of these parts."""
        assert name not in self._sections, name
        self._sections[name] = numbers

    def put_facts(self, name: str, section: Section) -> None:
        """Add a section without metrics."""
        self._sections[name] = section

    def document(self) -> dict[str, Any]:
        """All sections, read now."""
        return {
            name: functools.reduce(operator.or_, (part.document() for part in section))
            if isinstance(section, tuple)
            else section()
            for name, section in self._sections.items()
        }

    def numbers(self) -> Iterator[tuple[str, Numbers]]:
        """The parts whose numbers are metrics, each with its prefix."""
        for name, section in self._sections.items():
            for part in section if isinstance(section, tuple) else ():
                yield name if part.prefix is None else part.prefix, part


class InstanceNumbers(Numbers, prefix=""):
    """The section `instance`: name, ports, age, readiness."""

    instance = gauge("This instance; always 1.", lambda self: {self._facts.instance_id: 1}, "instance_id")

    def __init__(self, parts: Parts) -> None:
        self._facts, self._readiness, self._clock = parts.facts, parts.readiness, parts.clock

    def document(self) -> dict[str, Any]:
        """The instance's description of itself."""
        facts = self._facts
        return {
            "instance_id": facts.instance_id,
            "version": __version__,
            "epoch": facts.epoch,
            "pid": os.getpid(),
            "port": facts.port,
            "http_port": facts.http_port,
            "socket_dir": str(facts.socket_dir),
            "ready": self._readiness.ready,
            "uptime_s": round(self._clock.monotonic_s() - facts.started_s, 3),
            "unix_s": time.time(),
        }


class PoolNumbers(Numbers):
    """The section `pool`, whose numbers the table in ext/core/src/pool/stats.h declares."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def values(self) -> Iterator[tuple[Number, Any]]:
        """All numbers, read at one moment."""
        stats = self._pool.stats()
        return ((number, stats[number.field]) for number in self.declared)

    def document(self) -> dict[str, Any]:
        """The numbers, the eviction policy, and the classes of extents."""
        stats = self._pool.stats()
        return {**super().document(), "policy": stats["policy"], "classes": stats["classes"]}


class ForecastNumbers(Numbers):
    """The part of the section `pool` on L1s of other sizes and other shares of tenants (`Pool.forecasts`)."""

    forecast_hits = gauge(
        "Share of the chunks of recent requests that an L1 of another size would have had, by size in units of the "
        "current size.",
        lambda self: _by_size(self._pool.forecasts()[0], 1),
        "size",
    )
    forecast_seconds = gauge(
        "Share of the prefill seconds of recent requests that an L1 of another size would have saved, by size in "
        "units of the current size.",
        lambda self: _by_size(self._pool.forecasts()[0], 2),
        "size",
    )
    tenant_forecast = gauge(
        "Like forecast_hits (`of` is `hits`) and forecast_seconds (`seconds`), for one tenant's requests and another "
        "size of its share of L1, in units of the current size. Only for tenants named in the settings or the "
        "tenants file at the start.",
        lambda self: {
            (row["tenant"], size, of): share
            for row in self._tenants.in_l1()
            if row["tenant"] in self._named
            for of in ("hits", "seconds")
            for size, share in row.get(of, {}).items()
        },
        *("tenant", "size", "of"),
        key="",
    )

    def __init__(self, parts: Parts) -> None:
        self._pool, self._tenants = parts.pool, parts.tenants
        self._named = {one.tenant for one in parts.counters.tenants.values()}


def _by_size(sizes: Iterable[tuple[float, ...]], field: int) -> dict[str, float]:
    return {f"{size[0]:g}": round(size[field], 4) for size in sizes}


def _of_pool(field: str, metric: str, kind: str, label: str, meaning: str) -> Number:
    number = Number(kind, meaning, (label,) if label else (), name=metric)
    number.__set_name__(PoolNumbers, field)
    return number


PoolNumbers.declared = tuple(_of_pool(*row) for row in POOL_NUMBERS)


class SessionNumbers(Numbers):
    """The section `sessions`: attached processes and the grants that the server keeps for them."""

    attached = gauge("Attached processes.", lambda self: sum(not one.detached for one in self._processes))
    detached = gauge(
        "Processes that are alive but whose attach connection is closed.",
        lambda self: sum(one.detached for one in self._processes),
    )
    groups = gauge("Engines with at least one attached process.", lambda self: len(self._processes.groups))
    leases = gauge("Leases held by sessions.", lambda self: self._grants.n_leases)
    leases_revoked = gauge(
        "Revoked leases that have been neither released nor passed to workers yet.",
        lambda self: self._grants.n_revoked,
    )
    extents_being_written = gauge(
        "Extents that are reserved and not committed yet.",
        lambda self: sum(
            len(grant.open)
            for process in self._processes
            for grant in process.grants.values()
            if isinstance(grant, Reservation)
        ),
    )
    tasks = gauge("Tasks running in the server.", lambda self: len(self._supervisor))
    absent_keys_remembered = gauge(
        "Absent keys whose reason is remembered for `explain`.",
        lambda self: len(self._explainer.notes),
    )

    def __init__(self, parts: Parts) -> None:
        self._processes, self._grants = parts.processes, parts.grants
        self._supervisor, self._explainer = parts.supervisor, parts.explainer


def processes_section(processes: Processes) -> list[dict[str, Any]]:
    """A row for each attached process."""
    return [
        {
            "session": shown_name(process.session),
            "group": shown_name(process.group.name),
            "role": str(process.declared.role),
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


def engines_section(processes: Processes, grants: Grants) -> list[dict[str, Any]]:
    """A row for each engine; its totals are since it attached, a record is one slice of a chunk."""
    held = Counter(lease.owner.group.name for lease in grants.leases())
    now_s = time.monotonic()
    return [
        {
            "engine": shown_name(group.name),
            "url": next(filter(None, (one.declared.engine_url for one in group.members.values())), ""),
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
            "prompt_tokens_s": round(group.prompt_tokens_s),
        }
        for group in processes.groups
    ]


def _longest_ago_s(group: EngineGroup, now_s: float) -> float | None:
    """Seconds since the last ping of the longest silent process; None: some process has not pinged yet."""
    first_s = min(one.pinged_s for one in group.members.values())
    return round(now_s - first_s, 3) if first_s else None


class TenantRows:
    """Bytes by tenant. A tenant is shown by name if a quota or an attached process names it, else by its number."""

    def __init__(self, parts: Parts) -> None:
        self._named: dict[int, str] = {}
        self.name(parts.settings)
        self._processes, self._pool = parts.processes, parts.pool

    def name(self, settings: ServerSettings) -> None:
        """Show the tenants that have a quota in these settings by their names."""
        self._named |= {tenant_number(name): name for name in settings.quotas_gb}

    def in_l1(self) -> list[dict[str, Any]]:
        """Bytes of L1, and the savings of other shares of it: for 16 tenants, and for all others together."""
        names = self._names()
        rows: dict[int | None, dict[str, Any]] = {
            number: {"tenant": names.get(number, f"#{number:08x}"), **numbers}
            for number, numbers in self._pool.stats()["tenants"].items()
        }
        for number, used_bytes, part, sizes in self._pool.forecasts()[1]:
            if number is None:
                rows[None] = {"tenant": "(others)", "bytes": used_bytes, "quota_bytes": -1}
            if number in rows:
                forecast = {"part": round(part, 4), "hits": _by_size(sizes, 1), "seconds": _by_size(sizes, 2)}
                rows[number] |= forecast
        return list(rows.values())

    def _names(self) -> dict[int, str]:
        names = dict(self._named)
        for process in self._processes:
            names.update((i.tenant, i.request.tenant) for i in process.identities.values())
        return names
