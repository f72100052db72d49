"""Cleaners that remove a running server's sockets, L1 and token take nothing from anybody."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from kvstrata.process.http_token import find_token
from tests.harness.cache_engine import eventually
from tests.harness.l2_load import stored
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess
from tests.harness.signals import send

pytestmark = pytest.mark.integration


def test_what_is_removed_is_made_anew_and_the_next_server_still_adopts_l1(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, l1_mb=16, supervised=True) as server:
        server.start()
        token = find_token(server.url)
        with RpcClient(server.socket_dir) as before:
            identity, chain = stored(before, 2)
            Path(server.ready["http_token_file"]).unlink()
            shutil.rmtree(server.socket_dir)
            shutil.rmtree(server.segment_dir)
            eventually("L1 is held", lambda: " l1_held " in server.log.read_text())
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
