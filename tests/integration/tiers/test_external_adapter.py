"""Adapters in packages of their own and connectors in C++: what they are given, and calls that never end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import own_commands
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.http_read import read
from tests.harness.own_process import ServerFailed
from tests.harness.server_process import ServerProcess
from tests.integration.tiers.probe_adapter import compile_probe, entry_of, probe_adapter

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TYPES = {"external_python_adapter": "sqlite", "external_native_adapter": "flat_files"}


class Installed(NamedTuple):
    """One of the packages, installed into a folder; nothing else is changed."""

    source: Path
    type: str
    environment: dict[str, str]

    def adapter(self, folder: Path, isolation: str) -> str:
        """The JSON of an adapter that keeps its records below `folder`."""
        path = {
            "sqlite": {"path": str(folder / "kv.sqlite")},
            "flat_files": {"base_path": str(folder / "kv")},
        }
        return json.dumps({"type": self.type, "capacity_gb": 1, "isolation": isolation, **path[self.type]})


@pytest.fixture(
    scope="module",
    params=["external_python_adapter", pytest.param("external_native_adapter", marks=pytest.mark.long)],
)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("external")
    source = EXAMPLES / request.param
    shutil.copytree(source, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "*.so"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    done = subprocess.run(
        [*command, "--target", str(folder / "site"), str(folder / "source")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    return Installed(source, TYPES[request.param], {**os.environ, "PYTHONPATH": path})


@pytest.mark.long
def test_the_include_folder_has_what_a_connector_needs() -> None:
    done = own_commands.run("kvstrata", "--native-include-dir")
    assert (Path(done.stdout.strip()) / "kvstrata" / "connector.h").is_file()


@pytest.mark.long
def test_the_packages_own_tests_pass(package: Installed, tmp_path: Path) -> None:
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(settings)]
    done = subprocess.run(
        [*command, str(package.source / "tests")],
        env=package.environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("isolation", ["in_process", pytest.param("process", marks=pytest.mark.long)])
def test_a_server_finds_the_adapter_by_its_type_and_keeps_chunks_in_it(package, tmp_path, isolation):
    flags = ("--l2-adapter", package.adapter(tmp_path, isolation))
    with ServerProcess(
        tmp_path / "server",
        l1_mb=64,
        l2="embedded",
        chunk_tokens=CHUNK_TOKENS,
        flags=flags,
        environment=package.environment,
    ) as server:
        server.start()
        with CacheEngine(server.socket_dir, model="external") as engine:
            engine.connect()
            engine.stored(prompt(6))
            name = f"{package.type}-0"
            eventually(
                "all chunks are in L2",
                lambda: server.get("/v1/status")["l2_store"]["adapters"][name]["outcomes"].get("stored") == 6,
            )
        server.kill()
        server.wipe_segment()
        server.start()
        with CacheEngine(server.socket_dir, model="external") as engine:
            engine.connect()
            assert engine.hit(prompt(7)) == 6


@pytest.mark.long
def test_wrong_fields_stop_the_start_by_name(package: Installed, tmp_path: Path) -> None:
    wrong = json.dumps({"type": package.type, "capacity_gb": "much"})
    with (
        ServerProcess(
            tmp_path, l1_mb=64, l2="embedded", flags=("--l2-adapter", wrong), environment=package.environment
        ) as server,
        pytest.raises(ServerFailed, match=r"l2_adapters\[0\]\.(path|base_path|capacity_gb): must"),
    ):
        server.start()


ROOT = Path(__file__).resolve().parents[3]
NAME = "plugin-0"


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_probe(tmp_path_factory.mktemp("probe"))


def server_with(folder: Path, entry: dict[str, Any]) -> ServerProcess:
    return ServerProcess(
        folder / "server",
        l1_mb=64,
        l2="embedded",
        chunk_tokens=CHUNK_TOKENS,
        flags=("--l2-adapter", json.dumps(entry)),
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def clear_l1(server: ServerProcess) -> None:
    def emptied() -> bool:
        read(f"{server.url}/v1/clear", body={"tier": "l1"})
        return server.get("/v1/status")["pool"]["entries"]["ready"] == 0

    eventually("L1 is empty", emptied)


def of_adapter(server: ServerProcess) -> dict[str, Any]:
    return server.get("/v1/status")["l2_adapters"][NAME]


@pytest.mark.parametrize("isolation", ["in_process", pytest.param("process", marks=pytest.mark.long)])
def test_a_connector_learns_where_the_pool_lies_and_every_record_lies_in_it(probe, tmp_path, isolation):
    with server_with(tmp_path, entry_of(probe, isolation)) as server:
        server.start()
        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            engine.stored(prompt(5))
            eventually("all is put", lambda: of_adapter(server)["numbers"].get("inside") == 5)
            clear_l1(server)
            assert engine.hit(prompt(5)) == 5
            eventually("all is loaded", lambda: of_adapter(server)["numbers"].get("inside") == 10)
        assert of_adapter(server)["numbers"] == {
            "region_bytes": server.ready["l1_bytes"], "inside": 10, "outside": 0,
        }  # fmt: skip
    warned = "l2_adapter_may_hang" in server.log.read_text()
    assert warned == (isolation == "in_process")


@pytest.mark.parametrize("drains", [False, True])
async def test_an_adapter_reports_what_its_connector_reports_about_its_calls(probe, drains):
    adapter = probe_adapter(str(probe), drains)
    assert adapter.capabilities.quiesce == ("drain" if drains else "never")
    await adapter.close()
