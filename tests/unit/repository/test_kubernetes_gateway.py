"""The manifests of gateway, picker and engines. No cluster runs here: schemas and our own `--check` take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import kubernetes_schemas, own_commands
from tests.tools.provision import ROOT

FOLDER = ROOT / "configs" / "kubernetes"
NAMES = ("gateway", "picker")


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of a file."""
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def one(name: str, kind: str) -> dict[str, Any]:
    """Its object of this kind."""
    [found] = [each for each in documents(name) if each["kind"] == kind]
    return found


def pod(name: str) -> dict[str, Any]:
    """The pod of its deployment."""
    return dict(one(name, "Deployment")["spec"]["template"]["spec"])


@pytest.mark.parametrize("name", [*NAMES, "engine", "server"])
def test_objects_are_what_kubernetes_takes(name: str) -> None:
    kubernetes_schemas.check(documents(name))


@pytest.mark.parametrize("name", NAMES)
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
    service = settings["engines_from"]["kubernetes"]
    service |= {"account_dir": str(account), "api_url": "https://127.0.0.1:6443"}
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(settings))
    program, *arguments = pod(name)["containers"][0]["command"]
    assert program == "lmcache-gateway"
    arguments = [each.replace("/etc/kvstrata", str(tmp_path)) for each in arguments]
    checked = own_commands.run("kvstrata.cli.gateway", *arguments, "--check")
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
    for name in (*NAMES, "engine", "server"):
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
    for name in NAMES:
        [volume] = [each for each in pod(name)["volumes"] if each["name"] == "engine-key"]
        [mount] = [
            each for each in pod(name)["containers"][0]["volumeMounts"] if each["name"] == "engine-key"
        ]
        key = yaml.safe_load(one(name, "ConfigMap")["data"]["gateway.yaml"])["engines_from"]["kubernetes"]
        assert env["valueFrom"]["secretKeyRef"]["name"] == volume["secret"]["secretName"]
        assert key["api_key_file"] == f"{mount['mountPath']}/{env['valueFrom']['secretKeyRef']['key']}"
