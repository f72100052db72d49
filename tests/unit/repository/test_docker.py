"""The files under docker/. No container engine runs here: they are parsed, and our own `--check` takes all commands."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import yaml

from tests.harness import own_commands
from tests.harness.redis_server import RedisServer
from tests.unit.repository.test_pages import ROOT

DOCKER = ROOT / "docker"
COMPOSE_FILES = sorted(DOCKER.glob("compose*.yaml"))


SECRETS = {"http-token", "redis-password", "redis.conf", "l2-key"}
"""Files that the README's commands make."""


def make_secrets(folder: Path) -> None:
    """Run the README's commands that make the secrets in this folder."""
    before, compose, _ = (DOCKER / "README.md").read_text().partition("\ndocker compose")
    assert compose
    commands = before.partition("```\n")[2]
    subprocess.run(["bash", "-euc", f"umask 077\n{commands}"], cwd=folder, check=True, timeout=60)


def services(file: Path) -> dict[str, dict[str, Any]]:
    """Services of one file merged over those of compose.yaml, as users combine them."""
    merged: dict[str, dict[str, Any]] = {}
    for source in dict.fromkeys([DOCKER / "compose.yaml", file]):
        for name, service in yaml.safe_load(source.read_text())["services"].items():
            merged[name] = merged.get(name, {}) | service
    return merged


@pytest.mark.parametrize("file", COMPOSE_FILES, ids=lambda file: file.name)
def test_the_server_of_each_compose_file_accepts_its_command_line(file: Path, tmp_path: Path) -> None:
    command = services(file)["kvstrata"]["command"]
    assert command[0] == "lmcache-server"
    make_secrets(tmp_path)
    settings = tmp_path / "server.yaml"
    text = (DOCKER / "server.yaml").read_text()
    for inside, outside in {
        "/run/secrets/": f"{tmp_path}/",
        "/run/kvstrata": str(tmp_path / "sockets"),
    }.items():
        assert inside in text
        text = text.replace(inside, outside)
    settings.write_text(text)
    arguments = [
        argument.replace("/etc/kvstrata/server.yaml", str(settings)).replace("/run/secrets/", f"{tmp_path}/")
        for argument in command[1:]
    ]
    checked = own_commands.run("kvstrata.cli.server", *arguments, "--check")
    assert checked.returncode in (0, 75), checked.stderr  # 75: not on this machine
    assert len(json.loads(checked.stdout)["l2_adapters"]) == (1 if file.name == "compose.yaml" else 2)


@pytest.mark.parametrize("file", COMPOSE_FILES, ids=lambda file: file.name)
def test_files_and_ports_of_a_compose_file_exist_and_are_local(file: Path) -> None:
    base = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    secrets = base["secrets"] | yaml.safe_load(file.read_text()).get("secrets", {})
    assert {Path(secret["file"]).name for secret in secrets.values()} <= SECRETS
    merged = services(file)
    for name, service in merged.items():
        assert ("image" in service) or ("build" in service), name
        assert set(service.get("depends_on", [])) <= set(merged), name
        assert set(service.get("secrets", [])) <= set(secrets), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in base["volumes"], volume
        # Published ports are reachable from this machine alone.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


@pytest.mark.parametrize("file", COMPOSE_FILES, ids=lambda file: file.name)
def test_no_service_is_root_or_can_write_outside_its_volumes(file: Path) -> None:
    for name, service in services(file).items():
        uid, _, gid = service["user"].partition(":")
        assert int(uid) > 0 and int(gid) >= 0, name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"] and "cap_add" not in service, name
        # Nothing else: `seccomp:unconfined` would stand here too.
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "pid", "ipc", "network_mode", "devices"} & set(service), name
        folders = {folder.partition(":")[0] for folder in service["tmpfs"]}
        assert "/tmp" in folders and all("size=" in folder for folder in service["tmpfs"]), name


def test_the_image_runs_as_the_user_of_the_compose_file() -> None:
    image = (DOCKER / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    (user,) = re.findall(r"^USER (.*)$", image, re.MULTILINE)
    assert user == services(DOCKER / "compose.yaml")["kvstrata"]["user"] == "1000:1000"
    # Nothing that the image does as root comes after it.
    assert not re.search(r"^(RUN|COPY|ADD) ", image.partition("\nUSER ")[2], re.MULTILINE)


def test_each_host_that_an_adapter_connects_to_is_a_service() -> None:
    for file in COMPOSE_FILES:
        merged = services(file)
        for argument in merged["kvstrata"]["command"]:
            if argument.startswith("--l2-adapter="):
                entry = json.loads(argument.partition("=")[2])
                hosts = [
                    urlsplit(entry.get("url", "")).hostname,
                    str(entry.get("master_server_addr", "")).partition(":")[0],
                ]
                assert {host for host in hosts if host} <= set(merged)


def test_redis_asks_for_the_password_that_the_server_has(tmp_path: Path) -> None:
    make_secrets(tmp_path)
    command = services(DOCKER / "compose.redis.yaml")["redis"]["command"]

    class Composed(RedisServer):
        def _arguments(self) -> list[str]:
            settings = [str(word).replace("/run/secrets/", f"{tmp_path}/") for word in command[1:]]
            return [*settings, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(tmp_path)]

    # It runs once it has answered with the password.
    server = Composed(tmp_path / "redis", password=(tmp_path / "redis-password").read_text().strip())
    with server, redis.Redis("127.0.0.1", server.port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_the_image_is_built_from_existing_files_and_extras(name: str) -> None:
    import tomllib

    text = (DOCKER / name).read_text()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"\[([a-z_,]+)\]\"", text):
        assert set(named.split(",")) <= set(extras)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_an_image_takes_from_a_registry_what_a_lock_pins_alone(name: str) -> None:
    text = re.sub(r"\\\n", "", (DOCKER / name).read_text())
    steps = re.findall(r"((?:\w+=\S+ )*(?:python3 -m )?pip (?:install|wheel) [^&\n]*)", text)
    assert len(steps) >= 3
    for step in steps:
        pinned = "--require-hashes" in step and re.search(r"-r requirements/[\w-]+\.lock", step)
        own = step.split()[-1] in (".", "/wheels/*.whl") and ("--no-deps" in step)
        assert (
            pinned
            or "--no-index" in step
            or (own and ("--no-build-isolation" in step or "PIP_NO_INDEX=1" in step))
        ), step
