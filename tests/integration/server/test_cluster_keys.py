"""Real servers and a real controller: who is let in as which member, by the key of a user, a member or a file."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.errors import ConfigError
from kvstrata.rpc.zmq_curve import OPEN_PUBLIC, KeyFolder, SharedKey, public_of
from tests.harness.cluster_instance import ClusterInstance
from tests.harness.controller_process import ControllerProcess
from tests.harness.http_read import read
from tests.harness.rpc_client import CHUNK_TOKENS, RpcClient
from tests.harness.server_process import ServerProcess
from tests.integration.server.test_cluster_member import QUICK, Prompt, cluster_of, ours, until

pytestmark = pytest.mark.integration

OTHER_UID = 65534
OTHER_USER = ("setpriv", f"--reuid={OTHER_UID}", f"--regid={OTHER_UID}", "--clear-groups")
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
# Tries everything with the server keys that are given, and with that of the cluster of the process's own user.
ATTEMPTS = """
import sys, zmq
from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.zmq_curve import SharedKey
port, peer_port, *known = sys.argv[1:]
context, poller, links = zmq.Context(), zmq.Poller(), []
public, secret = zmq.curve_keypair()
register = wire.Register(1, wire.CLUSTER_PROTOCOL_VERSION, "thief", 7, "1", ["l1"], 1, 16, "", "", "", "", 1, 0)
hello = wire.PeerHello(1, wire.CLUSTER_PROTOCOL_VERSION, "thief", 1, "tcp", False)
for where, request in ((port, register), (port, wire.Where(1, "thief", bytes(8), 1, 8)), (peer_port, hello)):
    for key in (None, SharedKey("").keys.server, *(text.encode() for text in known)):
        link = context.socket(zmq.DEALER)
        link.setsockopt(zmq.LINGER, 0)
        if key is not None:
            link.curve_serverkey, link.curve_publickey, link.curve_secretkey = key, public, secret
        link.connect(f"tcp://127.0.0.1:{where}")
        link.send(wire.encode(request))
        links.append(link)
        poller.register(link, zmq.POLLIN)
print(f"{len(poller.poll(2_000))} of {len(links)} were answered")
context.destroy(linger=0)
"""


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the files that processes of this test share, and only they."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-test-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / f"kvstrata-{os.geteuid()}"


@pytest.fixture
def theirs() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvstrata-test-"))
    os.chown(folder, OTHER_UID, OTHER_UID)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def controller(tmp_path: Path, run_dir: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path / "controller", flags=QUICK) as process:
        yield process


def server(folder: Path, port: int, instance: str, *flags: str) -> ServerProcess:
    """A server without key files, not started yet. `port`: the controller's reply port."""
    flags += ("--controller-url", f"tcp://127.0.0.1:{port}", "--instance-id", instance)
    return ServerProcess(folder, l1_mb=64, chunk_tokens=CHUNK_TOKENS, flags=flags)


def members(controller: ControllerProcess) -> set[str]:
    rows = controller.ask("/v1/instances")["instances"]
    return {row["id"] for row in rows if row["state"] == "live" and row["confirmed"]}


def test_concurrent_first_starts_of_one_user_make_one_key_and_one_cluster(tmp_path, run_dir):
    controller = ControllerProcess(tmp_path / "controller", flags=QUICK)
    controller.start()  # takes free ports, which the servers have to know
    controller.kill()
    (run_dir / "cluster.keys").unlink()
    names = ["a", "b", "c"]
    servers = [server(tmp_path / name, controller.ports["reply"], name) for name in names]
    with controller, concurrent.futures.ThreadPoolExecutor() as threads:
        try:
            started = [threads.submit(one.start) for one in servers]
            for one in started:
                one.result()
            until(lambda: members(controller) == set(names))
            assert [path.name for path in run_dir.iterdir() if path.is_file()] == ["cluster.keys"]
            assert stat.S_IMODE((run_dir / "cluster.keys").stat().st_mode) == 0o600
            assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
        finally:
            for one in servers:
                one.close()


@only_root
def test_another_user_can_neither_join_nor_ask_where_chunks_are_nor_read_as_a_peer(
    tmp_path: Path, controller: ControllerProcess, theirs: Path
) -> None:
    with server(tmp_path / "ours", controller.ports["reply"], "ours").started() as owner:
        until(lambda: members(controller) == {"ours"})
        [row] = controller.ask("/v1/instances")["instances"]
        member_key = (tmp_path / "ours" / "state" / "kvstrata" / "members" / "ours.key").read_text().strip()
        known = [OPEN_PUBLIC.decode(), public_of(member_key.encode()).decode()]
        ran = subprocess.run(
            [
                *(*OTHER_USER, sys.executable, "-c", ATTEMPTS, str(controller.ports["reply"])),
                *(row["control_endpoint"].rpartition(":")[2], *known),
            ],
            env={**os.environ, "XDG_RUNTIME_DIR": str(theirs)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.stdout == "0 of 12 were answered\n", ran.stderr
        cluster = controller.ask("/v1/cluster")["port"]
        assert cluster["refused_handshakes"] >= 8
        assert members(controller) == {"ours"}
        for process, port in ((controller, "monitor_ports.reply"), (owner, "p2p.listen")):
            refused = re.findall(rf"connection_refused port={port} .*", process.log.read_text())
            assert refused and all("kvstrata cluster init (docs/cluster.md" in line for line in refused)


@pytest.mark.long
@only_root
@pytest.mark.parametrize("flags", [(), ("--insecure",)], ids=["with its own key", "open"])
def test_another_user_cannot_be_the_controller_while_the_real_one_is_down(
    tmp_path: Path, controller: ControllerProcess, theirs: Path, flags: tuple[str, ...]
) -> None:
    with server(tmp_path / "ours", controller.ports["reply"], "ours").started() as ours:
        until(lambda: members(controller) == {"ours"})
        controller.kill()
        token = theirs / "token"
        token.write_text("t" * 32)
        token.chmod(0o600)
        os.chown(token, OTHER_UID, OTHER_UID)
        with open(theirs / "log", "wb") as output:
            impostor = subprocess.Popen(
                [
                    *(*OTHER_USER, sys.executable, "-m", "kvstrata.cli.controller", "--no-supervise", *flags),
                    *("--port", str(controller.http_port), "--monitor-ports", json.dumps(controller.ports)),
                    *("--snapshot-dir", "none", "--token-file", str(token)),
                ],
                env={**os.environ, "XDG_RUNTIME_DIR": str(theirs)},
                stdout=output,
                stderr=output,
            )
        try:
            until(lambda: "ready" in (theirs / "log").read_text())
            ours.expect("controller_has_other_keys")
            told = json.loads(read(f"{controller.url}/v1/cluster", token="t" * 32))
            assert told["port"]["received"] == 0
            assert told["port"]["refused_handshakes"] > 0
        finally:
            impostor.terminate()
            assert impostor.wait(60) == 0
        controller.start()
        until(lambda: members(controller) == {"ours"})


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("secret {}\n", 0o640, "can be read by others"),
        ("secret {}\n", 0o604, "can be read by others"),
        ("", 0o600, "has no line `secret KEY`"),
        ("secret {:.30}\n", 0o600, "line 1: write `secret KEY`"),
        ("secret  \x00\xff\n", 0o600, "line 1: write"),
        ("secret " + "~" * 40 + "\n", 0o600, "not a CURVE key"),
    ],
)
def test_a_key_that_is_damaged_or_that_others_can_read_is_an_error_that_says_what_to_do(
    run_dir: Path, text: str, mode: int, says: str
) -> None:
    run_dir.mkdir(mode=0o700)
    path = run_dir / "cluster.keys"
    path.write_text(text.format(OPEN_PUBLIC.decode()))
    path.chmod(mode)
    with pytest.raises(ConfigError) as refused:
        SharedKey("controller.curve_file")
    said = refused.value.message
    assert said.startswith(f"controller.curve_file: {path}") and says in said
    assert "you may delete it, and then restart" in said


@pytest.mark.long
def test_insecure_opens_a_cluster_and_both_logs_say_so_at_each_start(tmp_path: Path, run_dir: Path) -> None:
    with (
        ControllerProcess(tmp_path / "controller", flags=(*QUICK, "--insecure")) as controller,
        server(tmp_path / "a", controller.ports["reply"], "a", "--insecure") as a,
        server(tmp_path / "b", controller.ports["reply"], "b") as b,
    ):
        for starts in (1, 2):
            a.start()
            until(lambda: members(controller) == {"a"})
            for process in (controller, a):
                assert process.log.read_text().count("cluster_ports_open") == starts
            a.stop()
            controller.stop()
            controller.start()
        b.start()  # without --insecure it believes no controller that anybody could be
        b.expect("controller_has_other_keys")
        assert not cluster_of(b)["member"]
        b.expect("controller_has_other_keys", "or runs with --insecure")
        controller.kill()
        with ControllerProcess(tmp_path / "closed", flags=QUICK) as closed:
            with ClusterInstance(closed.ports["reply"], "c") as c:
                c.register()
            with server(tmp_path / "d", closed.ports["reply"], "d", "--insecure").started() as d:
                d.expect("controller_has_other_keys")
                assert "this instance was started with --insecure" in d.log.read_text()


def live(controller: ControllerProcess) -> dict[str, Any]:
    """The controller's row of the id; empty unless it lives."""
    row = ours(controller)
    return row if row.get("state") == "live" else {}


def test_a_server_comes_back_by_itself_when_the_one_that_superseded_it_is_killed(tmp_path, controller):
    with (
        server(tmp_path / "one", controller.ports["reply"], "ours") as first,
        server(tmp_path / "one", controller.ports["reply"], "ours") as second,
    ):
        first.start()
        until(lambda: live(controller).get("pid") == first.pid)
        second.start()
        until(lambda: live(controller).get("pid") == second.pid)
        until(lambda: not cluster_of(first)["member"])
        second.kill()
        until(lambda: live(controller).get("pid") == first.pid)
        until(lambda: live(controller).get("confirmed"))
        assert cluster_of(first)["member"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of a controller and of the members `a` and `b`."""
    keys = KeyFolder(str(tmp_path / "keys"))
    keys.make(["a", "b"], overwrite=False)
    return keys.folder


@pytest.fixture
def keyed(tmp_path: Path, folder: Path) -> Iterator[ControllerProcess]:
    flags = (*QUICK, "--curve-secret-file", str(folder / "controller.keys"))
    with ControllerProcess(tmp_path / "controller", flags=flags) as process:
        yield process


def member(controller: ControllerProcess, folder: Path, keys: str, instance: str) -> ServerProcess:
    """A server with this id and the keys of this file, not started yet."""
    flags = ("--cluster-curve-file", str(folder / f"{keys}.keys"))
    return server(folder.parent / f"{keys} {instance}", controller.ports["reply"], instance, *flags)


def test_members_with_keys_of_their_own_read_from_each_other(keyed, folder):
    with contextlib.ExitStack() as stack:
        prompts = []
        for keys, instance in (("a", "a"), ("b", "b-5555")):
            one = stack.enter_context(member(keyed, folder, keys, instance).started())
            client = stack.enter_context(RpcClient(one.socket_dir))
            prompts.append(Prompt(client, 1, 20))
        until(lambda: members(keyed) == {"a", "b-5555"})
        prompts[0].store()
        until(lambda: prompts[1].hits() == 20)
        assert keyed.ask("/v1/cluster")["port"]["refused_handshakes"] == 0


@pytest.mark.long
def test_members_come_and_go_by_changed_files_without_a_restart(keyed, folder):
    with member(keyed, folder, "a", "a").started() as first, contextlib.ExitStack() as stack:
        owner = Prompt(stack.enter_context(RpcClient(first.socket_dir)), 1, 20)
        until(lambda: members(keyed) == {"a"})
        owner.store()
        KeyFolder(str(folder)).add(["c"], overwrite=False)
        fresh = stack.enter_context(member(keyed, folder, "c", "c").started())
        until(lambda: members(keyed) == {"a", "c"})
        reader = Prompt(stack.enter_context(RpcClient(fresh.socket_dir)), 1, 20)
        until(lambda: reader.hits() == 20)
        KeyFolder(str(folder)).remove(["c"])
        until(lambda: members(keyed) == {"a"})
        assert not cluster_of(fresh)["member"] and cluster_of(first)["member"]


@pytest.mark.long
def test_a_member_may_use_its_own_ids_only(keyed, folder):
    with member(keyed, folder, "a", "a") as rightful, member(keyed, folder, "b", "a") as forged:
        forged.start()
        forged.expect("controller_refuses", "code=not_permitted")
        rightful.start()
        until(lambda: members(keyed) == {"a"})
        assert not cluster_of(forged)["member"]
        keyed.expect("registration_refused", 'why="the key file lists other ids for its key"')
