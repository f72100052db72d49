"""The shipped manifests, and the Helm chart as Helm itself renders and lints it.

Nothing runs: Kubernetes' schemas and our own `--check` take what is made.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.connectors.settings import load_settings
from tests.harness import kubernetes_schemas, own_commands
from tests.tools import fetch_wheels
from tests.tools.provision import ROOT

FOLDER = ROOT / "configs" / "kubernetes"
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
OF_CHART: dict[str, dict[str, Any]] = {"defaults": {}, "everything": EVERYTHING, "changed": CHANGED}
MANIFESTS = ("engine", "gateway", "picker", "server")
rare = [pytest.param(case, marks=pytest.mark.long) for case in ("defaults", "changed")]
by_case = pytest.mark.parametrize("case", ["manifests", "everything", *rare])
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

Objects = list[dict[str, Any]]


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
    return dict(zip(OF_CHART, helm(*OF_CHART.values()), strict=True))


@pytest.fixture
def found(request: pytest.FixtureRequest, case: str) -> Objects:
    """The objects of a case."""
    return manifests() if case == "manifests" else rendered(request.getfixturevalue("told"), case)


def manifests(*names: str) -> Objects:
    texts = ((FOLDER / f"{name}.yaml").read_text() for name in names or MANIFESTS)
    return [each for text in texts for each in yaml.safe_load_all(text)]


def rendered(told: dict[str, dict[str, Any]], case: str) -> Objects:
    texts = [text for name, text in told[case]["rendered"].items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def part_of(thing: dict[str, Any]) -> str:
    """The component that an object belongs to."""
    metadata = thing["metadata"]
    labels = metadata.get("labels", {})
    name = labels.get("app.kubernetes.io/component") or labels.get("app") or metadata["name"]
    return {"kvstrata": "server", "vllm": "engines"}.get(name, str(name).removeprefix("kvstrata-"))


def one(found: Objects, kind: str, part: str) -> dict[str, Any]:
    """The object of a kind that belongs to a component."""
    [each] = [each for each in found if (each["kind"], part_of(each)) == (kind, part)]
    return each


def settings_of(found: Objects, part: str) -> dict[str, Any]:
    [text] = one(found, "ConfigMap", part)["data"].values()
    return dict(yaml.safe_load(text))


def pods(found: Objects) -> Iterator[dict[str, Any]]:
    """Templates of pods, and pods."""
    return (
        each if each["kind"] == "Pod" else each["spec"]["template"]
        for each in found
        if each["kind"] == "Pod" or "template" in each.get("spec", {})
    )


def pod(found: Objects, part: str) -> dict[str, Any]:
    [spec] = [each["spec"] for each in pods(found) if part_of(each) == part]
    return dict(spec)


def volume(spec: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """(A volume of a pod, the place where its first container has it)"""
    [volume] = [each for each in spec["volumes"] if each["name"] == name]
    [place] = [each["mountPath"] for each in spec["containers"][0]["volumeMounts"] if each["name"] == name]
    return volume, place


def gib(quantity: str) -> int:
    number = re.fullmatch(r"(\d+)Gi", quantity)
    assert number is not None
    return int(number[1])


# --- manifests and chart -----------------------------------------------------------------------------------


@by_case
def test_kubernetes_takes_what_is_made(found: Objects, case: str) -> None:
    kubernetes_schemas.check(found)


@by_case
def test_pods_are_confined_and_have_what_they_mount(found: Objects, case: str) -> None:
    for made in pods(found):
        spec = made["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == OF_CHART.get(case, {}).get("uid", 1_000)
        assert spec["securityContext"]["runAsGroup"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is ("serviceAccountName" in spec)
        assert not {"hostIPC", "hostPID", "hostNetwork"} & set(spec)
        used = set()
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            confined = container["securityContext"]
            # vLLM writes below its home folder.
            assert confined.get("readOnlyRootFilesystem") is (None if container["name"] == "vllm" else True)
            assert confined["allowPrivilegeEscalation"] is False
            assert confined["capabilities"]["drop"] == ["ALL"]
            assert not {"privileged", "seccompProfile"} & set(confined)
            used |= {each["name"] for each in container["volumeMounts"]}
        assert used == {each["name"] for each in spec["volumes"]}


@by_case
def test_services_and_policies_name_pods_and_ports_that_are_there(found: Objects, case: str) -> None:
    ports = {
        tuple(sorted(made["metadata"]["labels"].items())): {
            port["name"] for each in made["spec"]["containers"] for port in each.get("ports", [])
        }
        for made in pods(found)
    }

    def those(selector: dict[str, str]) -> list[set[str]]:
        return [names for labels, names in ports.items() if selector.items() <= dict(labels).items()]

    def of(selector: dict[str, str]) -> set[str]:
        [names] = those(selector)
        return names

    for each in found:
        spec = each.get("spec", {})
        if part_of(each) == "engines":  # others make their pods
            continue
        if each["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= of(spec["selector"])
        elif each["kind"] in ("Deployment", "DaemonSet", "PodDisruptionBudget"):
            assert of(spec["selector"]["matchLabels"])
        elif each["kind"] == "NetworkPolicy":
            assert those(spec["podSelector"]["matchLabels"]) and all(rule["from"] for rule in spec["ingress"])


ENGINES = {
    **{ours: {8000, 5557, 5558} for ours in ("gateway", "picker")},
    **{other: {8000} for other in ("inference", "prometheus")},
}
GATEWAY = {"the namespace": {8090}, "prometheus": {8090}}
PICKER = {"inference": {9002}, "prometheus": {8090}}
DOORS: dict[str, dict[str, dict[str, set[int]]]] = {
    "manifests": {"server": {"prometheus": {8080}}, "gateway": GATEWAY, "picker": PICKER, "engines": ENGINES},
    "everything": {
        "server": {
            "server": {0},
            **{follower: {8500} for follower in ("controller", "gateway", "picker")},
            "prometheus": {8080},
        },
        "controller": {**{member: {8400} for member in ("server", "gateway", "picker")}, "prometheus": {9000}},
        "gateway": {**GATEWAY, "gateway": {9004}},
        "picker": PICKER,
        "engines": ENGINES,
    },
}  # fmt: skip


def doors(found: Objects) -> dict[str, dict[str, set[int]]]:
    """By component: who reaches which of its ports; all of them: {0}."""
    told: dict[str, dict[str, set[int]]] = {}
    for each in found:
        if each["kind"] != "NetworkPolicy":
            continue
        assert each["spec"]["policyTypes"] == ["Ingress"]
        those = told.setdefault(part_of(each), {})
        for rule in each["spec"]["ingress"]:
            assert rule["from"], "nobody would mean everybody"
            ports = {
                number
                for port in rule.get("ports", [{"port": 0}])
                for number in range(port["port"], port.get("endPort", port["port"]) + 1)
            }
            for peer in rule["from"]:
                selector = peer["podSelector"]
                labels = selector.get("matchLabels", {})
                who = [
                    labels.get("app.kubernetes.io/component") or next(iter(labels.values()), "the namespace")
                ]
                who = [
                    value for term in selector.get("matchExpressions", []) for value in term["values"]
                ] or who
                for name in who:
                    those.setdefault(name.removeprefix("kvstrata-"), set()).update(ports)
    return told  # fmt: skip


@pytest.mark.parametrize("case", DOORS)
def test_each_pod_is_reached_by_those_alone_that_need_its_ports(found: Objects, case: str) -> None:
    assert doors(found) == DOORS[case]


def test_with_any_values_each_pod_has_a_policy_and_without_prometheus_nobody_reaches_the_server(told):
    assert doors(rendered(told, "changed"))["server"] == {}
    for case in OF_CHART:
        assert {part_of(made) for made in pods(rendered(told, case))} <= set(doors(rendered(told, case)))


@pytest.mark.parametrize("case", ["manifests", "everything"])
def test_the_engines_key_reaches_gateway_and_picker(found: Objects, case: str) -> None:
    [env] = pod(manifests(), "engines")["containers"][0]["env"]
    assert env["name"] == "VLLM_API_KEY"
    for part in ("gateway", "picker"):
        key, place = volume(pod(found, part), "engine-key")
        settings = settings_of(found, part)["engines_from"]["kubernetes"]
        reference = {"name": key["secret"]["secretName"], "key": "key"}
        assert env["valueFrom"]["secretKeyRef"] == reference
        assert settings["api_key_file"] == f"{place}/{reference['key']}"


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
def test_each_command_takes_its_settings(found, case, secrets, tmp_path):
    places = {
        **secrets,
        **dict.fromkeys(("/etc/kvstrata", "/run/kvstrata", "/var/lib/kvstrata"), str(tmp_path)),
    }

    def here(text: str) -> str:
        for inside, outside in places.items():
            text = text.replace(inside, outside)
        return text

    for made in [each for each in found if "template" in each.get("spec", {})]:
        part = part_of(made)
        program, *arguments = made["spec"]["template"]["spec"]["containers"][0]["command"]
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


@pytest.mark.parametrize(
    ("case", "l1_gib", "drain_s"), [("manifests", 32, 60), ("defaults", 32, 60), ("changed", 11, 5)]
)
def test_memory_follows_l1_and_a_stop_waits_for_the_drain(found, case, l1_gib, drain_s):
    spec = pod(found, "server")
    size_gib, limit_gib = l1_gib + 1, gib(spec["containers"][0]["resources"]["limits"]["memory"])
    assert volume(spec, "shm")[0]["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{size_gib}Gi"}
    assert size_gib < limit_gib <= size_gib + 4 and settings_of(found, "server")["l1"]["size_gb"] <= l1_gib
    assert pod(found, "gateway")["terminationGracePeriodSeconds"] == drain_s + 10


# --- manifests ---------------------------------------------------------------------------------------------


def test_engine_and_server_meet_in_one_folder_as_one_user() -> None:
    server, engine = pod(manifests(), "server"), pod(manifests(), "engines")
    assert server["securityContext"]["runAsUser"] == engine["securityContext"]["runAsUser"]
    assert server["nodeSelector"] == engine["nodeSelector"]
    assert (
        volume(server, "sockets")[0]["hostPath"]["path"] == volume(engine, "sockets")[0]["hostPath"]["path"]
    )
    assert volume(server, "sockets")[1] == volume(engine, "sockets")[1]
    command = engine["containers"][0]["command"]
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    settings, notes = load_settings(transfer["kv_connector_extra_config"], {})
    assert not notes
    assert f"--socket-dir={settings.socket_dir}" in server["containers"][0]["command"]


def test_only_the_container_that_makes_the_folders_is_root_and_it_may_only_give_them_away() -> None:
    spec = pod(manifests(), "server")
    (folders,), (server,) = spec["initContainers"], spec["containers"]
    assert folders["securityContext"]["capabilities"]["add"] == ["CHOWN", "FOWNER"]
    assert "add" not in server["securityContext"]["capabilities"]
    assert not {"runAsUser", "runAsNonRoot"} & set(server["securityContext"])


def test_folders_are_made_and_made_again_with_the_capabilities_of_their_container(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, as the container has")
    (container,) = pod(manifests(), "server")["initContainers"]
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


def test_the_pool_asks_the_picker_that_watches_its_pods() -> None:
    found = manifests()
    [pool] = [each for each in found if each["kind"] == "InferencePool"]
    service, engines = one(found, "Service", "picker"), one(found, "Service", "engines")
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    reference = pool["spec"]["endpointPickerRef"]
    assert (reference["name"], reference["port"]["number"]) == (service["metadata"]["name"], ports["grpc"])
    assert engines["spec"]["selector"] == pool["spec"]["selector"]["matchLabels"]
    named = settings_of(found, "picker")["engines_from"]["kubernetes"]
    [port] = [each["port"] for each in engines["spec"]["ports"] if each["name"] == named["port_name"]]
    assert named["service"] == engines["metadata"]["name"]
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [port]
    assert engines["spec"]["selector"].items() <= one(found, "Pod", "engines")["metadata"]["labels"].items()


# --- the chart ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", OF_CHART)
def test_helm_finds_nothing_wrong(told: dict[str, dict[str, Any]], case: str) -> None:
    report = told[case]["report"]
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


def test_each_component_is_there_only_if_it_is_enabled(told: dict[str, dict[str, Any]]) -> None:
    parts = {case: {part_of(made) for made in pods(rendered(told, case))} for case in OF_CHART}
    assert parts["defaults"] == {"server", "gateway"}
    assert parts["everything"] == {"server", "controller", "gateway", "picker"}
    assert parts["changed"] == {"server", "gateway", "picker"}
    kinds = {each["kind"] for each in rendered(told, "changed")}
    assert "InferencePool" not in kinds and "NetworkPolicy" in kinds


def test_a_node_gets_its_own_keys_of_the_cluster_alone(told: dict[str, dict[str, Any]]) -> None:
    sets = [each for each in rendered(told, "everything") if each["kind"] == "DaemonSet"]
    nodes = []
    for each in sets:
        spec = each["spec"]["template"]["spec"]
        [term] = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        [node] = term["matchFields"][0]["values"]
        named = {volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
        assert named == {"kvstrata-http-token", f"kvstrata-cluster-keys-{node}"}
        nodes.append(node)
    assert nodes == EVERYTHING["controller"]["nodes"]
    selectors = [each["spec"]["selector"]["matchLabels"] for each in sets]
    assert selectors[0] != selectors[1]


@pytest.mark.parametrize("part", ["gateway", "picker", "server"])
def test_pods_are_those_of_the_manifests(told: dict[str, dict[str, Any]], part: str) -> None:
    wanted = pod(manifests(), part)
    made = pod(rendered(told, "defaults" if part == "server" else "everything"), part)
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
