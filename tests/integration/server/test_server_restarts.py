"""A server that is killed, restarted, or loses its files: engines go on, and L1 is adopted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvstrata.memory.paths import LESSONS
from kvstrata.native.core import Pool
from kvstrata.process.http_local import find_token
from kvstrata.rpc import wire
from kvstrata.types import shown_name, unpack_extents
from tests.harness.cache_engine import eventually
from tests.harness.child import Child, ChildError
from tests.harness.l2_load import stored
from tests.harness.open_files import open_files
from tests.harness.rpc_client import RECORD_BYTES, RpcClient, RpcError, chain_of, keys_of, payload
from tests.harness.server_process import ServerProcess
from tests.harness.signals import send

pytestmark = pytest.mark.integration


def test_after_sigkill_the_next_server_serves_the_chunks_of_the_last(start):
    server = start()
    with RpcClient(server.socket_dir) as client:
        identity = client.identify(salt="s")
        chain = chain_of(identity.root, 6)
        client.store(identity, chain)
        lease = client.lookup(identity.identity_id, chain)
        old_epoch = client.epoch
        server.kill()
        server.start()
        assert server.ready["adopted"] and server.ready["adopted_chunks"] == 6
        client.attach()
        assert client.epoch != old_epoch
        assert client.release([(client.session, lease.seq)]) == 0, (
            "a lease of the old epoch has no name in the new one"
        )
        with pytest.raises(RpcError) as caught:
            client.lookup(identity.identity_id, chain)
        assert caught.value.code == "unknown_identity"
        client.ask(wire.Quiesced(client.next_seq()), wire.Ok)
        again = client.identify(salt="s")
        assert (again.root, again.complete) == (identity.root, True)
        reply = client.lookup(again.identity_id, chain)
        assert reply.n_chunks == 6
        for extent, key in zip(unpack_extents(reply.extents), keys_of(chain), strict=True):
            assert client.read(extent) == payload(key)
        assert client.release([(client.session, reply.seq)]) == 1


def test_what_the_policy_learnt_survives_a_kill_and_damage_costs_only_the_lessons(start):
    server = start()
    lessons = server.socket_dir / LESSONS
    with RpcClient(server.socket_dir) as client:
        identity = client.identify()
        chain = chain_of(identity.root, 2)
        client.store(identity, chain)
        for _ in range(520):
            found = client.lookup(identity.identity_id, chain)
            client.release([(client.session, found.seq)])
        eventually("a lesson is saved", lessons.exists)
    assert Pool.are_lessons(lessons.read_bytes())
    for damage, learns_anew in ((b"", False), (b"?", True)):
        server.kill()
        lessons.write_bytes(lessons.read_bytes() + damage)
        server.start()
        assert server.ready["adopted_chunks"] == 2
        assert ("the eviction policy starts without" in server.log_tail()) == learns_anew


def test_recorded_requests_are_replayed_with_the_hits_of_the_server(tmp_path: Path) -> None:
    def replay(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvstrata", "replay", *map(str, words), "--chunk-mb", "1", "--json"]
        return subprocess.run(command, capture_output=True, text=True)

    folder = tmp_path / "requests"
    environment = {**os.environ, "KVSTRATA_OBSERVABILITY_RECORD": str(folder)}
    with ServerProcess(tmp_path / "server", l1_mb=16, environment=environment) as server:
        server.start()
        with RpcClient(server.socket_dir) as client:
            identity = client.identify()
            chain = chain_of(identity.root, 6)
            for n_chunks in (4, 6, 6):  # 4 + 6 + 6 chunks, of which 0 + 4 + 6 are hits
                found = client.lookup(identity.identity_id, chain[: n_chunks * 32])
                if found.n_chunks:
                    client.release([(client.session, found.seq)])
                client.store(identity, chain[: n_chunks * 32])
            eventually(
                "all requests are written",
                lambda: sum(file.stat().st_size for file in folder.glob("*.kvr")) == 24 + 3 * 16 + 16 * 8,
            )
    [file] = folder.glob("*.kvr")
    assert not any(key[:8] in file.read_bytes() for key in keys_of(chain))
    done = replay(file, "--l1-size-gb", 1)
    assert json.loads(done.stdout)["sizes"][0]["hits_LRU"] == round(10 / 16, 4), done.stderr
    file.write_bytes(file.read_bytes()[:-1])
    for wrong, message in (
        (file, "is truncated"),
        (tmp_path / "server" / "server.log", "line 1: not a request"),
        (tmp_path / "x", "No such"),
    ):
        failed = replay(wrong)
        assert failed.returncode != 0 and message in failed.stderr and "Traceback" not in failed.stderr


def test_ctl_lists_and_frees_extents_that_a_device_may_still_write(tmp_path: Path) -> None:
    def ctl(server: ServerProcess, *arguments: str) -> Any:
        command = [sys.executable, "-m", "kvstrata", "ctl", "--url", server.url, "--json"]
        found = subprocess.run([*command, "stranded", *arguments], capture_output=True, text=True)
        return json.loads(found.stdout) if found.returncode == 0 else found.stderr

    with (
        ServerProcess(tmp_path / "server", l1_mb=16) as server,
        Child("tests.harness.rpc_child", log=tmp_path / "holder.log") as holder,
        Child("tests.harness.rpc_child", log=tmp_path / "other.log") as other,
    ):
        server.start()
        socket_dir = str(server.socket_dir)
        name, row_number = holder.ask("attach", socket_dir=socket_dir, registers_memory=True)
        holder.ask("reserve", session=name, n_chunks=3)
        session = shown_name(bytes.fromhex(name))
        server.kill()
        holder.kill()
        server.start()
        eventually("the session is stranded", lambda: ctl(server, "list")["stranded"])
        server.kill()
        server.start()
        eventually("it still is", lambda: ctl(server, "list")["stranded"])
        with pytest.raises(ChildError, match="choose another"):
            other.ask("attach", socket_dir=socket_dir, session=name)
        assert other.ask("attach", socket_dir=socket_dir)[1] != row_number
        [row] = ctl(server, "list")["stranded"]
        pool = server.get("/v1/status")["pool"]
        assert (row["session"], row["kept_bytes"]) == (session, pool["quarantined_bytes"])
        assert pool["quarantined_bytes"] >= 3 * RECORD_BYTES
        with urllib.request.urlopen(f"{server.url}/metrics") as page:
            assert f"kvstrata_attach_stranded_bytes {float(row['kept_bytes'])}" in page.read().decode()
        eventually("the log names it", lambda: session in server.log_tail())
        for wrong in ("ab" * 16, "x", "ab"):
            assert f"session: '{wrong}' is not stranded" in ctl(server, "clear", wrong)
        assert ctl(server, "clear", "all") == {"cleared": [row]}
        assert ctl(server, "list") == {"stranded": []}
        assert server.get("/v1/status")["pool"]["quarantined_bytes"] == 0


def test_importing_server_and_benchmark_brings_neither_torch_nor_fastapi() -> None:
    script = (
        "import sys, kvstrata.server.process, kvstrata.cli.bench.engine\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'pydantic', 'numpy', 'numba', 'prometheus_client'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_server_leaves_no_sockets_segment_or_descriptors_behind(tmp_path: Path) -> None:
    def start_and_stop(number: int) -> None:
        with ServerProcess(tmp_path / f"server{number}", l1_mb=16, flags=("--no-http",)).started() as process:
            process.stop()
        assert not process.socket_dir.exists()
        assert not process.segment_dir.exists()

    start_and_stop(1)  # the first start of this process opens what all further ones use
    before = sorted(open_files())
    start_and_stop(2)
    assert sorted(open_files()) == before


def test_a_background_task_that_crashes_ends_the_process_with_its_reason_and_keeps_the_pool(start, tmp_path):
    server = start()
    with RpcClient(server.socket_dir) as client:
        chain = chain_of(client.identify().root, 3)
        client.store(client.identify(), chain)
    assert server.stop() == 0
    assert not (server.socket_dir / "rpc.sock").exists()
    script = (
        "import sys\n"
        "from kvstrata.server import process as server\n"
        "async def crash(pool, events):\n"
        "    raise ZeroDivisionError('planted')\n"
        "server.heartbeat = crash\n"
        "from kvstrata.cli.server import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    flags = ["--no-http", "--l1-size-gb", str(16 / 1024), "--l2-adapter", "none"]
    flags.append("--no-supervise")
    ran = subprocess.run(
        [sys.executable, "-c", script, *flags, "--socket-dir", str(server.socket_dir)],
        env={**os.environ, "KVSTRATA_L1_SEGMENT_DIR": str(server.segment_dir)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 70
    assert "server_failed" in ran.stderr and "planted" in ran.stderr
    server.start()
    assert server.ready["adopted"]
    with RpcClient(server.socket_dir) as client:
        assert client.lookup(client.identify().identity_id, chain).n_chunks == 3


def test_what_is_removed_is_made_anew_and_the_next_server_still_adopts_l1(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, l1_mb=16, supervised=True).started() as server:
        token = find_token(server.url)
        with RpcClient(server.socket_dir) as before:
            identity, chain = stored(before, 2)
            Path(server.ready["http_token_file"]).unlink()
            shutil.rmtree(server.socket_dir)
            shutil.rmtree(server.segment_dir)
            eventually("L1 is held", lambda: " l1_held " in server.log.read_text())
            assert "extents" in "".join(open_files(server.pid)), "the keeper has it when that is said"
            said = server.log.read_text()
            assert " socket_dir_made_anew " in said and said.count(" socket_made_anew ") == 1
            with RpcClient(server.socket_dir) as after:
                assert after.lookup(after.identify().identity_id, chain).n_chunks == 2
            before.ping()
            held = before.lookup(identity.identity_id, chain)
            assert held.n_chunks == 2, "a connection from before goes on"
            before.release([(before.session, held.seq)])
            eventually("the token is found", lambda: find_token(server.url) == token)
        send(server.ready["pid"], signal.SIGKILL)
        eventually("the next server", lambda: server.log.read_text().count(" ready ") == 2)
        assert " adopted=True " in server.log.read_text().rpartition(" ready ")[2]
        with RpcClient(server.socket_dir) as client:
            assert client.lookup(client.identify().identity_id, chain).n_chunks == 2


def test_a_folder_that_another_server_has_taken_is_left_to_it(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "first", l1_mb=16) as first,
        ServerProcess(tmp_path / "second", l1_mb=16) as second,
    ):
        first.start()
        shutil.rmtree(first.socket_dir)
        shutil.rmtree(second.socket_dir, ignore_errors=True)
        second.socket_dir.symlink_to(first.socket_dir)  # removed with it
        second._flags = [
            str(first.socket_dir) if flag == str(second.socket_dir) else flag for flag in second._flags
        ]
        second.start()
        eventually("the first says so", lambda: " own_files_lost " in first.log.read_text())
        assert f"is in use by server process {second.pid}" in first.log.read_text()
        with RpcClient(first.socket_dir) as client:
            client.ping()
            assert client.epoch == second.ready["epoch"]
        second.socket_dir.unlink()
