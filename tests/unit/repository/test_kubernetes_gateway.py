"""The manifests of gateway and picker. No cluster runs here: schemas and our own `--check` take them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import kubernetes_schemas
from tests.tools.provision import ROOT

FOLDER = ROOT / "configs" / "kubernetes"
NAMES = ("gateway", "picker")


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of a file."""
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def one(name: str, kind: str) -> dict[str, Any]:
    """Its object of this kind, of services the one that has the file's name."""
    [found] = [
        each for each in documents(name) if each["kind"] == kind and each["metadata"]["name"] != "vllm"
    ]
    return found


def pod(name: str) -> dict[str, Any]:
    """The pod of its deployment."""
    return dict(one(name, "Deployment")["spec"]["template"]["spec"])


@pytest.mark.parametrize("name", NAMES)
def test_objects_are_what_kubernetes_takes(name: str) -> None:
    kubernetes_schemas.check(documents(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_command_takes_its_settings(name: str, tmp_path: Path) -> None:
    text = one(name, "ConfigMap")["data"]["gateway.yaml"]
    key = tmp_path / "red.key"
    key.write_text("a-key-for-the-test-only-0123456789\n")
    key.chmod(0o600)
    settings = yaml.safe_load(text.replace("/run/secrets/kvstrata/red.key", str(key)))
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
    checked = subprocess.run(
        [sys.executable, "-m", "kvstrata.cli.gateway", *arguments, "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["http"]["host"] == "0.0.0.0"


def test_the_pool_asks_the_picker_that_watches_its_pods() -> None:
    pool = next(each for each in documents("picker") if each["kind"] == "InferencePool")
    service = one("picker", "Service")
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    reference = pool["spec"]["endpointPickerRef"]
    assert (reference["name"], reference["port"]["number"]) == (service["metadata"]["name"], ports["grpc"])
    engines = next(each for each in documents("picker") if each["metadata"]["name"] == "vllm" and "spec" in each
                   and each["kind"] == "Service")  # fmt: skip
    assert engines["spec"]["selector"] == pool["spec"]["selector"]["matchLabels"]
    settings = yaml.safe_load(one("picker", "ConfigMap")["data"]["gateway.yaml"])
    named = settings["engines_from"]["kubernetes"]
    [port] = [each["port"] for each in engines["spec"]["ports"] if each["name"] == named["port_name"]]
    assert named["service"] == engines["metadata"]["name"]
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [port]
