"""The checks of `kvstrata doctor` that depend on the server's settings, which it takes as the server does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvstrata.cli.check import existing, look_at
from kvstrata.cli.ctl_pool import size
from kvstrata.cli.finding import Finding
from kvstrata.config.model import ServerSettings
from kvstrata.errors import KvstrataError
from kvstrata.memory import linux, paths
from kvstrata.memory.memory_limit import huge_pages
from kvstrata.process.http_unix import SCHEME
from kvstrata.types import GB

if TYPE_CHECKING:
    from kvstrata.server.plan import Plan

SHORT_LIVED = {
    "tmpfs": "its records do not survive the machine's restart",
    "overlay": "a container's own file system",
}
"""File systems on which an L2 makes little sense, and why."""
REMOTE = frozenset({"nfs", "nfs4", "cifs", "fuse.sshfs", "9p"})
NICS, INTERFACES = Path("/sys/class/infiniband"), Path("/sys/class/net")


def server_findings(settings: ServerSettings, environ: Mapping[str, str]) -> list[Finding]:
    """All findings about a server with these settings, in order."""
    from kvstrata.server.plan import plan, tcp_ports

    lacking: list[str] = []
    try:
        planned = plan(settings, environ, lacking)
        running = check_running(settings, environ)
        # The ports of a server that runs are taken, as they should be.
        ports = [] if running.found.startswith("process ") else tcp_ports(settings)
        lacking += look_at(planned.adapters, ports)
    except KvstrataError as error:
        return [
            Finding(
                "settings",
                "fail",
                error.message,
                "correct it; `lmcache-server --check` says when it is right",
            )
        ]
    said = [Finding("settings", "warn", lack, "correct the setting, or this machine") for lack in lacking]
    return [
        *(said or [Finding("settings", "ok", "can be used here")]),
        running,
        *check_shared_memory(settings, planned, environ),
        check_huge_pages(settings, planned),
        *check_folders(planned),
        check_locked_memory(settings, planned),
        *check_network(settings),
    ]


def check_running(settings: ServerSettings, environ: Mapping[str, str]) -> Finding:
    """Tell which server runs with the sockets of these settings, and whether it serves."""
    name = "running server"
    places = paths.socket_dirs(settings.socket_dir, settings.named_port, environ)
    for place in places:
        try:
            fd = os.open(place / paths.PID_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            locked = linux.byte_locker(fd, 0) is not None
            pid = os.read(fd, 32).decode("ascii", "replace").strip()
        finally:
            os.close(fd)
        if locked:
            return _asked(name, f"process {pid} at {place}", settings)
    return Finding(name, "ok", f"none at {', '.join(map(str, places))}")


def _asked(name: str, found: str, settings: ServerSettings) -> Finding:
    """What a running server says of itself."""
    from kvstrata.cli.asking import Ask, ask

    if not settings.http.enabled or not (settings.http.port or settings.http.host.startswith(SCHEME)):
        return Finding(name, "ok", f"{found}; its admin port is not named here")
    host = settings.http.host
    url = (
        host
        if host.startswith(SCHEME)
        else f"http://{f'[{host}]' if ':' in host else host}:{settings.http.port}"
    )
    try:
        instance = ask(url, Ask("/v1/status", timeout_s=5))["instance"]
    except KvstrataError as error:
        return Finding(
            name, "warn", f"{found}; {error.message}", f"`kvstrata ctl --url {url} --token-file FILE status`"
        )
    state = "ready" if instance["ready"] else "not ready"
    found += f": {state}, version {instance['version']}, up for {instance['uptime_s']:.0f} s"
    return Finding(
        name, "ok" if instance["ready"] else "warn", found, "" if instance["ready"] else "read its log"
    )


def check_shared_memory(
    settings: ServerSettings, planned: Plan, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Check that L1 fits into /dev/shm beside what is there, and name pools that nobody owns."""
    from kvstrata.memory.pools import find_pools
    from kvstrata.server.plan import segment_settings

    name, root = str(paths.SHM_ROOT), paths.SHM_ROOT
    if not root.is_dir():
        yield Finding(name, "warn", "absent", "a holder process will keep the pool instead: nothing to do")
        return
    directory = Path(settings.l1.segment_dir or paths.segment_dir(settings.named_port, settings.instance_id))
    # Nodes that this machine lacks have a line already, and the size does not depend on them.
    placed = msgspec.structs.replace(settings, l1=msgspec.structs.replace(settings.l1, numa="default"))
    needed = segment_settings(placed, planned.extents_bytes, Path("/"), Path("/")).needed_bytes()
    usage, pools = shutil.disk_usage(root), find_pools()
    ours = sum(pool.memory_bytes for pool in pools if pool.place == directory)
    found = f"{size(usage.free)} of {size(usage.total)} free; L1 needs {size(needed)}"
    if ours:
        found += f", {size(ours)} of it are there already"
    if settings.l1.use_hugepages or needed <= usage.free + ours:
        yield Finding(name, "ok", found)
    else:
        advice = "free pools that nobody owns, enlarge it (docker run --shm-size, mount -o remount,size=…), or lower "
        yield Finding(name, "warn", found, f"{advice}--l1-size-gb; else a holder process keeps the pool")
    for pool in pools:
        if not pool.owners and pool.place != directory:
            held = "--held " if pool.holder else ""
            found = f"{size(pool.memory_bytes)} at {pool.place}, owned by no process"
            yield Finding(
                "left pool",
                "warn",
                found,
                f"if you need it no more: kvstrata ctl pool free {held}{pool.place}",
            )


def check_huge_pages(settings: ServerSettings, planned: Plan) -> Finding:
    """Check that the reserve of huge pages is large enough, if L1 is to lie in them."""
    reserve = huge_pages()
    found = f"{reserve.free} of {reserve.total} pages of 2 MiB are free"
    if not settings.l1.use_hugepages:
        return Finding("huge pages", "ok", f"{found}; not asked for (--l1-use-hugepages)")
    needed = planned.extents_bytes // linux.HUGE_PAGE_BYTES
    if needed > reserve.free:
        advice = f"sysctl -w vm.nr_hugepages={reserve.total - reserve.free + needed}, or lower --l1-size-gb"
        return Finding("huge pages", "fail", f"{found}; L1 needs {needed}", advice)
    return Finding("huge pages", "ok", f"{found}; L1 needs {needed}")


def check_folders(planned: Plan) -> Iterator[Finding]:
    """Check the folders of the tiers: rights, space, and the kind of file system."""
    from kvstrata.storage import catalogue

    for tier in planned.adapters:
        medium = catalogue.load(tier.recipe.medium)
        folders = {} if medium.reach is None else medium.reach(tier.recipe.config, tier.recipe.place).folders
        for folder in folders.values():
            yield _check_folder(f"{tier.name} folder", Path(folder), tier.entry.get("capacity_gb"))


def _check_folder(name: str, folder: Path, capacity_gb: object) -> Finding:
    there = existing(folder.absolute())
    usage, kind = shutil.disk_usage(there), _file_system(there)
    found = f"{folder} on {kind}, {usage.free / GB:.1f} GB free"
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            name, "fail", found, f"let uid {os.geteuid()} write to {there}, or choose another base_path"
        )
    if kind in SHORT_LIVED:
        return Finding(name, "warn", f"{found}: {SHORT_LIVED[kind]}", "choose a base_path on a local disk")
    if kind in REMOTE:
        return Finding(name, "warn", found, "choose a local disk: each put waits for that file system")
    if isinstance(capacity_gb, int | float):
        found += f", capacity_gb is {capacity_gb:g}"
        if not folder.exists() and capacity_gb * GB > usage.free:
            return Finding(name, "warn", found, "lower capacity_gb, or free space")
    return Finding(name, "ok", found)


def _file_system(path: Path) -> str:
    """The type of the file system at `path`, by the kernel's table of mounts."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        _, mount, found, *_ = line.split()
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def check_locked_memory(settings: ServerSettings, planned: Plan) -> Finding:
    """Check that L1 may be locked, which network cards need that register it."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    registers = [tier.name for tier in planned.adapters if tier.entry.get("protocol") == "rdma"]
    if planned.p2p_engine and _nics():
        registers.append(f"p2p ({planned.p2p_engine})")
    if registers and soft != resource.RLIM_INFINITY and soft < planned.extents_bytes:
        found += f"; {', '.join(registers)} may register all of L1"
        return Finding(
            "locked memory", "warn", found, "ulimit -l unlimited (LimitMEMLOCK=infinity of systemd)"
        )
    return Finding("locked memory", "ok", found)


def check_network(settings: ServerSettings) -> Iterator[Finding]:
    """Tell the network interfaces that are up, and the RDMA cards with the state of their ports."""
    up = (
        [
            f"{entry.name} {_speed(entry)}"
            for entry in sorted(INTERFACES.iterdir())
            if entry.name != "lo" and _text(entry / "operstate") == "up"
        ]
        if INTERFACES.is_dir()
        else []
    )
    yield Finding("network", "ok", ", ".join(up) or "no interface but lo is up")
    cards = _nics()
    down = [card for card, state in cards.items() if "ACTIVE" not in state]
    found = ", ".join(f"{card} {state}" for card, state in cards.items()) or "none"
    if down and settings.controller.url:
        yield Finding(
            "RDMA", "warn", found, f"bring up {', '.join(down)} (ibstat), or peers are read over TCP"
        )
    else:
        yield Finding("RDMA", "ok", found)


def _nics() -> dict[str, str]:
    """RDMA cards, each with the states of its ports."""
    cards = sorted(NICS.iterdir()) if NICS.is_dir() else []
    return {
        card.name: "/".join(
            _text(port / "state").partition(": ")[2] for port in sorted((card / "ports").glob("*"))
        )
        for card in cards
    }


def _speed(interface: Path) -> str:
    text = _text(interface / "speed")
    return f"{int(text) / 1000:g} Gbit/s" if text.isdigit() else "(speed unknown)"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
