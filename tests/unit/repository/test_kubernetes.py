"""The shipped manifests. No cluster runs here: schemas and our own `--check` take them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.connectors.settings import load_settings
from tests.harness import kubernetes_schemas, own_commands
from tests.tools.provision import ROOT

FOLDER = ROOT / "configs" / "kubernetes"
GATEWAYS = ("gateway", "picker")
ALL = (*GATEWAYS, "engine", "server")
GIB = 1 << 30


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of a file."""
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def one(name: str, kind: str) -> dict[str, Any]:
    [found] = [each for each in documents(name) if each["kind"] == kind]
    return found


def pod(name: str) -> dict[str, Any]:
    if name == "engine":
        return dict(one(name, "Pod")["spec"])
    return dict(one(name, "DaemonSet" if name == "server" else "Deployment")["spec"]["template"]["spec"])


def containers(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (*spec.get("initContainers", []), *spec["containers"])


def socket_folder(name: str) -> str:
    """The host's folder of the volume `sockets`, and its mount point in the container."""
    (volume,) = [each for each in pod(name)["volumes"] if each["name"] == "sockets"]
    (mount,) = [each for each in pod(name)["containers"][0]["volumeMounts"] if each["name"] == "sockets"]
    return f"{volume['hostPath']['path']} {mount['mountPath']}"


def bytes_of(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"Gi": GIB}[unit]


def test_the_server_accepts_its_command_and_settings(tmp_path: Path) -> None:
    settings = one("server", "ConfigMap")["data"]["server.yaml"]
    token = tmp_path / "token"
    token.write_text("a-token-for-the-test-only-0123456789\n")
    token.chmod(0o600)
    assert "/run/secrets/kvstrata/token" in settings
    file = tmp_path / "server.yaml"
    file.write_text(
        settings.replace("/run/secrets/kvstrata/token", str(token)).replace("size_gb: 32", "size_gb: 0.1")
    )
    program, *arguments = pod("server")["containers"][0]["command"]
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
    settings = yaml.safe_load(one("server", "ConfigMap")["data"]["server.yaml"])
    (shm,) = [each for each in pod("server")["volumes"] if each["name"] == "shm"]
    shm_bytes = bytes_of(shm["emptyDir"]["sizeLimit"])
    assert shm["emptyDir"]["medium"] == "Memory"
    assert settings["l1"]["size_gb"] * GIB < shm_bytes
    limits = pod("server")["containers"][0]["resources"]["limits"]
    assert shm_bytes < bytes_of(limits["memory"])


def test_engine_and_server_meet_in_one_folder_as_one_user() -> None:
    server, engine = pod("server"), pod("engine")
    assert server["securityContext"]["runAsUser"] == engine["securityContext"]["runAsUser"]
    assert server["nodeSelector"] == engine["nodeSelector"]
    assert socket_folder("server") == socket_folder("engine")
    command = engine["containers"][0]["command"]
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    settings, notes = load_settings(transfer["kv_connector_extra_config"], {})
    assert not notes
    assert f"--socket-dir={settings.socket_dir}" in server["containers"][0]["command"]


@pytest.mark.parametrize("name", ALL)
def test_kubernetes_takes_it_and_no_container_can_gain_a_right_or_write_outside_its_volumes(name):
    kubernetes_schemas.check(documents(name))
    spec = pod(name)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0 and spec["securityContext"]["runAsGroup"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is ("serviceAccountName" in spec)
    assert not {"hostIPC", "hostPID", "hostNetwork"} & set(spec)
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in containers(spec):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        confined = container["securityContext"]
        assert confined["allowPrivilegeEscalation"] is False
        assert confined["capabilities"]["drop"] == ["ALL"]
        assert not {"privileged", "seccompProfile"} & set(confined)
        # vLLM writes below its home folder.
        assert confined.get("readOnlyRootFilesystem") is (None if container["name"] == "vllm" else True)


def test_only_the_container_that_makes_the_folders_is_root_and_it_may_only_give_them_away() -> None:
    spec = pod("server")
    (folders,), (server,) = spec["initContainers"], spec["containers"]
    assert folders["securityContext"]["capabilities"]["add"] == ["CHOWN", "FOWNER"]
    assert "add" not in server["securityContext"]["capabilities"]
    assert not {"runAsUser", "runAsNonRoot"} & set(server["securityContext"])


def test_folders_are_made_and_made_again_with_the_capabilities_of_their_container(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, as the container has")
    (container,) = pod("server")["initContainers"]
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


@pytest.mark.parametrize("name", GATEWAYS)
def test_the_command_takes_its_settings(name: str, tmp_path: Path) -> None:
    text = one(name, "ConfigMap")["data"]["gateway.yaml"]
    key = tmp_path / "red.key"
    key.write_text("a-key-for-the-test-only-0123456789\n")
    key.chmod(0o600)
    for inside in ("/run/secrets/kvstrata/red.key", "/run/secrets/kvstrata-engines/key"):
        text = text.replace(inside, str(key))
    settings = yaml.safe_load(text)
    account = tmp_path / "account"
    account.mkdir()
    for file in ("token", "namespace"):
        (account / file).write_text("x")
    settings["engines_from"]["kubernetes"]["account_dir"] = str(account)
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(settings))
    program, *arguments = pod(name)["containers"][0]["command"]
    assert program == "lmcache-gateway"
    arguments = [each.replace("/etc/kvstrata", str(tmp_path)) for each in arguments]
    of_pod = os.environ | {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    checked = own_commands.run("kvstrata.cli.gateway", *arguments, "--check", environment=of_pod)
    assert checked.returncode in (0, 75), checked.stderr  # 75: not on this machine
    assert json.loads(checked.stdout)["http"]["host"] == "0.0.0.0"


def test_the_pool_asks_the_picker_that_watches_its_pods() -> None:
    pool = next(each for each in documents("picker") if each["kind"] == "InferencePool")
    service = one("picker", "Service")
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    reference = pool["spec"]["endpointPickerRef"]
    assert (reference["name"], reference["port"]["number"]) == (service["metadata"]["name"], ports["grpc"])
    engines = one("engine", "Service")
    assert engines["spec"]["selector"] == pool["spec"]["selector"]["matchLabels"]
    settings = yaml.safe_load(one("picker", "ConfigMap")["data"]["gateway.yaml"])
    named = settings["engines_from"]["kubernetes"]
    [port] = [each["port"] for each in engines["spec"]["ports"] if each["name"] == named["port_name"]]
    assert named["service"] == engines["metadata"]["name"]
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [port]
    assert engines["spec"]["selector"].items() <= one("engine", "Pod")["metadata"]["labels"].items()


def test_each_pod_is_reached_by_those_alone_that_need_its_ports() -> None:
    doors: dict[str, dict[str, set[int]]] = {}
    for name in ALL:
        policy = one(name, "NetworkPolicy")["spec"]
        [label] = policy["podSelector"]["matchLabels"].values()
        assert policy["policyTypes"] == ["Ingress"]
        for rule in policy["ingress"]:
            ports = {
                port
                for each in rule["ports"]
                for port in range(each["port"], each.get("endPort", each["port"]) + 1)
            }
            for peer in rule["from"]:
                selector = peer["podSelector"]
                who = [*selector.get("matchLabels", {}).values()] or ["the namespace"]
                who = [
                    value for each in selector.get("matchExpressions", []) for value in each["values"]
                ] or who
                for one_of in who:
                    doors.setdefault(label, {}).setdefault(one_of, set()).update(ports)
    assert doors == {
        "kvstrata": {"prometheus": {8080}},
        "kvstrata-gateway": {"the namespace": {8090}, "prometheus": {8090}},
        "kvstrata-picker": {"inference": {9002}, "prometheus": {8090}},
        "vllm": {
            **{ours: {8000, 5557, 5558} for ours in ("kvstrata-gateway", "kvstrata-picker")},
            **{other: {8000} for other in ("inference", "prometheus")},
        },
    }


def test_gateway_and_picker_have_the_engines_key() -> None:
    [env] = one("engine", "Pod")["spec"]["containers"][0]["env"]
    assert env["name"] == "VLLM_API_KEY"
    for name in GATEWAYS:
        [volume] = [each for each in pod(name)["volumes"] if each["name"] == "engine-key"]
        [mount] = [
            each for each in pod(name)["containers"][0]["volumeMounts"] if each["name"] == "engine-key"
        ]
        key = yaml.safe_load(one(name, "ConfigMap")["data"]["gateway.yaml"])["engines_from"]["kubernetes"]
        assert env["valueFrom"]["secretKeyRef"]["name"] == volume["secret"]["secretName"]
        assert key["api_key_file"] == f"{mount['mountPath']}/{env['valueFrom']['secretKeyRef']['key']}"
