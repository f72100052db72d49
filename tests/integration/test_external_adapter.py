"""A storage adapter in C++ that lives in a package of its own: built against the headers alone, found by its type."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerFailed, ServerProcess

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "examples" / "external_native_adapter"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the package installed into it; nothing else is changed."""
    folder = tmp_path_factory.mktemp("external")
    shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "*.so"))
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
    yield folder / "site"


def environment(site: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
    }


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


def test_the_contract_suite_passes_over_it(site: Path, tmp_path: Path) -> None:
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            str(settings),
            str(PACKAGE / "tests"),
        ],
        env=environment(site),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "failed" not in done.stdout


def test_a_server_keeps_chunks_in_it_over_a_restart(site: Path, tmp_path: Path) -> None:
    records = tmp_path / "records"
    adapter = {"type": "flat_files", "base_path": str(records), "capacity_gb": 1}
    flags = ("--l2-adapter", json.dumps(adapter))
    with ServerProcess(
        tmp_path / "server",
        l1_mb=64,
        l2="embedded",
        chunk_tokens=CHUNK_TOKENS,
        flags=flags,
        environment=environment(site),
    ) as server:
        server.start()
        with CacheEngine(server.socket_dir, model="external") as engine:
            engine.connect()
            engine.stored(prompt(6))
            eventually(
                "all chunks are files", lambda: len([f for f in records.iterdir() if not f.suffix]) == 6
            )
        server.kill()
        shutil.rmtree(server.segment_dir)
        server.start()
        with CacheEngine(server.socket_dir, model="external") as engine:
            engine.connect()
            assert engine.hit(prompt(6)) == 6


def test_a_type_that_is_not_installed_is_named(tmp_path: Path) -> None:
    flags = ("--l2-adapter", json.dumps({"type": "flat_files", "base_path": str(tmp_path)}))
    with (
        ServerProcess(tmp_path / "server", l1_mb=64, l2="embedded", flags=flags) as server,
        pytest.raises(ServerFailed, match=r"l2_adapters\[0\]\.type: unknown adapter 'flat_files'"),
    ):
        server.start()
