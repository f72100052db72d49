"""Storage adapters that live in packages of their own, one in Python and one in C++ built against the headers alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerFailed, ServerProcess

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
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from kvstrata.cli import main; raise SystemExit(main())",
            "--native-include-dir",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
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


@pytest.mark.long
def test_a_class_of_a_module_on_the_path_serves_without_packaging(tmp_path: Path) -> None:
    adapter = {
        "type": "plugin",
        "module_path": "kvstrata_sqlite",
        "class_name": "SqliteAdapter",
        "adapter_params": {"path": str(tmp_path / "kv.sqlite"), "capacity_gb": 1},
    }
    source = EXAMPLES / "external_python_adapter" / "src"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), *sys.path])}
    flags = ("--l2-adapter", json.dumps(adapter))
    with ServerProcess(tmp_path, l1_mb=16, l2="embedded", flags=flags, environment=environment) as server:
        server.start()
        assert list(server.get("/v1/status")["l2_store"]["adapters"]) == ["plugin-0"]
