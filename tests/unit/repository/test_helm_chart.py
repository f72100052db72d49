"""The Helm chart, as Helm itself renders and lints it. Nothing runs: schemas and our own `--check` take the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.harness import kubernetes_schemas, own_commands
from tests.tools import fetch_wheels
from tests.tools.provision import ROOT

CHART = ROOT / "docker" / "helm" / "kvstrata"
NODE = "node-a.example"
EVERYTHING = {
    "controller": {"enabled": True, "nodes": [NODE, "node-b"]},
    "gateway": {"settings": {"sharing": {"listen": "127.0.0.1:9004"}}},
    "picker": {"enabled": True},
}
CHANGED = {
    "image": {"repository": "registry.example/kvstrata", "tag": "1.2"},
    "uid": 2_000,
    "server": {"disk": {"path": ""}, "settings": {"l1": {"size_gb": 10.5}}, "args": ["--p2p-listen=$(POD_IP):5600"]},
    "gateway": {"keysSecret": "", "settings": {"tenants": None, "insecure": True, "drain_s": 5}},
    "picker": {"enabled": True, "pool": {"create": False}},
    "engines": {"service": ""},
    "metricsFrom": [],
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {"defaults": {}, "everything": EVERYTHING, "changed": CHANGED}
by_case = pytest.mark.parametrize(
    "case", ["everything", *(pytest.param(case, marks=pytest.mark.long) for case in ("defaults", "changed"))]
)
_CODE = """import json, sys, helm_python as helm
told = []
with helm.Chart.load(sys.argv[1]) as chart:
    for values in json.load(sys.stdin):
        try:
            chart.validate_schema(chart.merge_values(values))
            rendered = chart.render(values, name="kv", namespace="ai")
            report = helm.lint(sys.argv[1], values, strict=True, kube_version="v1.31.0")
            told.append({"rendered": rendered, "report": report})
        except helm.HelmError as error:
            told.append({"error": str(error)})
json.dump(told, sys.stdout)"""


def helm(*values: dict[str, Any]) -> list[dict[str, Any]]:
    """What Helm makes of the chart with each of these values: `rendered` and `report`, or `error`."""
    environment = fetch_wheels.environment(fetch_wheels.HELM)
    ran = subprocess.run(
        [sys.executable, "-c", _CODE, str(CHART)],
        input=json.dumps(values),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2_000:]
    return list(json.loads(ran.stdout))


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, Any]]:
    """What Helm makes of each case."""
    return dict(zip(CASES, helm(*CASES.values()), strict=True))


def objects(told: dict[str, dict[str, Any]], case: str) -> list[dict[str, Any]]:
    texts = [text for name, text in told[case]["rendered"].items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def one(found: list[dict[str, Any]], kind: str, part: str) -> dict[str, Any]:
    """The object of a kind that belongs to a component."""
    [each] = [each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, f"kv-{part}")]
    return each


def part_of(found: dict[str, Any]) -> str:
    """The component that an object belongs to."""
    return str(found["metadata"]["labels"]["app.kubernetes.io/component"])


def pods(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (each["spec"]["template"] for each in found if "template" in each.get("spec", {}))


@by_case
def test_helm_finds_nothing_wrong_and_kubernetes_takes_what_it_makes(told, case):
    report = told[case]["report"]
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]
    kubernetes_schemas.check(objects(told, case))


def test_each_component_is_there_only_if_it_is_enabled(told: dict[str, dict[str, Any]]) -> None:
    parts = {case: {part_of(pod) for pod in pods(objects(told, case))} for case in CASES}
    assert parts["defaults"] == {"server", "gateway"}
    assert parts["everything"] == {"server", "controller", "gateway", "picker"}
    assert parts["changed"] == {"server", "gateway", "picker"}
    kinds = {each["kind"] for each in objects(told, "changed")}
    assert "InferencePool" not in kinds and "NetworkPolicy" in kinds


@by_case
def test_pods_are_confined_and_have_what_they_mount(told: dict[str, dict[str, Any]], case: str) -> None:
    for pod in pods(objects(told, case)):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == CASES[case].get("uid", 1_000)
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is ("serviceAccountName" in spec)
        volumes = {each["name"] for each in spec["volumes"]}
        used = set()
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            confined = container["securityContext"]
            assert confined["readOnlyRootFilesystem"] is True
            assert confined["allowPrivilegeEscalation"] is False
            assert confined["capabilities"]["drop"] == ["ALL"]
            used |= {each["name"] for each in container["volumeMounts"]}
        assert used == volumes


@by_case
def test_services_and_policies_name_pods_and_ports_that_are_there(told, case):
    found = objects(told, case)
    ports = {
        tuple(sorted(pod["metadata"]["labels"].items())): {
            port["name"] for each in pod["spec"]["containers"] for port in each.get("ports", [])
        }
        for pod in pods(found)
    }

    def those(selector: dict[str, str]) -> list[set[str]]:
        return [names for labels, names in ports.items() if selector.items() <= dict(labels).items()]

    def of(selector: dict[str, str]) -> set[str]:
        [names] = those(selector)
        return names

    for each in found:
        spec = each.get("spec", {})
        if part_of(each) == "engines":
            continue
        if each["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= of(spec["selector"])
        elif each["kind"] in ("Deployment", "DaemonSet", "PodDisruptionBudget"):
            assert of(spec["selector"]["matchLabels"])
        elif each["kind"] == "NetworkPolicy":
            assert those(spec["podSelector"]["matchLabels"]) and all(rule["from"] for rule in spec["ingress"])


def doors(found: list[dict[str, Any]]) -> dict[str, dict[str, set[int]]]:
    """By component: who reaches which of its ports; all of them: {0}."""
    told: dict[str, dict[str, set[int]]] = {}
    for each in found:
        if each["kind"] == "NetworkPolicy":
            assert each["spec"]["policyTypes"] == ["Ingress"]
            those = told.setdefault(part_of(each), {})
            for rule in each["spec"]["ingress"]:
                assert rule["from"], "nobody would mean everybody"
                for peer in rule["from"]:
                    labels = peer["podSelector"].get("matchLabels", {"": "the namespace"})
                    who = labels.get("app.kubernetes.io/component") or next(iter(labels.values()))
                    those.setdefault(who, set()).update(
                        port["port"] for port in rule.get("ports", [{"port": 0}])
                    )
    return told


def test_each_pod_is_reached_by_those_alone_that_need_its_ports(told: dict[str, dict[str, Any]]) -> None:
    assert doors(objects(told, "everything")) == {
        "server": {
            "server": {0},
            **{follower: {8500} for follower in ("controller", "gateway", "picker")},
            "prometheus": {8080},
        },
        "controller": {
            "server": {8400},
            "gateway": {8400},
            "picker": {8400},
            "prometheus": {9000},
        },
        "gateway": {"the namespace": {8090}, "prometheus": {8090}, "gateway": {9004}},
        "picker": {"inference": {9002}, "prometheus": {8090}},
        "engines": {
            **{ours: {8000, 5557, 5558} for ours in ("gateway", "picker")},
            **{other: {8000} for other in ("inference", "prometheus")},
        },
    }
    assert doors(objects(told, "changed"))["server"] == {}  # without Prometheus nobody, and not everybody
    for case in CASES:
        found = objects(told, case)
        assert {part_of(pod) for pod in pods(found)} <= set(doors(found))


def test_a_node_gets_its_own_keys_of_the_cluster_alone(told: dict[str, dict[str, Any]]) -> None:
    sets = [each for each in objects(told, "everything") if each["kind"] == "DaemonSet"]
    nodes = []
    for each in sets:
        spec = each["spec"]["template"]["spec"]
        [term] = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        [node] = term["matchFields"][0]["values"]
        secrets = {volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
        assert secrets == {"kvstrata-http-token", f"kvstrata-cluster-keys-{node}"}
        nodes.append(node)
    assert nodes == EVERYTHING["controller"]["nodes"]
    selectors = [each["spec"]["selector"]["matchLabels"] for each in sets]
    assert selectors[0] != selectors[1]


def test_the_engines_key_reaches_gateway_and_picker(told: dict[str, dict[str, Any]]) -> None:
    for part in ("gateway", "picker"):
        found = objects(told, "everything")
        spec = one(found, "Deployment", part)["spec"]["template"]["spec"]
        settings = yaml.safe_load(one(found, "ConfigMap", part)["data"]["gateway.yaml"])
        mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
        [secret] = [each["secret"]["secretName"] for each in spec["volumes"] if each["name"] == "engine-key"]
        assert settings["engines_from"]["kubernetes"]["api_key_file"] == f"{mounts['engine-key']}/key"
        [engine] = [
            each
            for each in yaml.safe_load_all((ROOT / "configs/kubernetes/engine.yaml").read_text())
            if each["kind"] == "Pod"
        ]
        [env] = engine["spec"]["containers"][0]["env"]
        assert env["valueFrom"]["secretKeyRef"] == {"name": secret, "key": "key"}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files for those that pods mount, by their places there."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "account").mkdir()
    texts = {"token": "a-token-for-the-test-only-0123456789", "red.key": "a-key-for-the-test-only-0123456789"}
    texts["engine.key"] = "a-key-of-engines-for-the-test-0123456789"
    for name, text in {**texts, "account/token": "x", "account/namespace": "ai"}.items():
        (folder / name).write_text(f"{text}\n")
        (folder / name).chmod(0o600)
    made = [sys.executable, "-m", "kvstrata", "cluster", "init", str(folder / "keys"), NODE]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    return {
        "/run/secrets/kvstrata-cluster/member.keys": str(folder / "keys" / f"{NODE}.keys"),
        "/run/secrets/kvstrata-cluster/controller.keys": str(folder / "keys" / "controller.keys"),
        "/run/secrets/kvstrata/": f"{folder}/",
        "/run/secrets/kvstrata-engines/key": str(folder / "engine.key"),
        "/var/run/secrets/kubernetes.io/serviceaccount": str(folder / "account"),
        "$(NODE)": NODE,
        "$(POD_IP)": "10.0.0.7",
    }


@by_case
def test_each_command_takes_its_settings(told, case, secrets, tmp_path):
    found = objects(told, case)
    places = {
        **secrets,
        "/etc/kvstrata": str(tmp_path),
        "/run/kvstrata": str(tmp_path),
        "/var/lib/kvstrata": str(tmp_path),
    }

    def here(text: str) -> str:
        for inside, outside in places.items():
            text = text.replace(inside, outside)
        return text

    for each in found:
        if "template" not in each.get("spec", {}):
            continue
        part = part_of(each)
        program, *arguments = each["spec"]["template"]["spec"]["containers"][0]["command"]
        for name, text in one(found, "ConfigMap", part)["data"].items():
            settings = yaml.safe_load(here(text))
            if "engines_from" in settings:
                account = {"account_dir": secrets["/var/run/secrets/kubernetes.io/serviceaccount"]}
                settings["engines_from"]["kubernetes"] |= account
            if "l1" in settings:
                settings["l1"]["size_gb"] = 0.1
            (tmp_path / name).write_text(yaml.safe_dump(settings))
        module = f"kvstrata.cli.{program.removeprefix('lmcache-')}"
        environment = os.environ | {"KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        checked = own_commands.run(module, *map(here, arguments), "--check", environment=environment)
        assert checked.returncode in (0, 75), f"{part}: {checked.stderr}"  # 75: not on this machine
        assert json.loads(checked.stdout)["http"]["host"] == "0.0.0.0"


def test_memory_follows_l1_and_a_stop_waits_for_the_drain(told: dict[str, dict[str, Any]]) -> None:
    for case, l1_gib, drain_s in (("defaults", 32, 60), ("changed", 11, 5)):
        found = objects(told, case)
        spec = one(found, "DaemonSet", "server")["spec"]["template"]["spec"]
        assert spec["containers"][0]["resources"]["limits"]["memory"] == f"{l1_gib + 2}Gi"
        [shm] = [each["emptyDir"] for each in spec["volumes"] if each["name"] == "shm"]
        assert shm == {"medium": "Memory", "sizeLimit": f"{l1_gib + 1}Gi"}
        spec = one(found, "Deployment", "gateway")["spec"]["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] == drain_s + 10


@pytest.mark.parametrize(
    ("kind", "part"), [("Deployment", "gateway"), ("Deployment", "picker"), ("DaemonSet", "server")]
)
def test_pods_are_those_of_the_manifests(told: dict[str, dict[str, Any]], kind: str, part: str) -> None:
    manifests = yaml.safe_load_all((ROOT / f"configs/kubernetes/{part}.yaml").read_text())
    [wanted] = [each["spec"]["template"]["spec"] for each in manifests if each["kind"] == kind]
    made = one(objects(told, "defaults" if part == "server" else "everything"), kind, part)["spec"][
        "template"
    ]["spec"]
    [there], [here] = wanted["containers"], made["containers"]
    assert set(there["command"]) <= set(here["command"])
    for same in ("ports", "readinessProbe", "livenessProbe", "securityContext", "resources"):
        assert here[same] == there[same], same
    assert made["securityContext"] == wanted["securityContext"]
    assert made["terminationGracePeriodSeconds"] == wanted["terminationGracePeriodSeconds"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a component that there is not": ({"gatway": {}}, "gatway"),
    "a value that there is not": ({"gateway": {"replica": 3}}, "replica"),
    "a word for a number": ({"gateway": {"replicas": "two"}}, "replicas"),
    "root": ({"uid": 0}, "uid"),
    "a picker that all may ask": ({"picker": {"enabled": True, "from": []}}, "from"),
    "a cluster without nodes": ({"controller": {"enabled": True}}, "nodes"),
    "no size of L1": ({"server": {"settings": {"l1": {"size_gb": 0}}}}, "size_gb"),
}


def test_wrong_values_are_refused_by_their_names() -> None:
    for (what, (_, name)), found in zip(
        WRONG.items(), helm(*(values for values, _ in WRONG.values())), strict=True
    ):
        assert name in found.get("error", ""), what
