"""The shipped manifests. No cluster runs here: they are parsed, and our own `--check` takes their commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.connectors.settings import load_settings
from tests.harness import own_commands

FOLDER = Path(__file__).parents[3] / "configs" / "kubernetes"
GIB = 1 << 30


def documents(name: str) -> dict[str, dict[str, Any]]:
    """By kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text())}


def pod(name: str) -> dict[str, Any]:
    found = documents(name)
    return found["Pod"]["spec"] if "Pod" in found else found["DaemonSet"]["spec"]["template"]["spec"]


def socket_folder(name: str) -> str:
    """The host's folder of the volume `sockets`, and its mount point in the container."""
    (volume,) = [each for each in pod(name)["volumes"] if each["name"] == "sockets"]
    (mount,) = [each for each in pod(name)["containers"][0]["volumeMounts"] if each["name"] == "sockets"]
    return f"{volume['hostPath']['path']} {mount['mountPath']}"


def bytes_of(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"Gi": GIB}[unit]


def test_the_server_accepts_its_command_and_settings(tmp_path: Path) -> None:
    manifest = documents("server.yaml")
    settings = manifest["ConfigMap"]["data"]["server.yaml"]
    token = tmp_path / "token"
    token.write_text("a-token-for-the-test-only-0123456789\n")
    token.chmod(0o600)
    assert "/run/secrets/kvstrata/token" in settings
    file = tmp_path / "server.yaml"
    file.write_text(
        settings.replace("/run/secrets/kvstrata/token", str(token)).replace("size_gb: 32", "size_gb: 0.1")
    )
    program, *arguments = pod("server.yaml")["containers"][0]["command"]
    assert program == "lmcache-server"
    places = {
        "/etc/kvstrata/server.yaml": str(file),
        "/run/kvstrata": str(tmp_path),
        "/var/lib/kvstrata": str(tmp_path),
    }
    for inside, outside in places.items():
        assert any(inside in argument for argument in arguments)
        arguments = [argument.replace(inside, outside) for argument in arguments]
    checked = own_commands.run("kvstrata.cli.server", *arguments, "--check")
    assert checked.returncode in (0, 75), checked.stderr  # 75: not on this machine
    assert json.loads(checked.stdout)["http"]["host"] == "0.0.0.0"


def test_l1_fits_into_the_pods_shared_memory_and_that_into_its_memory_limit() -> None:
    settings = yaml.safe_load(documents("server.yaml")["ConfigMap"]["data"]["server.yaml"])
    (shm,) = [each for each in pod("server.yaml")["volumes"] if each["name"] == "shm"]
    shm_bytes = bytes_of(shm["emptyDir"]["sizeLimit"])
    assert shm["emptyDir"]["medium"] == "Memory"
    assert settings["l1"]["size_gb"] * GIB < shm_bytes
    limits = pod("server.yaml")["containers"][0]["resources"]["limits"]
    assert shm_bytes < bytes_of(limits["memory"])


def test_engine_and_server_meet_in_one_folder_as_one_user() -> None:
    server, engine = pod("server.yaml"), pod("engine.yaml")
    assert server["securityContext"]["runAsUser"] == engine["securityContext"]["runAsUser"]
    assert server["nodeSelector"] == engine["nodeSelector"]
    assert socket_folder("server.yaml") == socket_folder("engine.yaml")
    command = engine["containers"][0]["command"]
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    settings, notes = load_settings(transfer["kv_connector_extra_config"], {})
    assert not notes
    assert f"--socket-dir={settings.socket_dir}" in server["containers"][0]["command"]


def test_every_mount_has_a_volume() -> None:
    for name in ("server.yaml", "engine.yaml"):
        spec = pod(name)
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_no_container_can_gain_a_right_or_write_outside_its_volumes() -> None:
    for name in ("server.yaml", "engine.yaml"):
        spec = pod(name)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0 and spec["securityContext"]["runAsGroup"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostIPC", "hostPID", "hostNetwork"} & set(spec)
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            confined = container["securityContext"]
            assert confined["allowPrivilegeEscalation"] is False
            assert confined["capabilities"]["drop"] == ["ALL"]
            assert not {"privileged", "seccompProfile"} & set(confined)
            # vLLM writes below its home folder.
            assert confined.get("readOnlyRootFilesystem") is (None if container["name"] == "vllm" else True)


def test_only_the_container_that_makes_the_folders_is_root_and_it_may_only_give_them_away() -> None:
    spec = pod("server.yaml")
    (folders,), (server,) = spec["initContainers"], spec["containers"]
    assert folders["securityContext"]["capabilities"]["add"] == ["CHOWN", "FOWNER"]
    assert "add" not in server["securityContext"]["capabilities"]
    assert not {"runAsUser", "runAsNonRoot"} & set(server["securityContext"])


def test_folders_are_made_and_made_again_with_the_capabilities_of_their_container(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, as the container has")
    (container,) = pod("server.yaml")["initContainers"]
    host = tmp_path / "host"
    for mount in container["volumeMounts"]:
        Path(str(mount["mountPath"]).replace("/host", str(host))).mkdir(parents=True)
    capabilities = ",".join(
        f"+{name.lower()}" for name in container["securityContext"]["capabilities"]["add"]
    )
    confined = ["setpriv", f"--bounding-set=-all,{capabilities}", "--inh-caps=-all", "--no-new-privs"]
    command = [word.replace("/host", str(host)) for word in container["command"]]
    for _ in range(2):
        subprocess.run([*confined, *command], check=True, timeout=60)
        for made in (host / "run/sockets", host / "disk/log"):
            status = made.stat()
            assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (1000, 1000, 0o700)
            made.chmod(0o755)  # as a folder from elsewhere may be: the next run closes it
