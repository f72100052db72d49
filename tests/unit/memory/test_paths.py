"""Where sockets, files and pools lie, who may own them, how much memory there is, and what `ctl pool` frees."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest

from kvstrata.config import private_dir
from kvstrata.errors import ConfigError, SegmentError
from kvstrata.memory import linux, paths
from kvstrata.memory.pools import FoundPool, find_pools, free
from kvstrata.memory.segment import Segment, SegmentSettings
from kvstrata.memory.segment_settings import huge_pages, memory_limit
from tests.harness.amount import amount

OURS = f"kvstrata-{os.geteuid()}"


@pytest.mark.parametrize("environ", [{}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "/nonexistent/run"}])
def test_without_a_usable_runtime_dir_the_socket_dir_lies_in_tmp(environ: dict[str, str]) -> None:
    assert paths.socket_dir(None, 5555, environ) == Path("/tmp") / OURS / "5555"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to own a directory by another uid")
def test_runtime_dir_of_another_user_counts_as_unset(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    assert paths.socket_dir(None, 1, {"XDG_RUNTIME_DIR": str(tmp_path)}) == Path("/tmp") / OURS / "1"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to own a directory by another uid")
def test_no_client_looks_in_a_login_folder_of_another_user(tmp_path, monkeypatch):
    login = tmp_path / str(os.geteuid())
    login.mkdir()
    os.chown(login, 12345, -1)
    monkeypatch.setattr(private_dir, "SYSTEM_RUN", tmp_path)
    assert paths.socket_dirs("", 7, {}) == [Path("/tmp") / OURS / "7"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to own a directory by another uid")
def test_names_that_another_user_has_taken_are_passed_over_and_told(request, caplog):
    """Anybody may make any name in /tmp and /dev/shm: a server once never started again for that."""
    tmp_path = Path(tempfile.mkdtemp(prefix="kv-"))  # short, since sockets lie in it
    request.addfinalizer(partial(shutil.rmtree, tmp_path))
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    for name in (OURS, f"{OURS}+2", f"{OURS}-5555"):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, 12345, -1)
    ours = tmp_path / f"{OURS}+3"
    assert paths.socket_dir(None, 5555, environ) == ours / "5555"
    assert private_dir.run_dirs(environ)[0] == ours
    private_dir.make_private_dir(ours / "5555", "socket_dir")
    assert paths.segment_dir(5555, root=tmp_path) == tmp_path / f"{OURS}-5555+2"
    assert paths.segment_dir(5556, root=tmp_path) == tmp_path / f"{OURS}-5556"
    assert paths.socket_dir(None, 5555, environ) == ours / "5555", "the same again, also for clients"
    (tmp_path / OURS).rmdir()
    (tmp_path / f"{OURS}+2").rmdir()
    (tmp_path / f"{OURS}-5555").rmdir()
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition(" ")[0] for line in told] == [
        str(tmp_path / name) for name in (OURS, f"{OURS}+2", f"{OURS}-5555")
    ], "each once"


def test_relative_runtime_dir_is_refused_naming_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"XDG_RUNTIME_DIR: 'run/me' is not an absolute path"):
        paths.socket_dir(None, 5555, {"XDG_RUNTIME_DIR": "run/me"})


@pytest.mark.parametrize("name", ["..", "a/b", "-x", "a b", "x" * 65, "ü"])
def test_instance_id_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^instance_id: "):
        paths.segment_dir(5555, name)


def test_private_dir_is_made_with_its_parents_for_us_alone(tmp_path: Path) -> None:
    directory = tmp_path / "a b" / OURS / "5555"
    private_dir.make_private_dir(directory, "socket_dir")
    private_dir.make_private_dir(directory, "socket_dir")
    for made in (directory, directory.parent, directory.parent.parent):
        assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_directory_that_others_may_write_to_is_refused_by_name(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match=rf"socket_dir: directory .*d' has mode {mode:04o}"):
        private_dir.make_private_dir(directory, "socket_dir")


def test_writable_user_directory_above_a_default_path_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / OURS / "5555"
    private_dir.make_private_dir(directory, "socket_dir")
    directory.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=OURS):
        private_dir.check_private_dir(directory, "socket_dir")


def test_symbolic_link_or_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match=rf"{name}' is not a directory"):
            private_dir.make_private_dir(tmp_path / name, "segment")


# --- memory -----------------------------------------------------------------------------------------------


def make_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 600 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/a/b", {"a/memory.max": "5000\n", "a/b/memory.max": "max\n"}),
        ("0::/elsewhere", {"memory.max": "5000\n"}),
        ("0::/../../outside", {"memory.max": "5000\n"}),
        ("4:cpu,memory:/x\n0::/", {"memory/x/memory.limit_in_bytes": "5000\n"}),
        ("0::/u", {"unified/u/memory.max": "5000\n"}),
    ],
    ids=["v2-parent", "v2-other-mount", "v2-other-namespace", "v1", "hybrid"],
)
def test_least_limit_of_any_cgroup_above_us_counts(tmp_path, cgroup, files):
    tree = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    limit = memory_limit(make_tree(tmp_path, {"proc/self/cgroup": cgroup + "\n", **tree}))
    assert limit.limit_bytes == 5000
    assert "cgroup" in limit.source


def test_reserve_of_huge_pages_counts_what_is_promised_to_others(tmp_path: Path) -> None:
    assert huge_pages(tmp_path) == (0, 0)
    folder = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    folder.mkdir(parents=True)
    for name, count in (("nr_hugepages", 10), ("free_hugepages", 7), ("resv_hugepages", 4)):
        (folder / name).write_text(f"{count}\n")
    assert huge_pages(tmp_path) == (10, 3)


@pytest.fixture
def left(settings: SegmentSettings) -> Path:
    """The folder of a pool whose server has ended."""
    Segment.open(settings).close()
    return settings.directory


def found_below(root: Path) -> list[FoundPool]:
    return find_pools([root])


def test_pools_are_found_with_their_size_and_age(root: Path, left: Path) -> None:
    (root / "other").mkdir()
    (root / "other" / "index").write_text("of a book")
    (root / "link").symlink_to(left)
    [pool] = found_below(root)
    assert pool.place == left
    assert pool.memory_bytes >= (pool.place / "index").stat().st_blocks * 512 > 0
    assert 0 <= pool.age_s < 600
    assert pool.owners == []
    assert pool.idle_s is not None and 0 <= pool.idle_s < 600


def test_a_pool_of_another_version_is_found_and_freed(root: Path, left: Path) -> None:
    (left / "index").write_bytes(b"something else" * 1000)
    assert [(pool.place, pool.idle_s) for pool in found_below(root)] == [(left, None)]
    free(left)
    assert not left.exists()


def test_only_a_folder_of_ours_that_holds_a_pool_is_freed(root: Path, left: Path) -> None:
    (root / "book").mkdir()
    (root / "book" / "index").write_text("of a book")
    with pytest.raises(SegmentError, match="no pool is there"):
        free(root / "book")
    assert (root / "book" / "index").exists()
    (root / "link").symlink_to(left)
    with pytest.raises(ConfigError, match="not a directory"):
        free(root / "link")
    with pytest.raises(ConfigError, match="No such file"):
        free(root / "none")


MOST_STARTS = 10_000


def test_servers_that_start_while_their_pool_is_freed_get_a_pool(settings: SegmentSettings) -> None:
    """Each start ends with a pool at its place, adopted or new; each `free` removes a whole pool or refuses."""
    Segment.open(settings).close()
    ended = threading.Event()
    freed = []

    def keep_freeing() -> None:
        while not ended.wait(
            0.002
        ):  # without a pause, its lock could keep a start waiting until the start gives up
            with contextlib.suppress(SegmentError, ConfigError):
                freed.append(free(settings.directory))

    freeing = threading.Thread(target=keep_freeing)
    freeing.start()
    starts = 0
    try:
        while starts < amount(20, 60) or (not freed and starts < MOST_STARTS):
            starts += 1
            found = Segment.open(settings)
            for name, fd in (
                ("index", found.descriptors.index_readonly),
                ("extents", found.descriptors.extents),
            ):
                there = (settings.directory / name).stat()
                assert (there.st_dev, there.st_ino) == linux.file_id(fd)
            found.close()
    finally:
        ended.set()
        freeing.join()
    assert freed
